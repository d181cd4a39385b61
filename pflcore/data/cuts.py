"""What partitions share: checked labels, the one cutter, the result.

A partition says how many samples of each class every client gets; `deal` hands them out. All else,
shards and groups of clients, is made of its lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Kind
from pflcore.data.ragged import Ints, Ragged, starts

Random = np.random.RandomState
Weights = Annotated[
    str | Sequence[float], Kind("a name or a list of proportions", lambda v: hasattr(v, "__iter__"))
]
Classes = Annotated[
    str | Sequence[int], Kind("a name or a list of classes", lambda v: hasattr(v, "__iter__"))
]


@dataclass(frozen=True)
class Partition:
    """index: split -> N index lists; relabel [N, C] or None; group [N] where the recipe has groups;
    notes: sentences for the record."""

    index: dict[str, list[Tensor]]
    relabel: Tensor | None = None
    notes: list[str] = field(default_factory=list)
    group: Tensor | None = None


@dataclass(frozen=True)
class Labels:
    """The labels [n] of each pool, where its samples are counted from, and for whom they are."""

    pools: dict[str, tuple[Ints, int]]  # split -> labels, offset
    n: int
    classes: int

    @classmethod
    def of(cls, labels: Any, test_labels: Any, n: int, classes: int | None) -> Labels:
        """ValueError where these are no labels, or too few for n clients."""
        train = _labels(labels, "labels")
        need(n >= 1, f"n must be at least one client, got {n}")
        need(
            n <= len(train),
            f"n must be at most the number of training samples ({len(train)}), got {n}",
        )
        pools = {"train": (train, 0)}
        if test_labels is not None:
            pools["test"] = _labels(test_labels, "test_labels"), len(train)
        top = max(int(y.max()) for y, _ in pools.values())
        classes = top + 1 if classes is None else classes
        need(top < classes, f"labels must lie in 0..{classes - 1}, got {top}")
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
        return {s: Ragged(cut.flat + offset, cut.begin) for s, (cut, offset) in lists.items()}

    def finish(
        self, index: dict[str, Ragged], notes: Sequence[str] = (), group: Ints | None = None
    ) -> Partition:
        """ValueError where a client has nothing to train on."""
        none = np.flatnonzero(index["train"].size == 0)[:1].tolist()
        need(
            not none,
            f"n must leave every client a training sample, but with n={self.n} client "
            f"{none and none[0]} gets none: use fewer clients",
        )
        lists = {s: list(rows) for s, rows in index.items()}
        return Partition(
            lists, None, list(notes), None if group is None else torch.from_numpy(group)
        )


def need(fits: Any, sentence: str) -> None:
    """ValueError with this sentence where it does not fit."""
    if not fits:
        raise ValueError(sentence)


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    need(value in choices, f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def _labels(labels: Any, name: str) -> Ints:
    a = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    need(
        a.ndim == 1 and a.size and a.dtype.kind in "iu",
        f"{name} must be a non-empty list of integer labels, got {a.dtype} of shape "
        f"{list(a.shape)}",
    )
    need(int(a.min()) >= 0, f"{name} must not be negative, got {int(a.min())}")
    return a.astype(np.int64)


def deal(rows: Sequence[Ints], counts: Ints) -> Ragged:
    """Of the samples `rows` of each class, the first counts[c, 0] to client 0, and so on.

    counts: [C, N]. A client has its classes in order; samples beyond the counts are unused.
    """
    classes, n = counts.shape
    owner = np.repeat(np.tile(np.arange(n), classes), counts.ravel())
    dealt = [r[:k] for r, k in zip(rows, counts.sum(1), strict=True)]
    return Ragged.grouped(np.concatenate(dealt), owner, n)


def in_proportion(totals: Sequence[int], weights: Any) -> Ints:
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
    shards = Ragged(torch.from_numpy(rows), starts(torch.from_numpy(sizes)))
    return shards.take(torch.from_numpy(table.ravel())).every(table.shape[1])


def cut_in_two(lists: Ragged, first: Callable[[int], int], rng: Random) -> tuple[Ragged, Ragged]:
    """Each client's samples shuffled and cut: the first `first(n_i)` of them, and the others."""
    rows = [torch.from_numpy(rng.permutation(r.numpy())) for r in lists]
    at = [first(len(r)) for r in rows]
    head = [r[:a] for r, a in zip(rows, at, strict=True)]
    tail = [r[a:] for r, a in zip(rows, at, strict=True)]
    return Ragged.of(head), Ragged.of(tail)
