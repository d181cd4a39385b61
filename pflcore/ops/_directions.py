"""Cosines of rows, and how long rows are beside each other, at any length.

`(|a|^2 + |b|^2 - |a - b|^2) / 2` is an inner product, too. But where one row is R times
as long as the other, its error is R times that of a distance, and from R = 1e15 on it
is rounding alone. Here rows are first divided by their lengths, so nothing cancels, and
no square overflows or vanishes.

Symbols: M rows of `a`, N rows of `b`, P columns of both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._sqdist import pairwise_sqdist

# Columns that are handled together, so that no float64 copy of all rows is made. The
# number is fixed, because the sums' last bits depend on it.
BLOCK_COLUMNS = 1 << 15


def cosine_matrix(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]; None: b = a
    origin: Tensor | None = None,  # [P]; None: zero
) -> Tensor:  # [M, N] float64
    """Cosines of the angles between rows of `a` and rows of `b`, seen from `origin`.

    They are inner products in float64 of the rows, divided by their lengths: `1 - |u -
    v|^2 / 2` for rows u and v of length 1, which is exact near 1, too. The error is
    about 1e-15, whatever the lengths are. A row of zeros has a cosine of 0 with every
    row. Without `b` the matrix is symmetric.

    Args:
        a: Rows of finite numbers.
        b: Rows of the same dtype and length; None for those of `a`.
        origin: The point that is subtracted from every row, in float64.
    """
    scales_a = scales_b = _scales(a, origin)
    if b is not None:
        scales_b = _scales(b, origin)
    sqdist = torch.zeros(
        len(scales_a[0]), len(scales_b[0]), dtype=torch.float64, device=a.device
    )
    for columns in _column_blocks(a):
        unit_a = _unit_block(a, origin, columns, scales_a)
        unit_b = None if b is None else _unit_block(b, origin, columns, scales_b)
        sqdist += pairwise_sqdist(unit_a, unit_b)
    cosine = (1 - sqdist / 2).clamp(-1, 1)
    have_lengths = (scales_a[1] > 0)[:, None] & (scales_b[1] > 0)
    return torch.where(have_lengths, cosine, 0.0)


def unit_rows(rows: Tensor) -> Tensor:
    """The rows [M, P] divided by their lengths, float64; rows of zeros stay."""
    return _unit_block(rows, None, slice(None), _scales(rows, None))


def row_lengths(rows: Tensor, origin: Tensor | None = None) -> Tensor:
    """The lengths of the rows [M, P], seen from `origin` [P]: [M] float64.

    A length is infinite only where it is above float64's largest number.
    """
    largest, length = _scales(rows, origin)
    return largest * length


def length_ratios(rows: Tensor, row: int) -> Tensor:
    """The length of one row over that of each of `rows` [M, P]: [M] float64.

    A row of zeros counts as one of the least positive length. The ratios are 0 where
    the one row is zeros.
    """
    largest, length = _scales(rows, None)
    # Each quotient is taken by itself, because a length may overflow.
    least = torch.finfo(torch.float64).tiny
    of_largest = largest[row] / largest.clamp(min=least)
    return of_largest * (length[row] / length.clamp(min=1.0))


def _scales(
    rows: Tensor,  # [M, P]
    origin: Tensor | None,  # [P]
) -> tuple[Tensor, Tensor]:  # [M], [M] float64
    """The largest number of each row, and the row's length in units of it.

    The length is at least 1; both are 0 for a row of zeros.
    """
    largest = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for columns in _column_blocks(rows):
        block = _block(rows, origin, columns)
        largest = torch.maximum(largest, block.abs().amax(1))
    square = torch.zeros_like(largest)
    for columns in _column_blocks(rows):
        scaled = _divide(_block(rows, origin, columns), largest)
        square += pairwise_sqdist(scaled, torch.zeros_like(scaled[:1]))[:, 0]
    return largest, square.sqrt()


def _column_blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of `BLOCK_COLUMNS` columns, from the first to the last."""
    for first in range(0, rows.shape[1], BLOCK_COLUMNS):
        yield slice(first, first + BLOCK_COLUMNS)


def _block(
    rows: Tensor,  # [M, P]
    origin: Tensor | None,  # [P]
    columns: slice,
) -> Tensor:  # [M, p] float64
    """Columns of the rows, less the origin."""
    block = rows[:, columns].double()
    return block if origin is None else block - origin[columns].double()


def _unit_block(
    rows: Tensor,  # [M, P]
    origin: Tensor | None,  # [P]
    columns: slice,
    scales: tuple[Tensor, Tensor],  # of `_scales`
) -> Tensor:  # [M, p] float64
    """Columns of the rows, divided by the rows' lengths."""
    largest, length = scales
    return _divide(_divide(_block(rows, origin, columns), largest), length)


def _divide(rows: Tensor, divisor: Tensor) -> Tensor:
    """Rows [M, p] over a number each [M]; rows of zeros, whose number is 0, stay."""
    return rows / torch.where(divisor > 0, divisor, 1.0)[:, None]
