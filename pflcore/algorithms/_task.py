"""Checks that a model and its samples are of the kind that an algorithm is for.

They raise their errors before round 1. A server of its own has no samples: there the
checks of samples have no effect, and those of its clients find the error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore.algorithms._protocol import Algorithm
from pflcore.nn._context import forward_context
from pflcore.train import Net
from pflcore.train._context import TrainContext
from pflcore.train._losses import binary_cross_entropy, hinge, loss_name


def check_class_scores(net: Net, reason: str) -> None:
    """Raises ValueError unless the loss takes scores of several classes.

    Several labels of a sample, numbers, and probabilities as targets are refused.

    Args:
        net: The model.
        reason: Why the algorithm needs such scores, as a main clause.
    """
    scores_classes = net.scores_classes and not net.single_score
    if not scores_classes or net.loss_fn in (hinge, binary_cross_entropy):
        raise ValueError(
            f"loss: {reason}; expected a loss of several classes' scores, got "
            f"{loss_name(net.loss_fn)}."
        )
    target = net.target
    if target is not None and target.dtype.is_floating_point:
        raise ValueError(
            f"data: {reason}; expected int64 labels, got targets of {target.dtype}."
        )


def check_sample_labels(net: Net, needs: str) -> None:
    """Raises ValueError unless each sample has one label.

    Labels of steps, several labels of a sample, and numbers are refused.

    Args:
        net: The model.
        needs: What needs the labels, as a subject in the singular.
    """
    target = net.target
    if target is None:
        return
    if target.dtype.is_floating_point or target.shape:
        raise ValueError(
            f"data: {needs} needs one label for each sample, and the targets are "
            f"{target.dtype} of the shape {list(target.shape)}."
        )


def check_head(alg: Algorithm, context: TrainContext) -> None:
    """Raises ValueError where the algorithm needs a model that ends with its head.

    Two samples are scored by two models: a ReLU behind the head may not show at scores
    of one sign.

    Args:
        alg: The algorithm, whose `traits.head_reason` tells whether it needs it.
        context: The model and its data.
    """
    reason = alg.traits.head_reason
    if not reason:
        return
    net = context.net
    x = context.data.x[:2]
    columns = net.head_slice
    head_buffers = [
        name for name in net.buffer_names if name.startswith(f"{net.head_name}.")
    ]
    noise = torch.linspace(-0.1, 0.1, net.size, dtype=net.dtype, device=net.w0.device)
    point = net.w0 + noise
    negative_head = point.clone()
    negative_head[columns] *= -1
    try:
        is_last = _scores_are_of_head(net, point, x)
        is_last &= _scores_are_of_head(net, negative_head, x)
    except (RuntimeError, TypeError, IndexError, ValueError):
        # A model of another form may fail in any of these ways.
        is_last = False
    if head_buffers or not is_last:
        raise ValueError(
            f"model: {type(alg).__name__} {reason}, so a head must be the last that "
            "the model does, with weights of its own and no statistics, and "
            f"{net.head_name!r} is not so; name it with Net(..., head=...)."
        )


def _scores_are_of_head(net: Net, w: Tensor, x: Tensor) -> bool:
    """True where the scores of a model `w` [P] are those of its head."""
    with torch.no_grad(), forward_context(train=False, buffers=net.b0):
        by_head = net.head(w, net.features(w, x))
        return torch.allclose(by_head, net(w, x), rtol=1e-3, atol=1e-4)
