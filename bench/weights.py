"""Weights from distances: `feddwa_weights` and `waffle_weights`, and torch.

At N = 10 clients, launching costs more than the arithmetic.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Calls, Problem, Size, Sizes, generator, relative
from pflcore import ops
from pflcore.ops import reference


def sizes(quick: bool) -> Sizes:
    """Both rules for N clients."""
    clients = (10, 100) if quick else (10, 20, 100, 1000)
    for n in clients:
        yield {"rule": "feddwa", "N": n, "K": 5}
        yield {"rule": "waffle", "N": n}


def problem(size: Size) -> Problem:
    """The problem of a rule and a size."""
    n = size["N"]
    sqdist = ops.pairwise_sqdist(torch.randn(n, 50, generator=generator()))
    if size["rule"] == "waffle":
        providers = waffle_calls(sqdist)
    else:
        providers = feddwa_calls(sqdist, size["K"])

    def error(got: Any) -> float:
        return relative(got[0], providers["reference"]()[0])

    return Problem(f"{size['rule']}_weights", size, providers, error)


def waffle_calls(sqdist: Tensor) -> Calls:
    """WAFFLE's weights for client 0."""
    dist = sqdist[0].sqrt()
    target = torch.tensor(0)
    omega = 0.6
    psi = 0.7

    def by_reference() -> list[Tensor]:
        return [reference.waffle_weights(dist, target, omega, psi)]

    return {
        "pflcore": lambda: [ops.waffle_weights(dist, 0, omega, psi)],
        "reference": by_reference,
    }


def feddwa_calls(sqdist: Tensor, k: int) -> Calls:
    """FedDWA's weights of the k nearest models."""

    def by_torch() -> tuple[Tensor, Tensor]:
        near = sqdist.topk(k, 1, largest=False)
        inverse = near.values.clamp(min=1e-12).reciprocal()
        return F.normalize(inverse, 1, 1), near.indices

    return {
        "pflcore": lambda: ops.feddwa_weights(sqdist, k),
        "reference": lambda: reference.feddwa_weights(sqdist, k),
        "torch": by_torch,
    }
