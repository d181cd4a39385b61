"""What the README shows is run, and its table of algorithms is the code's; where it is not, the
test prints the right one."""

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
    assert table in README, table
    assert f"runs {len(ALGORITHMS)} algorithms" in README


@pytest.mark.parametrize("number", range(2))
def test_the_examples_run(number, capsys):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    exec(compile(code, f"README, example {number}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()
