"""Mixing weights in the reports of rounds.

Symbols: N clients; M models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import require

Facts = Mapping[str, Any]
# The most numbers of a matrix of mixing weights where no header has the number of
# clients.
MAX_MATRIX_NUMBERS = 10**8


def dense_weights(report: Facts, n: int | None) -> Tensor:
    """The mixing weights of a report, `[N]` or `[M, N]`.

    A sparse report has the weights of some clients as `weight`, and the clients' ids as
    `index`. The other clients have weight 0.

    Args:
        n: The number of clients; None where the header is lost.
    """
    if not _has_sparse_weights(report):
        return _tensor(report["weights"])
    weight = _tensor(report["weight"])
    index = _tensor(report["index"]).long()
    # Without "rows" there is a row of weights for each client.
    rows = _tensor(report.get("rows", range(len(weight)))).long()
    if n is None:
        # An id in a damaged line must not make a matrix that fills the memory.
        n = min_num_clients(report)
        fits = n ** min(2, index.ndim) <= MAX_MATRIX_NUMBERS
        words = f"numbers whose matrix has up to {MAX_MATRIX_NUMBERS:,} entries"
        require(fits, "report.index", words, n)
    if index.ndim < 2:
        return weight.new_zeros(n).index_copy_(0, index, weight)
    entries = rows[:, None].expand_as(index), index
    return weight.new_zeros(n, n).index_put_(entries, weight, accumulate=True)


def min_num_clients(report: Facts) -> int:
    """The smallest number of clients that fits a report's mixing weights."""
    if not _has_sparse_weights(report):
        return 0
    last_row = torch.tensor([len(report["weight"]) - 1.0])
    index = _tensor(report["index"]).flatten()
    rows = _tensor(report.get("rows", [])).flatten()
    return int(torch.cat([index, rows, last_row]).max()) + 1


def has_weights(line: Facts) -> bool:
    """True where a round reports mixing weights."""
    report = line.get("report") or {}
    key = "weight" if _has_sparse_weights(report) else "weights"
    weights: Any = report.get(key)
    return _is_array(weights) and len(weights) > 0


def _has_sparse_weights(report: Facts) -> bool:
    """True where a report has the weights of some clients only."""
    return all(_is_array(report.get(key)) for key in ("index", "weight"))


def _is_array(value: Any) -> bool:
    """True for a list, and for a tensor that has a length."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _tensor(value: Any) -> Tensor:
    """A line's numbers as a float64 tensor, where None becomes NaN."""
    return torch.as_tensor(np.asarray(value, dtype=np.float64))
