"""That what the project says of its own tests is so: named tests exist, and no entry of the table of faults is stale."""

import ast
import os
import re
import subprocess
import sys

import mutants
import numpy as np
import pytest
import torch
import trust
from places import ROOT
from small import images, make_setting, play, tiny_model

from pflcore import Net, Training
from pflcore.algorithms import FedAvg
from pflcore.local.random import client_seeds, drawn, seed_of, shuffles, uniforms

SEED = 8626582519606759105
SEEDS = [11013291964905100358, 1547676624251085901, 2235132555019676639]
SHUFFLES = [[2, 1, 0, 3, 4], [2, 3, 0, 1, 0], [2, 0, 1, 0, 0]]
UNIFORMS = [0.655553, 0.6287912, 0.5102757, 0.8312893, 0.8451769, 0.9895298]
DRAWN = [245, 302, 253, 125]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named(text):
    return NAMED.findall(text)


def missing(text):
    """The tests that are named and are not there."""
    out = []
    for file, name in named(text):
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
            out.append(f"{file}::{name}")
    return out


@pytest.mark.parametrize("doc", ["docs/determinism.md", "CONTRIBUTING.md"])
def test_every_test_that_is_named_exists(doc):
    assert not missing((ROOT / doc).read_text(encoding="utf-8"))


def test_a_test_that_is_not_there_would_be_noticed():
    assert missing("`tests/test_nn.py::test_nothing_of_the_kind` `tests/none.py::test_x`") == [
        "tests/test_nn.py::test_nothing_of_the_kind",
        "tests/none.py::test_x",
    ]


def test_every_line_about_determinism_names_its_proof():
    rows = [line for line in (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15 and all(named(row) for row in rows)


def test_no_fault_in_the_table_is_stale():
    """Each old text stands exactly once in its file, and the tests beside it are there."""
    assert not mutants.check()
    assert len(mutants.KNOWN) == 66 and len(mutants.SAMPLED) >= 100
    assert len({(m.file, m.old, m.new) for m in mutants.MUTANTS}) == len(mutants.MUTANTS)


def test_a_stale_fault_would_be_noticed(monkeypatch):
    entry = mutants.MUTANTS[-1]
    bad = [
        entry._replace(old="no such text"),
        entry._replace(old="int64_t"),
        entry._replace(new=entry.old),
        entry._replace(tests="ops/test_none.py"),
    ]
    monkeypatch.setattr(mutants, "MUTANTS", bad)
    assert len(mutants.check()) == 4


def test_tests_of_a_fault_run_where_it_was_made(tmp_path):
    """In a copy of the tree, with its own pflcore, and a failing test is a killed fault."""
    place = mutants.copied(tmp_path / "copy")
    metrics, test = place / "pflcore" / "metrics.py", "test_metrics.py -k 'seven_accuracies'"
    where = f"{str(place)!r}, {test!r}, False, {str(tmp_path / 'log')!r}"
    run = f"import sys; sys.path.insert(0, 'tests'); import mutants; mutants.run_tests({where})"
    env = {**os.environ, "PYTHONPATH": str(place)}
    assert subprocess.run([sys.executable, "-c", run], cwd=place, env=env, check=False).returncode == 0
    metrics.write_text(metrics.read_text(encoding="utf-8").replace("kept.std(correction=0)", "kept.std(correction=1)"), encoding="utf-8")
    assert subprocess.run([sys.executable, "-c", run], cwd=place, env=env, check=False).returncode == 1


def test_figures_are_counted_and_a_broken_test_is_told(tmp_path, capfd):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\nfrom hypothesis import given, settings, strategies as st\n"
        "@settings(max_examples=7)\n@given(st.integers())\ndef test_a(n): pass\n"
        "def test_b(): pass\n"
        "def test_c(): pytest.skip('not here')\n"
    )
    assert trust.tested(str(tests)) == ({"passed": 2, "skipped": 1}, 7, True)
    assert trust.tested(str(tests), "-k", "test_c")[2] is False  # nothing has passed
    tests.write_text(tests.read_text() + "def test_d(): assert 0\ndef test_e(none): pass\n")
    assert trust.tested(str(tests)) == ({"passed": 2, "skipped": 1, "failed": 1, "error": 1}, 7, False)
    assert "assert 0" in capfd.readouterr().out


def test_random_numbers_are_these_on_every_machine():
    """Written down once: a function of the key alone, whatever the machine, the process and Python's hash seed."""
    assert seed_of("a", 1, 2.5) == SEED
    seeds = client_seeds(np.array([0, 1, 7]), 0, 3, "fit", 0)
    assert seeds.tolist() == SEEDS
    assert shuffles(seeds, [5, 4, 3]).tolist() == SHUFFLES
    assert [round(float(v), 7) for v in uniforms(seeds, 2).flatten()] == UNIFORMS
    assert drawn(1000, 4, 0, 1, "cohort").tolist() == DRAWN
    assert drawn(16, 4, 0, 1, "cohort").tolist() == [3, 4, 0, 9]  # a quarter of them: all are put in order


def test_other_numbers_are_other_draws():
    """The same clients in another order: each draws by its number, so the run is another one."""
    s = make_setting(Net(tiny_model()), images((20, 20)), Training(lr=0.1, batch_size=4))
    turned = s._replace(data=s.data.subset([1, 0]))
    assert not torch.equal(play(FedAvg(), s, 1)[0][0].g["x"], play(FedAvg(), turned, 1)[0][0].g["x"])
