"""Defences: robust aggregates in place of the mean of the clients' updates.

Symbols: S clients are in the cohort, f of them are expected to be bad; `delta` [S, P]
are their updates of P parameters each; `share` [1, S] are their shares in the mean. The
weighted sum of R rows replaces the mean; m clients are chosen by Krum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    squared_norms,
)

Defence = Literal[
    "clip",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "fltrust",
    "geometric_median",
    "mean_around_median",
    "bulyan",
    "centered_clipping",
    "dp",
]
# The defences that are told the number f of bad clients. A round needs a multiple of f
# clients and some more: (2, 3) means 2 f + 3.
BYZANTINE_NEEDS = {
    "krum": (2, 3),
    "multi_krum": (2, 3),
    "trimmed_mean": (2, 1),
    "mean_around_median": (2, 1),
    "bulyan": (4, 3),
}
NEIGHBOR_MIXING_NEEDS = (2, 1)
# The defences that each option belongs to.
DEFENCES_WITH: dict[str, tuple[str, ...]] = {
    "neighbor_mixing": (
        *("clip", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"),
        *("mean_around_median", "bulyan", "centered_clipping"),
    ),
    "num_byzantine": tuple(BYZANTINE_NEEDS),
    "clip_norm": ("dp", "centered_clipping"),
    "clip_steps": ("centered_clipping",),
    "noise_multiplier": ("dp",),
    "expected_clients": ("dp",),
}
# Weiszfeld's iteration ends after so many steps, or where no weight changes by so much.
WEISZFELD_STEPS = 100
WEISZFELD_TOLERANCE = 1e-9
# Weiszfeld's weights are one over a distance. A distance counts as at least this part
# of the median distance.
WEISZFELD_FLOOR = 1e-6


# Rows [R, P], and their weights [1, R] in float64, whose sum is an aggregate.
Aggregate = tuple[Tensor, Tensor]


class Facts(NamedTuple):
    """The facts that defences are told beside the updates.

    Attributes:
        num_byzantine: The number f of bad clients; see `BYZANTINE_NEEDS`.
        trusted_row: The row of the trusted client, for "fltrust".
        clip_norm: The largest distance to the center, for "centered_clipping"; None for
            other defences.
        clip_steps: The number of steps of "centered_clipping".
        center: [P] where "centered_clipping" starts; None for zero.
    """

    num_byzantine: int = 0
    trusted_row: int = 0
    clip_norm: float | None = None
    clip_steps: int = 1
    center: Tensor | None = None


def krum(
    sqdist: Tensor,  # [S, S]
    f: int,
    m: int,
) -> Tensor:  # [m] int64
    """The `m` clients [m] of the least Krum score, best first.

    A client's score is the sum of its squared distances to its S - f - 2 nearest others
    (Blanchard et al. 2017, section 4). Of equal scores the earlier client comes first.

    Args:
        sqdist: [S, S] squared distances between the clients' updates.
        f: The number of bad clients among the S.
        m: The number of clients to choose.
    """
    to_others = sqdist.double().cpu().clone().fill_diagonal_(torch.inf)
    nearest = to_others.sort(1).values[:, : len(to_others) - f - 2]
    return nearest.sum(1).sort(stable=True).indices[:m]


def coordinate_median(rows: Tensor) -> Tensor:
    """The median [P] of each column of `rows` [S, P]."""
    return ops.trimmed_mean(rows, (len(rows) - 1) // 2)


def robust_mean(
    defence: str,
    delta: Tensor,  # [S, P]
    share: Tensor,  # [1, S]
    facts: Facts | None = None,
    neighbor_mixing: bool = False,
) -> Aggregate:
    """Rows and weights whose sum replaces the mean of the updates.

    The sum `weights @ rows` is the robust aggregate [1, P]. Distances between updates
    are exact ones, by `ops.pairwise_sqdist`.

    Args:
        defence: One of `Defence` but "dp"; the class `FedAvg` has their formulas.
        share: The clients' shares in the mean that is replaced.
        facts: What the defence is told.
        neighbor_mixing: Mix each update with its nearest ones first.
    """
    facts = facts or Facts()
    if neighbor_mixing:
        mixed = mix_neighbors(delta, facts.num_byzantine)
        rows, weight = RULES[defence](mixed, share, facts)
        # These weights would not be the clients' own.
        return _as_aggregate(ops.aggregate(rows, to_device(weight, rows.device)))
    return RULES[defence](delta, share, facts)


def _as_aggregate(row: Tensor) -> Aggregate:
    """A row [P] or [1, P] as rows with weights."""
    one = torch.ones(1, 1, dtype=torch.float64, device=row.device)
    return row.reshape(1, -1), one


def _clip(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    norm = _lengths(delta)
    return delta, share * (norm.quantile(0.5) / norm).clamp(max=1.0)


def _median(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    return _as_aggregate(coordinate_median(delta))


def _trim(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    return _as_aggregate(ops.trimmed_mean(delta, facts.num_byzantine))


def _mean_around_median(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    return _as_aggregate(
        ops.mean_around_median(delta, len(delta) - facts.num_byzantine)
    )


def _krum(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    return delta, _mean_of_krums_best(delta, share, facts.num_byzantine, 1)


def _multi_krum(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    f = facts.num_byzantine
    return delta, _mean_of_krums_best(delta, share, f, len(delta) - f)


def _mean_of_krums_best(delta: Tensor, share: Tensor, f: int, count: int) -> Tensor:
    """Weights like `share` of the mean of the `count` updates of the least scores."""
    best = krum(ops.pairwise_sqdist(delta), f, count)
    best = to_device(best, share.device)
    return torch.zeros_like(share).index_fill_(1, best, 1 / count)


def _bulyan(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    f = facts.num_byzantine
    selected = bulyan_selection(ops.pairwise_sqdist(delta), f)
    rows = delta[to_device(selected, delta.device)]
    return _as_aggregate(ops.mean_around_median(rows, len(delta) - 4 * f))


def _geometric_median(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    return delta, weiszfeld(delta)


def _fltrust(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    return delta, _trust_weights(delta, _lengths(delta), facts.trusted_row)


def _lengths(delta: Tensor) -> Tensor:
    """The lengths [S] of the updates, float64, none of them 0."""
    return squared_norms(delta).sqrt().clamp(min=1e-150)


def mix_neighbors(delta: Tensor, f: int) -> Tensor:
    """Each update [S, P] replaced by the mean of its S - f nearest, itself included.

    This is nearest neighbour mixing (Allouah et al. 2023, Algorithm 2), which goes
    before a defence. Of equally near updates the earlier one is taken.
    """
    count = len(delta) - f
    sqdist = ops.pairwise_sqdist(delta).double().cpu().clone().fill_diagonal_(-1.0)
    nearest = sqdist.sort(dim=1, stable=True).indices[:, :count]
    index = to_device(nearest.sort(1).values, delta.device)
    weight = torch.full(index.shape, 1 / count, dtype=torch.float64)
    return ops.aggregate(delta, to_device(weight, delta.device), index)


def weiszfeld(delta: Tensor) -> Tensor:
    """The weights [1, S] of the geometric median as a mean of the updates [S, P].

    The geometric median z has the least sum of distances to the updates. Weiszfeld's
    iteration, as in Pillutla et al. 2022 (Algorithm 2), sets each weight to one over
    the distance to the last z. It begins with the median of each coordinate, because
    the way from the mean may be long. The distances are computed from z itself: one
    update that is very far away leaves the others' exact.
    """
    median = coordinate_median(delta)[None]
    weight = torch.zeros(1, len(delta), dtype=torch.float64, device=delta.device)
    for _ in range(WEISZFELD_STEPS):
        distance = ops.pairwise_sqdist(delta, median)[:, 0].double().sqrt()
        least = (WEISZFELD_FLOOR * distance.median()).clamp(min=1e-150)
        new = 1 / distance.clamp(min=least)
        new = (new / new.sum())[None]
        change = float((new - weight).abs().max())
        weight = new
        if change <= WEISZFELD_TOLERANCE:
            break
        median = ops.aggregate(delta, weight)
    return weight


def bulyan_selection(sqdist: Tensor, f: int) -> Tensor:
    """The S - 2 f clients that Bulyan selects, int64, ascending.

    Krum's choice among the clients that are left is taken out, again and again (El
    Mhamdi et al. 2018, section 4). Where fewer than f + 3 are left, Krum's score is the
    distance to the nearest other: there the paper's number of neighbours, |left| - f -
    2, is 0.
    """
    left = torch.arange(len(sqdist))
    selected = []
    for _ in range(len(sqdist) - 2 * f):
        of_left = sqdist.double().cpu()[left][:, left]
        best = int(krum(of_left, min(f, len(left) - 3), 1))
        selected.append(int(left[best]))
        left = torch.cat([left[:best], left[best + 1 :]])
    return torch.tensor(sorted(selected))


def _centered_clipping(delta: Tensor, share: Tensor, facts: Facts) -> Aggregate:
    """Centered clipping (Karimireddy et al. 2021, eq. 5).

    A step is `v <- v + sum_i (d_i - v) min(1, tau / |d_i - v|) / S`.
    """
    assert facts.clip_norm is not None
    v = delta.new_zeros(1, delta.shape[1])
    if facts.center is not None:
        v = facts.center.to(delta)[None]
    for _ in range(facts.clip_steps):
        distance = ops.pairwise_sqdist(delta, v)[:, 0].double().sqrt()
        part = facts.clip_norm / distance.clamp(min=facts.clip_norm) / len(delta)
        v = ops.aggregate(delta, part[None], None, v * (1 - part.sum()).to(v))
    return _as_aggregate(v)


RULES: dict[str, Callable[[Tensor, Tensor, Facts], Aggregate]] = {
    "clip": _clip,
    "median": _median,
    "trimmed_mean": _trim,
    "krum": _krum,
    "multi_krum": _multi_krum,
    "fltrust": _fltrust,
    "geometric_median": _geometric_median,
    "mean_around_median": _mean_around_median,
    "bulyan": _bulyan,
    "centered_clipping": _centered_clipping,
}


def private_mean(
    delta: Tensor,  # [S, P]
    clip_norm: float,
    noise_multiplier: float,
    expected_clients: float,
    generator: torch.Generator,
) -> Tensor:  # [1, P]
    """The mean of the clipped updates with noise on their sum.

    It is `(sum_i d_i min(1, C / |d_i|) + z C g) / E`, g [P] of independent standard
    normal numbers (McMahan et al. 2018, Algorithm 1, with the fixed-denominator
    estimator of its section 3). The divisor does not tell how many clients took part.

    Args:
        clip_norm: C, the largest length of an update in the sum.
        noise_multiplier: z, the noise's standard deviation in units of C.
        expected_clients: E, the expected number of clients of a round.
        generator: Draws the noise, on the CPU, so that it is the same on every device.
    """
    norm = squared_norms(delta).sqrt()
    factor = (clip_norm / norm.clamp(min=clip_norm)) / expected_clients
    noise = torch.randn(1, delta.shape[1], generator=generator).to(delta)
    scale = noise_multiplier * clip_norm / expected_clients
    return ops.aggregate(delta, factor[None], None, noise * scale)


def _trust_weights(
    delta: Tensor,  # [S, P]
    norm: Tensor,  # [S]
    trusted_row: int,
) -> Tensor:  # [1, S]
    """FLTrust's weights [1, S]: cosines with the trusted update, divided by lengths.

    The division brings each update to the length of the trusted one.
    """
    trusted_norm = norm[trusted_row]
    trusted = delta[trusted_row : trusted_row + 1]
    sqdist = ops.pairwise_sqdist(delta, trusted)[:, 0]
    # The cosine of a much shorter update, above all of zeros, is only rounding.
    has_direction = norm > 1e-12 * trusted_norm
    product = norm**2 + trusted_norm**2 - sqdist  # twice the inner product
    trust = (has_direction * product / (2 * norm * trusted_norm)).clamp(0, 1)
    trust[trusted_row] = 1.0
    return (trust / trust.sum() * trusted_norm / norm)[None]
