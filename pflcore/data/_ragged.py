"""Index lists of many clients as one flat tensor with offsets, and ways to make them.

A partition says how many samples of each class every client gets, and `deal` gives each
client its samples. Random choices come from numpy's RandomState, whose streams are
frozen: a partition with its seed is the same on every machine and in every release.

Symbols: N clients (`n` in code), S of them in a selection, C classes; client i has a
list of n_i indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore._device import to_device

Ints = NDArray[np.int64]
Random = np.random.RandomState


class Ragged(Sequence[Tensor]):
    """N lists of int64: list i is ``flat[begin[i] : begin[i + 1]]``, a view.

    - flat: all lists, one after the other, on the pool's device
    - size: [N] lengths of the lists, on the CPU
    - begin: [N + 1] where each list begins in `flat`, on the CPU
    """

    def __init__(self, flat: Tensor, size: Tensor) -> None:
        self.flat = flat
        self.size = size
        self.begin = torch.cat([size.new_zeros(1), size.cumsum(0)])

    @classmethod
    def from_lists(cls, lists: Sequence[Tensor]) -> Ragged:
        """Makes it of at least one tensor [n_i]."""
        sizes = [rows.numel() for rows in lists]  # `len` of a tensor is slow
        return cls(torch.cat(list(lists)), torch.tensor(sizes))

    @classmethod
    def from_owners(cls, rows: Tensor | Ints, owner: Tensor | Ints, n: int) -> Ragged:
        """Gives the samples `rows` [m] to their owners [m] in 0..n-1.

        A client's samples keep their order.
        """
        order = torch.from_numpy(np.argsort(np.asarray(owner), kind="stable"))
        sizes = torch.as_tensor(owner).bincount(minlength=n)
        return cls(torch.as_tensor(rows)[order], sizes)

    @classmethod
    def from_single_list(cls, rows: Tensor, i: int, n: int) -> Ragged:
        """List i of n lists, of which the others are empty.

        numpy's zeros take no memory before they are written, so the empty lists cost
        none.
        """
        lists = cls(rows, torch.tensor([len(rows)]))
        lists.size = torch.from_numpy(np.zeros(n, np.int64))
        lists.begin = torch.from_numpy(np.zeros(n + 1, np.int64))
        lists.size[i] = len(rows)
        # The lists after this one begin at 0, not at its end: an empty list may begin
        # anywhere.
        lists.begin[i + 1] = len(rows)
        return lists

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, i: Any) -> Any:
        """List i, a view; for a slice its lists as a `Ragged`."""
        if isinstance(i, slice):
            return self.take(torch.arange(len(self))[i])
        i = range(len(self))[i]
        return self.flat[int(self.begin[i]) : int(self.begin[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.size.tolist()))

    def take(self, ids: Tensor) -> Ragged:
        """The lists of the clients `ids` [S], in their order."""
        if len(ids) == len(self) and bool((ids == torch.arange(len(ids))).all()):
            return self
        size = self.size[ids]
        new_begin = size.cumsum(0) - size
        shift = self.begin[ids] - new_begin
        index = torch.arange(int(size.sum())) + shift.repeat_interleave(size)
        return Ragged(self.flat[to_device(index, self.flat.device)], size)

    def owners(self) -> Tensor:
        """The client of each flat index: int64, as long as `flat` and on its device."""
        owners = torch.arange(len(self)).repeat_interleave(self.size)
        return to_device(owners, self.flat.device)

    def to(self, device: str | torch.device) -> Ragged:
        """The same lists on ``device``."""
        return Ragged(self.flat.to(device), self.size)


def seeded_stream(seed: int, name: str) -> Random:
    """A random stream for a rule's name.

    Two rules with one seed do not share their draws.
    """
    return Random([seed, *name.encode()])


def class_positions(y: Ints, classes: int, rng: Random | None) -> list[Ints]:
    """The positions in `y` of each class, shuffled by `rng`, or in their order."""
    rows = [np.flatnonzero(y == label) for label in range(classes)]
    if rng is None:
        return rows
    return [rng.permutation(positions) for positions in rows]


def even_parts(total: int, parts: int) -> Ints:
    """Sizes [parts] of equal parts of `total`.

    Where it does not divide, the first parts have one more.
    """
    size: Ints = total // parts + (np.arange(parts) < total % parts)
    return size


def proportional_counts(
    totals: Ints,  # [C]
    weights: NDArray[np.object_],  # [C, N]
) -> Ints:  # [C, N]
    """Counts in exact proportion to weights, which are whole numbers or fractions.

    A class is cut at total * cumsum // sum, so every sample has a client, but for a
    class whose weights are all 0. The numbers are Python's own: they do not overflow.
    """
    cumulative = np.cumsum(weights, axis=1)
    sums = cumulative[:, -1:]
    divisors = np.where(sums > 0, sums, 1)
    ends = totals.astype(object)[:, None] * cumulative // divisors
    counts: Ints = np.diff(ends, prepend=0).astype(np.int64)
    return counts


def deal(
    rows: Sequence[Ints],  # C arrays of samples
    counts: Ints,  # [C, N]
) -> Ragged:
    """Gives each client its counts of the samples of each class.

    The first counts[c, 0] samples of class c go to client 0, the next counts[c, 1] to
    client 1, and so on. Samples beyond the counts stay unused. A client's samples are
    in the order of their classes.
    """
    classes, n = counts.shape
    owner = np.repeat(np.tile(np.arange(n), classes), counts.ravel())
    used = [r[:total] for r, total in zip(rows, counts.sum(1), strict=True)]
    return Ragged.from_owners(np.concatenate(used), owner, n)


def deal_shards(
    rows: Ints,  # [m]
    sizes: Ints,  # a shard's number of samples
    table: Ints,  # [N, k] the shards of each client
) -> Ragged:
    """Cuts samples into shards of these sizes, and gives each client k of them."""
    shards = Ragged(torch.from_numpy(rows), torch.from_numpy(sizes))
    shards_by_client = shards.take(torch.from_numpy(table.ravel()))
    shard_sizes = shards_by_client.size.view(table.shape)
    return Ragged(shards_by_client.flat, shard_sizes.sum(1))


def split_lists(
    lists: Ragged, first_size: Callable[[int], int], rng: Random
) -> list[Ragged]:
    """Each client's samples, shuffled and cut in two.

    Client i's first part has `first_size(n_i)` samples.
    """
    first_parts = []
    other_parts = []
    for samples in lists:
        shuffled = torch.from_numpy(rng.permutation(samples.numpy()))
        size = first_size(len(samples))
        first_parts.append(shuffled[:size])
        other_parts.append(shuffled[size:])
    return [Ragged.from_lists(first_parts), Ragged.from_lists(other_parts)]


def interleave_classes(rows: Sequence[Ints]) -> Ints:
    """All samples in an order of which every prefix has the classes' proportions.

    Sample k of a class with m samples has the rank (k + 0.5) / m.
    """
    ranks = [(np.arange(len(r)) + 0.5) / max(len(r), 1) for r in rows]
    order = np.argsort(np.concatenate(ranks), kind="stable")
    samples: Ints = np.concatenate(rows)[order]
    return samples
