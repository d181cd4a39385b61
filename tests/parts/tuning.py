"""Shared data of the tests of tuning."""

import math
import sys
from dataclasses import replace
from random import Random
from types import SimpleNamespace

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


class PretendedStudy:
    """Stands for a study of Optuna: proposes what a seed draws, and notes its results.

    It is its own trial, too.
    """

    def __init__(self, seed=0, direction="MAXIMIZE"):
        self.random = Random(seed)
        self.directions = [SimpleNamespace(name=direction)]
        self.told = []

    def ask(self):
        return self

    def suggest_float(self, key, low, high, log):
        if log:
            low, high = math.log(low), math.log(high)
        value = self.random.uniform(low, high)
        return math.exp(value) if log else value

    def suggest_int(self, key, low, high, log):
        return self.random.randint(low, high)

    def suggest_categorical(self, key, values):
        return self.random.choice(values)

    def tell(self, trial, value):
        assert trial is self
        self.told.append(value)


class PretendedLog:
    """Stands for `optuna.logging`."""

    INFO = 20
    WARNING = 30
    level = INFO

    def get_verbosity(self):
        return self.level

    def set_verbosity(self, level):
        self.level = level


def pretended_optuna():
    """The part of Optuna that makes a study, where Optuna is not installed.

    As Optuna's own does, it says on stderr that it makes a study.
    """
    log = PretendedLog()

    def create_study(direction, sampler):
        if log.level <= log.INFO:
            print("A new study created", file=sys.stderr)
        return PretendedStudy(sampler, direction.upper())

    samplers = SimpleNamespace(TPESampler=lambda seed: seed)
    return SimpleNamespace(samplers=samplers, create_study=create_study, logging=log)
