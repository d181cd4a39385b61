"""Trimmed means: the mean of each column without its least and largest numbers.

The median of each column is the trimmed mean that leaves the one or two numbers in the
middle. The kernels read the rows once and sort all columns by one sorting network.

Symbols: N rows; P columns; f numbers that are left out at either end of a column.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pflcore.check import reject

from ._check import check_matrix, is_int
from ._library import call_op, define, in_forward_ad, lib, warn_of_references

# Columns that the reference sorts together, so that their block stays in a CPU's cache.
SORT_BLOCK_COLUMNS = 1 << 14
# Numbers that are summed before their sum is added to the total.
SUM_CHUNK = 16


def trimmed_mean(
    rows: Tensor,  # [N, P]
    removed: int,
) -> Tensor:  # [P]
    """The mean of each column without its `removed` least and largest numbers.

    With `removed = (N - 1) // 2` it is the median: the number in the middle, or the
    mean of the two in the middle where N is even. Yin et al. 2018, Definitions 1 and 2.

    - A column with a NaN gives NaN. Infinities are numbers like others: those that are
      left out do not matter.
    - Sums are float64 for float64 rows and float32 otherwise. They begin with the least
      number; each 16 numbers are added up before their sum is added to the total.
    - The gradient goes to the rows whose numbers were averaged. Of equal numbers, that
      of the earlier row counts as smaller.

    Raises TypeError for a wrong type or dtype, and ValueError where `removed` leaves no
    number.

    Args:
        rows: Rows in float32, float64, float16 or bfloat16, with any row stride.
        removed: f, the count of numbers that are left out at either end of a column.

    Returns:
        The means in the dtype of `rows`.
    """
    op = "trimmed_mean"
    check_matrix(op, "rows", rows, "[N, P]")
    if type(removed) is not int and not is_int(removed):
        reject(f"{op}(removed)", "a whole number", removed, error=TypeError)
    n = rows.shape[0]
    if n == 0:
        reject(f"{op}(rows)", "at least one row", rows)
    if not 0 <= removed < (n + 1) // 2:
        expected = f"0 to {(n - 1) // 2}, so that a number of {n} rows is left"
        reject(f"{op}(removed)", expected, removed)
    if not isinstance(removed, int | torch.SymInt):
        removed = int(removed)  # numpy's whole numbers are none for torch
    warn_of_references()
    if in_forward_ad():
        return reference(rows, removed)
    return call_op(_op, rows, removed)


def sorting_network(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of positions that, put in order one by one, sort n numbers.

    This is Batcher's odd-even merge sort (1968).
    """
    p = k = 1
    while p < n:
        for j in range(k % p, n - k, 2 * k):
            for i in range(j, min(j + k, n - k)):
                if i // (2 * p) == (i + k) // (2 * p):
                    yield i, i + k
        k //= 2
        if not k:
            p = k = 2 * p


def sort_columns(rows: Tensor) -> list[Tensor]:
    """The rows [N, P] with each column sorted; one with a NaN becomes NaN.

    For few rows, `torch.sort` takes four times as long.
    """
    ordered = list(rows)
    for i, j in sorting_network(len(ordered)):
        low = torch.minimum(ordered[i], ordered[j])
        high = torch.maximum(ordered[i], ordered[j])
        ordered[i] = low
        ordered[j] = high
    return ordered


def reference(
    rows: Tensor,  # [N, P]
    removed: int,
) -> Tensor:  # [P]
    """The mean without the least and largest numbers: the specification of the op."""
    n, p = rows.shape
    width = SORT_BLOCK_COLUMNS if rows.device.type == "cpu" else max(1, p)
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    means = []
    for block in rows.split(width, 1):
        inner = torch.stack(sort_columns(block)[removed : n - removed]).to(wide)
        total = inner.new_zeros(inner.shape[1])
        for chunk in inner.split(SUM_CHUNK):
            chunk_sum = torch.zeros_like(total)
            for row in chunk:
                chunk_sum = chunk_sum + row
            total = total + chunk_sum
        # A tensor: on a GPU torch multiplies by the reciprocal of a number.
        count = total.new_full((), n - 2 * removed)
        means.append((total / count).to(rows.dtype))
    return torch.cat(means)


def _fake(
    rows: Tensor,  # [N, P]
    removed: int,
) -> Tensor:  # [P]
    """The shape and dtype of the result."""
    return rows.new_empty(rows.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves what the backward pass needs."""
    rows, ctx.removed = inputs
    ctx.save_for_backward(rows)


def _backward(
    ctx: Any,
    grad: Tensor,  # [P]
) -> tuple[Tensor | None, ...]:
    """The gradient of the rows: equal parts for the numbers that were averaged."""
    (rows,) = ctx.saved_tensors
    n = rows.shape[0]
    # The place of each number in the order of its column, [N, P].
    place = rows.argsort(dim=0, stable=True).argsort(dim=0)
    averaged = (place >= ctx.removed) & (place < n - ctx.removed)
    return torch.where(averaged, grad / (n - 2 * ctx.removed), 0.0), None


_op = define("trimmed_mean(Tensor rows, int removed) -> Tensor", reference, _fake)
torch.library.register_autograd(
    "pflcore::trimmed_mean", _backward, setup_context=_setup, lib=lib
)
