"""Probes: trials of an engine against the module itself.

A probe is a federation of a few small clients (of fewer clients, for a large model),
together with their losses and gradients by the module itself under plain autograd: the
reference. An engine computes the same losses and gradients at the initial weights plus
noise. It must match the reference in training mode and, where it evaluates, in
evaluation mode. Batch norm's statistics behind the training step must match, too.

There is a probe in the model's own dtype, and one in float64. The one in float64 is
missing

- where the model is in float64 already,
- where a part of the model fixes its dtype,
- where memory is short,
- for a large model on a CPU.

On a CPU all numbers count. On a GPU only those in float64 count, where there are any;
in the other dtype the engine must only run without an error. The reason: a GPU sums
float32 products in another order for each shape, and rounds them to TF32 where a
library does not heed the flag that forbids it. Rectifiers and maxima magnify that
rounding.

They do so on a CPU, too, but rarely: of an image's many numbers, one next to a tie may
go the other way and take its whole slope along. So where a difference is too large, it
is measured how much of it rounding explains. What a floating-point pass computes is the
exact result of weights that are off by a few rounding errors (its backward error). The
module itself is evaluated at pairs of weights that are off by more, in opposite
directions: what is next to a tie goes the other way in one of the two. An engine may
be off by as much as the two differ.

Symbols: s clients of a probe; P weights of the model; B samples of a batch; w [s, P]
the clients' weights; x, y samples and labels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.data._federation import Federation
from pflcore.nn._context import forward_context
from pflcore.nn._copy import copy_module
from pflcore.train import _memory as memory
from pflcore.train import _validate as validate
from pflcore.train._batches import Batches, BatchPlan
from pflcore.train._clients import Clients
from pflcore.train._context import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._first_batch import spread_samples
from pflcore.train._gpu_flags import NO_TF32_FLAGS
from pflcore.train._graphs import GradientGraphs
from pflcore.train._net import Net, scores_of
from pflcore.train._training import Precision, Training
from pflcore.train._workers import Workers

# A larger model has probes of fewer clients, and on a CPU none in float64: the copies
# would cost too much. On a CPU they have one client. On a GPU they have two, of which
# the smaller one shows whether its minibatches may be padded.
FULL_PROBE_MAX_WEIGHTS = 1 << 19
# Samples of the probe's clients, in descending order, as `Batches` requires: a block
# has clients of equal and of other size. Batch norm cannot train on fewer than two
# samples.
PROBE_SIZES = (5, 5, 2)
# A difference may be as large as this share of the largest value of the reference.
FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-3
# Rounding errors of one pass, in units of the dtype's epsilon.
MAX_ROUNDING_ERRORS = 64
ROUNDED_PAIRS = 4

# Values of the clients by name: the losses [s] and gradients [s, P] "in training mode"
# and "in evaluation mode", and the running statistics [s, b] behind the training step.
Values = dict[str, Tensor]


class Mismatch(NamedTuple):
    """A difference between an engine and the module.

    It is a reason to take another engine. A `MismatchError` is for users: model, data
    and loss do not fit together.

    Attributes:
        words: A phrase on the difference.
        is_numeric: True where the engine gives other numbers than the module. False
            where it gives no numbers, since it raised an error.
    """

    words: str
    is_numeric: bool = False


@dataclass
class EngineProbe:
    """A few small clients with the module's own losses and gradients.

    Attributes:
        clients: The clients. `difference` gives them the engine that is tried.
        w: The clients' weights [s, P].
        expected: The values of the module.
        reference: The function that gives `expected` at other weights [s, P].
        is_decisive: True where the engine's numbers count. False where only an error
            does.
    """

    clients: Clients
    w: Tensor
    expected: Values
    reference: Callable[[Tensor], Values]
    is_decisive: bool = True

    def difference(
        self, engine: Engine, graphs: GradientGraphs | None = None
    ) -> Mismatch | None:
        """The first difference of an engine's losses and gradients, or None.

        With `graphs` the gradients of a replayed step are compared. The step is
        captured before, at weights of half the size and with other random numbers. So a
        replay that still uses those is found.
        """
        context = replace(self.clients.context, engine=engine, graphs=graphs)
        clients = replace(self.clients, context=context)
        if graphs is not None:
            replace(clients, round=1).fit(0.5 * self.w, epochs=1, lr=1.0)
        computed = self._computed(clients)
        if not self.is_decisive:
            return None
        for name, got in computed.items():
            want = self.expected[name]
            gap = _largest_gap(got, want)
            same_nan = torch.equal(got.isnan(), want.isnan())
            allowed = self._allowed(name)
            if same_nan and gap <= allowed:
                continue
            if same_nan and gap <= allowed + self.rounding[name]:
                continue
            largest = float(want.abs().nan_to_num(0.0).max())
            sizes = f"off by {gap:.1e}, the largest is {largest:.1e}"
            words = f"its {name} is another ({sizes})"
            return Mismatch(words, is_numeric=True)
        return None

    @cached_property
    def rounding(self) -> dict[str, float]:
        """The largest change of each expected value by rounding, by its name.

        It is measured at `ROUNDED_PAIRS` pairs of weights that are off by
        `MAX_ROUNDING_ERRORS` with random signs: of a single pair, the errors of many
        weights may cancel where it matters. A module that gives other values when it is
        called again, by random numbers for example, has no changes by rounding: they
        would hide what is wrong with it.
        """
        changes = dict.fromkeys(self.expected, 0.0)
        with NO_TF32_FLAGS.set_for(self.w.device):
            once, again = self.reference(self.w), self.reference(self.w)
        for name, value in once.items():
            if not _largest_gap(again[name], value) <= self._allowed(name):
                return changes
        generator = torch.Generator().manual_seed(0)
        share = MAX_ROUNDING_ERRORS * torch.finfo(self.w.dtype).eps
        for _ in range(ROUNDED_PAIRS):
            bits = torch.randint(0, 2, self.w.shape, generator=generator)
            errors = self.w * share * (2 * bits - 1).to(self.w)
            # TF32 would round the weights to far fewer digits than they are off by.
            with NO_TF32_FLAGS.set_for(self.w.device):
                upper = self.reference(self.w + errors)
                lower = self.reference(self.w - errors)
            for name, change in changes.items():
                changes[name] = max(change, _largest_gap(upper[name], lower[name]))
        return changes

    def _allowed(self, name: str) -> float:
        """The difference of a value that needs no look at its rounding."""
        relative, absolute = self._tolerances()
        largest = float(self.expected[name].abs().nan_to_num(0.0).max())
        return relative * largest + absolute

    def _computed(self, clients: Clients) -> Values:
        """The values that an engine computes."""
        engine = clients.context.engine
        fit = clients.fit(self.w, epochs=1, lr=1.0)
        # Each client has one batch, and takes one step of plain SGD, without momentum
        # and weight decay. With lr=1 that step subtracts the gradient, so w - fit.w is
        # the gradient, up to rounding.
        values = {
            "loss in training mode": fit.loss,
            "gradient in training mode": self.w - fit.w,
        }
        if fit.buffers.numel():
            values["row of running statistics"] = fit.buffers
        # On a CPU, vmap is for training alone; evaluation runs as it does with "loop".
        if engine.autograd == "loop" or engine.chain or engine.evaluates:
            # The split "test" is computed in evaluation mode.
            values["loss in evaluation mode"] = clients.loss(self.w, "test")
            values["gradient in evaluation mode"] = clients.grad(self.w, "test")
        return values

    def _tolerances(self) -> tuple[float, float]:
        """The relative and the absolute tolerance of a difference, without `rounding`.

        Their sum is the largest difference that is accepted. The relative part is a
        share of the largest expected value, also where that is below 1.

        The gradient of the training mode is `w - fit.w`, so it carries the rounding of
        the weights. The absolute part is the rounding of numbers as large as the
        largest weight or sample, or as 1 where all are smaller. Values below it, such
        as a gradient of 1e-6 in float32, are not tested in this dtype. The probe in
        float64 tests those of a loss in small units.
        """
        relative = FLOAT32_TOLERANCE
        if self.w.dtype == torch.float64:
            relative = FLOAT64_TOLERANCE
        x = self.clients.context.data.x
        largest = max(1.0, float(self.w.abs().max()), float(x.abs().max()))
        epsilon = torch.finfo(self.w.dtype).eps
        # The minimum is for tokens, whose large numbers are no sizes of values.
        return relative, min(relative, MAX_ROUNDING_ERRORS * epsilon * largest)


def _largest_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of one shape, without NaN."""
    return float((a - b).abs().nan_to_num(0.0).max())


