"""Index lists of many clients as one flat tensor with offsets, and the ways to make
them.

A partition says how many samples of each class every client gets; `deal` hands them
out. All else, shards and groups of clients, is made of its lists. Random choices come
from numpy's RandomState, whose streams are frozen: a partition with its seed is the
same on every machine and in every release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Random = np.random.RandomState


class Ragged(Sequence[Tensor]):
    """N lists of int64: list i is ``flat[begin[i] : begin[i + 1]]``, a view.

    flat   [n]      all lists, one after the other, on the pool's device
    size   [N]      the lengths, on the CPU
    begin  [N + 1]  where each begins, on the CPU
    """

    def __init__(self, flat: Tensor, size: Tensor) -> None:
        self.flat = flat
        self.size = size
        self.begin = torch.cat([size.new_zeros(1), size.cumsum(0)])

    @classmethod
    def from_lists(cls, lists: Sequence[Tensor]) -> Ragged:
        """The same lists, from at least one tensor [n_i]."""
        # numel: len of a tensor is slow
        return cls(
            torch.cat(list(lists)), torch.tensor([rows.numel() for rows in lists])
        )

    @classmethod
    def from_owners(cls, rows: Tensor | Ints, owner: Tensor | Ints, n: int) -> Ragged:
        """Samples `rows` [m] to their owners [m] in 0..n-1, each client's in the
        order given."""
        order = torch.from_numpy(np.argsort(np.asarray(owner), kind="stable"))
        return cls(
            torch.as_tensor(rows)[order], torch.as_tensor(owner).bincount(minlength=n)
        )

    @classmethod
    def from_single_list(cls, rows: Tensor, i: int, n: int) -> Ragged:
        """List i of n, of which the others are empty; the tables take no memory for
        those."""
        lists = cls(rows, torch.tensor([len(rows)]))
        lists.size, lists.begin = (
            torch.from_numpy(np.zeros(m, np.int64)) for m in (n, n + 1)
        )
        # an empty list may begin anywhere
        lists.size[i] = lists.begin[i + 1] = len(rows)
        return lists

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, i: Any) -> Any:
        """List i, a view; of a slice the lists."""
        if isinstance(i, slice):
            return self.take(torch.arange(len(self))[i])
        i = range(len(self))[i]
        return self.flat[int(self.begin[i]) : int(self.begin[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.size.tolist()))

    def take(self, ids: Tensor) -> Ragged:
        """The lists of these clients [S], in their order."""
        if len(ids) == len(self) and bool((ids == torch.arange(len(ids))).all()):
            return self
        size = self.size[ids]
        shift = self.begin[ids] - (size.cumsum(0) - size)
        at = torch.arange(int(size.sum())) + shift.repeat_interleave(size)
        return Ragged(self.flat[to_device(at, self.flat.device)], size)

    def owners(self) -> Tensor:
        """Whose each of the flat indices is: int64 [n], on their device."""
        return to_device(
            torch.arange(len(self)).repeat_interleave(self.size), self.flat.device
        )

    def to(self, device: str | torch.device) -> Ragged:
        """The same lists on ``device``."""
        return Ragged(self.flat.to(device), self.size)


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """The tensor `t` [...] on `device`: itself where it is there, else a copy.

    For small tensors, such as a cohort's ids: to a GPU they go through pinned memory,
    so that the caller does not wait for the copy.
    """
    if t.device == device:
        return t
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    # pinning begins to work on the current card, the first one
    with torch.cuda.device(device):
        return t.pin_memory().to(device, non_blocking=True)


def seeded_stream(seed: int, what: str) -> Random:
    """A stream of its own for each recipe, so that two with one seed do not share
    their draws."""
    return Random([seed, *what.encode()])


def class_positions(y: Ints, classes: int, rng: Random | None) -> list[Ints]:
    """The positions in `y` of each class, shuffled by `rng`, or in their order."""
    rows = [np.flatnonzero(y == c) for c in range(classes)]
    return rows if rng is None else [rng.permutation(r) for r in rows]


def even_parts(total: int, parts: int) -> Ints:
    """`total` in equal parts [parts]; the first ones get one more where it does not
    divide."""
    size: Ints = total // parts + (np.arange(parts) < total % parts)
    return size


def proportional_counts(totals: Ints, weights: NDArray[np.object_]) -> Ints:
    """Counts [C, N] in exact proportion to weights [C, N], whole or fractions: total *
    cumsum // sum, then diff.

    Every sample is dealt, but for a class whose weights are all 0. Python's integers:
    no overflow.
    """
    up = np.cumsum(weights, axis=1)
    at = totals.astype(object)[:, None] * up // np.where(up[:, -1:] > 0, up[:, -1:], 1)
    counts: Ints = np.diff(at, prepend=0).astype(np.int64)
    return counts


def deal(rows: Sequence[Ints], counts: Ints) -> Ragged:
    """Of the samples `rows` of each class, the first counts[c, 0] to client 0, and so
    on.

    counts: [C, N]. A client has its classes in order; samples beyond the counts are
    unused.
    """
    classes, n = counts.shape
    owner = np.repeat(np.tile(np.arange(n), classes), counts.ravel())
    dealt = [r[:k] for r, k in zip(rows, counts.sum(1), strict=True)]
    return Ragged.from_owners(np.concatenate(dealt), owner, n)


def deal_shards(rows: Ints, sizes: Ints, table: Ints) -> Ragged:
    """`rows` [m] in shards of these sizes [S]; client i gets the shards table[i]:
    [N, k]."""
    shards = Ragged(torch.from_numpy(rows), torch.from_numpy(sizes))
    dealt = shards.take(torch.from_numpy(table.ravel()))
    return Ragged(dealt.flat, dealt.size.view(table.shape).sum(1))


def split_lists(
    lists: Ragged, first: Callable[[int], int], rng: Random
) -> list[Ragged]:
    """Each client's samples shuffled and cut: the first `first(n_i)` of them, and
    the others."""
    parts = [np.split(rng.permutation(r.numpy()), [first(len(r))]) for r in lists]
    return [Ragged.from_lists([torch.from_numpy(p[i]) for p in parts]) for i in (0, 1)]


def interleave_classes(rows: Sequence[Ints]) -> Ints:
    """The samples of all classes in one order of which every prefix is in their
    proportion."""
    rank = np.concatenate([(np.arange(len(r)) + 0.5) / max(len(r), 1) for r in rows])
    order: Ints = np.concatenate(rows)[np.argsort(rank, kind="stable")]
    return order
