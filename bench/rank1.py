"""The rank-1 linear layer: `rank1_linear` beside two `F.linear`, forward and with its backward
pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Problem, relative
from pflcore import ops

INPUTS, OUTPUTS, FACTORS = 784, 200, 120  # the network of the WAFFLe paper


def sizes(quick: bool) -> Iterator[dict[str, Any]]:
    """active: how many of the 120 factors have lam != 0; backward: gradients of x and both factors,
    too."""
    for active, backward, b in itertools.product(
        (36, 120), (0, 1), (10, 64) if quick else (10, 20, 32, 64)
    ):
        yield {"B": b, "active": active, "backward": backward}


def problem(size: dict[str, Any]) -> Problem:
    b, active, backward = size["B"], size["active"], bool(size["backward"])
    gen = torch.Generator().manual_seed(0)
    x, w_a, w_b = (
        torch.randn(*shape, generator=gen)
        for shape in ((b, INPUTS), (OUTPUTS, FACTORS), (FACTORS, INPUTS))
    )
    lam = torch.zeros(FACTORS)
    lam[torch.randperm(FACTORS, generator=gen)[:active]] = 1.1
    grad = torch.randn(b, OUTPUTS, generator=gen)
    inputs = [t.requires_grad_(backward) for t in (x, w_a, w_b)]

    def call(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        if not backward:
            return lambda: layer(x, w_a, w_b)
        return lambda: torch.autograd.grad(layer(x, w_a, w_b), inputs, grad)

    with torch.enable_grad():
        wide = [t.detach().double().requires_grad_() for t in inputs]
        y = F.linear(F.linear(wide[0], wide[2]) * lam.double(), wide[1])
        wants = torch.autograd.grad(y, wide, grad.double()) if backward else (y.detach(),)

    def error(got: Any) -> float:
        return max(
            relative(g.detach(), w) for g, w in zip(got if backward else (got,), wants, strict=True)
        )

    passes = 3 if backward else 1  # the backward pass takes each of the two products twice
    return Problem(
        "rank1_linear",
        size,
        {
            "pflcore": call(lambda x, a, w: ops.rank1_linear(x, a, lam, w)),
            "F.linear twice": call(lambda x, a, w: F.linear(F.linear(x, w) * lam, a)),
            "dense weight": call(lambda x, a, w: F.linear(x, (a * lam) @ w)),
        },
        error,
        reads=4 * (b * INPUTS + active * (INPUTS + OUTPUTS)),
        writes=4 * (b * OUTPUTS + (b * INPUTS + FACTORS * (INPUTS + OUTPUTS) if backward else 0)),
        operations=2.0 * b * active * (INPUTS + OUTPUTS) * passes,
    )
