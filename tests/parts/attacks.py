"""Shared data and runs of the tests of attacks."""

import torch
from entry_points import synthetic_clusters
from parts.user import simulation
from torch import nn

from pflcore import Training, robust

TRAINING = Training(lr=0.1, batch_size=10)
N = 10
BAD = (8, 9)


DATA = synthetic_clusters(n=N, groups=1, samples=40, classes=4, dim=8, held_out=50)


def run(algorithm="fedavg", **options):
    settings = {"model": lambda: nn.Linear(8, 4), "data": DATA, "training": TRAINING}
    settings |= {"rounds": 10, "every": 10, "workers": 1}
    return simulation(algorithm, **settings | options)


# Every mean but the plain one, with f = 2.
MEANS = {
    "fltrust": robust.FLTrust(0),
    "centered_clipping": robust.CenteredClipping(0.1, 3),
    "private": robust.Private(0.5, 0.0),
    "median": robust.Median(),
    "clip_to_median": robust.ClipToMedian(),
    "geometric_median": robust.GeometricMedian(),
    "trimmed_mean": robust.TrimmedMean(2),
    "mean_around_median": robust.MeanAroundMedian(2),
    "krum": robust.Krum(2),
    "multi_krum": robust.MultiKrum(2),
    "bulyan": robust.Bulyan(2),
}


def updates(s=9, p=7, dtype=torch.float64):
    gen = torch.Generator().manual_seed(3)
    return torch.randn(p, generator=gen, dtype=dtype) + 0.3 * torch.randn(
        s, p, generator=gen, dtype=dtype
    )
