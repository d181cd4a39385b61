"""Code that users copy imports public names and passes `mypy --strict`.

This is the code of the README, of the documents and of the examples.
"""

import ast
import os
import re

import pytest
from places import ROOT, listed, ran

EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# The first line of a class for a framework that has no types:
# "# NVFlare: from nvflare.collab import ...".
OF_FRAMEWORKS = re.compile(r"# \S+: ")
# Documents whose blocks belong together, with the imports and names of the reader that
# the blocks assume.
OWN_NAMES = {
    "data.md": "",
    "data_sets.md": "",
    "many_runs.md": """
from torch import nn

from pflcore import Federation, Training, cross_silo

data: Federation
protocol = cross_silo(data)
model: nn.Module
training: Training
""",
    "rounds.md": """
from torch import nn

from pflcore import Federation

SLOW: set[int]
model: nn.Module
data: Federation
""",
    "training.md": """
from torch import nn

backbone: nn.Module
""",
    "interop.md": """
from collections.abc import Callable

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn

import pflcore
from pflcore.algorithms import Cohort, Tensors, apply
from pflcore.interop import Client, lowrank
from pflcore.interop.flower import (
    PersonalStrategy,
    PflStrategy,
    client_app,
    keep_private,
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
make_client: Callable[[Context], Client]
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
    """The blocks of Python code of a document, in order."""
    codes = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    return [code for code in codes if not OF_FRAMEWORKS.match(code)]


def programs():
    """The name and code of each program that users copy.

    A program is an example, a block of the README, or all blocks of a document whose
    blocks belong together.
    """
    for path in EXAMPLES:
        yield str(path.relative_to(ROOT / "examples")), path.read_text()
    for document in DOCUMENTS:
        assumed = OWN_NAMES.get(document.name)
        if assumed is not None:
            yield f"docs_{document.stem}.py", "".join([assumed, *blocks(document)])
            continue
        for number, code in enumerate(blocks(document)):
            yield f"docs_{document.stem}_{number}.py", code


PROGRAMS = dict(programs())
# An error that mypy must find, as proof that it reads the types of pflcore.
WRONG = "from pflcore.algorithms import FedDWA\n\nrule = FedDWA(near=3)\n"
WRONG_ARGUMENT = "Unexpected keyword argument"


def imported(code):
    """The names that code imports or takes from modules of pflcore."""
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

    errors = [line for line in run.stdout.splitlines() if "error:" in line]
    only = f'wrong.py:3: error: {WRONG_ARGUMENT} "near" for "FedDWA"  [call-arg]'
    assert errors == [only], run.stdout + run.stderr
