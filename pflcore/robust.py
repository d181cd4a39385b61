"""Robust means: one row from the rows of many clients, some of which may be bad.

Each function takes updates [S, P] of S clients, one row each, in float32, float64,
float16 or bfloat16, on a CPU or a GPU, and returns one row [P] of that dtype on that
device. They are the defences of `FedAvg(defence=)`, for whoever has a server of one's
own: the same code, and so the same bits. All numbers must be finite: a server leaves
out updates that are not before it asks.

Distances between updates are exact, by `ops.pairwise_sqdist`. `num_byzantine` is the
number f of bad clients that are expected among the S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._defences import (
    BYZANTINE_NEEDS,
    NEIGHBOR_MIXING_NEEDS,
    Facts,
    mix_neighbors,
    robust_mean,
)
from pflcore.check import NonNegativeInt, PositiveFloat, PositiveInt, checked, require

__all__ = [
    "bulyan",
    "centered_clipping",
    "clip",
    "clip_to_median",
    "fltrust",
    "geometric_median",
    "krum",
    "mean_around_median",
    "median",
    "multi_krum",
    "nearest_neighbor_mixing",
    "trimmed_mean",
]


def _check_count(name: str, updates: Tensor, f: int) -> None:
    """Raises ValueError where there are too few clients for f bad ones."""
    _check_rows(updates)
    factor, margin = BYZANTINE_NEEDS.get(name, NEIGHBOR_MIXING_NEEDS)
    needed = factor * f + margin
    expected = f"at least {needed} rows for num_byzantine={f}"
    require(len(updates) >= needed, "updates", expected, len(updates))


def _check_rows(updates: Tensor) -> None:
    """Raises ValueError where the updates are no rows of numbers."""
    fits = updates.dim() == 2 and len(updates) > 0 and updates.is_floating_point()
    expected = "rows [S, P] of floating point numbers, one for each client"
    require(fits, "updates", expected, f"{list(updates.shape)} {updates.dtype}")


def _row(
    defence: str,
    updates: Tensor,
    facts: Facts | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The aggregate [P] of a defence, with equal shares where none are given."""
    _check_rows(updates)
    count = len(updates)
    if shares is None:
        size = updates.new_full((1, count), 1, dtype=torch.float64)
    else:
        fits = shares.shape == (count,) and bool(
            (shares >= 0).all() and shares.sum() > 0
        )
        require(fits, "shares", f"{count} numbers >= 0, not all 0", shares)
        size = shares.to(updates.device, torch.float64)[None]
    rows, weight = robust_mean(defence, updates, size / size.sum(), facts)
    return ops.aggregate(rows, weight.to(rows.device))[0]


@checked
def median(
    updates: Tensor,  # [S, P]
) -> Tensor:  # [P]
    """The median of each coordinate; of an even number, the mean of the middle two.

    Yin et al. 2018, Definition 1.
    """
    return _row("median", updates)


@checked
def trimmed_mean(
    updates: Tensor,  # [S, P]
    num_byzantine: NonNegativeInt,
) -> Tensor:  # [P]
    """The mean of each coordinate without the f least and f largest numbers.

    Yin et al. 2018, Definition 2. Raises ValueError for fewer than 2 f + 1 rows.
    """
    _check_count("trimmed_mean", updates, num_byzantine)
    return _row("trimmed_mean", updates, Facts(num_byzantine))


@checked
def mean_around_median(
    updates: Tensor,  # [S, P]
    num_byzantine: NonNegativeInt,
) -> Tensor:  # [P]
    """The mean of the S - f numbers of each coordinate nearest to its median.

    Xie et al. 2018. Of two equally near numbers the smaller one is taken. Raises
    ValueError for fewer than 2 f + 1 rows.
    """
    _check_count("mean_around_median", updates, num_byzantine)
    return _row("mean_around_median", updates, Facts(num_byzantine))


@checked
def krum(
    updates: Tensor,  # [S, P]
    num_byzantine: NonNegativeInt,
) -> Tensor:  # [P]
    """The update with the least sum of squared distances to its S - f - 2 nearest.

    Blanchard et al. 2017, section 4. Of equal sums the earlier update is taken. Raises
    ValueError for fewer than 2 f + 3 rows.
    """
    _check_count("krum", updates, num_byzantine)
    return _row("krum", updates, Facts(num_byzantine))


