"""What clients train in the benchmark of whole rounds, whoever runs the round."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from pflcore.models import lenet5, mlp

MODELS: dict[str, Callable[[], nn.Module]] = {"lenet5": lambda: lenet5((1, 28, 28), 10), "mlp": lambda: mlp((1, 28, 28), 10, hidden=(200,))}
BATCH, LR = 20, 0.005


@torch.enable_grad()
def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    for batch in torch.randperm(len(x)).split(BATCH):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
