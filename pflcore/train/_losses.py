"""Losses by name: functions (scores, y) -> mean over a batch.

Symbols: B samples of a batch; C classes; T steps of a sample (a sequence); K targets of
a sample; n samples or steps; scores are the outputs of the model, y labels or numbers.
A sample or step whose label is `IGNORED_LABEL` does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import annotated_types as at
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflcore.data._inputs import IGNORED_LABEL
from pflcore.metrics import is_correct

LossFunction = Callable[[Tensor, Tensor], Tensor]  # scores, y -> the batch's mean loss


def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of scores and labels.

    Scores are [B, C] or [B, C, T], and labels `y` are [B] or [B, T]. Instead of labels,
    `y` may be probabilities in the shape of the scores. A sample's loss is the mean
    over its steps that count, and the batch's loss is the mean over its samples,
    whatever their lengths.
    """
    if y.dim() < 2 or y.is_floating_point():
        return F.cross_entropy(scores, y)
    flat = scores.movedim(1, -1).flatten(0, -2)
    steps = F.cross_entropy(
        flat, y.flatten(), reduction="none", ignore_index=IGNORED_LABEL
    )
    return mean_over_steps(steps.view(y.shape), y).mean()


def mean_over_steps(values: Tensor, y: Tensor) -> Tensor:
    """Each sample's mean [B] of values [B, ...] at labels that count."""
    counts = (y != IGNORED_LABEL).flatten(1)
    return (values.flatten(1) * counts).sum(1) / counts.sum(1).clamp(min=1)


def hinge(scores: Tensor, y: Tensor) -> Tensor:
    """Mean hinge loss of scores [B] or [B, 1] and labels [B].

    The labels of the two classes are 0 and 1, or -1 and 1.
    """
    sign = torch.where(y > 0, 1.0, -1.0).to(scores.dtype)
    # At 0 the slope of `clamp` depends on torch's release, and that of `relu` is 0.
    return (1 - sign * scores.reshape(y.shape)).relu().mean()


def squared(scores: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of scores and numbers, element by element.

    Both are [B] or [B, 1], or [B, K] for K targets.
    """
    return F.mse_loss(scores.reshape(y.shape), y.to(scores.dtype))


def binary_cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Mean logistic loss of logits and targets, element by element.

    Targets are numbers from 0 to 1. Both are [B] or [B, 1], or [B, K] for K labels at
    once.
    """
    logits = scores.reshape(y.shape)
    return F.binary_cross_entropy_with_logits(logits, y.to(scores.dtype))


def half_squared(scores: Tensor, y: Tensor) -> Tensor:
    """Half of the mean squared error, see `squared`.

    It is the loss and the metric of Motley for School.
    """
    return 0.5 * squared(scores, y)


REGRESSION_LOSSES = (squared, half_squared)  # for these an integer is no label
LOGIT_LOSSES = (
    hinge,
    binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
    nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss,
)


NAMED_LOSSES = (cross_entropy, squared, half_squared, hinge, binary_cross_entropy)
LOSSES = {f.__name__: f for f in NAMED_LOSSES}

# torch's losses, and ours that compute the same as those with default options.
TORCH_EQUIVALENTS = {
    **dict.fromkeys((nn.CrossEntropyLoss, F.cross_entropy), cross_entropy),
    **dict.fromkeys((nn.MSELoss, F.mse_loss), squared),
}
# For a divergence, "batchmean" is the mean over samples and "mean" that over all
# numbers.
MEAN_REDUCTIONS = ("mean", "batchmean")
LOSS_TEXT = f"one of {', '.join(LOSSES)}, a function of (scores, y) or an nn.Module"
Loss = Annotated[str | LossFunction, at.doc(LOSS_TEXT)]


def default_loss(y: Tensor) -> str:
    """Name of the default loss for targets of this dtype."""
    return "squared" if y.is_floating_point() else "cross_entropy"


def resolve_loss(loss: Loss, name: str = "loss") -> LossFunction:
    """The function (scores, y) -> mean loss for a user's loss.

    Raises TypeError where `loss` is nothing of the kind, and ValueError where it is no
    mean or has parameters.

    Args:
        loss: A name of `LOSSES`, a function, or an `nn.Module` such as
            `nn.CrossEntropyLoss(weight=w)`.
        name: The argument that an error names.
    """
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    if isinstance(loss, type):
        raise TypeError(
            f"{name}: expected a loss, got the class {loss.__name__}; write "
            f"{loss.__name__}()."
        )
    if not callable(loss):
        raise TypeError(f"{name}: expected {LOSS_TEXT}, got {loss!r}.")
    if isinstance(loss, partial):
        reduction = loss.keywords.get("reduction", "mean")
        if reduction not in MEAN_REDUCTIONS:
            raise ValueError(
                f"{name}: expected the mean over a batch, got a function with "
                f"reduction={reduction!r}."
            )
    if isinstance(loss, nn.Module):
        return _resolve_module(loss, name)
    # Ours are safer than torch's: torch's would broadcast [B, 1] and [B] to [B, B], and
    # their mean over the steps of a batch is not the mean over samples.
    return TORCH_EQUIVALENTS.get(loss, loss)


def _resolve_module(loss: nn.Module, name: str) -> LossFunction:
    """A module's loss; ours where the module is torch's with default options."""
    if any(p.requires_grad for p in loss.parameters()):
        raise ValueError(
            f"{name}: {type(loss).__name__} has parameters, which nothing would train; "
            "make them a part of the model."
        )
    if getattr(loss, "reduction", "mean") not in MEAN_REDUCTIONS:
        raise ValueError(
            f"{name}: expected the mean over a batch, got "
            f"{type(loss).__name__}(reduction={loss.reduction!r})."
        )
    ours = TORCH_EQUIVALENTS.get(type(loss))
    if ours is None:
        return loss
    # The mode of a loss says nothing about its options.
    default_options = {**vars(type(loss)()), "training": loss.training}
    return ours if default_options == vars(loss) else loss


def loss_name(loss_fn: LossFunction) -> str:
    """The name of a loss in records."""
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))


