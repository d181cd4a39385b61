"""What is trained on what: eight clients, of whom the last four name two classes the
other way round."""

from functools import lru_cache

import torch
from torch import nn

from pflcore import Federation, Training
from pflcore.algorithms import ALGORITHMS, FedAvg

TRAINING = Training(lr=0.3, batch_size=16, epochs=2)


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


def algorithm(name: str) -> FedAvg:
    """FedDWA mixes with the three nearest, WAFFLE trains for client 0."""
    options = {"feddwa": {"k": 3}, "waffle": {"target": 0}}
    return ALGORITHMS[name](**options.get(name, {}))
