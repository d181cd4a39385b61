"""Defences: robust aggregates in place of the mean of the clients' updates.

Symbols: S clients are in the cohort, f of them are expected to be bad; `delta` [S, P]
are their updates of P parameters each; `share` [1, S] are their shares in the mean. The
weighted sum of R rows replaces the mean; m clients are chosen by Krum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    squared_norms,
)

Defence = Literal[
    "clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust", "dp"
]
# Columns that are sorted together, so that their block stays in a CPU's cache.
SORT_BLOCK_COLUMNS = 1 << 14
# The defences that are told the number f of bad clients. A round needs 2 f clients and
# this many more.
BYZANTINE_MARGIN = {"krum": 3, "multi_krum": 3, "trimmed_mean": 1}


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


def sorting_network(s: int) -> Iterator[tuple[int, int]]:
    """Pairs of positions that, put in order one by one, sort s numbers.

    This is Batcher's odd-even merge sort (1968).
    """
    p = k = 1
    while p < s:
        for j in range(k % p, s - k, 2 * k):
            for i in range(j, min(j + k, s - k)):
                if i // (2 * p) == (i + k) // (2 * p):
                    yield i, i + k
        k //= 2
        if not k:
            p = k = 2 * p


def sort_columns(rows: Tensor) -> list[Tensor]:
    """The rows [S, P] with each column sorted.

    For few rows, `torch.sort` takes four times as long.
    """
    ordered = list(rows)
    for i, j in sorting_network(len(ordered)):
        low = torch.minimum(ordered[i], ordered[j])
        high = torch.maximum(ordered[i], ordered[j])
        ordered[i] = low
        ordered[j] = high
    return ordered


def robust_mean(
    defence: str,
    delta: Tensor,  # [S, P]
    share: Tensor,  # [1, S]
    num_byzantine: int,
    trusted_row: int,
) -> tuple[Tensor, Tensor]:  # [R, P], [1, R] float64
    """Rows and weights whose sum replaces the mean of the updates.

    The sum `weights @ rows` is the robust aggregate [1, P]. Distances between updates
    are exact ones, by `ops.pairwise_sqdist`.

    Args:
        defence: One of `Defence`; the class `FedAvg` has their formulas.
        share: The clients' shares in the mean that is replaced.
        num_byzantine: The number f of bad clients; see `BYZANTINE_MARGIN`.
        trusted_row: The row of the trusted client, for "fltrust".
    """
    if defence in ("median", "trimmed_mean"):
        removed = (len(delta) - 1) // 2 if defence == "median" else num_byzantine
        return _trimmed_mean(delta, removed)[None], share.new_ones(1, 1)
    if defence in ("krum", "multi_krum"):
        count = 1 if defence == "krum" else len(delta) - num_byzantine
        best = krum(ops.pairwise_sqdist(delta), num_byzantine, count)
        best = to_device(best, share.device)
        return delta, torch.zeros_like(share).index_fill_(1, best, 1 / count)
    norm = squared_norms(delta).sqrt().clamp(min=1e-150)
    if defence == "clip":
        return delta, share * (norm.quantile(0.5) / norm).clamp(max=1.0)
    return delta, _trust_weights(delta, norm, trusted_row)


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


def _trimmed_mean(delta: Tensor, removed: int) -> Tensor:
    """Mean [P] of each column without its `removed` least and largest numbers."""
    on_cpu = delta.device.type == "cpu"
    width = SORT_BLOCK_COLUMNS if on_cpu else max(1, delta.shape[1])
    means = []
    for block in delta.split(width, 1):
        inner = sort_columns(block)[removed : len(delta) - removed]
        means.append(torch.stack(inner).mean(0))
    return torch.cat(means)


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
