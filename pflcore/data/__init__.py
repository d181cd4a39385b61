"""Federated data: a pool of samples, who holds which, and where both come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pflcore.check import Count, Seed32, checked, shown
from pflcore.data import natural, synthetic
from pflcore.data.cuts import Partition
from pflcore.data.federation import Federation
from pflcore.data.fields import padded
from pflcore.data.partition import PARTITIONS, options_of, partition
from pflcore.data.sources import SOURCES, Source, load
from pflcore.data.splits import ClientGroups

FEDERATIONS: dict[str, Callable[..., Federation]] = {
    **natural.FEDERATIONS,
    "synthetic_linear": synthetic.synthetic_linear,
    "synthetic_quadratic": synthetic.synthetic_quadratic,
    "synthetic_clusters": synthetic.synthetic_clusters,
}
TABULAR = ("school", "vehicle")  # each client's features have scales of their own
_partition = partition  # where an argument has this name
CROSS_SILO = {"train": 0.7, "val": 0.15, "test": 0.15}  # Motley's split of a client's own samples

__all__ = [
    "CROSS_SILO",
    "FEDERATIONS",
    "PARTITIONS",
    "SOURCES",
    "ClientGroups",
    "Federation",
    "Partition",
    "Source",
    "federation_of",
    "load",
    "options_of",
    "padded",
    "partition",
]


@checked
def federation_of(  # noqa: PLR0913 (the command line's)
    data: str | Source = "mnist5k",
    partition: str | None = None,
    n: int | None = None,
    seed: Seed32 = 0,
    shift_seed: Seed32 = 0,
    *,
    root: str | os.PathLike[str] | None = None,
    train_samples: Count | None = None,
    test_samples: Count | None = None,
    fractions: Mapping[str, float] | None = None,
    standardize: bool | None = None,
    **options: Any,
) -> Federation:
    """A federation from the names of a data set and of a partition.

    data        a pool that a partition cuts (``SOURCES``, or a :class:`Source`), or data that comes
    with its clients (``FEDERATIONS``,
                ``"leaf:PATH"``, ``"folder:PATH"``)
    partition   one of ``PARTITIONS`` (None: "A"), with ``options`` from ``options_of(partition)``;
    data with clients takes none
    n           clients: 10 where a partition makes them; the first n where the data brings them
    (None: all)
    seed        of the partition or of the split; shift_seed: of the label permutations of A* and B*
    root        the data folder (None: the one PFLCORE_DATA names)
    train_samples, test_samples   use a stratified part of the pools only
    fractions   data with clients: the split of each client's samples (None: 70 / 15 / 15 where the
    data has no test split; {}: as it comes) standardize data with clients: features by each
    client's training statistics (None: for school and vehicle)

    ValueError (a name, an option), ImportError (a package), OSError (a file): one sentence each.
    """
    if isinstance(data, str) and data not in SOURCES:
        if partition is not None or train_samples is not None or test_samples is not None:
            given = "partition" if partition is not None else "train_samples and test_samples"
            _known(data)
            raise ValueError(
                f"{given} cannot be chosen for {data!r}, which comes with its clients: leave it out"
            )
        return _with_clients(data, n, seed, root, fractions, standardize, options)
    if fractions is not None or standardize is not None:
        raise ValueError(
            "fractions and standardize are for data that comes with its clients: use "
            "split_samples() or standardized()"
        )
    name = partition or "A"
    unknown = sorted(set(options) - set(options_of(name)))
    if unknown:
        raise ValueError(
            f"partition {name} takes the options {', '.join(options_of(name))}, got "
            f"{', '.join(unknown)}"
        )
    cut = [f"{k}={shown(v)}" for k, v in sorted(options.items()) if v != options_of(name)[k]]
    if "shift_seed" in options_of(name):
        options = {**options, "shift_seed": shift_seed}
    source = (load(data, root) if isinstance(data, str) else data).sample(
        train_samples, test_samples, seed
    )
    part = _partition(
        name,
        source.y_train,
        10 if n is None else n,
        test_labels=source.y_test,
        seed=seed,
        classes=source.classes,
        **options,
    )
    return Federation.from_partition(
        source.x_train,
        source.y_train,
        part,
        x_test=source.x_test,
        y_test=source.y_test,
        classes=source.classes,
        name=" ".join([source.name, name, *cut]),  # runs on other cuts are no seeds of one
    )


def _known(data: str) -> None:
    if data not in FEDERATIONS and not data.startswith(
        tuple(prefix for prefix, _ in natural.READERS)
    ):
        raise ValueError(
            f"data must be one of {', '.join([*SOURCES, *FEDERATIONS])}, leaf:PATH or folder:PATH, "
            f"got {data!r}"
        )


def _with_clients(
    data: str,
    n: int | None,
    seed: int,
    root: str | os.PathLike[str] | None,
    fractions: Mapping[str, float] | None,
    standardize: bool | None,
    options: dict[str, Any],
) -> Federation:
    _known(data)
    if data.startswith("synthetic"):
        more = (
            {}
            if data == "synthetic_quadratic"
            else {"seed": seed, **({} if n is None else {"n": n})}
        )
        make, args = FEDERATIONS[data], {**more, **options}
    elif data in FEDERATIONS:
        make, args = FEDERATIONS[data], {"root": root, **options}
    else:
        prefix, make = next((p, f) for p, f in natural.READERS if data.startswith(p))
        args = {"path": data[len(prefix) :], **options}
    try:
        fed = make(**args)
    except TypeError as e:
        if "unexpected keyword" in str(e):
            raise ValueError(f"options for {data!r}: {e}") from e
        raise
    if n is not None and n != fed.n:
        if not 1 <= n <= fed.n:
            raise ValueError(f"n must lie in 1..{fed.n}, the clients of {data!r}, got {n}")
        fed = fed.subset(range(n))
    if fractions or (fractions is None and "test" not in fed.index):
        fed = fed.split_samples(CROSS_SILO if fractions is None else fractions, seed)
    return fed.standardized() if (data in TABULAR if standardize is None else standardize) else fed
