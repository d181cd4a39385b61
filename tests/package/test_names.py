"""The tests stand on what docs/api.md lists and so outlive what is behind it; what must look inside
is in tests/internal, and is little."""

import ast
import re
import runpy

from places import ROOT, listed

TESTS = ROOT / "tests"
# the suites themselves, and the border's own test
LOOK_INSIDE = {TESTS / "conftest.py", TESTS / "package" / "test_api.py"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{a.name}" for a in node.names)


def internal(path):
    return path.is_relative_to(TESTS / "internal")


def test_tests_import_public_names():
    public, found = {".".join(filter(None, pair)) for pair in listed()}, []
    for path in TESTS.rglob("*.py"):
        if not internal(path) and path not in LOOK_INSIDE:
            ours = [n for n in imported(path) if n.split(".")[0] == "pflcore"]
            found += [f"{path.name}: {n}" for n in ours if n not in public]
    assert not found


def test_plain_words_stand_in_code_and_docs():
    """Turns of phrase that a second reader has to untangle."""
    tics = re.compile(
        r"\bwhoever\b|\bin\s+the\s+place\s+of\b|\bstands?\s+for\b|\b(is|are)\s+told\b", re.I
    )
    rooms = ("pflcore", "bench", "csrc", "examples", "docs")
    kinds = (".py", ".md", ".h", ".cpp", ".cu", ".cuh")
    paths = [p for r in rooms for p in (ROOT / r).rglob("*") if p.suffix in kinds]
    found = [
        f"{p.relative_to(ROOT)}: {m[0]}"
        for p in [*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for m in tics.finditer(p.read_text(encoding="utf-8"))
    ]
    assert not found


def test_a_quarter_of_the_tests_at_most_looks_inside():
    tokens = runpy.run_path(str(ROOT / ".ci" / "size.py"))["of_python"]
    size = {True: 0, False: 0}
    for path in TESTS.rglob("*.py"):
        size[internal(path)] += tokens(path)
    assert 0 < size[True] <= sum(size.values()) / 4