def make_probes(
    net: Net, data: Federation, precision: Precision = None
) -> list[EngineProbe]:
    """The probes of a net: in float64, where possible, and in its dtype.

    On a CPU the numbers of both decide. On a GPU only those in float64 do, where there
    is that probe. With a `precision` there is one more, which must only run without an
    error: its rounding hides differences that the others show.
    """
    probes = []
    device = net.w0.device
    on_gpu = device.type == "cuda"
    is_small = net.size <= FULL_PROBE_MAX_WEIGHTS
    if net.dtype != torch.float64 and (on_gpu or is_small):
        # A part that fixes its dtype raises one of these errors, and so does a lack of
        # memory. Errors of the second probe, below, are not suppressed.
        with suppress(RuntimeError, TypeError, ValueError):
            wide_net = net.to(device, torch.float64)
            probes.append(make_probe(wide_net, data))
    is_decisive = not (on_gpu and probes)
    probes.append(make_probe(net, data, is_decisive=is_decisive))
    if precision is not None:
        probes.append(make_probe(net, data, precision, is_decisive=False))
    return probes


def make_probe(
    net: Net,
    data: Federation,
    precision: Precision = None,
    *,
    is_decisive: bool = True,
) -> EngineProbe:
    """A probe in the dtype of `net`, at initial weights plus noise.

    The noise lets clients differ, and lets a weight that starts at 0 take part.
    """
    sizes: tuple[int, ...] = PROBE_SIZES
    if net.size > FULL_PROBE_MAX_WEIGHTS:
        sizes = sizes[1:] if net.w0.device.type == "cuda" else sizes[:1]
    federation = _probe_federation(net, data, sizes)
    # Each client has one batch.
    training = Training(batch_size=max(sizes), precision=precision)
    workers = Workers(1, federation.x.device)
    context = TrainContext(net, federation, training, Engine("loop"), workers)
    ids = torch.arange(len(sizes))
    buffers = net.b0.repeat(len(sizes), 1)
    clients = Clients(context, ids, round=0, buffers=buffers)
    w = _noisy_weights(net, len(sizes))
    # `Clients.fit` draws its minibatches by the same arguments. The sizes are in
    # descending order, as `Batches` requires.
    key = (context.seed, clients.round)
    batches = Batches(federation, training, key, ids, BatchPlan(epochs=1), ragged=False)
    seeds = batches.seeds[:, 0]
    order = batches.order[:, 0]
    train_index = [order[i, :size] for i, size in enumerate(sizes)]
    test_index = list(federation.lists("test"))

    def reference(w: Tensor) -> Values:
        trained = _reference(net, federation, w, train_index, seeds, train=True)
        evaluated = _reference(net, federation, w, test_index, seeds, train=False)
        return trained | evaluated

    return EngineProbe(clients, w, reference(w), reference, is_decisive)


