"""Gradients of many clients' models, and the local steps that use them.

There are two engines. "loop" trains one client after another on each thread; it is for
convolutions and large models on a CPU. "vmap" trains a block of clients at once; it is
for linear models, MLPs and GPUs. A model that is a chain of known layers is trained by
the kernels of `pflcore.ops._chain` instead. All of them take the same minibatches and
agree up to rounding.

Symbols: S clients of a cohort; s clients of a chunk or of a step; Q columns of a row (P
weights of the model, and more where an algorithm adds some); B samples of a minibatch;
b numbers of batch norm's statistics; C classes; w, g rows of weights and of gradients;
x, y samples and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.data._federation import Federation
from pflcore.nn._context import forward_context, forward_state
from pflcore.ops._chain import chain_grad, chain_sgd_, has_kernels
from pflcore.ops._sgd import check_sgd, clipped, corrected
from pflcore.train._batches import Batches, BatchStep
from pflcore.train._chain import Chain
from pflcore.train._graphs import GradientGraphs, GraphFunction
from pflcore.train._net import Net
from pflcore.train._training import DEFAULT_BETAS, DEFAULT_EPS, Training

# Minibatches of an epoch are gathered at once, up to this size of their samples.
EPOCH_BYTES = 1 << 26
# Begins the names of a loss's own tensors among the inputs of a recorded step.
EXTRA_PREFIX = "extra "
Tensors = dict[str, Tensor]
# net, row, x, y, extra
ObjectiveLoss = Callable[[Net, Tensor, Tensor, Tensor, Tensors], Tensor]


class Engine(NamedTuple):
    """What computes gradients.

    A chain is no third engine. The kernels train the run's loss with it, and the engine
    `name` computes everything else, such as the gradient of an objective's own loss.
    """

    name: str  # "loop" or "vmap"
    chain: Chain | None = None
    reason: str = "asked for"

    @property
    def form(self) -> str:
        """What trains the run's loss: "chain" (kernels), "vmap" or "module"."""
        if self.chain is not None:
            return "chain"
        return "vmap" if self.name == "vmap" else "module"


class Objective(NamedTuple):
    """What is minimized, if not the run's loss alone.

    Each step goes along `mask * (gradient + shift + mu * (w - anchor))`. The tensors
    are those of the cohort's clients.
    """

    # mu: a number, [S]; anchor [S, Q]
    prox: tuple[Tensor | float, Tensor] | None = None
    shift: Tensor | None = None  # [S, Q] added to every gradient
    mask: Tensor | None = None  # [Q] or [S, Q]; a column stays where it is 0
    loss: ObjectiveLoss | None = None  # in place of the run's loss
    extra: Tensors = {}  # noqa: RUF012 [S, ...], whose slices the loss receives
    never_vmap: bool = False  # for a loss that vmap does not support

    def engine_for(self, engine: Engine) -> Engine:
        """The engine of its gradients; a chain knows the run's loss alone."""
        if self.loss is None and not self.never_vmap:
            return engine
        name = "loop" if self.never_vmap else engine.name
        return Engine(name)

    def terms(self, w: Tensor) -> Tensors:
        """What is added to the gradients at `w` [S, Q].

        The keys are arguments of `ops.sgd_step_`, the values [S, ...].
        """
        terms: Tensors = {}
        if self.prox is not None:
            mu, anchor = self.prox
            if isinstance(mu, Tensor):
                mu = mu.to(w).reshape(-1)
            else:
                # A fill with a number of the host does not wait for a GPU.
                mu = w.new_full((1,), mu)
            terms = {"mu": mu.expand(len(w)), "anchor": anchor}
        if self.shift is not None:
            terms["shift"] = self.shift
        if self.mask is not None:
            terms["mask"] = to_device(self.mask, w.device).to(w.dtype)
        return terms


def slice_terms(terms: Tensors, clients: Any) -> Tensors:
    """The terms of some clients; a mask [Q] belongs to all of them."""
    slices: Tensors = {}
    for name, term in terms.items():
        is_shared = name == "mask" and term.dim() == 1
        slices[name] = term if is_shared else term[clients]
    return slices


RUN_LOSS = Objective()  # the run's own loss alone


