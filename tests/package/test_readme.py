"""The README's examples print what it shows, and its tables name all algorithms.

Where docs/algorithms.md differs, the failing test prints the right list.
"""

import inspect
import os
import re
import shlex

import pytest
import torch
from places import ROOT, ran

import pflcore
from pflcore.algorithms import ALGORITHMS

README = (ROOT / "README.md").read_text()
# A block of code, and the block of its output where one follows.
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$(?:\n```\n(.*?)^```$)?", re.M | re.S)


def algorithms_list():
    """A Markdown list with the name and description of each algorithm."""
    lines = []
    for name, cls in ALGORITHMS.items():
        first = inspect.getdoc(cls).split("\n\n")[0].replace("\n", " ")
        lines.append(f"- `{name}`: {first}")
    return "\n".join(lines)


def test_the_list_of_algorithms_is_the_codes():
    expected = algorithms_list()
    assert expected in (ROOT / "docs/algorithms.md").read_text(), expected


def test_the_families_name_every_algorithm_once():
    table = README.split("| family | algorithms |")[1].split("\n\n")[0]
    words = re.findall(r"\w+", re.sub(r"\(.*?\)", "", table))
    assert sorted(word for word in words if word in ALGORITHMS) == sorted(ALGORITHMS)
    assert f"{len(ALGORITHMS)} published methods" in README


def blocks(language):
    """The README's blocks of a language, with the output that is shown."""
    found = BLOCKS.findall(README)
    return [(code, output) for name, code, output in found if name == language]


def is_near(got, want, within):
    """True for equal words, and for numbers with a point that are near each other."""
    try:
        return abs(float(got) - float(want)) <= within
    except ValueError:
        return got == want


def assert_printed(got, want, within):
    """Asserts that a program printed what the README shows."""
    got_words, want_words = got.split(), want.split()
    assert len(got_words) == len(want_words), got
    for ours, shown in zip(got_words, want_words, strict=True):
        assert is_near(ours, shown, within if "." in shown else 0), got


PYTHON = blocks("python")


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_a_python_example_prints_what_is_shown(number, capsys):
    code, shown = PYTHON[number]
    exec(compile(code, f"README, example {number}", "exec"), {"__name__": "readme"})
    assert shown.strip()
    # Other processors and versions of torch end at other last digits.
    assert_printed(capsys.readouterr().out, shown, within=0.04)


def test_the_simulation_shows_a_gain_of_personal_models():
    (shown,) = (output for _, output in PYTHON if output.startswith("local"))
    accuracy = {
        name: float(value) for name, value in map(str.split, shown.splitlines())
    }
    assert accuracy["feddwa"] > accuracy["local"] > accuracy["fedavg"]


@pytest.mark.deep("a comparison of some seconds")
def test_the_comparison_prints_the_table_that_is_shown(tmp_path):
    ((command, shown),) = (
        (code, output) for code, output in blocks("") if "pflcore compare" in code
    )
    words = shlex.split(command)[1:]
    words[words.index("--out") + 1] = str(tmp_path)
    run = ran("-m", "pflcore", *words, cwd=tmp_path, env=os.environ)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    # A test split has 50 images, so an image is two percent of a client's accuracy.
    assert_printed("\n".join(lines), shown, within=3)


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


def test_the_readme_is_read_in_one_sitting():
    assert README.count("\n") <= 150
