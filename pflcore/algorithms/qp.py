"""The quadratic programme of FedDWA's Eq. 12: least `p . W p` over the simplex, `sum(p) = 1`, `p >=
0`."""

from __future__ import annotations

import torch
from torch import Tensor


def inner_products(to_guide: Tensor, between: Tensor) -> Tensor:
    """FedDWA's W (Eq. 11) from exact squared distances alone.

    to_guide [K]: |g - w_j|^2; between [K, K]: |w_j - w_k|^2; float64 [K, K]: (g - w_j) . (g - w_k).
    Its curvature on the simplex comes from `between` alone, so that nothing is lost where the
    models are much closer to each other than to the guide.
    """
    return (to_guide[:, None] + to_guide - between) / 2


def simplex_qp(w: Tensor, ridge: float = 1e-10, tolerance: float = 1e-13) -> Tensor:
    """The p [K] that minimises `p . w p` over the simplex, for a positive semidefinite `w` [K, K];
    float64.

    An active set: start at the best vertex, let the constraint with the most negative gradient go,
    and walk to the optimum of the face that is reached, dropping what becomes negative on the way
    (Wolfe 1976, Finding the nearest point in a polytope). `ridge` times the mean of the diagonal is
    added to it, which picks the shortest p where several are optimal; 0 adds nothing.
    """
    if w.dim() != 2 or w.shape[0] != w.shape[1] or not w.numel():
        raise ValueError(f"w: expected a square matrix, got {tuple(w.shape)}.")
    if not ridge >= 0:
        raise ValueError(f"ridge: expected a number >= 0, got {ridge}.")
    if not bool(w.isfinite().all()):
        raise ValueError(
            "w: expected finite entries; leave clients with NaN or infinite models out."
        )
    k, w = len(w), w.double().cpu()
    scale = float(w.diagonal().max())
    if scale <= 0:  # every model is the guide itself
        return torch.full((k,), 1 / k, dtype=torch.float64)
    w = (w + w.T) / (2 * scale)
    w = w + ridge * w.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    p = torch.zeros(k, dtype=torch.float64)
    p[w.diagonal().argmin()] = 1
    # the objective falls at every pass, so none repeats; the bound is for rounding
    for _ in range(20 * k):
        slope = w @ p
        j = int(slope.argmin())
        if slope[j] >= p @ slope - tolerance or p[j] > 0:
            break
        p = _to_face(w, p, [*p.nonzero()[:, 0].tolist(), j])
    return p / p.sum()


def _to_face(w: Tensor, p: Tensor, free: list[int]) -> Tensor:
    """From p to the optimum of the face of the coordinates `free`, or to that of the smaller face
    where the way there ends."""
    while True:
        m = len(free)
        system = torch.zeros(m + 1, m + 1, dtype=torch.float64)
        system[:m, :m], system[:m, m], system[m, :m] = w[free][:, free], 1, 1
        right = torch.zeros(m + 1, 1, dtype=torch.float64)
        right[m] = 1
        # the shortest one where the system is singular
        aim = torch.linalg.lstsq(system, right, driver="gelsd").solution[:m, 0]
        here, out = p[free], torch.zeros_like(p)
        if bool((aim > 0).all()):
            out[free] = aim
            return out
        falls = aim <= 0
        reach = (here / (here - aim).clamp(min=torch.finfo(torch.float64).tiny)).masked_fill(
            ~falls, torch.inf
        )
        step = float(reach.min().clamp(max=1))
        here = here + step * (aim - here)
        here[falls & (reach <= step)] = 0
        out[free] = here.clamp(min=0)
        p, free = out, out.nonzero()[:, 0].tolist()
        if len(free) == 1:
            return p / p.sum()