def gradients(  # noqa: PLR0913 (one call for two engines)
    net: Net,
    rows: Tensor,  # [s, Q]
    x: Tensor,  # [s, B, ...]
    y: Tensor,  # [s, B, ...]
    buffers: Tensor,  # [s, b]
    seeds: Tensor,  # [s]
    *,
    vmap: bool,
    train: bool,
    objective_loss: ObjectiveLoss | None = None,
    extra: Tensors = {},  # noqa: B006
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [s], gradients [s, Q] and new buffers [s, b] by autograd.

    Under vmap there may be any number of clients; without it there is one.
    """

    def loss_and_buffers(
        extra: Tensors, w: Tensor, x: Tensor, y: Tensor, buffers: Tensor, seed: Tensor
    ) -> Any:
        with forward_context(train, buffers, seed, single_client=not vmap):
            if objective_loss is None:
                loss = net.loss(w, x, y)
            else:
                loss = objective_loss(net, w, x, y, extra)
            return loss, forward_state.buffers

    w = rows.detach().requires_grad_()
    inputs = (w, x, y, buffers, seeds)
    if vmap:
        losses, new_buffers = torch.vmap(loss_and_buffers)(extra, *inputs)
    else:
        client_extra = {name: t[0] for name, t in extra.items()}
        client_inputs = [t[0] for t in inputs]
        loss, client_buffers = loss_and_buffers(client_extra, *client_inputs)
        losses = loss[None]
        new_buffers = client_buffers[None]
    (grads,) = torch.autograd.grad(losses.sum(), w)
    return losses.detach(), grads, new_buffers


def gather_samples(
    data: Federation,
    index: Tensor,  # [s, n] in the pool
    relabel: Tensor | None,  # [s, C]
) -> tuple[Tensor, Tensor]:
    """Samples x [s, n, ...] and labels y [s, n, ...] as the clients know them."""
    flat = index.flatten()
    x = data.x.index_select(0, flat).unflatten(0, index.shape)
    y = data.y.index_select(0, flat).unflatten(0, index.shape)
    if relabel is not None:
        y = relabel.gather(1, y.flatten(1)).view_as(y)
    return x, y


def autograd_graph_function(
    net: Net, data: Federation, vmap: bool, objective_loss: ObjectiveLoss | None
) -> GraphFunction:
    """Gradients of a minibatch by autograd, as a function that can be recorded."""

    def graph_function(inputs: Tensors) -> Tensors:
        x, y = gather_samples(data, inputs["places"], inputs.get("relabel"))
        extra = {}
        for name, tensor in inputs.items():
            if name.startswith(EXTRA_PREFIX):
                extra[name.removeprefix(EXTRA_PREFIX)] = tensor
        losses, grads, new_buffers = gradients(
            net,
            inputs["w"],
            x,
            y,
            inputs["buffers"],
            inputs["seeds"],
            vmap=vmap,
            train=True,
            objective_loss=objective_loss,
            extra=extra,
        )
        return {"losses": losses, "g": grads, "buffers": new_buffers}

    return graph_function


def chain_graph_function(chain: Chain, data: Federation) -> GraphFunction:
    """Gradients of a minibatch by the chain's op, as a function that can be
    recorded."""

    def graph_function(inputs: Tensors) -> Tensors:
        pool = (*chain.fixed_args, data.x, data.y, inputs.get("relabel"))
        batch = (inputs["places"], inputs["size"], inputs.get("seeds"))
        grads, losses = chain_grad(inputs["w"], *pool, *batch)
        return {"losses": losses, "g": grads}

    return graph_function


@dataclass
class Chunk:
    """Some clients of a cohort, largest first, with their minibatches.

    `losses` [s] sums the losses of the minibatches, each before its step. `leaves` are
    views of one client's row as parameters, where that client trains by them.
    """

    net: Net
    data: Federation
    batches: Batches
    relabel: Tensor | None  # [s, C] labels as each client knows them
    buffers: Tensor  # [s, b], changed
    engine: Engine
    loss: ObjectiveLoss | None  # in place of the run's
    extra: Tensors  # [s, ...], the loss's own tensors
    graphs: GradientGraphs | None = None  # on a GPU

    def __post_init__(self) -> None:
        self.losses = self.buffers.new_zeros(len(self.buffers), dtype=torch.float64)
        self.leaves: list[Tensor] = []
        self._gathered_epoch: int | None = None
        self._counted_step: BatchStep | None = None

    def samples(self, step: BatchStep, which: int = 0) -> tuple[Tensor, Tensor]:
        """x [s, B, ...] and the clients' own labels y [s, B, ...] of a minibatch."""
        clients = step.clients
        epoch = step.epoch + which * step.epochs
        epoch_order = self.batches.order[:, epoch]
        if epoch_order.numel() * self.data.x[0].nbytes > EPOCH_BYTES:
            places = self.batches.places(step, which)
            return gather_samples(self.data, places, self._relabel_rows(clients))
        if self._gathered_epoch != epoch:
            relabel = self._relabel_rows(slice(None))
            self._epoch_samples = gather_samples(self.data, epoch_order, relabel)
            self._gathered_epoch = epoch
        x, y = self._epoch_samples
        minibatch = slice(step.first, step.last)
        return x[clients, minibatch], y[clients, minibatch]

    def _relabel_rows(self, clients: slice) -> Tensor | None:
        return None if self.relabel is None else self.relabel[clients]

    def gradient(self, step: BatchStep, w: Tensor, which: int = 0) -> Tensor:
        """The gradients [s, Q] at `w` [s, Q] on a step's `which`-th minibatch.

        The first call on a step's first minibatch adds that minibatch's losses to
        `losses`. The next call may overwrite the result.
        """
        if self.graphs is not None:
            losses, grads = self._graph_gradient(self.graphs, step, w, which)
        elif self.engine.chain is not None:
            losses, grads = self._chain_gradient(self.engine.chain, step, w, which)
        else:
            losses, grads = self._autograd_gradient(step, w, which)
        if which == 0 and self._counted_step is not step:
            self._counted_step = step
            self.losses[step.clients] += losses
        return grads

    def _graph_gradient(
        self, graphs: GradientGraphs, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Tensor, Tensor]:  # losses [s], gradients [s, Q]
        results = graphs.run(*self._recordable_step(step, w, which))
        if "buffers" in results:
            self.buffers[step.clients] = results["buffers"]
        return results["losses"], results["g"]

    def _chain_gradient(
        self, chain: Chain, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Tensor, Tensor]:  # losses [s], gradients [s, Q]
        seeds = self.batches.seeds_of(step, which) if chain.dropout else None
        pool = chain.kernel_args(self.data, self.relabel, step.clients)
        places = self.batches.places(step, which)
        counts = self.batches.sample_counts(step)
        grads, losses = chain_grad(w.detach(), *pool, places, counts, seeds)
        return losses, grads

    def _autograd_gradient(
        self, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Tensor, Tensor]:  # losses [s], gradients [s, Q]
        clients = step.clients
        extra = {name: t[clients] for name, t in self.extra.items()}
        x, y = self.samples(step, which)
        losses, grads, self.buffers[clients] = gradients(
            self.net,
            w,
            x,
            y,
            self.buffers[clients],
            self.batches.seeds_of(step, which),
            vmap=self.engine.name == "vmap",
            train=True,
            objective_loss=self.loss,
            extra=extra,
        )
        return losses, grads

    def gradient_copy(self, step: BatchStep, w: Tensor, which: int = 0) -> Tensor:
        """The gradients [s, Q] as `gradient` has them, in memory of their own."""
        grads = self.gradient(step, w, which)
        # A replayed graph overwrites its results; the others are new tensors.
        return grads if self.graphs is None else grads.clone()

    def _recordable_step(
        self, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Hashable, GraphFunction, Tensors]:
        """Arguments of `GradientGraphs.run`: a key, a function and its inputs.

        The key names everything beside the inputs that the function depends on.
        """
        clients = step.clients
        batches = self.batches
        data = self.data
        chain = self.engine.chain
        inputs = {"w": w.detach(), "places": batches.places(step, which)}
        if self.relabel is not None:
            inputs["relabel"] = self.relabel[clients]
        pool = (id(data.x), id(data.y))
        if chain is not None:
            inputs["size"] = batches.sample_counts(step)
            if chain.dropout:
                inputs["seeds"] = batches.seeds_of(step, which)
            return (id(chain), *pool), chain_graph_function(chain, data), inputs
        inputs["buffers"] = self.buffers[clients]
        inputs["seeds"] = batches.seeds_of(step, which)
        for name, tensor in self.extra.items():
            inputs[EXTRA_PREFIX + name] = tensor[clients]
        vmap = self.engine.name == "vmap"
        key = (self.net, self.loss, vmap, *pool)
        return key, autograd_graph_function(self.net, data, vmap, self.loss), inputs

    def leaf_gradients(self, step: BatchStep) -> tuple[Tensor, ...]:
        """One client's gradients by parameters, at the row that `leaves` view."""
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
    training: Training, lr: float, chunk: Chunk, rows: Tensors, terms: Tensors
) -> None:
    """Takes all steps of the clients' rows "w" [s, Q], in place.

    The gradients of the minibatches, clipped and with SGD's weight decay, are added to
    "grad" [s, Q], where that is among the rows.
    """
    w = rows["w"]
    grad_sums = rows.get("grad")
    chain = chunk.engine.chain
    uses_sgd = training.local_optimizer == "sgd"
    _check_terms(training, lr, w, terms)
    if uses_sgd and chain is not None and has_kernels(w.device):
        losses = sgd_by_kernels(chunk, chain, w, terms, training, lr, grad_sums)
        chunk.losses += losses
        return
    if _trains_by_leaves(chunk, w):
        chunk.leaves = chunk.net.leaves(w[0])
    has_options = training.momentum or training.weight_decay or training.clip_grad
    is_plain = uses_sgd and not terms and not has_options
    if chunk.leaves and is_plain and grad_sums is None:
        _take_plain_steps(chunk, lr)
        return
    _take_steps(training, lr, chunk, w, grad_sums, terms)


