"""aggregate: base + lr * (weight @ updates), dense or by index, in one pass over the
updates."""

import math
from typing import Any

import torch
from torch import Tensor

from ._check import (
    check_floating,
    check_index,
    check_index_range,
    check_matrix,
    check_number,
    check_same_device,
    check_writable,
    describe,
    memory_span,
    reject_argument,
    require_argument,
    same_view,
    spans_overlap,
)
from ._library import (
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
    """`base + lr * (weight @ updates)` in one pass over the updates; with `index`, row
    m mixes the rows `index[m]` only.

    Accumulates in float32, on CPUs in float64 after every 128 rows, so that the error
    does not grow with N (CUDA kernels and the reference sum all rows in float32: above
    some thousand clients `precise` is the better choice there); in float64 where an
    input row is float64 or `precise` asks for it. The result has base's dtype, or else
    that of updates. With `index`, a row of weight 0 is not read, so NaN there does not
    spread. `out` may be given to reuse memory: a [M, P] tensor with contiguous rows
    that shares no memory with updates or weight; it may be `base` itself. Without
    `out`, differentiable in updates, weight and base, but not in lr; in forward mode it
    is plain torch, where a row of weight 0 is read.
    """
    check_aggregate(updates, weight, index, base, lr, out)
    warn_of_references()
    how = updates, weight, index, base, lr, bool(precise)
    if in_forward_ad():
        return _formula(*how)
    if out is None:
        return _op(*how)
    _op_out(*how, out)
    mark_written(out)
    return out


def check_aggregate(
    updates: Any, weight: Any, index: Any, base: Any, lr: Any, out: Any
) -> None:
    """The arguments of aggregate."""
    op = "aggregate"
    check_number(op, "lr", lr)
    check_matrix(op, "updates", updates, "[N, P]")
    check_matrix(op, "weight", weight, "[M, N]" if index is None else "[M, K]")
    n, p = updates.shape
    m, k = weight.shape
    check_same_device(op, "updates", updates, "weight", weight)
    if index is not None:
        check_index(op, "updates", updates, "index", index)
        fits = index.shape == weight.shape
        require_argument(
            fits, op, "index", f"{list(weight.shape)} like weight", describe(index)
        )
        check_index_range(op, "index", index, n)
    elif k != n:
        wanted = f"[M, {n}], a column for each row of updates"
        reject_argument(op, "weight", wanted, describe(weight), "or give index")
    if base is not None:
        check_floating(op, "base", base)
        if base.shape not in ((p,), (m, p)) or base.device != updates.device:
            reject_argument(
                op, "base", f"[{p}] or [{m}, {p}] on {updates.device}", describe(base)
            )
    if out is not None:
        check_out(updates, weight, index, base, out)


def check_out(
    updates: Tensor, weight: Tensor, index: Tensor | None, base: Tensor | None, out: Any
) -> None:
    """The `out` of aggregate."""
    op = "aggregate"
    wanted = [weight.shape[0], updates.shape[1]]
    dtype = updates.dtype if base is None else base.dtype
    like = isinstance(out, Tensor) and (out.dtype, out.device) == (
        dtype,
        updates.device,
    )
    if not like or list(out.shape) != wanted:
        kind = f"{str(dtype).removeprefix('torch.')} on {updates.device}"
        reject_argument(op, "out", f"{wanted} {kind}", describe(out))
    if in_forward_ad():
        reject_argument(
            op,
            "out",
            "None in forward-mode differentiation",
            "a tensor",
            "leave out away",
        )
    if not out.numel():
        return
    check_writable(op, "out", out)
    if torch.compiler.is_compiling():
        return
    if out.is_neg() or out.is_conj():
        held = "memory that holds its numbers as they are"
        reject_argument(op, "out", held, "the negative of other numbers")
    some = any(t is not None and t.requires_grad for t in (updates, weight, base, out))
    if some and torch.is_grad_enabled():
        came = "inputs that require grad"
        remedy = "leave out away or use torch.no_grad()"
        reject_argument(op, "out", "None where a gradient is wanted", came, remedy)
    mine = memory_span(out)
    for name, t in (("updates", updates), ("weight", weight), ("index", index)):
        if spans_overlap(mine, memory_span(t)):
            reject_argument(op, "out", "memory of its own", f"memory of {name}")
    if (
        base is not None
        and spans_overlap(mine, memory_span(base))
        and not same_view(out, base)
    ):
        reject_argument(
            op, "out", "memory of its own or base itself", "a part of base's memory"
        )


def result_dtypes(
    updates: Tensor, base: Tensor | None, precise: bool
) -> tuple[torch.dtype, torch.dtype]:
    """That of the result, and that of its sum."""
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
    skip: bool = False,
) -> Tensor:  # [M, P]
    """The same in plain torch, which differentiates itself; `skip`: rows of weight 0
    are not read, which has no derivative there."""
    dtype, wide = result_dtypes(updates, base, precise)
    w = (lr * weight.double()).to(wide)
    if index is None:
        total = w @ updates.to(wide)
    else:
        total = w.new_zeros(w.shape[0], updates.shape[1])
        for k in range(w.shape[1]):
            weight_k = w[:, k, None]
            part = weight_k * updates[index[:, k]].to(wide)
            total = total + (torch.where(weight_k != 0, part, 0.0) if skip else part)
    return (total if base is None else base.to(wide) + total).to(dtype)


