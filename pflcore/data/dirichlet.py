"""Dirichlet label skew: each class shared out among the clients in random proportions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pflcore.check import Count, Positive, Seed32, Share, checked

from .cuts import Ints, Partition, Pool, by_class, rng_of

Floats = NDArray[np.float64]


@checked
def dirichlet(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    alpha: Positive = 0.5,
    mode: str = "same_proportions",
    balance: bool = False,
    min_size: Count | None = None,
    train_fraction: Share = 0.8,
    max_redraws: Count = 100,
) -> Partition:
    """For every class a draw p from Dir(alpha 1_N); client i gets the share p_i of its samples, cut
    at floor(cumsum(p) n_c).

    mode "same_proportions": the test pool is cut by the same p. mode "pooled_split" (FedDWA's
    released code, practical setting 2): both pools are one, and each client's share is split at
    random, ``train_fraction`` of it for training. balance: before each class, clients that already
    hold total/N samples are set to p = 0 and p is renormalised (same code). min_size: the fewest
    samples a client may have (training samples; both kinds in "pooled_split"), and in
    "same_proportions" one test sample; default 20, less if the pool is small. Draws are repeated
    until that holds, at most ``max_redraws`` times; then the best draw is kept and single samples
    move from the largest client to the smallest. ``notes`` says which it was.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "dirichlet")
    if mode not in ("same_proportions", "pooled_split"):
        raise ValueError(f"mode must be 'same_proportions' or 'pooled_split', got {mode!r}")
    if not 0 < train_fraction < 1:
        raise ValueError(f"train_fraction must lie between 0 and 1, got {train_fraction}")
    if train_fraction != 0.8 and mode != "pooled_split":
        raise ValueError(
            f"train_fraction plays no part in mode {mode!r}, got {train_fraction}: leave it out, "
            "or take mode 'pooled_split'"
        )
    pooled = mode == "pooled_split"
    every = np.concatenate([pool.train, pool.test]) if pooled else pool.train
    least = 2 if pooled else 1  # one to train on, one to test on
    floor = (
        max(least, min(20, len(every) // (2 * n)))
        if min_size is None
        else max(least, int(min_size))
    )
    if floor * n > len(every):
        raise ValueError(
            f"min_size must leave enough for {n} clients of {len(every)} samples, got {floor}: use "
            "fewer clients"
        )
    totals = np.bincount(every, minlength=pool.classes)
    tests = np.bincount(pool.test, minlength=pool.classes) if pool.has_test and not pooled else None
    if tests is not None and tests.sum() < n:
        raise ValueError(f"n must be at most the number of test samples ({tests.sum()}), got {n}")

    best, best_least, tries = None, -1, 0
    while tries < max_redraws and best_least < floor:
        tries += 1
        p = _proportions(totals, n, alpha, balance, rng)
        held = counts_of(p, totals)
        smallest = int(held.sum(0).min())
        if tests is not None and counts_of(p, tests).sum(0).min() == 0:
            # a client without a test sample is not accepted either
            smallest = min(smallest, floor - 1)
        if smallest > best_least:
            best, best_least = p, smallest
    assert best is not None
    held, moved = counts_of(best, totals), 0
    moved += _lift(held, floor)
    index = {"train": _deal(by_class(every, pool.classes, rng), held)}
    if pooled:
        whole = [rng.permutation(rows) for rows in index["train"]]
        at = [min(max(1, int(train_fraction * len(rows) + 1e-9)), len(rows) - 1) for rows in whole]
        index = {
            "train": [r[:a] for r, a in zip(whole, at, strict=True)],
            "test": [r[a:] for r, a in zip(whole, at, strict=True)],
        }
    elif tests is not None:
        held_test = counts_of(best, tests)
        moved += _lift(held_test, 1, like=held)
        index["test"] = [
            rows + pool.offset for rows in _deal(by_class(pool.test, pool.classes, rng), held_test)
        ]
    wanted = f"Dirichlet({alpha:g}), at least {floor} samples per client"
    if best_least >= floor:
        note = f"{wanted}: draw {tries} of at most {max_redraws} was accepted"
    else:
        note = (
            f"{wanted}: none of {tries} draws gave that, so the best was kept and {moved} samples "
            "were moved from the largest clients"
        )
    return pool.finish(index, notes=[note])


def cuts_of(p: Floats, n_c: int) -> Ints:
    """floor(cumsum(p) * n_c) without the last: where a class of ``n_c`` samples is cut for the
    proportions ``p`` [N]."""
    return np.floor(np.cumsum(p)[:-1] * n_c).astype(np.int64).clip(0, n_c)


def counts_of(p: Floats, totals: Ints) -> Ints:
    """How many samples of each class each client gets: p [C, N], totals [C] -> [C, N]; the rows add
    up to ``totals``."""
    return np.stack(
        [
            np.diff(cuts_of(row, int(t)), prepend=0, append=int(t))
            for row, t in zip(p, totals, strict=True)
        ]
    )


def _proportions(
    totals: Ints, n: int, alpha: float, balance: bool, rng: np.random.RandomState
) -> Floats:
    size, rows = np.zeros(n), []
    for n_c in totals:
        p = rng.dirichlet(np.full(n, alpha))
        # all gamma draws underflow for tiny alpha: its limit, one client takes all
        if not np.isfinite(p).all() or p.sum() == 0:
            p = np.eye(n)[rng.randint(n)]
        if balance:
            room = (size < totals.sum() / n).astype(np.float64)
            kept = p * room
            if kept.sum() == 0:
                kept = room if room.sum() else np.ones(n)
            p = kept / kept.sum()
        rows.append(p)
        size += np.diff(cuts_of(p, int(n_c)), prepend=0, append=int(n_c))
    return np.stack(rows)


def _lift(held: Ints, floor: int, like: Ints | None = None) -> int:
    """Move samples, one at a time and in place, until every client has ``floor``; returns how many
    moved.

    The giver is the largest client, the class its most plentiful one. With ``like`` [C, N] the
    class is the one that the receiver holds most of there, so that a client is tested on what it
    trains on.
    """
    moved = 0
    while True:
        size = held.sum(0)
        to = int(size.argmin())
        if size[to] >= floor:
            return moved
        able = np.where(size > floor, held, 0)  # [C, N] what may be given away
        if like is None:
            giver = int(size.argmax())
            c = int(able[:, giver].argmax())
        else:
            c = int(np.where(able.sum(1) > 0, like[:, to], -1).argmax())
            giver = int(able[c].argmax())
        held[c, giver] -= 1
        held[c, to] += 1
        moved += 1


def _deal(by_class: Sequence[Ints], held: Ints) -> list[Ints]:
    """Index lists per client from the class lists and the counts [C, N]."""
    pieces = [np.split(rows, np.cumsum(h)[:-1]) for rows, h in zip(by_class, held, strict=True)]
    return [np.concatenate([p[i] for p in pieces]) for i in range(held.shape[1])]
