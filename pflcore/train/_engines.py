"""Gradients of many clients' models on their minibatches.

There are three engines. They take the same minibatches and agree up to the last digits.

- "chain", by the kernels: the model is a chain of layers that the kernels of
  `pflcore.ops._chain` know. They compute the run's own loss.
- "vmap", all clients at once: autograd differentiates the module for a block of
  clients. It is for linear models, MLPs and GPUs.
- "loop", one after another: autograd differentiates the module for one client after
  another on each thread. It is for convolutions and large models on a CPU.

Symbols: S clients of a cohort; s clients of a chunk or of a step; Q columns of a row (P
weights of the model, and more where an algorithm adds some); B samples of a minibatch;
b numbers of batch norm's statistics; C classes; w, g rows of weights and of gradients;
x, y samples and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.data._federation import Federation
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.nn._context import forward_context, forward_state
from pflcore.ops._chain import chain_grad
from pflcore.train._augment import augment_batches
from pflcore.train._batches import Batches, BatchStep
from pflcore.train._body import Body
from pflcore.train._chain import Chain
from pflcore.train._graphs import GradientGraphs, GraphFunction
from pflcore.train._net import Net
from pflcore.train._training import Precision, autocast
from pflcore.train._transforms import AugmentFunction

# Minibatches of an epoch are gathered at once, up to this size of their samples.
EPOCH_BYTES = 1 << 26
# Begins the names of a loss's own tensors among the inputs of a recorded step.
EXTRA_PREFIX = "extra "
Tensors = dict[str, Tensor]
# (net, row, x, y, extra) -> loss
ObjectiveLoss = Callable[[Net, Tensor, Tensor, Tensor, Tensors], Tensor]


# The engines by the names that `Hardware.engine` has, in the words of the terminal, the
# record and the documents.
ENGINE_WORDS = {
    "chain": "by the kernels",
    "vmap": "all clients at once",
    "loop": "one after another",
}


class Engine(NamedTuple):
    """The way in which the gradients of a run are computed.

    With a chain, the ops of `pflcore.ops._chain` compute the losses and gradients of
    the run's own loss: by kernels on a CPU, and by torch elsewhere. `autograd` then
    still decides

    - how an objective with a loss of its own is computed, which the kernels do not
      know; the layers before the head may be theirs (`body`),
    - the blocks of clients that are computed at once (`assign_blocks`).

    Attributes:
        autograd: "loop" (one client after another on each thread) or "vmap" (a block of
            clients at once).
        chain: The model as a program for the kernels, or None.
        reason: The reason for this engine, as a phrase for the record.
        pads: True where vmap takes the minibatches of clients of all sizes at once,
            and short ones are padded (`pad_minibatches`): on a GPU, where a step then
            has few shapes.
        evaluates: True where vmap also evaluates the models of a block at once, on
            padded batches: on a GPU.
        body: The layers before the head by the kernels, for what a loop computes of one
            client; or None.
    """

    autograd: str
    chain: Chain | None = None
    reason: str = "asked for"
    pads: bool = False
    evaluates: bool = False
    body: Body | None = None

    @property
    def kind(self) -> str:
        """The engine of the run's own loss: "chain", "vmap" or "loop"."""
        return self.autograd if self.chain is None else "chain"

    @property
    def words(self) -> str:
        """The engine in the words of `ENGINE_WORDS`."""
        return ENGINE_WORDS[self.kind]


