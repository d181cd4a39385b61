"""What the partitions share: the result, a checked pool of labels, exact cuts, reproducible random
streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.check import Kind

Ints = NDArray[np.int64]
Weights = Annotated[
    str | Sequence[float], Kind("a name or a list of proportions", lambda v: hasattr(v, "__iter__"))
]
Classes = Annotated[
    str | Sequence[int], Kind("a name or a list of classes", lambda v: hasattr(v, "__iter__"))
]

SIZES: dict[str, list[int]] = {  # WAFFLE paper, Table 4, in hundredths; cycled beyond ten agents
    "A": [10] * 10,
    "B": [21, 6, 11, 6, 11, 6, 16, 6, 11, 6],
    "C": [10, 10, 10, 10, 20, 5, 5, 10, 10, 10],
}


@dataclass(frozen=True)
class Partition:
    """index: split -> N index lists; relabel [N, C] or None; group [N] where the recipe has groups;
    notes: sentences for the record."""

    index: dict[str, list[Tensor]]
    relabel: Tensor | None = None
    notes: list[str] = field(default_factory=list)
    group: Tensor | None = None


class Pool:
    """Labels checked once: numpy int64 ``train`` and ``test``, the number of classes, where the
    test pool starts."""

    def __init__(self, labels: Any, test_labels: Any, n: int, classes: int | None) -> None:
        self.train = _labels(labels, "labels")
        self.has_test = test_labels is not None
        self.test = (
            _labels(test_labels, "test_labels") if self.has_test else np.zeros(0, dtype=np.int64)
        )
        self.n, self.offset = n, len(self.train)
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ValueError(f"n must be at least one client, got {n!r}")
        if n > len(self.train):
            raise ValueError(
                f"n must be at most the number of training samples ({len(self.train)}), got {n}"
            )
        top = int(max(self.train.max(), self.test.max() if len(self.test) else 0))
        self.classes = top + 1 if classes is None else classes
        if top >= self.classes:
            raise ValueError(f"labels must lie in 0..{self.classes - 1}, got {top}")

    def finish(
        self, index: dict[str, list[Ints]], notes: Sequence[str] = (), group: Ints | None = None
    ) -> Partition:
        empty = [i for i, rows in enumerate(index["train"]) if len(rows) == 0]
        if empty:
            raise ValueError(
                f"n must leave every client a training sample, but with n={self.n} client "
                f"{empty[0]} gets none: use fewer clients"
            )
        lists = {
            s: [torch.from_numpy(np.ascontiguousarray(r, dtype=np.int64)) for r in rows]
            for s, rows in index.items()
        }
        return Partition(
            lists, None, list(notes), None if group is None else torch.from_numpy(group)
        )


def _labels(labels: Any, what: str) -> Ints:
    a = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if a.ndim != 1 or a.size == 0 or a.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be a non-empty list of integer labels, got {a.dtype} of shape "
            f"{list(a.shape)}"
        )
    if int(a.min()) < 0:
        raise ValueError(f"{what} must not be negative, got {int(a.min())}")
    return a.astype(np.int64)


def rng_of(seed: int, what: str) -> np.random.RandomState:
    """A stream of its own for each recipe, so that two recipes with one seed do not share their
    draws."""
    return np.random.RandomState([int(seed), *what.encode()])


def by_class(labels: Ints, classes: int, rng: np.random.RandomState | None) -> list[Ints]:
    """The indices of each class, shuffled if there is an ``rng``, else in pool order."""
    rows = [np.flatnonzero(labels == t) for t in range(classes)]
    return rows if rng is None else [rng.permutation(r) for r in rows]


def cut(rows: Ints, weight: Sequence[Any]) -> list[Ints]:
    """Cut ``rows`` in proportion to exact weights: piece i is ``len * cum_{i-1} // den`` to ``len *
    cum_i // den``; all 0: nothing."""
    den, cum, at = sum(weight), 0, [0]
    for w in weight:
        cum += w
        at.append(len(rows) * cum // den if den else 0)
    return [rows[a:b] for a, b in pairwise(at)]


def cut_classes(
    by_class: Sequence[Ints], weight: Sequence[Sequence[Any]], offset: int = 0
) -> list[Ints]:
    """Each class cut by its own column of ``weight`` [N][C] (ints or Fractions), then gathered per
    client."""
    pieces = [cut(rows, [w[t] for w in weight]) for t, rows in enumerate(by_class)]
    return [np.concatenate([p[i] for p in pieces]) + offset for i in range(len(weight))]


def shares(sizes: str | Sequence[float] | None, n: int) -> list[Fraction]:
    if sizes is None:
        return [Fraction(1)] * n
    if isinstance(sizes, str) and sizes not in SIZES:
        raise ValueError(
            f"sizes must be one of {list(SIZES)} or a list of proportions, got {sizes!r}"
        )
    values = SIZES[sizes] if isinstance(sizes, str) else list(sizes)
    if not values or not all(isinstance(v, Real) and 0 < v < float("inf") for v in values):
        raise ValueError(f"sizes must be proportions above 0, got {values}")
    # str: 0.1 means one tenth, not its float
    return [Fraction(str(values[i % len(values)])) for i in range(n)]
