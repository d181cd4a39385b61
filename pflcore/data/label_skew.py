"""Label skew: a few classes per client, dominant classes by group (FedDWA's settings), and WAFFLe's
single-class shards in one population or in two (Hao et al. 2020, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pflcore.check import Count, Share, checked
from pflcore.data.cuts import (
    Classes,
    Labels,
    Partition,
    Random,
    cut_in_two,
    deal,
    deal_shards,
    even,
    need,
    one_of,
)
from pflcore.data.ragged import Ints, Ragged, starts

MINORITY: dict[str, tuple[int, ...]] = {  # classes of the minority
    "mnist": (0, 2, 4, 6, 8),  # even digits
    "fashion_mnist": (0, 5, 6, 7, 9),  # footwear and shirts; the pullover counts as none
    "cifar10": (0, 1, 8, 9),  # vehicles
}


@checked
def pathological(labels: Labels, rng: Random, *, mode: str = "shards", k: Count = 2) -> Partition:
    """A few classes per client.

    mode "shards" (FedDWA's released code): the label-sorted pool is cut into k N equal shards and
    every client is dealt k of them; its number of classes is at most k, or more where a shard spans
    classes. The same shards of the sorted test pool are its test set. mode "exact_k" (the paper's
    words): k distinct classes per client, owners per class differing by at most one; every client
    takes the same number q of samples of each of its classes, q = min over owned classes of
    floor(n_c / owners_c). The rest is unused.
    """
    one_of("mode", mode, ("shards", "exact_k"))
    n, number = labels.n, labels.n * k
    if mode == "exact_k":
        need(
            k <= labels.classes,
            f"k must be at most the number of classes ({labels.classes}), got {k}",
        )
        owned = _owners(n, k, labels.classes, rng)
        index = labels.each(lambda y, split: _equal(labels, y, split, owned, rng))
        unused = {s: len(y) - len(index[s].flat) for s, (y, _) in labels.pools.items()}
        why = f"every client takes the same number of each of its {k} classes"
        return labels.finish(
            index, [f"{m} {s} samples are unused: {why}" for s, m in unused.items() if m]
        )
    size = len(labels.train)
    need(number <= size, f"k must leave {n} clients non-empty shards of {size} samples, got {k}")
    table = rng.permutation(number).reshape(n, k)

    def cut(y: Ints, split: str) -> Ragged:
        rows = np.concatenate(labels.by_class(y, rng))
        return deal_shards(rows, even(len(y), number), table)

    return labels.finish(labels.each(cut))


def _owners(n: int, k: int, classes: int, rng: Random) -> Ints:
    """k distinct classes per client, those with the fewest owners so far: 0 or 1, [C, N]."""
    owned = np.zeros((classes, n), dtype=np.int64)
    for i in range(n):
        owned[np.lexsort((rng.permutation(classes), owned.sum(1)))[:k], i] = 1
    return owned


def _equal(labels: Labels, y: Ints, split: str, owned: Ints, rng: Random) -> Ragged:
    """The same number of samples of each owned class for every client."""
    owners, have = owned.sum(1), np.bincount(y, minlength=labels.classes)
    quota = np.where(owners > 0, have // np.maximum(owners, 1), len(y) + 1)
    poorest = int(quota.argmin())
    need(
        quota[poorest] > 0,
        f"class {poorest} has {have[poorest]} {split} samples for {owners[poorest]} owners: "
        "use fewer clients or a smaller k",
    )
    return deal(labels.by_class(y, rng), quota[poorest] * owned)


@checked
def practical1(
    labels: Labels,
    rng: Random,
    *,
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
    one_of("mode", mode, ("paper", "official"))
    n, classes = labels.n, labels.classes
    need(groups <= n, f"groups must lie in 1..{n} (the clients), got {groups}")
    need(
        dominant is None or dominant <= classes,
        f"dominant must lie in 1..{classes} (the classes), got {dominant}",
    )
    i, notes = np.arange(n), []
    group = i * groups // n if mode == "paper" else np.minimum(i // (n // groups), groups - 1)
    owned = dominant_classes(classes, groups, dominant)

    def cut(y: Ints, split: str) -> Ragged:
        if mode == "official":
            return _blocks(y, group, share, rng)
        lists, short = _dominated(labels, y, [owned[g] for g in group], share, rng)
        if short:
            notes.append(
                f"{short} {split} samples come from other classes: the dominant ones ran dry"
            )
        return lists

    return labels.finish(labels.each(cut), notes, group)


def dominant_classes(classes: int, groups: int, dominant: int | None = None) -> list[list[int]]:
    """The dominant classes of each group in mode "paper"."""
    q = dominant or (min(3, classes) if classes <= 10 else max(1, classes // 5))
    return [[(j * classes // groups + d) % classes for d in range(q)] for j in range(groups)]


def _blocks(y: Ints, group: Ints, share: float, rng: Random) -> Ragged:
    """Blocks of the label-sorted head of the pool by group, and equal parts of its tail."""
    order, members = rng.permutation(len(y)), np.bincount(group)
    head, tail = np.split(order, [int(share * len(y) + 1e-9)])
    head = head[np.argsort(y[head], kind="stable")]
    size = even(len(head), len(members))  # of the groups' blocks
    rows = np.concatenate([rng.permutation(b) for b in np.split(head, size.cumsum()[:-1])])
    counts = np.concatenate([even(int(b), int(m)) for b, m in zip(size, members, strict=True)])
    return deal([rows, tail], np.stack([counts, even(len(tail), len(group))]))


def _dominated(
    labels: Labels, y: Ints, owned: list[list[int]], share: float, rng: Random
) -> tuple[Ragged, int]:
    """Equal lists, and how many samples came from other classes than the dominant ones."""
    n, size = len(owned), len(y) // len(owned)
    own = int(share * size + 0.5)
    rows = labels.by_class(y, rng)
    # The common part first, in the pool's class proportions, so that no class is used up before.
    common = rng.permutation(_interleaved(rows)[: n * (size - own)]).reshape(n, size - own)
    used = np.zeros(len(y), dtype=bool)
    used[common.reshape(-1)] = True
    supply = [r[~used[r]].tolist() for r in rows]
    mine: list[list[int]] = [[] for _ in owned]
    taken = np.zeros((n, labels.classes), dtype=np.int64).tolist()
    for _ in range(own):  # one sample each per pass, so that a scarce class is shared fairly
        for i, classes in enumerate(owned):
            able = [c for c in classes if supply[c]]
            if able:
                c = min((taken[i][c], -len(supply[c]), at) for at, c in enumerate(able))[2]
                c = able[c]
                mine[i].append(supply[c].pop())
                taken[i][c] += 1
    left = rng.permutation([v for s in supply for v in s]).tolist()
    short = sum(own - len(m) for m in mine)
    for m in mine:
        m += [left.pop() for _ in range(own - len(m))]
    dealt = np.concatenate([np.array(mine, dtype=np.int64).reshape(n, own), common], axis=1)
    return deal_shards(dealt.reshape(-1), np.full(n, size), np.arange(n)[:, None]), short


def _interleaved(rows: Sequence[Ints]) -> Ints:
    """The samples of all classes in one order of which every prefix is in their proportion."""
    rank = np.concatenate([(np.arange(len(r)) + 0.5) / max(len(r), 1) for r in rows])
    return np.concatenate(rows)[np.argsort(rank, kind="stable")]


@checked
def unimodal(
    labels: Labels,
    rng: Random,
    *,
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
    classes, n = labels.classes, labels.n
    lists = _population(labels, range(classes), n, z, None, rng)
    why = f"there are fewer shards ({n * z}) than classes ({classes})"
    return _tested(labels, lists, test, train, rng, why, None)


@checked
def multimodal(
    labels: Labels,
    rng: Random,
    *,
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
    need(
        not isinstance(minority, str) or minority in MINORITY,
        f"minority must be one of {', '.join(MINORITY)}, or a list of classes, got {minority!r}",
    )
    n, few = labels.n, sorted(set(MINORITY[minority] if isinstance(minority, str) else minority))
    some = [c for c in range(labels.classes) if c not in few]
    need(
        few and some and min(few) >= 0 and max(few) < labels.classes,
        f"minority must leave classes on both sides of 0..{labels.classes - 1}, got {few}",
    )
    need(
        minority_clients < n,
        f"minority_clients must lie in 1..{n - 1} of the {n} clients, got {minority_clients}",
    )
    modes = [(some, n - minority_clients), (few, minority_clients)]
    have = np.bincount(labels.train, minlength=labels.classes)
    counts = [(have[classes], even(k * z, len(classes))) for classes, k in modes]
    size = min(int((h[c > 0] // c[c > 0]).min()) for h, c in counts)
    need(
        size > 0,
        f"n must leave every shard a sample, but with n={n} and z={z} some class has too few: "
        "use fewer clients",
    )
    parts = [_population(labels, classes, k, z, size, rng) for classes, k in modes]
    lists = Ragged(torch.cat([p.flat for p in parts]), starts(torch.cat([p.size for p in parts])))
    group = (np.arange(n) >= n - minority_clients).astype(np.int64)
    return _tested(labels, lists, test, train, rng, f"all shards have {size} samples", group)


def _population(
    labels: Labels, classes: Sequence[int], n: int, z: int, size: int | None, rng: Random
) -> Ragged:
    """These classes' shards, even ones or of `size`, z to each of n clients at random."""
    rows = labels.by_class(labels.train, rng)
    sizes, flat = [], []
    for c, k in zip(classes, even(n * z, len(classes)).tolist(), strict=True):
        need(
            len(rows[c]) >= k,
            f"n must leave every shard a sample, but class {c} has {len(rows[c])} for {k} "
            "shards: use fewer clients",
        )
        sizes.append(even(len(rows[c]), k) if size is None and k else np.full(k, size or 0))
        flat.append(rows[c][: sizes[-1].sum()])
    table = rng.permutation(n * z).reshape(n, z)
    return deal_shards(np.concatenate(flat), np.concatenate(sizes), table)


def _tested(
    labels: Labels,
    lists: Ragged,
    test: float,
    train: int | None,
    rng: Random,
    why: str,
    group: Ints | None,
) -> Partition:
    need(0 < test < 1, f"test must be a share in (0, 1) of each client's samples, got {test}")
    held, rest = cut_in_two(lists, lambda k: max(1, int(test * k + 0.5)), rng)
    unused = len(labels.train) - len(lists.flat)
    notes = [f"{unused} training samples are unused: {why}"] if unused else []
    if train is not None:
        rest = Ragged.of([r[:train] for r in rest])
    return labels.finish({"train": rest, "test": held}, notes, group)
