"""Tables with named columns: data frames, Arrow tables, Hugging Face Datasets.

Their packages are not imported. A table must have names for its columns, and must give
a column by its name, which numpy then reads. Names are strings: the numbers that a data
frame without names has for its columns say nothing but their order.

Symbols: a table has n rows, one per sample, and D columns of features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pflcore.check import Words, reject, require

Array = NDArray[Any]


def column_names(table: Any) -> list[Any] | None:
    """The names of a table's columns; None where a value has none.

    Raises ValueError for a dict of tables by split.
    """
    # `columns` comes second: of an Arrow table these are no names, but the columns.
    names = getattr(table, "column_names", None)
    if names is None:
        names = getattr(table, "columns", None)
    if names is None:
        return None
    has_splits = isinstance(table, Mapping) or isinstance(names, Mapping)
    require(not has_splits, "x", "one table, as x['train'] is", names)
    return list(names)


def text_names(table: Any) -> tuple[str, ...] | None:
    """The names of a table's columns, where each is a string that it has alone."""
    if isinstance(table, Mapping):
        return None
    names = column_names(table)
    if not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) if len(set(names)) == len(names) else None


def feature_names(table: Any, others: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the columns of features, or None where they have no names.

    Args:
        others: names of the columns that are no features
    """
    names = text_names(table)
    if names is None:
        return None
    return tuple(name for name in names if name not in others)


def order_of(names: Sequence[str], wanted: Sequence[str], holder: str) -> list[int]:
    """The positions in `names` of the columns `wanted`.

    Raises ValueError where one is missing, or where there are others.

    Args:
        names: the columns that a table has
        wanted: the columns in the order in which they are needed
        holder: name of the table in errors
    """
    missing = [name for name in wanted if name not in names]
    others = [name for name in names if name not in wanted]
    expected = f"the columns {list(wanted)}, as other samples have"
    require(not missing and not others, holder, expected, list(names))
    return [names.index(name) for name in wanted]


def select_columns(table: Any, wanted: Sequence[str], name: str) -> Array:
    """The columns `wanted` of a table or a dict, in this order, as floats [n, D].

    Other columns of the table are ignored. Raises ValueError where one is missing, or
    is not of numbers.

    Args:
        table: a table, or a dict of columns
        wanted: the names of the columns
        name: name of the table in errors
    """
    names = list(table) if isinstance(table, Mapping) else column_names(table) or []
    missing = [column for column in wanted if column not in names]
    if missing:
        expected = f"the columns {', '.join(wanted)}"
        got = Words(f"a table without {', '.join(map(repr, missing))}")
        reject(name, expected, got)
    columns = [_read_column(table, column) for column in wanted]
    for column, values in zip(wanted, columns, strict=True):
        is_number = values.dtype.kind in "fiub"
        require(is_number, f"{name}[{column!r}]", "a column of numbers", values)
    return _stack_columns(columns)


def read_columns(
    table: Any, names: list[Any], y: str, client: str
) -> tuple[Array, Array, Array]:  # x [n, D] or [n, ...], y [n], client [n]
    """The inputs x, the targets, and the samples' clients.

    The inputs are all other columns side by side, or a single column of arrays. Raises
    ValueError where a column is missing, or where one of the inputs is not of numbers.

    Args:
        names: the names of the table's columns
        y: the name of the column of targets
        client: the name of the column of clients' ids
    """
    has_both = {y, client} < set(names)
    require(has_both, "y and client", f"two of the columns {names}", [y, client])
    inputs = {k: _read_column(table, k) for k in names if k not in (y, client)}
    columns = list(inputs.values())
    are_numbers = all(column.dtype.kind in "fiub" for column in columns)
    expected = f"columns of numbers beside {y} and {client}"
    dtypes = {name: str(column.dtype) for name, column in inputs.items()}
    require(are_numbers, "x", expected, dtypes)
    if len(columns) == 1 and columns[0].ndim > 1:
        x = columns[0]
    else:
        x = _stack_columns(columns)
    return x, _read_column(table, y), _read_column(table, client)


def _stack_columns(columns: list[Array]) -> Array:
    """The columns [n] side by side, [n, D]: float32 if all are, else float64.

    Raises ValueError where one column of several has arrays.
    """
    shapes = [column.shape for column in columns]
    are_flat = all(len(shape) == 1 for shape in shapes)
    expected = "one number a row in each column, or a single column of arrays"
    require(are_flat, "x", expected, shapes)
    are_float32 = all(column.dtype == np.float32 for column in columns)
    dtype = np.float32 if are_float32 else np.float64
    return np.stack([column.astype(dtype) for column in columns], 1)


def _read_column(table: Any, name: Any) -> Array:
    """A column as an array [n, ...].

    Raises ValueError where numpy cannot read it.
    """
    try:
        column = table[name]
        if hasattr(column, "to_numpy"):
            column = column.to_numpy()
        if not isinstance(column, list):
            array = np.asarray(column)
            if array.dtype != object:
                return array
            column = array.tolist()
        # Words with a missing value stay objects: numpy would make it the word "nan".
        are_mixed = len({isinstance(value, str) for value in column}) > 1
        return np.array(column, dtype=object) if are_mixed else np.asarray(column)
    except Exception as error:  # Each package raises exceptions of its own.
        expected = (
            "a table whose columns numpy reads; give arrays, from_table(x, y, client) "
            f"(column {name!r}: {type(error).__name__})"
        )
        reject("x", expected, type(table))
