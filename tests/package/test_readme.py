"""The README's examples run, and the tables name all algorithms.

Where docs/algorithms.md differs, the failing test prints the right table.
"""

import inspect
import re

import pytest
import torch
from places import ROOT

import pflcore
from pflcore.algorithms import ALGORITHMS

README = (ROOT / "README.md").read_text()


def algorithms_table():
    """A Markdown table with the name and description of each algorithm."""
    lines = ["| name | what it is |", "|---|---|"]
    for name, cls in ALGORITHMS.items():
        first = inspect.getdoc(cls).split("\n\n")[0]
        first = first.replace("\n", " ").replace("|", "\\|")
        lines.append(f"| `{name}` | {first} |")
    return "\n".join(lines)


def test_the_table_of_algorithms_is_the_codes():
    table = algorithms_table()
    assert table in (ROOT / "docs/algorithms.md").read_text(), table


def test_the_families_name_every_algorithm_once():
    table = README.split("| family | algorithms |")[1].split("\n\n")[0]
    words = re.findall(r"\w+", re.sub(r"\(.*?\)", "", table))
    assert sorted(word for word in words if word in ALGORITHMS) == sorted(ALGORITHMS)
    assert f"runs {len(ALGORITHMS)} algorithms" in README


def printed(number, capsys):
    """The output of the README's Python example of this number."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    exec(compile(code, f"README, example {number}", "exec"), {"__name__": "readme"})
    return capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 2])
def test_the_examples_run(number, capsys):
    assert printed(number, capsys).strip()


def test_the_simulation_shows_a_gain_of_personal_models(capsys):
    got = dict(line.split() for line in printed(1, capsys).splitlines())
    shown = re.search(r"^```\n(local .*?)```", README, re.DOTALL | re.MULTILINE)[1]
    want = dict(line.split() for line in shown.splitlines())
    assert got.keys() == want.keys()
    for name, accuracy in want.items():
        assert float(got[name]) == pytest.approx(float(accuracy), abs=0.03)
    assert float(got["feddwa"]) > float(got["local"]) > float(got["fedavg"])


def test_cdist_is_wrong_where_the_readme_says_so():
    """torch.cdist has large errors for near models, and pairwise_sqdist small ones.

    The 26 models have 1,000 parameters, which differ by 1e-3 in standard deviation.
    """
    generator = torch.Generator().manual_seed(0)
    models = torch.randn(1000, generator=generator)
    models = models + 1e-3 * torch.randn(26, 1000, generator=generator)
    pairs = torch.triu_indices(26, 26, 1)
    exact = torch.pdist(models.double())

    expanded = torch.cdist(models, models)[pairs[0], pairs[1]].double()
    ours = pflcore.pairwise_sqdist(models)[pairs[0], pairs[1]].sqrt()

    assert 0.1 < ((expanded - exact).abs() / exact).max() < 0.3
    assert ((ours - exact).abs() / exact).max() < 1e-6
