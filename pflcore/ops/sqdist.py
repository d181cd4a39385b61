"""pairwise_sqdist: squared distances of rows, subtracted before they are squared."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import BUDGET, define, forward_mode, lib, warn_once
from ._words import check_same, expect, matrix, shape


def pairwise_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor | None = None,  # [N, P]; None: b = a
) -> Tensor:  # [M, N] float64
    """Squared Euclidean distances `sum((a_i - b_j)^2)` of the rows: subtracted first, then squared, summed to float64.

    float32, float64, float16 or bfloat16 rows of any row stride. Relative error <= 1e-6 against float64 of the same inputs for models that
    differ by little, for constant rows, for P up to 1e8, and for scales from 1e-30 to 1e30 (float64 rows: where the squares fit float64).
    Without `b` the result is symmetric and its diagonal exactly 0. A client with NaN makes its own row and column NaN, nobody else's.
    The result depends neither on the number of threads nor on the order of the clients, to the last bit. Differentiable in a and b; in
    forward mode it is plain torch, in float64. A pair that takes no part in a loss adds nothing to a gradient, even where a client is NaN.
    """
    matrix("pairwise_sqdist", "a", a, "[M, P]")
    if b is not None:
        matrix("pairwise_sqdist", "b", b, "[N, P]")
        check_same("pairwise_sqdist", "a", a, "b", b)
        if b.shape[1] != a.shape[1]:
            expect(False, "pairwise_sqdist", "b", f"P = {a.shape[1]} columns like a", shape(b))
    warn_once()
    if forward_mode():
        rows_a, rows_b = a.double(), (a if b is None else b).double()
        return torch.stack([(rows_b - row).square().sum(1) for row in rows_a]) if len(a) else _op(a, b)
    return _op(a, b)


def reference(
    a: Tensor,  # [M, P]
    b: Tensor | None,  # [N, P]
) -> Tensor:  # [M, N] float64
    """Squared distances of rows: subtract, square, sum, all in float64.

    Columns are folded in halves, so that the order of a pair's sum depends neither on the threads nor on where the pair stands.
    """
    symmetric = b is None
    b = a if b is None else b
    m, n, p = a.shape[0], b.shape[0], a.shape[1]
    out = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    width = 1 << max(8, min(16, (BUDGET // max(m, n, 1)).bit_length() - 1))
    for start in range(0, p, width):
        size = min(width, p - start)
        fold = 1 << (size - 1).bit_length()
        rows_a = F.pad(a[:, start : start + size].double(), (0, fold - size))  # [M, fold]
        rows_b = rows_a if symmetric else F.pad(b[:, start : start + size].double(), (0, fold - size))
        for i in range(m):
            first = i + 1 if symmetric else 0
            if first < n:
                square = (rows_b[first:] - rows_a[i]).square()  # [N, fold]
                half = fold // 2
                while half:
                    square = square[:, :half] + square[:, half:]
                    half //= 2
                out[i, first:] += square[:, 0]
    return out + out.T if symmetric else out


def _fake(a: Tensor, b: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], (a if b is None else b).shape[0], dtype=torch.float64)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    a, b = inputs
    ctx.symmetric = b is None
    ctx.save_for_backward(a) if b is None else ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if ctx.symmetric:
        (a,) = ctx.saved_tensors
        return _pull(grad + grad.T, a, a), None
    a, b = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad
    return _pull(grad, a, b) if need_a else None, _pull(grad.T, b, a) if need_b else None


def _pull(
    grad: Tensor,  # [M, N] by the squared distances
    a: Tensor,  # [M, P]
    b: Tensor,  # [N, P]
) -> Tensor:  # [M, P]
    """2 sum_j grad_ij (a_i - b_j), in float64: the two terms nearly cancel for models that are close. A row that is not finite touches
    those alone that have a gradient with it: in a matrix product it would touch all, as 0 * NaN.
    """
    fine_a, fine_b = a.isfinite().all(1), b.isfinite().all(1)
    x, y = (torch.where(fine[:, None], t, 0.0).double() for fine, t in ((fine_a, a), (fine_b, b)))
    lost = ((grad != 0) & ~(fine_a[:, None] & fine_b)).any(1, keepdim=True)
    return torch.where(lost, math.nan, 2 * (grad.sum(1, keepdim=True) * x - grad @ y)).to(a.dtype)


_op: Callable[..., Tensor] = define("pairwise_sqdist(Tensor a, Tensor? b) -> Tensor", reference, _fake)
torch.library.register_autograd("pflcore::pairwise_sqdist", _backward, setup_context=_setup, lib=lib)
