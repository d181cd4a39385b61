"""Whole local training, gradients and evaluation of models that are a chain of layers, many clients
in one call.

A model is a *program*: a table of layers with their shapes and the places of their weights in a
flat row (see `layer`). The kernels keep a client's row, activations and gradients in the caches of
one core; results depend neither on the threads nor on who else takes part. The references below
take every client's k-th step at once, in differentiable torch: they are what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import changed, define
from .sgd import clipped
from .sgd import reference as sgd_step_

KINDS = ("linear", "conv", "pool", "act", "flatten", "dropout", "norm", "scale")
ACTS: tuple[Callable[[Tensor], Tensor], ...] = (torch.relu, torch.tanh, torch.sigmoid, F.gelu)
FIELDS = 8
CHUNK = 128  # samples of a client that the references take at once

_STEP = -7046029254386353131  # 2^64 / golden ratio, as int64: successive counters land far apart
# the multipliers of the 64-bit finaliser of SplitMix (Steele et al. 2014)
_MIX = (-4658895280553007687, -7723592293110705685)


def layer(kind: str, *fields: float) -> list[float]:
    """One line of a program: the number of its kind, and

    - linear: outputs, place of the weight [O, I], of the bias (-1: none)
    - conv: outputs, kernel height, width, stride, padding above, left, place of the weight [O, C,
      KH, KW], of the bias
    - pool: 1 maximum or 2 mean, window height, width, stride down, across
    - act: 1 ReLU, 2 tanh, 3 sigmoid, 4 GELU · flatten · dropout: the probability, above 0
    - norm: groups, features that share a weight, eps, place of the weight, of the bias (-1: none)
    - scale: place of a factor for each feature; 0 gives 0 whatever it meets
    """
    return [float(KINDS.index(kind)), *fields, *[0.0] * (FIELDS - len(fields))]


# --- references -------------------------------------------------------------


def shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # >> repeats the sign bit; a hash needs zeros


def mixed(z: Tensor) -> Tensor:
    """A bijective hash of int64 numbers, elementwise: bits of the result look independent even for
    successive numbers."""
    z = (z ^ shifted(z, 30)) * _MIX[0]
    z = (z ^ shifted(z, 27)) * _MIX[1]
    return z ^ shifted(z, 31)


def uniform(seed: Tensor, layer: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Integers from 0 to 2^24 - 1, [..., *shape] for seeds [...], a function of the seed, `layer`
    and each element's place alone."""
    count = 1
    for s in shape:
        count *= s
    places = torch.arange(count, device=seed.device) * _STEP
    # wrapped by hand: Python's numbers do not overflow
    jump = (layer * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)
    return shifted(mixed(mixed(seed + jump)[..., None] + places), 40).view(*seed.shape, *shape)


