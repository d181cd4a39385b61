"""Partitions by name: `partition` cuts labelled samples among N clients.

A partition's rule is a function `rule(labels, rng, *, options) -> Partition`.
`partition` checks its arguments, seeds `rng`, and calls the rule that has the name. The
rules stand in modules of their own, by what they divide:

- `_proportions`: a pool, or each class, in given proportions
- `_dirichlet`: each class, in random proportions
- `_pathological`: a few classes for each client
- `_dominant`: a part of dominant classes, and a part of all classes
- `_subpopulations`: shards of single classes, for one or two groups of clients

Symbols: N clients (`n` in code), C classes; a pool has m samples, and a test pool
m_test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.check import PositiveInt, Seed32, checked, reject, require
from pflcore.data._deal import seeded_stream
from pflcore.data._dirichlet import dirichlet
from pflcore.data._dominant import practical1
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.data._labels import ReaderOptions, Targets, interpret_targets
from pflcore.data._pathological import pathological
from pflcore.data._pools import Labels, Partition
from pflcore.data._proportions import iid, waffle
from pflcore.data._ragged import Ints
from pflcore.data._subpopulations import multimodal, unimodal


class PartitionRule(NamedTuple):
    """A rule under a name, with defaults of its own.

    Attributes:
        stream: name of the random stream; it seeds the rule's draws together with the
            seed, so another name gives another partition
        rule: the function that makes the partition
        defaults: values of options in place of the rule's own defaults
    """

    stream: str
    rule: Callable[..., Partition]
    defaults: Mapping[str, Any] = {}


# A* and B* have the stream of A and B: they give the same samples to the same clients.
# practical2 is FedDWA's practical setting 2, by its released code.
PARTITIONS: dict[str, PartitionRule] = {
    **{name: PartitionRule("waffle", waffle, {"base": name}) for name in "ABC"},
    "A*": PartitionRule("waffle", waffle, {"base": "A", "shift_seed": 0}),
    "B*": PartitionRule("waffle", waffle, {"base": "B", "shift_seed": 0}),
    "iid": PartitionRule("iid", iid),
    "dirichlet": PartitionRule("dirichlet", dirichlet),
    "pathological": PartitionRule("pathological", pathological),
    "practical1": PartitionRule("practical1", practical1),
    "unimodal": PartitionRule("unimodal", unimodal),
    "multimodal": PartitionRule("multimodal", multimodal),
    "practical2": PartitionRule(
        "dirichlet", dirichlet, {"alpha": 0.1, "mode": "pooled_split", "balance": True}
    ),
}


@checked
def partition(
    name: str,
    labels: Any,
    n: PositiveInt,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: PositiveInt | None = None,
    ignored_label: int | None = None,
    **options: Any,
) -> Partition:
    """A partition of the samples of labels [m] among N clients.

    A sample whose label counts in nothing goes to no client. Raises ValueError for an
    unknown name or option, and where a client would have no training sample.

    >>> part = partition("pathological", [0, 0, 0, 1, 1, 1], 2, k=1)
    >>> sorted(samples.sort().values.tolist() for samples in part.index["train"])
    [[0, 1, 2], [3, 4, 5]]

    Args:
        name: the name of the partition, one of `PARTITIONS`
        labels: labels of the training pool, whole numbers [m] or [m, 1]
        n: number of clients
        test_labels: labels [m_test] of the test pool, or None for no test pool
        seed: seeds every random choice of the rule but the label permutations of A*
            and B*, which have their own `shift_seed`
        classes: number of classes; the largest label plus one if not said
        ignored_label: label that counts in nothing, besides -100
        options: options of the rule; `options_of(name)` lists them with their defaults
    """
    _check_options(name, options)
    pools, classes = _read_pools(labels, test_labels, classes, ignored_label)
    all_labels = np.concatenate(list(pools.values()))
    labelled = np.flatnonzero(all_labels != IGNORED_LABEL)
    pool_sizes = {split: len(y) for split, y in pools.items()}
    pools = {split: y[y != IGNORED_LABEL] for split, y in pools.items()}
    samples = len(pools["train"])
    require(n <= samples, "n", f"at most as many as the {samples} training samples", n)
    rule = PARTITIONS[name]
    rng = seeded_stream(seed, rule.stream)
    arguments = {**rule.defaults, **options}
    made = rule.rule(Labels(pools, n, classes), rng, **arguments)
    # The rule's indices count the samples with a label alone.
    indices = torch.from_numpy(labelled)
    index = {
        split: [indices[rows] for rows in lists] for split, lists in made.index.items()
    }
    _check_training_samples(index["train"])
    return replace(made, index=index, pool_sizes=pool_sizes)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that the partition does not have."""
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    others = ["test_labels", "seed", "classes", "ignored_label"]
    all_options = ", ".join([*known, *others])
    expected = f"the options {all_options}"
    require(not unknown, f"partition {name}", expected, ", ".join(unknown), known)


