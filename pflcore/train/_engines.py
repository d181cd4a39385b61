"""Gradients of many clients' models: the two engines, and the chain behind the same
question.

"loop" trains one client after another on each thread (convolutions and large models on
a CPU), "vmap" a chunk of clients at once (linear models, MLPs, GPUs). A model that is a
chain of layers is trained whole by a kernel. All take the same minibatches and agree up
to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore.data._federation import Federation
from pflcore.data._ragged import to_device
from pflcore.nn._context import forward_context, forward_state
from pflcore.ops._chain import chain_grad, chain_sgd_, has_kernels
from pflcore.ops._sgd import check_sgd, clipped, corrected
from pflcore.train._batches import Batches, BatchStep
from pflcore.train._chain import Chain
from pflcore.train._graphs import GradientGraphs, GraphFunction
from pflcore.train._net import Net
from pflcore.train._training import DEFAULT_BETAS, DEFAULT_EPS, Training

EPOCH_BYTES = 1 << 26  # an epoch's minibatches are gathered at once up to this size
# begins the names of a loss's own tensors among the inputs of a recorded step
EXTRA_PREFIX = "extra "
Tensors = dict[str, Tensor]
# net, row, x, y, extra
ObjectiveLoss = Callable[[Net, Tensor, Tensor, Tensor, Tensors], Tensor]


class Engine(NamedTuple):
    """What computes gradients."""

    name: str  # "loop" or "vmap"
    chain: Chain | None = None  # what the kernels train; the engine does the rest
    reason: str = "asked for"

    @property
    def form(self) -> str:
        """What trains: "chain" (kernels), "vmap" or "module"."""
        return (
            "chain"
            if self.chain is not None
            else "vmap"
            if self.name == "vmap"
            else "module"
        )


class Objective(NamedTuple):
    """What is minimized, if not the run's loss: each step is along `mask * (gradient +
    shift + mu * (w - anchor))`. Tensors are of the cohort's clients."""

    # mu: a number, [S]; anchor [S, Q]
    prox: tuple[Tensor | float, Tensor] | None = None
    shift: Tensor | None = None  # [S, Q] added to every gradient
    mask: Tensor | None = None  # [Q] or [S, Q]; where it is 0 nothing moves
    loss: ObjectiveLoss | None = None
    extra: Tensors = {}  # noqa: RUF012 [S, ...], whose slices the loss is given
    never_vmap: bool = False  # never under vmap, for a loss that it cannot carry

    def engine_for(self, usual: Engine) -> Engine:
        """What computes its gradients: the chain knows the run's loss alone."""
        if self.loss is None and not self.never_vmap:
            return usual
        return Engine("loop" if self.never_vmap else usual.name)

    def terms(self, w: Tensor) -> Tensors:
        """What is added to the gradients at `w` [S, Q], [S, ...], as `ops.sgd_step_`
        names it."""
        terms: Tensors = {}
        if self.prox is not None:
            # a number stays on the host: a card is not waited for
            mu, anchor = self.prox
            mu = (
                mu.to(w).reshape(-1) if isinstance(mu, Tensor) else w.new_full((1,), mu)
            )
            terms = {"mu": mu.expand(len(w)), "anchor": anchor}
        if self.shift is not None:
            terms["shift"] = self.shift
        if self.mask is not None:
            terms["mask"] = to_device(self.mask, w.device).to(w.dtype)
        return terms


def slice_terms(terms: Tensors, clients: Any) -> Tensors:
    """Some clients' terms; a mask [Q] is everybody's."""
    return {
        k: v if (k, v.dim()) == ("mask", 1) else v[clients] for k, v in terms.items()
    }


RUN_LOSS = Objective()  # the run's own loss alone


def gradients(  # noqa: PLR0913 (one call for two engines)
    net: Net,
    rows: Tensor,  # [s, Q]
    x: Tensor,  # [s, B, ...]
    y: Tensor,  # [s, B, ...]
    buffers: Tensor,  # [s, b]
    seeds: Tensor,  # [s]
    vmap: bool,
    train: bool,
    own: ObjectiveLoss | None = None,
    extra: Tensors = {},  # noqa: B006
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [s], gradients [s, Q], buffers [s, b] by autograd: of all under vmap,
    or of one."""

    def loss(
        extra: Tensors, w: Tensor, x: Tensor, y: Tensor, buffers: Tensor, seed: Tensor
    ) -> Any:
        with forward_context(train, buffers, seed, single_client=not vmap):
            value = net.loss(w, x, y) if own is None else own(net, w, x, y, extra)
            return value, forward_state.buffers

    w = rows.detach().requires_grad_()
    given = (w, x, y, buffers, seeds)
    if vmap:
        losses, after = torch.vmap(loss)(extra, *given)
    else:
        one = loss({k: v[0] for k, v in extra.items()}, *(t[0] for t in given))
        losses, after = (t[None] for t in one)
    (g,) = torch.autograd.grad(losses.sum(), w)
    return losses.detach(), g, after


def gather_samples(
    data: Federation,
    index: Tensor,  # [s, n] in the pool
    relabel: Tensor | None,  # [s, C]
) -> tuple[Tensor, Tensor]:
    """Samples x [s, n, ...] and labels y [s, n, ...] as the clients know them."""
    pool = (data.x, data.y)
    x, y = (t.index_select(0, index.flatten()).unflatten(0, index.shape) for t in pool)
    if relabel is not None:
        y = relabel.gather(1, y.flatten(1)).view_as(y)
    return x, y


def autograd_graph_function(
    net: Net, data: Federation, vmap: bool, own: ObjectiveLoss | None
) -> GraphFunction:
    """Gradients of a minibatch by autograd, as a function that can be recorded."""

    def graph_function(inputs: Tensors) -> Tensors:
        x, y = gather_samples(data, inputs["places"], inputs.get("relabel"))
        extra = {
            name.removeprefix(EXTRA_PREFIX): t
            for name, t in inputs.items()
            if EXTRA_PREFIX in name
        }
        state = (inputs["buffers"], inputs["seeds"])
        losses, g, after = gradients(
            net, inputs["w"], x, y, *state, vmap, True, own, extra
        )
        return {"losses": losses, "g": g, "buffers": after}

    return graph_function


def chain_graph_function(chain: Chain, data: Federation) -> GraphFunction:
    """Gradients of a minibatch by the chain's op, as a function that can be
    recorded."""

    def graph_function(inputs: Tensors) -> Tensors:
        pool = (*chain.fixed_args, data.x, data.y, inputs.get("relabel"))
        batch = (inputs["places"], inputs["size"], inputs.get("seeds"))
        g, losses = chain_grad(inputs["w"], *pool, *batch)
        return {"losses": losses, "g": g}

    return graph_function


@dataclass
class Chunk:
    """Some clients of a cohort, largest first, on their way through their
    minibatches."""

    net: Net
    data: Federation
    batches: Batches
    relabel: Tensor | None  # [s, C] labels as each client knows them
    buffers: Tensor  # [s, b], changed
    engine: Engine
    loss: ObjectiveLoss | None  # in place of the run's
    extra: Tensors  # [s, ...], its own tensors
    graphs: GradientGraphs | None = None  # on a GPU

    def __post_init__(self) -> None:
        self.losses = self.buffers.new_zeros(len(self.buffers), dtype=torch.float64)
        self.leaves: list[Tensor] = []
        self._epoch: int | None = None
        self._looked: BatchStep | None = None

    def samples(self, step: BatchStep, which: int = 0) -> tuple[Tensor, Tensor]:
        """x [s, B, ...] and the clients' own labels y [s, B, ...] of a minibatch."""
        s = step.clients
        epoch = step.epoch + which * step.epochs
        b = self.batches
        whole = b.order[:, epoch]
        if whole.numel() * self.data.x[0].nbytes > EPOCH_BYTES:
            return gather_samples(
                self.data, b.places(step, which), self._relabel_rows(s)
            )
        if self._epoch != epoch:
            labels = self._relabel_rows(slice(None))
            self._epoch, self._samples = epoch, gather_samples(self.data, whole, labels)
        x, y = self._samples
        return x[s, step.first : step.last], y[s, step.first : step.last]

    def _relabel_rows(self, clients: slice) -> Tensor | None:
        return None if self.relabel is None else self.relabel[clients]

    def gradient(self, step: BatchStep, w: Tensor, which: int = 0) -> Tensor:
        """The gradients [s, Q] at `w` [s, Q] on a step's `which`-th minibatch; its
        first look at the first one is the step's loss. The next call may overwrite
        them."""
        s = step.clients
        chain = self.engine.chain
        b = self.batches
        if self.graphs is not None:
            found = self.graphs.run(*self._recordable_step(step, w, which))
            losses = found["losses"]
            g = found["g"]
            if "buffers" in found:
                self.buffers[s] = found["buffers"]
        elif chain is not None:
            seeds = b.seeds_of(step, which) if chain.dropout else None
            pool = chain.kernel_args(self.data, self.relabel, s)
            places = b.places(step, which)
            counts = b.sample_counts(step)
            g, losses = chain_grad(w.detach(), *pool, places, counts, seeds)
        else:
            extra = {k: v[s] for k, v in self.extra.items()}
            vmap = self.engine.name == "vmap"
            batch = (
                *self.samples(step, which),
                self.buffers[s],
                b.seeds_of(step, which),
            )
            losses, g, self.buffers[s] = gradients(
                self.net, w, *batch, vmap, True, self.loss, extra
            )
        if which == 0 and self._looked is not step:
            self._looked = step
            self.losses[s] += losses
        return g

    def gradient_copy(self, step: BatchStep, w: Tensor, which: int = 0) -> Tensor:
        """The same in memory of its own."""
        g = self.gradient(step, w, which)
        return g if self.graphs is None else g.clone()

    def _recordable_step(
        self, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Hashable, GraphFunction, Tensors]:
        """A step's gradient as a function of tensors, these, and what else it
        depends on."""
        s = step.clients
        chain = self.engine.chain
        b = self.batches
        data = self.data
        inputs = {"w": w.detach(), "places": b.places(step, which)}
        if self.relabel is not None:
            inputs["relabel"] = self.relabel[s]
        pool = (id(data.x), id(data.y))
        if chain is not None:
            inputs["size"] = b.sample_counts(step)
            if chain.dropout:
                inputs["seeds"] = b.seeds_of(step, which)
            return (id(chain), *pool), chain_graph_function(chain, data), inputs
        inputs |= {"buffers": self.buffers[s], "seeds": b.seeds_of(step, which)}
        inputs |= {EXTRA_PREFIX + name: t[s] for name, t in self.extra.items()}
        vmap = self.engine.name == "vmap"
        key = (self.net, self.loss, vmap, *pool)
        return key, autograd_graph_function(self.net, data, vmap, self.loss), inputs

    def leaf_gradients(self, step: BatchStep) -> tuple[Tensor, ...]:
        """The gradient by parameters, at the row whose views `leaves` are: one
        client's."""
        x, y = self.samples(step)
        seeds = self.batches.seeds_of(step)
        with forward_context(True, self.buffers[0], seeds[0], single_client=True):
            loss = self.net.batch_loss(self.net.forward_bound(x[0]), y[0])
            self.buffers[0] = forward_state.buffers
        self.losses += loss.detach()
        return torch.autograd.grad(
            loss, self.leaves, allow_unused=True, materialize_grads=True
        )


# optimizers -------------------------------------------------------------------


def train_chunk(
    t: Training, lr: float, chunk: Chunk, mine: Tensors, terms: Tensors
) -> None:
    """Takes all steps of the clients' rows "w" [s, Q], in place; adds the minibatches'
    gradients, clipped and with SGD's weight decay, to "grad" [s, Q], where that is."""
    w = mine["w"]
    grads = mine.get("grad")
    sgd = t.local_optimizer == "sgd"
    chain = chunk.engine.chain
    shift, mask, mu, anchor = (terms.get(k) for k in ("shift", "mask", "mu", "anchor"))
    check_sgd(
        w,
        w,
        lr,
        shift,
        mask,
        0.0 if mu is None else mu,
        anchor,
        0.0,
        None,
        t.weight_decay,
    )
    if sgd and chain is not None and has_kernels(w.device):
        chunk.losses += sgd_by_kernels(chunk, chain, w, terms, t, lr, grads)
        return
    alone = (
        chain is None and chunk.engine.name == "loop" and w.shape == (1, chunk.net.size)
    )
    # On a GPU a row, whose gradient can be captured: with and without graphs, bits are
    # the same.
    if alone and chunk.loss is None and w.device.type == "cpu":
        chunk.leaves = chunk.net.leaves(w[0])
    more = (not sgd, terms, t.momentum, t.weight_decay, t.clip_grad, grads is not None)
    plain = not any(more)
    adamw = None if sgd else AdamW(w, lr, t, int(chunk.batches.taken.max()))
    velocity = torch.zeros_like(w) if t.momentum else None
    row = torch.empty_like(w) if chunk.leaves else w  # a gradient's
    for step in chunk.batches.steps:
        s = step.clients
        if chunk.leaves:
            found = chunk.leaf_gradients(step)
            if plain:  # no gradient as a row in memory
                with torch.no_grad():
                    torch._foreach_add_(chunk.leaves, found, alpha=-lr)
                continue
            g = torch.cat([p.reshape(-1) for p in found], out=row[0])[None]
        else:
            g = chunk.gradient(step, w[s])
        g = g if t.clip_grad is None else clipped(g, t.clip_grad)
        if grads is not None:
            grads[s] += g
            if t.gradient_decay:
                grads[s].add_(w[s], alpha=t.gradient_decay)
        own: dict[str, Any] = slice_terms(terms, s)
        if adamw is not None:
            adamw.step(s, g, own)
        else:
            buffer = None if velocity is None else velocity[s]
            ops.sgd_step_(
                w[s],
                g,
                lr,
                **own,
                momentum=t.momentum,
                buffer=buffer,
                weight_decay=t.weight_decay,
            )


def sgd_by_kernels(
    chunk: Chunk,
    chain: Chain,
    w: Tensor,
    terms: Tensors,
    t: Training,
    lr: float,
    grads: Tensor | None,
) -> Tensor:
    """All steps of SGD by the kernels of the chain, `w` [s, Q] in place: sums of
    losses [s]."""
    b = chunk.batches
    seeds = b.seeds if chain.dropout else None
    cut = (b.order, b.size, b.taken, t.batch_size, t.drop_last, seeds)
    shift, mask, mu, anchor = (terms.get(k) for k in ("shift", "mask", "mu", "anchor"))
    how = (lr, shift, mask, 0.0, mu, anchor, t.momentum, t.weight_decay)
    pool = chain.kernel_args(chunk.data, chunk.relabel, slice(None))
    return chain_sgd_(w, *pool, *cut, *how, t.clip_grad or math.inf, grads)


class AdamW:
    """Loshchilov and Hutter 2019, Algorithm 2, as `torch.optim.AdamW`."""

    def __init__(self, w: Tensor, lr: float, t: Training, max_steps: int) -> None:
        self.w = w
        self.lr = lr
        self.decay = t.weight_decay
        self.betas = t.betas or DEFAULT_BETAS
        self.eps = t.eps or DEFAULT_EPS
        self.mean = torch.zeros_like(w)
        self.square = torch.zeros_like(w)
        self.steps = w.new_zeros(
            len(w), 1, dtype=torch.int64
        )  # that each took, at most `max_steps`
        # By Python, one by one: torch's powers of several numbers have other last
        # digits.
        tables = ([1 - beta**k for k in range(max_steps + 1)] for beta in self.betas)
        self.bias_corrections = [
            to_device(torch.tensor(t, dtype=torch.float64), w.device).to(w)
            for t in tables
        ]

    def step(self, s: slice, grad: Tensor, terms: Tensors) -> None:
        w, mean, square, steps = (
            v[s] for v in (self.w, self.mean, self.square, self.steps)
        )
        d = corrected(
            w, grad, terms.get("shift"), 0.0, terms.get("mu"), terms.get("anchor")
        )
        steps += 1
        first, second = self.betas
        by_mean, by_square = (bias[steps] for bias in self.bias_corrections)
        mean.lerp_(d, 1 - first)
        square.mul_(second).addcmul_(d, d, value=1 - second)
        root = square.sqrt().div_(by_square.sqrt()).add_(self.eps)
        move = (mean / root.mul_(by_mean)).add_(w, alpha=self.decay).mul_(self.lr)
        w.sub_(move * terms["mask"] if "mask" in terms else move)
