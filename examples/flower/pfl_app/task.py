"""The task of the app: options, data, model and algorithm.

The second half of the clients swaps the labels of the two classes. Therefore no single
model is right for all clients.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context
from torch import nn

from pflcore import Algorithm, Federation, Training, algorithm_of

TRAINING = Training(lr=0.3, batch_size=16, epochs=2)


class Options(NamedTuple):
    """The app's options; pyproject.toml has the defaults in `tool.flwr.app.config`.

    Attributes:
        algorithm: name of the algorithm, a key of `pflcore.ALGORITHMS`
        clients: number of clients
        rounds: number of rounds
        participation: fraction of the clients that train in a round
        seed: seed of the whole run
        export: folder for the personalized models; empty: they are not saved
        checkpoint: folder for what a run needs to go on after its server was killed;
            empty: nothing is saved
    """

    algorithm: str
    clients: int
    rounds: int
    participation: float
    seed: int
    export: str
    checkpoint: str


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
        str(config["checkpoint"]),
    )


def checkpoint_of(context: Context, side: str) -> Path | None:
    """The folder of the checkpoints of a side, "server" or "clients"."""
    folder = options_of(context).checkpoint
    return Path(folder) / side if folder else None


def number_of(context: Context) -> int:
    """Number of this node's client, from 0."""
    return int(context.node_config["partition-id"])


def model() -> nn.Module:
    """A small network for points of two coordinates."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


@lru_cache
def data(clients: int) -> Federation:
    """The federation, with a quarter of each client's samples for testing.

    Class 1 of the first half of the clients is class 0 of the second half.
    """
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(clients):
        x = torch.randn(200, 2, generator=generator)
        same_sign = x[:, 0] * x[:, 1] > 0
        swapped = i >= clients // 2
        samples.append((x, (same_sign ^ swapped).long()))
    return Federation.from_clients(samples).split(test=0.25)


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name.

    FedDWA mixes the three nearest models. WAFFLE trains a model for client 0.
    """
    options: dict[str, dict[str, Any]] = {"feddwa": {"k": 3}, "waffle": {"target": 0}}
    return algorithm_of(name, **options.get(name, {}))
