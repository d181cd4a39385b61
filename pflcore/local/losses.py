"""The criteria that go by a name: mean losses of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def hinge(scores: Tensor, y: Tensor) -> Tensor:
    """Mean hinge loss of `scores` [B] or [B, 1] with labels `y` in {0, 1} or {-1, 1}."""
    sign = torch.where(y > 0, 1.0, -1.0).to(scores.dtype)
    return (1 - sign * scores.reshape(y.shape)).clamp(min=0).mean()


def squared(scores: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of `scores` against `y`, element by element: [B], [B, 1], or [B, K] for K targets."""
    return F.mse_loss(scores.reshape(y.shape), y.to(scores.dtype))


def binary_cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Mean logistic loss of `scores` (logits) against `y` in [0, 1], element by element: [B], [B, 1], or [B, K] for K labels at once."""
    return F.binary_cross_entropy_with_logits(scores.reshape(y.shape), y.to(scores.dtype))


def half_squared(scores: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error: Motley's loss and metric for School."""
    return 0.5 * squared(scores, y)


REGRESSION = (squared, half_squared)  # integers are numbers to these, not labels


CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "squared": squared,
    "half_squared": half_squared,
    "hinge": hinge,
    "binary_cross_entropy": binary_cross_entropy,
}

PLAIN = {nn.CrossEntropyLoss: "cross_entropy", nn.MSELoss: "squared"}  # as torch makes them by default, they are ours by name
Loss = str | Callable[[Tensor, Tensor], Tensor]


def default_loss(y: Tensor) -> str:
    """The criterion for targets that nobody named one for: by their dtype."""
    return "squared" if y.is_floating_point() else "cross_entropy"


def loss_of(loss: Loss, name: str = "loss") -> Callable[[Tensor, Tensor], Tensor]:
    """A function of (scores, y) [B, ...] -> the batch's mean loss, from a name of `CRITERIA`, a function or an `nn.Module` such as
    `nn.CrossEntropyLoss(weight=w)`. ValueError or TypeError in one sentence that begins with `name`."""
    if isinstance(loss, str):
        if loss not in CRITERIA:
            raise ValueError(f"{name}: expected one of {', '.join(CRITERIA)}, a function of (scores, y) or an nn.Module, got {loss!r}.")
        return CRITERIA[loss]
    if isinstance(loss, type):
        raise TypeError(f"{name}: expected a loss, got the class {loss.__name__}; write {loss.__name__}().")
    if not callable(loss):
        raise TypeError(f"{name}: expected one of {', '.join(CRITERIA)}, a function of (scores, y) or an nn.Module, got {loss!r}.")
    if not isinstance(loss, nn.Module):
        return squared if loss is F.mse_loss else loss  # [B, 1] against [B] would be spread to [B, B]
    if any(p.requires_grad for p in loss.parameters()):
        raise ValueError(f"{name}: {type(loss).__name__} has parameters, which nothing would train; make them a part of the model.")
    if getattr(loss, "reduction", "mean") != "mean":
        raise ValueError(f"{name}: expected the mean over a batch, got {type(loss).__name__}(reduction={loss.reduction!r}).")
    plain = PLAIN.get(type(loss))
    return CRITERIA[plain] if plain and _same_options(loss) else loss


def _same_options(loss: nn.Module) -> bool:
    """Whether a loss module is as its class makes it without arguments."""
    default = type(loss)()
    names = getattr(loss, "__constants__", [])
    return all(getattr(loss, n) == getattr(default, n) for n in names) and not list(loss.buffers()) and not loss._forward_hooks


def loss_name(criterion: Callable[[Tensor, Tensor], Tensor]) -> str:
    """What a criterion is called in records."""
    return next((k for k, v in CRITERIA.items() if v is criterion), getattr(criterion, "__name__", type(criterion).__name__))
