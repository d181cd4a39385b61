"""Dirichlet label skew: each class shared out among the clients in random proportions."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pflcore.check import Count, Part, Positive, checked, need
from pflcore.data.cuts import Labels, Partition, Random, cut_in_two, deal
from pflcore.data.ragged import Ints

Floats = NDArray[np.float64]
DRAWS = 100


@checked
def dirichlet(
    labels: Labels,
    rng: Random,
    *,
    alpha: Positive = 0.5,
    mode: Literal["same_proportions", "pooled_split"] = "same_proportions",
    balance: bool = False,
    min_size: Count | None = None,
    train_fraction: Part = 0.8,
) -> Partition:
    """For every class a draw p [N] from Dir(alpha), cut at floor(cumsum(p) n_c).

    mode      "same_proportions": the test pool is cut by the same p. "pooled_split" (FedDWA's
              released code, practical setting 2): both pools are one, and `train_fraction` of each
              client's share, at random, is for training
    balance   clients who hold total / N samples already get p = 0 of the next class (same code)
    min_size  the fewest samples of a client (20, less in a small pool); in "same_proportions" also
              one test sample. Draws are repeated until that holds, at most `DRAWS` times; then the
              best is kept and single samples move from the largest client to the smallest
    facts: min_size, draws, and how many samples moved.
    """
    pooled, pools, n = mode == "pooled_split", [y for y, _ in labels.pools.values()], labels.n
    need(
        pooled or train_fraction == 0.8,
        "train_fraction",
        "0.8 outside pooled_split",
        train_fraction,
    )
    every = np.concatenate(pools) if pooled else labels.train
    least = 2 if pooled else 1  # a sample to train on, and one to be tested on
    floor = max(least, min(20, len(every) // (2 * n)) if min_size is None else min_size)
    need(floor * n <= len(every), "min_size", f"enough for {n} of {len(every)} samples", floor)
    totals = np.bincount(every, minlength=labels.classes)
    tests = None if pooled or len(pools) == 1 else np.bincount(pools[1], minlength=labels.classes)
    need(tests is None or tests.sum() >= n, "n", "at most as many as test samples", n)

    p, draws = _drawn(totals, tests, n, alpha, balance, floor, rng)
    held = counts_of(p, totals)
    moved = _lift(held, floor)
    index = {"train": deal(labels.by_class(every, rng), held)}
    if pooled:
        size = lambda k: min(max(1, int(train_fraction * k + 1e-9)), k - 1)  # noqa: E731
        index = dict(zip(("train", "test"), cut_in_two(index["train"], size, rng), strict=True))
    elif tests is not None:
        few = counts_of(p, tests)
        moved += _lift(few, 1, like=held)
        index["test"] = deal([r + len(every) for r in labels.by_class(pools[1], rng)], few)
    return Partition(index, facts={"min_size": floor, "draws": draws, "moved samples": moved})


def _drawn(
    totals: Ints, tests: Ints | None, n: int, alpha: float, balance: bool, floor: int, rng: Random
) -> tuple[Floats, int]:
    """The first draw [C, N] with `floor` samples for every client, or the best; how many draws."""
    best, least, draws = np.zeros((0, n)), -1, 0
    while draws < DRAWS and least < floor:
        draws += 1
        p = _proportions(totals, n, alpha, balance, rng)
        smallest = int(counts_of(p, totals).sum(0).min())
        if tests is not None and counts_of(p, tests).sum(0).min() == 0:
            smallest = min(smallest, floor - 1)  # a client without a test sample
        if smallest > least:
            best, least = p, smallest
    return best, draws


def counts_of(p: Floats, totals: Ints) -> Ints:
    """Samples [C, N] for proportions p [C, N]; the rows add up to totals [C]."""
    at = np.floor(np.cumsum(p, axis=1)[:, :-1] * totals[:, None]).astype(np.int64)
    at = at.clip(0, totals[:, None])
    return np.diff(at, prepend=0, append=totals[:, None])


def _proportions(totals: Ints, n: int, alpha: float, balance: bool, rng: Random) -> Floats:
    size, rows = np.zeros(n), []
    for total in totals:
        p = rng.dirichlet(np.full(n, alpha))
        if not np.isfinite(p).all() or p.sum() == 0:  # alpha so small that all draws underflow
            p = np.eye(n)[rng.randint(n)]
        if balance:
            room = (size < totals.sum() / n).astype(np.float64)
            kept = p * room
            kept = kept if kept.sum() else room if room.sum() else np.ones(n)
            p = kept / kept.sum()
        rows.append(p)
        size += counts_of(p[None], np.array([total]))[0]
    return np.stack(rows)


def _lift(held: Ints, floor: int, like: Ints | None = None) -> int:
    """Moves single samples, in place, until every client has `floor`; returns how many.

    held [C, N]. The largest client gives one of its most frequent class; with `like` [C, N] it is
    the class that the receiver has most of there, so that it is tested on what it trains on.
    """
    moved = 0
    while True:
        size = held.sum(0)
        to = int(size.argmin())
        if size[to] >= floor:
            return moved
        able = np.where(size > floor, held, 0)  # [C, N] what may be given
        if like is None:
            giver = int(size.argmax())
            c = int(able[:, giver].argmax())
        else:
            c = int(np.where(able.sum(1) > 0, like[:, to], -1).argmax())
            giver = int(able[c].argmax())
        held[c, giver] -= 1
        held[c, to] += 1
        moved += 1
