"""Who gets which sample: the papers' ways to cut a labelled pool among N clients.

A rule is ``rule(labels, rng, *, its options) -> Partition``; :func:`partition` checks, seeds and
calls it. Indices count through ``cat(labels, test_labels)``, so that one pool
holds both. Random choices come from numpy's RandomState, whose streams numpy has frozen: a
partition with its seed is the same on every machine and in every release.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.check import Count, Seed32, checked
from pflcore.data.cuts import Labels, Partition, Random, Weights, deal, in_proportion, need, one_of
from pflcore.data.dirichlet import dirichlet
from pflcore.data.label_skew import multimodal, pathological, practical1, unimodal
from pflcore.data.ragged import Ints, Ragged

# WAFFLE paper, section 5.1: agent 0's share of each label; numerators
BASES: dict[str, list[int]] = {
    "A": [1] * 10,
    "B": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0],
}
SIZES: dict[str, list[int]] = {  # Table 4, in hundredths; cycled beyond ten agents
    "A": [10] * 10,
    "B": [21, 6, 11, 6, 11, 6, 16, 6, 11, 6],
    "C": [10, 10, 10, 10, 20, 5, 5, 10, 10, 10],
}

# -- the WAFFLE paper --------------------------------------------------------


@checked
def waffle(
    labels: Labels,
    rng: Random,
    *,
    base: str = "A",
    roll: str = "left",
    sizes: Weights | None = None,
    shuffle: bool = True,
    shift_seed: Seed32 | None = None,
) -> Partition:
    """Distributions A (uniform), B (four labels each) and C (a peak of five labels): Beaussart et
    al. 2021, section 5.1 and Table 2.

    Agent i's fractions are ``base`` rolled by i positions: ``left`` (Table 2, the default) gives
    p_i[t] = base[(t+i) mod 10], ``right`` (the paper's text) base[(t-i) mod 10]; with ten agents
    both give the same agents in another order. A fraction is one of the *class's* samples; each
    class's column is divided by its sum, so the cut is disjoint and exhaustive for any N, in whole
    numbers: agent i gets the samples ``n_t * cum_{i-1} // den`` to ``n_t * cum_i // den`` of class
    t. A class that nobody asks for is unused and noted.

    ``sizes``: A, B, C of Table 4 or a list, cycled; agent i's fractions are multiplied by its entry
    before the columns are normalised (exact sizes for base A; for B and C approximately so, because
    every sample is still dealt). Training samples of a class are shuffled by ``seed`` before the
    cut (``shuffle=False``: pool order); test sets are cut by the same fractions in pool order, so
    every seed is measured on the same test set. ``shift_seed``: not None makes A, B into A*, B*:
    :func:`concept_shift` renames every client's training and test labels but Alice's.
    """
    classes, n = labels.classes, labels.n
    need(
        base == "A" or classes == 10,
        f"partition {base} is defined for 10 classes, got {classes}: use A, iid or dirichlet",
    )
    one_of("roll", roll, ("left", "right"))
    row = np.array(BASES[base] if classes == 10 else [1] * classes, dtype=object)
    turn = np.arange(n) * (1 if roll == "left" else -1)
    weights = row[np.add.outer(np.arange(classes), turn) % classes] * _weights(sizes, n)

    def cut(y: Ints, split: str) -> Ragged:
        rows = labels.by_class(y, rng if shuffle and split == "train" else None)
        return deal(rows, in_proportion([len(r) for r in rows], weights))

    unused = np.flatnonzero(weights.sum(1) == 0).tolist()
    notes = [f"classes {unused} are unused: with {n} agents nobody asks for them"] if unused else []
    part = labels.finish(labels.each(cut), notes)
    if shift_seed is None:
        return part
    return replace(part, relabel=concept_shift(n, classes, shift_seed))


@checked
def concept_shift(n: int, classes: int, shift_seed: Seed32 = 0) -> Tensor:
    """One random permutation of all labels per client, independent of the others; client 0 (Alice)
    keeps hers. int64 [N, C].

    The permutations depend on ``shift_seed`` alone and client i's does not change with N: seeds of
    the training leave them as they are.
    """
    rng = _stream(shift_seed, "shift")
    rows = [np.arange(classes)] + [rng.permutation(classes) for _ in range(n - 1)]
    return torch.from_numpy(np.stack(rows[:n]).astype(np.int64))


# -- equal and unequal shares of everything
# ------------------------------------------------------------------------------------


@checked
def iid(labels: Labels, rng: Random, *, sizes: Weights | None = None) -> Partition:
    """The shuffled pool cut into N parts, equal (to one sample) or in the proportions ``sizes``
    (Table 4's A, B, C, or a list, cycled)."""
    weights = _weights(sizes, labels.n)[None]

    def cut(y: Ints, split: str) -> Ragged:
        return deal([rng.permutation(len(y))], in_proportion([len(y)], weights))

    return labels.finish(labels.each(cut))


def _weights(sizes: str | Sequence[float] | None, n: int) -> NDArray[np.object_]:
    """Whole weights [N], exactly in the proportions `sizes`: 0.1 is a tenth, not its float."""
    if isinstance(sizes, str) and sizes not in SIZES:
        raise ValueError(
            f"sizes must be one of {list(SIZES)} or a list of proportions, got {sizes!r}"
        )
    values = SIZES[sizes] if isinstance(sizes, str) else [1] if sizes is None else list(sizes)
    proper = all(isinstance(v, Real) and 0 < v < float("inf") for v in values)
    need(values and proper, f"sizes must be proportions above 0, got {values}")
    exact = [Fraction(str(v)) for v in values]
    unit = math.lcm(*(f.denominator for f in exact))
    whole = np.array([int(f * unit) for f in exact], dtype=object)
    return whole[np.arange(n) % len(whole)]


# -- the registry ------------------------------------------------------------


class Way(NamedTuple):
    """A rule under a name. `stream` seeds its draws: another string is another partition."""

    stream: str
    rule: Callable[..., Partition]


PARTITIONS: dict[str, Way] = {
    "A": Way("waffle", partial(waffle, base="A")),
    "B": Way("waffle", partial(waffle, base="B")),
    "C": Way("waffle", partial(waffle, base="C")),
    "A*": Way("waffle", partial(waffle, base="A", shift_seed=0)),
    "B*": Way("waffle", partial(waffle, base="B", shift_seed=0)),
    "iid": Way("iid", iid),
    "dirichlet": Way("dirichlet", dirichlet),
    "pathological": Way("pathological", pathological),
    "practical1": Way("practical1", practical1),
    "unimodal": Way("unimodal", unimodal),
    "multimodal": Way("multimodal", multimodal),
    "practical2": Way(
        "dirichlet", partial(dirichlet, alpha=0.1, mode="pooled_split", balance=True)
    ),
}


@checked
def partition(
    name: str,
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    **options: Any,
) -> Partition:
    """The samples of labels [n] (and test_labels [n_test]) among N clients, by the name of a way;
    an unknown name or option is a sentence that lists the known ones."""
    known = options_of(name)
    unknown = ", ".join(sorted(set(options) - set(known)))
    takes = ", ".join([*known, "test_labels", "seed", "classes"])
    need(not unknown, f"partition {name} takes the options {takes}, got {unknown}")
    way = PARTITIONS[name]
    return way.rule(
        Labels.of(labels, test_labels, n, classes), _stream(seed, way.stream), **options
    )


@checked
def options_of(name: str) -> dict[str, Any]:
    """A partition's own options and their defaults (every partition takes ``test_labels``, ``seed``
    and ``classes`` besides)."""
    if name not in PARTITIONS:
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}, got {name!r}")
    fixed = {"base"} if name.endswith("*") else {"base", "shift_seed"}
    own = inspect.signature(PARTITIONS[name].rule).parameters.values()
    return {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY and p.name not in fixed}


def _stream(seed: int, what: str) -> Random:
    """A stream of its own for each recipe, so that two with one seed do not share their draws."""
    return np.random.RandomState([seed, *what.encode()])
