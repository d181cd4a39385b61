"""Do model, data and criterion fit together? One forward and backward pass of one batch, before anything is trained or written.

Every refusal is one sentence in the user's words: what was given, what was expected, what to do.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from pflcore.data.federation import Federation
from pflcore.data.fields import IGNORED
from pflcore.nn.mode import forward_mode
from pflcore.train import memory
from pflcore.train.losses import CRITERIA, loss_name, spreads
from pflcore.train.net import Net
from pflcore.train.proof import samples
from pflcore.train.random import OwnDraws
from pflcore.train.training import Training

BATCH = 8


def check_run(net: Net, data: Federation, training: Training) -> None:
    """Refuses what cannot be trained; nothing is changed, torch's generators included."""
    check_modes()
    check_dtypes(net, data)
    x, y = samples(data, max(2, min(training.batch_size, BATCH)))
    for train in (True, False):
        before = states()
        with OwnDraws(0) as own:
            loss = passed(net, data, x, y, train)
            drawn = ["torch"] if own.used else [k for k, v in states().items() if v != before[k]]
            if not own.used and all(torch.equal(loss, passed(net, data, x, y, train)) for _ in drawn * 3):
                drawn = []  # by another thread: a model that draws gives another loss each time
        if drawn:
            raise ValueError(
                f"model: its forward pass draws from {drawn[0]}'s global generator, which threads share, so results would not repeat; use "
                "pflcore.nn.Dropout, which draws from the client's own."
            )
    if not loss.requires_grad:
        raise ValueError("model: the loss depends on no trainable parameter; compute it from the scores, without detach() or no_grad().")
    check_single(net, data, training)


def check_modes() -> None:
    """Refuses what would change every tensor that is made from here on."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise ValueError(
            f"torch: the default device is {device}; call torch.set_default_device('cpu') and pass device='{device}' to the run."
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(f"torch: training needs gradients, and torch.{mode}() is on; set up and run the simulation outside of it.")
    if any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")):
        raise ValueError("torch: autocast is on, which mixes dtypes inside a model; run outside of it, or convert the model and the data.")


def check_dtypes(net: Net, data: Federation) -> None:
    if data.x.is_inference() or data.y.is_inference() or net.w0.is_inference():
        raise ValueError("data, model: made inside torch.inference_mode(), whose tensors cannot be trained with; make them outside of it.")
    if net.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"model: its parameters are {net.dtype}, in which small steps are lost; train it in float32, by model.float().")
    for what, t in (("x", data.x), ("y", data.y)):
        if t.is_floating_point() and t.dtype != net.dtype:
            raise TypeError(
                f"data: {what} is {t.dtype} and the model's parameters are {net.dtype}; give both one dtype, for example by "
                f"model.to({t.dtype}) or Federation.from_arrays(..., dtype={net.dtype})."
            )


def states() -> dict[str, Any]:
    """The states of the global generators that are not torch's."""
    numpy = np.random.get_state(legacy=False)["state"]
    return {"Python": random.getstate(), "NumPy": (numpy["key"].tobytes(), numpy["pos"])}


