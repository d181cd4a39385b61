"""The fused step of local training: `sgd_step_` beside the torch calls that it
replaces, with a correction and a proximal term."""

import itertools
from typing import Any

import torch
from torch import Tensor

from bench.problem import Problem, Size, Sizes, generator, relative
from pflcore import ops

LR, MU = 0.01, 0.1


def sizes(quick: bool) -> Sizes:
    """S clients of Q parameters: a linear model, an MLP, a LeNet, a CNN; plain SGD, and
    with all corrections."""
    for full, (s, q) in itertools.product(
        (0, 1), ((139, 30), (10, 159_010), (20, 61_706), (20, 582_026))
    ):
        if not quick or s * q < 2_000_000:
            yield {"S": s, "Q": q, "corrected": full}


def problem(size: Size) -> Problem:
    s, q, full = size["S"], size["Q"], bool(size["corrected"])
    gen = generator()
    start, grad, shift, anchor = (torch.randn(s, q, generator=gen) for _ in range(4))
    w, more = start.clone(), (shift, None, MU, anchor) if full else ()

    def ours() -> Tensor:
        ops.sgd_step_(w, grad, LR, *more)  # type: ignore[arg-type]
        return w

    def plain(w: Tensor, grad: Tensor, shift: Tensor, anchor: Tensor) -> Tensor:
        step = grad
        if full:
            step = grad + shift
            step.add_(w - anchor, alpha=MU)
        return w.sub_(step, alpha=LR)

    def error(got: Any) -> float:
        """One step from the start: the timed calls took many."""
        w.copy_(start)
        return relative(
            ours(), plain(*(v.double() for v in (start, grad, shift, anchor)))
        )

    return Problem(
        "sgd_step_",
        size,
        {"pflcore": ours, "torch": lambda: plain(w, grad, shift, anchor)},
        error,
        reads=4 * s * q * (4 if full else 2),
        writes=4 * s * q,
        operations=float(s * q * (6 if full else 2)),
    )
