"""What the tests of split share."""

import torch.nn as nn
from small import images

from pflcore import Federation, Training

LR, EPOCHS, COHORTS = 0.3, 2, ([0, 1, 2], [1], [0, 2])
# whole batches, so that no shuffle plays a part
TRAINING = Training(lr=LR, batch_size=64, epochs=EPOCHS)


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()


def federation():
    d = images((7, 20, 31))
    return Federation(d.x.double(), d.y, d.index, 4, d.relabel)
