"""What a small memory refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from pflcore import Federation, Simulation
from pflcore.local import memory

GEN = torch.Generator().manual_seed(0)


def federation(x: Tensor | None = None, y: Tensor | None = None, sizes: tuple[int, ...] = (8, 8, 8), **options: Any) -> Federation:
    total = sum(sizes)
    x = torch.randn(total, 6, generator=GEN) if x is None else x
    y = torch.arange(total) % 4 if y is None else y
    pairs = zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)
    return Federation.from_arrays([{"train": (x, y), "test": (x[:2], y[:2])} for x, y in pairs], **options)


def test_a_run_that_cannot_fit_is_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "capacity", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"^memory: the run needs about [\d.]+ KiB beside data and activations, and cpu has 1000 B; let"):
        Simulation("local", nn.Linear(6, 4), federation())
