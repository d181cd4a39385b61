"""Input and result of a partition's rule: `Labels` and `Partition`.

Symbols:

- N clients (`n` in code) and C classes; client i has n_i samples in a split.
- A pool is one split's samples: "train", and "test" where there are test labels.
- A sample's index counts through all pools, cat(labels, test_labels). Its position
  counts within its own pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pflcore.data._ragged import Ints, Ragged


@dataclass(frozen=True)
class Partition:
    """The indices of each client's samples, by split.

    Attributes:
        index: for each split the N lists of indices, int64 [n_i]
        relabel: [N, C] int64, the label that a client sees for each class; None where
            every client sees the class itself
        group: [N] int64, the group that each client belongs to; None where the rule
            has no groups
        facts: numbers that the rule counted, by name, such as unused samples
        pool_sizes: the number of samples of each pool, by split; empty where the
            partition was not made by `partition`
    """

    index: Mapping[str, Sequence[Tensor]]
    relabel: Tensor | None = None
    group: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    pool_sizes: Mapping[str, int] = field(default_factory=dict)


class Labels(NamedTuple):
    """The labels of each pool, and the numbers of clients and classes.

    Attributes:
        pools: for each split the labels of its pool's samples
        n: number of clients
        classes: number of classes
    """

    pools: dict[str, Ints]
    n: int
    classes: int

    @property
    def train(self) -> Ints:
        """The labels of the training pool."""
        return self.pools["train"]

    def class_totals(self, y: Ints) -> Ints:
        """The number of samples of each class in the labels `y`, [C]."""
        return np.bincount(y, minlength=self.classes)

    def map_pools(self, cut: Callable[[Ints, str], Ragged]) -> dict[str, Ragged]:
        """N lists of indices for each pool.

        Args:
            cut: makes N lists of positions of a pool's labels and the split's name
        """
        index = {}
        begin = 0
        for split, y in self.pools.items():
            positions = cut(y, split)
            index[split] = Ragged(positions.flat + begin, positions.size)
            begin += len(y)
        return index
