"""Selects what computes the gradients of a model, by a trial before round 1.

Three words of this module:

- An engine computes the gradients of the clients' models. There are two: "loop" takes
  one client after another on each thread, "vmap" takes a block of clients at once.
- A chain is something extra that an engine may carry, for models whose layers the
  project's own kernels know. The kernels compute the gradients of the run's loss, and
  the engine computes those of any other loss. `engine="chain"` asks for either engine,
  and insists that it carries a chain.
- A probe is a federation of a few small clients (of one client, for a large model),
  together with the losses and gradients that the module itself has on them under plain
  autograd: the reference.

The trial has two parts. First one batch runs through a copy of the module, which shows
whether model, data and loss fit together. Then each candidate computes the losses and
gradients of the probes. A candidate is used only if they match the reference: at the
initial weights plus noise, in training mode and, for "loop" and a chain, in evaluation
mode.

There is a probe in the model's own dtype, and one in float64. The one in float64 is
missing where the model is in float64 already, where a part of the model fixes its
dtype, where memory is short, and for a large model on a CPU. On a CPU all numbers
count. On a GPU only those in float64 count, where there are any; in the other dtype the
candidate must only run without an error. For a GPU sums float32 products in another
order for each shape (and rounds them to TF32 where a library does not heed the flag
that forbids it), and rectifiers and maxima magnify that rounding.

"loop" is always tried first and must match: else the module is refused, whatever was
asked for. "auto" then makes two choices, and times neither. It takes a chain if one is
found and matches. Beside it, and for all other models, it takes "loop" on a CPU for
convolutions, LSTMs and models of more than `VMAP_MAX_WEIGHTS` weights; else "vmap" if
it matches; else "loop".

Symbols: s clients of a probe; P weights of the model; B samples of a batch; w [s, P]
the clients' weights; x, y samples and labels.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.check import warn_caller
from pflcore.data._federation import Federation
from pflcore.metrics import ArgumentForm
from pflcore.nn._context import forward_context
from pflcore.train import _memory as memory
from pflcore.train import _validate as validate
from pflcore.train._batches import Batches, BatchPlan
from pflcore.train._chain import Chain, NotAChain, find_chain
from pflcore.train._clients import (
    CPU_BLOCK_CLIENTS,
    GPU_BLOCK_CLIENTS,
    Clients,
    TrainContext,
)
from pflcore.train._engines import Engine
from pflcore.train._gpu_flags import NO_TF32_FLAGS, REPEATABLE_FLAGS
from pflcore.train._graphs import GradientGraphs
from pflcore.train._net import Net
from pflcore.train._training import Training
from pflcore.train._validate import MismatchError
from pflcore.train._workers import Workers, single_threaded

# A CPU trains clients of larger models faster one by one than a block at once.
VMAP_MAX_WEIGHTS = 1 << 16
# A larger model has probes of one client, and on a CPU none in float64: the copies
# would cost too much.
FULL_PROBE_MAX_WEIGHTS = 1 << 19
# Samples of the probe's clients, in descending order, as `Batches` requires. There are
# two clients of each size, so that a block has clients of equal and of other size.
# Batch norm cannot train on fewer than two samples.
PROBE_SIZES = (5, 5, 2, 2)
FIRST_BATCH_SIZE = 8  # samples of the batch that shows whether everything fits
# Layers that a CPU trains faster in a loop than under vmap.
SLOW_UNDER_VMAP = {"convolutions": nn.modules.conv._ConvNd, "an LSTM": nn.LSTM}
# A difference may be as large as this share of the largest value of the reference.
FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-3
# Rounding errors of one pass, in units of the dtype's epsilon.
MAX_ROUNDING_ERRORS = 64


def make_context(  # noqa: PLR0913 (the options of a run)
    net: Net,
    data: Federation,
    training: Training,
    engine: str = "auto",  # or "chain", "loop", "vmap"
    workers: int | None = None,
    seed: int = 0,
    rounds: int = 1,
    clients_per_block: int | None = None,
    graphs: bool = True,
) -> TrainContext:
    """Everything that training needs, with the engine that the trial selects.

    Raises MismatchError where model, data and loss do not fit together, or where the
    engine that is asked for does not match the module.
    """
    device = net.w0.device
    with (
        single_threaded(),
        REPEATABLE_FLAGS.set_for(device),
        NO_TF32_FLAGS.set_for(device),
    ):
        net = net.with_fields(data.fields)
        prepare_net(net, data, training)
        probes = make_probes(net, data)
        selected = select_engine(net, data, probes, engine)
        gradient_graphs = None
        if data.device.type == "cuda":
            gradient_graphs = verified_graphs(probes, selected, graphs)
        x, y = spread_samples(data, FIRST_BATCH_SIZE)
        batch_bytes = memory.activation_bytes(net, x, y)
    if selected.chain is not None and training.local_optimizer != "sgd":
        note = "it gives the gradients, and AdamW takes its steps in torch"
        selected = selected._replace(reason=f"{selected.reason}; {note}")
    default_clients = GPU_BLOCK_CLIENTS
    if data.device.type == "cpu":
        default_clients = CPU_BLOCK_CLIENTS
    return TrainContext(
        net,
        data,
        training,
        selected,
        Workers(workers, data.device),
        seed,
        rounds,
        clients_per_block=clients_per_block or default_clients,
        sample_activation_bytes=batch_bytes // FIRST_BATCH_SIZE,
        graphs=gradient_graphs,
    )


# do model, data and loss fit together? ----------------------------------------


def prepare_net(net: Net, data: Federation, training: Training) -> None:
    """Runs one batch through a copy of the module, and sets facts of `net`.

    The facts are: which part is the head, whether there is one score for each label, in
    which form the loss takes that score (`argument_form`), and whether the module can
    train on a single sample (`merge_last_sample`). Raises MismatchError where model,
    data and loss do not fit together.
    """
    validate.check_torch_modes()
    validate.check_dtypes(net, data)
    count = max(2, min(training.batch_size, FIRST_BATCH_SIZE))
    x, y = spread_samples(data, count)
    net.argument_form = ArgumentForm()
    # The form of the arguments is found once, in the first pass; the second uses it.
    for train in (False, True):
        run = partial(first_batch_loss, net, data, x, y, train, find_form=not train)
        validate.run_without_global_draws(run)
    plan_single_samples(net, data, training)


def plan_single_samples(net: Net, data: Federation, training: Training) -> None:
    """Decides what becomes of batches of a single sample, for models that need more.

    Batch norm, for example, cannot train on one sample. Where a client's last batch
    would be one sample, `net.merge_last_sample` is set, and the sample joins the batch
    before it. Raises MismatchError for a client all of whose batches are of one sample.
    """
    size = data.size("train")
    batch_size = training.batch_size
    has_only_singles = (size == 1) | (batch_size == 1)
    ends_with_single = size % batch_size == 1
    if not (has_only_singles | ends_with_single).any():
        return
    x, y = spread_samples(data, 1)
    try:
        first_batch_loss(net, data, x, y, train=True)
    except MismatchError as error:
        net.merge_last_sample = True
        if not has_only_singles.any():
            return
        if isinstance(error, validate.NoBatchAxis):
            raise  # its text names the remedy
        client = int(has_only_singles.nonzero()[0])
        reason = _single_sample_reason(net, error)
        raise MismatchError(
            f"data: client {client} ({int(size[client])} samples, batch_size "
            f"{batch_size}) has a batch of one sample, on which this model cannot "
            f"train{reason}; take another batch_size, or leave clients of one sample "
            "out."
        ) from error


def _single_sample_reason(net: Net, error: MismatchError) -> str:
    """End of a clause: why the model cannot train on one sample."""
    if any(isinstance(layer, _BatchNorm) for layer in net.module.modules()):
        return ", as batch norm cannot"
    return f" ({str(error).rstrip('.')})"


def first_batch_loss(
    net: Net,
    data: Federation,
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B, ...]
    train: bool,
    find_form: bool = False,
) -> Tensor:
    """Loss of one batch by a copy of the module.

    In training mode the backward pass runs too, and the net's head is located. With
    `find_form` the form in which the loss takes scores and targets is set in `net`.
    Raises MismatchError where a pass fails.
    """
    module = copy.deepcopy(net.module).train(train)
    calls = _record_calls(module)

    def explain_forward_error(error: Exception) -> str:
        return validate.explain_layer_error(*calls[-1], data, error)

    seed = x.new_zeros((), dtype=torch.int64)
    with forward_context(train, None, seed), torch.enable_grad():
        with validate.reraise_as(explain_forward_error):
            scores = module(x)
        validate.check_scores(net, data, scores, y)
        net.single_score = scores.numel() == y.numel()
        if find_form:
            net.argument_form = validate.loss_argument_form(net, scores, y)
        with validate.reraise_as(partial(validate.explain_loss_error, net, scores, y)):
            loss = net.batch_loss(scores, y)
        validate.check_loss(loss)
    if train:
        layers = [name for name, _, _ in calls[1:]]
        _first_batch_backward(net, module, loss, layers)
    return loss.detach()


def _record_calls(module: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """List that grows by (name, layer, inputs) whenever a layer is called.

    The layers are those without submodules, and every `nn.Linear`. The list begins with
    the module itself, so that an error before the first layer has a last call, too.
    That call names no inputs (None): the error's text knows the samples from elsewhere.
    """
    calls: list[tuple[str, nn.Module, Any]] = [("", module, (None,))]

    def record(name: str, layer: nn.Module, inputs: Any) -> None:
        calls.append((name, layer, inputs))

    for name, layer in module.named_modules():
        is_leaf = not layer._modules
        # A parametrized `nn.Linear` has submodules and is still the head of a model.
        if is_leaf or isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(partial(record, name))
    return calls


def _first_batch_backward(
    net: Net,
    module: nn.Module,
    loss: Tensor,
    layers: list[str],  # names in the order of the calls
) -> None:
    """Runs the backward pass and tells the net which parameters the loss depends on.

    `Net.locate_head` takes the last of the called layers that has such a parameter.
    """

    def explain_backward_error(error: Exception) -> str:
        return f"model: its backward pass fails: {validate.first_line(error)}."

    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in net.names]
    with validate.reraise_as(explain_backward_error):
        # The loss is a scalar, or has one element. `allow_unused`: the gradient of a
        # parameter that is not used is None.
        grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
    validate.check_gradients(grads)
    named_grads = zip(net.names, grads, strict=True)
    used = [name for name, grad in named_grads if grad is not None]
    net.locate_head(used, layers)


def spread_samples(data: Federation, count: int) -> tuple[Tensor, Tensor]:
    """Training samples and labels at even distances in the list of all clients'
    samples.

    Samples repeat where the federation has fewer than `count`.
    """
    samples = data.lists("train").flat
    positions = torch.linspace(0, len(samples) - 1, count).long()
    index = samples[positions.to(samples.device)]
    return data.x[index], data.y[index]


# does an engine compute what the module computes? -----------------------------


class Mismatch(NamedTuple):
    """A difference between an engine and the module.

    (A `MismatchError` is for users: model, data and loss do not fit together.)
    """

    words: str
    is_numeric: bool = False  # the engine gives other numbers; else it gives none


@dataclass
class EngineProbe:
    """A few small clients with the losses and gradients of the module itself."""

    clients: Clients  # `difference` gives them the engine that is tried
    w: Tensor  # [s, P]
    # "training" and "evaluation": losses [s], gradients [s, P]
    expected: dict[str, list[Tensor]]
    # If false, `first_mismatch` ignores other numbers; only an error counts.
    is_decisive: bool = True

    def difference(
        self, engine: Engine, graphs: GradientGraphs | None = None
    ) -> Mismatch | None:
        """First difference of an engine's losses and gradients, or None.

        With `graphs` the gradients of a replayed step are compared. The step is
        captured before, at weights of half the size and with other random numbers: a
        replay that still used those would differ.
        """
        context = self.clients.context._replace(engine=engine, graphs=graphs)
        clients = replace(self.clients, context=context)
        if graphs is not None:
            replace(clients, round=1).fit(0.5 * self.w, epochs=1, lr=1.0)
        relative, absolute = self._tolerances()
        for mode, values in self._computed(clients).items():
            names = ("loss", "gradient")
            for name, got, want in zip(names, values, self.expected[mode], strict=True):
                gap = _describe_gap(got, want, relative, absolute)
                if gap is not None:
                    words = f"its {name} is another in {mode} mode ({gap})"
                    return Mismatch(words, is_numeric=True)
        return None

    def _computed(self, clients: Clients) -> dict[str, tuple[Tensor, Tensor]]:
        """Losses [s] and gradients [s, P] of each mode, by the clients' engine."""
        engine = clients.context.engine
        fit = clients.fit(self.w, epochs=1, lr=1.0)
        # Each client has one batch, and so takes one step of plain SGD, without
        # momentum and weight decay. With lr=1 that step subtracts the gradient:
        # w - fit.w is the gradient, up to rounding.
        computed = {"training": (fit.loss, self.w - fit.w)}
        # vmap is for training alone; evaluation then runs as it does with "loop".
        if engine.name == "loop" or engine.chain:
            # The split "test" is computed in evaluation mode.
            loss = clients.loss(self.w, "test")
            grad = clients.grad(self.w, "test")
            computed["evaluation"] = (loss, grad)
        return computed

    def _tolerances(self) -> tuple[float, float]:
        """Largest difference: relative to the largest expected value, plus absolute.

        The gradient of the training mode is `w - fit.w`, so it carries the rounding of
        the weights: that is the absolute part. Values below it are not tested in this
        dtype, such as a gradient of 1e-6 in float32; those of a loss in small units are
        tested by the probe in float64.
        """
        relative = FLOAT32_TOLERANCE
        if self.w.dtype == torch.float64:
            relative = FLOAT64_TOLERANCE
        x = self.clients.context.data.x
        largest = max(1.0, float(self.w.abs().max()), float(x.abs().max()))
        epsilon = torch.finfo(self.w.dtype).eps
        # The minimum is for tokens, whose numbers say nothing of sizes.
        return relative, min(relative, MAX_ROUNDING_ERRORS * epsilon * largest)


