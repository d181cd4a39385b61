"""Squared distances of client models: `pairwise_sqdist` and other libraries.

They are torch, scipy and scikit-learn.

Symbols: N models of P parameters.
"""

from typing import Any

import torch
from torch import Tensor

from bench.problem import Problem, Size, cohorts, fits, gram, models, on_cpu, relative
from pflcore import ops

sizes = cohorts

# The most elements of pairs with which torch's direct distances are timed on a card.
# More take it seconds a call.
DIRECT_MAX_ELEMENTS = 1e11


def exact(x: Tensor) -> Tensor:
    """Squared distances [N, N] in float64, computed in strips of columns."""
    sums = []
    for strip in x.split(1 << 18, 1):
        difference = strip[:, None].double() - strip
        sums.append(difference.square().sum(-1))
    return torch.stack(sums).sum(0)


def problem(size: Size) -> Problem | None:
    """The problem of a size; None where the memory is too small."""
    n = size["N"]
    p = size["P"]
    if not fits(4 * n * p):
        return None
    x = models(n, p)
    other = x.clone()
    checked = min(n, 5)  # models
    i, j = torch.triu_indices(checked, checked, 1)
    want = exact(x[:checked])[i, j]

    def error(got: Any) -> float:
        got = torch.as_tensor(got)
        if got.dim() == 1:  # pdist gives the pairs in a row.
            pairs = tuple(torch.triu_indices(n, n, 1))
            got = got.new_zeros(n, n).index_put_(pairs, got)
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

    providers = {
        "pflcore": lambda: ops.pairwise_sqdist(x),
        # The other operand is a copy. Of one matrix, each pair would be computed once.
        "pflcore, two operands": lambda: ops.pairwise_sqdist(x, other),
        **direct,
        "torch.cdist, mm": lambda: cdist(""),
        "Gram float32": lambda: gram(x, x),
        "Gram float64": lambda: gram(x.double(), x.double()),
        **on_cpu({"scipy cdist": scipy, "scikit-learn": sklearn}),
    }
    return Problem(
        "sqdist",
        size,
        providers,
        error,
        reads=4 * n * p,
        writes=8 * n * n,
        operations=3.0 * n * (n - 1) / 2 * p,
        mix="sub_fma",
        costs={"pflcore, two operands": 2 * n / max(n - 1, 1)},
    )
