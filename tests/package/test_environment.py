"""docs/install.md lists the environment variables that the sources read."""

import re

import pytest
from places import ROOT

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Environment variables")[2].partition("\n## ")[0]
LISTED = {
    name
    for row in re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
}
# A name in quotation marks, at a place where the environment is read.
NAME = re.compile(
    r"""(?:environ(?:\.get\(|\[)|getenv\()"(\w+)"|"(\w+)" in os.environ"""
)
FILES = [
    ROOT / "setup.py",
    *sorted((ROOT / "pflcore").rglob("*.py")),
    *sorted((ROOT / "csrc").rglob("*.[ch]*")),
]
OF_THE_SYSTEM = {"PATH", "PYTHONPATH"}


def names_read():
    """The variables that the package, its kernels and their build read."""
    names = set()
    for path in FILES:
        for pair in NAME.findall(path.read_text(encoding="utf-8")):
            names |= set(pair) - {""}
    return names


def test_every_variable_that_is_read_is_listed():
    names = names_read()
    assert {"PFLCORE_DATA", "PFLCORE_ISA", "PFLCORE_EXT"} <= names
    assert names - OF_THE_SYSTEM == LISTED


@pytest.mark.parametrize("folder", ["pflcore", "bench", "examples", ".ci", "docs"])
def test_no_other_variable_has_pflcores_name(folder):
    """Names of macros in the kernels' sources are no variables."""
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".md", "") and path.is_file():
            text = path.read_text(encoding="utf-8")
            names = set(re.findall(r"\bPFLCORE_[A-Z_]+\b", text))
            assert names - {"PFLCORE_CUDA"} <= LISTED, path
