"""The five ops, and the SGD step of local training: check once, say what is wrong, dispatch.

Letters: N clients, M rows of the result, P parameters, K kept neighbours, B batch, I inputs, F factors, O outputs, S clients of the cohort,
Q a row's length. Every op has a pure-PyTorch reference, which runs where no kernel is loaded (`pflcore.backend()`).
"""

from typing import NamedTuple

from torch import Tensor

from . import library
from .check import (
    check_aggregate,
    check_rank1,
    check_same,
    check_sgd,
    check_waffle,
    expect,
    is_int,
    matrix,
    shape,
)
from .library import Backend, backend

__all__ = [
    "Backend",
    "TopK",
    "aggregate",
    "backend",
    "feddwa_weights",
    "pairwise_sqdist",
    "rank1_linear",
    "sgd_step_",
    "waffle_weights",
]


class TopK(NamedTuple):
    """The K kept neighbours of each row, nearest first, ready for `aggregate(updates, *top)`."""

    weight: Tensor  # [M, K] float64, rows sum to 1
    index: Tensor  # type: ignore[assignment]  # [M, K] int64


def pairwise_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]; None: b = a
) -> Tensor:  # [M, N] float64
    """Squared Euclidean distances `sum((a_i - b_j)^2)` of the rows: subtracted first, then squared, summed to float64.

    float32, float64, float16 or bfloat16 rows of any row stride. Relative error <= 1e-6 against float64 of the same inputs for models that
    differ by little, for constant rows, for P up to 1e8, and for scales from 1e-30 to 1e30 (float64 rows: where the squares fit float64).
    Without `b` the result is symmetric and its diagonal exactly 0. A client with NaN makes its own row and column NaN, nobody else's.
    The result depends neither on the number of threads nor on the order of the clients, to the last bit. Differentiable in a and b.
    """
    matrix("pairwise_sqdist", "a", a, "[M, P]")
    if b is not None:
        matrix("pairwise_sqdist", "b", b, "[N, P]")
        check_same("pairwise_sqdist", "a", a, "b", b)
        if b.shape[1] != a.shape[1]:
            expect(False, "pairwise_sqdist", "b", f"P = {a.shape[1]} columns like a", shape(b))
    if library.on_references:
        library.warn_once()
    return library.pairwise_sqdist(a, b)


def waffle_weights(
    dist: Tensor,  # [..., N] distances (not squared) from the target
    target: int | Tensor,  # the target's number, or int64 [...]
    omega: float,
    psi: float | None = None,
    tie: str = "closed",
) -> Tensor:  # [..., N] float64
    """WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1), each row summing to 1.

    With low and high the least and largest distance of the others, `t = (d - low) / (high - low)` and `s = low / high * (1 - omega)`:
    raw weight `max(psi - (t + s) / (1 + s), 0)`, the target's is `psi` (omega > 1: `t + s`, line 6 as printed). This closed form equals the
    paper's and never divides by zero. All others equally far: t = 0 (`tie="closed"`), or everybody gets 1/N (`tie="uniform"`); all at
    distance 0: 1/N; psi = 0 or N = 1: all weight on the target. The target's own distance is ignored. A distance that is not finite is an
    absent client, of weight 0; a negative one counts as 0. The weights are constants: no gradient flows through them.

    omega: Omega(r) >= 0; psi: Psi(r) >= 0, None: the same as omega. The 0.95 rule and the smoothing over rounds belong to the algorithm.
    """
    psi = omega if psi is None else psi
    goal = check_waffle(dist, target, omega, psi, tie)
    if library.on_references:
        library.warn_once()
    return library.waffle_weights(dist.detach() if dist.requires_grad else dist, goal, omega, psi, tie == "uniform")


def feddwa_weights(
    sqdist: Tensor,  # [M, N] squared distances, row i the receiver's
    k: int,
) -> TopK:
    """FedDWA's weights (Liu et al. 2023, Eq. 15 and 8): the k nearest of each row, weighted by 1 / squared distance, rows summing to 1.

    Ties go to the lower index; k >= N keeps all. Where distances are 0, only those count, equally. NaN counts as infinitely far, a negative
    distance as 0; an infinitely far neighbour has weight 0, and a row of nothing else is uniform. Never NaN. The weights are constants: no
    gradient flows through them.
    """
    if not (type(k) is int and k > 0):
        expect(is_int(k) and k > 0, "feddwa_weights", "k", "a whole number above 0", repr(k))
    matrix("feddwa_weights", "sqdist", sqdist, "[M, N]")
    if sqdist.shape[1] == 0:
        expect(False, "feddwa_weights", "sqdist", "at least one column", shape(sqdist))
    if library.on_references:
        library.warn_once()
    return TopK(*library.feddwa_weights(sqdist.detach() if sqdist.requires_grad else sqdist, k))


