"""The rank-1 linear layer: `rank1_linear` beside two `F.linear`, forward and with its backward
pass."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Problem, Size, Sizes, generator, relative
from pflcore import ops


def sizes(quick: bool) -> Sizes:
    """The network of the WAFFLe paper; active: how many of the 120 factors have lam != 0; backward:
    gradients of x and both factors, too."""
    paper = {"I": 784, "F": 120, "O": 200}
    batches = (10, 64) if quick else (10, 20, 32, 64)
    for active, backward, b in itertools.product((36, 120), (0, 1), batches):
        yield {"B": b, **paper, "active": active, "backward": backward}


def problem(size: Size) -> Problem:
    """With "N" in the size so many clients, each with a lam of its own."""
    b, i, f, o = (size[letter] for letter in "BIFO")
    n, active, backward, gen = size.get("N"), size["active"], bool(size["backward"]), generator()
    many = () if n is None else (n,)
    x, w_a, w_b, grad = (
        torch.randn(*shape, generator=gen)
        for shape in ((*many, b, i), (o, f), (f, i), (*many, b, o))
    )
    lam = torch.zeros(*many, f)
    lam[..., torch.randperm(f, generator=gen)[:active]] = 1.1
    scale = lam[..., None, :]
    inputs = [t.requires_grad_(backward) for t in (x, w_a, w_b)]

    def call(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        if not backward:
            return lambda: layer(x, w_a, w_b)
        return lambda: torch.autograd.grad(layer(x, w_a, w_b), inputs, grad)

    with torch.enable_grad():
        wide = [t.detach().double().requires_grad_() for t in inputs]
        y = F.linear(F.linear(wide[0], wide[2]) * scale.double(), wide[1])
        wants = torch.autograd.grad(y, wide, grad.double()) if backward else (y.detach(),)

    def error(got: Any) -> float:
        return max(
            relative(g.detach(), w) for g, w in zip(got if backward else (got,), wants, strict=True)
        )

    each, passes = n or 1, 3 if backward else 1  # backward takes each of the two products twice
    calls = {
        "pflcore": call(lambda x, a, w: ops.rank1_linear(x, a, lam, w)),
        "F.linear twice": call(lambda x, a, w: F.linear(F.linear(x, w) * scale, a)),
    }
    return Problem(
        "rank1_linear",
        size,
        calls,
        error,
        reads=4 * (each * b * i + active * (i + o)),
        writes=4 * (each * b * o + (each * b * i + f * (i + o) if backward else 0)),
        operations=2.0 * each * b * active * (i + o) * passes,
    )