def _check_terms(training: Training, lr: float, w: Tensor, terms: Tensors) -> None:
    """Checks an objective's terms as `ops.sgd_step_` does, before the first step."""
    check_sgd(
        w,
        grad=w,  # a gradient has the shape of its row
        lr=lr,
        shift=terms.get("shift"),
        mask=terms.get("mask"),
        mu=terms.get("mu", 0.0),
        anchor=terms.get("anchor"),
        momentum=0.0,
        buffer=None,
        weight_decay=training.weight_decay,
    )


def _trains_by_leaves(chunk: Chunk, w: Tensor) -> bool:
    """Whether a client's gradient is taken by parameters instead of by its row.

    That saves time in every step. On a GPU the gradient is taken by the row, which
    can be captured: bits are the same with CUDA graphs and without them.
    """
    engine = chunk.engine
    is_one_model = engine.name == "loop" and w.shape == (1, chunk.net.size)
    has_run_loss = engine.chain is None and chunk.loss is None
    return is_one_model and has_run_loss and w.device.type == "cpu"


def _take_plain_steps(chunk: Chunk, lr: float) -> None:
    """All steps `w -= lr * gradient` on the leaves.

    No step joins its gradient to a row in memory.
    """
    for step in chunk.batches.steps:
        grads = chunk.leaf_gradients(step)
        with torch.no_grad():
            torch._foreach_add_(chunk.leaves, grads, alpha=-lr)


