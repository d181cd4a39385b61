"""The rank-1 linear layer: `rank1_linear` beside two `F.linear`, forward and with its
backward pass."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Call, Problem, Size, Sizes, generator, relative
from pflcore import ops


def sizes(quick: bool) -> Sizes:
    """The network of the WAFFLe paper; active: how many of the 120 factors have lam !=
    0; backward: gradients of x and both factors, too."""
    paper = {"I": 784, "F": 120, "O": 200}
    batches = (10, 64) if quick else (10, 20, 32, 64)
    for active, backward, b in itertools.product((36, 120), (0, 1), batches):
        yield {"B": b, **paper, "active": active, "backward": backward}


def problem(size: Size) -> Problem:
    """With "N" in the size so many clients, each with a lam of its own."""
    b, i, f, o = (size[letter] for letter in "BIFO")
    n, active, backward, gen = (
        size.get("N"),
        size["active"],
        bool(size["backward"]),
        generator(),
    )
    many = () if n is None else (n,)
    x, w_a, w_b, grad = (
        torch.randn(*shape, generator=gen)
        for shape in ((*many, b, i), (o, f), (f, i), (*many, b, o))
    )
    lam = torch.zeros(*many, f)
    lam[..., torch.randperm(f, generator=gen)[:active]] = 1.1
    scale = lam[..., None, :]
    inputs = [t.requires_grad_(backward) for t in (x, w_a, w_b)]

    def call(
        layer: Callable[[Tensor, Tensor, Tensor], Tensor], t: list[Tensor] = inputs
    ) -> Call:
        if not backward:
            return lambda: [layer(*t)]
        return lambda: torch.autograd.grad(layer(*t), t, grad.to(t[0]))

    def twice(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.linear(x, w) * scale.to(x), a)

    wide = [t.detach().double().requires_grad_(backward) for t in inputs]
    with torch.set_grad_enabled(backward):
        wants = call(twice, wide)()

    each = n or 1
    calls = {
        "pflcore": call(lambda x, a, w: ops.rank1_linear(x, a, lam, w)),
        "F.linear twice": call(twice),
    }
    return Problem(
        "rank1_linear",
        size,
        calls,
        lambda got: max(map(relative, got, wants)),
        reads=4 * (each * b * i + active * (i + o)),
        writes=4 * (each * b * o + (each * b * i + f * (i + o) if backward else 0)),
        # backward takes each of the two products twice
        operations=2.0 * each * b * active * (i + o) * (3 if backward else 1),
    )
