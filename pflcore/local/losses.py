"""The criteria that go by a name: mean losses of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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


CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "squared": squared,
    "half_squared": half_squared,
    "hinge": hinge,
    "binary_cross_entropy": binary_cross_entropy,
}
