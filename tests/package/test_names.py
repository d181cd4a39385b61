"""The tests stand on what docs/api.md lists and so outlive what is behind it; what must
look inside is in tests/internal."""

import ast

from places import ROOT, listed

TESTS = ROOT / "tests"
# the suites themselves, and the border's own test
LOOK_INSIDE = {
    TESTS / "conftest.py",
    TESTS / "package" / "test_api.py",
    TESTS / "pretend_gpu.py",
}


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
