"""What trains this model? A trial before round 1 answers, by model, data and device
alone.

The module itself is run by plain autograd on a few samples: that says whether model,
data and loss fit together (`_validate`), and what losses and gradients are. Then a few
clients with those samples are trained for a step by each engine, and must give the
same: in float64, at the start plus noise, in training and in evaluation mode. On a card
float64 alone judges, at any size: there float32 may be rounded to TF32, which
rectifiers and maxima magnify.

On a CPU, "auto" takes the chain where a model is one; "loop" for convolutions and from
`VMAP_MAX_WEIGHTS` weights on; else "vmap" where that carries the model. On a GPU: the
chain, vmap, loop.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.data._federation import Federation
from pflcore.metrics import ArgumentForm
from pflcore.nn._context import forward_context
from pflcore.train import _memory as memory
from pflcore.train import _validate as fits
from pflcore.train._batches import Batches, BatchPlan
from pflcore.train._chain import Chain, find_chain
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

# weights from which, on a CPU, clients are trained faster one by one
VMAP_MAX_WEIGHTS = 1 << 16
FLOAT64_MAX_WEIGHTS = (
    1 << 19
)  # weights beyond which float64 copies would cost a CPU too much: the model's dtype
# samples of the trial's clients; batch norm takes no batch of one
PROBE_SIZES = (5, 5, 2, 2)
FIRST_BATCH_SIZE = 8  # of the first pass
SLOW_UNDER_VMAP = {
    "convolutions": nn.modules.conv._ConvNd,
    "an LSTM": nn.LSTM,
}  # under vmap, on a CPU


def make_context(  # noqa: PLR0913 (a run's own)
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
    """What a run needs, after one trial: model, data and loss fit together, and what
    trains the model is the model. MismatchError, a ValueError, in one sentence where
    something does not fit."""
    device = net.w0.device
    with (
        single_threaded(),
        REPEATABLE_FLAGS.set_for(device),
        NO_TF32_FLAGS.set_for(device),
    ):
        net = net.with_fields(data.fields)
        check_fit(net, data, training)
        tried = make_probes(net, data)
        chosen = select_engine(net, data, tried, engine)
        captured = (
            verified_graphs(tried, chosen, graphs)
            if data.device.type == "cuda"
            else None
        )
        kept = (
            memory.activation_bytes(net, *probe_samples(data, FIRST_BATCH_SIZE))
            // FIRST_BATCH_SIZE
        )
    if chosen.chain is not None and training.local_optimizer != "sgd":
        more = "it gives the gradients, and AdamW takes its steps in torch"
        chosen = chosen._replace(reason=f"{chosen.reason}; {more}")
    threads = Workers(workers, data.device)
    clients_per_block = clients_per_block or (
        CPU_BLOCK_CLIENTS if data.device.type == "cpu" else GPU_BLOCK_CLIENTS
    )
    return TrainContext(
        net,
        data,
        training,
        chosen,
        threads,
        seed,
        rounds,
        clients_per_block,
        kept,
        captured,
    )


# do they fit? -----------------------------------------------------------------


def check_fit(net: Net, data: Federation, training: Training) -> None:
    """One batch through the module, forward and backward; `net` learns from it where
    its head is, whether it gives one score for each label, and in which form its loss
    takes that."""
    fits.check_torch_modes()
    fits.check_dtypes(net, data)
    x, y = probe_samples(data, max(2, min(training.batch_size, FIRST_BATCH_SIZE)))
    net.argument_form = ArgumentForm()
    for train in (False, True):
        fits.check_no_global_draws(
            partial(probe_forward, net, data, x, y, train, learn=not train)
        )
    check_single(net, data, training)


def check_single(net: Net, data: Federation, training: Training) -> None:
    """Batch norm cannot train on one sample: where it is a client's last batch, it
    joins the one before; is there a client who has no other?"""
    size, batch = data.size("train"), training.batch_size
    lone = (size == 1) | (batch == 1)
    if not (lone | (size % batch == 1)).any():
        return
    try:
        probe_forward(net, data, *probe_samples(data, 1), True)
    except MismatchError as e:
        net.merge_last_sample = True
        if lone.any() and isinstance(e, fits.NoBatchAxis):
            raise
        if lone.any():
            i = int(lone.nonzero()[0])
            normed = any(isinstance(m, _BatchNorm) for m in net.module.modules())
            why = ", as batch norm cannot" if normed else f" ({str(e).rstrip('.')})"
            raise MismatchError(
                f"data: client {i} ({int(size[i])} samples, batch_size {batch}) has a "
                "batch of one "
                f"sample, on which this model cannot train{why}; take another "
                "batch_size, or leave "
                "clients of one sample out."
            ) from e


def probe_forward(
    net: Net, data: Federation, x: Tensor, y: Tensor, train: bool, learn: bool = False
) -> Tensor:
    """The loss of one batch by a copy of the module, its backward pass tried; to
    `learn` is in which form the loss takes scores and targets."""
    module = copy.deepcopy(net.module).train(train)
    # name, layer, input
    called: list[tuple[str, nn.Module, Any]] = [("", module, (None,))]
    for name, m in module.named_modules():
        if not m._modules or isinstance(m, nn.Linear):
            m.register_forward_pre_hook(
                lambda *given, name=name: called.append((name, *given))
            )
    seed = x.new_zeros((), dtype=torch.int64)
    with forward_context(train, None, seed), torch.enable_grad():
        with fits.reraise_as(
            lambda e: next(fits.explain_layer_error(*called[-1], data, e))
        ):
            scores = module(x)
        fits.check_scores(net, data, scores, y)
        net.single_score = scores.numel() == y.numel()
        if learn:
            net.argument_form = fits.loss_argument_form(net, scores, y)
        with fits.reraise_as(partial(fits.explain_loss_error, net, scores, y)):
            loss = net.batch_loss(scores, y)
        fits.check_loss(loss)
    if train:
        own = dict(module.named_parameters())
        with fits.reraise_as(
            lambda e: f"model: its backward pass fails: {fits.first_line(e)}."
        ):
            grads = torch.autograd.grad(
                loss.sum(), [own[n] for n in net.names], allow_unused=True
            )
        fits.check_gradients(grads)
        used = [n for n, g in zip(net.names, grads, strict=True) if g is not None]
        net.locate_head(used, [name for name, _, _ in called[1:]])
    return loss.detach()


def probe_samples(data: Federation, count: int) -> tuple[Tensor, Tensor]:
    """Training samples and labels, evenly spread over the clients, some twice where
    too few."""
    every = data.lists("train").flat
    index = every[torch.linspace(0, len(every) - 1, count).long().to(every.device)]
    return data.x[index], data.y[index]


# is the engine the model? -----------------------------------------------------


class Mismatch(NamedTuple):
    """In what an engine is not the module."""

    words: str
    is_numeric: bool = False  # it gives other numbers, rather than none


@dataclass
class EngineProbe:
    """A few clients, and what the module says of them."""

    clients: Clients  # of one engine or another
    w: Tensor  # [s, P]
    # losses [s], gradients [s, P] in "training", "evaluation"
    expected: dict[str, list[Tensor]]
    # else its numbers say nothing: an engine must only not fail
    is_decisive: bool = True

    def difference(
        self, engine: Engine, graphs: GradientGraphs | None = None
    ) -> Mismatch | None:
        """Where an engine's losses and gradients are not the module's.

        They may differ by a share of the largest, and by what rounding makes of weights
        and inputs: a loss in other units is tried no less. With `graphs` a step is
        captured before, at other weights and with other random numbers, and what is
        compared is its replay.
        """
        context = self.clients.context._replace(engine=engine, graphs=graphs)
        clients = replace(self.clients, context=context)
        if graphs is not None:
            replace(clients, round=1).fit(self.w.flip(0), epochs=1, lr=1.0)
        fit = clients.fit(self.w, epochs=1, lr=1.0)
        # a step of SGD at lr 1 is the gradient
        found = {"training": (fit.loss, self.w - fit.w)}
        if engine.name == "loop" or engine.chain:  # vmap does not evaluate
            found["evaluation"] = (
                clients.loss(self.w, "test"),
                clients.grad(self.w, "test"),
            )
        share = 1e-10 if self.w.dtype == torch.float64 else 1e-3
        large = max(
            1.0, *(float(v.abs().max()) for v in (self.w, clients.context.data.x))
        )
        rounding = min(share, 64 * torch.finfo(self.w.dtype).eps * large)
        for mode, both in found.items():
            for what, got, want in zip(
                ("loss", "gradient"), both, self.expected[mode], strict=True
            ):
                size, gap = (
                    float(v.abs().nan_to_num(0.0).max()) for v in (want, got - want)
                )
                if (
                    not torch.equal(got.isnan(), want.isnan())
                    or gap > share * size + rounding
                ):
                    return Mismatch(
                        f"its {what} is another in {mode} mode (off by {gap:.1e}, the "
                        "largest is "
                        f"{size:.1e})",
                        is_numeric=True,
                    )
        return None


def make_probes(net: Net, data: Federation) -> list[EngineProbe]:
    """One in float64, and one in the model's own dtype; or that alone, of a model that
    fixes a dtype somewhere, and on a CPU of a large one. On a card that in float64
    judges."""
    found = []
    device = net.w0.device
    on_card = device.type == "cuda"
    if net.dtype != torch.float64 and (on_card or net.size <= FLOAT64_MAX_WEIGHTS):
        with suppress(RuntimeError, TypeError, ValueError):
            found.append(make_probe(net.to(device, torch.float64), data))
    own = make_probe(net, data)
    own.is_decisive = not (on_card and found)
    return [*found, own]


def make_probe(net: Net, data: Federation) -> EngineProbe:
    """Clients at the start plus noise of half of each weight's size."""
    sizes = PROBE_SIZES if net.size <= FLOAT64_MAX_WEIGHTS else PROBE_SIZES[:1]
    x, y = (
        v.to(net.dtype) if v.is_floating_point() else v
        for v in probe_samples(data, sum(sizes))
    )
    x = add_padding(x, net.module)
    # no sample may be in two splits, so both hold copies of the same ones
    x, y = (torch.cat([v, v]) for v in (x, y))
    lists = torch.arange(len(x), device=x.device).split(sizes * 2)
    index = {"train": lists[: len(sizes)], "test": lists[len(sizes) :]}
    made = Federation(x, y, index, data.classes, fields=data.fields)
    how = Training(batch_size=max(sizes))
    context = TrainContext(net, made, how, Engine("loop"), Workers(1, x.device))
    clients = Clients(
        context, torch.arange(len(sizes)), 0, net.b0.repeat(len(sizes), 1)
    )
    batches = Batches(made, how, (0, 0), clients.ids, BatchPlan(1), False)
    order = batches.order[:, 0]
    seeds = batches.seeds[:, 0]
    draws = torch.Generator().manual_seed(0)
    module = copy.deepcopy(net.module)
    noise = torch.randn(len(sizes), net.size, generator=draws, dtype=torch.float64).to(
        net.w0
    )
    found = EngineProbe(clients, net.w0 + noise * (0.5 * net.w0.abs() + 0.01), {})
    for train, mode in ((True, "training"), (False, "evaluation")):
        answers = []
        for i, n in enumerate(sizes):
            at = order[i, :n] if train else index["test"][i]
            net.load(module, found.w[i], net.b0).train(train)
            answers.append(reference_gradient(net, module, x[at], y[at], seeds[i]))
        found.expected[mode] = [torch.stack(v) for v in zip(*answers, strict=True)]
    return found


