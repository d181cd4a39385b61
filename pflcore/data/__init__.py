"""Federated data: a pool of samples, who holds which, and where both come from."""

from __future__ import annotations

import os
from typing import Any

from .cuts import Partition
from .federation import Federation
from .partition import PARTITIONS, options_of, partition
from .sources import SOURCES, Source, load
from .splits import ClientGroups

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "ClientGroups",
    "Federation",
    "Partition",
    "Source",
    "federation_of",
    "load",
    "options_of",
    "partition",
]


def federation_of(
    data: str | Source = "mnist5k",
    partition: str = "A",
    n: int = 10,
    seed: int = 0,
    shift_seed: int = 0,
    *,
    root: str | os.PathLike[str] | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
    **options: Any,
) -> Federation:
    """A federation from a data set's name and a partition's name.

    n: clients. seed: of the partition. shift_seed: of the label permutations of A* and B*. root: the data folder (None: PFLCORE_DATA).
    train_samples, test_samples: use a stratified part of the pools only. options: the partition's own (``options_of(partition)``).
    Errors: ValueError (a name, an option), ImportError (a package), OSError (a file), each in one sentence.
    """
    from .partition import partition as cut

    own = options_of(partition)
    if "shift_seed" in own:
        options = {**options, "shift_seed": shift_seed}
    source = (load(data, root) if isinstance(data, str) else data).sample(train_samples, test_samples, seed)
    part = cut(partition, source.y_train, n, test_labels=source.y_test, seed=seed, classes=source.classes, **options)
    return Federation.from_partition(
        source.x_train,
        source.y_train,
        part,
        x_test=source.x_test,
        y_test=source.y_test,
        classes=source.classes,
        name=f"{source.name} {partition}",
    )
