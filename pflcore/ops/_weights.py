"""Two rules that turn distances into mixing weights, in float64: WAFFLE's and FedDWA's.

Symbols: N clients; M receivers; K neighbours of a receiver; d distances.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore.check import reject, require

from ._check import (
    check_floating,
    check_index,
    check_index_range,
    check_matrix,
    check_number,
    is_int,
)
from ._library import define, warn_of_references

TIES = ("closed", "uniform")


class TopK(NamedTuple):
    """The K nearest neighbours of each row, nearest first.

    They are arguments of `aggregate(updates, *top)`.
    """

    weight: Tensor  # [M, K] float64, rows sum to 1
    index: Tensor  # type: ignore[assignment]  # [M, K] int64


def waffle_weights(
    dist: Tensor,  # [..., N] distances (not squared) from the target
    target: int | Tensor,  # the target's number, or int64 [...]
    omega: float,
    psi: float | None = None,
    tie: str = "closed",
) -> Tensor:  # [..., N] float64
    """WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1), each row summing to 1.

    With low and high the least and largest distance of the others,
    `t = (d - low) / (high - low)` and `s = low / high * (1 - omega)`: raw weight
    `max(psi - (t + s) / (1 + s), 0)`, the target's is `psi` (omega > 1: `t + s`, line 6
    as printed). This closed form equals the paper's and never divides by zero. All
    others equally far: t = 0 (`tie="closed"`), or everybody gets 1/N (`tie="uniform"`);
    all at distance 0: 1/N; psi = 0 or N = 1: all weight on the target. The target's own
    distance is ignored. A distance that is not finite is an absent client, of weight 0;
    a negative one counts as 0. The weights are constants: no gradient flows through
    them.

    omega: Omega(r) >= 0; psi: Psi(r) >= 0, None: the same as omega. The 0.95 rule and
    the smoothing over rounds belong to the algorithm.
    """
    psi = omega if psi is None else psi
    _check_waffle(dist, target, omega, psi, tie)
    if not isinstance(target, Tensor):
        target = torch.full((), int(target), dtype=torch.int64, device=dist.device)
    warn_of_references()
    if dist.requires_grad:
        dist = dist.detach()
    return _waffle(dist, target, omega, psi, tie == "uniform")


def _check_waffle(dist: Any, target: Any, omega: Any, psi: Any, tie: Any) -> None:
    """Raises ValueError or TypeError for arguments that the op does not accept."""
    op = "waffle_weights"
    check_floating(op, "dist", dist)
    n = dist.shape[-1] if dist.dim() else 0
    require(n > 0, "waffle_weights(dist)", "[..., N] with N > 0", dist)
    for name, value in (("omega", omega), ("psi", psi)):
        check_number(op, name, value)
        if not 0 <= value <= 1e100:  # so that a sum of them is finite
            reject(f"{op}({name})", "a number from 0 to 1e100", value)
    if tie not in TIES:
        reject(f"{op}(tie)", "'closed' or 'uniform'", tie, TIES)
    if is_int(target):
        if not 0 <= target < n:
            reject(f"{op}(target)", f"a whole number from 0 to {n - 1}", target)
        return
    if not isinstance(target, Tensor):
        expected = "a whole number or an int64 tensor"
        reject(f"{op}(target)", expected, target, error=TypeError)
    check_index(op, "dist", dist, "target", target)
    if target.dim() and target.shape != dist.shape[:-1]:
        expected = f"a number for each row of dist, {list(dist.shape[:-1])}"
        reject(f"{op}(target)", expected, target)
    check_index_range(op, "target", target, n)


def feddwa_weights(
    sqdist: Tensor,  # [M, N] squared distances, row i the receiver's
    k: int,
) -> TopK:
    """FedDWA's weights (Liu et al. 2023, Eq. 15 and 8) of the k nearest of each row.

    They are in proportion to 1 / squared distance, and rows sum to 1. Ties go to the
    lower index; k >= N takes all.

    - Where distances are 0, only those count, equally.
    - NaN counts as infinitely far, a negative distance as 0.
    - An infinitely far neighbour has weight 0, and a row of nothing else is uniform.

    No weight is NaN. The weights are constants: no gradient flows through them.
    """
    op = "feddwa_weights"
    if not (type(k) is int and k > 0):
        is_valid = is_int(k) and k > 0
        require(is_valid, "feddwa_weights(k)", "a whole number above 0", k)
        k = k if isinstance(k, int | torch.SymInt) else int(k)  # a number of numpy's
    check_matrix(op, "sqdist", sqdist, "[M, N]")
    if sqdist.shape[1] == 0:
        reject(f"{op}(sqdist)", "at least one column", sqdist)
    warn_of_references()
    if sqdist.requires_grad:
        sqdist = sqdist.detach()
    return TopK(*_feddwa(sqdist, k))


def waffle_reference(
    dist: Tensor,  # [..., N] distances (not squared) from the target
    target: Tensor,  # [...] int64
    omega: float,
    psi: float,
    uniform_ties: bool,
) -> Tensor:  # [..., N] float64
    """WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1) in a form that never
    divides by zero."""
    d = dist.double().contiguous()
    # [..., N]
    is_target = torch.arange(d.shape[-1], device=d.device) == target[..., None]
    other = d.isfinite() & ~is_target  # before the clamp: -Inf is no distance
    d = d.clamp(min=0)
    high = torch.where(other, d, 0.0).amax(-1, keepdim=True)  # [..., 1]
    low = torch.where(other, d, math.inf).amin(-1, keepdim=True)
    gap = high - low
    tied = gap <= 1e-12 * high
    t = torch.where(tied, 0.0, (d - low) / gap)
    s = torch.where(tied, 1.0, low / high) * (1 - omega)
    ratio = (t + s) / (1 + s) if omega <= 1 else t + s
    ratio = torch.where((high == 0) | (tied & uniform_ties), 0.0, ratio)
    raw = torch.where(other, (psi - ratio).clamp(min=0), 0.0)
    raw = torch.where(is_target, psi, raw)
    alone = ~other.any(-1, keepdim=True) | (psi == 0)
    return torch.where(alone, is_target.double(), raw / raw.sum(-1, keepdim=True))


def feddwa_reference(
    sqdist: Tensor,  # [M, N] squared distances
    k: int,
) -> tuple[Tensor, Tensor]:  # [M, K] float64, [M, K] int64
    """The K nearest of each row by (distance, index), weighted by 1 / squared distance
    (FedDWA, Liu et al. 2023, Eq. 15 and 8)."""
    d = sqdist.double().contiguous()
    d = torch.where(d.isnan(), math.inf, d.clamp(min=0))
    value, index = d.sort(dim=1, stable=True)
    value = value[:, :k]
    index = index[:, :k].contiguous()
    nearest = value[:, :1]
    # only equals of the nearest count; else nearest / value is in [0, 1]
    equal = (nearest == 0) | nearest.isinf()
    weight = torch.where(equal, (value == nearest).double(), nearest / value)
    return weight / weight.sum(1, keepdim=True), index


_waffle = define(
    "waffle_weights(Tensor dist, Tensor target, float omega, float psi, bool "
    "uniform_ties) -> Tensor",
    waffle_reference,
)
_feddwa = define(
    "feddwa_weights(Tensor sqdist, int k) -> (Tensor, Tensor)", feddwa_reference
)