def passed(net: Net, data: Federation, x: Tensor, y: Tensor, train: bool) -> Tensor:
    """The loss of one batch by the module itself, its backward pass tried and its head found. Every failure in one sentence."""
    module = copy.deepcopy(net.module).train(train)
    inside: list[tuple[str, nn.Module, Any]] = []  # the layer that is working
    called: list[str] = []  # layers in the order of their calls

    def enter(m: nn.Module, given: Any, name: str) -> None:
        inside[:] = [(name, m, given[0] if given else None)]
        called.append(name)

    hooks = [
        m.register_forward_pre_hook(partial(enter, name=name))
        for name, m in module.named_modules()
        if not m._modules or isinstance(m, nn.Linear)
    ]
    with forward_mode(train, None, torch.zeros((), dtype=torch.int64, device=x.device)), torch.enable_grad():
        try:
            scores = module(x)
        except Exception as e:
            if memory.ran_out(e):
                raise
            raise ValueError(unfit(inside, data, x, e)) from e
        finally:
            for hook in hooks:
                hook.remove()
        inside.clear()  # holds the module, whose hooks held it
        check_scores(net, data, scores, y)
        try:
            loss = net.criterion(scores, y)
        except Exception as e:
            remedy = "; take loss='binary_cross_entropy'" if "BCE" in type(net.criterion).__name__ else ""
            raise ValueError(
                f"criterion: it fails on scores of shape {list(scores.shape)} and targets of shape {list(y.shape)} ({y.dtype}): {first(e)}"
                f"{remedy}."
            ) from e
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"criterion: expected one number for a batch, got {got}; take the mean over its samples.")
    if train and loss.requires_grad:
        try:
            given = dict(module.named_parameters())
            grads = torch.autograd.grad(loss.sum(), [given[n] for n in net.names], allow_unused=True)
        except Exception as e:
            if memory.ran_out(e):
                raise
            raise ValueError(f"model: its backward pass fails: {first(e)}.") from e
        if any(g is not None and g.is_sparse for g in grads):
            raise ValueError("model: its gradients are sparse, and a row's is not; set sparse=False in its embeddings.")
        net.see([n for n, g in zip(net.names, grads, strict=True) if g is not None], called)
    return loss.detach().requires_grad_(loss.requires_grad)


def unfit(inside: list[tuple[str, nn.Module, Any]], data: Federation, x: Tensor, e: Exception) -> str:
    """Why the forward pass failed."""
    if not inside or not isinstance(inside[-1][2], Tensor):
        return f"model: its forward pass fails on samples of shape {list(data.shape)} ({x.dtype}): {first(e)}."
    name, m, given = inside[-1]
    layer = f"layer {name!r} ({type(m).__name__})" if name else type(m).__name__
    if isinstance(m, nn.Embedding):
        if given.is_floating_point():
            return f"data: {layer} takes integers (tokens), and its input is {given.dtype}; give x as int64."
        return f"data: x holds tokens from {int(data.x.min())} to {int(data.x.max())}, and {layer} knows 0 to {m.num_embeddings - 1}; make it larger."  # noqa: E501
    if not given.is_floating_point():
        return f"data: x holds integers ({x.dtype}), and {layer} takes numbers; convert x to float, or begin the model with nn.Embedding."
    wants = next((f"{k}={getattr(m, k)}" for k in ("in_features", "in_channels", "num_features", "input_size") if hasattr(m, k)), None)
    if wants is None:
        return f"model: {layer} fails on an input of shape {list(given.shape)}, from samples of shape {list(data.shape)}: {first(e)}."
    return (
        f"model: {layer} has {wants}, and got an input of shape {list(given.shape)}, from samples of shape {list(data.shape)}; make the "
        "model for samples of that shape."
    )


