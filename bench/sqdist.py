"""Squared distances of client models: `pairwise_sqdist` beside torch, scipy and scikit-learn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.problem import Problem, fits, models, on_cpu
from pflcore import ops
from pflcore.ops import reference
from pflcore.results import optional


def sizes(quick: bool) -> Iterator[dict[str, int]]:
    for n, p in itertools.product((10, 20, 100, 1000), (62_006, 1_000_000, 10_000_000)):
        if n * p <= (2_000_000 if quick else 1_000_000_000):
            yield {"N": n, "P": p}


def exact(x: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """[pairs] in float64, a strip at a time."""
    total = torch.zeros(len(pairs), dtype=torch.float64, device=x.device)
    for strip in x.split(1 << 18, 1):
        total += torch.stack(
            [(strip[i].double() - strip[j].double()).square().sum() for i, j in pairs]
        )
    return total


def gram(x: Tensor) -> Tensor:
    """|a|^2 + |b|^2 - 2 ab, as most code bases write it."""
    squares = x.square().sum(1)
    return squares[:, None] + squares - 2 * (x @ x.T)


def problem(size: dict[str, int]) -> Problem | None:
    n, p = size["N"], size["P"]
    if not fits(3 * n * p):
        return None
    x = models(n, p)
    y = x[:]  # the same rows as a second operand: all N * N pairs are taken
    pairs = list(itertools.combinations(range(min(n, 5)), 2))
    want = exact(x, pairs)

    def error(got: Any) -> float:
        got = torch.as_tensor(got)
        if got.dim() == 1:  # pdist's order
            got = torch.stack([got[i * n - i * (i + 1) // 2 + j - i - 1] for i, j in pairs])
        else:
            got = torch.stack([got[i, j] for i, j in pairs])
        worst = float(((got.double() - want) / want).abs().max())
        return math.inf if math.isnan(worst) else worst

    def scipy() -> Any:
        cdist = optional("scipy.spatial.distance", "scipy").cdist
        return cdist(x.numpy(), x.numpy(), "sqeuclidean")

    def sklearn() -> Any:
        distances = optional("sklearn.metrics.pairwise", "scikit-learn").euclidean_distances
        return distances(x.numpy(), squared=True)

    return Problem(
        "sqdist",
        size,
        {
            "pflcore": lambda: ops.pairwise_sqdist(x),
            "pflcore, two operands": lambda: ops.pairwise_sqdist(x, y),
            "reference": lambda: reference.pairwise_sqdist(x, None),
            "torch.cdist, direct": lambda: torch.cdist(
                x, x, compute_mode="donot_use_mm_for_euclid_dist"
            ).square(),
            "torch.cdist, mm": lambda: torch.cdist(
                x, x, compute_mode="use_mm_for_euclid_dist"
            ).square(),
            "torch.pdist": lambda: torch.pdist(x).square(),
            "Gram float32": lambda: gram(x),
            "Gram float64": lambda: gram(x.double()),
            **on_cpu({"scipy cdist": scipy, "scikit-learn": sklearn}),
        },
        error,
        reads=4 * n * p,
        writes=8 * n * n,
        operations=3.0 * n * (n - 1) / 2 * p,
        mix="sub_fma",
        costs={"pflcore, two operands": 2 * n / max(n - 1, 1)},
    )
