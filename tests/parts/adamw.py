"""What the tests of adamw share."""

from typing import Any

import torch.nn as nn
from small import images

from pflcore import Federation

ADAMW: dict[str, Any] = {
    "lr": 0.01,
    "batch_size": 10,
    "local_optimizer": "adamw",
    "weight_decay": 0.1,
}


def federation(sizes=(7, 20, 31)):
    data = images(sizes)
    return Federation(data.x.double(), data.y, data.index, data.classes, data.relabel)


def build():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
