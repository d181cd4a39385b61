"""What is trained on what: eight clients, of whom the last four name two classes the
other way round."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from flwr.app import Context
from torch import nn

from pflcore import Algorithm, Federation, Training, algorithm_of

TRAINING = Training(lr=0.3, batch_size=16, epochs=2)


class Options(NamedTuple):
    """The app's options: pyproject.toml, under `tool.flwr.app.config`."""

    algorithm: str
    clients: int
    rounds: int
    participation: float
    seed: int
    export: str


def options_of(context: Context) -> Options:
    """The options of this run."""
    config = context.run_config
    return Options(
        str(config["algorithm"]),
        int(config["clients"]),
        int(config["rounds"]),
        float(config["participation"]),
        int(config["seed"]),
        str(config["export"]),
    )


def number_of(context: Context) -> int:
    """Which of the clients this node is."""
    return int(context.node_config["partition-id"])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


@lru_cache
def data(clients: int) -> Federation:
    """One model for all must fail: what is class 1 for the first half is class 0 for
    the second."""
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(200, 2, generator=generator) for _ in range(clients)]
    labels = [
        ((x[:, 0] * x[:, 1] > 0) ^ (i >= clients // 2)).long()
        for i, x in enumerate(points)
    ]
    return Federation.from_clients(zip(points, labels, strict=True)).split(test=0.25)


def algorithm(name: str) -> Algorithm:
    """FedDWA mixes with the three nearest, WAFFLE trains for client 0."""
    options: dict[str, dict[str, Any]] = {"feddwa": {"k": 3}, "waffle": {"target": 0}}
    return algorithm_of(name, **options.get(name, {}))
