"""What partitions share: checked labels, the one cutter, the result.

A partition says how many samples of each class every client gets; `deal` hands them out. All else,
shards and groups of clients, is made of its lists. Random choices come from numpy's RandomState,
whose streams are frozen: a partition with its seed is the same on every machine and in every
release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Count, checked, need
from pflcore.data.ragged import Ints, Ragged

Random = np.random.RandomState


@dataclass(frozen=True)
class Partition:
    """Who holds which sample, counted through cat(labels, test_labels)."""

    index: Mapping[str, Sequence[Tensor]]  # split -> N lists
    relabel: Tensor | None = None  # [N, C]
    group: Tensor | None = None  # [N], where the recipe has groups of clients
    facts: Mapping[str, Any] = field(default_factory=dict)  # what was counted on the way


@dataclass(frozen=True)
class Labels:
    """The labels [n] of each pool, how far its samples are counted on, and for whom they are."""

    pools: Mapping[str, tuple[Ints, int]]  # split -> labels, offset
    n: int
    classes: int

    @classmethod
    @checked
    def of(cls, labels: Any, test_labels: Any, n: Count, classes: Count | None) -> Labels:
        """ValueError where these are no labels, or too few for n clients."""
        train = _labels(labels, "labels")
        need(n <= len(train), "n", f"at most as many as the {len(train)} training samples", n)
        pools = {"train": (train, 0)}
        if test_labels is not None:
            pools["test"] = _labels(test_labels, "test_labels"), len(train)
        top = max(int(y.max()) for y, _ in pools.values())
        classes = top + 1 if classes is None else classes
        need(top < classes, "labels", f"labels in 0..{classes - 1}", top)
        return cls(pools, n, classes)

    @property
    def train(self) -> Ints:
        return self.pools["train"][0]

    def by_class(self, y: Ints, rng: Random | None) -> list[Ints]:
        """The positions in `y` of each class, shuffled by `rng`, or in their order."""
        rows = [np.flatnonzero(y == c) for c in range(self.classes)]
        return rows if rng is None else [rng.permutation(r) for r in rows]

    def each(self, cut: Callable[[Ints, str], Ragged]) -> dict[str, Ragged]:
        """Every pool cut by `cut(labels, split)`, counted through all pools."""
        lists = {s: (cut(y, s), offset) for s, (y, offset) in self.pools.items()}
        return {s: Ragged(cut.flat + offset, cut.size) for s, (cut, offset) in lists.items()}


def _labels(labels: Any, name: str) -> Ints:
    a = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    fits = a.ndim == 1 and a.size and a.dtype.kind in "iu" and int(a.min()) >= 0
    need(fits, name, "whole numbers [n] of at least 0", labels)
    whole: Ints = a.astype(np.int64)
    return whole


def deal(rows: Sequence[Ints], counts: Ints) -> Ragged:
    """Of the samples `rows` of each class, the first counts[c, 0] to client 0, and so on.

    counts: [C, N]. A client has its classes in order; samples beyond the counts are unused.
    """
    classes, n = counts.shape
    owner = np.repeat(np.tile(np.arange(n), classes), counts.ravel())
    dealt = [r[:k] for r, k in zip(rows, counts.sum(1), strict=True)]
    return Ragged.grouped(np.concatenate(dealt), owner, n)


def in_proportion(totals: Sequence[int] | Ints, weights: Any) -> Ints:
    """Counts [C, N] in exact proportion to whole weights [C, N]: total * cumsum // sum, then diff.

    Every sample is dealt, but for a class whose weights are all 0. Python's integers: no overflow.
    """
    up = np.cumsum(np.asarray(weights, dtype=object), axis=1)
    at = np.asarray(totals, dtype=object)[:, None] * up // np.maximum(up[:, -1:], 1)
    counts: Ints = np.diff(at, prepend=0).astype(np.int64)
    return counts


def even(total: int, parts: int) -> Ints:
    """`total` in equal parts [parts]; the first ones get one more where it does not divide."""
    size: Ints = total // parts + (np.arange(parts) < total % parts)
    return size


def deal_shards(rows: Ints, sizes: Ints, table: Ints) -> Ragged:
    """`rows` [m] in shards of these sizes [S]; client i gets the shards table[i]: [N, k]."""
    shards = Ragged(torch.from_numpy(rows), torch.from_numpy(sizes))
    return shards.take(torch.from_numpy(table.ravel())).every(table.shape[1])


def cut_in_two(lists: Ragged, first: Callable[[int], int], rng: Random) -> tuple[Ragged, Ragged]:
    """Each client's samples shuffled and cut: the first `first(n_i)` of them, and the others."""
    rows = [torch.from_numpy(rng.permutation(r.numpy())) for r in lists]
    at = [first(len(r)) for r in rows]
    pairs = [r.tensor_split([a]) for r, a in zip(rows, at, strict=True)]
    one, two = zip(*pairs, strict=True)
    return Ragged.of(one), Ragged.of(two)


def interleaved(rows: Sequence[Ints]) -> Ints:
    """The samples of all classes in one order of which every prefix is in their proportion."""
    rank = np.concatenate([(np.arange(len(r)) + 0.5) / max(len(r), 1) for r in rows])
    order: Ints = np.concatenate(rows)[np.argsort(rank, kind="stable")]
    return order
