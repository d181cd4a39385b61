"""Squared distances of client models: `pairwise_sqdist` beside torch, scipy and
scikit-learn."""

from typing import Any

import torch
from torch import Tensor

from bench.problem import Problem, Size, cohorts, fits, gram, models, on_cpu, relative
from pflcore import ops

sizes = cohorts

# Elements of pairs that torch's direct distances take on a card; more take it seconds a
# call.
DIRECT_MAX_ELEMENTS = 1e11


def exact(x: Tensor) -> Tensor:
    """[n, n] in float64, a strip at a time."""
    strips = [(s[:, None].double() - s).square().sum(-1) for s in x.split(1 << 18, 1)]
    return torch.stack(strips).sum(0)


def problem(size: Size) -> Problem | None:
    n, p = size["N"], size["P"]
    if not fits(3 * n * p):
        return None
    x = models(n, p)
    few = min(n, 5)  # that are checked
    i, j = torch.triu_indices(few, few, 1)
    want = exact(x[:few])[i, j]

    def error(got: Any) -> float:
        got = torch.as_tensor(got)
        if got.dim() == 1:  # pdist's order
            got = got.new_zeros(n, n).index_put_(
                tuple(torch.triu_indices(n, n, 1)), got
            )
        return relative(got[i, j].double() / want, torch.ones_like(want))

    def scipy() -> Any:
        from scipy.spatial.distance import cdist

        return cdist(x.numpy(), x.numpy(), "sqeuclidean")

    def sklearn() -> Any:
        from sklearn.metrics.pairwise import euclidean_distances

        return euclidean_distances(x.numpy(), squared=True)

    def cdist(mode: str) -> Tensor:
        return torch.cdist(x, x, compute_mode=f"{mode}use_mm_for_euclid_dist").square()

    direct = {
        "torch.cdist, direct": lambda: cdist("donot_"),
        "torch.pdist": lambda: torch.pdist(x).square(),
    }
    if x.is_cuda and n * n * p > DIRECT_MAX_ELEMENTS:
        direct = {}

    return Problem(
        "sqdist",
        size,
        {
            "pflcore": lambda: ops.pairwise_sqdist(x),
            # all N * N pairs are taken
            "pflcore, two operands": lambda: ops.pairwise_sqdist(x, x[:]),
            **direct,
            "torch.cdist, mm": lambda: cdist(""),
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
