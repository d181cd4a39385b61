"""Checks before round 1, of what would be wrong without an error.

Model, data and loss may fit together for torch and still train something else than
their user means. Every other fault is torch's own error, whose traceback names the
layer.

Symbols: B samples of a batch; C classes; y labels or targets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.check import summarize
from pflcore.data._federation import Federation
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.metrics import has_one_score_each
from pflcore.train._losses import LOSSES, loss_name
from pflcore.train._net import Net

# Losses of targets -1 and 1.
SIGNED_LOSSES = (
    nn.SoftMarginLoss,
    F.soft_margin_loss,
    nn.HingeEmbeddingLoss,
    F.hinge_embedding_loss,
)
# The least and the largest target of a loss by name.
TARGET_RANGES = {"hinge": (-1, 1), "binary_cross_entropy": (0, 1)}


class MismatchError(ValueError, TypeError):
    """Model, data and loss do not fit together.

    The text is the whole sentence. The error is a TypeError too, since dtypes may be
    the reason.
    """


def check_autocast() -> None:
    """Raises MismatchError under autocast, which holds for one thread of many."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise MismatchError(
            "torch: autocast is on, and clients train in the model's own dtype; set up "
            "and run the simulation outside of it, and for mixed precision take "
            "Training(precision='bf16')."
        )


def check_has_training(data: Federation) -> None:
    """Raises MismatchError where no client has training samples."""
    if not len(data.lists("train").flat):
        raise MismatchError(
            "data: no client has training samples with a label that counts; nothing is "
            "left to be learnt."
        )


def check_dtypes(net: Net, data: Federation, precision: str | None) -> None:
    """Raises MismatchError for dtypes that would be another than they seem.

    A model in half precision would lose small steps. Autocast casts float32 alone.
    """
    if net.dtype not in (torch.float32, torch.float64):
        raise MismatchError(
            f"model: its parameters are {net.dtype}, in which small steps are lost; "
            "train it in float32, by model.float()."
        )
    for name, t in (("x", data.x), ("y", data.y)):
        if t.is_floating_point() and t.dtype != net.dtype:
            raise MismatchError(
                f"data: {name} is {t.dtype} and the model's parameters are "
                f"{net.dtype}; give both one dtype, for example by model.to({t.dtype}) "
                f"or Federation.from_clients(..., dtype={net.dtype})."
            )
    if precision is not None and net.dtype != torch.float32:
        raise MismatchError(
            f"precision: expected a model in float32 for {precision!r}, got "
            f"{net.dtype}; convert it with model.float(), and the data with "
            "Federation.from_clients(..., dtype=torch.float32)."
        )


def check_rows(scores: Any, count: int) -> None:
    """Raises MismatchError unless scores have a row for each of `count` samples."""
    if not isinstance(scores, Tensor) or scores.shape[:1] != (count,):
        raise MismatchError(
            f"model: expected a tensor with one row of scores for each of {count} "
            f"sample(s), alone or as `logits`, got {summarize(scores)}; keep the batch "
            "as the first axis, as squeeze(-1) and flatten(1) do."
        )


def check_targets(net: Net, data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError for targets that the loss or the accuracy would miscount.

    Those are labels outside of the outputs, targets outside of a loss's range, and axes
    in another order than those of the scores.
    """
    name = loss_name(net.loss_fn)
    if net.loss_fn not in LOSSES.values():
        _check_own_loss(net, data, scores, y)
    elif name != "cross_entropy":
        _check_numbers(name, data, scores, y)
    elif not y.is_floating_point():
        _check_classes(data, scores, y)


def _check_own_loss(net: Net, data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError for targets that a user's or torch's loss miscounts.

    A label 0 would add nothing to a loss of -1 and 1. A loss may leave out labels of
    steps that have no output, but the accuracy does not know that.
    """
    is_signed = net.loss_fn in SIGNED_LOSSES or type(net.loss_fn) in SIGNED_LOSSES
    if is_signed and not bool((data.y.abs() == 1).all()):
        raise MismatchError(
            f"loss: {loss_name(net.loss_fn)} takes targets of -1 and 1, and these are "
            "others; take loss='hinge' or 'binary_cross_entropy' for labels 0 and 1, "
            "or give the federation the targets as floats."
        )
    has_steps = y.dim() > 1 and scores.dim() == y.dim() + 1
    outputs = scores.shape[1] if has_steps else 0
    if outputs < 2 or y.is_floating_point() or not net.scores_classes:
        return
    labels = data.y[data.y != IGNORED_LABEL]
    void_labels = labels[(labels < 0) | (labels >= outputs)]
    if void_labels.numel():
        void = int(void_labels[0])
        raise MismatchError(
            f"data: there are labels {void}, and the model has {outputs} outputs; of "
            "labels that count in nothing take "
            f"nn.CrossEntropyLoss(ignore_index={void}) as the loss, or make them "
            f"{IGNORED_LABEL}."
        )


def _check_numbers(name: str, data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError for targets of a loss that compares them one by one.

    The scores get the targets' shape, and so are as many, with the axes in one order.
    """
    has_steps = scores.dim() > 2 and y.dim() > 2
    is_same_count = scores.numel() == y.numel()
    if not is_same_count or (has_steps and not has_one_score_each(scores, y)):
        raise MismatchError(
            f"loss: {name!r} compares outputs and targets one by one, and the model "
            f"gives scores {list(scores.shape)} for targets {list(y.shape)}; give one "
            "score for each target, with the axes in one order, or take "
            "'cross_entropy' for classes."
        )
    smallest, largest = torch.aminmax(data.y)
    are_labels = data.classes is not None and not data.y.is_floating_point()
    if are_labels and int(smallest) == IGNORED_LABEL:
        raise MismatchError(
            f"loss: {name!r} would count the steps that the mask leaves out; take "
            f"'cross_entropy', or a function that leaves out labels of {IGNORED_LABEL}."
        )
    low, high = TARGET_RANGES.get(name, (-torch.inf, torch.inf))
    if not (smallest >= low and largest <= high):
        raise MismatchError(
            f"loss: {name!r} takes targets from {low} to {high}, and these go from "
            f"{float(smallest):g} to {float(largest):g}; for several classes take "
            "'cross_entropy'."
        )


def _check_classes(data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError where labels do not fit the outputs, for cross entropy.

    The labels of the whole federation are compared. A batch may lack the wrong ones,
    and a GPU has no error that names them.
    """
    if scores.dim() < 2 or scores.shape[:1] + scores.shape[2:] != y.shape:
        raise MismatchError(
            "model: 'cross_entropy' takes scores [B, C] for labels [B], or [B, C, ...] "
            f"for [B, ...], and got scores {list(scores.shape)} for labels "
            f"{list(y.shape)}; make labels of one column [n], reshape or transpose "
            "what the model returns, or make the targets floating point."
        )
    labels = data.y if data.relabel is None else data.relabel
    outputs = scores.shape[1]
    labels = labels[labels != IGNORED_LABEL]
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= outputs:
        remedy = "one for each class, and count them from 0"
        if outputs == 1:
            remedy = "or one and loss='binary_cross_entropy' or 'hinge'"
        if data.classes is None:
            remedy = f"{remedy}, or take loss='squared', as classes is None"
        raise MismatchError(
            f"model: it has {outputs} output(s), and the labels go from {low} to "
            f"{high}; give it {high + 1}, {remedy}."
        )


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    lines = str(error).splitlines()
    return ", ".join([type(error).__name__, *lines[:1]]).rstrip(".")
