"""Dirichlet label skew: each class shared out among the clients in random proportions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pflcore.check import Count, Positive, Share, checked
from pflcore.data.cuts import Labels, Partition, Random, cut_in_two, deal, need, one_of
from pflcore.data.ragged import Ints

Floats = NDArray[np.float64]


@checked
def dirichlet(  # noqa: PLR0913 (the recipe's options)
    labels: Labels,
    rng: Random,
    *,
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
    one_of("mode", mode, ("same_proportions", "pooled_split"))
    need(
        0 < train_fraction < 1,
        f"train_fraction must lie between 0 and 1, got {train_fraction}",
    )
    pooled, pools, n = mode == "pooled_split", [y for y, _ in labels.pools.values()], labels.n
    need(
        pooled or train_fraction == 0.8,
        f"train_fraction plays no part in mode {mode!r}, got {train_fraction}: leave it out, "
        "or take mode 'pooled_split'",
    )
    every = np.concatenate(pools) if pooled else labels.train
    least = 2 if pooled else 1  # one to train on, one to test on
    floor = max(least, min(20, len(every) // (2 * n)) if min_size is None else min_size)
    need(
        floor * n <= len(every),
        f"min_size must leave enough for {n} clients of {len(every)} samples, got {floor}: use "
        "fewer clients",
    )
    totals = np.bincount(every, minlength=labels.classes)
    tests = None if pooled or len(pools) == 1 else np.bincount(pools[1], minlength=labels.classes)
    if tests is not None:
        enough = f"n must be at most the number of test samples ({tests.sum()}), got {n}"
        need(tests.sum() >= n, enough)

    def smallest(p: Floats) -> int:
        least = int(counts_of(p, totals).sum(0).min())
        untested = tests is not None and counts_of(p, tests).sum(0).min() == 0
        return min(least, floor - 1) if untested else least

    draws = (_proportions(totals, n, alpha, balance, rng) for _ in range(max_redraws))
    p, least, tries = _first(draws, smallest, floor)
    held = counts_of(p, totals)
    moved = _lift(held, floor)
    index = {"train": deal(labels.by_class(every, rng), held)}
    if pooled:
        index["train"], index["test"] = cut_in_two(
            index["train"], lambda k: min(max(1, int(train_fraction * k + 1e-9)), k - 1), rng
        )
    elif tests is not None:
        few = counts_of(p, tests)
        moved += _lift(few, 1, like=held)
        index["test"] = deal([r + len(every) for r in labels.by_class(pools[1], rng)], few)
    wanted = f"Dirichlet({alpha:g}), at least {floor} samples per client"
    accepted = f"{wanted}: draw {tries} of at most {max_redraws} was accepted"
    best = (
        f"{wanted}: none of {tries} draws gave that, so the best was kept and {moved} samples "
        "were moved from the largest clients"
    )
    return labels.finish(index, [accepted if least >= floor else best])


def _first(
    draws: Iterator[Floats], smallest: Callable[[Floats], int], floor: int
) -> tuple[Floats, int, int]:
    """The first draw [C, N] with `floor` samples for every client, or the best; its fewest samples,
    how many draws."""
    best, least, tries = np.zeros((0, 0)), -1, 0
    for p in draws:
        tries += 1
        size = smallest(p)
        if size > least:
            best, least = p, size
        if least >= floor:
            break
    return best, least, tries


def counts_of(p: Floats, totals: Ints) -> Ints:
    """Samples [C, N] for proportions p [C, N], cut at floor(cumsum(p) n_c); the rows add up to
    totals [C]."""
    at = np.floor(np.cumsum(p, axis=1)[:, :-1] * totals[:, None]).astype(np.int64)
    at = at.clip(0, totals[:, None])
    return np.diff(at, prepend=0, append=totals[:, None])


def _proportions(totals: Ints, n: int, alpha: float, balance: bool, rng: Random) -> Floats:
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
        size += counts_of(p[None], np.array([n_c]))[0]
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
