"""WAFFLe's partitions (Hao et al. 2020, appendix B): Z single-class shards to each client, in one
population or in two of unequal size.

Both cut the training pool alone, and hold out a part of each client's own samples, shuffled
together, as its test set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pflcore.check import Count, Seed32, Share, checked

from .cuts import Classes, Ints, Partition, Pool, by_class, rng_of

MINORITY: dict[str, tuple[int, ...]] = {  # classes of the minority
    "mnist": (0, 2, 4, 6, 8),  # even digits
    "fashion_mnist": (0, 5, 6, 7, 9),  # footwear and shirts; the pullover counts as none
    "cifar10": (0, 1, 8, 9),  # vehicles
}


@checked
def unimodal(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    z: Count = 2,
    test: Share = 0.2,
    train: Count | None = None,
) -> Partition:
    """Each class cut evenly into its part of N z shards (the first classes get one more where that
    does not divide), z dealt to a client.

    A client may get two shards of one class, so it holds at most z classes. ``test``: the share of
    a client's samples that is held out. ``train``: use so many of the others only, whose test sets
    stay.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "unimodal")
    mine = _dealt(_shards(pool.train, range(pool.classes), n * z, None, rng), n, z, rng)
    unused = len(pool.train) - sum(map(len, mine))
    notes = (
        [
            f"{unused} training samples are unused: there are fewer shards ({n * z}) than classes "
            f"({pool.classes})"
        ]
        if unused
        else []
    )
    return _finish(pool, mine, test, train, rng, notes, None)


@checked
def multimodal(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    z: Count = 2,
    minority: Classes = "mnist",
    minority_clients: Count = 20,
    test: Share = 0.2,
    train: Count | None = None,
) -> Partition:
    """The same within two groups of classes and clients: ``group`` [N] is 0 for the majority, 1 for
    the last ``minority_clients``.

    ``minority``: the classes of the minority, or the paper's for "mnist" (even digits),
    "fashion_mnist" (footwear and shirts), "cifar10" (vehicles). All shards are of one size, the
    largest that every class can give; what is left over is unused.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "multimodal")
    if isinstance(minority, str) and minority not in MINORITY:
        raise ValueError(
            f"minority must be one of {', '.join(MINORITY)}, or a list of classes, got {minority!r}"
        )
    few = sorted(set(MINORITY[minority] if isinstance(minority, str) else minority))
    if not few or min(few) < 0 or max(few) >= pool.classes or len(few) == pool.classes:
        raise ValueError(
            f"minority must leave classes on both sides of 0..{pool.classes - 1}, got {few}"
        )
    if not 1 <= minority_clients < n:
        raise ValueError(
            f"minority_clients must lie in 1..{n - 1} of the {n} clients, got {minority_clients}"
        )
    modes = [
        ([c for c in range(pool.classes) if c not in few], n - minority_clients),
        (few, minority_clients),
    ]
    have = np.bincount(pool.train, minlength=pool.classes)
    size = min(
        int(have[c]) // s
        for mode, clients in modes
        for c, s in zip(mode, _counts(len(mode), clients * z), strict=True)
        if s
    )
    if size == 0:
        raise ValueError(
            f"n must leave every shard a sample, but with n={n} and z={z} some class has too few: "
            "use fewer clients"
        )
    mine = [
        rows
        for m, k in modes
        for rows in _dealt(_shards(pool.train, m, k * z, size, rng), k, z, rng)
    ]
    unused = len(pool.train) - sum(map(len, mine))
    notes = (
        [f"{unused} training samples are unused: all shards have {size} samples"] if unused else []
    )
    return _finish(
        pool, mine, test, train, rng, notes, (np.arange(n) >= n - minority_clients).astype(np.int64)
    )


def _counts(classes: int, shards: int) -> list[int]:
    return [shards // classes + (i < shards % classes) for i in range(classes)]


def _shards(
    y: Ints,
    classes: Sequence[int] | range,
    number: int,
    size: int | None,
    rng: np.random.RandomState,
) -> list[list[Ints]]:
    """Each of these classes' shards: all its samples in even pieces, or pieces of `size`."""
    rows = by_class(y, int(y.max()) + 1, rng)
    out = []
    for c, count in zip(classes, _counts(len(classes), number), strict=True):
        mine = rows[c] if c < len(rows) else np.zeros(0, dtype=np.int64)
        if count > len(mine):
            raise ValueError(
                f"n must leave every shard a sample, but class {c} has {len(mine)} for {count} "
                "shards: use fewer clients"
            )
        out.append(
            [mine[i * size : (i + 1) * size] for i in range(count)]
            if size
            else np.array_split(mine, count)
            if count
            else []
        )
    return out


def _dealt(shards: list[list[Ints]], n: int, z: int, rng: np.random.RandomState) -> list[Ints]:
    """`z` shards to each of `n` clients at random."""
    every = [s for of in shards for s in of]
    deal = rng.permutation(n * z).reshape(n, z)
    return [np.concatenate([every[s] for s in row]) for row in deal]


def _finish(
    pool: Pool,
    mine: list[Ints],
    test: float,
    train: int | None,
    rng: np.random.RandomState,
    notes: list[str],
    group: Ints | None,
) -> Partition:
    if not 0 < test < 1:
        raise ValueError(f"test must be a share in (0, 1) of each client's samples, got {test}")
    rows = [rng.permutation(r) for r in mine]
    cuts = [max(1, int(test * len(r) + 0.5)) for r in rows]
    index = {
        "train": [r[c:][:train] for r, c in zip(rows, cuts, strict=True)],
        "test": [r[:c] for r, c in zip(rows, cuts, strict=True)],
    }
    return pool.finish(index, notes=notes, group=group)
