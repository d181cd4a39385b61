"""What the tests of edges share."""

import torch.nn as nn
from small import images, make_setting

from pflcore import Federation, Net, Training


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()


def normal(sizes=(8, 20, 32, 12), engine="loop", **training):
    """Clients and a model with batch norm, in float64."""
    data = images(sizes)
    data = Federation(data.x.double(), data.y, data.index, 4, data.relabel)
    return make_setting(
        Net(normed, seed=1),
        data,
        Training(**{"lr": 0.1, "batch_size": 8, **training}),
        rounds=10,
        engine=engine,
    )
