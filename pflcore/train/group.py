"""The part of a cohort that is trained together: its batches, its steps, and the gradients they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore.nn.mode import context, forward_mode
from pflcore.ops.chain import chain_grad, chain_sgd_
from pflcore.ops.sgd import check_sgd, clipped, corrected
from pflcore.train.adamw import AdamW
from pflcore.train.chain import Chain
from pflcore.train.net import Net
from pflcore.train.random import client_seeds, shuffles, uniforms
from pflcore.train.steps import Step
from pflcore.train.training import Training
from pflcore.train.workers import onto

if TYPE_CHECKING:
    from pflcore.train import Local

LossFn = Callable[[Net, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
EPOCH_BYTES = 1 << 26  # an epoch's batches are gathered at once up to this size


class Piece:
    """The clients `pos` of a cohort, largest first, on their way through their batches.

    Sorting by size makes the clients that share a batch size neighbours, so every step works on slices of the rows.
    """

    def __init__(
        self,
        local: Local,
        pos: Tensor,
        loss: LossFn | None,
        extra: dict[str, Tensor] | None,
        noise: int,
        epochs: int | None,
        steps: int | None,
        batches: int,
        stream: str,
        probe: bool,
        by_size: bool,
        alone: bool = False,
    ) -> None:
        t, data, engine = local.setting.training, local.setting.data, local.setting.engine
        self.local, self.pos, self.loss_fn, self.probe, self.data = local, pos, loss, probe, data
        self.batches, self.own_steps = batches, steps
        self.at = onto(pos, local.buffers.device)
        self.extra = {k: self.mine(v) for k, v in (extra or {}).items()}
        self.buffers = self.mine(local.buffers)
        self.size = local._size[pos.numpy()]
        self.relabel = None if data.relabel is None else data.relabel[onto(local.ids[pos], data.relabel.device)]
        self.vmap = engine.name == "vmap" and not alone
        self.chain = engine.chain if loss is None and not alone else None
        if epochs is None and steps is None:
            epochs = t.epochs
        plan = engine.plan((tuple(self.size.tolist()), epochs, steps, batches, by_size, self.chain is not None, local.net.joins), t)
        self.steps, self.taken, passes = plan
        self.losses = torch.zeros(len(pos), dtype=torch.float64, device=data.y.device)
        self._draw(t, stream, passes, noise)
        self.leaves: list[Tensor] | None = None
        self._epoch: tuple[int, Tensor, Tensor] | None = None

    def mine(self, rows: Tensor) -> Tensor:
        """A copy of these clients' rows of the cohort's [S, ...], wherever they are."""
        return rows[self.at if rows.device == self.at.device else self.pos]

    def mean(self, total: Tensor) -> Tensor:
        """`total` [s] or [s, Q] by the number of steps that each client took."""
        taken = onto(self.taken, total.device).to(total.dtype)
        return total / (taken if total.dim() > 1 else taken[:, 0])

    def _draw(self, t: Training, stream: str, passes: int, noise: int) -> None:
        """The clients' shuffles and noise: each (seed, round, client, stream) has its own."""
        local, device = self.local, self.data.y.device
        ids = local._ids[self.pos.numpy()]
        round = local.round if t.reshuffle else 0
        lists = self.data.lists("train")
        begin = lists.begin[torch.from_numpy(ids)][:, None]
        orders = []
        for p in range(passes):
            order = torch.from_numpy(shuffles(client_seeds(ids, local.setting.seed, round, stream, p if t.reshuffle else 0), self.size))
            orders.append(order.add_(begin)[:, None])
        order = orders[0] if passes == 1 else torch.cat(orders, 1)
        self.order = lists.flat.take(onto(order, lists.flat.device))  # [s, passes, n_max] positions in the pool
        if self.chain is not None and not self.chain.dropout:
            return
        # by pass and place within it: a step's number over the epochs depends on who else is in the piece
        seeds = [client_seeds(ids, local.setting.seed, local.round, stream, "noise", p) for p in range(passes)]
        self.seeds = onto(torch.from_numpy(np.stack(seeds, 1).view(np.int64)), device)  # [s, passes]
        steps = -(-int(self.size[0]) // t.batch_size)
        draws = [uniforms(one, steps * noise).view(len(ids), steps, noise) for one in seeds] if noise else []
        self.noise = onto(torch.stack(draws, 1), device) if noise else None  # [s, passes, steps, noise]

    def samples(self, a: int, b: int, batch: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """x [s, B, ...] and the clients' own labels y [s, B] of a minibatch."""
        epoch, first, last = batch
        if self._epoch is None or self._epoch[0] != epoch:
            whole = self.order[:, epoch]
            if whole.numel() * self.data.x[0].numel() * self.data.x.element_size() > EPOCH_BYTES:
                index = whole[a:b, first:last]
                return self.data.x[index], self._labels(index, a, b)
            x = self.data.x.index_select(0, whole.flatten()).unflatten(0, whole.shape)  # faster than x[whole]
            self._epoch = epoch, x, self._labels(whole, 0, len(self.pos))
        _, x, y = self._epoch
        return x[a:b, first:last], y[a:b, first:last]

    def _labels(self, index: Tensor, a: int, b: int) -> Tensor:
        y = self.data.y[index]
        return y if self.relabel is None else self.relabel[a:b].gather(1, y.flatten(1)).view_as(y)

    def gradient(self, rows: Tensor, step: Step, which: int = 0, out: Tensor | None = None) -> Tensor:
        """The gradient [s, Q] at `rows` [s, Q] of the step's `which`-th minibatch, in `out` where that helps."""
        if self.leaves is not None:
            return torch.cat([g.reshape(-1) for g in self._on_leaves(step)], out=None if out is None else out[0])[None]
        a, b = step.a, step.b
        if self.chain is not None:
            losses, g = self._by_chain(self.chain, rows, step, which)
        else:
            losses, g = self._autograd(rows, *self.samples(a, b, step.batches[which]), step, which)
        if which == 0:
            self.losses[a:b] += losses
        return g

    def train(
        self,
        rows: Tensor,  # [s, Q], changed
        lr: float,
        *,
        shift: Tensor | None,  # [s, Q]
        mask: Tensor | None,  # [Q] or [s, Q]
        mu: float | Tensor,  # or [s]
        anchor: Tensor | None,  # [s, Q]
        grads: Tensor | None,  # [s, Q], added to
    ) -> None:
        """Takes all steps; `grads` collects the minibatch gradients."""
        t = self.local.setting.training
        mus = mu if isinstance(mu, Tensor) and mu.dim() else None
        adamw = AdamW(t, rows) if t.local_optimizer == "adamw" else None
        if self.chain is not None or adamw is not None:
            check_sgd(rows, rows, lr, shift, mask, mu, anchor, 0.0, None, t.weight_decay)
        if self.chain is not None and adamw is None:
            batches = (self.order, torch.from_numpy(self.size), self.taken[:, 0].long(), t.batch_size, t.drop_last)
            pull = (0.0 if mus is not None else float(mu), mus, anchor)
            how = (lr, shift, mask, *pull, t.momentum, t.weight_decay, t.clip_grad or float("inf"), grads)
            self.losses += chain_sgd_(rows, *self._head(self.chain), *batches, self.seeds if self.chain.dropout else None, *how)
            return
        more = (shift, anchor, mask, grads, adamw, t.clip_grad)
        plain = all(v is None for v in more) and not (t.momentum or t.weight_decay)
        momentum = torch.zeros_like(rows) if t.momentum else None
        self.bind(rows)
        space = torch.empty_like(rows)  # touched only where a gradient is asked for
        for step in self.steps:
            s = slice(step.a, step.b)
            if plain and self.descend(rows[s], step, lr):
                continue
            g = self.gradient(rows[s], step, out=space[s])
            if t.clip_grad is not None:
                g = clipped(g, t.clip_grad)
            if grads is not None:
                grads[s] += g
                if t.gradient_decay:
                    grads[s].add_(rows[s], alpha=t.gradient_decay)
            own_shift, own_anchor = (None if v is None else v[s] for v in (shift, anchor))
            own_mask = mask if mask is None or mask.dim() == 1 else mask[s]
            if adamw is not None:
                d = corrected(rows[s], g, own_shift, mu, None if mus is None else mus[s], own_anchor)
                adamw.step(s, rows[s], d, lr, own_mask)
                continue
            ops.sgd_step_(
                rows[s],
                g,
                lr,
                shift=own_shift,
                mask=own_mask,
                mu=mu if mus is None else mus[s],
                anchor=own_anchor,
                momentum=t.momentum,
                buffer=None if momentum is None else momentum[s],
                weight_decay=t.weight_decay,
            )

    def bind(self, rows: Tensor) -> None:
        """From now on `gradient` and `descend` get these very rows [1, P]: the model's parameters may be views of them."""
        if not self.vmap and self.loss_fn is None and self.chain is None and rows.shape == (1, self.local.net.size):
            self.leaves = self.local.net.leaves(rows[0])

    def descend(self, rows: Tensor, step: Step, lr: float) -> bool:
        """Takes a plain SGD step in place where that needs no gradient row in memory; says whether it did."""
        if self.leaves is not None:
            grads = self._on_leaves(step)
            with torch.no_grad():
                torch._foreach_add_(self.leaves, grads, alpha=-lr)
            return True
        return False

    def _head(self, chain: Chain, count: int | None = None) -> tuple[Any, ...]:
        """The ops' arguments for the first `count` clients."""
        return (*chain.head, self.data.x, self.data.y, None if self.relabel is None else self.relabel[:count])

    def _by_chain(self, chain: Chain, rows: Tensor, step: Step, which: int) -> tuple[Tensor, Tensor]:
        """Losses [s] and gradients [s, Q] of everybody's own k-th batch."""
        b, t, passes = step.b, self.local.setting.training, self.order.shape[1]
        size = torch.from_numpy(self.size[:b])
        whole = size.clamp(max=t.batch_size)
        cuts = size // whole if t.drop_last else -(size // -whole)
        # by the client's own number of passes, whoever else is there
        own = passes // self.batches if self.own_steps is None else -(-self.own_steps // cuts)
        epoch, place = step.k // cuts + which * own, step.k % cuts
        first = place * whole
        count = torch.minimum(whole, size - first)
        at = (first[:, None] + torch.arange(int(count.max()))).clamp(max=int(size[0]) - 1)
        index = self.order[torch.arange(b), epoch].gather(1, onto(at, self.order.device))
        seeds = self.seeds[torch.arange(b), epoch] + onto(place, self.order.device) if chain.dropout else None
        g, losses = chain_grad(rows.detach(), *self._head(chain, b), index, count, seeds)
        return losses, g

    def _place(self, step: Step, which: int = 0) -> tuple[int, int]:
        """The pass over the data and the place within it of the step's `which`-th minibatch."""
        epoch, first, _ = step.batches[which]
        return epoch, first // self.local.setting.training.batch_size

    def _on_leaves(self, step: Step) -> tuple[Tensor, ...]:
        assert self.leaves is not None
        net = self.local.net
        x, y = self.samples(0, 1, step.batches[0])
        epoch, place = self._place(step)
        with forward_mode(True, self.buffers[0], self.seeds[0, epoch] + place, alone=True):
            loss = net.criterion(net.on_leaves(x[0]), y[0])
            if context.buffers is not None and net.buffer_names:
                self.buffers[0] = context.buffers
        self.losses += loss.detach()
        return torch.autograd.grad(loss, self.leaves, allow_unused=True, materialize_grads=True)

    def _autograd(self, rows: Tensor, x: Tensor, y: Tensor, step: Step, which: int) -> tuple[Tensor, Tensor]:
        a, b = step.a, step.b
        extra = {k: v[a:b] for k, v in self.extra.items()}
        if self.noise is not None:
            epoch, place = self._place(step)
            extra["noise"] = self.noise[a:b, epoch, place]
        epoch, place = self._place(step, which)
        seeds = self.seeds[a:b, epoch] + place
        losses, g, buffers = gradients(self.local.net, self.loss_fn, self.vmap, True, rows, x, y, self.buffers[a:b], seeds, extra)
        if buffers.numel():
            self.buffers[a:b] = buffers
        return losses, g

    def grad_function(self, step: Step) -> Callable[..., Tensor]:
        """For `each_batch`: the step's loss is that of the first look at its first minibatch."""
        before: list[Tensor] = []

        def grad(w: Tensor, which: int = 0) -> Tensor:
            g = self.gradient(w, step, which)
            if which == 0:
                losses = self.losses[step.a : step.b]
                if before:
                    losses.copy_(before[0])
                else:
                    before.append(losses.clone())
            return g

        return grad

    def finish(self) -> None:
        if not self.probe:
            self.local.buffers[self.at] = self.buffers


def gradients(
    net: Net,
    loss_fn: LossFn | None,
    vmap: bool,
    train: bool,
    rows: Tensor,  # [s, Q]
    x: Tensor,  # [s, B, ...]
    y: Tensor,  # [s, B, ...]
    buffers: Tensor,  # [s, b]
    seeds: Tensor,  # [s]
    extra: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [s], gradients [s, Q] and new buffers by autograd: of all clients at once under vmap, or of one (s = 1)."""

    def loss(w: Tensor, x: Tensor, y: Tensor, buffers: Tensor, seed: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with forward_mode(train, buffers, seed, alone=not vmap):
            value = net.loss(w, x, y) if loss_fn is None else loss_fn(net, w, x, y, extra)
            return value, context.buffers if context.buffers is not None else buffers

    w = rows.detach().requires_grad_()
    if vmap:
        losses, buffers = torch.vmap(loss)(w, x, y, buffers, seeds, extra)
    else:
        one, own = loss(w[0], x[0], y[0], buffers[0], seeds[0], {k: v[0] for k, v in extra.items()})
        losses, buffers = one[None], own[None]
    (g,) = torch.autograd.grad(losses.sum(), w)
    return losses.detach(), g, buffers
