"""Two rules that turn distances into mixing weights: WAFFLE's and FedDWA's.

Weights are float64, and each row of them sums to 1.

Symbols: N clients; M receivers, the clients that a mix is for; K neighbours of a
receiver; d distances; psi, omega WAFFLE's Psi(r) and Omega(r) of round r.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pflcore.check import reject, require

from ._check import (
    MAX_INT64,
    check_index,
    check_index_range,
    check_number,
    check_tensor,
    is_int,
)
from ._library import define, warn_of_references

TIES = ("closed", "uniform")


class TopK(NamedTuple):
    """The K nearest neighbours of each row, nearest first.

    `aggregate(updates, *top)` mixes them.

    Attributes:
        weight: Mixing weights [M, K], float64, each row of which sums to 1.
        index: Numbers of the neighbours [M, K], int64.
    """

    weight: Tensor
    index: Tensor  # type: ignore[assignment]


def waffle_weights(
    dist: Tensor,  # [..., N] distances (not squared) from the target
    target: int | Tensor,  # the target's number, or int64 [...]
    omega: float,
    psi: float | None = None,
    tie: Literal["closed", "uniform"] = "closed",
) -> Tensor:  # [..., N] float64
    """WAFFLE's mixing weights (CalcWeights, Beaussart et al. 2021, Algorithm 1).

    With `low` and `high` the least and largest distance of the other clients:

    - `t = (d - low) / (high - low)`, from 0 for the nearest to 1 for the farthest.
    - `s = low / high * (1 - omega)`.
    - The raw weight is `max(psi - (t + s) / (1 + s), 0)`, and `psi` for the target.
      Where omega > 1 it is `max(psi - (t + s), 0)`, as line 6 is printed.
    - Each row of weights is divided by its sum.

    This closed form equals the paper's and never divides by zero. Its edges:

    - Where all others are equally far, `tie` decides.
    - Where all distances are 0, all weights are 1/N.
    - Where psi = 0 or N = 1, the target has all weight.
    - A distance that is not finite is an absent client, of weight 0. A negative
      distance counts as 0. The target's own distance is ignored.

    The weights are constants: no gradient flows through them. The paper's rule of 0.95
    and the smoothing over rounds belong to the algorithm `Waffle`.

    Raises TypeError for a wrong type or dtype, and ValueError for a wrong value, shape
    or device. On a GPU the values of a tensor `target` are not checked.

    Args:
        dist: Distances in any floating-point dtype, not squared.
        target: The number of the client that a row of weights is for: one for all
            rows, or one for each.
        omega: The paper's Omega(r), from 0 to 1e100.
        psi: The paper's Psi(r), from 0 to 1e100; None for omega.
        tie: "closed" takes t = 0 where all others are equally far; "uniform" gives all
            clients the weight 1/N.

    Returns:
        Weights of the shape of `dist`, each row of which sums to 1.
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
    check_tensor(op, "dist", dist)
    n = dist.shape[-1] if dist.dim() else 0
    require(n > 0, "waffle_weights(dist)", "[..., N] with N > 0", dist)
    for name, value in (("omega", omega), ("psi", psi)):
        check_number(op, name, value)
        if not 0 <= value <= 1e100:  # A sum of larger ones could be infinite.
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
    """FedDWA's mixing weights (Liu et al. 2023, Eqs. 8 and 15).

    The weights of the k nearest of a row are in proportion to 1 / squared distance, and
    sum to 1. Of equal distances the lower index is nearer.

    - Where distances are 0, only those count, equally.
    - NaN counts as infinitely far, a negative distance as 0.
    - An infinitely far neighbour has weight 0, and a row of nothing else is uniform.

    No weight is NaN. The weights are constants: no gradient flows through them.

    Raises TypeError where `sqdist` is not floating point, and ValueError for a wrong
    shape or `k`.

    Args:
        sqdist: Squared distances in any floating-point dtype, such as those of
            `pairwise_sqdist`.
        k: The number of neighbours; from N on, all are taken.
    """
    op = "feddwa_weights"
    if not (type(k) is int and 0 < k <= MAX_INT64):
        is_valid = is_int(k) and k > 0
        require(is_valid, "feddwa_weights(k)", "a whole number above 0", k)
        if not isinstance(k, torch.SymInt):
            # Numpy's whole numbers are none for torch.
            k = min(int(k), MAX_INT64)
    check_tensor(op, "sqdist", sqdist, "[M, N]")
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
    """WAFFLE's mixing weights: the specification of the op.

    Where a division by zero could be, `torch.where` takes the other case.
    """
    d = dist.double().contiguous()
    clients = torch.arange(d.shape[-1], device=d.device)
    is_target = clients == target[..., None]  # [..., N]
    # This stands before the clamp: a distance of -infinity is an absent client too.
    other = d.isfinite() & ~is_target
    d = d.clamp(min=0)
    high = torch.where(other, d, 0.0).amax(-1, keepdim=True)  # [..., 1]
    low = torch.where(other, d, math.inf).amin(-1, keepdim=True)
    gap = high - low
    # Distances that differ by less than their rounding are equal.
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
    """FedDWA's mixing weights: the specification of the op."""
    d = sqdist.double().contiguous()
    d = torch.where(d.isnan(), math.inf, d.clamp(min=0))
    value, index = d.sort(dim=1, stable=True)  # stable: the lower index is nearer
    value = value[:, :k]
    index = index[:, :k].contiguous()
    nearest = value[:, :1]
    # Weights are nearest / value, from 0 to 1, so that 1 / value cannot overflow. Where
    # that is 0 / 0 or infinity / infinity, those that are as near as the nearest count.
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
