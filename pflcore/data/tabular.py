"""One table of samples with a column that says whose each is, to a
:class:`~pflcore.data.federation.Federation`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from pflcore.check import Seed32, checked

from .collect import Classes, Collected, infer, inputs, target
from .ragged import Ragged, starts
from .splits import split_samples


class Tabled(Collected):
    """A federation with its constructors from tables."""

    @classmethod
    @checked
    def from_table(
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        *,
        test_fraction: float = 0.0,
        seed: Seed32 = 0,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Self:
        """All samples in one table: ``x [n, ...]``, ``y [n]``, and whose each is, ``client [n]``:
        whole numbers or strings.

        Arrays or tensors, memory-mapped ones too (with ``dtype=None``, or of that dtype, they stay
        where they are). Or ``x`` is the path of a Parquet or Arrow file, ``y`` and ``client`` name
        two of its columns (default "y", "client"), and the others are the inputs; that needs
        pyarrow. Clients are numbered in the order of their ids, which are in ``truth["client"]``
        where they are numbers. Other options as in :meth:`from_arrays`. A million clients of 20
        samples take seconds.
        """
        if isinstance(x, str | Path):
            x, y, client = _columns(Path(x), y, client)
        if y is None or client is None:
            raise TypeError(
                "from_table needs y and client, one value per sample, or the names of a file's "
                "columns"
            )
        with warnings.catch_warnings():
            # a pool is never written to
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            (xs, fields), ys = inputs(x, "x", dtype), target(y, "y", dtype)
        xs = xs.contiguous()  # a table's columns lie apart in memory, and the kernels read rows
        order, size, ids = _by_client(client, len(xs))
        truth = {"client": torch.from_numpy(ids)} if ids.dtype == np.int64 else {}
        fed = cls(
            xs,
            ys,
            {"train": Ragged(torch.from_numpy(order), starts(torch.from_numpy(size)))},
            infer(classes, ys),
            None,
            name,
            [],
            truth,
            fields,
            tuple(ids.tolist()) if ids.dtype.kind == "U" else None,
        )
        return (
            split_samples(fed, {"train": 1 - test_fraction, "test": test_fraction}, seed)
            if test_fraction
            else fed
        )


def _by_client(client: Any, count: int) -> tuple[Any, Any, Any]:
    """The samples [n] by client, how many each has [N], and the ids [N] in ascending order."""
    ids = np.asarray(client.cpu() if isinstance(client, torch.Tensor) else client)
    if ids.shape != (count,):
        raise ValueError(
            f"client must hold one id per sample ({count:,}), got shape {list(ids.shape)}"
        )
    if ids.dtype == object and all(isinstance(i, str) for i in ids):
        ids = ids.astype(str)
    if ids.dtype.kind == "f":
        odd = ids[~((ids == np.floor(ids)) & (np.abs(ids) < 2**53))]
        if len(odd):
            raise ValueError(
                f"client must hold whole numbers or strings, got {odd[0]}: round the ids, or turn "
                "them into strings"
            )
    elif ids.dtype.kind not in "iuU":
        raise TypeError(
            f"client must hold whole numbers or strings, got {ids.dtype}: turn the ids into strings"
        )
    if ids.dtype.kind == "u" and count and ids.max() >= 2**63:
        raise ValueError(
            f"client must hold whole numbers below 2**63 or strings, got {ids.max()}: turn the ids "
            "into strings"
        )
    ids = ids if ids.dtype.kind == "U" else ids.astype(np.int64)
    order = np.arange(count)
    if (ids[1:] < ids[:-1]).any():
        lowest = ids.min() if ids.dtype.kind == "i" else None
        # one word for both: sorted many times faster
        if lowest is not None and (int(ids.max()) - int(lowest) + 1) * count < 2**63:
            key = (ids - lowest) * count + order
            key.sort()
            order = key % count
        else:
            order = np.argsort(ids, kind="stable")
        ids = ids[order]
    first = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])[:count])
    return order, np.diff(np.append(first, count)), ids[first]


def _columns(path: Path, y: Any, client: Any) -> tuple[Any, Any, Any]:
    """A Parquet or Arrow (Feather) file: two columns by name, and all others as x."""
    y, client = "y" if y is None else y, "client" if client is None else client
    try:
        from pyarrow import ArrowException, feather, parquet
    except ImportError:
        raise ImportError(
            "from_table reads files with pyarrow, which is not installed; get it with: pip install "
            "'pflcore[table]'."
        ) from None
    try:
        table = (parquet if path.suffix in (".parquet", ".pq") else feather).read_table(str(path))
    except (OSError, ArrowException) as e:
        what = (
            "which is not there"
            if not path.exists()
            else f"which is none ({str(e).splitlines()[0]})"
        )
        raise ValueError(
            f"x must be a Parquet (.parquet) or Arrow file, got {path}, {what}"
        ) from None
    for what, column in (("y", y), ("client", client)):
        if column not in table.column_names:
            raise ValueError(
                f"{what} must name one of the columns {', '.join(table.column_names)} of "
                f"{path.name}, got {column!r}"
            )
    # pandas' row numbers are no inputs
    numbers = (table.schema.pandas_metadata or {}).get("index_columns", [])
    others = [
        c
        for c in table.column_names
        if c not in (y, client, *(n for n in numbers if isinstance(n, str)))
    ]
    if not others:
        raise ValueError(
            f"{path.name} must have columns beside {y!r} and {client!r}, got none: what are the "
            "inputs?"
        )
    for c in others:
        kind = table[c].to_numpy().dtype
        if kind.kind not in "fiub":
            raise ValueError(
                f"{path.name} must hold numbers beside {client!r}, got {kind} in the column {c!r}: "
                "encode it, or leave it out"
            )
    x = np.empty(
        (len(table), len(others)),
        np.float32 if all(str(table[c].type) == "float" for c in others) else np.float64,
    )
    for j, c in enumerate(others):
        x[:, j] = table[c].to_numpy()
    return x, table[y].to_numpy(), table[client].to_numpy()
