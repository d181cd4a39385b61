"""Weighted sums of updates, `base + lr * (weight @ updates)`, in one pass.

The updates are far larger than all else, and the kernels read them once, so that the
sum takes about as long as reading them. Torch's operations would write the product, its
multiple and the sum one after another, and with an index a copy of the rows.

Symbols: N updates; M results; K rows that a result mixes; P columns.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pflcore.check import Words, is_dense, reject

from ._check import (
    check_index,
    check_index_range,
    check_like,
    check_number,
    check_tensor,
    check_writable,
    memory_span,
    same_view,
    share_memory,
)
from ._library import (
    call_op,
    define,
    fake_nothing,
    in_forward_ad,
    lib,
    mark_written,
    warn_of_references,
)
from ._sums import scatter_add


def aggregate(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    out: Tensor | None = None,  # [M, P]
    precise: bool = False,
) -> Tensor:  # [M, P]
    """Weighted sums `base + lr * (weight @ updates)` of updates.

    Sums are float64 where an input row is float64 or `precise` is set, and float32
    otherwise. A CPU adds every 128 rows to a float64 sum, so its error does not grow
    with N. CUDA kernels and the reference sum all rows in float32: above some thousand
    clients, set `precise` there.

    Without `out` the op is differentiable in `updates`, `weight` and `base`, but not in
    `lr`. Forward mode and `torch.func.grad` run plain torch operations, which read a
    row of weight 0.

    Raises TypeError for a wrong type or dtype, and ValueError for a wrong shape, device
    or index, and for an `out` that cannot be written. On a GPU the values of an index
    are not checked.

    Args:
        updates: Rows in float32, float64, float16 or bfloat16, with any row stride.
        weight: Weights in any floating-point dtype.
        index: The rows that result m mixes, `index[m]`. A row of weight 0 is not read
            then, so NaN there does not spread.
        base: The rows that the sums are added to, in any floating-point dtype; one row
            for all results, or a row for each.
        lr: The factor of the sums.
        out: Memory for the result, with contiguous rows. It shares none with `updates`,
            `weight` or `index`. It may be `base` itself.
        precise: True for sums in float64.

    Returns:
        The result in the dtype of `base`, or of `updates` without a base. It is `out`
        where that is given.
    """
    check_aggregate(updates, weight, index, base, lr, out)
    warn_of_references()
    arguments = (updates, weight, index, base, lr, bool(precise))
    if out is not None:
        _op_out(*arguments, out)
        mark_written(out)
        return out
    if in_forward_ad():
        return _formula(*arguments)
    return call_op(_op, *arguments)


def check_aggregate(
    updates: Any, weight: Any, index: Any, base: Any, lr: Any, out: Any
) -> None:
    """Raises ValueError or TypeError for arguments that the op does not accept."""
    op = "aggregate"
    check_number(op, "lr", lr)
    check_tensor(op, "updates", updates, "[N, P]")
    check_tensor(op, "weight", weight, "[M, N]" if index is None else "[M, K]")
    n, p = updates.shape
    m, k = weight.shape
    check_like(op, "updates", updates, "weight", weight, dtype=False)
    if index is not None:
        check_index(op, "updates", updates, "index", index)
        if index.shape != weight.shape:
            reject(f"{op}(index)", f"{list(weight.shape)} like weight", index)
        check_index_range(op, "index", index, n)
    elif k != n:
        expected = f"[M, {n}], a column for each row of updates"
        reject(
            f"{op}(weight)", expected, weight, remedy="pass index to mix some rows only"
        )
    if base is not None:
        check_tensor(op, "base", base)
        if base.shape not in ((p,), (m, p)) or base.device != updates.device:
            expected = f"[{p}] or [{m}, {p}] on {updates.device}"
            reject(f"{op}(base)", expected, base)
    if out is not None:
        check_out(updates, weight, index, base, out)


def check_out(
    updates: Tensor, weight: Tensor, index: Tensor | None, base: Tensor | None, out: Any
) -> None:
    """Raises ValueError for an `out` that the op cannot write."""
    shape = (weight.shape[0], updates.shape[1])
    dtype = updates.dtype if base is None else base.dtype
    fits = (
        isinstance(out, Tensor)
        and is_dense(out)
        and out.dtype == dtype
        and out.device == updates.device
        and out.shape == shape
    )
    if not fits:
        kind = f"{str(dtype).removeprefix('torch.')} on {updates.device}"
        reject("aggregate(out)", f"a tensor {list(shape)} of {kind}", out)
    if in_forward_ad():
        expected = "None in forward-mode differentiation"
        reject("aggregate(out)", expected, out, remedy="leave out away")
    if not out.numel():
        return
    check_writable("aggregate", "out", out)
    if torch.is_grad_enabled() and _requires_grad(updates, weight, base, out):
        expected = "None where a gradient is wanted"
        remedy = "leave out away or use torch.no_grad()"
        reject("aggregate(out)", expected, out, remedy=remedy)
    if torch.compiler.is_compiling():
        return
    if out.is_neg():
        expected = "memory that holds its numbers as they are"
        got = Words("a view of their negatives or conjugates")
        reject("aggregate(out)", expected, got)
    _check_memory(out, updates, weight, index, base)


def _requires_grad(*tensors: Tensor | None) -> bool:
    """True where one of the tensors requires grad."""
    for t in tensors:  # noqa: SIM110 (a generator takes twice as long)
        if t is not None and t.requires_grad:
            return True
    return False


def _check_memory(
    out: Tensor,
    updates: Tensor,
    weight: Tensor,
    index: Tensor | None,
    base: Tensor | None,
) -> None:
    """Raises ValueError where `out` shares memory with an input other than `base`."""
    span = memory_span(out)
    for name, t in (("updates", updates), ("weight", weight), ("index", index)):
        if share_memory(out, span, t, memory_span(t)):
            reject("aggregate(out)", "memory of its own", Words(f"memory of {name}"))
    is_shared = share_memory(out, span, base, memory_span(base))
    if base is not None and is_shared and not same_view(out, base):
        expected = "memory of its own or base itself"
        reject("aggregate(out)", expected, Words("a part of base's memory"))


def result_dtypes(
    updates: Tensor, base: Tensor | None, precise: bool
) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, and that of the sum."""
    dtype = updates.dtype if base is None else base.dtype
    wide = precise or torch.float64 in (updates.dtype, dtype)
    return dtype, torch.float64 if wide else torch.float32


