"""pairwise_sqdist: squared distances of rows, subtracted before they are squared."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import (
    check_index,
    check_matrix,
    check_same_kind,
    describe,
    is_readable,
    reject_argument,
    require_argument,
)
from ._library import define, in_forward_ad, lib, save_inputs, warn_of_references
from ._sums import scatter_add

FOLD_COLUMNS = 1 << 12  # columns that the reference folds at a time


def pairwise_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]; None: b = a
    index: Tensor | None = None,  # [M, L] int64
) -> Tensor:  # [M, N] float64, or [M, L] with index
    """Squared Euclidean distances `sum((a_i - b_j)^2)` of the rows: subtracted first,
    then squared, summed to float64.

    float32, float64, float16 or bfloat16 rows of any row stride. Relative error <= 1e-6
    against float64 of the same inputs for models that differ by little, for constant
    rows, for P up to 1e8, and for scales from 1e-30 to 1e30 (float64 rows: where the
    squares fit float64). Without `b` the result is symmetric and its diagonal exactly
    0. A client with NaN makes its own row and column NaN, nobody else's. The result
    depends neither on the number of threads nor on the order of the clients, to the
    last bit. Differentiable in a and b; in forward mode it is plain torch, in float64.
    A pair that takes no part in a loss adds nothing to a gradient, even where a client
    is NaN. The gradient of a distance, `.sqrt()`, is NaN where it is 0, as torch's is:
    mask the zeros before the root, or take the gradient of squares.

    With `index`, entry (m, l) is the distance of a_m and b_index[m, l] alone, bit for
    bit that of all pairs; a negative index is padding, infinitely far. On CPUs (and in
    the reference) a pair's bits depend on nothing but its two rows, so parts of a
    matrix are those of the whole; on GPUs also on M and N, and an index of N or more,
    which only a CPU refuses, gives NaN. On a GPU whose tensor cores have float64 at
    speed (A100, H100, H200, B200) they make the matrices of more than 20 float32 rows:
    a pair's last bits then depend on the other rows too, and a listed pair is within
    1e-6 of its place in the matrix.
    """
    op = "pairwise_sqdist"
    other = a if b is None else b
    check_matrix(op, "a", a, "[M, P]")
    if b is not None:
        check_matrix(op, "b", b, "[N, P]")
        check_same_kind(op, "a", a, "b", b)
        if b.shape[1] != a.shape[1]:
            reject_argument(op, "b", f"P = {a.shape[1]} columns like a", describe(b))
    if index is not None:
        check_index(op, "a", a, "index", index)
        fits = index.dim() == 2 and index.shape[0] == a.shape[0]
        require_argument(
            fits,
            op,
            "index",
            f"[{a.shape[0]}, L], a list for each row of a",
            describe(index),
        )
        if is_readable(index) and index.numel() and int(index.max()) >= len(other):
            wanted = f"below {len(other)}, the number of rows"
            do = "use a negative number for padding"
            reject_argument(op, "index", wanted, str(int(index.max())), do)
    warn_of_references()
    if in_forward_ad() and len(a):
        other = other.double()
        near = (
            [other] * len(a)
            if index is None
            else [other[i.clamp(min=0)] for i in index]
        )
        pairs = zip(near, a.double(), strict=True)
        out = torch.stack([(rows - row).square().sum(1) for rows, row in pairs])
        return out if index is None else torch.where(index < 0, math.inf, out)
    return _op(a, b, index)


def reference(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]
    index: Tensor | None = None,  # [M, L]
) -> Tensor:  # [M, N] float64, or [M, L]
    """Squared distances of rows: subtract, square, sum, all in float64.

    Columns are folded in halves, LEAF of them at a time: the order of a pair's sum
    depends neither on the threads nor on other pairs.
    """
    symmetric = b is None
    b = a if b is None else b
    m = a.shape[0]
    n = b.shape[0] if index is None else index.shape[1]
    p = a.shape[1]
    out = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    # whose strides the result would have
    index = None if index is None else index.contiguous()
    near, columns = (
        (None, p) if index is None else (index.clamp(min=0), p if len(b) else 0)
    )
    for i in range(m):
        some = slice(i + 1 if symmetric and index is None else 0, n)
        for start in range(0, columns, FOLD_COLUMNS):
            strip = slice(start, start + FOLD_COLUMNS)
            other = b[some, strip] if near is None else b[near[i], strip]
            square = (other.double() - a[i, strip].double()).square()  # [some, strip]
            half = 1 << (square.shape[1] - 1).bit_length()
            square = F.pad(square, (0, half - square.shape[1]))
            while half := half // 2:
                square = square[:, :half] + square[:, half:]
            out[i, some] += square[:, 0]
    if index is not None:
        out = torch.where(index < 0, math.inf, out)
        own = index == torch.arange(m, device=a.device)[:, None]
        return torch.where(own, 0.0, out) if symmetric else out
    return out + out.T if symmetric else out


def _fake(a: Tensor, b: Tensor | None, index: Tensor | None = None) -> Tensor:
    n = (a if b is None else b).shape[0] if index is None else index.shape[1]
    return a.new_empty(a.shape[0], n, dtype=torch.float64)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, index = ctx.saved_tensors
    other = a if b is None else b
    # rows of a with a listed number of N or more: their distances there are NaN
    past = None
    if index is not None:
        listed = grad
        grad = grad.new_zeros(len(a), len(other))
        beyond = index >= len(other)
        past = (beyond & (listed != 0)).any(1, keepdim=True)
        if grad.numel():
            listed = torch.where((index < 0) | beyond, 0.0, listed)
            grad = scatter_add(grad, index.clamp(0, len(other) - 1), listed)
    need_a, need_b = (True, False) if b is None else ctx.needs_input_grad[:2]
    by_a = (
        _input_gradient(grad + grad.T if b is None else grad, a, other)
        if need_a
        else None
    )
    if by_a is not None and past is not None:
        by_a = torch.where(past, math.nan, by_a)
    return by_a, _input_gradient(grad.T, b, a) if need_b else None, None


def _input_gradient(
    grad: Tensor,  # [M, N] by the squared distances
    a: Tensor,  # [M, P]
    b: Tensor,  # [N, P]
) -> Tensor:  # [M, P]
    """2 sum_j grad_ij (a_i - b_j), in float64: the two terms nearly cancel for models
    that are close. A row that is not finite touches those alone that have a gradient
    with it: in a matrix product it would touch all, as 0 * NaN.
    """
    fine_a = a.isfinite().all(1)
    fine_b = b.isfinite().all(1)
    x, y = (
        torch.where(fine[:, None], t, 0.0).double()
        for fine, t in ((fine_a, a), (fine_b, b))
    )
    lost = ((grad != 0) & ~(fine_a[:, None] & fine_b)).any(1, keepdim=True)
    return torch.where(
        lost, math.nan, 2 * (grad.sum(1, keepdim=True) * x - grad @ y)
    ).to(a.dtype)


_op = define(
    "pairwise_sqdist(Tensor a, Tensor? b, Tensor? index=None) -> Tensor",
    reference,
    _fake,
)
torch.library.register_autograd(
    "pflcore::pairwise_sqdist", _backward, setup_context=save_inputs, lib=lib
)
