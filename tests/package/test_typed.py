"""What users copy, the README's and the documents' code and the examples, stands on
public names alone and passes `mypy --strict`."""

import ast
import os
import re

import pytest
from places import ROOT, listed, ran

EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# classes for frameworks that have no types: "# NVFlare: from nvflare.collab import ..."
OF_FRAMEWORKS = re.compile(r"# \S+: ")
# What a document's fragments take for granted: names of the reader's own.
OWN_NAMES = {
    "interop.md": """
from collections.abc import Callable

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Bulyan
from torch import Tensor, nn

import pflcore
from pflcore.algorithms import Cohort, Tensors, apply
from pflcore.interop import lowrank
from pflcore.interop.flower import (
    ExactMultiKrum,
    PersonalStrategy,
    PflStrategy,
    client_app,
    keep_private,
    select_multikrum,
)

state_dicts: dict[str, Tensors]
uploads: list[Tensors]
states: list[Tensors]
models: list[nn.Module]
rows: Tensor
weight: Tensor
x0: Tensor
n: int
cohort: Cohort
up: Tensors
x: Tensor
y: Tensor
client_id: str
grid: Grid
make_model: Callable[[], nn.Module]
data_of: Callable[[object], tuple[Tensor, Tensor]]
training: pflcore.Training
""",
    "own_algorithm.md": """
from collections.abc import Callable

from torch import nn

from pflcore import Federation, Simulation, Training, cross_silo, tune

data: Federation
my_model: Callable[[], nn.Module]
""",
}


def blocks(document):
    """A document's Python code, by its places."""
    found = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    return [code for code in found if not OF_FRAMEWORKS.match(code)]


def programs():
    """Name -> code: each example, each block of the README, and each document that goes
    on from block to block."""
    for path in EXAMPLES:
        yield str(path.relative_to(ROOT / "examples")), path.read_text()
    for document in DOCUMENTS:
        own = OWN_NAMES.get(document.name)
        if own is not None:
            yield f"docs_{document.stem}.py", "".join([own, *blocks(document)])
            continue
        for number, code in enumerate(blocks(document)):
            yield f"docs_{document.stem}_{number}.py", code


PROGRAMS = dict(programs())
# what mypy must find, so that it does look at pflcore's types
WRONG = "from pflcore.algorithms import FedDWA\n\nrule = FedDWA(near=3)\n"
WRONG_ARGUMENT = "Unexpected keyword argument"


def imported(code):
    """The names that code imports, and those that it takes from a module of pflcore."""
    tree = ast.parse(code)
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module in PUBLIC_MODULES:
                yield f"{module}.{node.attr}"


PUBLIC_MODULES = {module for module, name in listed() if not name}
PUBLIC_NAMES = {".".join(filter(None, pair)) for pair in listed()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_users_copy_imports_public_names(name):
    ours = {n for n in imported(PROGRAMS[name]) if n.split(".")[0] == "pflcore"}
    assert ours <= PUBLIC_NAMES, f"{name}: {ours - PUBLIC_NAMES}"


@pytest.mark.deep("a type checker")
def test_what_users_copy_passes_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("flwr")
    for name, code in {**PROGRAMS, "wrong.py": WRONG}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    words = ["--strict", "--ignore-missing-imports", "--no-error-summary"]
    words += ["--cache-dir", str(ROOT / ".mypy_cache" / "users")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    run = ran("-m", "mypy", *words, ".", cwd=tmp_path, env=environment)

    found = [line for line in run.stdout.splitlines() if "error:" in line]
    only = f'wrong.py:3: error: {WRONG_ARGUMENT} "near" for "FedDWA"  [call-arg]'
    assert found == [only], run.stdout + run.stderr
