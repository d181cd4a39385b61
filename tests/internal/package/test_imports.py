"""Tests of the imports between packages.

Each package imports only the packages that the table allows. No two files import each
other. `import pflcore` loads no unnecessary module.
"""

import ast
import re
import runpy
from graphlib import TopologicalSorter
from importlib.util import resolve_name

import pytest
import torch
from parts.requirements import (
    REQUIRED_ALONE,
    listed_requirements,
    required_distributions,
)
from places import ROOT, ran

from pflcore.check import pip_install

PACKAGE = ROOT / "pflcore"
# Each package, and the packages that it imports. They stand above its line.
TABLE = """\
_device:
check:
ops: check
metrics: check
privacy: check
data: _device check
nn: check ops
train: _device check ops metrics data nn
_cohort: _device ops train
_geometric_median: _device check ops train
robust: _cohort _device _geometric_median check ops train
algorithms: _cohort _device check ops data nn train robust
simulation: _cohort _device check ops metrics privacy data nn train robust algorithms
interop: _cohort check ops data train robust algorithms simulation
testing: check data train algorithms simulation
lab: check ops metrics data nn train robust algorithms simulation
"""
LAYERS = {name: {*below.split()} for name, below in re.findall(r"(\w+):(.*)", TABLE)}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(p): p for p in PACKAGE.rglob("*.py")}


def imported(path):
    """The modules of pflcore that a file imports.

    Imports in functions, and imports for types only, do not count.
    """
    package = name_of(path)
    names = set()
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            inside = [f"{module}.{a.name}" for a in node.names]
            names |= {name if name in MODULES else module for name in inside}
    return names & MODULES.keys() - {"pflcore", name_of(path)}


DRAWN = runpy.run_path(str(ROOT / ".ci" / "packages.py"))


def test_a_package_imports_what_it_may_and_nothing_else():
    assert DRAWN["imports"]() == LAYERS
    # No package imports a package that stands below it in the table.
    order = list(LAYERS)
    assert all(
        order.index(b) < order.index(a) for a, below in LAYERS.items() for b in below
    )


def test_the_picture_of_the_packages_is_current():
    assert DRAWN["picture"]().strip() in (ROOT / "CONTRIBUTING.md").read_text()


def test_no_two_files_need_each_other():
    graph = {m: imported(p) for m, p in MODULES.items()}
    # A cycle raises CycleError, which names the files.
    list(TopologicalSorter(graph).static_order())


NO_EXTRA = """
import sys, torch
before = set(sys.modules)  # torch itself takes tqdm where there is one
import pflcore, pflcore.interop.lowrank, pflcore.nn.models, pflcore.lab.results.table, pflcore.nn
import pflcore.simulation.callbacks, pflcore.testing
heavy = "matplotlib peft transformers torchvision tyro tqdm mlxtend scipy sklearn flwr pandas"
heavy += " tensorboard wandb mlflow"
print(*{*heavy.split()} & sys.modules.keys() - before)
"""  # noqa: E501


@pytest.mark.deep("a subprocess")
def test_importing_pflcore_pulls_in_no_extra():
    run = ran("-c", NO_EXTRA)
    assert run.returncode == 0 and run.stdout.strip() == "", run.stderr


PLAYED_RUN = """
import sys, torch
from pflcore import Federation, Simulation
from pflcore.nn.models import lenet5

x, y = torch.rand(24, 1, 28, 28), torch.arange(24) % 4
train, test = torch.arange(12).split(6), torch.arange(12, 24).split(6)
data = Federation(x, y, {"train": train, "test": test}, 4)
for name in ("fedavg", "ditto", "moon"):
    Simulation(name, lambda: lenet5((1, 28, 28), 4), data, rounds=1).run()
print(*[name for name in sys.modules if name == "torch._dynamo"])
"""


@pytest.mark.deep("a subprocess")
def test_a_run_does_not_wait_for_torchs_compiler():
    run = ran("-c", PLAYED_RUN)
    assert run.returncode == 0 and run.stdout.strip() == "", run.stderr


