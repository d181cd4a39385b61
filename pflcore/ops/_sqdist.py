"""Squared distances between rows: subtract, then square, then sum in float64.

The usual way is `|a|^2 + |b|^2 - 2 a b` by a matrix product. Its large terms cancel
where two models differ by little, and no digit is left. Here nothing cancels.

Symbols: M rows of `a`; N rows of `b`; P columns of both; L pairs that are listed for
each row of `a`; n, p the rows and columns of a block.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore.check import reject

from ._check import (
    check_index,
    check_like,
    check_tensor,
    is_readable,
    value_range,
)
from ._library import (
    call_op,
    define,
    in_forward_ad,
    lib,
    save_inputs,
    warn_of_references,
)
from ._sums import scatter_add

OP = "pairwise_sqdist"
FOLD_COLUMNS = 1 << 12  # columns that the reference sums at a time


def pairwise_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]; None: b = a
    index: Tensor | None = None,  # [M, L] int64
) -> Tensor:  # [M, N] float64, or [M, L] with index
    """Squared Euclidean distances `sum((a_i - b_j)^2)` between the rows of `a` and `b`.

    Rows are subtracted before they are squared. So the relative error is at most 1e-6
    against float64 on the same inputs. That holds for models that differ by little, for
    constant rows, and for P up to 1e8. It holds for scales from 1e-30 to 1e30, and for
    float64 rows wherever the squares fit float64.

    Without `b` the result is symmetric and its diagonal is exactly 0. A row with NaN
    makes its own distances NaN, and no others. Where `b` is `a` itself, or another view
    of the same elements, a CPU computes each pair once. The bits are those of a copy:
    on the diagonal, a row that is not finite has NaN.

    The result depends neither on the number of threads nor on the order of the rows, to
    the last bit. The bits of a pair:

    - On a CPU, and in the reference, they depend on its two rows alone. A part of a
      matrix and a listed pair have the bits of the whole matrix.
    - On a GPU they also depend on M and N.
    - A GPU whose tensor cores have float64 at speed (A100, H100, H200, B200) uses them
      for matrices of more than 20 float32 rows. There a pair's last bits depend on the
      other rows too, and a listed pair is within 1e-6 of its place in the matrix.

    The op is differentiable in `a` and `b`. Forward mode and `torch.func.grad` run
    plain torch operations in float64. Outside of them a pair that takes no part in a
    loss adds nothing to a gradient, even where a row is NaN. The gradient of the
    root `.sqrt()` is NaN where a distance is 0, as torch's is: mask the zeros before
    the root, or take the gradient of the squares.

    Raises TypeError for a wrong type or dtype, and ValueError for a wrong shape, device
    or index. On a GPU an index of N or more is not seen, and gives NaN.

    Args:
        a: Rows in float32, float64, float16 or bfloat16, with any row stride.
        b: Rows of the same dtype and length; None for those of `a`.
        index: The rows of `b` that each row of `a` is compared with, and no others. A
            negative number is padding, which is infinitely far.

    Returns:
        The distances of all pairs [M, N]; with `index` entry (m, l) is the distance
        between a_m and b_index[m, l].
    """
    check_sqdist(a, b, index)
    warn_of_references()
    if in_forward_ad() and len(a):
        other = a if b is None else b
        return _plain_sqdist(a, other, index)
    return call_op(_op, a, b, index)


def check_sqdist(a: Any, b: Any, index: Any) -> None:
    """Raises ValueError or TypeError for arguments that the op does not accept."""
    check_tensor(OP, "a", a, "[M, P]")
    if b is not None:
        check_tensor(OP, "b", b, "[N, P]")
        check_like(OP, "a", a, "b", b)
        if b.shape[1] != a.shape[1]:
            reject(f"{OP}(b)", f"P = {a.shape[1]} columns like a", b)
    if index is not None:
        other = a if b is None else b
        _check_pairs(a, other, index)


def _check_pairs(a: Tensor, b: Tensor, index: Any) -> None:
    """Raises ValueError or TypeError unless `index` lists rows of `b`."""
    check_index(OP, "a", a, "index", index)
    if index.dim() != 2 or len(index) != len(a):
        reject(f"{OP}(index)", f"[{len(a)}, L], a list for each row of a", index)
    if not is_readable(index) or index.numel() == 0:
        return
    _, largest = value_range(index)
    if largest >= len(b):
        expected = f"numbers below {len(b)}, the number of rows"
        remedy = "use a negative number for padding"
        reject(f"{OP}(index)", expected, largest, remedy=remedy)


def _plain_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor,  # [N, P]
    index: Tensor | None,  # [M, L]
) -> Tensor:  # [M, N] float64, or [M, L]
    """Distances by plain torch operations, which support forward mode.

    One row of `a` is taken at a time, so that memory holds only N differences.
    """
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
    """Squared distances of rows in float64: the specification of the op."""
    if index is None:
        return _all_pairs(a, b)
    return _listed_pairs(a, b, index)


def _all_pairs(
    a: Tensor,  # [M, P]
    b: Tensor | None,  # [N, P]
) -> Tensor:  # [M, N] float64
    """Squared distances of all pairs."""
    symmetric = b is None
    other = a if b is None else b
    out = torch.zeros(len(a), len(other), dtype=torch.float64, device=a.device)
    for i in range(len(a)):
        # Without b only the upper triangle is computed; the diagonal stays 0.
        first = i + 1 if symmetric else 0
        for columns in _column_blocks(a.shape[1]):
            out[i, first:] += _sum_of_squares(other[first:, columns], a[i, columns])
    return out + out.T if symmetric else out


def _listed_pairs(
    a: Tensor,  # [M, P]
    b: Tensor | None,  # [N, P]
    index: Tensor,  # [M, L]
) -> Tensor:  # [M, L] float64
    """Squared distances of the pairs that `index` lists."""
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
    """Slices of `FOLD_COLUMNS` columns, from the first to the last."""
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


def _backward(
    ctx: Any,
    grad: Tensor,  # [M, N], or [M, L] with index
) -> tuple[Tensor | None, Tensor | None, None]:  # [M, P], [N, P]
    """The gradients of `a`, `b` and `index`."""
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
    """True for rows of `a` with a gradient at a missing row.

    A row is missing where the index is `n` or more, which a GPU does not reject. The
    distance there is NaN, and so is the gradient.
    """
    return ((index >= n) & (grad != 0)).any(1, keepdim=True)


def _to_matrix(
    grad: Tensor,  # [M, L]
    index: Tensor,  # [M, L]
    n: int,
) -> Tensor:  # [M, N]
    """Gradients of listed pairs as a matrix.

    Padding and an index of `n` or more add nothing.
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

    It is computed as two terms, `a_i sum_j grad_ij` and `sum_j grad_ij b_j`. For models
    that are close they nearly cancel, so they are float64.

    The second term is a matrix product, which would spread a row with NaN or infinity
    to all others, as 0 * NaN is NaN. So these rows count as 0 in the product, and the
    gradient is NaN only where a pair with a gradient contains one.
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


def _fake(
    a: Tensor,  # [M, P]
    b: Tensor | None,  # [N, P]
    index: Tensor | None = None,  # [M, L]
) -> Tensor:  # [M, N] float64, or [M, L]
    """The shape and dtype of the result."""
    other = a if b is None else b
    columns = other.shape[0] if index is None else index.shape[1]
    return a.new_empty(a.shape[0], columns, dtype=torch.float64)


_op = define(
    f"{OP}(Tensor a, Tensor? b, Tensor? index=None) -> Tensor", reference, _fake
)
torch.library.register_autograd(
    f"pflcore::{OP}", _backward, setup_context=save_inputs, lib=lib
)
