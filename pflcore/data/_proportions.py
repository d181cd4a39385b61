"""Partitions in given proportions: `iid`, and A, B and C of WAFFLE.

A pool, or each class of a pool, is divided in exact proportion to given numbers.

Symbols: N clients (`n` in code), C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.check import PositiveFloat, Seed32, checked, require
from pflcore.data._deal import (
    Random,
    class_positions,
    deal,
    proportional_counts,
    seeded_stream,
)
from pflcore.data._pools import Labels, Partition
from pflcore.data._ragged import Ints, Ragged

# Whole numbers and fractions as Python's objects: products and sums of them are exact
# and never overflow.
Exact = NDArray[np.object_]
# The first client's shares of the 10 classes, in any unit (WAFFLE: Beaussart et al.
# 2021, Table 2). The next client's shares are these, shifted by one class.
WAFFLE_BASES: dict[str, list[int]] = {
    "A": [1] * 10,
    "B": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0],
}
# The clients' sizes in hundredths of all samples (Beaussart et al. 2021, Table 4).
WAFFLE_SIZES: dict[str, list[int]] = {
    "A": [10] * 10,
    "B": [21, 6, 11, 6, 11, 6, 16, 6, 11, 6],
    "C": [10, 10, 10, 10, 20, 5, 5, 10, 10, 10],
}
Sizes = Literal["A", "B", "C"] | Sequence[PositiveFloat] | None


@checked
def iid(labels: Labels, rng: Random, *, sizes: Sizes = None) -> Partition:
    """The shuffled pool in N parts, of equal sizes or in proportions.

    Equal sizes differ by one sample at most. The training pool is divided in this way,
    and so is the test pool, where there is one.

    Example: 10 samples among 4 clients are 2, 3, 2 and 3 samples.

    Args:
        sizes: A, B or C of the WAFFLE paper's Table 4, or proportions of the clients'
            sizes, which are repeated where there are more clients; equal if not said
    """
    weights = size_weights(sizes, labels.n)[None]

    def cut(y: Ints, split: str) -> Ragged:
        order = rng.permutation(len(y))
        counts = proportional_counts(np.array([len(y)]), weights)
        return deal([order], counts)

    return Partition(labels.map_pools(cut))


@checked
def waffle(
    labels: Labels,
    rng: Random,
    *,
    base: Literal["A", "B", "C"] = "A",
    sizes: Sizes = None,
    shuffle: bool = True,
    shift_seed: Seed32 | None = None,
) -> Partition:
    """Distributions A (uniform), B (four labels) and C (a peak) of WAFFLE.

    Beaussart et al. 2021, section 5.1. A client's share of a class shifts by one class
    from client to client: client i gets of class t the weight `base[(t + i) mod C]`,
    times its entry of `sizes`. A class is divided in proportion to these weights. So
    no sample has two clients, and every sample has one, but for a class whose weights
    are all 0. `base` is a row of the paper's Table 2, which has C = 10 classes. For
    another number of classes there is only A, whose weights are equal.

    The test pool, where there is one, is divided by the same weights. Its samples are
    never shuffled: every seed gives the same test sets.

    Example: in A with 2 clients and 5 samples of each of 2 classes, client 0 gets 2
    samples of each class, and client 1 gets 3. In B with 10 clients, client 0 gets a
    quarter of each of the classes 0, 1, 2 and 3, and client 1 of the classes 9, 0, 1
    and 2.

    Args:
        sizes: A, B or C of the paper's Table 4, or proportions of the clients' sizes,
            which are repeated where there are more clients; equal if not said
        shuffle: shuffle the training samples of a class by the seed first
        shift_seed: permute each client's labels by this seed (A* and B*)
    """
    classes = labels.classes
    n = labels.n
    fits = base == "A" or classes == 10
    require(fits, "partition", f"10 classes for {base}", classes)
    first_client = np.array(WAFFLE_BASES[base], dtype=object)
    if classes != 10:
        first_client = np.array([1] * classes, dtype=object)
    shifted = np.add.outer(np.arange(classes), np.arange(n)) % classes  # [C, N]
    weights = first_client[shifted] * size_weights(sizes, n)

    def cut(y: Ints, split: str) -> Ragged:
        order = rng if shuffle and split == "train" else None
        rows = class_positions(y, classes, order)
        return deal(rows, proportional_counts(labels.class_totals(y), weights))

    unused = np.flatnonzero(weights.sum(1) == 0).tolist()
    facts = {"unused classes": unused} if unused else {}
    relabel = None
    if shift_seed is not None:
        relabel = concept_shift(n, classes, shift_seed)
    return Partition(labels.map_pools(cut), relabel, facts=facts)


def concept_shift(n: int, classes: int, shift_seed: int = 0) -> Tensor:
    """A random permutation of the labels for each client, int64 [N, C].

    Client 0 (Alice in the paper) keeps its labels. Client i's permutation depends only
    on `shift_seed`, i and the number of classes.
    """
    rng = seeded_stream(shift_seed, "shift")
    rows = [np.arange(classes)]
    for _ in range(n - 1):
        rows.append(rng.permutation(classes))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def size_weights(sizes: Sizes, n: int) -> Exact:
    """Exact proportions [N] of the clients' sizes.

    A float is read as it is written: 0.1 is a tenth, and not the nearest float.
    """
    values: list[Any] = [1]
    if isinstance(sizes, str):
        values = list(WAFFLE_SIZES[sizes])
    elif sizes is not None:
        values = list(sizes)
    require(len(values) > 0, "sizes", "at least one proportion", values)
    exact = [v if isinstance(v, int) else Fraction(str(v)) for v in values]
    return np.array(exact, dtype=object)[np.arange(n) % len(exact)]