PLAYED_OPS = """
import torch
from pflcore import ops

rows = torch.randn(6, 9, requires_grad=True)
near = ops.feddwa_weights(ops.pairwise_sqdist(rows), 3)
ops.aggregate(rows, *near).sum().backward()
ops.aggregate(rows.detach(), ops.waffle_weights(torch.rand(1, 6), 0, 0.6))
ops.nearest(rows.detach(), rows.detach(), 2, "groups")
y = ops.rank1_linear(rows, torch.rand(2, 4), torch.rand(4), torch.rand(4, 9))
y.sum().backward()
ops.sgd_step_(rows.detach(), rows.grad, 0.1)
ops.reference.pairwise_sqdist(rows)
try:
    import tyro
except ModuleNotFoundError:
    print("played")
"""


@pytest.mark.deep("a subprocess")
def test_the_ops_need_nothing_but_what_the_package_requires():
    pytest.importorskip("tyro")
    required = listed_requirements("dependencies")
    names = {re.split("[>=]", word)[0] for word in required}
    assert names == {"torch", "numpy", "safetensors", "annotated-types"}
    allowed = required_distributions(required)
    run = ran("-c", REQUIRED_ALONE + PLAYED_OPS, "pflcore", *allowed)
    assert run.returncode == 0 and run.stdout.strip() == "played", run.stderr


@pytest.mark.deep("a subprocess")
def test_importing_the_ops_loads_the_ops_alone():
    code = (
        "import sys, torch, pflcore.ops; print(*[m for m in sys.modules if "
        "'pflcore' in m])"
    )
    loaded = set(ran("-c", code).stdout.split())
    packages = {m.split(".")[1] for m in loaded - {"pflcore"}}
    assert packages <= {"ops", "check"} and len(loaded) <= 20


@pytest.mark.deep("a subprocess")
def test_flowers_module_says_what_it_needs():
    code = (
        "import sys; sys.modules['flwr'] = None\nimport pflcore.interop\nimport "
        "pflcore.interop.flower"
    )
    said = (
        "pflcore.interop.flower needs Flower; pip install 'flwr[simulation]>=1.41,<2'."
    )
    assert ran("-c", code).stderr.splitlines()[-1] == f"ImportError: {said}"


def test_no_advice_needs_an_index_that_has_pflcore():
    """Advice names packages of the extras, and leaves torch as it is."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts += [
        p
        for folder in ("pflcore", "bench", "examples")
        for p in (ROOT / folder).rglob("*.*")
    ]
    texts = [p for p in texts if p.suffix in (".py", ".md")]
    assert [
        p for p in texts if "install 'pflcore[" in p.read_text(encoding="utf-8")
    ] == []
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in (
        "tyro",
        "mlxtend",
        "scikit-learn",
        "matplotlib",
        "flwr[simulation]>=1.41,<2",
    ):
        assert f'"{package}' in extras
    version = torch.__version__.partition("+")[0]
    assert pip_install("tyro", "sklearn") == "pip install tyro scikit-learn"
    assert pip_install("torchvision") == f"pip install torchvision torch=={version}"


def test_the_map_names_every_package_and_real_files():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    the_map = text.partition("## The map")[2].partition("\n## ")[0]
    parts = re.findall(r"^\*\*`([\w/]+/)`\*\*.*\n((?:- .*\n)+)", the_map, re.M)
    folders = {p.parent for p in PACKAGE.rglob("__init__.py")}
    # A folder whose only file is __init__.py holds other packages alone.
    packages = {f for f in folders if len([*f.glob("*.py")]) > 1}

    assert {ROOT / name for name, _ in parts} - {ROOT / "csrc"} == packages
    for name, lines in parts:
        for line in lines.splitlines():
            files = re.findall(r"`([\w/]+\.\w+)`", line.partition(":")[0])
            assert files, line
            assert all((ROOT / name / file).is_file() for file in files), line


def test_every_extra_is_documented():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = pyproject.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    extras = re.findall(r"^(\w+) = \[", section, re.M)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.split("| extra |")[1].split("\n\n")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.M)} == {*extras}
