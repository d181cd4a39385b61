"""Squared distances between rows: subtract, then square, then sum in float64.

Symbols: M rows of `a`, N rows of `b`, P columns of both, L pairs listed for each row
of `a`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore.check import reject

from ._check import check_index, check_matrix, check_same_kind, is_readable
from ._library import define, in_forward_ad, lib, save_inputs, warn_of_references
from ._sums import scatter_add

OP = "pairwise_sqdist"
FOLD_COLUMNS = 1 << 12  # columns that the reference sums at a time


def pairwise_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]; None: b = a
    index: Tensor | None = None,  # [M, L] int64
) -> Tensor:  # [M, N] float64, or [M, L] with index
    """Squared Euclidean distances `sum((a_i - b_j)^2)` between the rows of `a` and `b`.

    Rows are float32, float64, float16 or bfloat16, with any row stride. Rows are
    subtracted before they are squared, so the relative error is at most 1e-6 against
    float64 on the same inputs: for models that differ by little, for constant rows, for
    P up to 1e8, and for scales from 1e-30 to 1e30 (float64 rows: where the squares fit
    float64).

    Without `b` the result is symmetric and its diagonal is exactly 0. A row with NaN
    makes its own distances NaN, and no others. The result depends neither on the number
    of threads nor on the order of the rows, to the last bit.

    With `index`, entry (m, l) is the distance between a_m and b_index[m, l] alone. A
    negative index is padding, which is infinitely far.

    Which bits a pair has:
    - On a CPU, and in the reference, they depend on its two rows alone. A part of a
      matrix and a listed pair have the bits of the whole matrix.
    - On a GPU they also depend on M and N.
    - A GPU whose tensor cores have float64 at speed (A100, H100, H200, B200) uses them
      for matrices of more than 20 float32 rows. There a pair's last bits depend on the
      other rows too, and a listed pair is within 1e-6 of its place in the matrix.

    An index of N or more raises ValueError on a CPU, and gives NaN on a GPU.

    The op is differentiable in `a` and `b`; forward mode runs plain torch operations in
    float64. A pair that takes no part in a loss adds nothing to a gradient, even where
    a row is NaN. The gradient of the root `.sqrt()` is NaN where a distance is 0, as
    torch's is: mask the zeros before the root, or take the gradient of the squares.
    """
    check_sqdist(a, b, index)
    warn_of_references()
    if in_forward_ad() and len(a):
        return _plain_sqdist(a, a if b is None else b, index)
    return _op(a, b, index)


def check_sqdist(a: Any, b: Any, index: Any) -> None:
    """Raises ValueError or TypeError for arguments that the op does not accept."""
    check_matrix(OP, "a", a, "[M, P]")
    if b is not None:
        check_matrix(OP, "b", b, "[N, P]")
        check_same_kind(OP, "a", a, "b", b)
        if b.shape[1] != a.shape[1]:
            reject(f"{OP}(b)", f"P = {a.shape[1]} columns like a", b)
    if index is not None:
        _check_pairs(a, a if b is None else b, index)


def _check_pairs(a: Tensor, b: Tensor, index: Any) -> None:
    check_index(OP, "a", a, "index", index)
    if index.dim() != 2 or len(index) != len(a):
        reject(f"{OP}(index)", f"[{len(a)}, L], a list for each row of a", index)
    if not is_readable(index) or index.numel() == 0:
        return
    largest = int(index.max())
    if largest >= len(b):
        expected = f"numbers below {len(b)}, the number of rows"
        remedy = "use a negative number for padding"
        reject(f"{OP}(index)", expected, largest, remedy=remedy)


def _plain_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor,  # [N, P]
    index: Tensor | None,  # [M, L]
) -> Tensor:  # [M, N] float64, or [M, L]
    """Distances by plain torch operations, which support forward mode."""
    b = b.double()
    distances = []
    for i, row in enumerate(a.double()):
        rows = b if index is None else b[index[i].clamp(min=0)]
        distances.append((rows - row).square().sum(1))
    out = torch.stack(distances)
    return out if index is None else torch.where(index < 0, math.inf, out)


# the reference ----------------------------------------------------------------


def reference(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]
    index: Tensor | None = None,  # [M, L]
) -> Tensor:  # [M, N] float64, or [M, L]
    """Squared distances of rows, all in float64: the specification of the op."""
    if index is None:
        return _all_pairs(a, b)
    return _listed_pairs(a, b, index)


def _all_pairs(a: Tensor, b: Tensor | None) -> Tensor:
    symmetric = b is None
    other = a if b is None else b
    out = torch.zeros(len(a), len(other), dtype=torch.float64, device=a.device)
    for i in range(len(a)):
        # Without b only the upper triangle is computed; the diagonal stays 0.
        first = i + 1 if symmetric else 0
        for columns in _column_blocks(a.shape[1]):
            out[i, first:] += _sum_of_squares(other[first:, columns], a[i, columns])
    return out + out.T if symmetric else out


def _listed_pairs(a: Tensor, b: Tensor | None, index: Tensor) -> Tensor:
    other = a if b is None else b
    index = index.contiguous()  # `torch.where` would copy its strides into the result
    valid = index.clamp(min=0)
    # Without a row of b every entry is padding, and there is nothing to subtract.
    num_columns = a.shape[1] if len(other) else 0
    out = torch.zeros(index.shape, dtype=torch.float64, device=a.device)
    for i in range(len(a)):
        for columns in _column_blocks(num_columns):
            out[i] += _sum_of_squares(other[valid[i], columns], a[i, columns])
    out = torch.where(index < 0, math.inf, out)
    if b is not None:
        return out
    is_diagonal = index == torch.arange(len(a), device=a.device)[:, None]
    return torch.where(is_diagonal, 0.0, out)


def _column_blocks(num_columns: int) -> Iterator[slice]:
    """Slices of `FOLD_COLUMNS` columns, in order."""
    for start in range(0, num_columns, FOLD_COLUMNS):
        yield slice(start, start + FOLD_COLUMNS)


def _sum_of_squares(
    rows: Tensor,  # [n, p]
    row: Tensor,  # [p]
) -> Tensor:  # [n] float64
    """Squared distances of `rows` to `row`, summed in halves.

    The order of the additions depends on the number of columns alone. So the bits of a
    sum depend neither on the threads nor on the other rows.
    """
    square = (rows.double() - row.double()).square()
    width = 1 << (square.shape[1] - 1).bit_length()  # the next power of two
    square = F.pad(square, (0, width - square.shape[1]))
    while width > 1:
        width //= 2
        square = square[:, :width] + square[:, width:]
    return square[:, 0]


# the gradient -----------------------------------------------------------------


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, index = ctx.saved_tensors
    other = a if b is None else b
    is_out_of_range = None  # rows of a, [M, 1]
    if index is not None:
        is_out_of_range = _lists_a_missing_row(grad, index, len(other))
        grad = _to_matrix(grad, index, len(other))
    need_a, need_b = ctx.needs_input_grad[:2]
    if b is None:
        # A pair's gradient acts on both of its rows, which are rows of a here.
        grad = grad + grad.T
        need_a, need_b = True, False
    grad_a = _input_gradient(grad, a, other) if need_a else None
    grad_b = _input_gradient(grad.T, b, a) if need_b else None
    if grad_a is not None and is_out_of_range is not None:
        grad_a = torch.where(is_out_of_range, math.nan, grad_a)
    return grad_a, grad_b, None


def _lists_a_missing_row(
    grad: Tensor,  # [M, L]
    index: Tensor,  # [M, L]
    n: int,
) -> Tensor:  # [M, 1] bool
    """True for a row of `a` with a gradient at an index of `n` or more.

    On a GPU its distance there is NaN, and so its gradient is NaN.
    """
    return ((index >= n) & (grad != 0)).any(1, keepdim=True)


def _to_matrix(
    grad: Tensor,  # [M, L]
    index: Tensor,  # [M, L]
    n: int,
) -> Tensor:  # [M, N]
    """Gradients of listed pairs as a matrix.

    Padding, and an index of `n` or more, adds nothing.
    """
    matrix = grad.new_zeros(len(grad), n)
    if matrix.numel() == 0:
        return matrix
    has_no_row = (index < 0) | (index >= n)
    grad = torch.where(has_no_row, 0.0, grad)
    return scatter_add(matrix, index.clamp(0, n - 1), grad)


def _input_gradient(
    grad: Tensor,  # [M, N] gradient of the squared distances
    a: Tensor,  # [M, P]
    b: Tensor,  # [N, P]
) -> Tensor:  # [M, P]
    """Gradient `2 sum_j grad_ij (a_i - b_j)` with respect to `a`.

    For models that are close its two terms nearly cancel, so they are float64. A matrix
    product would spread a row with NaN or infinity to all others, as 0 * NaN is NaN. So
    such rows count as 0 in the product, and the gradient is NaN only where a pair with
    a gradient contains one.
    """
    finite_a = a.isfinite().all(1)
    finite_b = b.isfinite().all(1)
    x = torch.where(finite_a[:, None], a, 0.0).double()
    y = torch.where(finite_b[:, None], b, 0.0).double()
    is_finite_pair = finite_a[:, None] & finite_b
    becomes_nan = ((grad != 0) & ~is_finite_pair).any(1, keepdim=True)
    gradient = 2 * (grad.sum(1, keepdim=True) * x - grad @ y)
    return torch.where(becomes_nan, math.nan, gradient).to(a.dtype)


# registration -----------------------------------------------------------------


def _fake(a: Tensor, b: Tensor | None, index: Tensor | None = None) -> Tensor:
    other = a if b is None else b
    columns = other.shape[0] if index is None else index.shape[1]
    return a.new_empty(a.shape[0], columns, dtype=torch.float64)


_op = define(
    f"{OP}(Tensor a, Tensor? b, Tensor? index=None) -> Tensor", reference, _fake
)
torch.library.register_autograd(
    f"pflcore::{OP}", _backward, setup_context=save_inputs, lib=lib
)
