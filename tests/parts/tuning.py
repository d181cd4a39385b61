"""Shared data of the tests of tuning."""

import math
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
    """Stands for a study of Optuna: draws values by a seed, and keeps the results.

    It is its own trial, too.
    """

    def __init__(self, seed):
        self.random = Random(seed)
        self.results = []

    def suggest_float(self, key, low, high, log):
        assert log
        value = math.exp(self.random.uniform(math.log(low), math.log(high)))
        self.options[key] = value
        return value

    def suggest_categorical(self, key, values):
        self.options[key] = self.random.choice(values)
        return self.options[key]

    def optimize(self, function, n_trials, catch):
        assert catch is ValueError
        for _ in range(n_trials):
            self.options = {}
            score = function(self)
            self.results.append((self.options, score))


def pretended_optuna():
    """The part of Optuna that makes a study, where Optuna is not installed."""

    def create_study(direction, sampler):
        assert direction == "maximize"
        return PretendedStudy(sampler)

    samplers = SimpleNamespace(TPESampler=lambda seed: seed)
    return SimpleNamespace(samplers=samplers, create_study=create_study, Trial=object)
