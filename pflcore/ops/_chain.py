"""Training, gradients and evaluation of models that are a chain of layers.

One call computes many clients. A model is a *program*, a table of its layers
(see `pflcore.ops._chain_program`). The kernels keep a client's row, activations and
gradients in the caches of one core. Results depend neither on the threads nor on which
other clients take part.

- `chain_train_` trains, by SGD or AdamW, and `chain_eval` evaluates. Both are kernels
  of the CPU alone.
- `chain_grad` computes gradients. Its reference is `grad_reference`, which is also what
  runs on a GPU.

How a kind of layer is added, and what a chain cannot hold: csrc/README.md.

Symbols: S clients; Q columns of a row; n samples of a pool; w rows of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._chain_reference import grad_reference
from ._library import define, kernels, mark_written

# The arguments that every op has after `w`, in the order of `grad_reference`.
_HEAD = (
    "Tensor program, str loss, int c, int h, int w_, Tensor x, Tensor y, Tensor? "
    "relabel, Tensor order"
)


def _fake_sgd(w: Tensor, *args: Any) -> Tensor:
    """The shape and dtype of losses [S]."""
    return w.new_empty(len(w), dtype=torch.float64)


def _fake_grad(w: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of gradients [S, Q], losses [S] and statistics [S, b]."""
    # The dispatcher leaves out arguments that have their default.
    statistics = args[11] if len(args) > 11 else None
    columns = 0 if statistics is None else statistics.shape[1]
    return w.new_empty(w.shape), _fake_sgd(w), w.new_empty(len(w), columns)


def _fake_eval(w: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of losses [n], right answers [n] and scores."""
    order = args[8]
    classes = args[10]
    num_scores = len(order) if classes else 0
    scores = w.new_empty(num_scores, classes)
    return _fake_sgd(order), order.new_empty(len(order), dtype=torch.bool), scores


_chain_train_: Callable[..., Tensor] = define(
    f"chain_train_(Tensor(a!) w, {_HEAD}, Tensor size, Tensor steps, int batch_size, "
    "bool drop_last, Tensor? seeds, float lr, Tensor? shift, Tensor? mask, float mu, "
    "Tensor? mu_rows, Tensor? anchor, float momentum, float weight_decay, float clip, "
    "Tensor? adamw, Tensor(b!)? grad_sum, Tensor(c!)? statistics=None, "
    "bool merge_single=False) -> Tensor",
    None,
    _fake_sgd,
)


def has_kernels(device: torch.device) -> bool:
    """True where `chain_train_` and `chain_eval` run, which are kernels alone."""
    return device.type == "cpu" and kernels is not None


def chain_train_(
    w: Tensor,  # [S, Q], changed
    *args: Any,
    statistics: Tensor | None = None,  # [S, b], changed
    merge_single: bool = False,
) -> Tensor:  # [S] float64
    """Takes all steps of local training on the rows `w`, in place.

    Autograd learns that `w`, the sums of gradients and the statistics were changed.

    Args:
        args: The program, loss, c, h, width, x, y and relabel of `grad_reference`; then

            - places of the samples in the pool [S, passes, longest]
            - samples and steps of each client [S], on the CPU
            - the size of a batch, and True where a short one is left out
            - seeds of dropout [S, passes], to which the number of the step within the
              pass is added; None without dropout
            - the terms of `sgd_step_`, in the order of the op; AdamW takes its decay
              from the weights, past its means
            - the largest norm of a minibatch's gradient, or infinity
            - for steps of AdamW the rates [3] float64: the betas of the mean and of
              the mean square, and eps; None for steps of SGD
            - the tensor [S, Q] to which gradients are added, or None
        statistics: See `grad_reference`.
        merge_single: True where a last batch of one sample joins the one before it.

    Returns:
        The sum of each client's mean losses of its minibatches.
    """
    loss = _chain_train_(w, *args, statistics, merge_single)
    mark_written(w, args[-1], statistics)
    return loss


chain_grad = define(
    f"chain_grad(Tensor w, {_HEAD}, Tensor size, Tensor? seeds, Tensor? statistics=None"
    ", bool train=False) -> (Tensor, Tensor, Tensor)",
    grad_reference,
    _fake_grad,
)
# It returns losses [n] float64, right answers [n] and scores [n, classes] of the rows
# `w` [S, Q]. One row may be expanded to all clients. Behind the arguments of every op
# stand the places of the samples in the pool [n], client after client; the first of
# each client's places [S + 1], on the CPU; the number of classes, or 0 for no scores;
# the statistics [S, b] of `grad_reference`, which may be expanded, too.
chain_eval: Callable[..., tuple[Tensor, Tensor, Tensor]] = define(
    f"chain_eval(Tensor w, {_HEAD}, Tensor begin, int classes, Tensor? statistics=None)"
    " -> (Tensor, Tensor, Tensor)",
    None,
    _fake_eval,
)