def ignored_label(loss: Any) -> int | None:
    """The label that a loss leaves out; None where it is not known to leave out one.

    It is the `ignore_index` of a loss that has one, and `IGNORED_LABEL` for cross
    entropy by name or as a function. What a user's own function does is not known.
    """
    if isinstance(loss, partial):
        label: Any = loss.keywords.get("ignore_index")
        loss = loss.func
    else:
        label = getattr(loss, "ignore_index", None)
    if isinstance(label, int):
        return label
    leaves_out = loss in ("cross_entropy", cross_entropy, F.cross_entropy, F.nll_loss)
    return IGNORED_LABEL if leaves_out else None


def classes_last(scores: Tensor, y: Tensor) -> Tensor:
    """Scores [B, C, T] with the classes last, [B, T, C].

    The labels are [B, T]. Where there is one score for each label, the scores get the
    shape of the labels.
    """
    if scores.numel() == y.numel():
        return scores.reshape(y.shape)
    return scores.movedim(1, -1) if scores.dim() > y.dim() else scores


def fraction_correct(scores: Tensor, y: Tensor) -> Tensor:
    """Fraction [B] float64 of each sample's labels that its scores get right.

    Scores are [B, C, ...] and labels [B, ...]. Only steps that have a label count. The
    fraction is NaN where no step has one.
    """
    labels = y.view(len(y), -1)
    hits = is_correct(classes_last(scores, y), y).double().view(len(y), -1)
    has_no_label = (labels == IGNORED_LABEL).all(1)
    return mean_over_steps(hits, labels).masked_fill(has_no_label, torch.nan)


def without_masked(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [n, C] and labels [n] of samples or steps that count.

    Where all of them count, labels keep their shape [B, ...], and the scores have the
    classes last.
    """
    if y.is_floating_point():
        return scores, y
    counts = y != IGNORED_LABEL
    if not bool(counts.all()):
        return classes_last(scores, y)[counts], y[counts]
    if y.dim() < 2:
        return scores, y
    return classes_last(scores, y), y