def reference(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    precise: bool = False,
) -> Tensor:  # [M, P]
    """base + lr * (weight @ updates), in base's dtype, or else in that of updates."""
    return _formula(updates, weight, index, base, lr, precise, True)


def reference_out(*how: Any) -> None:
    """`reference` into the last argument, [M, P]."""
    how[-1].copy_(reference(*how[:-1]))


def _fake(
    updates: Tensor,
    weight: Tensor,
    index: Tensor | None,
    base: Tensor | None,
    *how: Any,
) -> Tensor:
    dtype = updates.dtype if base is None else base.dtype
    return updates.new_empty(weight.shape[0], updates.shape[1], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    updates, weight, index, base, ctx.lr, _ = inputs
    ctx.run_job = base is not None and base.dim() == 1
    ctx.save_for_backward(updates, weight, index)


def _weight_gradient(grad: Tensor, updates: Tensor, index: Tensor) -> Tensor:
    """The gradient [M, K] in float64 of weights by index; NaN of a row that is not
    there, which only a card lets through."""
    inside = (index >= 0) & (index < len(updates))
    if not len(updates) or not index.shape[1]:
        return torch.where(inside, torch.zeros_like(index, dtype=grad.dtype), math.nan)
    rows = torch.where(inside, index, 0)
    columns = [(grad * updates[column].double()).sum(1) for column in rows.T]
    return torch.where(inside, torch.stack(columns, 1), math.nan)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    updates, weight, index = ctx.saved_tensors
    need_updates, need_weight, _, need_base = ctx.needs_input_grad[:4]
    dense = weight.double()
    grad64 = grad.double()  # [M, N] or [M, K]
    grad_updates = grad_weight = None
    if need_weight and index is None:
        grad_weight = grad64 @ updates.double().T
    elif need_weight:
        grad_weight = _weight_gradient(grad64, updates, index)
    if index is not None:
        inside = (index >= 0) & (index < len(updates))
        zeros = grad64.new_zeros(len(weight), len(updates))
        dense = torch.where(inside, dense, 0.0)
        dense = (
            scatter_add(zeros, torch.where(inside, index, 0), dense)
            if len(updates)
            else zeros
        )
    if need_updates:
        grad_updates = (ctx.lr * (dense.T @ grad64)).to(updates.dtype)
    if grad_weight is not None:
        grad_weight = (ctx.lr * grad_weight).to(weight.dtype)
    grad_base = (grad.sum(0) if ctx.run_job else grad) if need_base else None
    return grad_updates, grad_weight, None, grad_base, None, None


_op = define(
    "aggregate(Tensor updates, Tensor weight, Tensor? index, Tensor? base, float lr, "
    "bool precise) "
    "-> Tensor",
    reference,
    _fake,
)
_op_out = define(
    "aggregate_out(Tensor updates, Tensor weight, Tensor? index, Tensor? base, float "
    "lr, bool "
    "precise, Tensor(a!) out) -> ()",
    reference_out,
    fake_nothing,
)
torch.library.register_autograd(
    "pflcore::aggregate", _backward, setup_context=_setup, lib=lib
)
