"""Clients of Hugging Face's Datasets, and of flwr-datasets' partitions.

Their packages are known by what their objects have, and are imported only where a
caller names a Dataset that is to be loaded.

Symbols: N clients; a Dataset has n rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pflcore.check import Words, import_optional, reject, require
from pflcore.data._frames import column_names
from pflcore.data._items import NO_STREAM, SampleKeys, read_by_keys, read_table
from pflcore.data._samples import SPLITS
from pflcore.data._sources import explain_read_errors

# The names that Datasets have for our splits.
SPLIT_OF_NAME = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "test": "test",
}
Entry = dict[str, tuple[Any, Any]]  # split -> (x, y) of a client


def read_hugging_face(
    dataset: Any, by: str | None, keys: SampleKeys
) -> tuple[dict[Any, Entry] | list[Entry], list[str] | None]:
    """The samples of each client by split, and the names of the classes.

    The clients are in a dict by name, or in a list where they have no names. The names
    of the classes are None where the features have none.

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
        dataset = _partitions(dataset)
    is_list = isinstance(dataset, list | tuple)
    expected = "None, as each client's data are given"
    require(by is None or not is_list, "by", expected, by)
    if is_list or (by is None and _are_clients_by_name(dataset)):
        return _read_clients(dataset, keys)
    expected = "the name of the column with each row's client"
    splits = _by_split(dataset)
    if by is None:
        columns = column_names_of(splits["train"])
        reject("by", f"{expected}, one of {columns}", by)
    return _read_rows(splits, by, keys), class_names_of(splits["train"], keys.y)


def column_names_of(dataset: Any) -> list[Any] | None:
    """The names of the columns of a Dataset; None for a dict or a list of Datasets."""
    if isinstance(dataset, Mapping | list | tuple):
        return None
    return column_names(dataset)


def class_names_of(dataset: Any, column: Any) -> list[str] | None:
    """The names of the classes in a column, as the Dataset's features have them."""
    features = getattr(dataset, "features", None)
    feature = features.get(column) if isinstance(features, Mapping) else None
    names = getattr(feature, "names", None)
    return None if names is None else list(names)


def _are_clients_by_name(dataset: Any) -> bool:
    """True for a dict that has other keys than the names of splits."""
    return isinstance(dataset, Mapping) and not set(dataset) <= set(SPLIT_OF_NAME)


def _partitions(source: Any) -> Any:
    """The partitions of flwr-datasets by client: a list, or a dict by natural ids.

    Args:
        source: a FederatedDataset, or one partitioner
    """
    partitioners = getattr(source, "partitioners", None)
    if partitioners is None:
        count = source.num_partitions
        clients = [{"train": source.load_partition(i)} for i in range(count)]
        return _with_natural_ids(clients, source)
    counts = {split: p.num_partitions for split, p in _sized(source, partitioners)}
    expected = "partitions of the split 'train', as many as of other splits"
    fits = "train" in counts and len(set(counts.values())) == 1
    require(fits, "dataset", expected, counts)
    clients = []
    for i in range(counts["train"]):
        clients.append({split: source.load_partition(i, split) for split in counts})
    return _with_natural_ids(clients, partitioners["train"])


def _sized(source: Any, partitioners: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Each split with its partitioner, which has met its Dataset.

    A partitioner knows its number of partitions after the first of them was loaded.
    """
    for split, partitioner in partitioners.items():
        source.load_partition(0, split)
        yield split, partitioner


def _with_natural_ids(clients: list[Any], partitioner: Any) -> Any:
    """The clients by the ids that their rows have, where the partitioner knows them."""
    ids = getattr(partitioner, "partition_id_to_natural_id", None)
    if not ids:
        return clients
    return {ids[i]: client for i, client in enumerate(clients)}


def _by_split(dataset: Any) -> dict[str, Any]:
    """The Datasets of a DatasetDict by our names of splits; one alone is "train".

    Raises ValueError for other splits, two for one split, and for streams.
    """
    named = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    splits: dict[str, Any] = {}
    for name, part in named.items():
        expected = f"the splits {', '.join(SPLIT_OF_NAME)}, each once"
        split = SPLIT_OF_NAME.get(str(name))
        fits = split is not None and split not in splits
        remedy = "" if fits else "; give a dict of those that are meant"
        require(fits, "dataset", f"{expected}{remedy}", list(named))
        is_table = column_names_of(part) is not None
        is_stream = is_table and not hasattr(part, "__len__")
        require(not is_stream, "dataset", NO_STREAM, Words(type(part).__name__))
        expected = "a Dataset with named columns, a dict of its splits, or a list"
        require(is_table, "dataset", expected, type(part))
        splits[str(split)] = part
    require("train" in splits, "dataset", "a split 'train'", list(named))
    return splits


def _read_clients(
    clients: Any, keys: SampleKeys
) -> tuple[dict[Any, Entry] | list[Entry], list[str] | None]:
    """The samples of clients whose data are given apart, and the classes' names."""
    entries: dict[Any, Entry] = {}
    class_names = None
    has_names = isinstance(clients, Mapping)
    for i, client in clients.items() if has_names else enumerate(clients):
        entries[i] = {}
        for split, part in _by_split(client).items():
            entries[i][split] = read_by_keys(part, keys, f"client {i} ({split})")
            class_names = class_names or class_names_of(part, keys.y)
    return (entries if has_names else list(entries.values())), class_names


def _read_rows(
    splits: Mapping[str, Any], by: str, keys: SampleKeys
) -> dict[Any, Entry]:
    """The samples of each client, of Datasets whose column `by` names the clients."""
    entries: dict[Any, Entry] = {}
    for split in [split for split in SPLITS if split in splits]:
        table = splits[split]
        ids = _client_ids(table, by, split)
        x, y = read_by_keys(table, keys, split)
        names, begins = np.unique(np.sort(ids), return_index=True)
        order = np.argsort(ids, kind="stable")
        x = _take(x, order)
        y = _take(y, order)
        ends = [*begins[1:], len(ids)]
        for client, begin, end in zip(names.tolist(), begins, ends, strict=True):
            rows = slice(begin, end)
            part = (_take(x, rows), _take(y, rows))
            entries.setdefault(client, {})[split] = part
    names_of_clients = class_names_of(splits["train"], by)
    if names_of_clients is not None:
        return {names_of_clients[i]: entries[i] for i in sorted(entries)}
    return dict(sorted(entries.items()))


def _client_ids(table: Any, by: str, split: str) -> Any:
    """The column `by` [n] of a Dataset: whole numbers or strings.

    Raises ValueError where it is missing or holds something else.
    """
    columns = column_names_of(table) or []
    expected = f"one of the columns {columns} of {split}"
    require(by in columns, "by", expected, by, [str(name) for name in columns])
    ids = np.asarray(read_table(table, [by], split)[by])
    fits = ids.ndim == 1 and ids.dtype.kind in "iuU"
    require(fits, "by", f"a whole number or a string for each row of {split}", ids)
    return ids


def _take(values: Any, rows: Any) -> Any:
    """The rows of an array, or of each of a dict of arrays.

    Args:
        values: arrays or tensors [n, ...]
        rows: positions of rows, or a slice
    """
    if isinstance(values, Mapping):
        return {key: value[rows] for key, value in values.items()}
    return values[rows]
