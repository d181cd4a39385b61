"""The criteria that go by a name: mean losses of a batch."""

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
    """Mean cross entropy of `scores` [B, C] or [B, C, T] with labels `y` [B] or [B, T],
    or probabilities.

    Steps of the label `IGNORED` are left out, and a sample's loss is the mean over its
    others, so that a batch's is the mean over its samples however long they are.
    """
    if y.dim() < 2 or y.is_floating_point():
        return F.cross_entropy(scores, y)
    flat = scores.movedim(1, -1).flatten(0, -2)
    steps = F.cross_entropy(
        flat, y.flatten(), reduction="none", ignore_index=IGNORED_LABEL
    )
    return mean_over_steps(steps.view(y.shape), y).mean()


def mean_over_steps(values: Tensor, y: Tensor) -> Tensor:
    """The mean of each sample's `values` [B, ...] over the labels of that shape that
    count: [B]."""
    counts = (y != IGNORED_LABEL).flatten(1)
    return (values.flatten(1) * counts).sum(1) / counts.sum(1).clamp(min=1)


def hinge(scores: Tensor, y: Tensor) -> Tensor:
    """Mean hinge loss of `scores` [B] or [B, 1] with labels `y` in {0, 1} or {-1,
    1}."""
    sign = torch.where(y > 0, 1.0, -1.0).to(scores.dtype)
    # not clamp, whose slope on the very edge depends on torch's release
    return (1 - sign * scores.reshape(y.shape)).relu().mean()


def squared(scores: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of `scores` against `y`, element by element: [B], [B, 1], or
    [B, K] for K targets."""
    return F.mse_loss(scores.reshape(y.shape), y.to(scores.dtype))


def binary_cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Mean logistic loss of `scores` (logits) against `y` in [0, 1], element by
    element: [B], [B, 1], or [B, K] for K labels at once."""
    return F.binary_cross_entropy_with_logits(
        scores.reshape(y.shape), y.to(scores.dtype)
    )


def half_squared(scores: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error: Motley's loss and metric for School."""
    return 0.5 * squared(scores, y)


REGRESSION_LOSSES = (squared, half_squared)  # integers are numbers to these, not labels
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

# torch's, as it makes them by default
TORCH_EQUIVALENTS = {
    **dict.fromkeys((nn.CrossEntropyLoss, F.cross_entropy), cross_entropy),
    **dict.fromkeys((nn.MSELoss, F.mse_loss), squared),
}
# of a divergence "batchmean" is the mean over the samples, and "mean" that over all
# numbers
MEAN_REDUCTIONS = ("mean", "batchmean")
LOSS_TEXT = f"one of {', '.join(LOSSES)}, a function of (scores, y) or an nn.Module"
Loss = Annotated[str | LossFunction, at.doc(LOSS_TEXT)]


def default_loss(y: Tensor) -> str:
    """The loss for targets that nobody named one for: by their dtype."""
    return "squared" if y.is_floating_point() else "cross_entropy"


def resolve_loss(loss: Loss, name: str = "loss") -> LossFunction:
    """A function of (scores, y) [B, ...] -> the batch's mean loss, from a name of
    `LOSSES`, a function or an `nn.Module` such as `nn.CrossEntropyLoss(weight=w)`.
    ValueError or TypeError in one sentence that begins with `name`."""
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    if isinstance(loss, type):
        raise TypeError(
            f"{name}: expected a loss, got the class {loss.__name__}; write "
            f"{loss.__name__}()."
        )
    if not callable(loss):
        raise TypeError(f"{name}: expected {LOSS_TEXT}, got {loss!r}.")
    if (
        isinstance(loss, partial)
        and loss.keywords.get("reduction", "mean") not in MEAN_REDUCTIONS
    ):
        raise ValueError(
            f"{name}: expected the mean over a batch, got a function with "
            f"reduction={loss.keywords['reduction']!r}."
        )
    if not isinstance(loss, nn.Module):
        # [B, 1] against [B] would be spread to [B, B]; a batch's mean over steps is no
        # mean over samples
        return TORCH_EQUIVALENTS.get(loss, loss)
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
    default = ours and {**vars(type(loss)()), "training": loss.training}
    return ours if ours and default == vars(loss) else loss


def loss_name(criterion: LossFunction) -> str:
    """What a loss is called in records."""
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def ignored_label(loss: Any) -> int:
    """The label that a loss leaves out: torch's `ignore_index` where it has one, else
    `IGNORED`."""
    if isinstance(loss, partial):
        label: Any = loss.keywords.get("ignore_index")
    else:
        label = getattr(loss, "ignore_index", None)
    return label if isinstance(label, int) else IGNORED_LABEL


def classes_last(scores: Tensor, y: Tensor) -> Tensor:
    """Scores [B, C, T] of labels [B, T] with the classes last; where there is one score
    a label, as the labels are."""
    if scores.numel() == y.numel():
        return scores.reshape(y.shape)
    return scores.movedim(1, -1) if scores.dim() > y.dim() else scores


def fraction_correct(scores: Tensor, y: Tensor) -> Tensor:
    """Which share of its labels [B, ...] each sample's `scores` [B, C, ...] get right,
    of those that count: [B] float64, NaN where none counts."""
    hits, labels = (
        v.view(len(y), -1) for v in (is_correct(classes_last(scores, y), y).double(), y)
    )
    return mean_over_steps(hits, labels).masked_fill(
        (labels == IGNORED_LABEL).all(1), torch.nan
    )


def without_masked(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The scores [n, C] and labels [n] of the samples or steps that count, of scores
    [B, C, ...] and labels [B, ...]; where all count, in their shapes, the classes last.
    """
    if y.is_floating_point():
        return scores, y
    counts = y != IGNORED_LABEL
    if bool(counts.all()):
        return (scores if y.dim() < 2 else classes_last(scores, y)), y
    return classes_last(scores, y)[counts], y[counts]
