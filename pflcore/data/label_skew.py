"""The partitions of the FedDWA paper and its neighbours: Dirichlet, pathological, and dominant classes by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cuts import Ints, Partition, Pool, by_class, rng_of

Floats = NDArray[np.float64]


# -- Dirichlet -----------------------------------------------------------------------------------------------------------------


def dirichlet(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: int = 0,
    classes: int | None = None,
    alpha: float = 0.5,
    mode: str = "same_proportions",
    balance: bool = False,
    min_size: int | None = None,
    train_fraction: float = 0.8,
    max_redraws: int = 100,
) -> Partition:
    """For every class a draw p from Dir(alpha 1_N); client i gets the share p_i of its samples, cut at floor(cumsum(p) n_c).

    mode "same_proportions": the test pool is cut by the same p. mode "pooled_split" (FedDWA's released code, practical setting 2): both
    pools are one, and each client's share is split at random, ``train_fraction`` of it for training.
    balance: before each class, clients that already hold total/N samples are set to p = 0 and p is renormalised (same code).
    min_size: the fewest samples a client may have (training samples; both kinds in "pooled_split"), and in "same_proportions" one test
    sample; default 20, less if the pool is small. Draws are repeated until that holds, at most ``max_redraws`` times; then the best draw
    is kept and single samples move from the largest client to the smallest. ``notes`` says which it was.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "dirichlet")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be above 0 and finite, got {alpha}")
    if mode not in ("same_proportions", "pooled_split"):
        raise ValueError(f"mode must be 'same_proportions' or 'pooled_split', got {mode!r}")
    if not 0 < train_fraction < 1:
        raise ValueError(f"train_fraction must lie between 0 and 1, got {train_fraction}")
    if max_redraws < 1:
        raise ValueError(f"max_redraws must be at least 1, got {max_redraws}")
    pooled = mode == "pooled_split"
    every = np.concatenate([pool.train, pool.test]) if pooled else pool.train
    least = 2 if pooled else 1  # one to train on, one to test on
    floor = max(least, min(20, len(every) // (2 * n))) if min_size is None else max(least, int(min_size))
    if floor * n > len(every):
        raise ValueError(f"min_size must leave enough for {n} clients of {len(every)} samples, got {floor}: use fewer clients")
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
            smallest = min(smallest, floor - 1)  # a client without a test sample is not accepted either
        if smallest > best_least:
            best, best_least = p, smallest
    assert best is not None
    held, moved = counts_of(best, totals), 0
    moved += _lift(held, floor)
    index = {"train": _deal(by_class(every, pool.classes, rng), held)}
    if pooled:
        whole = [rng.permutation(rows) for rows in index["train"]]
        at = [min(max(1, int(train_fraction * len(rows) + 1e-9)), len(rows) - 1) for rows in whole]
        index = {"train": [r[:a] for r, a in zip(whole, at, strict=True)], "test": [r[a:] for r, a in zip(whole, at, strict=True)]}
    elif tests is not None:
        held_test = counts_of(best, tests)
        moved += _lift(held_test, 1, like=held)
        index["test"] = [rows + pool.offset for rows in _deal(by_class(pool.test, pool.classes, rng), held_test)]
    wanted = f"Dirichlet({alpha:g}), at least {floor} samples per client"
    if best_least >= floor:
        note = f"{wanted}: draw {tries} of at most {max_redraws} was accepted"
    else:
        note = f"{wanted}: none of {tries} draws gave that, so the best was kept and {moved} samples were moved from the largest clients"
    return pool.finish(index, notes=[note])


def cuts_of(p: Floats, n_c: int) -> Ints:
    """floor(cumsum(p) * n_c) without the last: where a class of ``n_c`` samples is cut for the proportions ``p`` [N]."""
    return np.floor(np.cumsum(p)[:-1] * n_c).astype(np.int64).clip(0, n_c)


def counts_of(p: Floats, totals: Ints) -> Ints:
    """How many samples of each class each client gets: p [C, N], totals [C] -> [C, N]; the rows add up to ``totals``."""
    return np.stack([np.diff(cuts_of(row, int(t)), prepend=0, append=int(t)) for row, t in zip(p, totals, strict=True)])


def _proportions(totals: Ints, n: int, alpha: float, balance: bool, rng: np.random.RandomState) -> Floats:
    size, rows = np.zeros(n), []
    for n_c in totals:
        p = rng.dirichlet(np.full(n, alpha))
        if not np.isfinite(p).all() or p.sum() == 0:  # all gamma draws underflow for tiny alpha: its limit, one client takes all
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
    """Move samples, one at a time and in place, until every client has ``floor``; returns how many moved.

    The giver is the largest client, the class its most plentiful one. With ``like`` [C, N] the class is the one that the receiver
    holds most of there, so that a client is tested on what it trains on.
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


# -- a few classes per client --------------------------------------------------------------------------------------------------


def pathological(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: int = 0,
    classes: int | None = None,
    mode: str = "shards",
    k: int = 2,
    assignment: Sequence[Sequence[int]] | None = None,
) -> Partition:
    """A few classes per client.

    mode "shards" (FedDWA's released code): the label-sorted pool is cut into k N equal shards and every client is dealt k of them;
    its number of classes is at most k, or more where a shard spans classes. The same shards of the sorted test pool are its test set.
    ``assignment`` [N][k] deals the shards by hand.
    mode "exact_k" (the paper's words): k distinct classes per client, owners per class differing by at most one; every client takes
    the same number q of samples of each of its classes, q = min over owned classes of floor(n_c / owners_c). The rest is unused.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "pathological")
    if mode not in ("shards", "exact_k"):
        raise ValueError(f"mode must be 'shards' or 'exact_k', got {mode!r}")
    if k < 1:
        raise ValueError(f"k must be at least 1 per client, got {k}")
    pools = {"train": (pool.train, 0)} | ({"test": (pool.test, pool.offset)} if pool.has_test else {})
    if mode == "exact_k":
        if k > pool.classes:
            raise ValueError(f"k must be at most the number of classes ({pool.classes}), got {k}")
        if assignment is not None:
            raise ValueError("assignment deals shards by hand: it needs mode='shards', got mode='exact_k'")
        owned = _owners(n, k, pool.classes, rng)
        index, notes = {}, []
        for split, (y, offset) in pools.items():
            index[split], unused = _equal_shares(y, owned, pool.classes, split, rng)
            index[split] = [rows + offset for rows in index[split]]
            if unused:
                notes.append(f"{unused} {split} samples are unused: every client takes the same number of each of its {k} classes")
        return pool.finish(index, notes=notes)
    if n * k > len(pool.train):
        raise ValueError(f"k must leave {n} clients non-empty shards of {len(pool.train)} samples, got {k}")
    deal = rng.permutation(n * k).reshape(n, k) if assignment is None else np.asarray(assignment)
    if deal.shape != (n, k) or sorted(deal.reshape(-1).tolist()) != list(range(n * k)):
        raise ValueError(f"assignment must deal each of the {n * k} shards once, {k} to each of {n} clients, got shape {list(deal.shape)}")
    index = {}
    for split, (y, offset) in pools.items():
        cut = shards(y, n * k, pool.classes, rng)
        index[split] = [np.concatenate([cut[s] for s in row]) + offset for row in deal]
    return pool.finish(index)


def shards(y: Ints, number: int, classes: int, rng: np.random.RandomState | None = None) -> list[Ints]:
    """The label-sorted indices in ``number`` equal pieces (to one sample); within a class in the order of ``rng``, else of the pool."""
    return np.array_split(np.concatenate(by_class(y, classes, rng)), number)


def _owners(n: int, k: int, classes: int, rng: np.random.RandomState) -> list[Ints]:
    """k distinct classes per client, always those with the fewest owners so far (ties at random): counts stay within one."""
    owners, rows = np.zeros(classes), []
    for _ in range(n):
        mine = np.lexsort((rng.permutation(classes), owners))[:k]
        owners[mine] += 1
        rows.append(np.sort(mine))
    return rows


def _equal_shares(y: Ints, owned: list[Ints], classes: int, split: str, rng: np.random.RandomState) -> tuple[list[Ints], int]:
    owners = np.bincount(np.concatenate(owned), minlength=classes)
    have = np.bincount(y, minlength=classes)
    quota = np.where(owners > 0, have // np.maximum(owners, 1), have.max() + 1)
    q, poorest = int(quota.min()), int(quota.argmin())
    if q == 0:
        raise ValueError(
            f"class {poorest} has {have[poorest]} {split} samples for {owners[poorest]} owners: use fewer clients or a smaller k"
        )
    rows, taken = by_class(y, classes, rng), np.zeros(classes, dtype=np.int64)
    index = []
    for mine in owned:
        index.append(np.concatenate([rows[c][taken[c] : taken[c] + q] for c in mine]))
        taken[mine] += q
    return index, int(len(y) - taken.sum())


# -- dominant classes by group -------------------------------------------------------------------------------------------------


def practical1(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: int = 0,
    classes: int | None = None,
    mode: str = "paper",
    groups: int = 4,
    dominant: int | None = None,
    share: float = 0.8,
) -> Partition:
    """``share`` (80 %) of a client's data from its group's dominant classes, the rest from all classes; ``group`` [N] says who is where.

    mode "paper" (default): group j of G owns the ``dominant`` = q classes floor(j C / G) ... +q-1 (mod C), q = 3 for C <= 10, else C/5.
    Every client takes floor(total / N) samples without replacement, as equally from its dominant classes as the supply allows; where
    they run dry it takes what is left elsewhere, and ``notes`` says how many.
    mode "official" (released code): ``share`` of the shuffled pool is label-sorted and cut into G blocks, a block shared by the group's
    clients, the rest dealt to all; the last group takes the N mod G clients left over, so sizes differ then.
    The test pool is cut the same way.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "practical1")
    if mode not in ("paper", "official"):
        raise ValueError(f"mode must be 'paper' or 'official', got {mode!r}")
    if not 1 <= groups <= n:
        raise ValueError(f"groups must lie in 1..{n} (the clients), got {groups}")
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie in 0..1, got {share}")
    if dominant is not None and not 1 <= dominant <= pool.classes:
        raise ValueError(f"dominant must lie in 1..{pool.classes} (the classes), got {dominant}")
    at = np.arange(n)
    group = at * groups // n if mode == "paper" else np.minimum(at // (n // groups), groups - 1)
    pools = {"train": (pool.train, 0)} | ({"test": (pool.test, pool.offset)} if pool.has_test else {})
    index, notes = {}, []
    for split, (y, offset) in pools.items():
        if mode == "official":
            rows = _blocks(y, group, groups, share, pool.classes, rng)
        else:
            rows, short = _dominated(y, group, dominant_classes(pool.classes, groups, dominant), share, pool.classes, rng)
            if short:
                notes.append(f"{short} {split} samples come from other classes: the dominant ones ran dry")
        index[split] = [r + offset for r in rows]
    return pool.finish(index, notes=notes, group=group.astype(np.int64))


def dominant_classes(classes: int, groups: int, dominant: int | None = None) -> list[list[int]]:
    """The dominant classes of each group in mode "paper"."""
    q = dominant if dominant is not None else (min(3, classes) if classes <= 10 else max(1, classes // 5))
    return [[(j * classes // groups + d) % classes for d in range(q)] for j in range(groups)]


def _blocks(y: Ints, group: Ints, groups: int, share: float, classes: int, rng: np.random.RandomState) -> list[Ints]:
    order = rng.permutation(len(y))
    at = int(share * len(y) + 1e-9)
    head = order[:at]
    common = np.array_split(order[at:], len(group))
    blocks = np.array_split(head[np.argsort(y[head], kind="stable")], groups)
    out: list[Ints] = []
    for j, block in enumerate(blocks):
        members = np.flatnonzero(group == j)
        for i, piece in zip(members, np.array_split(rng.permutation(block), len(members)), strict=True):
            out.append(np.concatenate([piece, common[i]]))
    return out


def _dominated(
    y: Ints, group: Ints, owned: list[list[int]], share: float, classes: int, rng: np.random.RandomState
) -> tuple[list[Ints], int]:
    n = len(group)
    size = len(y) // n
    own = int(share * size + 0.5)
    rows = by_class(y, classes, rng)
    # The part from all classes first, in the pool's class proportions: else the dominant part could use a class up.
    rank = np.concatenate([(np.arange(len(r)) + 0.5) / max(len(r), 1) for r in rows])
    every = np.concatenate(rows)[np.argsort(rank, kind="stable")]
    common = rng.permutation(every[: n * (size - own)]).reshape(n, size - own)
    used = np.zeros(len(y), dtype=bool)
    used[common.reshape(-1)] = True
    supply = [[int(v) for v in r if not used[v]] for r in rows]
    mine: list[list[int]] = [[] for _ in range(n)]
    taken = np.zeros((n, classes), dtype=np.int64)
    for _ in range(own):  # one sample each per pass, so that a scarce class is shared fairly
        for i in range(n):
            able = [c for c in owned[group[i]] if supply[c]]
            if able:
                c = min(able, key=lambda c: (taken[i, c], -len(supply[c])))
                mine[i].append(supply[c].pop())
                taken[i, c] += 1
    left = rng.permutation([v for s in supply for v in s]).tolist()
    short = 0
    for part in mine:
        gap = own - len(part)
        part += [left.pop() for _ in range(gap)]
        short += gap
    return [np.concatenate([np.asarray(m, dtype=np.int64), c]) for m, c in zip(mine, common, strict=True)], short
