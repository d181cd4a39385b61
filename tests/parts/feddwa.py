"""What the tests of feddwa share."""

import torch
from places import golden

GOLDEN = golden("feddwa_family")


def dense(top, n):
    return torch.zeros(len(top.index), n, dtype=torch.float64).scatter(1, top.index, top.weight)


# what the weights must obey


def models(seed, m, dim=50, spread=1e-3, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    centre = torch.randn(dim, generator=gen, dtype=torch.float64)
    w = centre + spread * torch.randn(m, dim, generator=gen, dtype=torch.float64)
    return w.to(dtype), (w + spread * torch.randn(m, dim, generator=gen, dtype=torch.float64)).to(
        dtype
    )