def aggregate(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    out: Tensor | None = None,  # [M, P]
    precise: bool = False,
) -> Tensor:  # [M, P]
    """`base + lr * (weight @ updates)` in one pass over the updates; with `index`, row m mixes the rows `index[m]` only.

    Accumulates in float32; in float64 where an input row is float64 or `precise` asks for it. The result has base's dtype, or else that of
    updates. With `index`, a row of weight 0 is not read, so NaN there does not spread. `out` may be given to reuse memory: a [M, P] tensor
    with contiguous rows that shares no memory with updates or weight; it may be `base` itself. Without `out`, differentiable in updates,
    weight and base.
    """
    check_aggregate(updates, weight, index, base, lr, out)
    if library.on_references:
        library.warn_once()
    if out is None:
        return library.aggregate(updates, weight, index, base, lr, bool(precise))
    library.aggregate_out(updates, weight, index, base, lr, bool(precise), out)
    return out


def rank1_linear(
    x: Tensor,  # [..., B, I]
    w_a: Tensor,  # [O, F] or [..., O, F]
    lam: Tensor,  # [F] or [..., F]
    w_b: Tensor,  # [F, I] or [..., F, I]
) -> Tensor:  # [..., B, O]
    """`((x w_b^T) * lam) w_a^T`: a linear layer made of F rank-1 factors, whose dense weight is never built (WAFFLe, Hao et al.).

    Leading axes, the clients', broadcast; an input without them is shared, and its gradient summed. Factors with `lam == 0` are skipped.
    One dtype for all inputs, 16-bit ones computed in float32. Differentiable in all four; works under `vmap`.
    """
    lead = check_rank1(x, w_a, lam, w_b)
    if library.on_references:
        library.warn_once()
    if x.dim() == 1:
        return rank1_linear(x[None], w_a, lam, w_b).squeeze(-2)
    if len(lead) <= 1 and all(t.dim() == o or t.shape[0] == lead[0] for t, o in ((x, 2), (w_a, 2), (lam, 1), (w_b, 2))):
        return library.rank1_linear(x, w_a, lam, w_b)
    if w_a.dim() == 2 and lam.dim() == 1 and w_b.dim() == 2:  # nothing but a larger batch
        y = library.rank1_linear(x.flatten(0, -2), w_a, lam, w_b)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def flat(t: Tensor, own: int) -> Tensor:
        return t if t.dim() == own else t.expand(*lead, *t.shape[t.dim() - own :]).flatten(0, len(lead) - 1)

    y = library.rank1_linear(flat(x, 2), flat(w_a, 2), flat(lam, 1), flat(w_b, 2))
    return y.reshape(*lead, *y.shape[1:])


def sgd_step_(
    w: Tensor,  # [S, Q], changed
    grad: Tensor,  # [S, Q]
    lr: float,
    shift: Tensor | None = None,  # [S, Q]
    mask: Tensor | None = None,  # [Q] or [S, Q]
    mu: float | Tensor = 0.0,  # or [S]
    anchor: Tensor | None = None,  # [S, Q]
    momentum: float = 0.0,
    buffer: Tensor | None = None,  # [S, Q], changed
    weight_decay: float = 0.0,
) -> None:
    """One SGD step on flat rows, in place and in one pass:

    `d = grad + shift + mu * (w - anchor) + weight_decay * w;  buffer = momentum * buffer + d;  w -= lr * mask * buffer`
    (without momentum: `w -= lr * mask * d`). float32 or float64, contiguous rows of any row stride. Not differentiable.
    """
    check_sgd(w, grad, lr, shift, mask, mu, anchor, momentum, buffer, weight_decay)
    if library.on_references:
        library.warn_once()
    rows = mu if isinstance(mu, Tensor) and mu.dim() else None
    library.sgd_step_(w, grad, lr, shift, mask, 0.0 if rows is not None else float(mu), rows, anchor, momentum, buffer, weight_decay)
