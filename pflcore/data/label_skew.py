"""Label skew: a few classes per client, dominant classes by group, two subpopulations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from pflcore.check import Count, Part, Share, Whole, checked, need
from pflcore.data.cuts import (
    Labels,
    Partition,
    Random,
    cut_in_two,
    deal,
    deal_shards,
    even,
    interleaved,
)
from pflcore.data.ragged import Ints, Ragged

MINORITY = {  # WAFFLe (Hao et al. 2020), appendix B: the minority's classes
    "mnist": (0, 2, 4, 6, 8),  # even digits
    "fashion_mnist": (0, 5, 6, 7, 9),  # footwear and shirts, without the pullover
    "cifar10": (0, 1, 8, 9),  # vehicles
}


@checked
def pathological(
    labels: Labels,
    rng: Random,
    *,
    mode: Literal["shards", "exact_k"] = "shards",
    k: Count = 2,
) -> Partition:
    """A few classes per client.

    mode "shards" (FedDWA's released code): the label-sorted pool in k N equal shards, k to a
    client; the same shards of the sorted test pool are its test set. mode "exact_k" (the paper's
    words): k distinct classes per client, owners per class within one; every client takes q samples
    of each, q = min over owned classes of n_c // owners. The rest is unused, and counted in the
    facts.
    """
    n, number = labels.n, labels.n * k
    if mode == "exact_k":
        need(k <= labels.classes, "k", f"at most the {labels.classes} classes", k)
        owned = _owners(n, k, labels.classes, rng)
        index = labels.each(lambda y, split: _equal(labels, y, split, owned, rng))
        unused = {s: len(y) - len(index[s].flat) for s, (y, _) in labels.pools.items()}
        return Partition(index, facts={f"unused {s} samples": m for s, m in unused.items() if m})
    need(
        number <= len(labels.train),
        "k",
        f"shards of at least one of {len(labels.train)} samples",
        k,
    )
    table = rng.permutation(number).reshape(n, k)

    def cut(y: Ints, split: str) -> Ragged:
        rows = np.concatenate(labels.by_class(y, rng))
        return deal_shards(rows, even(len(y), number), table)

    return Partition(labels.each(cut))


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
    few = f"a {split} sample of class {poorest} for each of its {owners[poorest]} owners"
    need(quota[poorest] > 0, "k and n", few, int(have[poorest]))
    return deal(labels.by_class(y, rng), quota[poorest] * owned)


@checked
def practical1(
    labels: Labels,
    rng: Random,
    *,
    mode: Literal["paper", "official"] = "paper",
    groups: Count = 4,
    dominant: Count | None = None,
    share: Share = 0.8,
) -> Partition:
    """`share` of a client's data from its group's dominant classes, the rest from all; `group` [N].

    mode "paper": group j of G owns the q = `dominant` classes floor(j C / G) ... + q - 1 (mod C), q
    = 3 for C <= 10, else C / 5. Every client takes floor(total / N) samples, as equally from its
    dominant classes as the supply allows; where they run dry, what is left elsewhere (counted in
    the facts). mode "official" (released code): `share` of the shuffled pool, sorted by label, in G
    blocks, one to a group; the rest dealt to all. The last group takes the N mod G clients left
    over.
    """
    n, classes = labels.n, labels.classes
    need(groups <= n, "groups", f"at most the {n} clients", groups)
    need((dominant or 1) <= classes, "dominant", f"at most the {classes} classes", dominant)
    i, facts = np.arange(n), {}
    group = i * groups // n if mode == "paper" else np.minimum(i // (n // groups), groups - 1)
    owned = dominant_classes(classes, groups, dominant)

    def cut(y: Ints, split: str) -> Ragged:
        if mode == "official":
            return _blocks(y, group, share, rng)
        lists, short = _dominated(labels, y, [owned[g] for g in group], share, rng)
        facts.update({f"{split} samples of other classes": short} if short else {})
        return lists

    return Partition(labels.each(cut), group=torch.from_numpy(group), facts=facts)


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
    common = rng.permutation(interleaved(rows)[: n * (size - own)]).reshape(n, size - own)
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


@checked
def unimodal(
    labels: Labels,
    rng: Random,
    *,
    z: Count = 2,
    test: Part = 0.2,
    train: Count | None = None,
) -> Partition:
    """WAFFLe: each class in even shards, N z in all, z dealt to a client at random.

    Cuts the training pool alone. `test`: the share of a client's samples that is held out. `train`:
    use so many of the others only; the test sets stay. Unused samples are counted in the facts.
    """
    lists = _population(labels, range(labels.classes), labels.n, z, None, rng)
    return _tested(labels, lists, test, train, rng, None)


@checked
def multimodal(
    labels: Labels,
    rng: Random,
    *,
    z: Count = 2,
    minority: Literal["mnist", "fashion_mnist", "cifar10"] | Sequence[Whole] = "mnist",
    minority_clients: Count = 20,
    test: Part = 0.2,
    train: Count | None = None,
) -> Partition:
    """WAFFLe: `unimodal` within two groups of classes and clients; `group` [N]: 1 for the minority.

    The last `minority_clients` have the classes `minority`, or the paper's by name. All shards are
    of one size, the largest that every class can give.
    """
    n, few = labels.n, sorted(set(MINORITY[minority] if isinstance(minority, str) else minority))
    some = [c for c in range(labels.classes) if c not in few]
    both = few and some and max(few) < labels.classes
    need(both, "minority", f"some of the classes 0..{labels.classes - 1}, and not all", few)
    need(minority_clients < n, "minority_clients", f"fewer than the {n} clients", minority_clients)
    modes = [(some, n - minority_clients), (few, minority_clients)]
    have = np.bincount(labels.train, minlength=labels.classes)
    counts = [(have[classes], even(k * z, len(classes))) for classes, k in modes]
    size = min(int((h[c > 0] // c[c > 0]).min()) for h, c in counts)
    need(size > 0, "n", "so few clients that each shard has a sample", n)
    parts = [_population(labels, classes, k, z, size, rng) for classes, k in modes]
    lists = Ragged(torch.cat([p.flat for p in parts]), torch.cat([p.size for p in parts]))
    group = torch.arange(n) >= n - minority_clients
    return _tested(labels, lists, test, train, rng, group.long())


def _population(
    labels: Labels,
    classes: Sequence[int],
    n: int,
    z: int,
    size: int | None,
    rng: Random,
) -> Ragged:
    """These classes' shards, even ones or of `size`, z to each of n clients at random."""
    rows = labels.by_class(labels.train, rng)
    counts = even(n * z, len(classes))
    sizes, flat = [], []
    for c, k in zip(classes, counts, strict=True):
        need(len(rows[c]) >= k, "n", f"a sample of class {c} for {k} shards", len(rows[c]))
        sizes.append(even(len(rows[c]), k) if size is None and k else np.full(k, size or 0))
        flat.append(rows[c][: sizes[-1].sum()])
    table = rng.permutation(n * z).reshape(n, z)
    return deal_shards(np.concatenate(flat), np.concatenate(sizes), table)


def _tested(
    labels: Labels, lists: Ragged, test: float, train: int | None, rng: Random, group: Any
) -> Partition:
    held, rest = cut_in_two(lists, lambda k: max(1, int(test * k + 0.5)), rng)
    unused = len(labels.train) - len(lists.flat)
    facts = {"unused train samples": unused} if unused else {}
    if train is not None:
        rest = Ragged.of([r[:train] for r in rest])
    return Partition({"train": rest, "test": held}, group=group, facts=facts)
