"""Tables with named columns, of whatever package: data frames, Arrow tables, Hugging
Face Datasets.

Two things are asked of one: the names of its columns, and a column by its name that
numpy reads.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pflcore.check import reject, require

Array = NDArray[Any]


def column_names(table: Any) -> list[Any] | None:
    """The names of a table's columns; None where a value has none. ValueError for
    tables by split."""
    # Arrow's `columns` are the columns themselves
    names = getattr(table, "column_names", None)
    names = getattr(table, "columns", None) if names is None else names
    if names is None:
        return None
    splits = isinstance(table, Mapping) or isinstance(names, Mapping)
    require(not splits, "x", "one table, as x['train'] is", names)
    return list(names)


def read_columns(
    table: Any, names: list[Any], y: str, client: str
) -> tuple[Array, Array, Array]:
    """The inputs x, [n, D] of the columns that are neither targets nor ids or [n, ...]
    of a single column of arrays, the targets, and whose each row is."""
    require(
        {y, client} < set(names),
        "y and client",
        f"two of the columns {names}",
        [y, client],
    )
    by_name = {n: _read_column(table, n) for n in names if n not in (y, client)}
    features = list(by_name.values())
    kinds = {n: str(a.dtype) for n, a in by_name.items()}
    numbers = all(a.dtype.kind in "fiub" for a in features)
    require(numbers, "x", f"columns of numbers beside {y} and {client}", kinds)
    if len(features) == 1 and features[0].ndim > 1:
        return features[0], _read_column(table, y), _read_column(table, client)
    shapes = [a.shape for a in features]
    flat = all(len(shape) == 1 for shape in shapes)
    require(
        flat,
        "x",
        "one number a row in each column, or a single column of arrays",
        shapes,
    )
    narrow = all(a.dtype == np.float32 for a in features)
    x = np.stack([a.astype(np.float32 if narrow else np.float64) for a in features], 1)
    return x, _read_column(table, y), _read_column(table, client)


def _read_column(table: Any, name: Any) -> Array:
    """A column as an array [n, ...]; what has the type of an object is read value by
    value."""
    try:
        column = table[name]
        column = column.to_numpy() if hasattr(column, "to_numpy") else column
        if not isinstance(column, list):
            a = np.asarray(column)
            if a.dtype != object:
                return a
            column = a.tolist()
        # numpy would make the word "nan" of a value that is missing among words
        mixed = len({isinstance(v, str) for v in column}) > 1
        return np.array(column, dtype=object) if mixed else np.asarray(column)
    except Exception as e:  # each library raises kinds of its own
        arrays = (
            "a table whose columns numpy reads; give arrays, from_table(x, y, client)"
        )
        reject("x", f"{arrays} (column {name!r}: {type(e).__name__})", type(table))
