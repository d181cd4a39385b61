"""Argument checks of the ops: one sentence that names the argument, what was expected, and what came."""

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape(t: Any) -> str:
    """What a tensor is, in a few words."""
    if not isinstance(t, Tensor):
        shown = " ".join(repr(t).split())
        return f"{shown[:40]}{'...' if len(shown) > 40 else ''} of type {type(t).__name__}"
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def expect(ok: bool, op: str, name: str, wanted: str, came: str, do: str = "", kind: type[Exception] = ValueError) -> None:
    """Raise `kind` with one sentence unless `ok`."""
    if not ok:
        raise kind(f"{op}: {name} must be {wanted}, got {came}{'; ' + do if do else ''}.")


def is_int(value: Any) -> bool:
    """A whole number, and not a truth value."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def number(op: str, name: str, value: Any) -> None:
    """`value` is a real number, or a tensor of one."""
    if type(value) is float or type(value) is int:
        return
    fine = isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(value, bool)
    fine = (
        fine or (isinstance(value, Tensor) and value.dim() == 0) or (hasattr(value, "__float__") and not isinstance(value, Tensor | bool))
    )
    expect(fine, op, name, "a number", shape(value), kind=TypeError)


def floating(op: str, name: str, t: Any) -> None:
    """`t` is a floating-point tensor."""
    if not isinstance(t, Tensor):
        expect(False, op, name, "a tensor", shape(t), "use torch.as_tensor", TypeError)
    if t.layout is not torch.strided:
        expect(False, op, name, "a dense tensor", str(t.layout), f"use {name}.to_dense()", TypeError)
    if t.dtype not in FLOATS:
        expect(False, op, name, "float32, float64, float16 or bfloat16", shape(t), f"use {name}.float()", TypeError)


def matrix(op: str, name: str, t: Any, wanted: str) -> None:
    """`t` is a floating-point matrix."""
    if type(t) is Tensor and t.dtype in FLOATS and t.dim() == 2 and t.layout is torch.strided:
        return
    floating(op, name, t)
    expect(t.dim() == 2, op, name, f"a matrix {wanted}", shape(t))


def check_same(op: str, name: str, a: Tensor, other: str, b: Tensor) -> None:
    """`a` and `b` have one dtype and one device."""
    if a.dtype is not b.dtype:
        expect(False, op, other, f"{a.dtype} like {name}", shape(b), f"use {other}.to({name}.dtype)", TypeError)
    if a.device != b.device:
        expect(False, op, other, f"on {a.device} like {name}", shape(b), f"use {other}.to({name}.device)")


def concrete(t: Tensor) -> bool:
    """The values can be looked at for free: a plain CPU tensor, nothing traced."""
    return type(t) is Tensor and t.device.type == "cpu" and not torch.compiler.is_compiling()


def check_waffle(dist: Any, target: Any, omega: float, psi: float, tie: str) -> Tensor:
    """The arguments of waffle_weights; returns the target as a tensor."""
    op = "waffle_weights"
    floating(op, "dist", dist)
    n = dist.shape[-1] if dist.dim() else 0
    expect(n > 0, op, "dist", "[..., N] with N > 0", shape(dist))
    for name, value in (("omega", omega), ("psi", psi)):
        try:
            fine = math.isfinite(value) and value >= 0
        except TypeError:
            expect(False, op, name, "a number", f"{value!r:.60}", kind=TypeError)
        expect(fine, op, name, "a finite number >= 0", repr(value))
    expect(tie in ("closed", "uniform"), op, "tie", "'closed' or 'uniform'", repr(tie))
    if isinstance(target, Tensor):
        expect(target.dtype == torch.int64, op, "target", "an int or an int64 tensor", shape(target), kind=TypeError)
        expect(target.device == dist.device, op, "target", f"on {dist.device} like dist", shape(target))
        fits = target.dim() == 0 or target.shape == dist.shape[:-1]
        expect(fits, op, "target", f"one for each row of dist, {list(dist.shape[:-1])}", shape(target))
        if concrete(target) and target.numel():
            low, high = (int(v) for v in target.aminmax())
            expect(low >= 0 and high < n, op, "target", f"from 0 to {n - 1}", f"{low} to {high}")
        return target
    expect(is_int(target), op, "target", "an int or an int64 tensor", f"{target!r:.60}", kind=TypeError)
    expect(0 <= target < n, op, "target", f"from 0 to {n - 1}", str(target))
    return torch.full((), target, dtype=torch.int64, device=dist.device)


def overlap(a: Tensor, b: Tensor) -> bool:
    """The two tensors' memory ranges meet."""
    if not (a.numel() and b.numel()) or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False

    def span(t: Tensor) -> tuple[Any, Any]:
        first = t.storage_offset() * t.element_size()
        return first, first + (sum((s - 1) * d for s, d in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()

    (a0, a1), (b0, b1) = span(a), span(b)
    return bool(a0 < b1 and b0 < a1)


def check_aggregate(updates: Any, weight: Any, index: Any, base: Any, lr: Any, out: Any) -> None:
    """The arguments of aggregate."""
    op = "aggregate"
    number(op, "lr", lr)
    matrix(op, "updates", updates, "[N, P]")
    matrix(op, "weight", weight, "[M, N]" if index is None else "[M, K]")
    n, p = updates.shape
    m, k = weight.shape
    if weight.device != updates.device:
        expect(False, op, "weight", f"on {updates.device} like updates", shape(weight), "use weight.to(updates.device)")
    if index is None:
        if k != n:
            expect(False, op, "weight", f"[M, {n}], a column for each row of updates", shape(weight), "or give index")
    else:
        expect(isinstance(index, Tensor) and index.dtype == torch.int64, op, "index", "an int64 tensor", shape(index), kind=TypeError)
        expect(index.shape == weight.shape, op, "index", f"{list(weight.shape)} like weight", shape(index))
        expect(index.device == updates.device, op, "index", f"on {updates.device} like updates", shape(index))
        if concrete(index) and m and k:
            low, high = index.aminmax()
            if low < 0 or high >= n:
                expect(False, op, "index", f"from 0 to {n - 1}", f"{int(low)} to {int(high)}")
    if base is not None:
        floating(op, "base", base)
        fits = base.shape == (p,) or base.shape == (m, p)
        expect(fits and base.device == updates.device, op, "base", f"[{p}] or [{m}, {p}] on {updates.device}", shape(base))
    if out is not None:
        check_out(updates, weight, base, out)


def check_out(updates: Tensor, weight: Tensor, base: Tensor | None, out: Any) -> None:
    """The `out` of aggregate."""
    op, wanted = "aggregate", [weight.shape[0], updates.shape[1]]
    dtype = updates.dtype if base is None else base.dtype
    fits = isinstance(out, Tensor) and list(out.shape) == wanted and out.dtype == dtype and out.device == updates.device
    expect(fits, op, "out", f"{wanted} {str(dtype).removeprefix('torch.')} on {updates.device}", shape(out))
    if out.numel() == 0:
        return
    rows = out.stride(1) == 1 or out.shape[1] == 1
    apart = out.shape[0] == 1 or out.stride(0) >= out.shape[1]
    expect(rows and apart, op, "out", "of contiguous rows that do not overlap", f"strides {list(out.stride())}", "use torch.empty")
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (updates, weight, base, out)):
        expect(False, op, "out", "None where a gradient is wanted", "inputs that require grad", "leave out away or use torch.no_grad()")
    expect(not overlap(out, updates), op, "out", "memory of its own", "memory of updates")
    expect(not overlap(out, weight), op, "out", "memory of its own", "memory of weight")
    if base is not None and overlap(out, base):
        itself = base.shape == out.shape and base.data_ptr() == out.data_ptr() and base.stride() == out.stride()
        expect(itself, op, "out", "memory of its own or base itself", "a part of base's memory")


def check_rank1(x: Any, w_a: Any, lam: Any, w_b: Any) -> tuple[int, ...]:
    """The arguments of rank1_linear; returns the broadcast leading axes."""
    op = "rank1_linear"
    for name, t, own, wanted in (
        ("x", x, 1, "[..., B, I]"),
        ("w_a", w_a, 2, "[O, F]"),
        ("lam", lam, 1, "[..., F]"),
        ("w_b", w_b, 2, "[F, I]"),
    ):
        floating(op, name, t)
        if t.dim() < own:
            expect(False, op, name, wanted, shape(t))
        if t is not x:
            check_same(op, "x", x, name, t)
    if w_b.shape[-1] != x.shape[-1]:
        expect(False, op, "w_b", f"[F, {x.shape[-1]}] for the inputs of x", shape(w_b))
    if w_a.shape[-1] != w_b.shape[-2]:
        expect(False, op, "w_a", f"[O, {w_b.shape[-2]}] for the factors of w_b", shape(w_a))
    if lam.shape[-1] != w_b.shape[-2]:
        expect(False, op, "lam", f"[..., {w_b.shape[-2]}] for the factors of w_b", shape(lam))
    leads = (x.shape[:-2], w_a.shape[:-2], lam.shape[:-1], w_b.shape[:-2])
    if not any(leads):
        return ()
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        came = ", ".join(str(list(lead)) for lead in leads)
        raise ValueError(f"{op}: the leading axes of x, w_a, lam and w_b must broadcast, got {came}.") from None


def check_sgd(
    w: Any, grad: Any, lr: Any, shift: Any, mask: Any, mu: Any, anchor: Any, momentum: Any, buffer: Any, weight_decay: Any
) -> None:
    """The arguments of sgd_step_."""
    op = "sgd_step_"
    for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
        number(op, name, value)
    matrix(op, "w", w, "[S, Q]")
    if w.dtype not in (torch.float32, torch.float64):
        expect(False, op, "w", "float32 or float64", shape(w), kind=TypeError)
    for name, t in (("grad", grad), ("shift", shift), ("anchor", anchor), ("buffer", buffer), ("mask", mask)):
        if t is None:
            continue
        if not isinstance(t, Tensor):
            expect(False, op, name, "a tensor", shape(t), kind=TypeError)
        if t.shape != w.shape and not (t is mask and t.shape == w.shape[1:]):
            expect(False, op, name, f"{list(w.shape)} like w", shape(t))
        check_same(op, "w", w, name, t)
    for name, t in (("w", w), ("buffer", buffer)):
        if t is not None and t.numel() and t.shape[1] > 1 and t.stride(1) != 1:
            expect(False, op, name, "of contiguous rows", f"strides {list(t.stride())}", f"use {name}.contiguous()")
        if t is not None and t.numel() and t.shape[0] > 1 and t.stride(0) < t.shape[1]:
            expect(False, op, name, "of rows that do not overlap", f"strides {list(t.stride())}", f"use {name}.clone()")
    if momentum and buffer is None:
        expect(False, op, "buffer", f"{list(w.shape)} where momentum is {momentum}", "None", "use torch.zeros_like(w)")
    if not (isinstance(mu, Tensor) and mu.dim()):
        number(op, "mu", mu)
    else:
        expect(mu.shape == w.shape[:1], op, "mu", f"a number or [{w.shape[0]}]", shape(mu))
        expect(mu.device == w.device, op, "mu", f"on {w.device} like w", shape(mu), "use mu.to(w.device)")
    has_mu = isinstance(mu, Tensor) or mu != 0
    if has_mu and anchor is None:
        expect(False, op, "anchor", f"{list(w.shape)} where mu is given", "None")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and (w.requires_grad or grad.requires_grad):
        expect(False, op, "w", "free of autograd", "a tensor that requires grad", "use torch.no_grad()")
