"""Shared data of the tests of tuning."""

from dataclasses import replace

import torch
import torch.nn as nn

from pflcore import Net, Training, cross_device, cross_silo
from pflcore.data import Federation


def federation(n=12, seed=0, size=20, relabel=False):
    gen = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(n):
        x = torch.randn(size + i, 4, generator=gen)
        parts.append((x, x[:, :3].argmax(1) if i % 2 else x[:, 1:].argmax(1)))
    fed = Federation.from_clients(parts, classes=3)
    return (
        replace(
            fed,
            relabel=torch.stack([torch.randperm(3, generator=gen) for _ in range(n)]),
        )
        if relabel
        else fed
    )


def model():
    return Net(lambda: nn.Linear(4, 3))


PROTOCOLS = {
    "silo": lambda: cross_silo(federation()),
    "device": lambda: cross_device(federation(), 0.5, 0.25, 0.25),
}
TRAINING = Training(lr=0.3, batch_size=8)