def _take_steps(
    training: Training,
    lr: float,
    chunk: Chunk,
    w: Tensor,  # [s, Q], changed
    grad_sums: Tensor | None,  # [s, Q], changed
    terms: Tensors,
) -> None:
    """All steps of the run's optimizer, with every option that it has."""
    optimizer: SGD | AdamW
    if training.local_optimizer == "sgd":
        optimizer = SGD(w, lr, training)
    else:
        optimizer = AdamW(w, lr, training, int(chunk.batches.taken.max()))
    row = torch.empty_like(w[0]) if chunk.leaves else None
    for step in chunk.batches.steps:
        clients = step.clients
        if row is None:
            grads = chunk.gradient(step, w[clients])
        else:
            pieces = [piece.reshape(-1) for piece in chunk.leaf_gradients(step)]
            grads = torch.cat(pieces, out=row)[None]
        if training.clip_grad is not None:
            grads = clipped(grads, training.clip_grad)
        if grad_sums is not None:
            grad_sums[clients] += grads
            if training.gradient_decay:
                grad_sums[clients].add_(w[clients], alpha=training.gradient_decay)
        optimizer.step(clients, grads, slice_terms(terms, clients))


def sgd_by_kernels(
    chunk: Chunk,
    chain: Chain,
    w: Tensor,  # [s, Q], changed
    terms: Tensors,
    training: Training,
    lr: float,
    grad_sums: Tensor | None,  # [s, Q], changed
) -> Tensor:  # [s]
    """Sums of the losses; the kernels of the chain take all steps of SGD."""
    batches = chunk.batches
    pool = chain.kernel_args(chunk.data, chunk.relabel, slice(None))
    cuts = (
        batches.order,
        batches.size,
        batches.taken,
        training.batch_size,
        training.drop_last,
        batches.seeds if chain.dropout else None,
    )
    step_terms = (
        lr,
        terms.get("shift"),
        terms.get("mask"),
        0.0,  # mu of all clients, in whose place the next one gives each client its own
        terms.get("mu"),
        terms.get("anchor"),
        training.momentum,
        training.weight_decay,
    )
    max_norm = training.clip_grad or math.inf
    return chain_sgd_(w, *pool, *cuts, *step_terms, max_norm, grad_sums)


