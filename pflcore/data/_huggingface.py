"""Clients of Hugging Face's Datasets, and of flwr-datasets' partitions.

Their packages are known by what their objects have, and are imported only where a
caller names a Dataset that is to be loaded. `_read` reads the Datasets.

Symbols: N clients; a Dataset has n rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pflcore.check import Words, import_optional, reject, require
from pflcore.data._labels import SampleKeys
from pflcore.data._read import (
    NO_STREAM,
    SPLITS,
    LabelledSamples,
    names_of_labels,
    read_parts,
)
from pflcore.data._read_errors import explain_read_errors
from pflcore.data._tables import column_names, read_column

# The names that Datasets have for our splits.
SPLIT_OF_NAME = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "test": "test",
}
Entries = dict[Any, dict[str, Any]] | list[dict[str, Any]]  # client, split -> samples


def read_hugging_face(dataset: Any, by: str | None, keys: SampleKeys) -> Entries:
    """The samples of each client by split.

    The clients are in a dict by name, or in a list where they have no names.

    Args:
        dataset: data as `Federation.from_hf` takes them
        by: column with each row's client, or None
        keys: columns of the input and the target
    """
    if isinstance(dataset, str):
        datasets = import_optional("datasets", "from_hf: a Dataset by name")
        with explain_read_errors(f"from_hf: {dataset!r} cannot be loaded"):
            dataset = datasets.load_dataset(dataset)
    if hasattr(dataset, "load_partition"):
        require(by is None, "by", "None, as every partition is a client", by)
        return _partitions(dataset)
    is_list = isinstance(dataset, list | tuple)
    expected = "None, as each client's data are given"
    require(by is None or not is_list, "by", expected, by)
    if is_list:
        return [_by_split(client) for client in dataset]
    has_splits = isinstance(dataset, Mapping) and set(dataset) <= set(SPLIT_OF_NAME)
    if by is None and isinstance(dataset, Mapping) and not has_splits:
        return {name: _by_split(client) for name, client in dataset.items()}
    splits = _by_split(dataset)
    require("train" in splits, "dataset", "a split 'train'", list(splits))
    columns = list(dict.fromkeys(name for t in splits.values() for name in _names(t)))
    expected = f"the name of the column with each row's client, one of {columns}"
    if by is None:
        reject("by", expected, by)
    return _read_rows(splits, by, keys)


def _names(table: Any) -> list[str]:
    """The names of a table's columns."""
    return [str(name) for name in column_names(table) or []]


def _by_split(dataset: Any) -> dict[str, Any]:
    """The Datasets of a DatasetDict by our names of splits; one alone is "train".

    Raises ValueError for other splits, two for one split, and for streams.
    """
    named = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    splits: dict[str, Any] = {}
    for name, part in named.items():
        split = SPLIT_OF_NAME.get(str(name))
        fits = split is not None and split not in splits
        remedy = "" if fits else "; give a dict of those that are meant"
        expected = f"the splits {', '.join(SPLIT_OF_NAME)}, each once{remedy}"
        require(fits, "dataset", expected, list(named))
        is_table = not isinstance(part, Mapping | list) and bool(_names(part))
        expected = "a Dataset with named columns, a dict of its splits, or a list"
        require(is_table, "dataset", expected, type(part))
        has_length = hasattr(part, "__len__")
        require(has_length, "dataset", NO_STREAM, Words(type(part).__name__))
        splits[str(split)] = part
    return {split: splits[split] for split in SPLITS if split in splits}


# partitions of flwr-datasets ----------------------------------------------------------


def _partitions(source: Any) -> Entries:
    """The partitions of flwr-datasets by client: a list, or a dict by natural ids.

    A partition belongs to the client whose id it has in its own split, as the same
    number may be another client there. Without ids the numbers are the clients.

    Args:
        source: a FederatedDataset, or one partitioner
    """
    partitioners = getattr(source, "partitioners", None)
    has_splits = isinstance(partitioners, Mapping)
    parts: dict[str, list[Any]] = {}
    ids: dict[str, Mapping[int, Any] | None] = {}
    by_split = partitioners if isinstance(partitioners, Mapping) else {"": source}
    for split, partitioner in by_split.items():
        place = (split,) if has_splits else ()
        source.load_partition(0, *place)  # only then a partitioner knows their number
        count = range(partitioner.num_partitions)
        name = split or "train"
        parts[name] = [source.load_partition(i, *place) for i in count]
        ids[name] = getattr(partitioner, "partition_id_to_natural_id", None)
    have_ids = all(ids.values())
    counts = {split: len(loaded) for split, loaded in parts.items()}
    are_alike = not any(ids.values()) and len(set(counts.values())) == 1
    expected = "partitions of the split 'train', and of others as many, or all with ids"
    require("train" in parts and (have_ids or are_alike), "dataset", expected, counts)
    clients: dict[Any, dict[str, Any]] = {}
    for split, loaded in parts.items():
        for i, part in enumerate(loaded):
            client = (ids[split] or {})[i] if have_ids else i
            clients.setdefault(client, {})[split] = part
    entries = {client: _by_split(own) for client, own in clients.items()}
    return entries if have_ids else list(entries.values())


# rows with a column of clients --------------------------------------------------------


def _read_rows(
    splits: Mapping[str, Any], by: str, keys: SampleKeys
) -> dict[Any, dict[str, LabelledSamples]]:
    """The samples of each client, of Datasets whose column `by` names the clients.

    Clients are in the ascending order of their ids. Ids that are numbers of names are
    in the order of the names, where all splits have the same list.
    """
    lists = {split: names_of_labels(t, by, split) for split, t in splits.items()}
    common = lists["train"] if len(set(lists.values())) == 1 else None
    entries: dict[Any, dict[str, LabelledSamples]] = {}
    for split, table in splits.items():
        ids = _client_ids(table, by, split)
        names = lists[split]
        if names is not None and common is None:
            ids = np.asarray(names)[ids]
        parts = read_parts(table, keys, split)
        label_names = names_of_labels(table, keys.y, split)
        clients, owner = np.unique(ids, return_inverse=True)
        order = np.argsort(owner, kind="stable")
        ends = np.cumsum(np.bincount(owner))
        for client, rows in zip(
            clients.tolist(), np.split(order, ends[:-1]), strict=True
        ):
            x = {str(key): parts[key][rows] for key in keys.inputs}
            if isinstance(keys.x, str | int):
                x = x[str(keys.x)]
            samples = LabelledSamples(x, parts[keys.y][rows], label_names)
            entries.setdefault(client, {})[split] = samples
    if common is not None:
        return {common[i]: entries[i] for i in sorted(entries)}
    return dict(sorted(entries.items()))


def _client_ids(table: Any, by: str, split: str) -> Any:
    """The column `by` [n] of a Dataset: whole numbers or strings.

    Raises ValueError where it is missing or holds something else.
    """
    expected = f"one of the columns {_names(table)} of {split}"
    require(by in _names(table), "by", expected, by, _names(table))
    ids = read_column({by: list(table[by])}, by)
    fits = ids.ndim == 1 and ids.dtype.kind in "iuU"
    require(fits, "by", f"a whole number or a string for each row of {split}", ids)
    return ids
