"""Which file may import which: a file knows only what stands below it; and what importing pflcore pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pflcore"
LAYERS = [  # from the ground up
    {"ops"},
    {"context", "streams"},
    {"layers"},
    {"flat"},
    {"nn"},
    {"models"},
    {"data"},
    {"dense"},
    {"engine"},
    {"piece"},
    {"local"},
    {"algorithms"},
    {"metrics", "privacy", "record", "pictures", "report", "memory"},
    {"simulation"},
    {"checkpoint"},
    {"the rest"},  # whatever is not named here: what is built upon simulations, and may know each other
    {"cli", "__main__"},
]
PEERS = {"metrics", "privacy", "record", "pictures", "report", "memory", "the rest", "cli", "__main__"}  # these may know their own line
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def layer(name: str) -> int:
    return next((i for i, names in enumerate(LAYERS) if name in names), LAYERS.index({"the rest"}))


def unit(path: Path) -> str:
    """The file's or package's name below pflcore."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The parts of pflcore that a file imports, lazily or not; type checking aside."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    package = ("pflcore", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module) if p)
            names = [module] if module != "pflcore" else [f"pflcore.{a.name}" for a in node.names]
        else:
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("pflcore.")}
    return {f for f in found if (ROOT / f).is_dir() or (ROOT / f"{f}.py").exists()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_knows_only_what_stands_below_it(path: Path) -> None:
    me = unit(path)
    for other in imported(path) - {me}:
        level = layer(other) == layer(me) and bool(LAYERS[layer(me)] & PEERS)
        assert layer(other) < layer(me) or level, f"{path.relative_to(ROOT)} imports {other}, which stands above it"


def test_the_order_would_be_noticed() -> None:
    assert imported(ROOT / "algorithms" / "base.py") >= {"ops", "flat", "local"}
    assert "ops" in imported(ROOT / "piece.py") and imported(ROOT / "models.py") == {"nn"}


def test_importing_pflcore_pulls_in_no_extra() -> None:
    heavy = ("matplotlib", "torchvision", "tyro", "tqdm", "mlxtend", "scipy", "sklearn", "flwr", "pandas")
    code = (
        "import sys, torch; before = set(sys.modules)  # torch itself takes tqdm where there is one\n"
        "import pflcore, pflcore.algorithms, pflcore.models, pflcore.simulation, pflcore.data, pflcore.report, pflcore.nn\n"
        f"print([m for m in {heavy!r} if m in sys.modules and m not in before])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
