"""Which path trains my model? The one place that answers: by model, data and device alone, so that results repeat on any machine.

Engines: "threads" trains one client after another on each of its threads, "vmap" takes the same step for many clients at once.
Forms, from the fastest to the most general:
"chain" one C++ call trains many clients' models, layer after layer (see `chain`) · "vmap" autograd under vmap ·
"module" the module as it is.
The engine then does what the chain cannot: an algorithm's own loss, features.
A form that is not the model (see `proof`), or that cannot be run, gives way to the next one; what was passed over is said.

What "auto" takes on a CPU where the model is no chain. Processor milliseconds of one epoch on one worker, minima on a busy
machine, in batches of 20; 20 clients of 100 samples, the last two rows 6 of 60; the plain loop is a module and an optimizer for each:

| kind of model | auto | plain loop | threads | vmap |
|---|---|---|---|---|
| 30-20-10 with batch norm, 870 weights | vmap | 132 | 127 | 18 |
| residual 30-32-10, 2,442 | vmap | 116 | 121 | 26 |
| attention over 20 tokens, 10,314 | vmap | 382 | 361 | 236 |
| 784-200-10 with batch norm, 159,410: above `WIDE`; with AVX-512 48, 52 and 67 | threads | 225 | 246 | 174 |
| residual 784-256-10, 269,834 | threads | 299 | 270 | 285 |
| residual 784-512-10, 670,730 | threads | 435 | 510 | 733 |
| convolutions with batch norm, 3 x 32 x 32 | threads | 294 | 248 | |
| LSTM 28-64-10, 24,714 (20 of 90; with an LSTM it is always threads) | threads | | 164 | 294 |
| GRU of two layers, 28-64-10, 43,658 (20 of 90; written out for vmap: see `recurrent`) | vmap | 1,860 | 1,980 | 950 |

On a GPU it is vmap wherever that can carry the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore.data.federation import Federation
from pflcore.ops.chain import chain_eval, chain_grad, chain_sgd_
from pflcore.train import memory
from pflcore.train.chain import Chain, compiled, find_chain
from pflcore.train.group import gradients
from pflcore.train.net import Net
from pflcore.train.proof import Form, Trial, difference, trials

ENGINES = ("auto", "chain", "threads", "vmap")
WIDE = 1 << 16  # weights from which, on a CPU, clients are trained faster one by one than under vmap


class Path(NamedTuple):
    """How a model is trained, and why so."""

    engine: str  # "threads" or "vmap"
    form: str
    why: str


def choose_path(net: Net, data: Federation, engine: str = "auto") -> tuple[Net, Path, Chain | None]:
    """The net to train with, its path, and the chain that it is. ValueError in one sentence where the engine that was asked for cannot
    train this model."""
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}.")
    judge = Judge(net, data)
    wrong = judge.wrong(by_module)
    if wrong is not None:
        raise ValueError(
            f"model: as a function of its parameters it is not what the module computes: {wrong}; its forward must use the parameters "
            "where they are registered, and nothing that another pass has changed."
        )
    if engine == "threads":
        return net, judge.path("threads", "module", "asked for"), None
    chain = None
    if engine != "vmap":
        chain = judge.chain(data)
        if chain is None and engine == "chain":
            raise ValueError(f"engine: 'chain' cannot train this model: {judge.reasons[-1]}; take 'auto'.")
    lstm = any(isinstance(m, torch.nn.LSTM) for m in net.module.modules())
    if engine != "vmap" and (net.has_conv or lstm or net.size > WIDE) and net.w0.device.type == "cpu":
        if chain is not None:
            return net, judge.path("threads", "chain", "a chain of layers that the kernels know"), chain
        what = "with convolutions" if net.has_conv else "with an LSTM" if lstm else f"of {net.size} weights"
        return net, judge.path("threads", "module", f"a model {what}, on a CPU"), None
    wrong = judge.wrong(under_vmap)
    if wrong is not None and engine == "vmap":
        raise ValueError(f"engine: 'vmap' cannot train this model: {wrong}; take 'auto' or 'threads'.")
    general = "threads" if wrong is not None else "vmap"
    if chain is not None:
        return net, judge.path(general, "chain", "a chain of layers that the kernels know"), chain
    if wrong is not None:
        return net, judge.path("threads", "module", f"vmap cannot train this model: {wrong}"), None
    return net, judge.path("vmap", "vmap", "asked for" if engine == "vmap" else "all clients take a step at once"), None


class Judge:
    """Compares forms of one model with it, and collects what there is to say."""

    def __init__(self, net: Net, data: Federation) -> None:
        self.net, self.reasons = net, []  # type: tuple[Net, list[str]]
        self.wide, self.given = trials(net, data)
        self.raised = False  # did the last form fail, rather than differ?

    def wrong(self, make: Callable[[Net], Form]) -> str | None:
        """What is wrong with a form: where it differs, or what it raises, also in the model's own dtype."""
        self.raised = False
        try:
            gap = difference(make(self.wide), self.given)
            if gap is None and make is by_module:  # a count of passes was in step with the module's the first time
                gap = difference(make(self.wide), self.given)
            if gap is None and self.wide.dtype != self.net.dtype:
                make(self.net)(self.given[0].to(self.net.dtype))
            return gap
        except Exception as e:
            if memory.ran_out(e):
                raise
            self.raised = True
            return f"{type(e).__name__}, {str(e).splitlines()[0] if str(e) else 'without a word'}".rstrip(".")

    def chain(self, data: Federation) -> Chain | None:
        """The model's chain, where it has one and that is the model."""
        chain = find_chain(self.net, data)
        if isinstance(chain, str):
            self.reasons.append(f"no chain of layers that the kernels know: {chain}")
            return None
        for make in (by_chain, by_chain_steps):
            wrong = self.wrong(make)
            if wrong is not None:
                self.say(f"the chain that stands for this model is not the model: {wrong}; the general path trains it")
                return None
        return chain

    def say(self, sentence: str) -> None:
        """For the record; a form that gives other numbers is also worth a warning."""
        self.reasons.append(sentence)
        if not self.raised:
            warnings.warn(f"pflcore: {sentence}.", UserWarning, stacklevel=4)

    def path(self, engine: str, form: str, why: str) -> Path:
        return Path(engine, form, "; ".join([why, *self.reasons]))