def reference_gradient(
    net: Net, module: nn.Module, x: Tensor, y: Tensor, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and gradient [P] of the module itself, as a user would take them."""
    with forward_context(module.training, None, seed), torch.enable_grad():
        loss = net.batch_loss(module(x), y)
    own = dict(module.named_parameters())
    grads = torch.autograd.grad(
        loss, [own[n] for n in net.names], allow_unused=True, materialize_grads=True
    )
    return loss.detach(), torch.cat([g.reshape(-1) for g in grads])


def add_padding(x: Tensor, module: nn.Module) -> Tensor:
    """Every other sample ends in what an embedding takes for padding, whose row gets no
    gradient: samples that were drawn may have none."""
    for m in module.modules():
        padding = m.padding_idx if isinstance(m, nn.Embedding) else None
        if padding is not None and not x.is_floating_point():
            x = x.clone()
            x.view(len(x), -1)[::2, -1] = padding
    return x


def first_mismatch(
    tried: list[EngineProbe], engine: Engine, graphs: GradientGraphs | None = None
) -> Mismatch | None:
    """Where an engine differs from the module, or what it raises; None: nowhere."""
    try:
        for t in tried:
            differs = t.difference(engine, graphs)
            if differs is not None and t.is_decisive:
                return differs
    except Exception as e:
        if memory.is_out_of_memory(e):
            raise
        return Mismatch(fits.first_line(e))
    return None


def verified_graphs(
    probes: list[EngineProbe], engine: Engine, enabled: bool
) -> GradientGraphs:
    """The graphs of a run on a GPU, after captured steps of the trial's clients were
    replayed.

    Where that fails, or gives other numbers than the module, the run goes without.
    """
    device = probes[0].w.device
    graphs = GradientGraphs(device)
    if not enabled:
        graphs.refusal_reason = "asked for"
        return graphs
    probe = GradientGraphs(device, capture_after_steps=0)
    differs = first_mismatch(probes, engine, probe)
    graphs.refusal_reason = probe.refusal_reason
    if graphs.refusal_reason is None and differs is not None:
        graphs.refusal_reason = f"captured, {differs.words}"
    return graphs


def select_engine(
    net: Net, data: Federation, tried: list[EngineProbe], asked: str
) -> Engine:
    """The engine that is asked for, or the fastest of those that are the module."""
    loop = Engine("loop")
    vmap = Engine("vmap")
    # a module that counts its calls can match once by chance, never twice
    for _ in range(2):
        differs = first_mismatch(tried, loop)
        if differs is not None:
            raise MismatchError(
                fits.explain_impure_model(
                    net, *probe_samples(data, FIRST_BATCH_SIZE), differs.words
                )
            )
    if asked == "loop":
        return loop
    if asked == "vmap":
        differs = first_mismatch(tried, vmap)
        if differs is not None:
            words = f"{differs.words}; take 'auto' or 'loop'"
            raise MismatchError(f"engine: 'vmap' cannot train this model: {words}.")
        return vmap
    chain = verified_chain(net, data, tried)
    if isinstance(chain, str) and asked == "chain":
        raise MismatchError(
            f"engine: 'chain' cannot train this model: {chain}; take 'auto'."
        )
    slow = slow_under_vmap(net)
    differs = None if slow else first_mismatch(tried, vmap)
    if differs is not None:
        slow = f"vmap cannot train this model: {differs.words}"
    usual = loop if slow else vmap
    if isinstance(chain, Chain):
        return usual._replace(
            chain=chain, reason="a chain of layers that the kernels know"
        )
    return usual._replace(
        reason=f"{slow or 'all clients take a step at once'}; {chain}"
    )


def slow_under_vmap(net: Net) -> str:
    """Why one client after another is trained faster, or nothing."""
    if net.w0.device.type != "cpu":
        return ""
    for what, kind in SLOW_UNDER_VMAP.items():
        if any(isinstance(m, kind) for m in net.module.modules()):
            return f"a model with {what}, on a CPU"
    return (
        f"a model of {net.size} weights, on a CPU"
        if net.size > VMAP_MAX_WEIGHTS
        else ""
    )


def verified_chain(net: Net, data: Federation, tried: list[EngineProbe]) -> Chain | str:
    """The model's chain, or in a few words why it has none that is the model."""
    chain = find_chain(net, data)
    if isinstance(chain, str):
        return f"no chain of layers that the kernels know: {chain}"
    differs = first_mismatch(tried, Engine("loop", chain))
    if differs is None:
        return chain
    words = f"{differs.words}; the general path trains it"
    said = f"the chain found for this model is not the model: {words}"
    if differs.is_numeric:
        warnings.warn(f"pflcore: {said}.", UserWarning, stacklevel=5)
    return said