def _describe_gap(
    got: Tensor, want: Tensor, relative: float, absolute: float
) -> str | None:
    """Phrase on the largest difference, or None where it is within the tolerances.

    NaN matches NaN, and nothing else.
    """
    largest = float(want.abs().nan_to_num(0.0).max())
    gap = float((got - want).abs().nan_to_num(0.0).max())
    same_nan = torch.equal(got.isnan(), want.isnan())
    if same_nan and gap <= relative * largest + absolute:
        return None
    return f"off by {gap:.1e}, the largest is {largest:.1e}"


def make_probes(net: Net, data: Federation) -> list[EngineProbe]:
    """Probes: one in float64, where it can be had, and one in the model's dtype.

    On a CPU the numbers of both decide. On a GPU only those in float64 do, where that
    probe can be had.
    """
    probes = []
    device = net.w0.device
    on_gpu = device.type == "cuda"
    is_small = net.size <= FULL_PROBE_MAX_WEIGHTS
    if net.dtype != torch.float64 and (on_gpu or is_small):
        # A part that fixes its dtype raises one of these; so does a lack of memory.
        with suppress(RuntimeError, TypeError, ValueError):
            wide_net = net.to(device, torch.float64)
            probes.append(make_probe(wide_net, data))
    # An error in the model's own dtype is not suppressed.
    probe = make_probe(net, data)
    probe.is_decisive = not (on_gpu and probes)
    return [*probes, probe]