@checked
def multi_krum(
    updates: Tensor,  # [S, P]
    num_byzantine: NonNegativeInt,
) -> Tensor:  # [P]
    """The mean of the S - f updates with the least sums of `krum`.

    Raises ValueError for fewer than 2 f + 3 rows.
    """
    _check_count("multi_krum", updates, num_byzantine)
    return _row("multi_krum", updates, Facts(num_byzantine))


@checked
def bulyan(
    updates: Tensor,  # [S, P]
    num_byzantine: NonNegativeInt,
) -> Tensor:  # [P]
    """The mean of the S - 4 f nearest to the median, of S - 2 f that Krum selects.

    El Mhamdi et al. 2018: Krum selects one update after another. Raises ValueError for
    fewer than 4 f + 3 rows.
    """
    _check_count("bulyan", updates, num_byzantine)
    return _row("bulyan", updates, Facts(num_byzantine))


@checked
def geometric_median(
    updates: Tensor,  # [S, P]
) -> Tensor:  # [P]
    """The row with the least sum of distances to the updates.

    Pillutla et al. 2022, by Weiszfeld's iteration from the median of each coordinate
    until no weight changes by 1e-9, in at most 100 steps. A distance counts as at least
    1e-6 of the median one.
    """
    return _row("geometric_median", updates)


@checked
def centered_clipping(
    updates: Tensor,
    clip_norm: PositiveFloat,
    center: Tensor | None = None,
    clip_steps: PositiveInt = 1,
) -> Tensor:
    """Steps from a center along the updates, none longer than `clip_norm`.

    Karimireddy et al. 2021, eq. 5: `v <- v + mean_i (d_i - v) min(1, tau / |d_i - v|)`.

    Args:
        updates: [S, P] d, one row for each client.
        clip_norm: tau, the largest distance from v that an update pulls with.
        center: [P] the first v, in the paper the result of the last round; None for
            zero.
        clip_steps: The number of steps.
    """
    if center is not None:
        expected = f"[{updates.shape[-1]}]"
        require(center.shape == updates.shape[-1:], "center", expected, center.shape)
    facts = Facts(clip_norm=clip_norm, clip_steps=clip_steps, center=center)
    return _row("centered_clipping", updates, facts)


@checked
def clip(updates: Tensor, clip_norm: PositiveFloat) -> Tensor:
    """The updates [S, P], each shortened to at most the length `clip_norm`."""
    _check_rows(updates)
    norm = torch.linalg.vector_norm(updates, dim=1, keepdim=True, dtype=torch.float64)
    factor = (clip_norm / norm.clamp(min=clip_norm)).to(updates.dtype)
    shortened: Tensor = updates * factor
    return shortened


@checked
def clip_to_median(updates: Tensor, shares: Tensor | None = None) -> Tensor:
    """The mean of the updates, each shortened to the median of their lengths.

    Sun et al. 2019, with the median for their fixed bound.

    Args:
        updates: [S, P] one row for each client.
        shares: [S] the clients' shares in the mean, such as their numbers of samples;
            they are divided by their sum. None means equal shares.
    """
    return _row("clip", updates, shares=shares)


@checked
def fltrust(
    updates: Tensor,  # [S, P]
    trusted: NonNegativeInt,
) -> Tensor:  # [P]
    """The mean of the updates weighted by their cosines with the trusted one.

    Cao et al. 2021, eqs. 2 to 4: `sum_i t_i (|r| / |d_i|) d_i / sum_i t_i` with `t_i =
    max(0, cos(d_i, r))`. r, the row `trusted`, is a part of the sum.
    """
    _check_rows(updates)
    expected = f"a row of the {len(updates)} updates"
    require(trusted < len(updates), "trusted", expected, trusted)
    return _row("fltrust", updates, Facts(trusted_row=trusted))


@checked
def nearest_neighbor_mixing(updates: Tensor, num_byzantine: NonNegativeInt) -> Tensor:
    """Each update replaced by the mean of its S - f nearest, [S, P], itself included.

    This is nearest neighbour mixing, which goes before any of the other functions
    (Allouah et al. 2023, Algorithm 2). Raises ValueError for fewer than 2 f + 1 rows.
    """
    _check_count("neighbor_mixing", updates, num_byzantine)
    return mix_neighbors(updates, num_byzantine)
