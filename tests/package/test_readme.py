"""What the README shows is run, and the tables of algorithms are the code's; where the full one is
not, the test prints the right one."""

import inspect
import re

import pytest
from places import ROOT

from pflcore.algorithms import ALGORITHMS

README = (ROOT / "README.md").read_text()


def algorithms_table():
    """Name and first docstring line of every algorithm, as Markdown."""
    rows = [
        (name, inspect.getdoc(cls).split("\n\n")[0].replace("\n", " ").replace("|", "\\|"))
        for name, cls in ALGORITHMS.items()
    ]
    return "\n".join(
        ["| name | what it is |", "|---|---|", *(f"| `{name}` | {first} |" for name, first in rows)]
    )


def test_the_table_of_algorithms_is_the_codes():
    table = algorithms_table()
    assert table in (ROOT / "docs/algorithms.md").read_text(), table


def test_the_families_name_every_algorithm_once():
    table = README.split("| family | algorithms |")[1].split("\n\n")[0]
    words = re.findall(r"\w+", re.sub(r"\(.*?\)", "", table))
    assert sorted(word for word in words if word in ALGORITHMS) == sorted(ALGORITHMS)
    assert f"runs {len(ALGORITHMS)} algorithms" in README


@pytest.mark.parametrize("number", range(3))
def test_the_examples_run(number, capsys):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    exec(compile(code, f"README, example {number}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()
