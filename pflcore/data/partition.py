"""Who gets which sample: the papers' ways to cut a labelled pool among N clients, by name.

A rule is `rule(labels, rng, *, its options) -> Partition`; `partition` checks, seeds and calls it.
Indices count through cat(labels, test_labels), so that one pool holds both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.check import Count, Positive, Seed32, checked, need
from pflcore.data.cuts import Labels, Partition, Random, deal, in_proportion
from pflcore.data.dirichlet import dirichlet
from pflcore.data.label_skew import multimodal, pathological, practical1, unimodal
from pflcore.data.ragged import Ints, Ragged

BASES: dict[str, list[int]] = {  # WAFFLE paper, section 5.1: agent 0's share of each label
    "A": [1] * 10,
    "B": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0],
}
SIZES: dict[str, list[int]] = {  # WAFFLE paper, Table 4, in hundredths
    "A": [10] * 10,
    "B": [21, 6, 11, 6, 11, 6, 16, 6, 11, 6],
    "C": [10, 10, 10, 10, 20, 5, 5, 10, 10, 10],
}
Sizes = Literal["A", "B", "C"] | Sequence[Positive] | None


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
    """Distributions A (uniform), B (four labels), C (a peak): Beaussart et al. 2021, section 5.1.

    Agent i's share of the samples of class t is base[(t + i) mod 10] (Table 2), times its entry of
    `sizes`, over the class's sum; so the cut is disjoint and, but for a class with no share at all,
    exhaustive for any N.
    `sizes`: A, B, C of Table 4, or proportions, cycled. Training samples of a class are shuffled by
    the seed first (`shuffle`), test samples never: every seed has the same test sets.
    `shift_seed`: makes A*, B* of A, B by `concept_shift`.
    """
    classes, n = labels.classes, labels.n
    need(base == "A" or classes == 10, "partition", f"10 classes for {base}", classes)
    row = np.array(BASES[base] if classes == 10 else [1] * classes, dtype=object)
    weights = row[np.add.outer(np.arange(classes), np.arange(n)) % classes] * _weights(sizes, n)

    def cut(y: Ints, split: str) -> Ragged:
        rows = labels.by_class(y, rng if shuffle and split == "train" else None)
        return deal(rows, in_proportion([len(r) for r in rows], weights))

    unused = np.flatnonzero(weights.sum(1) == 0).tolist()
    relabel = None if shift_seed is None else concept_shift(n, classes, shift_seed)
    facts = {"unused classes": unused} if unused else {}
    return Partition(labels.each(cut), relabel, facts=facts)


@checked
def concept_shift(n: Count, classes: Count, shift_seed: Seed32 = 0) -> Tensor:
    """A random permutation of the labels per client, int64 [N, C]; client 0 (Alice) keeps hers.

    Client i's depends on `shift_seed` and i alone.
    """
    rng = _stream(shift_seed, "shift")
    rows = [np.arange(classes)] + [rng.permutation(classes) for _ in range(n - 1)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@checked
def iid(labels: Labels, rng: Random, *, sizes: Sizes = None) -> Partition:
    """The shuffled pool in N parts, equal (to one sample) or in the proportions `sizes`, cycled."""
    weights = _weights(sizes, labels.n)[None]

    def cut(y: Ints, split: str) -> Ragged:
        return deal([rng.permutation(len(y))], in_proportion([len(y)], weights))

    return Partition(labels.each(cut))


def _weights(sizes: Sizes, n: int) -> NDArray[np.object_]:
    """Whole weights [N], exactly in the proportions `sizes`: 0.1 is a tenth, not its float."""
    values = SIZES[sizes] if isinstance(sizes, str) else [1] if sizes is None else list(sizes)
    need(len(values) > 0, "sizes", "at least one proportion", values)
    exact = [Fraction(str(v)) for v in values]
    unit = math.lcm(*(f.denominator for f in exact))
    whole = np.array([int(f * unit) for f in exact], dtype=object)
    return whole[np.arange(n) % len(whole)]


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
    n: Count,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: Count | None = None,
    **options: Any,
) -> Partition:
    """The samples of labels [n] (and test_labels [n_test]) among N clients, by the name of a way;
    `options_of(name)` are its own options. ValueError in one sentence for an unknown name or
    option, and where a client would have nothing to train on."""
    known = options_of(name)
    unknown = ", ".join(sorted(set(options) - set(known)))
    takes = ", ".join([*known, "test_labels", "seed", "classes"])
    need(not unknown, f"partition {name}", f"the options {takes}", unknown)
    way, pools = PARTITIONS[name], Labels.of(labels, test_labels, n, classes)
    part = way.rule(pools, _stream(seed, way.stream), **options)
    index = {s: list(lists) for s, lists in part.index.items()}
    none = [i for i, rows in enumerate(index["train"]) if not len(rows)][:1]
    need(not none, "n", f"so few clients that each has a sample (client {none} has none)", n)
    return replace(part, index=index)


@checked
def options_of(name: str) -> dict[str, Any]:
    """A partition's own options and their defaults (every partition takes ``test_labels``, ``seed``
    and ``classes`` besides)."""
    need(name in PARTITIONS, "partition", f"one of {', '.join(PARTITIONS)}", name)
    fixed = {"base"} if name.endswith("*") else {"base", "shift_seed"}
    own = inspect.signature(PARTITIONS[name].rule).parameters.values()
    return {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY and p.name not in fixed}


def _stream(seed: int, what: str) -> Random:
    """A stream of its own for each recipe, so that two with one seed do not share their draws."""
    return np.random.RandomState([seed, *what.encode()])