def _noisy_weights(net: Net, clients: int) -> Tensor:
    """Weights [s, P] of the clients: the initial ones plus noise.

    The noise has half of each weight's size, and a little more. Its random stream
    belongs to the probe.
    """
    generator = torch.Generator().manual_seed(0)
    # It is drawn in float64, so the probes of both dtypes have the same noise.
    noise = torch.randn(clients, net.size, generator=generator, dtype=torch.float64)
    return net.w0 + noise.to(net.w0) * (0.5 * net.w0.abs() + 0.01)


def _probe_federation(net: Net, data: Federation, sizes: tuple[int, ...]) -> Federation:
    """Federation of clients of these sizes, with splits "train" and "test".

    The test samples are copies of the training samples, because no sample may be in two
    splits.
    """
    x, y = spread_samples(data, sum(sizes))
    if x.is_floating_point():
        x = x.to(net.dtype)
    if y.is_floating_point():
        y = y.to(net.dtype)
    x = _add_padding(x, net.module)
    x = torch.cat([x, x])
    y = torch.cat([y, y])
    index = torch.arange(len(x), device=x.device)
    # First the lists "train" of all clients, then their lists "test".
    lists = index.split([*sizes, *sizes])
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
) -> Values:
    """Losses and gradients by the module itself under plain autograd.

    In training the module's running statistics follow, if it has any. Each client has a
    copy of its own, so nothing that a pass or a change of mode leaves there reaches the
    next one.
    """
    losses = []
    grads = []
    buffers = []
    for row, samples, seed in zip(w, index, seeds, strict=True):
        module = net.load(copy_module(net.module), row, net.b0)
        net.set_mode(module, train)
        with forward_context(train, None, seed), torch.enable_grad():
            scores = scores_of(module(data.x[samples]))
            loss = net.batch_loss(scores, data.y[samples])
        parameters = dict(module.named_parameters())
        trained = [parameters[name] for name in net.names]
        # The gradient of a parameter that the loss does not depend on is 0.
        gradient = torch.autograd.grad(
            loss, trained, allow_unused=True, materialize_grads=True
        )
        losses.append(loss.detach())
        grads.append(torch.cat([piece.reshape(-1) for piece in gradient]))
        named = dict(module.named_buffers())
        pieces = [named[name].reshape(-1) for name in net.buffer_names]
        buffers.append(torch.cat([net.b0[:0], *pieces]))
    mode = "training" if train else "evaluation"
    values = {
        f"loss in {mode} mode": torch.stack(losses),
        f"gradient in {mode} mode": torch.stack(grads),
    }
    if train and net.buffer_names:
        values["row of running statistics"] = torch.stack(buffers)
    return values


def _add_padding(x: Tensor, module: nn.Module) -> Tensor:
    """`x` with a padding token at the end of every other sample.

    An embedding gives the row of its padding token no gradient. Samples of a probe that
    have no such token would hide an engine that trains that row.
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
    """The first mismatch of an engine in the probes, or None.

    An error in any of the probes is a mismatch, with or without a message. Running out
    of memory is not the engine's fault and is raised.
    """
    try:
        for probe in probes:
            mismatch = probe.difference(engine, graphs)
            if mismatch is not None:
                return mismatch
    except Exception as error:
        if memory.is_out_of_memory(error):
            raise
        return Mismatch(validate.first_line(error))
    return None
