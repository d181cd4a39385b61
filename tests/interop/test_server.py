"""A server and clients apart give what a simulation gives, for every algorithm; clients come and go."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from small import tiny_model
from torch import nn

from pflcore import Client, Net, Server, Simulation, Training
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.local.random import generator_of
from pflcore.round import sample
from pflcore.testing import Case

ROUNDS, SEED = 3, 5
TRAINING = Training(lr=0.05, batch_size=8, epochs=1, schedule=lambda round, rounds: 1 / round)
OPTIONS: dict[str, dict[str, Any]] = {"knnper": {"k": 3}, "clustered_fl": {"first": 0, "eps1": 10.0, "eps2": 0.0}}


def algorithm(name: str) -> FedAvg:
    return ALGORITHMS[name](**OPTIONS.get(name, {}))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


DATA = Case(FedAvg()).data
SETTING = {"engine": "threads", "workers": 1, "seed": SEED}


def play(server: Server, clients: list[Client], cohorts: list[list[int]]) -> list[Any]:
    done = []
    for ids in cohorts:
        downloads = {i: server.download(i) for i in ids}
        done.append(server.aggregate({i: clients[i].train(d) for i, d in reversed(downloads.items())}))
    return done


def apart(alg: FedAvg, make: Any = model, **options: Any) -> tuple[Server, list[Client]]:
    server = Server(alg, make, DATA.n, rounds=ROUNDS, seed=SEED, **options)
    more = {k: v for k, v in options.items() if k == "buffers"}
    return server, [Client(alg, make, DATA.subset([i]), TRAINING, **SETTING, **more) for i in range(DATA.n)]


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_server_and_clients_are_the_simulation(name: str, participation: float) -> None:
    alg = algorithm(name)
    whole = Simulation(alg, model, DATA, TRAINING, ROUNDS, participation, eval_every=0, **SETTING)
    history = whole.run()
    server, clients = apart(alg)
    play(server, clients, [sample(alg, whole.setting, r, participation).tolist() for r in range(1, ROUNDS + 1)])
    for i, client in enumerate(clients):
        x = DATA.client(i, "test")[0]
        one, other = history.model(i), client.model(server.download(i, "evaluation"))
        torch.testing.assert_close(other(x), one(x), rtol=1e-9, atol=1e-12)
        if "view_w" in one.state_dict():
            torch.testing.assert_close(other.state_dict()["view_w"], one.state_dict()["view_w"], rtol=1e-9, atol=1e-12)
    assert server.round == ROUNDS
