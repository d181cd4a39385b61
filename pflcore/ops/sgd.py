"""sgd_step_: one SGD step on flat rows, in place and in one pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._library import changed, define, forward_mode, nothing, warn_once
from ._words import check_same, expect, matrix, meet, number, same_view, shape, span


def sgd_step_(
    w: Tensor,  # [S, Q], changed
    grad: Tensor,  # [S, Q]
    lr: float,
    shift: Tensor | None = None,  # [S, Q]
    mask: Tensor | None = None,  # [Q] or [S, Q]
    mu: float | Tensor = 0.0,  # or [S]
    anchor: Tensor | None = None,  # [S, Q]
    momentum: float = 0.0,
    buffer: Tensor | None = None,  # [S, Q], changed
    weight_decay: float = 0.0,
) -> None:
    """One SGD step on flat rows, in place and in one pass:

    `d = grad + shift + mu * (w - anchor) + weight_decay * w;  buffer = momentum * buffer + d;  w -=
    lr * mask * buffer` (without momentum: `w -= lr * mask * d`). float32 or float64, contiguous
    rows of any row stride. Not differentiable. The buffer shares no memory with the other tensors;
    w may be grad, shift, mask or anchor itself, as it was before the step, but not a part of one.
    """
    check_sgd(w, grad, lr, shift, mask, mu, anchor, momentum, buffer, weight_decay)
    warn_once()
    rows = mu if isinstance(mu, Tensor) and mu.dim() else None
    if isinstance(mu, Tensor) and rows is None and torch.compiler.is_compiling():
        rows = mu.expand(len(w))  # its value is not known while a graph is made
    _op(
        w,
        grad,
        lr,
        shift,
        mask,
        0.0 if rows is not None else float(mu),
        rows,
        anchor,
        momentum,
        buffer,
        weight_decay,
    )
    changed(w, buffer if momentum else None)


def check_sgd(
    w: Any,
    grad: Any,
    lr: Any,
    shift: Any,
    mask: Any,
    mu: Any,
    anchor: Any,
    momentum: Any,
    buffer: Any,
    weight_decay: Any,
) -> None:
    """The arguments of sgd_step_."""
    op = "sgd_step_"
    for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
        number(op, name, value)
    matrix(op, "w", w, "[S, Q]")
    if w.dtype not in (torch.float32, torch.float64):
        expect(False, op, "w", "float32 or float64", shape(w), kind=TypeError)
    for name, t in (
        ("grad", grad),
        ("shift", shift),
        ("anchor", anchor),
        ("buffer", buffer),
        ("mask", mask),
    ):
        if t is None and name != "grad":
            continue
        if not isinstance(t, Tensor) or t.layout is not torch.strided:
            expect(False, op, name, "a tensor of rows, dense", shape(t), kind=TypeError)
        if t.shape != w.shape and not (t is mask and t.shape == w.shape[1:]):
            expect(False, op, name, f"{list(w.shape)} like w", shape(t))
        check_same(op, "w", w, name, t)
    for name, t in (("w", w), ("buffer", buffer)):
        if t is not None and t.numel() and t.shape[1] > 1 and t.stride(1) != 1:
            expect(
                False,
                op,
                name,
                "of contiguous rows",
                f"strides {list(t.stride())}",
                f"use {name}.contiguous()",
            )
        if t is not None and t.numel() and t.shape[0] > 1 and t.stride(0) < t.shape[1]:
            expect(
                False,
                op,
                name,
                "of rows that do not overlap",
                f"strides {list(t.stride())}",
                f"use {name}.clone()",
            )
    if momentum and buffer is None:
        expect(
            False,
            op,
            "buffer",
            f"{list(w.shape)} where momentum is {momentum}",
            "None",
            "use torch.zeros_like(w)",
        )
    if not (isinstance(mu, Tensor) and mu.dim()):
        number(op, "mu", mu)
    else:
        expect(mu.shape == w.shape[:1], op, "mu", f"a number or [{w.shape[0]}]", shape(mu))
        expect(
            mu.device == w.device,
            op,
            "mu",
            f"on {w.device} like w",
            shape(mu),
            "use mu.to(w.device)",
        )
    has_mu = isinstance(mu, Tensor) or mu != 0
    if has_mu and anchor is None:
        expect(False, op, "anchor", f"{list(w.shape)} where mu is given", "None")
    if (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and (w.requires_grad or grad.requires_grad)
    ):
        expect(
            False, op, "w", "free of autograd", "a tensor that requires grad", "use torch.no_grad()"
        )
    if forward_mode():
        expect(
            False,
            op,
            "w",
            "free of forward-mode differentiation",
            "a step inside of it",
            "write the step in plain torch",
        )
    if torch.compiler.is_compiling():
        return
    row, velocity = span(w), span(buffer)
    for name, t in (
        ("grad", grad),
        ("shift", shift),
        ("mask", mask),
        ("anchor", anchor),
        ("mu", mu),
    ):
        if t is None or type(t) is float:
            continue
        other = span(t)
        if meet(row, other) and not same_view(w, t):
            expect(
                False,
                op,
                name,
                "memory of its own or w itself",
                "a part of w's memory",
                f"use {name}.clone()",
            )
        if meet(velocity, other):
            expect(
                False, op, "buffer", "memory of its own", f"memory of {name}", "use buffer.clone()"
            )
    if meet(velocity, row):
        expect(False, op, "buffer", "memory of its own", "memory of w", "use buffer.clone()")


def corrected(
    w: Tensor,
    grad: Tensor,
    shift: Tensor | None,
    mu: float | Tensor,
    mu_rows: Tensor | None,
    anchor: Tensor | None,
) -> Tensor:
    """`grad + shift + mu * (w - anchor)` [S, Q], `grad` itself where there is nothing to add."""
    d = grad if shift is None else grad + shift
    if anchor is not None:
        d = d + (mu if mu_rows is None else mu_rows[:, None].to(w.dtype)) * (w - anchor)
    return d


def clipped(grad: Tensor, norm: float) -> Tensor:
    """Each row of `grad` [S, Q], no longer than `norm`, as `torch.nn.utils.clip_grad_norm_`."""
    length: Tensor = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    return grad * (norm / (length + 1e-6)).clamp(max=1)


def reference(
    w: Tensor,  # [S, Q], changed
    grad: Tensor,  # [S, Q]
    lr: float,
    shift: Tensor | None,  # [S, Q]
    mask: Tensor | None,  # [Q] or [S, Q]
    mu: float,
    mu_rows: Tensor | None,  # [S], replaces mu
    anchor: Tensor | None,  # [S, Q]
    momentum: float,
    buffer: Tensor | None,  # [S, Q], changed
    weight_decay: float,
) -> None:
    """One SGD step on flat rows with a correction, a proximal term, momentum, weight decay and a
    mask."""
    d = corrected(w, grad, shift, mu, mu_rows, anchor)
    if weight_decay:
        d = d + weight_decay * w
    if buffer is not None and momentum:
        buffer.mul_(momentum).add_(d)
        d = buffer
    w.sub_(lr * d if mask is None else lr * mask * d)


_op: Callable[..., None] = define(
    "sgd_step_(Tensor(a!) w, Tensor grad, float lr, Tensor? shift, Tensor? mask, float mu, Tensor? "
    "mu_rows, Tensor? anchor, "
    "float momentum, Tensor(b!)? buffer, float weight_decay) -> ()",
    reference,
    nothing,
)