def make_probe(net: Net, data: Federation) -> EngineProbe:
    """Small clients, at the initial weights plus noise of half of each weight's size.

    The noise lets clients differ, and lets a weight that starts at 0 take part.
    """
    sizes = PROBE_SIZES if net.size <= FULL_PROBE_MAX_WEIGHTS else PROBE_SIZES[:1]
    federation = _probe_federation(net, data, sizes)
    training = Training(batch_size=max(sizes))  # so each client has one batch
    workers = Workers(1, federation.x.device)
    context = TrainContext(net, federation, training, Engine("loop"), workers)
    ids = torch.arange(len(sizes))
    buffers = net.b0.repeat(len(sizes), 1)
    clients = Clients(context, ids, round=0, buffers=buffers)
    w = _noisy_weights(net, len(sizes))
    # `Clients.fit` draws its minibatches by the same arguments; sizes are in
    # descending order, as `Batches` requires.
    key = (context.seed, clients.round)
    batches = Batches(federation, training, key, ids, BatchPlan(epochs=1), ragged=False)
    seeds = batches.seeds[:, 0]
    order = batches.order[:, 0]
    train_index = [order[i, :size] for i, size in enumerate(sizes)]
    test_index = list(federation.lists("test"))
    expected = {
        "training": _reference(net, federation, w, train_index, seeds, train=True),
        "evaluation": _reference(net, federation, w, test_index, seeds, train=False),
    }
    return EngineProbe(clients, w, expected)


