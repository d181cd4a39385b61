"""What the tests of motley algorithms share."""

import torch
import torch.nn as nn
from small import near

D64 = torch.float64


def close(a, b, atol=5e-10, rtol=1e-7):
    near(a, b, rtol, atol)


class Line(nn.Module):
    """y = w x, in float64, starting at `w0`."""

    def __init__(self, w0=(0.0,), dtype=D64):
        super().__init__()
        self.head = nn.Linear(len(w0), 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([w0]))

    def forward(self, x):
        return self.head(x)


# kNN-Per --------------------------------------------------------------------
Z = torch.tensor([[0, 0], [1, 0], [0, 2], [3, 1], [2, 2]], dtype=D64)
QUERY = torch.tensor([[0.5, 0.25]], dtype=D64)
