"""That what the project says of its own tests is so: named tests exist, and no entry of the table
of faults is stale."""

import re

import faults
import pytest
import torch
import trust
from places import ROOT
from small import after, images, make_setting, tiny_model

from pflcore import Net, Training
from pflcore.algorithms import FedAvg

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named(text):
    return NAMED.findall(text)


def missing(text):
    """The tests that are named and are not there."""
    out = []
    for file, name in named(text):
        path = ROOT / file
        code = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not re.search(rf"^def {name}\(", code, re.M):
            out.append(f"{file}::{name}")
    return out


@pytest.mark.parametrize("doc", ["docs/determinism.md", "docs/capabilities.md", "CONTRIBUTING.md"])
def test_every_test_that_is_named_exists(doc):
    assert not missing((ROOT / doc).read_text(encoding="utf-8"))


def test_a_test_that_is_not_there_would_be_noticed():
    none = ["tests/test_metrics.py::test_nothing_of_the_kind", "tests/none.py::test_x"]
    assert missing(" ".join(f"`{name}`" for name in none)) == none


@pytest.mark.parametrize("doc, least", [("determinism", 15), ("capabilities", 90)])
def test_every_line_names_its_proof(doc, least):
    text = (ROOT / "docs" / f"{doc}.md").read_text(encoding="utf-8")
    # but for headings
    _, *rows = re.findall(r"^\| (?!\*\*).*", text, re.M)
    assert len(rows) >= least and all(named(row) for row in rows)


def test_no_fault_in_the_table_is_stale():
    """Each old expression stands exactly once in its function, and the fault changes it."""
    table = faults.known()
    assert not faults.stale(table)
    assert sum(f["kind"] == "known" for f in table) >= 66 and len(table) >= 180
    assert len({tuple(sorted(f.items())) for f in table}) == len(table)


def test_a_fault_is_found_by_its_syntax_and_a_stale_one_is_noticed():
    fault = {"where": "pflcore.metrics:best", "old": "a < b", "new": "a <= b"}
    first, last, text = faults.placed(fault, "def best(a, b):\n    return (a\n        <  b)\n")
    assert (first, last) == (2, 3) and text == "def best(a, b):\n    return ((a <= b))\n"
    for source in ("def best(a, b): return a > b", "def best(a, b): return a < b or not a < b"):
        with pytest.raises(ValueError, match=r"stands there [02] times"):
            faults.placed(fault, source)
    kernel = {"where": "csrc/x.h", "old": "a<b;", "new": "a <= b;"}
    assert faults.placed(kernel, "if (x) a  <\n b ;")[2] == "if (x) a <= b;"
    same = faults.known()[-1]
    assert len(faults.stale([{**same, "new": same["old"]}, {**same, "old": "no_such_name"}])) == 2


def test_fresh_faults_keep_clear_of_messages():
    drawn = faults.fresh(5, "any")
    assert drawn == faults.fresh(5, "any")
    assert all(f["source"] != (ROOT / f["where"]).read_text() for f in drawn)
    source = "def f(x):\n    if x > 1:\n        raise ValueError(f'{x + 1}')\n    return x * 2\n"
    assert faults.messages(source) == {2, 3}


@pytest.mark.deep("tests of copies of the tree")
def test_a_fault_is_killed_and_what_is_none_survives(tmp_path):
    class Reached:
        def tests(self, *_):
            return ["tests/test_metrics.py"]

    place, reached = faults.copied(tmp_path / "copy"), dict.fromkeys(faults.SUITES, Reached())
    (fault,) = (f for f in faults.known() if "correction=0" in f["old"])
    assert faults.tried(fault, place, reached) == "fast"
    assert faults.tried({**fault, "new": f"({fault['old']}) + 0"}, place, reached) == "survived"


GOOD = """
import pytest
from hypothesis import given, settings, strategies as st
@settings(max_examples=7)
@given(st.integers())
def test_a(n): pass
def test_b(): pass
def test_c(): pytest.skip("not here")
"""


@pytest.mark.deep("other processes")
def test_figures_are_counted_and_a_broken_test_is_told(tmp_path, capfd):
    tests = tmp_path / "test_some.py"
    tests.write_text(GOOD)
    count = {"passed": 2, "skipped": 1}
    assert trust.tested(str(tests)) == (count, 7, True)
    assert trust.tested(str(tests), "-k", "test_c")[2] is False  # nothing has passed
    tests.write_text(GOOD + "def test_d(): assert 0\ndef test_e(none): pass\n")
    assert trust.tested(str(tests)) == (count | {"failed": 1, "error": 1}, 7, False)
    assert "assert 0" in capfd.readouterr().out


def test_other_numbers_are_other_draws():
    """The same clients in another order: each draws by its number, so the run is another one."""
    s = make_setting(Net(tiny_model()), images((20, 20)), Training(lr=0.1, batch_size=4))
    turned = s._replace(data=s.data.subset([1, 0]))
    one, two = (after(FedAvg(), setting)[0].server["x"] for setting in (s, turned))
    assert not torch.equal(one, two)
