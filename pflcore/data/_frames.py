"""Tables with named columns: data frames, Arrow tables, Hugging Face Datasets.

Their packages are not imported. A table must have names for its columns, and must give
a column by its name, which numpy then reads.

Symbols: a table has n rows, one per sample, and D columns of features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pflcore.check import reject, require

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
