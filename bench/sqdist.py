"""Squared distances of client models: `pairwise_sqdist` beside torch, scipy and scikit-learn."""

import itertools
from typing import Any

import torch
from torch import Tensor

from bench.problem import Problem, Size, cohorts, fits, gram, models, on_cpu, relative
from pflcore import ops

sizes = cohorts


def exact(x: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """[pairs] in float64, a strip at a time."""
    total = torch.zeros(len(pairs), dtype=torch.float64, device=x.device)
    for strip in x.split(1 << 18, 1):
        total += torch.stack(
            [(strip[i].double() - strip[j].double()).square().sum() for i, j in pairs]
        )
    return total


def problem(size: Size) -> Problem | None:
    n, p = size["N"], size["P"]
    if not fits(3 * n * p):
        return None
    x = models(n, p)
    pairs = list(itertools.combinations(range(min(n, 5)), 2))
    want = exact(x, pairs)

    def error(got: Any) -> float:
        got = torch.as_tensor(got)
        if got.dim() == 1:  # pdist's order
            got = got.new_zeros(n, n).index_put_(tuple(torch.triu_indices(n, n, 1)), got)
        got = torch.stack([got[i, j] for i, j in pairs])
        return relative(got.double() / want, torch.ones_like(want))

    def scipy() -> Any:
        from scipy.spatial.distance import cdist

        return cdist(x.numpy(), x.numpy(), "sqeuclidean")

    def sklearn() -> Any:
        from sklearn.metrics.pairwise import euclidean_distances

        return euclidean_distances(x.numpy(), squared=True)

    def cdist(mode: str) -> Tensor:
        return torch.cdist(x, x, compute_mode=f"{mode}use_mm_for_euclid_dist").square()

    return Problem(
        "sqdist",
        size,
        {
            "pflcore": lambda: ops.pairwise_sqdist(x),
            # all N * N pairs are taken
            "pflcore, two operands": lambda: ops.pairwise_sqdist(
                x, x[:]
            ),  # all N * N pairs are taken
            "torch.cdist, direct": lambda: cdist("donot_"),
            "torch.cdist, mm": lambda: cdist(""),
            "torch.pdist": lambda: torch.pdist(x).square(),
            "Gram float32": lambda: gram(x, x),
            "Gram float64": lambda: gram(x.double(), x.double()),
            **on_cpu({"scipy cdist": scipy, "scikit-learn": sklearn}),
        },
        error,
        reads=4 * n * p,
        writes=8 * n * n,
        operations=3.0 * n * (n - 1) / 2 * p,
        mix="sub_fma",
        costs={"pflcore, two operands": 2 * n / max(n - 1, 1)},
    )
