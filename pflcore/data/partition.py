"""Who gets which sample: the papers' ways to cut a labelled pool among N clients.

Every function is pure: ``f(labels [n], n, *, test_labels=None [n_test], seed=0, classes=None,
**options) -> Partition``. Indices count through ``cat(labels, test_labels)``, so that one pool
holds both. Random choices come from numpy's RandomState, whose streams numpy has frozen: a
partition with its seed is the same on every machine and in every release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Count, Seed32, checked

from .cuts import Partition, Pool, Weights, by_class, cut, cut_classes, rng_of, shares
from .dirichlet import dirichlet
from .label_skew import pathological, practical1
from .subpopulations import multimodal, unimodal

# WAFFLE paper, section 5.1: agent 0's share of each label; numerators
BASES: dict[str, list[int]] = {
    "A": [1] * 10,
    "B": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0],
}
# -- the WAFFLE paper --------------------------------------------------------


@checked
def waffle(
    labels: Any,
    n: int,
    *,
    base: str = "A",
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
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
    pool = Pool(labels, test_labels, n, classes)
    if base not in BASES:
        raise ValueError(f"base must be one of {list(BASES)}, got {base!r}")
    if base != "A" and pool.classes != 10:
        raise ValueError(
            f"partition {base} is defined for 10 classes, got {pool.classes}: use A, iid or "
            "dirichlet"
        )
    if roll not in ("left", "right"):
        raise ValueError(f"roll must be 'left' or 'right', got {roll!r}")
    row = BASES[base] if pool.classes == 10 else [1] * pool.classes
    step = -1 if roll == "left" else 1
    share = shares(sizes, n)
    weight = [
        [row[(t - step * i) % pool.classes] * share[i] for t in range(pool.classes)]
        for i in range(n)
    ]
    rng = rng_of(seed, "waffle")
    index = {
        "train": cut_classes(by_class(pool.train, pool.classes, rng if shuffle else None), weight)
    }
    if pool.has_test:
        index["test"] = cut_classes(by_class(pool.test, pool.classes, None), weight, pool.offset)
    unused = [t for t in range(pool.classes) if sum(w[t] for w in weight) == 0]
    notes = [f"classes {unused} are unused: with {n} agents nobody asks for them"] if unused else []
    part = pool.finish(index, notes=notes)
    return (
        part
        if shift_seed is None
        else replace(part, relabel=concept_shift(n, pool.classes, shift_seed))
    )


@checked
def concept_shift(n: int, classes: int, shift_seed: Seed32 = 0) -> Tensor:
    """One random permutation of all labels per client, independent of the others; client 0 (Alice)
    keeps hers. int64 [N, C].

    The permutations depend on ``shift_seed`` alone and client i's does not change with N: seeds of
    the training leave them as they are.
    """
    rng = rng_of(shift_seed, "shift")
    rows = [np.arange(classes)] + [rng.permutation(classes) for _ in range(n - 1)]
    return torch.from_numpy(np.stack(rows[:n]).astype(np.int64))


# -- equal and unequal shares of everything
# ------------------------------------------------------------------------------------


@checked
def iid(
    labels: Any,
    n: int,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    sizes: Weights | None = None,
) -> Partition:
    """The shuffled pool cut into N parts, equal (to one sample) or in the proportions ``sizes``
    (Table 4's A, B, C, or a list, cycled)."""
    pool, rng = Pool(labels, test_labels, n, classes), rng_of(seed, "iid")
    share = shares(sizes, n)
    index = {"train": cut(rng.permutation(len(pool.train)), share)}
    if pool.has_test:
        index["test"] = cut(rng.permutation(len(pool.test)) + pool.offset, share)
    return pool.finish(index)


# -- the registry ------------------------------------------------------------

PARTITIONS: dict[str, Callable[..., Partition]] = {
    "A": partial(waffle, base="A"),
    "B": partial(waffle, base="B"),
    "C": partial(waffle, base="C"),
    "A*": partial(waffle, base="A", shift_seed=0),
    "B*": partial(waffle, base="B", shift_seed=0),
    "iid": iid,
    "dirichlet": dirichlet,
    "pathological": pathological,
    "practical1": practical1,
    "unimodal": unimodal,
    "multimodal": multimodal,
    "practical2": partial(dirichlet, alpha=0.1, mode="pooled_split", balance=True),
}


@checked
def partition(name: str, labels: Any, n: int, **options: Any) -> Partition:
    """``PARTITIONS[name](labels, n, **options)``; an unknown name or option is a sentence that
    lists the known ones."""
    known = [*options_of(name), "test_labels", "seed", "classes"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"partition {name} takes the options {', '.join(known)}, got {', '.join(unknown)}"
        )
    return PARTITIONS[name](labels, n, **options)


@checked
def options_of(name: str) -> dict[str, Any]:
    """A partition's own options and their defaults (every partition takes ``test_labels``, ``seed``
    and ``classes`` besides)."""
    if name not in PARTITIONS:
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}, got {name!r}")
    shared = {
        "labels",
        "n",
        "test_labels",
        "seed",
        "classes",
        "base",
        *(() if name.endswith("*") else ("shift_seed",)),
    }
    return {
        k: p.default
        for k, p in inspect.signature(PARTITIONS[name]).parameters.items()
        if k not in shared
    }
