"""The partition `extended_dirichlet`: few classes, each in random proportions.

Symbols: N clients (`n` in code), C classes, k classes of a client; class c has n_c
samples in a pool, of which its owners take proportions p_c.
"""

from __future__ import annotations

import numpy as np

from pflcore.check import PositiveFloat, PositiveInt, checked, reject, require
from pflcore.data._deal import Random, class_positions, deal
from pflcore.data._dirichlet import MAX_DRAWS, Floats, draw_shares, sample_counts
from pflcore.data._pathological import assign_classes
from pflcore.data._pools import Labels, Partition
from pflcore.data._ragged import Ints, Ragged


@checked
def extended_dirichlet(
    labels: Labels, rng: Random, *, k: PositiveInt = 2, alpha: PositiveFloat = 0.5
) -> Partition:
    """A few classes for each client, each divided by proportions from Dir(alpha).

    Li and Lyu 2023, "Convergence analysis of sequential federated learning on
    heterogeneous data", ExDir(k, alpha): k says how many classes a client has, and
    alpha how unequally the owners of a class share it. The two are independent: with
    k = C it is a Dirichlet cut of every class, and for large alpha it comes near to
    equal shares of k classes.

    A client takes the k classes with the fewest owners so far, in random order where
    they have equally many. (The paper draws them at random until every class has an
    owner.) So every sample has one client where N k >= C; else the facts count the
    unused samples. Proportions are drawn until every client has a sample, at most 100
    times; then single samples move between owners of a class, and the facts count
    them. The test pool is cut by the same proportions.

    Example: three clients, two classes, k = 1. One class has two owners, which share it
    in random proportions; the third client has the other class alone.

    Args:
        k: classes of a client
        alpha: concentration; the smaller, the more unequal the shares of a class
    """
    totals = {split: labels.class_totals(y) for split, y in labels.pools.items()}
    present = np.flatnonzero(totals["train"])
    require(k <= len(present), "k", f"at most the {len(present)} classes", k)
    owned = np.zeros((labels.classes, labels.n), dtype=bool)  # [C, N]
    owned[present] = assign_classes(labels.n, k, len(present), rng) > 0
    for _ in range(MAX_DRAWS):
        shares = _draw_owner_shares(owned, alpha, rng)
        counts = {}
        for split, total in totals.items():
            counts[split] = _owner_counts(owned, shares, total)
        if all(table.sum(0).all() for table in counts.values()):
            break
    moved = 0
    for split, table in counts.items():
        moved += _give_each_a_sample(table, owned, split)

    def cut(y: Ints, split: str) -> Ragged:
        return deal(class_positions(y, labels.classes, rng), counts[split])

    facts = {}
    for split, total in totals.items():
        unused = int(total.sum() - counts[split].sum())
        if unused:
            facts[f"unused {split} samples"] = unused
    if moved:
        facts["moved samples"] = moved
    return Partition(labels.map_pools(cut), facts=facts)


def _draw_owner_shares(owned: Ints, alpha: float, rng: Random) -> list[Floats]:
    """The proportions of each class's owners; none for a class without owners."""
    sizes = owned.sum(1)
    return [draw_shares(size, alpha, rng) if size else np.zeros(0) for size in sizes]


def _owner_counts(
    owned: Ints,  # [C, N]
    shares: list[Floats],
    totals: Ints,  # [C]
) -> Ints:  # [C, N]
    """Numbers of samples, 0 where a client does not own the class."""
    counts = np.zeros(owned.shape, dtype=np.int64)
    for label, p in enumerate(shares):
        if len(p):
            total = totals[label : label + 1]
            counts[label, owned[label]] = sample_counts(p[None], total)[0]
    return counts


def _give_each_a_sample(counts: Ints, owned: Ints, split: str) -> int:
    """Moves samples, in place, until every client has one; returns how many.

    A client without any gets one of a class that it owns, from the owner with the most
    samples of that class. Raises ValueError where no owner has one to give.
    """
    moved = 0
    for receiver in np.flatnonzero(counts.sum(0) == 0):
        may_give = owned & owned[:, receiver, None] & (counts.sum(0) > 1)
        label, giver = np.unravel_index(
            np.where(may_give, counts, 0).argmax(), counts.shape
        )
        if not may_give[label, giver] or not counts[label, giver]:
            expected = f"so few clients that each has a {split} sample of its k classes"
            reject("n", expected, counts.shape[1])
        counts[label, giver] -= 1
        counts[label, receiver] += 1
        moved += 1
    return moved
