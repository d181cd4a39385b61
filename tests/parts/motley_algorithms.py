"""What the tests of motley algorithms share."""

import torch
from small import Line as Line
from small import near

D64 = torch.float64


def close(a, b, atol=5e-10, rtol=1e-7):
    near(a, b, rtol, atol)


# kNN-Per --------------------------------------------------------------------
Z = torch.tensor([[0, 0], [1, 0], [0, 2], [3, 1], [2, 2]], dtype=D64)
QUERY = torch.tensor([[0.5, 0.25]], dtype=D64)
