"""What the tests of factorized share."""

import torch
import torch.nn as nn

D = torch.float64


def model(bias=True):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(9, 8, bias=bias),
        nn.ReLU(),
        nn.Linear(8, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 4),
    ).double()
