"""Tests import only the names that docs/api.md lists, except in tests/internal."""

import ast

from places import ROOT, listed

TESTS = ROOT / "tests"
# Files that may import private names: the plugin of the suites, the pretended GPU, and
# the test of docs/api.md.
LOOK_INSIDE = {
    TESTS / "conftest.py",
    TESTS / "package" / "test_api.py",
    TESTS / "pretend_gpu.py",
}


def imported(path):
    """The modules and names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{a.name}" for a in node.names)


def test_tests_import_public_names():
    public = {".".join(filter(None, pair)) for pair in listed()}
    private = []
    for path in TESTS.rglob("*.py"):
        if path.is_relative_to(TESTS / "internal") or path in LOOK_INSIDE:
            continue
        names = [name for name in imported(path) if name.split(".")[0] == "pflcore"]
        private += [f"{path.name}: {name}" for name in names if name not in public]
    assert not private
