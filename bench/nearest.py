"""The nearest among many clients: `nearest` by groups and by all pairs.

The clients form clusters, with isotropic noise in each.

Symbols: G groups of C clients; models of P parameters.
"""

from typing import Any

import torch

from bench.problem import Problem, Size, Sizes, fits
from pflcore import ops

K = 10


def sizes(quick: bool) -> Sizes:
    """Sizes G, C and P."""
    yield {"G": 20, "C": 20, "P": 4001}
    if quick:
        return
    for groups in (50, 100):
        yield {"G": groups, "C": groups, "P": 61_706}


def problem(size: Size) -> Problem | None:
    """The problem of a size; None where the memory is too small.

    Its error is the share of the found neighbours that are wrong.
    """
    groups = size["G"]
    n = size["G"] * size["C"]
    p = size["P"]
    if not fits(3 * n * p):
        return None
    gen = torch.Generator().manual_seed(0)
    centre = 0.05 * torch.randn(groups, p, generator=gen)
    rows = centre[torch.randperm(n, generator=gen) % groups]
    rows.add_(torch.randn(n, p, generator=gen), alpha=1e-3)
    guide = rows.add(torch.randn(n, p, generator=gen), alpha=1e-3)
    want = ops.nearest(guide[:100], rows, K).index

    def error(got: Any) -> float:
        is_right = (got[1][:100, :, None] == want[:, None]).any(-1)
        return 1 - float(is_right.double().mean())

    def plain() -> Any:
        far = torch.cdist(guide, rows, compute_mode="donot_use_mm_for_euclid_dist")
        return far.topk(K, 1, largest=False)

    providers = {
        "pflcore": lambda: ops.nearest(guide, rows, K, "groups"),
        "all pairs": lambda: ops.nearest(guide, rows, K),
        "torch.cdist, direct": plain,
    }
    return Problem("nearest", size, providers, error)
