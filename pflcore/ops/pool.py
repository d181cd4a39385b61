"""pool2x2: 2x2 pooling with stride 2, and its gradient. Its callers have checked its arguments."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import define


def reference(
    x: Tensor,  # [B, C, H, W]
    average: bool,
) -> Tensor:  # [B, C, H // 2, W // 2]
    """2x2 pooling with stride 2: the mean or the maximum of each window."""
    return F.avg_pool2d(x, 2) if average else F.max_pool2d(x, 2)


def backward_reference(
    grad: Tensor,  # [B, C, H // 2, W // 2]
    x: Tensor,  # [B, C, H, W]
    average: bool,
) -> Tensor:  # [B, C, H, W]
    """The gradient of `pool2x2` by its input; a maximum's goes to the first of equals."""
    aten = torch.ops.aten
    if average:
        g: Tensor = aten.avg_pool2d_backward(grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    else:
        _, index = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        g = aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
    return g.contiguous()


def _fake(x: Tensor, average: bool) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)


def _fake_backward(grad: Tensor, x: Tensor, average: bool) -> Tensor:
    return x.new_empty(x.shape)


pool2x2: Callable[..., Tensor] = define("pool2x2(Tensor x, bool average) -> Tensor", reference, _fake)
pool2x2_backward: Callable[..., Tensor] = define(
    "pool2x2_backward(Tensor grad, Tensor x, bool average) -> Tensor", backward_reference, _fake_backward
)
