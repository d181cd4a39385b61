"""WAFFLe's partitions (Hao et al. 2020): `unimodal` and `multimodal`.

Every client has z shards, and a shard has samples of a single class. Only the training
pool is dealt; a part of each client's samples is held out for testing.

Symbols: N clients (`n` in code), C classes, z shards of a client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from pflcore.check import (
    NonNegativeInt,
    OpenUnitFloat,
    PositiveInt,
    checked,
    require,
)
from pflcore.data._deal import (
    Random,
    class_positions,
    deal_shards,
    even_parts,
    split_lists,
)
from pflcore.data._pools import Labels, Partition
from pflcore.data._ragged import Ints, Ragged

# The minority's classes (WAFFLe: Hao et al. 2020, appendix B).
MINORITY_CLASSES = {
    "mnist": (0, 2, 4, 6, 8),  # even digits
    "fashion_mnist": (0, 5, 6, 7, 9),  # footwear and shirts, without the pullover
    "cifar10": (0, 1, 8, 9),  # vehicles
}


class ClientGroup(NamedTuple):
    """A number of clients, and the classes that they have samples of.

    Attributes:
        classes: the classes, which no other group has
        n: number of clients
    """

    classes: Sequence[int]
    n: int


@checked
def unimodal(
    labels: Labels,
    rng: Random,
    *,
    z: PositiveInt = 2,
    test: OpenUnitFloat = 0.2,
    train: PositiveInt | None = None,
) -> Partition:
    """Shards of single classes, z of them for each client, at random.

    WAFFLe (Hao et al. 2020). Each class is cut into even shards, N z in all. Where
    these are fewer than the classes, the last classes have no shard; the facts count
    their samples as unused. Only the training pool is cut; a test pool is not used.

    Example: 10 classes, 10 clients and z = 2 make 20 shards, 2 of each class.

    Args:
        z: shards of a client
        test: share of a client's samples that is held out
        train: samples of a client to train on, at most; all if not said. The test sets
            stay the same.
    """
    everyone = ClientGroup(range(labels.classes), labels.n)
    return _deal_groups(labels, [everyone], z, test, train, rng)


@checked
def multimodal(
    labels: Labels,
    rng: Random,
    *,
    z: PositiveInt = 2,
    minority: Literal["mnist", "fashion_mnist", "cifar10"]
    | Sequence[NonNegativeInt] = "mnist",
    minority_clients: PositiveInt = 20,
    test: OpenUnitFloat = 0.2,
    train: PositiveInt | None = None,
) -> Partition:
    """Two groups of clients that have no class in common.

    WAFFLe (Hao et al. 2020). Each group is dealt shards as by `unimodal`. All shards
    are of one size, the largest that every class can give. The partition has a `group`
    [N]: 1 for the minority.

    Example: on MNIST with 120 clients and z = 2, the 100 clients of the majority share
    200 shards of the odd digits, and the 20 of the minority 40 shards of the even ones.

    Args:
        z: shards of a client
        minority: classes of the minority, or the paper's for a data set by its name
        minority_clients: clients of the minority, the last ones
        test: share of a client's samples that is held out
        train: samples of a client to train on, at most; all if not said. The test sets
            stay the same.
    """
    n = labels.n
    chosen = MINORITY_CLASSES[minority] if isinstance(minority, str) else minority
    minority_classes = sorted(set(chosen))
    majority_classes = [c for c in range(labels.classes) if c not in minority_classes]
    are_two_groups = minority_classes and majority_classes
    fits = are_two_groups and max(minority_classes) < labels.classes
    expected = f"some of the classes 0..{labels.classes - 1}, and not all"
    require(fits, "minority", expected, minority_classes)
    expected = f"fewer than the {n} clients"
    require(minority_clients < n, "minority_clients", expected, minority_clients)
    groups = [
        ClientGroup(majority_classes, n - minority_clients),
        ClientGroup(minority_classes, minority_clients),
    ]
    return _deal_groups(labels, groups, z, test, train, rng)


def _deal_groups(
    labels: Labels,
    groups: Sequence[ClientGroup],  # whose classes are disjoint
    z: int,
    test: float,
    train: int | None,
    rng: Random,
) -> Partition:
    """A partition of the training pool: z shards for each client.

    A client's shards are of its group's classes. A group of n clients has n z shards;
    the numbers of shards of its classes differ by 1 at most. In a single group, the
    shards of a class hold all of its samples. Several groups get shards of one size.
    """
    totals = labels.class_totals(labels.train)
    shards = np.zeros(labels.classes, dtype=np.int64)
    for group in groups:
        shards[group.classes] = even_parts(group.n * z, len(group.classes))
    expected = "so few clients that each shard has a sample"
    require((totals >= shards).all(), "n", expected, labels.n)

    shard_size = None
    if len(groups) > 1:
        has_shards = shards > 0
        shard_size = int((totals[has_shards] // shards[has_shards]).min())
    parts = [_deal_group(labels, group, shards, shard_size, rng) for group in groups]
    samples = torch.cat([part.flat for part in parts])
    lists = Ragged(samples, torch.cat([part.size for part in parts]))

    def test_size(samples: int) -> int:
        return max(1, int(test * samples + 0.5))

    test_lists, train_lists = split_lists(lists, test_size, rng)
    if train is not None:
        train_lists = Ragged.from_lists([rows[:train] for rows in train_lists])
    group_of_client = None
    if len(groups) > 1:
        sizes = torch.tensor([group.n for group in groups])
        group_of_client = torch.repeat_interleave(sizes)
    unused = len(labels.train) - len(lists.flat)
    facts = {"unused train samples": unused} if unused else {}
    index = {"train": train_lists, "test": test_lists}
    return Partition(index, group=group_of_client, facts=facts)


def _deal_group(
    labels: Labels,
    group: ClientGroup,
    shards: Ints,  # [C] number of shards of each class
    shard_size: int | None,  # None: every sample of a class is in one of its shards
    rng: Random,
) -> Ragged:
    """Samples of a group's clients: each gets equally many shards, at random."""
    rows = class_positions(labels.train, labels.classes, rng)
    samples = []
    sizes = []
    for label in group.classes:
        count = int(shards[label])
        size = np.full(count, shard_size or 0)
        if shard_size is None and count:
            size = even_parts(len(rows[label]), count)
        sizes.append(size)
        samples.append(rows[label][: size.sum()])
    total = sum(map(len, sizes))
    shards_of_client = rng.permutation(total).reshape(group.n, total // group.n)
    return deal_shards(np.concatenate(samples), np.concatenate(sizes), shards_of_client)
