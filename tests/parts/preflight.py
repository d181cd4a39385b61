"""What the tests of preflight share."""

import torch

from pflcore import Federation

GEN = torch.Generator().manual_seed(0)


def federation(x=None, y=None, sizes=(8, 8, 8), **options):
    total = sum(sizes)
    x = torch.randn(total, 6, generator=GEN) if x is None else x
    y = torch.arange(total) % 4 if y is None else y
    pairs = zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)
    return Federation.from_clients(
        [{"train": (x, y), "test": (x[:2], y[:2])} for x, y in pairs], **options
    )