def forward(program: Tensor, w: Tensor, x: Tensor, seeds: Tensor | None) -> Tensor:  # noqa: C901 (a kind of layer each)
    """Scores [s, B, C] of the models `w` [s, Q] on `x` [s, B, ...]; with `seeds` [s] in training
    mode."""
    s, random = len(w), 0

    def part(at: float, *sizes: int) -> Tensor:
        count = 1
        for n in sizes:
            count *= n
        return w[:, int(at) : int(at) + count].view(s, *sizes)

    for kind, *field in program.tolist():
        name, n = KINDS[int(kind)], [int(f) for f in field]
        if name == "linear":
            x = x.flatten(2)
            y = torch.bmm(x, part(n[1], n[0], x.shape[2]).mT)
            x = y if n[2] < 0 else y + part(n[2], 1, n[0])
        elif name == "conv":
            weight = part(n[6], n[0], x.shape[2], n[1], n[2])
            bias = None if n[7] < 0 else part(n[7], n[0]).reshape(-1)
            y = F.conv2d(
                x.transpose(0, 1).flatten(1, 2),
                weight.flatten(0, 1),
                bias,
                n[3],
                (n[4], n[5]),
                groups=s,
            )
            x = y.unflatten(1, (s, n[0])).transpose(0, 1)
        elif name == "pool":
            pool = F.max_pool2d if n[0] == 1 else F.avg_pool2d
            x = pool(x.flatten(0, 1), (n[1], n[2]), (n[3], n[4])).unflatten(0, x.shape[:2])
        elif name == "act":
            x = ACTS[n[0] - 1](x)
        elif name == "flatten":
            x = x.flatten(2)
        elif name == "dropout":
            if seeds is not None and field[0] < 1:
                keep = uniform(seeds, random, x.shape[1:]) >= round(field[0] * (1 << 24))
                x = x * keep.to(x.dtype) / (1 - field[0])
            elif seeds is not None:
                x = x * 0
            random += 1
        elif name == "norm":
            y = x.reshape(*x.shape[:2], n[0], -1)
            gap = y - y.mean(-1, keepdim=True)
            y = (gap / (gap.square().mean(-1, keepdim=True) + field[2]).sqrt()).view(x.shape)
            if n[3] >= 0:
                flat = y.flatten(2)
                weight, bias = (
                    part(at, flat.shape[2] // n[1]).repeat_interleave(n[1], 1)[:, None]
                    for at in n[3:5]
                )
                y = (flat * weight + bias).view(x.shape)
            x = y
        else:
            lam = part(n[0], 1, x.shape[2])
            x = torch.where(lam != 0, x * lam, 0.0)
    return x.flatten(2)


def losses(criterion: str, scores: Tensor, y: Tensor) -> Tensor:
    """Each sample's loss [s, B] of scores [s, B, C] and labels or numbers [s, B]."""
    if criterion == "cross_entropy":
        return F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    z = scores.reshape(y.shape)
    if criterion == "hinge":
        return (1 - torch.where(y > 0, 1.0, -1.0).to(z.dtype) * z).relu()
    if criterion == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(z, y.to(z.dtype), reduction="none")
    return (z - y.to(z.dtype)).square() * (1.0 if criterion == "squared" else 0.5)


def _samples(
    x: Tensor, y: Tensor, relabel: Tensor | None, shape: tuple[int, ...], index: Tensor
) -> tuple[Tensor, Tensor]:
    """x [s, B, ...] and labels [s, B] at the places `index` [s, B]; `relabel` is of these
    clients."""
    labels = y[index]
    return x[index].reshape(*index.shape, *shape), labels if relabel is None else relabel.gather(
        1, labels
    )


def _gradient(
    program: Tensor,
    criterion: str,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    seeds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient [s, Q] of `(weight * losses).sum(1)`, and those sums [s]; a sample of weight 0
    does not count, whatever its loss."""
    with torch.enable_grad():
        rows = w.detach().requires_grad_()
        total = torch.where(
            weight != 0, losses(criterion, forward(program, rows, x, seeds), y) * weight, 0.0
        ).sum(1)
        (g,) = torch.autograd.grad(total.sum(), rows)
    return g, total.detach()


def sgd_reference(
    w: Tensor,  # [S, Q], changed
    program: Tensor,  # [L, 9] float64
    criterion: str,
    c: int,
    h: int,
    wide: int,  # of one sample
    x: Tensor,  # [n, ...] the pool
    y: Tensor,  # [n] int64 labels, or numbers of w's dtype
    relabel: Tensor | None,  # [S, classes] a label as each client knows it
    order: Tensor,  # [S, passes, longest] places in the pool
    size: Tensor,  # [S] samples of each client, on the CPU
    steps: Tensor,  # [S] steps it takes, on the CPU
    batch_size: int,
    drop_last: bool,
    # [S, passes] of the clients' dropout, the place within the pass is added; None: no dropout
    seeds: Tensor | None,
    lr: float,
    shift: Tensor | None,  # [S, Q]
    mask: Tensor | None,  # [Q] or [S, Q]
    mu: float,
    mu_rows: Tensor | None,  # [S], replaces mu
    anchor: Tensor | None,  # [S, Q]
    momentum: float,
    weight_decay: float,
    clip: float,  # the largest norm of a minibatch's gradient; inf: any
    grad_sum: Tensor | None,  # [S, Q], added to
) -> Tensor:  # [S] float64, the sum of the batches' mean losses
    """Everybody's k-th step at once, with sample weights that are 0 beyond a short batch."""
    device = w.device
    buffer = torch.zeros_like(w) if momentum else None
    loss = torch.zeros(len(w), dtype=torch.float64, device=device)
    whole = torch.clamp(size, max=batch_size).clamp(min=1)
    cuts = (size // whole if drop_last else -(size // -whole)).clamp(min=1)
    at = torch.arange(min(batch_size, max(1, order.shape[2])))
    for k in range(int(steps.max()) if len(steps) else 0):
        on = (steps > k).nonzero()[:, 0]  # those who still train
        turn = k % cuts[on]
        first, epoch = turn * whole[on], k // cuts[on]
        inside = at < torch.minimum(whole[on], size[on] - first)[:, None]  # [s, B]
        place = (first[:, None] + at) * inside
        some, epoch = on.to(device), epoch.to(device)
        index = order[some, epoch].gather(1, place.to(device))
        weight = (inside.double() / inside.sum(1, keepdim=True)).to(w)
        xs, ys = _samples(x, y, None if relabel is None else relabel[some], (c, h, wide), index)
        rows = w[some]
        grad, value = _gradient(
            program,
            criterion,
            rows,
            xs,
            ys,
            weight,
            None if seeds is None else seeds[some, epoch] + turn.to(device),
        )
        loss[some] += value.double()
        if clip < float("inf"):
            grad = clipped(grad, clip)
        if grad_sum is not None:
            grad_sum[some] += grad + weight_decay * rows
        own = None if buffer is None else buffer[some]
        sgd_step_(
            rows,
            grad,
            lr,
            None if shift is None else shift[some],
            mask if mask is None or mask.dim() == 1 else mask[some],
            mu,
            None if mu_rows is None else mu_rows.to(device)[some],
            None if anchor is None else anchor[some],
            momentum,
            own,
            weight_decay,
        )
        w[some] = rows
        if buffer is not None and own is not None:
            buffer[some] = own
    return loss


def grad_reference(
    w: Tensor,  # [S, Q]
    program: Tensor,
    criterion: str,
    c: int,
    h: int,
    wide: int,
    x: Tensor,
    y: Tensor,
    relabel: Tensor | None,
    order: Tensor,  # [S, longest] places in the pool
    size: Tensor,  # [S] of which each client takes so many
    seeds: Tensor | None,  # [S]; None: evaluation mode
) -> tuple[Tensor, Tensor]:  # [S, Q] gradients of the mean losses, [S] float64
    grad, loss, of = (
        torch.zeros_like(w),
        torch.zeros(len(w), dtype=torch.float64, device=w.device),
        size.to(w.device),
    )
    # a mask's numbers go through the whole batch
    step = max(1, order.shape[1]) if seeds is not None else CHUNK
    for a in range(0, order.shape[1], step):
        index = order[:, a : a + step]
        inside = torch.arange(a, a + index.shape[1], device=w.device) < of[:, None]
        weight = (inside.double() / of[:, None].clamp(min=1)).to(w)
        xs, ys = _samples(x, y, relabel, (c, h, wide), torch.where(inside, index, order[:, :1]))
        g, value = _gradient(program, criterion, w, xs, ys, weight, seeds)
        grad += g
        loss += value.double()
    return grad, loss


def eval_reference(
    w: Tensor,  # [S, Q]; an expanded row where all have one model
    program: Tensor,
    criterion: str,
    c: int,
    h: int,
    wide: int,
    x: Tensor,
    y: Tensor,
    relabel: Tensor | None,
    order: Tensor,  # [n] places in the pool, client after client
    begin: Tensor,  # [S + 1] where each one's begin, on the CPU
    classes: int,  # 0: no scores wanted
) -> tuple[Tensor, Tensor, Tensor]:  # losses [n] float64, right answers [n], scores [n, classes]
    n = len(order)
    owner = torch.arange(len(w)).repeat_interleave(begin.diff().cpu()).to(w.device)
    loss, right = (
        torch.zeros(n, dtype=torch.float64, device=w.device),
        torch.zeros(n, dtype=torch.bool, device=w.device),
    )
    scores = w.new_empty(n if classes else 0, classes)
    ends = begin.tolist() if len(w) > 1 and w.stride(0) else [0, n]
    for i, (first, last) in enumerate(pairwise(ends)):
        for a in range(first, last, CHUNK):
            b = min(last, a + CHUNK)
            labels = y[order[a:b]]
            if relabel is not None:
                labels = relabel[owner[a:b]].gather(1, labels[:, None])[:, 0]
            found = forward(
                program, w[i : i + 1], x[order[a:b]].reshape(1, b - a, c, h, wide), None
            )[0]
            loss[a:b] = losses(criterion, found[None], labels[None])[0].double()
            right[a:b] = (
                found.argmax(1) == labels
                if criterion == "cross_entropy"
                else (found[:, 0] > 0) == (labels > 0)
            )
            if classes:
                scores[a:b] = found
    return loss, right, scores


# --- as torch sees them -----------------------------------------------------

_HEAD = (
    "Tensor program, str criterion, int c, int h, int w_, Tensor x, Tensor y, Tensor? relabel, "
    "Tensor order"
)


def _fake_sgd(w: Tensor, *args: Any) -> Tensor:
    return w.new_empty(w.shape[0], dtype=torch.float64)


def _fake_grad(w: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape), w.new_empty(w.shape[0], dtype=torch.float64)


def _fake_eval(w: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    n, classes = len(args[8]), args[10]
    return (
        w.new_empty(n, dtype=torch.float64),
        w.new_empty(n, dtype=torch.bool),
        w.new_empty(n if classes else 0, classes),
    )


_chain_sgd_: Callable[..., Tensor] = define(
    f"chain_sgd_(Tensor(a!) w, {_HEAD}, Tensor size, Tensor steps, int batch_size, bool drop_last, "
    "Tensor? seeds, float lr, "
    "Tensor? shift, Tensor? mask, float mu, Tensor? mu_rows, Tensor? anchor, float momentum, float "
    "weight_decay, float clip, "
    "Tensor(b!)? grad_sum) -> Tensor",
    sgd_reference,
    _fake_sgd,
)


def chain_sgd_(w: Tensor, *args: Any) -> Tensor:
    """See `sgd_reference`; autograd learns that `w` and the sums of gradients are not what they
    were."""
    loss = _chain_sgd_(w, *args)
    changed(w, args[-1])
    return loss


chain_grad: Callable[..., tuple[Tensor, Tensor]] = define(
    f"chain_grad(Tensor w, {_HEAD}, Tensor size, Tensor? seeds) -> (Tensor, Tensor)",
    grad_reference,
    _fake_grad,
)
chain_eval: Callable[..., tuple[Tensor, Tensor, Tensor]] = define(
    f"chain_eval(Tensor w, {_HEAD}, Tensor begin, int classes) -> (Tensor, Tensor, Tensor)",
    eval_reference,
    _fake_eval,
)
