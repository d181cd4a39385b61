"""The FedDWA paper's label skews: a few classes per client (pathological), and dominant classes by
group (practical setting 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from pflcore.check import Count, Seed32, Share, checked

from .cuts import Ints, Partition, Pool, by_class, rng_of

# -- a few classes per client
# --------------------------------------------------------------------------------------------------


@checked
def pathological(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    mode: str = "shards",
    k: Count = 2,
) -> Partition:
    """A few classes per client.

    mode "shards" (FedDWA's released code): the label-sorted pool is cut into k N equal shards and
    every client is dealt k of them; its number of classes is at most k, or more where a shard spans
    classes. The same shards of the sorted test pool are its test set. mode "exact_k" (the paper's
    words): k distinct classes per client, owners per class differing by at most one; every client
    takes the same number q of samples of each of its classes, q = min over owned classes of
    floor(n_c / owners_c). The rest is unused.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "pathological")
    if mode not in ("shards", "exact_k"):
        raise ValueError(f"mode must be 'shards' or 'exact_k', got {mode!r}")
    pools = {"train": (pool.train, 0)} | (
        {"test": (pool.test, pool.offset)} if pool.has_test else {}
    )
    if mode == "exact_k":
        if k > pool.classes:
            raise ValueError(f"k must be at most the number of classes ({pool.classes}), got {k}")
        owned = _owners(n, k, pool.classes, rng)
        index, notes = {}, []
        for split, (y, offset) in pools.items():
            index[split], unused = _equal_shares(y, owned, pool.classes, split, rng)
            index[split] = [rows + offset for rows in index[split]]
            if unused:
                notes.append(
                    f"{unused} {split} samples are unused: every client takes the same number of "
                    f"each of its {k} classes"
                )
        return pool.finish(index, notes=notes)
    if n * k > len(pool.train):
        raise ValueError(
            f"k must leave {n} clients non-empty shards of {len(pool.train)} samples, got {k}"
        )
    deal = rng.permutation(n * k).reshape(n, k)
    index = {}
    for split, (y, offset) in pools.items():
        cut = shards(y, n * k, pool.classes, rng)
        index[split] = [np.concatenate([cut[s] for s in row]) + offset for row in deal]
    return pool.finish(index)


def shards(
    y: Ints, number: int, classes: int, rng: np.random.RandomState | None = None
) -> list[Ints]:
    """The label-sorted indices in ``number`` equal pieces (to one sample); within a class in the
    order of ``rng``, else of the pool."""
    return np.array_split(np.concatenate(by_class(y, classes, rng)), number)


def _owners(n: int, k: int, classes: int, rng: np.random.RandomState) -> list[Ints]:
    """k distinct classes per client, always those with the fewest owners so far (ties at random):
    counts stay within one."""
    owners, rows = np.zeros(classes), []
    for _ in range(n):
        mine = np.lexsort((rng.permutation(classes), owners))[:k]
        owners[mine] += 1
        rows.append(np.sort(mine))
    return rows


def _equal_shares(
    y: Ints, owned: list[Ints], classes: int, split: str, rng: np.random.RandomState
) -> tuple[list[Ints], int]:
    owners = np.bincount(np.concatenate(owned), minlength=classes)
    have = np.bincount(y, minlength=classes)
    quota = np.where(owners > 0, have // np.maximum(owners, 1), have.max() + 1)
    q, poorest = int(quota.min()), int(quota.argmin())
    if q == 0:
        raise ValueError(
            f"class {poorest} has {have[poorest]} {split} samples for {owners[poorest]} owners: "
            "use fewer clients or a smaller k"
        )
    rows, taken = by_class(y, classes, rng), np.zeros(classes, dtype=np.int64)
    index = []
    for mine in owned:
        index.append(np.concatenate([rows[c][taken[c] : taken[c] + q] for c in mine]))
        taken[mine] += q
    return index, int(len(y) - taken.sum())


# -- dominant classes by group
# -------------------------------------------------------------------------------------------------


@checked
def practical1(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    mode: str = "paper",
    groups: Count = 4,
    dominant: Count | None = None,
    share: Share = 0.8,
) -> Partition:
    """``share`` (80 %) of a client's data from its group's dominant classes, the rest from all
    classes; ``group`` [N] says who is where.

    mode "paper" (default): group j of G owns the ``dominant`` = q classes floor(j C / G) ... +q-1
    (mod C), q = 3 for C <= 10, else C/5. Every client takes floor(total / N) samples without
    replacement, as equally from its dominant classes as the supply allows; where they run dry it
    takes what is left elsewhere, and ``notes`` says how many. mode "official" (released code):
    ``share`` of the shuffled pool is label-sorted and cut into G blocks, a block shared by the
    group's clients, the rest dealt to all; the last group takes the N mod G clients left over, so
    sizes differ then. The test pool is cut the same way.
    """
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "practical1")
    if mode not in ("paper", "official"):
        raise ValueError(f"mode must be 'paper' or 'official', got {mode!r}")
    if groups > n:
        raise ValueError(f"groups must lie in 1..{n} (the clients), got {groups}")
    if dominant is not None and dominant > pool.classes:
        raise ValueError(f"dominant must lie in 1..{pool.classes} (the classes), got {dominant}")
    at = np.arange(n)
    group = at * groups // n if mode == "paper" else np.minimum(at // (n // groups), groups - 1)
    pools = {"train": (pool.train, 0)} | (
        {"test": (pool.test, pool.offset)} if pool.has_test else {}
    )
    index, notes = {}, []
    for split, (y, offset) in pools.items():
        if mode == "official":
            rows = _blocks(y, group, groups, share, pool.classes, rng)
        else:
            rows, short = _dominated(
                y, group, dominant_classes(pool.classes, groups, dominant), share, pool.classes, rng
            )
            if short:
                notes.append(
                    f"{short} {split} samples come from other classes: the dominant ones ran dry"
                )
        index[split] = [r + offset for r in rows]
    return pool.finish(index, notes=notes, group=group.astype(np.int64))


def dominant_classes(classes: int, groups: int, dominant: int | None = None) -> list[list[int]]:
    """The dominant classes of each group in mode "paper"."""
    q = (
        dominant
        if dominant is not None
        else (min(3, classes) if classes <= 10 else max(1, classes // 5))
    )
    return [[(j * classes // groups + d) % classes for d in range(q)] for j in range(groups)]


def _blocks(
    y: Ints, group: Ints, groups: int, share: float, classes: int, rng: np.random.RandomState
) -> list[Ints]:
    order = rng.permutation(len(y))
    at = int(share * len(y) + 1e-9)
    head = order[:at]
    common = np.array_split(order[at:], len(group))
    blocks = np.array_split(head[np.argsort(y[head], kind="stable")], groups)
    out: list[Ints] = []
    for j, block in enumerate(blocks):
        members = np.flatnonzero(group == j)
        for i, piece in zip(
            members, np.array_split(rng.permutation(block), len(members)), strict=True
        ):
            out.append(np.concatenate([piece, common[i]]))
    return out


def _dominated(
    y: Ints,
    group: Ints,
    owned: list[list[int]],
    share: float,
    classes: int,
    rng: np.random.RandomState,
) -> tuple[list[Ints], int]:
    n = len(group)
    size = len(y) // n
    own = int(share * size + 0.5)
    rows = by_class(y, classes, rng)
    # The part from all classes first, in the pool's class proportions: else the dominant part could
    # use a class up.
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
    return [
        np.concatenate([np.asarray(m, dtype=np.int64), c])
        for m, c in zip(mine, common, strict=True)
    ], short
