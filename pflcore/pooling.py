"""2x2 pooling by pflcore's own kernel, put in the place of a model's pooling layers while clients train on a CPU.

torch walks the windows one by one; for a LeNet that is half of the forward pass. Results and gradients are the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.context import context
from pflcore.ops.library import pool2x2, pool2x2_backward


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, average: bool) -> Tensor:  # [B, C, H, W] -> [B, C, H // 2, W // 2]
        ctx.average = average
        ctx.save_for_backward(x)
        return pool2x2(x, average)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return pool2x2_backward(grad, ctx.saved_tensors[0], ctx.average), None


class Pool2x2(nn.Module):
    """Stands for a pooling layer, which it asks wherever the kernel does not apply."""

    def __init__(self, layer: nn.MaxPool2d | nn.AvgPool2d) -> None:
        super().__init__()
        self.layer = layer
        self.average = isinstance(layer, nn.AvgPool2d)

    def forward(self, x: Tensor) -> Tensor:
        plain = context.alone and x.device.type == "cpu" and x.dim() == 4 and min(x.shape[2:]) > 1
        if not plain or x.dtype not in (torch.float32, torch.float64):
            return self.layer(x)  # type: ignore[no-any-return]
        if x.requires_grad and torch.is_grad_enabled():
            return _Pool.apply(x, self.average)  # type: ignore[no-any-return,no-untyped-call]
        return pool2x2(x, self.average)


def swap_pooling(module: nn.Module) -> None:
    """Put `Pool2x2` in the place of every 2x2 pooling layer with stride 2 inside `module`."""
    for parent in list(module.modules()):
        for name, m in list(parent.named_children()):
            if _is_2x2(m):
                setattr(parent, name, Pool2x2(m))  # type: ignore[arg-type]


def _is_2x2(m: nn.Module) -> bool:
    def both(value: Any, want: int) -> bool:
        return value in (want, (want, want), [want, want])

    if type(m) is nn.MaxPool2d:
        return (
            both(m.kernel_size, 2)
            and both(m.stride, 2)
            and both(m.padding, 0)
            and both(m.dilation, 1)
            and not (m.ceil_mode or m.return_indices)
        )
    if type(m) is nn.AvgPool2d:
        return both(m.kernel_size, 2) and both(m.stride, 2) and both(m.padding, 0) and not m.ceil_mode and m.divisor_override is None
    return False