def check_scores(net: Net, data: Federation, scores: Any, y: Tensor) -> None:
    """The outputs against the labels."""
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"model: expected its forward pass to give one tensor of scores, got a {type(scores).__name__}; return the scores alone."
        )
    if scores.shape[:1] != y.shape[:1]:
        raise ValueError(
            f"model: expected one row of scores for each of {len(y)} samples, got shape {list(scores.shape)}; keep the batch as the first axis."  # noqa: E501
        )
    net.one_score = scores.numel() == y.numel()
    name = {f: name for name, f in CRITERIA.items()}.get(net.criterion)
    outputs = scores.shape[1] if scores.dim() > 1 else 1
    if name == "cross_entropy":
        _check_classes(data, scores, y, outputs)
    elif name is not None:
        if scores[0].numel() != y[0].numel():
            raise ValueError(
                f"criterion: {name!r} compares outputs and targets one by one, and the model gives {scores[0].numel()} for {y[0].numel()} "
                "target(s) a sample; change the model's outputs, or take loss='cross_entropy' for classes."
            )
        low, high = (float(v) for v in torch.aminmax(data.y))
        if data.classes is not None and low == IGNORED and not data.y.is_floating_point():
            raise ValueError(
                f"criterion: {name!r} would count the steps that the mask leaves out; take 'cross_entropy', or a function that leaves out "
                f"labels of {IGNORED}."
            )
        if name == "hinge" and not (low >= -1 and high <= 1):
            raise ValueError(f"criterion: 'hinge' takes two classes, and these labels go from {low:g} to {high:g}; take 'cross_entropy'.")
        if name == "binary_cross_entropy" and not (low >= 0 and high <= 1):
            raise ValueError(f"criterion: 'binary_cross_entropy' takes targets from 0 to 1, and these go from {low:g} to {high:g}.")
    elif scores.shape != y.shape and net.one_score and spreads(net.criterion, scores, y):
        raise ValueError(
            f"criterion: {loss_name(net.criterion)} would spread scores {list(scores.shape)} over targets {list(y.shape)}; give "
            "the targets the scores' shape, or return scores of theirs."
        )


def _check_classes(data: Federation, scores: Tensor, y: Tensor, outputs: int) -> None:
    if y.is_floating_point():
        if y.shape != scores.shape:
            raise ValueError(
                f"criterion: 'cross_entropy' takes int64 labels, or probabilities of the scores' shape {list(scores.shape)}, and the targets "  # noqa: E501
                f"are {y.dtype} of shape {list(y.shape)}; give labels as integers, or take loss='squared' for numbers."
            )
        return
    if scores.dim() != y.dim() + 1 or scores.shape[2:] != y.shape[1:]:
        raise ValueError(
            f"model: 'cross_entropy' takes scores [B, C] for labels [B], or [B, C, ...] for [B, ...], and got scores {list(scores.shape)} "
            f"for labels {list(y.shape)}; make labels of one column [n], reshape or transpose what the model returns, or make the targets "
            "floating point."
        )
    labels = data.y if data.relabel is None else data.relabel
    labels = labels[labels != IGNORED] if y.dim() > 1 else labels
    if not labels.numel():
        raise ValueError("data: the mask leaves out every step of every sample; nothing is left to be learnt.")
    high = int(labels.max())
    if int(labels.min()) < 0 or high >= outputs:
        if outputs > 1 and int(labels.min()) > 0 and high == outputs:
            raise ValueError(f"data: the labels go from {int(labels.min())} to {high}; count them from 0, y - 1, for {outputs} outputs.")
        remedy = "or one and loss='binary_cross_entropy' or 'hinge'" if outputs == 1 else "one for each class"
        raise ValueError(
            f"model: it has {outputs} output(s), and the labels go from {int(labels.min())} to {high}; give it {high + 1}, {remedy}."
        )


def check_single(net: Net, data: Federation, training: Training) -> None:
    """Batch norm cannot train on one sample: is there a client whose batch has no second one, and may it join the one before?"""
    size, batch = data.size("train"), training.batch_size
    lone, last = (size == 1) | (batch == 1), (size % batch == 1) & (not training.drop_last)
    alone = lone | last
    if not bool(alone.any()):
        return
    x, y = samples(data, 1)
    try:
        passed(net, data, x, y, True)
    except ValueError as e:
        net.joins = training.join_last
        if net.joins and not bool(lone.any()):
            return
        i = int((lone if net.joins else alone).nonzero()[0])
        raise ValueError(
            f"data: client {i} ({int(size[i])} samples, batch_size {batch}) has a batch of one sample, on which this model cannot train, as "  # noqa: E501
            "batch norm cannot; take another batch_size, or leave clients of one sample out."
        ) from e


def first(e: BaseException) -> str:
    """The first line of what a library says."""
    return f"{type(e).__name__}, {str(e).splitlines()[0]}".rstrip(".") if str(e) else type(e).__name__
