"""What may take the place of the mean of clients' updates, so that a few bad ones among them do not
decide it."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops

Defence = Literal["clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust"]
BLOCK = 1 << 14  # columns that are sorted at once
COUNTING = ("krum", "multi_krum", "trimmed_mean")  # those that take how many clients are hostile


def krum(sqdist: Tensor, f: int, m: int) -> Tensor:
    """The `m` clients, best first, whose squared distances [S, S] to their S - f - 2 nearest others
    have the least sums (Blanchard et al. 2017, section 4). Of equals the earlier one."""
    others = sqdist.double().cpu().clone().fill_diagonal_(torch.inf)
    return others.sort(1).values[:, : len(others) - f - 2].sum(1).sort(stable=True).indices[:m]


@functools.cache
def comparisons(s: int) -> list[tuple[int, int]]:
    """What sorts s numbers: Batcher's odd-even merge sort (1968), pairs of places to be put in
    order."""
    n = 1 << (s - 1).bit_length()
    sizes = [
        (p, k)
        for p in (1 << i for i in range(n.bit_length() - 1))
        for k in (p >> i for i in range(p.bit_length()))
    ]
    places = [(p, k, i + j) for p, k in sizes for j in range(k % p, n - k, 2 * k) for i in range(k)]
    return [(a, a + k) for p, k, a in places if a // (2 * p) == (a + k) // (2 * p) and a + k < s]


def ascending(rows: Tensor) -> list[Tensor]:
    """The rows [S, P], each column sorted: a quarter of `sort`'s time along rows, which is not made
    for few."""
    r = list(rows)
    for a, b in comparisons(len(r)):
        r[a], r[b] = torch.minimum(r[a], r[b]), torch.maximum(r[a], r[b])
    return r


def fewer(defence: str, hostile: int, count: int, lost: int) -> int | None:
    """How many of `count` clients may be hostile: `hostile`, or where so few are left the most that
    they allow, but never below `hostile` less the `lost`, whose uploads were not finite. None: they
    allow no such number."""
    most = {
        "krum": (count - 3) // 2,
        "multi_krum": (count - 3) // 2,
        "trimmed_mean": (count - 1) // 2,
    }.get(defence, hostile)
    return min(hostile, most) if most >= max(0, hostile - lost) else None


def defended(
    defence: str, delta: Tensor, share: Tensor, hostile: int, root: int
) -> tuple[Tensor, Tensor]:
    """Rows and their weights [1, rows], float64, whose sum takes the place of the mean of `delta`
    [S, P] in the shares `share` [1, S].

    `root` is the trusted client's place among the S. Distances are exact ones,
    `ops.pairwise_sqdist`.
    """
    s = len(delta)
    if defence in ("median", "trimmed_mean"):
        cut, width = (
            (s - 1) // 2 if defence == "median" else hostile,
            BLOCK if delta.device.type == "cpu" else delta.shape[1],
        )
        parts = [
            torch.stack(ascending(part)[cut : s - cut]).mean(0)
            for part in delta.split(max(1, width), 1)
        ]
        return torch.cat(parts)[None], share.new_ones(1, 1)
    if defence in ("krum", "multi_krum"):
        m = 1 if defence == "krum" else s - hostile
        return delta, torch.zeros_like(share).index_fill_(
            1, krum(ops.pairwise_sqdist(delta), hostile, m).to(share.device), 1 / m
        )
    norm = ops.pairwise_sqdist(delta, torch.zeros_like(delta[:1]))[:, 0].sqrt().clamp(min=1e-150)
    if defence == "clip":
        return delta, share * (norm.quantile(0.5) / norm).clamp(max=1.0)
    own, far = norm[root], ops.pairwise_sqdist(delta, delta[root : root + 1])[:, 0]
    heard = norm > 1e-12 * own  # of shorter updates, of zeros above all, the cosine is rounding
    trust = (
        (heard * (norm**2 + own**2 - far) / (2 * norm * own))
        .clamp(0, 1)
        .index_fill_(0, torch.tensor([root], device=norm.device), 1.0)
    )
    return delta, (trust / trust.sum() * own / norm)[None]
