"""conv2d: convolution with stride 1 of small images, and its gradients. Its callers have checked its arguments."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import define


def reference(
    x: Tensor,  # [B, C, H, W]
    weight: Tensor,  # [O, C, KH, KW]
    bias: Tensor | None,  # [O]
    pad_h: int,
    pad_w: int,
) -> Tensor:  # [B, O, H + 2 pad_h - KH + 1, W + 2 pad_w - KW + 1]
    """Convolution with stride 1 of images with zeros around them."""
    return F.conv2d(x, weight, bias, padding=(pad_h, pad_w)).contiguous()


def backward_reference(
    grad: Tensor,  # like the result
    x: Tensor,
    weight: Tensor,
    pad_h: int,
    pad_w: int,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, C, H, W], [O, C, KH, KW], [O]; empty where not needed
    """The gradients of `conv2d`."""
    need = [need_x, need_weight, need_bias]
    sizes = [weight.shape[0]] if need_bias else None
    grads = torch.ops.aten.convolution_backward(grad, x, weight, sizes, [1, 1], [pad_h, pad_w], [1, 1], False, [0, 0], 1, need)
    gx, gw, gb = (g.contiguous() if want else x.new_empty(0) for g, want in zip(grads, need, strict=True))
    return gx, gw, gb


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, pad_h: int, pad_w: int) -> Tensor:
    high, wide = x.shape[2] + 2 * pad_h - weight.shape[2] + 1, x.shape[3] + 2 * pad_w - weight.shape[3] + 1
    return x.new_empty(x.shape[0], weight.shape[0], high, wide)


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, pad_h: int, pad_w: int, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = weight.shape[:1] if need_bias else (0,)
    return x.new_empty(x.shape if need_x else (0,)), x.new_empty(weight.shape if need_weight else (0,)), x.new_empty(outputs)


conv2d: Callable[..., Tensor] = define("conv2d(Tensor x, Tensor weight, Tensor? bias, int pad_h, int pad_w) -> Tensor", reference, _fake)
conv2d_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = define(
    "conv2d_backward(Tensor grad, Tensor x, Tensor weight, int pad_h, int pad_w, bool need_x, bool need_weight, bool need_bias) "
    "-> (Tensor, Tensor, Tensor)",
    backward_reference,
    _fake_backward,
)
