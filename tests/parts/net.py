"""What the tests of net share."""

import torch
import torch.nn as nn


class Buffered(nn.Module):
    """Batch norm, a float buffer that training changes, and an integer one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("table", torch.arange(4))

    def forward(self, x):
        if self.training:
            self.seen += x.mean()
        return self.out(self.norm(x[:, self.table]))
