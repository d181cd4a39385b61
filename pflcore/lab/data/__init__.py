"""Federated data by name: pools of samples, and clients that come in files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pflcore.check import (
    NonNegativeFloat,
    PositiveInt,
    Seed32,
    checked,
    require,
    summarize,
)
from pflcore.data._feature_shift import FeatureShift
from pflcore.data._federation import Federation, HeldOut
from pflcore.data._partition import options_of, partition
from pflcore.data._protocols import DEFAULT_SHARES
from pflcore.lab.data import _files as files
from pflcore.lab.data import _synthetic as synthetic
from pflcore.lab.data._sources import SOURCES as SOURCES
from pflcore.lab.data._sources import Source, load

FEDERATIONS: dict[str, Callable[..., Federation]] = {
    **files.FEDERATIONS,
    "synthetic_linear": synthetic.synthetic_linear,
    "synthetic_quadratic": synthetic.synthetic_quadratic,
    "synthetic_clusters": synthetic.synthetic_clusters,
    "synthetic_text": synthetic.synthetic_text,
}
TABULAR = ("school", "vehicle")  # each client's features have scales of their own
_partition = partition  # in `federation_of`, an argument has its name

__all__ = [
    "Source",
    "federation_of",
    "load",
]


@checked
def federation_of(  # noqa: PLR0913 (the command line's)
    data: str | Source = "mnist5k",
    partition: str | None = None,
    n: PositiveInt | None = None,
    seed: Seed32 = 0,
    shift_seed: Seed32 = 0,
    *,
    root: str | os.PathLike[str] | None = None,
    train_samples: PositiveInt | None = None,
    test_samples: PositiveInt | None = None,
    fractions: Mapping[str, HeldOut] | None = None,
    stratify: bool = False,
    standardize: bool | None = None,
    feature_shift: FeatureShift | None = None,
    feature_shift_strength: NonNegativeFloat | None = None,
    **options: Any,
) -> Federation:
    """A federation from the names of data and of a partition.

    There are two kinds of data: samples that a partition cuts among clients (`SOURCES`,
    or a :class:`Source` of your own), and data that come with their clients
    (`FEDERATIONS`, ``"leaf:PATH"``, ``"folder:PATH"``). docs/data.md describes files of
    your own and what their numbers become, docs/data_sets.md those of published data.

    Raises ValueError for a wrong name or option, ImportError for a missing package, and
    OSError for a missing or broken file, each with one sentence.

    Args:
        data: name of the data, or a :class:`Source`
        partition: one of `PARTITIONS`; None for "A". Data with clients take none.
        n: number of clients; 10 if not said. Of data with clients the first n are
            taken, and all of them if not said.
        seed: seeds the partition, or the split of data with clients
        shift_seed: seeds the label permutations of A* and B*
        root: the data folder; None for the folder that PFLCORE_DATA names
        train_samples: number of training samples to use, chosen so that every class
            keeps its proportion; None for all
        test_samples: the same of test samples
        fractions: for data with clients, the shares "val" and "test" of each client's
            samples that are held out. None: 0.15 each where the data have no test
            split. {}: the splits that the data have.
        stratify: True holds out the same share of each class of a client, see
            :meth:`Federation.split`
        standardize: for data with clients, True to standardize features by each
            client's training statistics. None: for school and vehicle only.
        feature_shift: rotation, noise or brightness, or a function (client, x,
            generator), by which clients see their inputs differently
            (:meth:`Federation.shift_features`); None for no shift
        feature_shift_strength: largest angle, deviation or constant of a client
        options: options of the partition, those of ``options_of(partition)``. Of data
            with clients, ``leaf:`` has ``classes``, ``text``, ``length`` and
            ``vocabulary``, ``folder:`` has ``classes`` and ``target``, and synthetic
            data have their function's.
    """
    expected = "None without a feature_shift"
    fits = feature_shift is not None or feature_shift_strength is None
    require(fits, "feature_shift_strength", expected, feature_shift_strength)

    def shifted(federation: Federation) -> Federation:
        return _shifted(federation, feature_shift, feature_shift_strength, seed)

    if isinstance(data, str) and data not in SOURCES:
        unusable = partition or train_samples or test_samples
        federation = _with_clients(data, n, seed, root, options)
        expected = f"none, as {data} has clients"
        require(not unusable, "partition and samples", expected, unusable)
        federation = shifted(_hold_out(federation, fractions, seed, stratify=stratify))
        if standardize is None:
            standardize = data in TABULAR
        return _standardized(federation) if standardize else federation
    fits = fractions is None and standardize is None and not stratify
    expected = f"none, as a partition cuts {data!r}"
    require(fits, "fractions, stratify and standardize", expected, fractions)
    name = partition or "A"
    defaults = options_of(name)
    expected = f"the options {', '.join(defaults)}"
    require("classes" not in options, name, expected, "classes")
    # Runs on different cuts are not runs of one experiment with several seeds. So the
    # name, by which a table groups runs, has the options that differ from the defaults.
    changed = _changed_options(options, defaults)
    if "shift_seed" in defaults:
        options = {**options, "shift_seed": shift_seed}
    source = load(data, root) if isinstance(data, str) else data
    source = source.sample(train_samples, test_samples, seed)
    made = _partition(
        name,
        source.y_train,
        n or 10,
        test_labels=source.y_test,
        seed=seed,
        classes=source.classes,
        **options,
    )
    federation = Federation.from_partition(
        source.x_train,
        source.y_train,
        made,
        x_test=source.x_test,
        y_test=source.y_test,
        classes=source.classes,
        name=" ".join([source.name, name, *changed]),
    )
    return shifted(federation)


def _changed_options(
    options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Texts "OPTION=VALUE" of the options that differ from their defaults."""
    changed = []
    for option, value in sorted(options.items()):
        if value != defaults.get(option):
            changed.append(f"{option}={summarize(value)}")
    return changed