def _noisy_weights(net: Net, clients: int) -> Tensor:
    """Weights [s, P] of the clients, from a random stream of the probe's own."""
    generator = torch.Generator().manual_seed(0)
    # Drawn in float64: probes of both dtypes have the same noise.
    noise = torch.randn(clients, net.size, generator=generator, dtype=torch.float64)
    return net.w0 + noise.to(net.w0) * (0.5 * net.w0.abs() + 0.01)


def _probe_federation(net: Net, data: Federation, sizes: tuple[int, ...]) -> Federation:
    """Federation of clients of these sizes, which test on copies of their samples.

    The test samples are copies because no sample may be in two splits.
    """
    x, y = spread_samples(data, sum(sizes))
    if x.is_floating_point():
        x = x.to(net.dtype)
    if y.is_floating_point():
        y = y.to(net.dtype)
    x = add_padding(x, net.module)
    x = torch.cat([x, x])
    y = torch.cat([y, y])
    index = torch.arange(len(x), device=x.device)
    lists = index.split([*sizes, *sizes])  # every client's "train", then every "test"
    splits = {"train": lists[: len(sizes)], "test": lists[len(sizes) :]}
    return Federation(x, y, splits, data.classes, fields=data.fields)


def _reference(
    net: Net,
    data: Federation,
    w: Tensor,  # [s, P]
    index: list[Tensor],  # each client's samples in the pool
    seeds: Tensor,  # [s]
    *,
    train: bool,
) -> list[Tensor]:  # losses [s], gradients [s, P]
    """Losses and gradients by the module itself, client after client."""
    module = copy.deepcopy(net.module)
    losses = []
    grads = []
    for row, samples, seed in zip(w, index, seeds, strict=True):
        net.load(module, row, net.b0).train(train)
        x = data.x[samples]
        y = data.y[samples]
        loss, grad = reference_gradient(net, module, x, y, seed)
        losses.append(loss)
        grads.append(grad)
    return [torch.stack(losses), torch.stack(grads)]


