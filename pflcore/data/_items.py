"""Samples with named parts: dicts, tuples of several values, and rows of a table.

`SampleKeys` says which part of a sample is its input, and which is its target. A part
has a name in a dict and in a table, and a position in a tuple. Tables are read some
rows at a time, as a Hugging Face Dataset decodes the rows that it is asked for.

Symbols: n samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Words, reject, require
from pflcore.data._frames import column_names
from pflcore.data._images import is_picture, picture_tensor
from pflcore.data._inputs import INPUT_HINT, check_dataset, stack_values

SampleKey = str | int
NO_STREAM = "a Dataset of known length (load it without streaming)"
ROWS_AT_ONCE = 1000  # rows of a table that are decoded at once


class SampleKeys(NamedTuple):
    """The parts of a sample that are its input and its target.

    Attributes:
        x: name or position of the input; of several, the input is a dict of them
        y: name or position of the target
    """

    x: SampleKey | Sequence[SampleKey]
    y: SampleKey

    @property
    def inputs(self) -> list[SampleKey]:
        """The names or positions of all parts of the input."""
        return [self.x] if isinstance(self.x, str | int) else list(self.x)


def keys_of(x: Any, y: Any) -> SampleKeys | None:
    """The keys that a caller gave, or None without any.

    Raises ValueError where only one of the two was given.
    """
    if x is None and y is None:
        return None
    require(x is not None, "x", "the name of the inputs, as y has one", x)
    require(y is not None, "y", "the name of the targets, as x has one", y)
    return SampleKeys(x, y)


def read_by_keys(samples: Any, keys: SampleKeys, name: str) -> tuple[Any, Any]:
    """The inputs x [n, ...], or a dict of them, and the targets y [n, ...].

    Raises ValueError where a sample has no part of such a name.

    Args:
        samples: a dict of arrays, a table, or a Dataset or list of samples
        keys: the parts of each sample
        name: name of the samples in errors
    """
    wanted = [*keys.inputs, keys.y]
    if isinstance(samples, Mapping):
        _check_keys(samples, wanted, name)
        parts = {key: samples[key] for key in wanted}
    elif column_names(samples) is not None:
        has_length = hasattr(samples, "__len__")
        require(has_length, name, NO_STREAM, Words(type(samples).__name__))
        parts = read_table(samples, wanted, name)
    else:
        is_pair = isinstance(samples, tuple) and all(
            hasattr(part, "shape") for part in samples
        )
        expected = (
            "samples with the parts that x= and y= name (leave them out for a pair)"
        )
        require(not is_pair, name, expected, Words("arrays in a tuple"))
        parts = _read_items(samples, wanted, name)
    y = parts[keys.y]
    if isinstance(keys.x, str | int):
        return parts[keys.x], y
    return {str(key): parts[key] for key in keys.inputs}, y


def read_table(table: Any, wanted: Sequence[SampleKey], name: str) -> dict[Any, Any]:
    """The columns `wanted` of a table, each as a tensor or an array [n, ...].

    Raises ValueError where one is missing, or is not of one shape.
    """
    columns = column_names(table) or []
    table = _without_other_columns(table, wanted)
    chunks: dict[Any, list[Any]] = {key: [] for key in wanted}
    for begin in range(0, max(len(table), 1), ROWS_AT_ONCE):
        rows = table[begin : begin + ROWS_AT_ONCE]
        # Functions that Hugging Face applies to rows may have made other columns.
        has_names = isinstance(rows, Mapping)
        _check_keys(rows if has_names else dict.fromkeys(columns), wanted, name)
        for key in chunks:
            place = f"column {key!r} of {name}"
            chunks[key].append(_stack_column(rows[key], place))
    return {
        key: _join(parts, f"column {key!r} of {name}") for key, parts in chunks.items()
    }


def _without_other_columns(table: Any, wanted: Sequence[SampleKey]) -> Any:
    """A Hugging Face Dataset with the columns `wanted` alone; other tables as they are.

    A Dataset need not decode pictures that nobody reads. One that applies a function to
    its rows keeps its columns, as the function may need them.
    """
    select = getattr(table, "select_columns", None)
    style = getattr(table, "format", None)
    is_plain = isinstance(style, Mapping) and style.get("type") != "custom"
    if select is None or not is_plain or not set(wanted) <= set(table.column_names):
        return table
    return select(list(dict.fromkeys(wanted)))


def _stack_column(column: Any, name: str) -> Any:
    """Some rows of a column as a tensor or an array [n, ...].

    Raises ValueError where rows differ in shape.
    """
    if hasattr(column, "to_numpy"):
        column = column.to_numpy()
    if isinstance(column, Tensor):
        return column
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column
    return _stack(list(column), name)


def _stack(values: list[Any], name: str) -> Any:
    """Values as a tensor or an array [n, ...]; words as an array of them."""
    if not values:
        return torch.empty(0)
    if all(isinstance(value, str) for value in values):
        return np.asarray(values)
    if is_picture(values[0]):
        values = [picture_tensor(value) for value in values]
    try:
        return stack_values(values)
    except (RuntimeError, TypeError, ValueError, KeyError):
        reject(name, INPUT_HINT, values[0])


def _join(parts: list[Any], name: str) -> Any:
    """The rows of all parts.

    Raises ValueError where parts differ in shape.
    """
    try:
        if all(isinstance(part, Tensor) for part in parts):
            return torch.cat(parts)
        return np.concatenate([np.asarray(part) for part in parts])
    except (RuntimeError, TypeError, ValueError):
        shapes = sorted({str(list(part.shape[1:])) for part in parts})
        reject(name, "rows of one shape", shapes)


def _read_items(dataset: Any, wanted: Sequence[SampleKey], name: str) -> dict[Any, Any]:
    """The parts `wanted` of all samples of a Dataset or a list, each read once."""
    check_dataset(dataset, name)
    values: dict[Any, list[Any]] = {key: [] for key in wanted}
    for k in range(len(dataset)):
        item = dataset[k]
        _check_keys(item, wanted, name)
        for key in values:
            values[key].append(item[key])
    return {key: _stack(parts, f"{key!r} of {name}") for key, parts in values.items()}


def _check_keys(sample: Any, wanted: Sequence[SampleKey], name: str) -> None:
    """Raises ValueError where a sample, or a dict of columns, lacks a part."""
    expected = "samples with parts that x and y name: dicts, tuples, or a table"
    has_parts = isinstance(sample, Mapping | tuple | list)
    require(has_parts, name, expected, sample)
    known = list(sample if isinstance(sample, Mapping) else range(len(sample)))
    names = [key for key in known if isinstance(key, str)]
    for key in wanted:
        expected = f"x and y to be among the parts of a sample, {known}"
        require(key in known, name, expected, key, names)