class SGD:
    """Steps of SGD with momentum, weight decay and an objective's terms."""

    def __init__(self, w: Tensor, lr: float, training: Training) -> None:
        self.w = w
        self.lr = lr
        self.momentum = training.momentum
        self.weight_decay = training.weight_decay
        self.velocity = torch.zeros_like(w) if training.momentum else None

    def step(self, clients: slice, grads: Tensor, terms: dict[str, Any]) -> None:
        """Moves the rows of `clients` by their gradients [s, Q]."""
        velocity = None if self.velocity is None else self.velocity[clients]
        ops.sgd_step_(
            self.w[clients],
            grads,
            self.lr,
            **terms,
            momentum=self.momentum,
            buffer=velocity,
            weight_decay=self.weight_decay,
        )


class AdamW:
    """Steps of AdamW (Loshchilov and Hutter 2019, Algorithm 2).

    The formula is that of `torch.optim.AdamW`.
    """

    def __init__(
        self, w: Tensor, lr: float, training: Training, max_steps: int
    ) -> None:
        self.w = w
        self.lr = lr
        self.decay = training.weight_decay
        self.betas = training.betas or DEFAULT_BETAS
        self.eps = training.eps or DEFAULT_EPS
        self.mean = torch.zeros_like(w)
        self.square = torch.zeros_like(w)
        # Steps that each client has taken, [s, 1], at most `max_steps`.
        self.steps = w.new_zeros(len(w), 1, dtype=torch.int64)
        self.bias_corrections = [
            _bias_corrections(beta, max_steps, w) for beta in self.betas
        ]

    def step(self, clients: slice, grads: Tensor, terms: Tensors) -> None:
        """Moves the rows of `clients` by their gradients [s, Q]."""
        w = self.w[clients]
        mean = self.mean[clients]
        square = self.square[clients]
        steps = self.steps[clients]
        shift = terms.get("shift")
        mu = terms.get("mu")
        direction = corrected(w, grads, shift, 0.0, mu, terms.get("anchor"))
        steps += 1  # a view of `self.steps`
        mean_beta, square_beta = self.betas
        mean_table, square_table = self.bias_corrections
        mean.lerp_(direction, 1 - mean_beta)
        square.mul_(square_beta)
        square.addcmul_(direction, direction, value=1 - square_beta)
        root = square.sqrt().div_(square_table[steps].sqrt()).add_(self.eps)
        update = mean / root.mul_(mean_table[steps])
        update = update.add_(w, alpha=self.decay).mul_(self.lr)
        if "mask" in terms:
            update = update * terms["mask"]
        w.sub_(update)


def _bias_corrections(beta: float, max_steps: int, w: Tensor) -> Tensor:
    """`1 - beta**k` for k from 0 to `max_steps`, of w's dtype and device.

    Python computes the powers one by one: torch's powers of several numbers have other
    last digits.
    """
    powers = [1 - beta**k for k in range(max_steps + 1)]
    return to_device(torch.tensor(powers, dtype=torch.float64), w.device).to(w)
