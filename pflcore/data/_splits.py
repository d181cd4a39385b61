"""Rules by which a client's samples are dealt to the splits.

A rule says for n samples which of their positions go to which split. Clients with
equally many samples are dealt at once, by one permutation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

# From a number of samples n to the positions in 0..n-1 of each split.
SplitRule = Callable[[int], dict[str, Tensor]]


def hold_out(shares: Mapping[str, float], seed: int) -> SplitRule:
    """The rule by which each split takes its share of what the splits before it left.

    A split for which no sample would be left to train on takes none.
    """

    def rule(n: int) -> dict[str, Tensor]:
        rest = torch.arange(n)
        dealt = {}
        for split, share in shares.items():
            order = random_permutation(len(rest), seed)
            count = math.ceil(share * len(rest))
            if count >= len(rest):
                count = 0
            dealt[split] = rest[order[:count]]
            rest = rest[order[count:]]
        return {**dealt, "train": rest}

    return rule


def halve(scored: str, seed: int) -> SplitRule:
    """The rule by which floor(n / 2) samples are to train on, the others `scored`."""

    def rule(n: int) -> dict[str, Tensor]:
        order = random_permutation(n, seed)
        empty = {"val": order[:0], "test": order[:0]}
        return {**empty, "train": order[: n // 2], scored: order[n // 2 :]}

    return rule


def keep_first(fraction: float) -> SplitRule:
    """The rule by which the first samples are kept, a fraction of them, rounded up."""

    def rule(n: int) -> dict[str, Tensor]:
        count = max(1, math.ceil(fraction * n - 1e-9))
        return {"train": torch.arange(min(count, n))}

    return rule


def deal_by_class(
    labels: Tensor,  # [n] of one client
    shares: Mapping[str, float],
    seed: int,
) -> dict[str, Tensor]:
    """The positions of a client's samples in each split, for `Federation.split`.

    The samples of a split are spread evenly over those of all classes in a row. So they
    are of each class as many as its share, up to one. One sample of each class is left
    out of the row, and stays in "train".
    """
    rest = torch.arange(len(labels))
    dealt = {}
    for split, share in shares.items():
        order = rest[random_permutation(len(rest), seed)]
        order = order[labels[order].argsort(stable=True)]
        is_first = torch.ones(len(order), dtype=torch.bool)
        is_first[1:] = labels[order[1:]] != labels[order[:-1]]
        row = order[~is_first]
        count = min(math.ceil(share * len(rest)), len(row))
        places = (2 * torch.arange(count) + 1) * len(row) // max(2 * count, 1)
        dealt[split] = row[places]
        rest = rest[~torch.isin(rest, row[places])]
    return {**dealt, "train": rest}


def random_permutation(n: int, seed: int) -> Tensor:
    """A random permutation of 0..n-1, int64 [n], the same on every machine."""
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))
