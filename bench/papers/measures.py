"""Measures that only the tables of the papers show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pflcore import metrics


def subpopulations(values: Tensor, group: Sequence[int]) -> dict[str, float]:
    """ "majority", "minority" (means over the clients whose `group` [n] is 0 and 1), "gap", and
    "variance" over all (ddof = 0).

    For accuracies in percent the gap is in points and the variance in percent squared (Hao et al.
    2020, Table 2).
    """
    major, minor = (metrics.mean(values[torch.tensor(group) == g]) for g in (0, 1))
    variance = metrics.std(values) ** 2
    return {"majority": major, "minority": minor, "gap": major - minor, "variance": variance}


def largest_share(cluster: Sequence[int]) -> float:
    """Share of the clients in the largest cluster; `cluster [n]` holds each client's cluster id,
    negative for none."""
    sizes = Counter(c for c in cluster if c >= 0)
    return max(sizes.values()) / sizes.total() if sizes else math.nan


def bytes_to_reach(
    curve: Sequence[float], sent: Sequence[int], goal: float, higher_is_better: bool = True
) -> int | None:
    """Bytes sent up to the first value that reaches `goal` (at least, or at most where lower is
    better); None if never. `sent` [T] is cumulative, one entry per value of `curve` [T]."""
    for value, total in zip(curve, sent, strict=True):
        if value >= goal if higher_is_better else value <= goal:
            return total
    return None
