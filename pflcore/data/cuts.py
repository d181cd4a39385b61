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
    """The labels [n] of each pool, and for how many clients they are."""

    pools: Mapping[str, Ints]  # split -> labels
    n: int
    classes: int

    @property
    def train(self) -> Ints:
        return self.pools["train"]

    def by_class(self, y: Ints, rng: Random | None) -> list[Ints]:
        """The positions in `y` of each class, shuffled by `rng`, or in their order."""
        rows = [np.flatnonzero(y == c) for c in range(self.classes)]
        return rows if rng is None else [rng.permutation(r) for r in rows]

    def each(self, cut: Callable[[Ints, str], Ragged]) -> dict[str, Ragged]:
        """Every pool cut by `cut(labels, split)`, counted through all pools."""
        index, first = {}, 0
        for split, y in self.pools.items():
            lists = cut(y, split)
            index[split], first = Ragged(lists.flat + first, lists.size), first + len(y)
        return index


def stream(seed: int, what: str) -> Random:
    """A stream of its own for each recipe, so that two with one seed do not share their draws."""
    return Random([seed, *what.encode()])


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
    dealt = shards.take(torch.from_numpy(table.ravel()))
    return Ragged(dealt.flat, dealt.size.view(table.shape).sum(1))


def cut_in_two(lists: Ragged, first: Callable[[int], int], rng: Random) -> list[Ragged]:
    """Each client's samples shuffled and cut: the first `first(n_i)` of them, and the others."""
    parts = [np.split(rng.permutation(r.numpy()), [first(len(r))]) for r in lists]
    return [Ragged.of([torch.from_numpy(p[i]) for p in parts]) for i in (0, 1)]


def interleaved(rows: Sequence[Ints]) -> Ints:
    """The samples of all classes in one order of which every prefix is in their proportion."""
    rank = np.concatenate([(np.arange(len(r)) + 0.5) / max(len(r), 1) for r in rows])
    order: Ints = np.concatenate(rows)[np.argsort(rank, kind="stable")]
    return order
