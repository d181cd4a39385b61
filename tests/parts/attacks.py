"""Shared data and runs of the tests of attacks."""

import torch
from entry_points import synthetic_clusters
from parts.user import simulation
from torch import nn

from pflcore import Training

TRAINING = Training(lr=0.1, batch_size=10)
N = 10
BAD = (8, 9)


DATA = synthetic_clusters(n=N, groups=1, samples=40, classes=4, dim=8, held_out=50)


def run(algorithm="fedavg", **options):
    settings = {"model": lambda: nn.Linear(8, 4), "data": DATA, "training": TRAINING}
    settings |= {"rounds": 10, "every": 10, "workers": 1}
    return simulation(algorithm, **settings | options)


def defence(name, f=2):
    beside = {
        "fltrust": {"trusted_client": 0},
        "centered_clipping": {"clip_norm": 0.1, "clip_steps": 3},
        "dp": {"clip_norm": 0.5, "noise_multiplier": 0.0},
        "median": {},
        "clip": {},
        "geometric_median": {},
    }
    return {"defence": name, **beside.get(name, {"num_byzantine": f})}


def updates(s=9, p=7, dtype=torch.float64):
    gen = torch.Generator().manual_seed(3)
    return torch.randn(p, generator=gen, dtype=dtype) + 0.3 * torch.randn(
        s, p, generator=gen, dtype=dtype
    )