def reference_gradient(
    net: Net,
    module: nn.Module,
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B, ...]
    seed: Tensor,  # []
) -> tuple[Tensor, Tensor]:  # [], [P]
    """Loss and gradient of the module by plain autograd, as a user would take them."""
    with forward_context(module.training, None, seed), torch.enable_grad():
        loss = net.batch_loss(module(x), y)
    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in net.names]
    # The gradient of a parameter that the loss does not depend on is 0.
    grads = torch.autograd.grad(
        loss, trained, allow_unused=True, materialize_grads=True
    )
    return loss.detach(), torch.cat([grad.reshape(-1) for grad in grads])


def add_padding(x: Tensor, module: nn.Module) -> Tensor:
    """`x` with a padding token at the end of every other sample.

    An embedding gives the row of its padding token no gradient. The samples of a probe
    perhaps have no such token, and an engine that trains its row would go unnoticed.
    """
    for layer in module.modules():
        padding = layer.padding_idx if isinstance(layer, nn.Embedding) else None
        if padding is not None and not x.is_floating_point():
            x = x.clone()
            x.view(len(x), -1)[::2, -1] = padding
    return x


def first_mismatch(
    probes: list[EngineProbe], engine: Engine, graphs: GradientGraphs | None = None
) -> Mismatch | None:
    """An engine's first mismatch, or its error as one; None where there is none.

    An error in any of the probes is a mismatch, with or without a message. Running out
    of memory is not the engine's fault and is raised.
    """
    try:
        for probe in probes:
            mismatch = probe.difference(engine, graphs)
            if mismatch is not None and probe.is_decisive:
                return mismatch
    except Exception as error:
        if memory.is_out_of_memory(error):
            raise
        return Mismatch(validate.first_line(error))
    return None


def verified_graphs(
    probes: list[EngineProbe], engine: Engine, enabled: bool
) -> GradientGraphs:
    """The CUDA graphs of a run, after captured steps of the probes were replayed.

    Where a capture fails, or a replay does not match the module, the graphs refuse to
    capture, and the run goes without them.
    """
    device = probes[0].w.device
    graphs = GradientGraphs(device)
    if not enabled:
        graphs.refusal_reason = "asked for"  # the words after "eager: " in the record
        return graphs
    tried_graphs = GradientGraphs(device, capture_after_steps=0)
    mismatch = first_mismatch(probes, engine, tried_graphs)
    graphs.refusal_reason = tried_graphs.refusal_reason
    if graphs.refusal_reason is None and mismatch is not None:
        graphs.refusal_reason = f"captured, {mismatch.words}"
    return graphs


