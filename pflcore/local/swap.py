"""pflcore's own kernels in the place of a model's layers, while clients train on a CPU.

Small federated models are what libraries are slowest at: torch walks 2x2 windows one by one, which is half of a LeNet's forward pass,
and its blocked convolutions spend more on changing layouts than on arithmetic where there are few channels. Pooling is the same bit for
bit, a convolution up to rounding. Second derivatives, other devices and dtypes, and `vmap` go torch's way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.nn.mode import context
from pflcore.ops.conv import conv2d, conv2d_backward
from pflcore.ops.pool import pool2x2, pool2x2_backward

FEW = 256  # products of input and output channels up to which the convolution is never slower than torch's
IMAGE = 1 << 16  # numbers of a padded image that stay in the second-level cache


def _plain(x: Tensor) -> bool:
    """May a kernel run that knows nothing of vmap, of other devices and of other dtypes?"""
    return context.alone and x.device.type == "cpu" and x.dim() == 4 and x.dtype in (torch.float32, torch.float64)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, average: bool) -> Tensor:  # [B, C, H, W] -> [B, C, H // 2, W // 2]
        ctx.average = average
        ctx.save_for_backward(x)
        return pool2x2(x, average)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return pool2x2_backward(grad, x, ctx.average), None
        x = x.detach().requires_grad_()  # a second derivative is wanted; which element is the largest has none
        y = F.avg_pool2d(x, 2) if ctx.average else F.max_pool2d(x, 2)
        return torch.autograd.grad(y, x, grad, create_graph=True)[0], None


def _pooled(x: Tensor, average: bool) -> Tensor | None:
    """By the kernel, or None where it does not apply."""
    if not _plain(x) or min(x.shape[2:]) < 2:
        return None
    if x.requires_grad and torch.is_grad_enabled():
        return _Pool.apply(x, average)  # type: ignore[no-any-return,no-untyped-call]
    return pool2x2(x, average)


class MaxPool2x2(nn.MaxPool2d):
    """Maxima of 2x2 windows."""

    def forward(self, x: Tensor) -> Tensor:
        y = _pooled(x, average=False)
        return super().forward(x) if y is None else y  # type: ignore[no-any-return]


class AvgPool2x2(nn.AvgPool2d):
    """Means of 2x2 windows."""

    def forward(self, x: Tensor) -> Tensor:
        y = _pooled(x, average=True)
        return super().forward(x) if y is None else y


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(x, weight)
        return conv2d(x, weight, bias, *padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # a second derivative is wanted
            sizes = [weight.shape[0]] if need[2] else None
            grads = torch.ops.aten.convolution_backward(grad, x, weight, sizes, [1, 1], ctx.padding, [1, 1], False, [0, 0], 1, need)
        else:
            grads = conv2d_backward(grad, x, weight, *ctx.padding, *need)
        return (*(g if want else None for g, want in zip(grads, need, strict=True)), None)


class SmallConv2d(nn.Conv2d):
    """A convolution of few channels with stride 1."""

    @property
    def _padding(self) -> tuple[int, int]:
        high, wide = (int(p) for p in self.padding)
        return high, wide

    def forward(self, x: Tensor) -> Tensor:
        (pad_h, pad_w), fits = self._padding, _plain(x) and x.dtype == self.weight.dtype and x.shape[1] == self.in_channels
        high, wide = (x.shape[2] + 2 * pad_h, x.shape[3] + 2 * pad_w) if fits else (0, 0)
        if high < self.kernel_size[0] or wide < self.kernel_size[1] or x.shape[1] * high * wide > IMAGE:
            return super().forward(x)
        return _Conv.apply(x, self.weight, self.bias, self._padding)  # type: ignore[no-any-return,no-untyped-call]


def swap_layers(module: nn.Module) -> None:
    """Put the kernels in the place of what they can stand for inside `module`, which nobody else may hold.

    A layer changes its class: it keeps its parameters, their names and its hooks.
    """
    for m in list(module.modules()):
        if _is_small(m):
            m.__class__ = SmallConv2d
        elif _is_2x2(m):
            m.__class__ = MaxPool2x2 if type(m) is nn.MaxPool2d else AvgPool2x2


def swappable(module: nn.Module) -> bool:
    """Whether `swap_layers` would exchange anything."""
    return any(_is_small(m) or _is_2x2(m) for m in module.modules())


def _is_small(m: nn.Module) -> bool:
    return (
        type(m) is nn.Conv2d
        and m.stride == (1, 1)
        and m.dilation == (1, 1)
        and m.groups == 1
        and m.padding_mode == "zeros"
        and not isinstance(m.padding, str)
        and m.in_channels * m.out_channels <= FEW
    )


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