def _formula(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None,  # [M, K] int64
    base: Tensor | None,  # [P] or [M, P]
    lr: float,
    precise: bool,
    skip_zeros: bool = False,
) -> Tensor:  # [M, P]
    """The result by plain torch operations, which torch differentiates itself.

    Args:
        skip_zeros: True where, with `index`, rows of weight 0 add nothing even if they
            are NaN. Then the result has no derivative by a weight of 0.
    """
    dtype, wide = result_dtypes(updates, base, precise)
    w = (lr * weight.double()).to(wide)
    if index is None:
        total = w @ updates.to(wide)
    else:
        total = w.new_zeros(w.shape[0], updates.shape[1])
        for k in range(w.shape[1]):
            weight_k = w[:, k, None]
            part = weight_k * updates[index[:, k]].to(wide)
            if skip_zeros:
                part = torch.where(weight_k != 0, part, 0.0)
            total = total + part
    if base is not None:
        total = base.to(wide) + total
    return total.to(dtype)


def reference(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    precise: bool = False,
) -> Tensor:  # [M, P]
    """`base + lr * (weight @ updates)`: the specification of the op."""
    return _formula(updates, weight, index, base, lr, precise, skip_zeros=True)


def reference_out(*arguments: Any) -> None:
    """Writes the result of `reference` into the last argument, [M, P]."""
    *inputs, out = arguments
    out.copy_(reference(*inputs))


def _fake(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K]
    index: Tensor | None,
    base: Tensor | None,
    *_: Any,
) -> Tensor:  # [M, P]
    """The shape and dtype of the result."""
    dtype = updates.dtype if base is None else base.dtype
    return updates.new_empty(weight.shape[0], updates.shape[1], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves the parts of the inputs that the backward pass needs."""
    updates, weight, index, base, ctx.lr, _ = inputs
    ctx.has_shared_base = base is not None and base.dim() == 1
    ctx.n = len(updates)
    need_updates, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        updates if need_weight else None, weight if need_updates else None, index
    )
    ctx.weight_dtype = weight.dtype
    ctx.updates_dtype = updates.dtype


def _weight_gradient(
    grad: Tensor,  # [M, P] float64
    updates: Tensor,  # [N, P]
    index: Tensor,  # [M, K]
) -> Tensor:  # [M, K] float64
    """Gradient of weights by index.

    It is NaN for an index out of range, which only a GPU does not reject.
    """
    is_row = (index >= 0) & (index < len(updates))
    if not len(updates) or not index.shape[1]:
        zeros = torch.zeros_like(index, dtype=grad.dtype)
        return torch.where(is_row, zeros, math.nan)
    rows = torch.where(is_row, index, 0)
    columns = [(grad * updates[column].double()).sum(1) for column in rows.T]
    return torch.where(is_row, torch.stack(columns, 1), math.nan)


def _backward(
    ctx: Any,
    grad: Tensor,  # [M, P]
) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments; None for those that need none."""
    updates, weight, index = ctx.saved_tensors
    need_updates, need_weight, _, need_base = ctx.needs_input_grad[:4]
    grad64 = grad.double()  # [M, P]
    grad_updates = grad_weight = grad_base = None
    if need_weight:
        if index is None:
            grad_weight = grad64 @ updates.double().T
        else:
            grad_weight = _weight_gradient(grad64, updates, index)
        grad_weight = (ctx.lr * grad_weight).to(ctx.weight_dtype)
    if need_updates:
        dense = _dense_weights(weight, index, ctx.n)
        grad_updates = (ctx.lr * (dense.T @ grad64)).to(ctx.updates_dtype)
    if need_base:
        grad_base = grad.sum(0) if ctx.has_shared_base else grad
    return grad_updates, grad_weight, None, grad_base, None, None


def _dense_weights(
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None,  # [M, K]
    n: int,
) -> Tensor:  # [M, N] float64
    """The weights as a matrix; an index out of range adds nothing."""
    if index is None:
        return weight.double()
    zeros = weight.new_zeros(len(weight), n, dtype=torch.float64)
    if n == 0:
        return zeros
    is_row = (index >= 0) & (index < n)
    valid_weight = torch.where(is_row, weight.double(), 0.0)
    return scatter_add(zeros, torch.where(is_row, index, 0), valid_weight)


_op = define(
    "aggregate(Tensor updates, Tensor weight, Tensor? index, Tensor? base, float lr, "
    "bool precise) -> Tensor",
    reference,
    _fake,
)
_op_out = define(
    "aggregate_out(Tensor updates, Tensor weight, Tensor? index, Tensor? base, float "
    "lr, bool precise, Tensor(a!) out) -> ()",
    reference_out,
    fake_nothing,
)
torch.library.register_autograd(
    "pflcore::aggregate", _backward, setup_context=_setup, lib=lib
)
