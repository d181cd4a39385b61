"""What the tests of attacks share."""

import torch
from doors import synthetic_clusters
from small import grouped
from torch import nn

from pflcore import Simulation, Training

TRAINING = Training(lr=0.1, batch_size=10)
N, BAD = 10, (8, 9)


DATA = synthetic_clusters(n=N, groups=1, samples=40, classes=4, dim=8, held_out=50)


def run(algorithm="fedavg", **options):
    given = {"model": lambda: nn.Linear(8, 4), "data": DATA, "training": TRAINING}
    given |= {"rounds": 10, "every": 10, "workers": 1}
    return Simulation(algorithm, **grouped(given | options))


def defence(name, f=2):
    beside = (
        {"hostile": f}
        if name in ("krum", "multi_krum", "trimmed_mean")
        else {"root": 0}
        if name == "fltrust"
        else {}
    )
    return {"defence": name, **beside}


def updates(s=9, p=7, dtype=torch.float64):
    gen = torch.Generator().manual_seed(3)
    return torch.randn(p, generator=gen, dtype=dtype) + 0.3 * torch.randn(
        s, p, generator=gen, dtype=dtype
    )
