"""What the tests of personalize share."""

import torch

N, P = 7, 15


def rows(seed=0, spread=0.3):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, P, generator=draw).double()
        + spread * torch.randn(N, P, generator=draw).double()
    )
