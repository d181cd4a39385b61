"""The example, a Flower app, gives the models of a simulation.

Flower finds the components of the app, and Ray runs them on two cores.
"""

import importlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

import tomllib
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from places import ROOT
from safetensors.torch import load_file

from pflcore import Evaluation, Simulation

APP = ROOT / "examples" / "flower"
ROUNDS = 3
SEED = 3
# Algorithms that the test plays, and the participation of each.
PLAYED = {"feddwa": 1.0, "waffle": 0.5, "ditto": 0.5, "scaffold": 1.0}
PROGRAM = """
import pathlib, sys
from dataclasses import replace
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from pfl_app import apps
from pflcore.interop.flower import client_app
from pflcore.interop._flower_client import STATE_RECORD

folder, rounds, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
played = eval(sys.argv[4])
shared = {"clients": 8, "rounds": rounds, "seed": seed, "checkpoint": ""}
settings = {n: shared | {"algorithm": n, "participation": p, "export": str(folder / n)}
            for n, p in played.items()}
server = ServerApp()

@server.main()
def play(grid, context):  # all in one start of Ray
    for name, config in settings.items():
        (folder / name).mkdir()
        apps.play(grid, replace(context, run_config=config))

def switch(message, context, call_next):  # each algorithm has its own run, as `flwr run` does
    name = message.content.config_records.get("config", {}).get("algorithm")
    if name is None:
        return call_next(message, context)
    record = context.state.config_records.get(name)
    state = RecordDict({STATE_RECORD: record} if record else {})
    run = replace(context, run_id=list(played).index(name), run_config=settings[name], state=state)
    reply = call_next(message, run)
    if STATE_RECORD in state:
        context.state[name] = state[STATE_RECORD]
    return reply

backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0},
           "init_args": {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False,
                         "_node_ip_address": "127.0.0.1"}}
client = client_app(apps.one, evaluate=apps.evaluate, mods=[switch])
run_simulation(server, client, num_supernodes=8, backend_config=backend)
"""  # noqa: E501


@pytest.fixture
def app(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    return importlib.import_module("pfl_app.apps")


@pytest.mark.long("Flower's runtime is started")
def test_the_app_gives_the_models_of_a_simulation(app, tmp_path):
    quiet = dict.fromkeys(("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"), "0")
    quiet |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_worker_niceness": "0"}
    path = os.pathsep.join([str(APP), *filter(None, sys.path)])
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(tmp_path),
            str(ROUNDS),
            str(SEED),
            repr(PLAYED),
        ],
        env={**os.environ, **quiet, "FLWR_HOME": str(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("mean accuracy of the clients' own models") == ROUNDS * len(
        PLAYED
    )
    task = importlib.import_module("pfl_app.task")
    for name, participation in PLAYED.items():
        run = Simulation(
            task.algorithm(name),
            task.model,
            task.data(8),
            task.TRAINING,
            ROUNDS,
            participation,
            seed=SEED,
            evaluation=Evaluation(every=0),
        )
        history = run.run()
        models = [
            load_file(tmp_path / name / f"client-{i}.safetensors") for i in range(8)
        ]
        for i, model in enumerate(models):
            for key, value in history.model(i).tensors().items():
                torch.testing.assert_close(model[key], value, rtol=1e-4, atol=1e-6)
        first = models[0]["0.weight"]
        all_equal = all(torch.equal(first, m["0.weight"]) for m in models)
        assert all_equal == (name in ("waffle", "scaffold"))


def test_what_flower_looks_for_is_there(app):
    project = tomllib.loads((APP / "pyproject.toml").read_text())
    parts = project["tool"]["flwr"]["app"]["components"]
    for key, kind in (("serverapp", ServerApp), ("clientapp", ClientApp)):
        module, _, name = parts[key].partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), kind)
    options = {"algorithm", "clients", "rounds", "participation", "seed"}
    options |= {"export", "checkpoint"}
    assert {*project["tool"]["flwr"]["app"]["config"]} == options