def _shifted(
    federation: Federation,
    shift: FeatureShift | None,
    strength: float | None,
    seed: int,
) -> Federation:
    """The federation with a feature shift, which its name says, or as it is."""
    if shift is None:
        return federation
    made = federation.shift_features(shift, strength, seed)
    name = shift if isinstance(shift, str) else getattr(shift, "__name__", "shift")
    text = name if strength is None else f"{name}={summarize(strength)}"
    return replace(made, name=f"{federation.name} {text}")


def _standardized(federation: Federation) -> Federation:
    """The federation with standardized features, of which some may be int64."""
    if federation.x.dtype == torch.int64:
        federation = replace(federation, x=federation.x.float())
    return federation.standardize()


def _with_clients(
    data: str,
    n: int | None,
    seed: int,
    root: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
) -> Federation:
    """The first n clients of data that come with their clients.

    Raises ValueError for an unknown name or option, and for fewer clients.
    """
    kind, _, path = data.partition(":")
    names = ", ".join([*SOURCES, *FEDERATIONS])
    expected = f"one of {names}, leaf:PATH, folder:PATH, table:FILE"
    known = data in FEDERATIONS or kind in files.READERS
    require(known, "data", expected, data, [*SOURCES, *FEDERATIONS])
    make = FEDERATIONS.get(data)
    if make is None:
        make = partial(files.READERS[kind], path)
    takes = inspect.signature(make).parameters
    unknown = sorted(set(options) - set(takes))
    expected = f"the options {', '.join(takes)}"
    require(not unknown, data, expected, ", ".join(unknown), takes)
    arguments = {}
    for argument, value in (("n", n), ("seed", seed), ("root", root)):
        if argument in takes and value is not None:
            arguments[argument] = value
    federation = make(**arguments, **options)
    count = federation.n
    require(n is None or n <= count, "n", f"at most the {count} clients of {data}", n)
    if n is None or n == count:
        return federation
    return federation.subset(range(n))


def _hold_out(
    federation: Federation,
    fractions: Mapping[str, HeldOut] | None,
    seed: int,
    *,
    stratify: bool,
) -> Federation:
    """The federation with these shares of each client's samples held out.

    With None for `fractions` they are Motley's shares, where there is no test split.
    """
    shares: dict[str, Any] = dict(fractions or {})
    if fractions is None and "test" not in federation.index:
        shares = dict(DEFAULT_SHARES)
    fits = set(shares) <= {"val", "test"}
    expected = "shares of 'val' and 'test' of each client's samples"
    require(fits, "fractions", expected, shares)
    if not shares:
        require(not stratify, "stratify", "shares of samples to hold out", fractions)
        return federation
    return federation.split(**shares, seed=seed, of=None, stratify=stratify)
