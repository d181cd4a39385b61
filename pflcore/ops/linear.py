"""linear_sgd_: the whole local training of linear models. Its callers have checked its arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import sgd
from ._library import changed, define


def reference(
    w: Tensor,  # [S, Q] rows [weight C x I | bias C], changed
    x: Tensor,  # [n, I] the pool
    y: Tensor,  # [n] int64 labels, or numbers of w's dtype
    relabel: Tensor | None,  # [S, classes] a label as each client knows it
    order: Tensor,  # [S, passes, longest] places in the pool
    size: Tensor,  # [S] samples of each client, on the CPU
    steps: Tensor,  # [S] steps it takes, on the CPU
    batch_size: int,
    drop_last: bool,
    criterion: str,
    bias: bool,
    lr: float,
    shift: Tensor | None,  # [S, Q]
    mask: Tensor | None,  # [Q] or [S, Q]
    mu: float,
    mu_rows: Tensor | None,  # [S], replaces mu
    anchor: Tensor | None,  # [S, Q]
    momentum: float,
    weight_decay: float,
    grad_sum: Tensor | None,  # [S, Q], added to
) -> Tensor:  # [S] float64, the sum of the batches' mean losses
    """The whole local training of linear models: everybody's k-th step at once, with sample weights that are 0 beyond a short batch."""
    inputs, device = x.shape[1], w.device
    matrix = w.shape[1] // (inputs + bias) * inputs
    buffer = torch.zeros_like(w) if momentum else None
    loss = torch.zeros(len(w), dtype=torch.float64, device=device)
    whole = torch.clamp(size, max=batch_size).clamp(min=1)
    cuts = (size // whole if drop_last else -(size // -whole)).clamp(min=1)
    at = torch.arange(min(batch_size, max(1, order.shape[2])))
    for k in range(int(steps.max()) if len(steps) else 0):
        on = (steps > k).nonzero()[:, 0]  # those who still train
        first = k % cuts[on] * whole[on]
        inside = at < torch.minimum(whole[on], size[on] - first)[:, None]  # [s, B]
        place = (first[:, None] + at) * inside
        index = order[on.to(device), (k // cuts[on]).to(device)].gather(1, place.to(device))
        on, weight = on.to(device), (inside.double() / inside.sum(1, keepdim=True)).to(w)
        rows, samples, labels = w[on], x[index], y[index]
        if relabel is not None:
            labels = relabel[on].gather(1, labels)
        scores = torch.einsum("sbi,sci->sbc", samples, rows[:, :matrix].view(len(on), -1, inputs))
        scores = scores + rows[:, None, matrix:] if bias else scores
        losses, slope = losses_and_slopes(criterion, scores, labels)
        loss[on] += (losses * weight).masked_fill(weight == 0, 0.0).sum(1).double()
        slope = (slope * weight[..., None]).masked_fill(weight[..., None] == 0, 0.0)  # [s, B, C]
        grad = torch.cat([torch.einsum("sbc,sbi->sci", slope, samples).flatten(1), *([slope.sum(1)] if bias else [])], 1)
        if grad_sum is not None:
            grad_sum[on] += grad + weight_decay * rows
        own = None if buffer is None else buffer[on]
        sgd.reference(
            rows, grad, lr, None if shift is None else shift[on], mask if mask is None or mask.dim() == 1 else mask[on], mu,
            None if mu_rows is None else mu_rows.to(device)[on], None if anchor is None else anchor[on], momentum, own, weight_decay,
        )  # fmt: skip
        w[on] = rows
        if buffer is not None and own is not None:
            buffer[on] = own
    return loss


def losses_and_slopes(
    criterion: str,
    scores: Tensor,  # [s, B, C]
    y: Tensor,  # [s, B]
) -> tuple[Tensor, Tensor]:
    """Per-sample losses [s, B] and their derivative by the scores [s, B, C]."""
    if criterion == "cross_entropy":
        log_p = scores.log_softmax(2)
        index = y[..., None]
        slope = log_p.exp()
        slope.scatter_add_(2, index, torch.full_like(index, -1, dtype=slope.dtype))
        return -log_p.gather(2, index)[..., 0], slope
    z = scores.reshape(y.shape)
    if criterion == "hinge":
        sign = torch.where(y > 0, 1.0, -1.0).to(z.dtype)
        margin = 1 - sign * z
        return margin.clamp(min=0), torch.where(margin >= 0, -sign, torch.zeros_like(sign)).view_as(scores)
    gap, factor = z - y.to(z.dtype), 1.0 if criterion == "squared" else 0.5
    return factor * gap * gap, (2 * factor * gap).view_as(scores)


def _fake(w: Tensor, *args: Any) -> Tensor:
    return w.new_empty(w.shape[0], dtype=torch.float64)


_op: Callable[..., Tensor] = define(
    "linear_sgd_(Tensor(a!) w, Tensor x, Tensor y, Tensor? relabel, Tensor order, Tensor size, Tensor steps, int batch_size, "
    "bool drop_last, str criterion, bool bias, float lr, Tensor? shift, Tensor? mask, float mu, Tensor? mu_rows, Tensor? anchor, "
    "float momentum, float weight_decay, Tensor(b!)? grad_sum) -> Tensor",
    reference,
    _fake,
)


def linear_sgd_(w: Tensor, *args: Any) -> Tensor:  # [S] float64
    """`reference`, by a kernel where there is one; w and the last argument, grad_sum, are changed."""
    loss = _op(w, *args)
    changed(w, args[-1])
    return loss
