"""The fused step of local training, `sgd_step_`, and its torch calls.

Symbols: S clients' models of Q parameters.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from bench.problem import Problem, Size, Sizes, generator, relative
from pflcore import ops

LR = 0.01
MU = 0.1


def sizes(quick: bool) -> Sizes:
    """Sizes S and Q of linear models, MLPs, LeNets and CNNs.

    "corrected" is 0 for plain SGD, and 1 for a step with a correction and a proximal
    term.
    """
    shapes = ((139, 30), (10, 159_010), (20, 61_706), (20, 582_026))
    for full, (s, q) in itertools.product((0, 1), shapes):
        if not quick or s * q < 2_000_000:
            yield {"S": s, "Q": q, "corrected": full}


def problem(size: Size) -> Problem:
    """The problem of a size."""
    s = size["S"]
    q = size["Q"]
    full = bool(size["corrected"])
    gen = generator()
    start = torch.randn(s, q, generator=gen)
    grad = torch.randn(s, q, generator=gen)
    shift = torch.randn(s, q, generator=gen)
    anchor = torch.randn(s, q, generator=gen)
    w = start.clone()
    more: tuple[Any, ...] = ()
    tables_read = 2  # w and grad
    operations = 2
    if full:
        more = (shift, None, MU, anchor)
        tables_read = 4
        operations = 6

    def ours() -> Tensor:
        ops.sgd_step_(w, grad, LR, *more)
        return w

    def plain(w: Tensor, grad: Tensor, shift: Tensor, anchor: Tensor) -> Tensor:
        step = grad
        if full:
            step = grad + shift
            step.add_(w - anchor, alpha=MU)
        return w.sub_(step, alpha=LR)

    def error(got: Any) -> float:
        """The error of one step from the start.

        The timed calls took many steps.
        """
        w.copy_(start)
        want = plain(start.double(), grad.double(), shift.double(), anchor.double())
        return relative(ours(), want)

    return Problem(
        "sgd_step_",
        size,
        {"pflcore": ours, "torch": lambda: plain(w, grad, shift, anchor)},
        error,
        reads=4 * s * q * tables_read,
        writes=4 * s * q,
        operations=float(s * q * operations),
    )