# which engine is it? ----------------------------------------------------------


def select_engine(
    net: Net, data: Federation, probes: list[EngineProbe], name: str
) -> Engine:
    """The engine called `name`; for "auto" the first one that matches.

    The order is that of the module's docstring; `name` is one of its words. Raises
    MismatchError where the engine that is asked for does not match, and where "loop"
    does not. "loop" calls the module as plain torch does, so the module is then no
    function of its parameters, and nothing can train it.
    """
    _check_loop(net, data, probes)
    if name == "loop":
        return Engine("loop")
    if name == "vmap":
        return _required_vmap(probes)
    trial = try_chain(net, data, probes)
    if trial.chain is None and name == "chain":
        raise MismatchError(
            f"engine: 'chain' cannot train this model: {trial.reason}; take 'auto'."
        )
    engine = _vmap_or_loop(net, probes)
    if trial.chain is None:
        return engine._replace(reason=f"{engine.reason}; {trial.reason}")
    return engine._replace(chain=trial.chain, reason=trial.reason)


def _check_loop(net: Net, data: Federation, probes: list[EngineProbe]) -> None:
    """Raises MismatchError where the module is no function of its parameters."""
    # A module that counts its calls can match once by chance, and hardly twice.
    for _ in range(2):
        mismatch = first_mismatch(probes, Engine("loop"))
        if mismatch is not None:
            x, y = spread_samples(data, FIRST_BATCH_SIZE)
            text = validate.explain_impure_model(net, x, y, mismatch.words)
            raise MismatchError(text)


def _required_vmap(probes: list[EngineProbe]) -> Engine:
    """The engine "vmap"; raises MismatchError where it does not match the module."""
    engine = Engine("vmap")
    mismatch = first_mismatch(probes, engine)
    if mismatch is not None:
        raise MismatchError(
            f"engine: 'vmap' cannot train this model: {mismatch.words}; take 'auto' or "
            "'loop'."
        )
    return engine


def _vmap_or_loop(net: Net, probes: list[EngineProbe]) -> Engine:
    """Engine "vmap" where it is faster and matches the module, else "loop"."""
    reason = slow_under_vmap(net)
    if reason is not None:
        return Engine("loop", reason=reason)
    mismatch = first_mismatch(probes, Engine("vmap"))
    if mismatch is not None:
        reason = f"vmap cannot train this model: {mismatch.words}"
        return Engine("loop", reason=reason)
    return Engine("vmap", reason="all clients take a step at once")


def slow_under_vmap(net: Net) -> str | None:
    """The reason why vmap would be slower than a loop, or None."""
    if net.w0.device.type != "cpu":
        return None
    for noun, layer_type in SLOW_UNDER_VMAP.items():
        if any(isinstance(layer, layer_type) for layer in net.module.modules()):
            return f"a model with {noun}, on a CPU"
    if net.size > VMAP_MAX_WEIGHTS:
        return f"a model of {net.size} weights, on a CPU"
    return None


class ChainTrial(NamedTuple):
    """The chain of a model, or None, and the reason for either."""

    chain: Chain | None
    reason: str


def try_chain(net: Net, data: Federation, probes: list[EngineProbe]) -> ChainTrial:
    """Looks for a chain in the model, and tries it on the probes.

    Warns where a chain was found whose numbers differ: that is an error of this
    library, while a model without a chain is not.
    """
    try:
        chain = find_chain(net, data)
    except NotAChain as error:
        return ChainTrial(None, f"no chain of layers that the kernels know: {error}")
    # Which engine the chain is a field of makes no difference to these gradients.
    mismatch = first_mismatch(probes, Engine("loop", chain))
    if mismatch is None:
        return ChainTrial(chain, "a chain of layers that the kernels know")
    reason = f"the chain found for this model is not the model: {mismatch.words}"
    if mismatch.is_numeric:
        warn_caller(f"pflcore: {reason}; it is trained without.", UserWarning)
    return ChainTrial(None, reason)
