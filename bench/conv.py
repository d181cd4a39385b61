"""Convolutions of few channels, forward and backward, beside torch's on the same thread: what a local step of a small CNN is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Problem, relative
from pflcore.ops import conv

PROVIDERS = ("pflcore", "torch")


def sizes(quick: bool) -> Iterator[dict[str, int]]:
    """B images of C x H x H, O outputs, kernels of K x K: LeNet-5's layers on 28 x 28 and 32 x 32, and those of a small ResNet."""
    layers = ((1, 28, 6, 5, 2), (6, 14, 16, 5, 0), (3, 32, 6, 5, 0), (8, 32, 8, 3, 1), (16, 16, 16, 3, 1))
    for (c, h, o, k, pad), back in itertools.product(layers[: 2 if quick else None], (0, 1)):
        yield {"backward": back, "B": 20, "C": c, "H": h, "O": o, "K": k, "pad": pad}


def problem(size: dict[str, int]) -> Problem:
    back, b, c, h, o, k, pad = (size[name] for name in ("backward", "B", "C", "H", "O", "K", "pad"))
    gen = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(b, c, h, h, generator=gen), torch.randn(o, c, k, k, generator=gen), torch.randn(o, generator=gen)
    grad = torch.randn(b, o, h + 2 * pad - k + 1, h + 2 * pad - k + 1, generator=gen)
    need = [c > 3, True, True]  # images need no gradient

    def theirs(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        if not back:
            return F.conv2d(x, weight, bias.to(x.dtype), padding=pad)
        return torch.ops.aten.convolution_backward(grad, x, weight, [o], [1, 1], [pad, pad], [1, 1], False, [0, 0], 1, need)

    def ours() -> Any:
        return conv.conv2d_backward(grad, x, weight, pad, pad, *need) if back else conv.conv2d(x, weight, bias, pad, pad)

    def error(got: Any) -> float:
        want = theirs(grad.double(), x.double(), weight.double())
        pairs = [(g, w) for g, w in zip(got, want, strict=True) if w is not None and g.numel()] if back else [(got, want)]
        return max(relative(g, w) for g, w in pairs)

    numbers = x.numel() + weight.numel() + grad.numel()
    return Problem(
        "conv2d backward" if back else "conv2d",
        size,
        {"pflcore": ours, "torch": lambda: theirs(grad, x, weight)},
        error,
        reads=4 * (numbers if back else x.numel() + weight.numel()),
        writes=4 * (weight.numel() + x.numel() * need[0] if back else grad.numel()),
        operations=2.0 * grad.numel() * c * k * k * (sum(need[:2]) if back else 1),
    )
