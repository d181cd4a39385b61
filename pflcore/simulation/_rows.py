"""Rows of the clients of a cohort, as one value.

Symbols: S clients of the cohort, s of them at some positions; b numbers of batch norm's
running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import SharedRows, Tensors


class CohortRows(NamedTuple):
    """The rows of a cohort's clients, in the order of the cohort's ids.

    Before the training they are what each client keeps; after it, also what the client
    uploads.

    Attributes:
        client_states: The clients' own state.
        buffers: The clients' running statistics of batch norm.
        up: The uploads.
        loss: The mean of each client's losses over its minibatches; None where it is
            not known, as before the training.
    """

    client_states: Tensors  # [S, ...]
    buffers: Tensor  # [S, b]
    up: Tensors = {}  # noqa: RUF012 (nothing changes it)
    loss: Tensor | None = None  # [S]


def map_rows(function: Callable[[Any], Any], rows: Any) -> Any:
    """The rows with `function` applied to each tensor.

    Args:
        function: A function of a tensor, or of what stands in its place.
        rows: A tensor, a dict of tensors, or `CohortRows`; None stays None.
    """
    if rows is None:
        return None
    if isinstance(rows, CohortRows):
        return CohortRows(*(map_rows(function, value) for value in rows))
    if isinstance(rows, dict):
        return {name: function(value) for name, value in rows.items()}
    return function(rows)


def take_rows(rows: Any, positions: Tensor) -> Any:
    """The rows at `positions`, int64 [s], of what `map_rows` takes.

    `SharedRows` may stand in place of a tensor. A row that all clients share stays one
    row. Where all rows are taken, nothing is copied.
    """
    return map_rows(partial(_rows_at, positions), rows)


def _rows_at(positions: Tensor, rows: Any) -> Any:
    """The rows [s, ...] of a tensor [S, ...], or of `SharedRows`."""
    if isinstance(rows, SharedRows):
        return rows._replace(index=_rows_at(positions, rows.index))
    if len(positions) == len(rows):
        return rows
    if rows.stride(0) == 0:
        return rows[:1].expand(len(positions), *rows.shape[1:])
    return rows[to_device(positions, rows.device)]
