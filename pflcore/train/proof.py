"""Is a faster form of a model the model? Compared once a run, before anything is trained.

A form is any function that gives losses and gradients of several clients' rows at once: a written-out chain, a kernel, a pass under
`vmap`. It is held against the module itself, run by plain autograd with its own parameters: in training
and in evaluation mode, with two batch sizes, at the start plus seeded noise, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.data.federation import Federation
from pflcore.nn.mode import forward_mode
from pflcore.train.net import Net

SIZES = (2, 5)  # batch sizes; batch norm takes no batch of one in training
LARGE = 1 << 19  # parameters beyond which float64 copies would cost more memory than many a run: then one client in the model's own dtype


class Trial(NamedTuple):
    """What a form is asked, and what the module answers."""

    rows: Tensor  # [s, P]
    x: Tensor  # [s, B, ...]
    y: Tensor  # [s, B, ...]
    buffers: Tensor  # [s, b]
    seeds: Tensor  # [s] int64, for pflcore.nn.Dropout
    train: bool
    losses: Tensor  # [s]
    grads: Tensor  # [s, P]

    def to(self, dtype: torch.dtype) -> Trial:
        return Trial(*(v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in self))  # type: ignore[arg-type]


Form = Callable[[Trial], tuple[Tensor, Tensor]]  # losses [s], gradients [s, P]


def trials(net: Net, data: Federation, sizes: Sequence[int] = SIZES, seed: int = 0) -> tuple[Net, list[Trial]]:
    """The net that forms are made of for the comparison, and the trials."""
    wide = in_float64(net) if net.size <= LARGE else None
    try:
        return made(wide or net, data, sizes, seed)
    except (RuntimeError, TypeError):  # a model that fixes a dtype somewhere
        if wide is None:
            raise
        return made(net, data, sizes, seed)


def made(net: Net, data: Federation, sizes: Sequence[int], seed: int) -> tuple[Net, list[Trial]]:
    count = 2 if net.size <= LARGE else 1
    gen, module = torch.Generator().manual_seed(seed), copy.deepcopy(net.module)
    batches = []
    for size in sizes:
        noise = torch.randn(count, net.size, generator=gen, dtype=torch.float64).to(net.w0)
        x, y = (like(t, net).unflatten(0, (count, size)) for t in samples(data, count * size))
        x = padded(x, module)
        rows = net.w0 + noise.mul_(spread(net))
        buffers, seeds = net.b0.expand(count, -1).clone(), torch.arange(count, device=net.w0.device) + 7
        for train in (True, False):
            answers = [answer(net, module, rows[i], x[i], y[i], train, seeds[i]) for i in range(count)]
            batches.append(Trial(rows, x, y, buffers, seeds, train, *(torch.stack(a) for a in zip(*answers, strict=True))))
    return net, batches


def difference(form: Form, given: Sequence[Trial]) -> str | None:
    """How the form differs from the module, in a few words; None where it does not. What the form raises comes through."""
    for t in given:
        exact = t.rows.dtype == torch.float64
        losses, grads = form(t)
        for what, got, want in (("loss", losses, t.losses), ("gradient", grads, t.grads)):
            size = float(want.abs().max().nan_to_num(0.0)) if want.numel() else 0.0
            gap = float((got - want).abs().nan_to_num(0.0).max()) if want.numel() else 0.0
            if not torch.equal(got.isnan(), want.isnan()) or gap > (1e-10 if exact else 1e-3) * max(1.0, size):
                mode = "training" if t.train else "evaluation"
                return f"its {what} is another in {mode} mode (off by {gap:.1e}, the largest is {size:.1e})"
    return None


def answer(net: Net, module: nn.Module, row: Tensor, x: Tensor, y: Tensor, train: bool, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient [P] of the module itself, as a user would take them by hand."""
    net.load(module, row, net.b0).train(train)
    with forward_mode(train, None, seed), torch.enable_grad():
        loss = net.criterion(module(x), y)
    params = dict(module.named_parameters())
    grads = torch.autograd.grad(loss, [params[n] for n in net.names], allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat([g.reshape(-1) for g in grads])


def in_float64(net: Net) -> Net:
    other = net.to(net.w0.device)
    other.module.double()
    other.dtype, other.w0, other.b0 = torch.float64, other.w0.double(), other.b0.double()
    return other


def samples(data: Federation, count: int) -> tuple[Tensor, Tensor]:
    """`count` training samples and their labels, from as many clients as there are, some twice where there are too few."""
    lists = data.lists("train")
    each = -(-count // len(lists))
    index = torch.cat([i[:each] for i in lists[:count]])
    index = index.repeat(-(-count // len(index)))[:count]
    return data.x[index], data.y[index]


def padded(x: Tensor, module: nn.Module) -> Tensor:
    """Every other sample ends in what an embedding takes for padding, whose row gets no gradient: samples that were drawn may have none."""
    for m in module.modules():
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and not x.is_floating_point() and x.dim() > 2:
            x = x.clone()
            x[:, ::2, ..., -1] = m.padding_idx
    return x


def like(t: Tensor, net: Net) -> Tensor:
    return t.to(net.dtype) if t.is_floating_point() else t


def spread(net: Net) -> Tensor:
    """The size of the noise [P]: half of each parameter's own, and something for one that starts at zero."""
    each = [net.w0[s].square().mean().sqrt() * 0.5 + 0.01 for s in net.slices.values()]
    return torch.cat([e.expand(n) for e, n in zip(each, net.sizes, strict=True)])
