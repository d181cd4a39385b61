"""One SGD step on flat rows, in place and in one pass.

A step by torch takes a pass over memory for each of its terms. The kernel reads each
number once, and writes the weights and the buffer once.

Symbols: S clients; Q columns of a row; w rows of weights; d the step's direction; mu
the factor of the pull to the anchor.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from pflcore.check import Words, is_dense, reject

from ._check import (
    check_like,
    check_number,
    check_tensor,
    check_writable,
    memory_span,
    same_view,
    share_memory,
)
from ._library import (
    define,
    fake_nothing,
    in_forward_ad,
    mark_written,
    warn_of_references,
)


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
    """Takes one SGD step on flat rows, in place.

    - `d = grad + shift + mu * (w - anchor) + weight_decay * w`
    - `buffer = momentum * buffer + d`
    - `w -= lr * mask * buffer`, or `w -= lr * mask * d` without momentum

    The terms serve FedProx (`mu`, `anchor`), SCAFFOLD (`shift`) and models of which
    only a part is trained (`mask`). Leave out the terms that you do not need.

    The op is not differentiable, and autograd must not record the step: call it under
    `torch.no_grad()` where a tensor requires grad.

    Raises TypeError for a wrong type or dtype, and ValueError for a wrong shape or
    device, and for memory that the step cannot write.

    Args:
        w: Weights in float32 or float64, which the step changes. Rows are contiguous,
            with any row stride.
        grad: Gradients. As `shift`, `mask` and `anchor` it has w's dtype, and its
            memory may be that of `w`, but not that of a part of it. It then counts as
            it was before the step.
        lr: The step size.
        shift: Rows that are added to the gradients.
        mask: Factors of the step; one row for all clients, or a row for each.
        mu: The factor of the proximal term, or a factor for each client.
        anchor: The rows that the proximal term pulls to; required with `mu`.
        momentum: The factor of the buffer.
        buffer: The momentum of each weight, which the step changes; required with
            `momentum`. It shares no memory with the other tensors.
        weight_decay: The factor of the weights in the direction.
    """
    check_sgd(w, grad, lr, shift, mask, mu, anchor, momentum, buffer, weight_decay)
    warn_of_references()
    mu_rows = None  # [S], in place of the number
    if isinstance(mu, Tensor):
        mu_rows = mu
        mu = 0.0
    _op(w, grad, lr, shift, mask, mu, mu_rows, anchor, momentum, buffer, weight_decay)
    written_buffer = buffer if momentum else None
    mark_written(w, written_buffer)


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
    """Raises ValueError or TypeError for arguments that the op does not accept."""
    op = "sgd_step_"
    check_number(op, "lr", lr)
    check_number(op, "momentum", momentum)
    check_number(op, "weight_decay", weight_decay)
    check_tensor(op, "w", w, "[S, Q]")
    if w.dtype not in (torch.float32, torch.float64):
        reject(f"{op}(w)", "float32 or float64", w, error=TypeError)
    _check_rows(op, w, "grad", grad)
    if shift is not None:
        _check_rows(op, w, "shift", shift)
    if anchor is not None:
        _check_rows(op, w, "anchor", anchor)
    if buffer is not None:
        _check_rows(op, w, "buffer", buffer)
    if mask is not None:
        _check_rows(op, w, "mask", mask)
    check_writable(op, "w", w)
    if buffer is not None:
        check_writable(op, "buffer", buffer)
    elif momentum:
        expected = f"{list(w.shape)} where momentum is {momentum}"
        reject(f"{op}(buffer)", expected, None, remedy="use torch.zeros_like(w)")
    if isinstance(mu, Tensor):
        check_tensor(op, "mu", mu)
        if mu.shape != w.shape[:1]:
            reject(f"{op}(mu)", f"a number or [{w.shape[0]}]", mu)
        check_like(op, "w", w, "mu", mu, dtype=False)
    else:
        check_number(op, "mu", mu)
    if anchor is None and (isinstance(mu, Tensor) or mu != 0):
        reject(f"{op}(anchor)", f"{list(w.shape)} where mu is given", None)
    if in_forward_ad():
        expected = "a step outside of forward-mode differentiation"
        got = Words("a step inside of it")
        reject(f"{op}(w)", expected, got, remedy="write the step in plain torch")
    others = {"grad": grad, "shift": shift, "mask": mask, "anchor": anchor, "mu": mu}
    if torch.is_grad_enabled():
        _check_unrecorded(op, {"w": w, **others, "buffer": buffer})
    if not torch.compiler.is_compiling():
        _check_memory(op, w, buffer, others)


def _check_rows(op: str, w: Tensor, name: str, t: Any) -> None:
    """Raises an error unless `t` has w's shape, dtype and device.

    A mask may be one row.
    """
    if not isinstance(t, Tensor) or not is_dense(t):
        reject(f"{op}({name})", "a dense tensor of rows", t, error=TypeError)
    if t.shape != w.shape and not (name == "mask" and t.shape == w.shape[1:]):
        reject(f"{op}({name})", f"{list(w.shape)} like w", t)
    check_like(op, "w", w, name, t)


def _check_unrecorded(op: str, tensors: Mapping[str, Any]) -> None:
    """Raises ValueError where autograd would record the step.

    Args:
        tensors: All arguments by name.
    """
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.requires_grad:
            expected = "a step that autograd does not record"
            got = Words(f"{name} that requires grad")
            reject(f"{op}({name})", expected, got, remedy="use torch.no_grad()")


def _check_memory(
    op: str, w: Tensor, buffer: Tensor | None, others: Mapping[str, Any]
) -> None:
    """Raises ValueError unless the op may write into `w` and `buffer`.

    The buffer shares no memory with the other tensors, and `w` shares none with a part
    of another.

    Args:
        others: The other arguments by name.
    """
    w_span = memory_span(w)
    buffer_span = memory_span(buffer)
    for name, t in others.items():
        if t is None or type(t) is float:
            continue
        span = memory_span(t)
        if share_memory(w, w_span, t, span) and not same_view(w, t):
            expected = "memory of its own or w itself"
            got = Words("a part of w's memory")
            reject(f"{op}({name})", expected, got, remedy=f"use {name}.clone()")
        if share_memory(buffer, buffer_span, t, span):
            _reject_buffer(op, name)
    if share_memory(buffer, buffer_span, w, w_span):
        _reject_buffer(op, "w")


def _reject_buffer(op: str, name: str) -> NoReturn:
    """Raises ValueError: the buffer shares memory with another argument."""
    got = Words(f"memory of {name}")
    reject(f"{op}(buffer)", "memory of its own", got, remedy="use buffer.clone()")


def corrected(
    w: Tensor,  # [S, Q]
    grad: Tensor,  # [S, Q]
    shift: Tensor | None,  # [S, Q]
    mu: float | Tensor,
    mu_rows: Tensor | None,  # [S], replaces mu
    anchor: Tensor | None,  # [S, Q]
) -> Tensor:  # [S, Q]
    """The gradient with its correction, `grad + shift + mu * (w - anchor)`.

    It is `grad` itself where there is nothing to add.
    """
    d = grad if shift is None else grad + shift
    if anchor is None:
        return d
    factor = mu if mu_rows is None else mu_rows[:, None].to(w.dtype)
    return d + factor * (w - anchor)


def clipped(
    grad: Tensor,  # [S, Q]
    norm: float,
) -> Tensor:  # [S, Q]
    """The rows of `grad`, scaled down where they are longer than `norm`.

    The formula is that of `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    """
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
    """Takes one SGD step in place: the specification of the op."""
    d = corrected(w, grad, shift, mu, mu_rows, anchor)
    if weight_decay:
        d = d + weight_decay * w
    if buffer is not None and momentum:
        buffer.mul_(momentum).add_(d)
        d = buffer
    step = lr * d if mask is None else lr * mask * d
    w.sub_(step)


_op = define(
    "sgd_step_(Tensor(a!) w, Tensor grad, float lr, Tensor? shift, Tensor? mask, "
    "float mu, Tensor? mu_rows, Tensor? anchor, float momentum, Tensor(b!)? buffer, "
    "float weight_decay) -> ()",
    reference,
    fake_nothing,
)
