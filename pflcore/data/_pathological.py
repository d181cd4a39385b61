"""The partition `pathological`: a few classes for each client.

Symbols: N clients (`n` in code), C classes, k shards or classes of a client.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pflcore.check import PositiveInt, checked, require
from pflcore.data._deal import (
    Random,
    class_positions,
    deal,
    deal_shards,
    even_parts,
)
from pflcore.data._pools import Labels, Partition
from pflcore.data._ragged import Ints, Ragged


@checked
def pathological(
    labels: Labels,
    rng: Random,
    *,
    mode: Literal["shards", "exact_k"] = "shards",
    k: PositiveInt = 2,
) -> Partition:
    """A few classes for each client.

    In the mode "shards" (FedDWA's released code) the training pool, sorted by label, is
    cut into k N equal shards, and k shards go to each client. Its test set is made of
    the same shards of the sorted test pool.

    In the mode "exact_k" (the paper's words) each client owns k distinct classes. The
    numbers of a class's owners differ by 1 at most. Every client takes q samples of
    each class that it owns; q is the largest number that every class can give to all
    its owners. The test pool is dealt in the same way to the same owners, with a q of
    its own. The other samples are unused, and the facts count them.

    Example: two clients, k = 1, and 5 samples of class 0 and 3 of class 1. "shards"
    gives 4 samples to each client, so one of them has both classes. "exact_k" gives 3
    samples of one class to each, and 2 samples are unused.

    Args:
        mode: shards deals k shards of the sorted pool to a client; exact_k gives it k
            classes
        k: shards or classes of a client
    """
    if mode == "exact_k":
        return _deal_exact_classes(labels, k, rng)
    shards = labels.n * k
    samples = len(labels.train)
    require(shards <= samples, "k", f"shards of at least one of {samples} samples", k)
    shards_of_client = rng.permutation(shards).reshape(labels.n, k)

    def cut(y: Ints, split: str) -> Ragged:
        by_label = np.concatenate(class_positions(y, labels.classes, rng))
        return deal_shards(by_label, even_parts(len(y), shards), shards_of_client)

    return Partition(labels.map_pools(cut))


def _deal_exact_classes(labels: Labels, k: int, rng: Random) -> Partition:
    """The partition by the mode "exact_k" of `pathological`."""
    require(k <= labels.classes, "k", f"at most the {labels.classes} classes", k)
    owned = assign_classes(labels.n, k, labels.classes, rng)

    def cut(y: Ints, split: str) -> Ragged:
        return _deal_equally(labels, y, split, owned, rng)

    index = labels.map_pools(cut)
    facts = {}
    for split, y in labels.pools.items():
        unused = len(y) - len(index[split].flat)
        if unused:
            facts[f"unused {split} samples"] = unused
    return Partition(index, facts=facts)


def assign_classes(n: int, k: int, classes: int, rng: Random) -> Ints:
    """Classes of each client, [C, N]: 1 where it owns the class, else 0.

    One client after the other takes the k classes with the fewest owners so far, in
    random order where they have equally many.
    """
    owned = np.zeros((classes, n), dtype=np.int64)
    for i in range(n):
        owners = owned.sum(1)
        random_order = rng.permutation(classes)
        fewest_first = np.lexsort((random_order, owners))  # sorts by its last key first
        owned[fewest_first[:k], i] = 1
    return owned


def _deal_equally(
    labels: Labels,
    y: Ints,
    split: str,
    owned: Ints,  # [C, N]
    rng: Random,
) -> Ragged:
    """The same number of samples of each owned class for every client.

    Raises ValueError where a class has fewer samples than owners.
    """
    classes = np.flatnonzero(owned.any(1))
    samples = labels.class_totals(y)[classes]
    owners = owned.sum(1)[classes]
    samples_per_owner = samples // owners
    poorest = samples_per_owner.argmin()
    quota = samples_per_owner[poorest]
    expected = (
        f"a {split} sample of class {classes[poorest]} for each of its "
        f"{owners[poorest]} owners"
    )
    require(quota > 0, "k and n", expected, int(samples[poorest]))
    return deal(class_positions(y, labels.classes, rng), quota * owned)
