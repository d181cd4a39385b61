"""The nearest among many clients: `nearest` by groups (pflcore) and by all pairs;
clusters with isotropic noise within."""

from typing import Any

import torch

from bench.problem import Problem, Size, Sizes, fits
from pflcore import ops

K = 10


def sizes(quick: bool) -> Sizes:
    """G groups of C clients each."""
    yield {"G": 20, "C": 20, "P": 4001}
    for groups in () if quick else (50, 100):
        yield {"G": groups, "C": groups, "P": 61_706}


def problem(size: Size) -> Problem | None:
    """The error is the share of neighbours that are none."""
    groups, n, p = size["G"], size["G"] * size["C"], size["P"]
    if not fits(3 * n * p):
        return None
    gen = torch.Generator().manual_seed(0)
    centre = 0.05 * torch.randn(groups, p, generator=gen)
    rows = centre[torch.randperm(n, generator=gen) % groups]
    rows.add_(torch.randn(n, p, generator=gen), alpha=1e-3)
    guide = rows.add(torch.randn(n, p, generator=gen), alpha=1e-3)
    few = ops.nearest(guide[:100], rows, K).index

    def plain() -> Any:
        far = torch.cdist(guide, rows, compute_mode="donot_use_mm_for_euclid_dist")
        return far.topk(K, 1, largest=False)

    providers = {
        "pflcore": lambda: ops.nearest(guide, rows, K, "groups"),
        "all pairs": lambda: ops.nearest(guide, rows, K),
        "torch.cdist, direct": plain,
    }
    return Problem(
        "nearest",
        size,
        providers,
        lambda got: (
            1 - float((got[1][:100, :, None] == few[:, None]).any(-1).double().mean())
        ),
    )
