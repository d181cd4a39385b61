"""The partition `practical1`: groups of clients with dominant classes.

Symbols: N clients (`n` in code), C classes, G groups, q dominant classes of a group.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from pflcore.check import PositiveInt, UnitFloat, checked, require
from pflcore.data._deal import Random, class_positions, interleave_classes
from pflcore.data._pools import Labels, Partition
from pflcore.data._ragged import Ints, Ragged


@checked
def practical1(
    labels: Labels,
    rng: Random,
    *,
    groups: PositiveInt = 4,
    dominant: PositiveInt | None = None,
    share: UnitFloat = 0.8,
) -> Partition:
    """Groups of clients, each with dominant classes and samples of all classes.

    FedDWA's practical setting 1. Every client takes floor(total / N) samples: `share`
    of them from its group's dominant classes, as equally as the supply allows, the rest
    from all classes. Where the dominant classes run dry, samples of other classes take
    their place, and the facts count them. The test pool, where there is one, is dealt
    in the same way. The partition has a `group` [N].

    Group j of G owns the q = `dominant` classes floor(j C / G) ... + q - 1 (mod C). For
    example, 10 classes, 4 groups and q = 3 make the groups' classes 0 to 2, 2 to 4, 5
    to 7, and 7 to 9.

    Example: 10 samples, 5 of each of 2 classes, 2 clients in 2 groups, and q = 1. Each
    client takes 5 samples: 4 of its group's class, and one of either class.

    Args:
        groups: groups of clients, each with dominant classes of its own
        dominant: dominant classes of a group; 3 if not said, or a fifth of more than 10
            classes
        share: share of a client's samples that come from its dominant classes
    """
    n = labels.n
    classes = labels.classes
    require(groups <= n, "groups", f"at most the {n} clients", groups)
    expected = f"at most the {classes} classes"
    require((dominant or 1) <= classes, "dominant", expected, dominant)
    if dominant is None:
        dominant = min(3, classes) if classes <= 10 else max(1, classes // 5)
    group = np.arange(n) * groups // n
    owned = []
    for j in group.tolist():
        first = j * classes // groups
        owned.append([(first + d) % classes for d in range(dominant)])
    facts = {}

    def cut(y: Ints, split: str) -> Ragged:
        lists, replaced = _deal_dominant(labels, y, owned, share, rng)
        if replaced:
            facts[f"{split} samples of other classes"] = replaced
        return lists

    index = labels.map_pools(cut)
    return Partition(index, group=torch.from_numpy(group), facts=facts)


def _deal_dominant(
    labels: Labels,
    y: Ints,
    owned: list[list[int]],  # the dominant classes of each client
    share: float,
    rng: Random,
) -> tuple[Ragged, int]:
    """Lists of equal length, and how many samples replace missing dominant ones."""
    n = len(owned)
    size = len(y) // n
    num_dominant = int(share * size + 0.5)
    num_common = size - num_dominant
    rows = class_positions(y, labels.classes, rng)
    # The common part is taken first, in the pool's proportions of classes, so that it
    # finds all of them.
    common = interleave_classes(rows)[: n * num_common]
    common = rng.permutation(common).reshape(n, num_common)
    supply = [positions[~np.isin(positions, common)].tolist() for positions in rows]
    lists = _take_in_turns(supply, owned, num_dominant)
    left = rng.permutation(list(itertools.chain(*supply))).tolist()
    missing = n * num_dominant - sum(map(len, lists))
    for samples in lists:
        while len(samples) < num_dominant:
            samples.append(left.pop())
    dominant = np.array(lists, dtype=np.int64).reshape(n, num_dominant)
    dealt = np.concatenate([dominant, common], axis=1)
    return Ragged(torch.from_numpy(dealt.ravel()), torch.full((n,), size)), missing


def _take_in_turns(
    supply: list[list[int]],  # positions of each class, shuffled; those taken go away
    owned: list[list[int]],  # the classes of each client
    count: int,
) -> list[list[int]]:
    """Up to `count` samples of its classes for each client.

    Each client takes one sample in its turn, so that clients share a scarce class
    fairly. It takes the class of which it has taken the fewest samples so far. Of
    several of these classes, it takes the one with the largest supply.
    """
    lists: list[list[int]] = [[] for _ in owned]
    counts_taken = [[0] * len(supply) for _ in owned]
    for _ in range(count):
        for samples, counts, classes in zip(lists, counts_taken, owned, strict=True):
            available = [label for label in classes if supply[label]]
            if not available:
                continue
            label = min(available, key=lambda c: (counts[c], -len(supply[c])))
            samples.append(supply[label].pop())
            counts[label] += 1
    return lists