# the forms --------------------------------------------------------------------------------------------------------------------------


def by_module(net: Net) -> Form:
    """The net as a function of a row, one client at a time."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        parts = []
        for i in range(len(t.rows)):
            s = slice(i, i + 1)
            parts.append(gradients(net, None, False, t.train, t.rows[s], t.x[s], t.y[s], t.buffers[s], t.seeds[s], {})[:2])
        losses, grads = zip(*parts, strict=True)
        return torch.cat(losses), torch.cat(grads)

    return form


def under_vmap(net: Net) -> Form:
    def form(t: Trial) -> tuple[Tensor, Tensor]:
        return gradients(net, None, True, t.train, t.rows, t.x, t.y, t.buffers, t.seeds, {})[:2]

    return form


def by_chain(net: Net) -> Form:
    """Gradients of the kernels that train a chain, and in evaluation mode their losses."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        head, (count, size) = _head(net, t), t.x.shape[:2]
        order, sizes = torch.arange(count * size).view(count, size), torch.full((count,), size)
        grads, losses = chain_grad(t.rows, *head, order.to(t.x.device), sizes, t.seeds if t.train else None)
        if not t.train:
            losses = (
                chain_eval(t.rows, *head, order.flatten().to(t.x.device), torch.arange(count + 1) * size, 0)[0].view(count, size).mean(1)
            )
        return losses.to(t.rows), grads

    return form


def by_chain_steps(net: Net) -> Form:
    """Their step of size 1: what the rows lose is the gradient."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        head, (count, size) = _head(net, t), t.x.shape[:2]
        rows, order = t.rows.clone(), torch.arange(count * size).view(count, 1, size).to(t.x.device)
        batches = (
            order,
            torch.full((count,), size),
            torch.ones(count, dtype=torch.int64),
            size,
            False,
            t.seeds[:, None] if t.train else None,
        )
        losses = chain_sgd_(rows, *head, *batches, 1.0, None, None, 0.0, None, None, 0.0, 0.0, float("inf"), None)
        return losses.to(rows), t.rows - rows

    return form


def _head(net: Net, t: Trial) -> tuple[Any, ...]:
    """The first arguments of the chain's ops."""
    chain = compiled(net, tuple(t.x.shape[2:]))
    return (*chain.head, t.x.reshape(-1, *t.x.shape[2:]), t.y.reshape(-1), None)
