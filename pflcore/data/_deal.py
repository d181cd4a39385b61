"""Ways to deal samples to clients, by which the partitions are written.

A partition says how many samples of each class every client gets, and `deal` gives each
client its samples. Random choices come from numpy's RandomState, whose streams are
frozen: a partition with its seed is the same on every machine and in every release.

Symbols: N clients (`n` in code); client i has n_i samples; C classes; m samples in a
pool; class c has n_c of them; k shards of a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pflcore.data._ragged import Ints, Ragged

Random = np.random.RandomState


def seeded_stream(seed: int, name: str) -> Random:
    """The random stream of a seed and a name.

    Two rules of different names do not share their draws, even with the same seed.
    """
    return Random([seed, *name.encode()])


def class_positions(y: Ints, classes: int, rng: Random | None) -> list[Ints]:
    """The positions in `y` [m] of each class, shuffled by `rng`.

    With None for `rng` they are in ascending order.
    """
    rows = [np.flatnonzero(y == label) for label in range(classes)]
    if rng is None:
        return rows
    return [rng.permutation(positions) for positions in rows]


def even_parts(total: int, parts: int) -> Ints:
    """Sizes [parts] of the equal parts of `total`.

    Where `total` is no multiple of `parts`, the first parts have one more.
    """
    size: Ints = total // parts + (np.arange(parts) < total % parts)
    return size


def proportional_counts(
    totals: Ints,  # [C]
    weights: NDArray[np.object_],  # [C, N]
) -> Ints:  # [C, N]
    """Counts in exact proportion to weights, which are whole numbers or fractions.

    A class is cut at total * cumsum(weights) // sum(weights), so every sample has a
    client, but for a class whose weights are all 0. The numbers are Python's own, so
    they do not overflow.
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
    """The samples of each client, by its counts of each class.

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
    sizes: Ints,  # [shards] the number of samples of each shard
    table: Ints,  # [N, k] the shards of each client
) -> Ragged:
    """The samples of each client, which has k shards of `rows`."""
    shards = Ragged(torch.from_numpy(rows), torch.from_numpy(sizes))
    shards_by_client = shards.take(torch.from_numpy(table.ravel()))
    shard_sizes = shards_by_client.size.view(table.shape)
    return Ragged(shards_by_client.flat, shard_sizes.sum(1))


def split_lists(
    lists: Ragged, first_size: Callable[[int], int], rng: Random
) -> list[Ragged]:
    """First and second parts of each client's samples, which are shuffled before.

    The first part of client i has `first_size(n_i)` samples.
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
    """All samples, where every prefix has the proportions of the classes.

    Sample k of a class with n_c samples has the rank (k + 0.5) / n_c.
    """
    ranks = []
    for positions in rows:
        size = len(positions)
        ranks.append((np.arange(size) + 0.5) / max(size, 1))
    order = np.argsort(np.concatenate(ranks), kind="stable")
    samples: Ints = np.concatenate(rows)[order]
    return samples
