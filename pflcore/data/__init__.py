"""Federated data: a pool of samples, who holds which, and where both come from."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pflcore.check import PositiveInt, Seed32, checked, require, summarize
from pflcore.data import _natural as natural
from pflcore.data import _synthetic as synthetic
from pflcore.data._federation import Federation, HeldOut
from pflcore.data._inputs import pad_sequences
from pflcore.data._partition import PARTITIONS as PARTITIONS
from pflcore.data._partition import options_of, partition
from pflcore.data._protocols import DEFAULT_SHARES
from pflcore.data._sources import SOURCES as SOURCES
from pflcore.data._sources import Source, load

FEDERATIONS: dict[str, Callable[..., Federation]] = {
    **natural.FEDERATIONS,
    "synthetic_linear": synthetic.synthetic_linear,
    "synthetic_quadratic": synthetic.synthetic_quadratic,
    "synthetic_clusters": synthetic.synthetic_clusters,
}
TABULAR = ("school", "vehicle")  # each client's features have scales of their own
_cut = partition  # where an argument has this name

__all__ = [
    "Federation",
    "Source",
    "federation_of",
    "load",
    "pad_sequences",
    "partition",
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
    standardize: bool | None = None,
    **options: Any,
) -> Federation:
    """A federation from the names of a data set and of a partition.

    data          a pool that a partition cuts (``SOURCES``, or a :class:`Source`), or data that
                  comes with its clients
                  (``FEDERATIONS``, ``"leaf:PATH"``, ``"folder:PATH"``); the files and
                  what their numbers become stand in docs/data.md
    partition     one of ``PARTITIONS`` (None: "A"), with ``options`` from
                  ``options_of(partition)``; data with clients takes none. ``leaf:`` has the option ``classes``, ``folder:`` has it and ``target``
    n             clients: 10 where a partition makes them; the first n where the data brings them
                  (None: all)
    seed          of the partition or of the split; shift_seed: of the label permutations of A*, B*
    root          the data folder (None: the one PFLCORE_DATA names)
    train_samples, test_samples   use a stratified part of the pools only
    fractions     data with clients: "val" and "test" of each client's samples (None: .15 each where
                  the data has no test split; {}: as it comes)
    standardize   data with clients: features by each client's training statistics (None: for school
                  and vehicle)

    ValueError (a name, an option), ImportError (a package), OSError (a file): one
    sentence each.
    """
    if isinstance(data, str) and data not in SOURCES:
        samples = partition or train_samples or test_samples
        fed = _with_clients(data, n, seed, root, options)
        require(
            not samples,
            "partition and samples",
            f"none, as {data} has clients",
            samples,
        )
        fed = _divided(fed, fractions, seed)
        scaled = data in TABULAR if standardize is None else standardize
        if scaled and fed.x.dtype == torch.int64:  # whole numbers that are features
            fed = replace(fed, x=fed.x.float())
        return fed.standardize() if scaled else fed
    none = fractions is None and standardize is None
    require(
        none,
        "fractions and standardize",
        f"none, as a partition cuts {data!r}",
        fractions,
    )
    name = partition or "A"
    defaults = options_of(name)
    require(
        "classes" not in options, name, f"the options {', '.join(defaults)}", "classes"
    )
    cut = [
        f"{k}={summarize(v)}"
        for k, v in sorted(options.items())
        if v != defaults.get(k)
    ]
    if "shift_seed" in defaults:
        options = {**options, "shift_seed": shift_seed}
    source = load(data, root) if isinstance(data, str) else data
    s = source.sample(train_samples, test_samples, seed)
    part = _cut(
        name,
        s.y_train,
        n or 10,
        test_labels=s.y_test,
        seed=seed,
        classes=s.classes,
        **options,
    )
    title = " ".join([s.name, name, *cut])  # runs on other cuts are no seeds of one
    return Federation.from_partition(
        s.x_train,
        s.y_train,
        part,
        x_test=s.x_test,
        y_test=s.y_test,
        classes=s.classes,
        name=title,
    )


def _with_clients(
    data: str,
    n: int | None,
    seed: int,
    root: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
) -> Federation:
    """Data that has clients, by what it takes; the first n of them."""
    kind, _, path = data.partition(":")
    readers = {k: partial(read, path) for k, read in natural.READERS.items()}
    names = f"{', '.join([*SOURCES, *FEDERATIONS])}, leaf:PATH, folder:PATH"
    known = data in FEDERATIONS or kind in readers
    require(known, "data", f"one of {names}", data, [*SOURCES, *FEDERATIONS])
    make = FEDERATIONS.get(data) or readers[kind]
    own = inspect.signature(make).parameters
    unknown = sorted(set(options) - set(own))
    require(not unknown, data, f"the options {', '.join(own)}", ", ".join(unknown), own)
    given = {"n": n, "seed": seed, "root": root}
    fed = make(
        **{k: v for k, v in given.items() if k in own and v is not None}, **options
    )
    require(n is None or n <= fed.n, "n", f"at most the {fed.n} clients of {data}", n)
    return fed if n in (None, fed.n) else fed.subset(range(n))


def _divided(
    fed: Federation, fractions: Mapping[str, HeldOut] | None, seed: int
) -> Federation:
    """Each client's samples in these shares; None: Motley's where there is no test
    split."""
    whole = fractions is None and "test" not in fed.index
    shares: dict[str, Any] = dict(DEFAULT_SHARES if whole else fractions or {})
    fit = set(shares) <= {"val", "test"}
    require(
        fit, "fractions", "shares of 'val' and 'test' of each client's samples", shares
    )
    return fed.split(**shares, seed=seed, of=None) if shares else fed
