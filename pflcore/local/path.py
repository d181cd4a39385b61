"""Which path trains my model? The one place that answers: by model, data and device alone, so that results repeat on any machine.

Engines: "threads" trains one client after another on each of its threads, "vmap" takes the same step for many clients at once.
Forms, from the fastest to the most general:
"linear kernel" one C++ call trains a linear model · "written out" products of many clients' layers · "vmap" autograd under vmap ·
"module with kernels" the module with its pooling and small convolutions exchanged · "module" the module as it is.
A form that is not the model (see `proof`), or that cannot be run, gives way to the next one; what was passed over is said.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pflcore import memory
from pflcore.data.federation import Federation
from pflcore.local.dense import Dense
from pflcore.local.group import gradients
from pflcore.local.net import Net
from pflcore.local.proof import Form, Trial, difference, trials
from pflcore.local.swap import swappable
from pflcore.ops.linear import linear_sgd_

ENGINES = ("auto", "threads", "vmap")


class Path(NamedTuple):
    """How a model is trained, and why so."""

    engine: str  # "threads" or "vmap"
    form: str
    why: str

    @property
    def written_out(self) -> bool:
        return self.form in ("linear kernel", "written out")


def choose_path(net: Net, data: Federation, engine: str = "auto") -> tuple[Net, Path]:
    """The net to train with (without exchanged layers where they are not the model) and its path. ValueError in one sentence where
    the engine that was asked for cannot train this model."""
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}.")
    judge = Judge(net, data)
    exchanged = swappable(net.module)
    wrong = judge.wrong(by_module)
    if wrong is not None and exchanged:
        said = f"the kernels in the place of this model's layers are not the model: {wrong}; its own layers train it"
        net, exchanged = without_kernels(net), False
        judge.net, judge.wide = net, without_kernels(judge.wide)
        judge.say(said)
        wrong = judge.wrong(by_module)
    if wrong is not None:
        raise ValueError(
            f"model: as a function of its parameters it is not what the module computes: {wrong}; its forward must use the parameters "
            "where they are registered, and nothing that another pass has changed."
        )
    alone = "module with kernels" if exchanged else "module"
    if engine == "threads":
        return net, judge.path("threads", alone, "asked for")
    if engine == "auto" and net.has_conv and net.w0.device.type == "cpu":
        return net, judge.path("threads", alone, "a model with convolutions, on a CPU")
    wrong = judge.wrong(under_vmap)
    if wrong is not None and engine == "vmap":
        raise ValueError(f"engine: 'vmap' cannot train this model: {wrong}; take 'auto' or 'threads'.")
    if wrong is not None:
        return net, judge.path("threads", alone, f"vmap cannot train this model: {wrong}")
    why = "asked for" if engine == "vmap" else "all clients take a step at once"
    dense = Dense.of(net)
    if dense is None:
        return net, judge.path("vmap", "vmap", why)
    kernel = dense.kernel(net, data) is not None
    for makes in ([by_kernel] if kernel else []) + [written_out, stepping]:
        wrong = judge.wrong(makes)
        if wrong is not None:
            judge.say(f"the written-out form of this model is not the model: {wrong}; the general one trains it")
            return net, judge.path("vmap", "vmap", why)
    return net, judge.path("vmap", "linear kernel" if kernel else "written out", why)


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
            found = difference(make(self.wide), self.given)
            if found is None and self.wide.dtype != self.net.dtype:
                make(self.net)(self.given[0].to(self.net.dtype))
            return found
        except Exception as e:
            if memory.ran_out(e):
                raise
            self.raised = True
            return f"{type(e).__name__}, {str(e).splitlines()[0] if str(e) else 'without a word'}".rstrip(".")

    def say(self, sentence: str) -> None:
        """For the record; a form that gives other numbers is also worth a warning."""
        self.reasons.append(sentence)
        if not self.raised:
            warnings.warn(f"pflcore: {sentence}.", UserWarning, stacklevel=4)

    def path(self, engine: str, form: str, why: str) -> Path:
        return Path(engine, form, "; ".join([why, *self.reasons]))


def without_kernels(net: Net) -> Net:
    other = copy.copy(net)
    other.kernels, other._threads = False, threading.local()
    return other


# the forms --------------------------------------------------------------------------------------------------------------------------


def by_module(net: Net) -> Form:
    """The net as a function of a row, one client at a time."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        found = []
        for i in range(len(t.rows)):
            s = slice(i, i + 1)
            found.append(gradients(net, None, False, t.train, t.rows[s], t.x[s], t.y[s], t.buffers[s], t.seeds[s], {})[:2])
        losses, grads = zip(*found, strict=True)
        return torch.cat(losses), torch.cat(grads)

    return form


def under_vmap(net: Net) -> Form:
    def form(t: Trial) -> tuple[Tensor, Tensor]:
        return gradients(net, None, True, t.train, t.rows, t.x, t.y, t.buffers, t.seeds, {})[:2]

    return form


def written_out(net: Net) -> Form:
    """The gradient as products of all clients' layers, and the loss as evaluation takes it."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        dense, grads = _dense(net), torch.empty_like(t.rows)
        losses = dense.gradient(t.rows, t.x, t.y, None, grads)
        weight = torch.full(t.x.shape[:2], 1 / t.x.shape[1], dtype=t.rows.dtype, device=t.rows.device)
        return losses if t.train else dense.loss(t.rows, t.x, t.y, weight), grads

    return form


def stepping(net: Net) -> Form:
    """The step of size 1 that never builds a gradient: what the rows lose is the gradient."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        rows = t.rows.clone()
        losses = _dense(net).descend(rows, t.x, t.y, None, 1.0)
        return losses, t.rows - rows

    return form


def by_kernel(net: Net) -> Form:
    """The same of the kernel that trains a linear model whole."""

    def form(t: Trial) -> tuple[Tensor, Tensor]:
        dense, (count, size) = _dense(net), t.x.shape[:2]
        assert dense.linear is not None
        inputs, bias = dense.linear
        rows, order = t.rows.clone(), torch.arange(count * size).view(count, 1, size)
        sizes, one = torch.full((count,), size), torch.ones(count, dtype=torch.int64)
        how = (dense.criterion, bias, 1.0, None, None, 0.0, None, None, 0.0, 0.0, None)
        losses = linear_sgd_(rows, t.x.reshape(-1, inputs), t.y.reshape(-1), None, order, sizes, one, size, False, *how)
        return losses.to(rows), t.rows - rows

    return form


def _dense(net: Net) -> Dense:
    dense = Dense.of(net)
    if dense is None:
        raise TypeError("the model has no written-out form in float64")
    return dense
