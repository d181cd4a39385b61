"""What `pflcore info` says of this installation."""

import importlib.util

import pytest
import torch

import pflcore
from pflcore.check import PIP_NAMES
from pflcore.lab.cli import EXTRAS, PACKAGE, main
from pflcore.ops import _library as library


def warning(capsys):
    """The line of `pflcore info` that warns; None without it."""
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return next((line for line in lines if line.startswith("warning")), None)


@pytest.mark.skipif(library.kernels is None, reason="the kernels are not loaded")
def test_info_warns_where_torch_is_another(monkeypatch, capsys):
    built = library.kernels.pflcore_built().decode().split()[-1]
    monkeypatch.setattr(torch, "__version__", f"{built}+cpu")
    assert warning(capsys) is None

    monkeypatch.setattr(torch, "__version__", "2.99.0+cu130")

    line = warning(capsys)
    assert f"built against torch {built}, and torch 2.99.0+cu130 is here" in line
    assert line.endswith(library.REINSTALL)


def test_info_does_not_warn_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(library, "kernels", None)
    assert warning(capsys) is None
    assert pflcore.backend().kernels is False


def test_info_knows_every_extra(capsys, monkeypatch):
    tomllib = pytest.importorskip("tomllib")
    requirements = pytest.importorskip("packaging.requirements")
    with open(PACKAGE.parent / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    asked = {}
    for extra, lines in extras.items():
        wanted = [requirements.Requirement(line) for line in lines]
        asked[extra] = {w.name for w in wanted if applies(w)}
    advised = {}
    for extra, modules in EXTRAS.items():
        names = [PIP_NAMES.get(module, module) for module in modules]
        found = [requirements.Requirement(name.strip("'").split()[0]) for name in names]
        names = {w.name.replace("_", "-") for w in found}
        advised[extra] = names - {"tomllib"}  # a part of Python
    assert advised == asked

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "[hf]        without datasets: pip install datasets\n" in out
    assert all(f"[{extra}]" in out for extra in extras)


def applies(requirement):
    """True where a requirement is one of this Python."""
    return requirement.marker is None or requirement.marker.evaluate()
