"""The rank-1 linear layer: `rank1_linear` compared with two `F.linear`.

It is timed forward, and with its backward pass.

Symbols: a batch of B samples of I inputs; F factors; O outputs; N clients.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Call, Problem, Size, Sizes, generator, relative
from pflcore import ops


def sizes(quick: bool) -> Sizes:
    """Sizes of the WAFFLe paper's network.

    "active" of the 120 factors have a lam other than 0. With "backward", the gradients
    of x and of both factors are computed, too.
    """
    paper = {"I": 784, "F": 120, "O": 200}
    batches = (10, 64) if quick else (10, 20, 32, 64)
    for active, backward, b in itertools.product((36, 120), (0, 1), batches):
        yield {"B": b, **paper, "active": active, "backward": backward}


def problem(size: Size) -> Problem:
    """The problem of a size; with "N", each client has a lam."""
    b = size["B"]
    i = size["I"]
    f = size["F"]
    o = size["O"]
    active = size["active"]
    backward = bool(size["backward"])
    gen = generator()
    many = (size["N"],) if "N" in size else ()
    x = torch.randn(*many, b, i, generator=gen)
    w_a = torch.randn(o, f, generator=gen)
    w_b = torch.randn(f, i, generator=gen)
    grad = torch.randn(*many, b, o, generator=gen)
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

    calls = {
        "pflcore": call(lambda x, a, w: ops.rank1_linear(x, a, lam, w)),
        "F.linear twice": call(twice),
    }
    clients = size.get("N", 1)
    written = clients * b * o
    products = 1
    if backward:
        written += clients * b * i + f * (i + o)
        products = 3  # the backward pass has each of the two products twice
    return Problem(
        "rank1_linear",
        size,
        calls,
        lambda got: max(map(relative, got, wants)),
        reads=4 * (clients * b * i + active * (i + o)),
        writes=4 * written,
        operations=2.0 * clients * b * active * (i + o) * products,
    )