class Objective(NamedTuple):
    """The function that a training minimizes, if not the run's loss alone.

    Each step goes along `mask * (gradient + shift + mu * (w - anchor))`, where the
    gradient is that of the loss. The tensors have a row for each client of the cohort.

    Args:
        prox: The pair (mu, anchor) of a pull of mu / 2 * |w - anchor|^2. mu is a number
            or [S], the anchor [S, Q].
        shift: Added to every gradient, [S, Q].
        mask: Factors of the step's columns, [Q] or [S, Q]. Where a factor is 0, the
            column does not move.
        loss: The loss in place of the run's: a function (net, row, x, y, extra) ->
            loss of one client.
        extra: Tensors [S, ...] by name. The loss receives those of one client.
        never_vmap: True for a loss that vmap does not support.
    """

    prox: tuple[Tensor | float, Tensor] | None = None
    shift: Tensor | None = None
    mask: Tensor | None = None
    loss: ObjectiveLoss | None = None
    extra: Tensors = {}  # noqa: RUF012 (nothing changes it)
    never_vmap: bool = False

    def engine_for(self, engine: Engine) -> Engine:
        """The engine that computes the gradients of this objective's loss.

        A chain knows the run's loss alone, and another loss may count padding.
        """
        if self.loss is None and not self.never_vmap:
            return engine
        name = "loop" if self.never_vmap else engine.autograd
        return Engine(name, body=engine.body)

    def terms(self, w: Tensor) -> Tensors:
        """The terms that are added to the gradients at `w` [S, Q].

        The keys are arguments of `ops.sgd_step_`, and the values are [S, ...].
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
    """The terms of some clients. A mask [Q] belongs to every client."""
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
    precision: Precision = None,
    body: Body | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [s], gradients [s, Q] and new buffers [s, b] by autograd.

    Under vmap there may be any number of clients; without it there is one.

    Args:
        train: True for the model in training mode.
        objective_loss: The loss in place of the run's.
        extra: The tensors [s, ...] that `objective_loss` receives.
        precision: The precision of the forward pass and the loss.
        body: The layers before the head by the kernels, without vmap.
    """

    def loss_and_buffers(
        extra: Tensors, w: Tensor, x: Tensor, y: Tensor, buffers: Tensor, seed: Tensor
    ) -> Any:
        with (
            forward_context(train, buffers, seed, single_client=not vmap, body=body),
            autocast(precision, w.device),
        ):
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
    # No client's loss depends on another client's row, so the gradient of the sum has
    # the gradient of each client in its row.
    (grads,) = torch.autograd.grad(losses.sum(), w)
    return losses.detach(), grads, new_buffers


def gather_samples(
    data: Federation,
    index: Tensor,  # [s, n] places in the pool
    relabel: Tensor | None,  # [s, C]
) -> tuple[Tensor, Tensor]:
    """Samples [s, n, ...] and labels [s, n, ...] as the clients know them."""
    flat = index.flatten()
    x = data.x.index_select(0, flat).unflatten(0, index.shape)
    y = data.y.index_select(0, flat).unflatten(0, index.shape)
    if relabel is not None:
        y = relabel.gather(1, y.flatten(1)).view_as(y)
    return x, y


def pad_minibatches(
    x: Tensor,  # [s, B, ...]
    y: Tensor,  # [s, B, ...]
    counts: Tensor,  # [s]
) -> tuple[Tensor, Tensor]:
    """Samples and labels, of which those behind a client's `counts` are padding.

    Padding is the minibatch's first sample again, without a label. So the loss leaves
    it out, and a model sees no other samples than those of the minibatch.
    """
    is_padding = torch.arange(y.shape[1], device=y.device) >= counts[:, None]
    of_x = is_padding.view(*is_padding.shape, *[1] * (x.dim() - 2))
    of_y = is_padding.view(*is_padding.shape, *[1] * (y.dim() - 2))
    return torch.where(of_x, x[:, :1], x), y.masked_fill(of_y, IGNORED_LABEL)


def autograd_graph_function(
    net: Net,
    data: Federation,
    vmap: bool,
    objective_loss: ObjectiveLoss | None,
    precision: Precision,
) -> GraphFunction:
    """A function for `GradientGraphs` that computes gradients by autograd.

    Where the inputs hold no samples, it takes them from the pool.
    """

    def graph_function(inputs: Tensors) -> Tensors:
        if "x" in inputs:
            x, y = inputs["x"], inputs["y"]
        else:
            x, y = gather_samples(data, inputs["places"], inputs.get("relabel"))
        if "counts" in inputs:
            x, y = pad_minibatches(x, y, inputs["counts"])
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
            precision=precision,
        )
        return {"losses": losses, "g": grads, "buffers": new_buffers}

    return graph_function


