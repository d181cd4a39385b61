"""The example is a Flower app: Flower loads its components, Ray runs them on two cores, and a simulation gives the same models."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="these need Flower; pip install 'pflcore[flower]'")
pytest.importorskip("ray", reason="these need Flower's simulation; pip install 'pflcore[flower]'")

import torch
from places import ROOT
from safetensors.torch import load_file

from pflcore import Simulation

APP, ROUNDS = ROOT / "examples" / "flower", 3
PLAYED = {"feddwa": 1.0, "waffle": 0.5, "ditto": 0.5, "scaffold": 1.0}  # and the participation
PROGRAM = f"""
import sys, logging, pathlib
sys.path.insert(0, {str(APP)!r})
from flwr.app import Context
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from pfl_app import apps, task
folder, played = pathlib.Path(sys.argv[1]), {PLAYED!r}
settings = {{"clients": 8, "rounds": {ROUNDS}, "seed": 3}}
server = ServerApp()

@server.main()
def main(grid, context):  # all four in one start of Ray: a node's algorithm is that of the round's message
    for name, part in played.items():
        context.run_config = {{**settings, "algorithm": name, "participation": part, "export": str(folder / name)}}
        apps.run(grid, context)

from pflcore.interop.flower import client_app
"""


def settings() -> dict[str, object]:
    return tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