def _read_pools(
    labels: Any, test_labels: Any, classes: int | None, ignored_label: int | None
) -> tuple[dict[str, Ints], int]:
    """The labels of each pool, and the number of classes.

    A label that counts in nothing becomes `IGNORED_LABEL`.
    The labels of both pools decide together what they mean, as in `from_partition`.
    """
    pools = {"train": _to_labels(labels, "labels")}
    if test_labels is not None:
        pools["test"] = _to_labels(test_labels, "test_labels")
    reader = ReaderOptions(
        "infer" if classes is None else classes, ignored_label=ignored_label
    )
    targets = [Targets(pool) for pool in pools.values()]
    y, known_classes, _ = interpret_targets(
        targets, reader, torch.float32, name="labels"
    )
    known = y[y != IGNORED_LABEL]
    require(known.numel(), "labels", "a label that counts, at least one", labels)
    low = int(known.min())
    top = int(known.max())
    count = known_classes or 1
    fits = low >= 0 and top < count
    require(fits, "labels", f"labels in 0..{count - 1}", [low, top])
    parts = y.split([len(pool) for pool in pools.values()])
    arrays = {}
    for split, part in zip(pools, parts, strict=True):
        arrays[split] = part.numpy()
    return arrays, count


def _to_labels(labels: Any, name: str) -> Tensor:
    """Labels int64 [m] from any array [m] or [m, 1] of whole numbers.

    Raises ValueError for anything else, and for an empty array.
    """
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu()
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    fits = array.ndim == 1 and array.size and array.dtype.kind in "iub"
    require(fits, name, "whole numbers [n]", labels)
    return torch.from_numpy(array.astype(np.int64))


def _check_training_samples(lists: Sequence[Tensor]) -> None:
    """Raises ValueError where a client has no training sample."""
    empty = [i for i, samples in enumerate(lists) if not len(samples)]
    if empty:
        expected = f"so few clients that each has a sample (client {empty[0]} has none)"
        reject("n", expected, len(lists))


@checked
def options_of(name: str) -> dict[str, Any]:
    """The options of a partition's rule, with their defaults.

    Every partition also takes ``test_labels``, ``seed``, ``classes`` and
    ``ignored_label``. Raises ValueError for an unknown name.
    """
    expected = f"one of {', '.join(PARTITIONS)}"
    require(name in PARTITIONS, "partition", expected, name, PARTITIONS)
    rule = PARTITIONS[name]
    # WAFFLE's partitions have `base` in their name. Of these, only "A*" and "B*" have a
    # shift, and so a seed of it.
    hidden = {"base"}
    if "shift_seed" not in rule.defaults:
        hidden.add("shift_seed")
    parameters = inspect.signature(rule.rule).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    options |= rule.defaults
    return {k: default for k, default in options.items() if k not in hidden}