def batch_as_pool(chain: Chain, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """Arguments of the chain's op, behind the rows, for samples that are in no pool.

    Args:
        chain: The model.
        x: Samples of each client, [s, B, ...].
        y: Their labels, as the clients know them, [s, B].
    """
    places = torch.arange(y.numel(), device=y.device).view(y.shape)
    return (*chain.fixed_args, x.flatten(0, 1), y.flatten(), None, places)


def chain_graph_function(chain: Chain, data: Federation) -> GraphFunction:
    """A function for `GradientGraphs` that computes gradients by the chain's op.

    Where the inputs hold no samples, it takes them from the pool.
    """

    def graph_function(inputs: Tensors) -> Tensors:
        if "x" in inputs:
            pool = batch_as_pool(chain, inputs["x"], inputs["y"])
        else:
            relabel = inputs.get("relabel")
            samples = (*chain.fixed_args, data.x, data.y, relabel)
            pool = (*samples, inputs["places"])
        grads, losses, _ = chain_grad(
            inputs["w"], *pool, inputs["size"], inputs.get("seeds")
        )
        return {"losses": losses, "g": grads}

    return graph_function


@dataclass
class Chunk:
    """Some clients of a cohort in training, those of most samples first.

    Attributes:
        net: The model as a function of a row.
        data: The federation that holds the samples.
        batches: The clients' minibatches.
        relabel: Labels as each client knows them, [s, C], or None where they are those
            of the federation.
        buffers: Batch norm's statistics, [s, b]. Every gradient updates them.
        engine: The engine that computes the gradients.
        loss: The loss in place of the run's, or None.
        extra: The tensors that this loss receives, [s, ...] each.
        graphs: The CUDA graphs of the run, or None on a CPU.
        precision: The precision of forward passes and losses.
        transforms: The transforms that change the samples of every minibatch.
        losses: The sums of the minibatches' losses, [s] float64, each before its step.
        leaves: Views of the row as parameters, where a single client trains by them;
            otherwise empty.
    """

    net: Net
    data: Federation
    batches: Batches
    relabel: Tensor | None
    buffers: Tensor
    engine: Engine
    loss: ObjectiveLoss | None
    extra: Tensors
    graphs: GradientGraphs | None = None
    precision: Precision = None
    transforms: Sequence[str | AugmentFunction] = ()

    def __post_init__(self) -> None:
        self.losses = self.buffers.new_zeros(len(self.buffers), dtype=torch.float64)
        self.leaves: list[Tensor] = []
        self._gathered_epoch: int | None = None
        self._counted_step: BatchStep | None = None
        if self.graphs is not None:
            self.graphs.reserve(len(self.buffers))

    def samples(self, step: BatchStep, which: int = 0) -> tuple[Tensor, Tensor]:
        """Samples [s, B, ...] and labels [s, B, ...] of a minibatch.

        The labels are those that the clients know. The samples are augmented, where the
        run augments them.
        """
        x, y = self._stored_samples(step, which)
        if not self.transforms:
            return x, y
        sizes = self.batches.batch_sizes(step)
        seeds = self.batches.augment_seeds(step, which)
        return augment_batches(self.transforms, x, sizes, seeds, self.data.fields), y

    def _stored_samples(self, step: BatchStep, which: int) -> tuple[Tensor, Tensor]:
        """Samples and labels of a minibatch, as they are in the pool."""
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
        """The labels [s, C] as some clients know them, or None."""
        return None if self.relabel is None else self.relabel[clients]

    def gradient(self, step: BatchStep, w: Tensor, which: int = 0) -> Tensor:
        """Gradients [s, Q] at `w` [s, Q] on a step's `which`-th minibatch.

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
        """Losses and gradients by a CUDA graph, where there is one."""
        results = graphs.run(*self._recordable_step(step, w, which))
        if "buffers" in results:
            self.buffers[step.clients] = results["buffers"]
        return results["losses"], results["g"]

    def _chain_gradient(
        self, chain: Chain, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Tensor, Tensor]:  # losses [s], gradients [s, Q]
        """Losses and gradients by the op of the chain."""
        seeds = self.batches.seeds_of(step, which) if chain.dropout else None
        if not self.transforms:
            samples = chain.kernel_args(self.data, self.relabel, step.clients)
            pool = (*samples, self.batches.places(step, which))
        else:
            pool = batch_as_pool(chain, *self.samples(step, which))
        counts = self.batches.sample_counts(step)
        statistics = chain.kernel_statistics(self.buffers[step.clients])
        grads, losses, moved = chain_grad(
            w.detach(), *pool, counts, seeds, statistics, train=True
        )
        self.buffers[step.clients] = moved[:, : self.buffers.shape[1]]
        return losses, grads

    def _autograd_gradient(
        self, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Tensor, Tensor]:  # losses [s], gradients [s, Q]
        """Losses and gradients by autograd, with the engine of the chunk."""
        clients = step.clients
        extra = {name: t[clients] for name, t in self.extra.items()}
        x, y = self.samples(step, which)
        if self.engine.pads:
            x, y = pad_minibatches(x, y, self.batches.sample_counts(step))
        losses, grads, self.buffers[clients] = gradients(
            self.net,
            w,
            x,
            y,
            self.buffers[clients],
            self.batches.seeds_of(step, which),
            vmap=self.engine.autograd == "vmap",
            train=True,
            objective_loss=self.loss,
            extra=extra,
            precision=self.precision,
            body=self.engine.body,
        )
        return losses, grads

    def gradient_copy(self, step: BatchStep, w: Tensor, which: int = 0) -> Tensor:
        """A copy of the gradients [s, Q] that `gradient` returns."""
        grads = self.gradient(step, w, which)
        # A replayed graph overwrites its results; the others are new tensors.
        return grads if self.graphs is None else grads.clone()

    def _recordable_step(
        self, step: BatchStep, w: Tensor, which: int
    ) -> tuple[Hashable, GraphFunction, Tensors]:
        """Arguments of `GradientGraphs.run`: a key, a function and its inputs.

        The key names everything but the inputs on which the function depends.
        """
        clients = step.clients
        batches = self.batches
        data = self.data
        chain = self.engine.chain
        inputs = {"w": w.detach()}
        if self.transforms:
            # Outside of the graph, which would repeat the draws of the captured step.
            inputs["x"], inputs["y"] = self.samples(step, which)
        else:
            inputs["places"] = batches.places(step, which)
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
        if self.engine.pads:
            inputs["counts"] = batches.sample_counts(step)
        for name, tensor in self.extra.items():
            inputs[EXTRA_PREFIX + name] = tensor[clients]
        vmap = self.engine.autograd == "vmap"
        key = (self.net, self.loss, vmap, *pool)
        function = autograd_graph_function(
            self.net, data, vmap, self.loss, self.precision
        )
        return key, function, inputs

    def leaf_gradients(self, step: BatchStep) -> tuple[Tensor, ...]:
        """The gradient of each parameter, at the row behind `leaves`.

        The chunk has one client. The step's loss is added to `losses`.
        """
        x, y = self.samples(step)
        seeds = self.batches.seeds_of(step)
        context = forward_context(
            train=True, buffers=self.buffers[0], seed=seeds[0], single_client=True
        )
        with context, autocast(self.precision, x.device):
            loss = self.net.batch_loss(self.net.forward_bound(x[0]), y[0])
            self.buffers[0] = forward_state.buffers
        self.losses += loss.detach()
        return torch.autograd.grad(
            loss, self.leaves, allow_unused=True, materialize_grads=True
        )
