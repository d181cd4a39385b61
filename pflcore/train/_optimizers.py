"""Local steps: SGD and AdamW on the rows of a chunk's clients.

A chain's kernels take all steps by one call where they can. Otherwise Python takes one
step after another, with the gradients of the chunk.

Symbols: s clients of a chunk or of a step; Q columns of a row; w rows of weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.ops._chain import chain_train_, has_kernels
from pflcore.ops._sgd import check_sgd, clipped, corrected
from pflcore.train._chain import Chain
from pflcore.train._engines import Chunk, Tensors, slice_terms
from pflcore.train._training import DEFAULT_BETAS, DEFAULT_EPS, Training


def train_chunk(
    training: Training, lr: float, chunk: Chunk, rows: Tensors, terms: Tensors
) -> None:
    """Takes all steps of a chunk, with the run's optimizer.

    The rows "w" [s, Q] move in place. The gradients of the minibatches, clipped and
    with SGD's weight decay, are added to the rows "grad" [s, Q], if there are any.

    Args:
        lr: The step size.
        rows: The clients' rows.
        terms: The terms that are added to the gradients, from `Objective.terms`.
    """
    w = rows["w"]
    grad_sums = rows.get("grad")
    chain = chunk.engine.chain
    uses_sgd = training.local_optimizer == "sgd"
    _check_terms(training, lr, w, terms)
    # The kernels that take all steps read the samples from the pool, as they are there.
    takes_pool = not chunk.transforms
    if takes_pool and chain is not None and has_kernels(w.device):
        losses = train_by_kernels(chunk, chain, w, terms, training, lr, grad_sums)
        chunk.losses += losses
        return
    if _trains_by_leaves(chunk, w):
        chunk.leaves = chunk.net.leaves(w[0])
    has_options = training.momentum or training.weight_decay or training.clip_grad
    is_plain = uses_sgd and not terms and not has_options
    if chunk.leaves and is_plain and grad_sums is None:
        _take_plain_steps(chunk, lr)
        return
    _take_steps(training, lr, chunk, w, grad_sums, terms)


def _check_terms(training: Training, lr: float, w: Tensor, terms: Tensors) -> None:
    """Raises the error of `ops.sgd_step_` for wrong terms, before the first step."""
    check_sgd(
        w,
        grad=w,  # a gradient has the shape of its row
        lr=lr,
        shift=terms.get("shift"),
        mask=terms.get("mask"),
        mu=terms.get("mu", 0.0),
        anchor=terms.get("anchor"),
        momentum=0.0,
        buffer=None,
        weight_decay=training.weight_decay,
    )


def _trains_by_leaves(chunk: Chunk, w: Tensor) -> bool:
    """True where a client's gradient is taken by parameters.

    Otherwise it is taken by the row. Parameters save the cutting and joining of rows in
    every step. On a GPU it is always taken by the row, also where no CUDA graph does
    that. So a run has the same bits with graphs and without them.
    """
    engine = chunk.engine
    is_one_model = engine.autograd == "loop" and w.shape == (1, chunk.net.size)
    has_run_loss = engine.chain is None and chunk.loss is None
    return is_one_model and has_run_loss and w.device.type == "cpu"


def _take_plain_steps(chunk: Chunk, lr: float) -> None:
    """Takes all steps `w -= lr * gradient` on the leaves.

    The pieces of a gradient are never joined to a row.
    """
    for step in chunk.batches.steps:
        grads = chunk.leaf_gradients(step)
        with torch.no_grad():
            torch._foreach_add_(chunk.leaves, grads, alpha=-lr)


def _take_steps(
    training: Training,
    lr: float,
    chunk: Chunk,
    w: Tensor,  # [s, Q], changed
    grad_sums: Tensor | None,  # [s, Q], changed
    terms: Tensors,
) -> None:
    """Takes all steps of the run's optimizer, with all of its options."""
    optimizer: SGD | AdamW
    if training.local_optimizer == "sgd":
        optimizer = SGD(w, lr, training)
    else:
        optimizer = AdamW(w, lr, training, int(chunk.batches.taken.max()))
    row = torch.empty_like(w[0]) if chunk.leaves else None
    for step in chunk.batches.steps:
        clients = step.clients
        if row is None:
            grads = chunk.gradient(step, w[clients])
        else:
            pieces = [piece.reshape(-1) for piece in chunk.leaf_gradients(step)]
            grads = torch.cat(pieces, out=row)[None]
        if training.clip_grad is not None:
            grads = clipped(grads, training.clip_grad)
        if grad_sums is not None:
            grad_sums[clients] += grads
            if training.gradient_decay:
                grad_sums[clients].add_(w[clients], alpha=training.gradient_decay)
        optimizer.step(clients, grads, slice_terms(terms, clients))


def train_by_kernels(
    chunk: Chunk,
    chain: Chain,
    w: Tensor,  # [s, Q], changed
    terms: Tensors,
    training: Training,
    lr: float,
    grad_sums: Tensor | None,  # [s, Q], changed
) -> Tensor:  # [s]
    """Takes all steps by a chain's kernels; returns sums of losses."""
    batches = chunk.batches
    pool = chain.kernel_args(chunk.data, chunk.relabel, slice(None))
    cuts = (
        batches.order,
        batches.size,
        batches.taken,
        training.batch_size,
        training.drop_last,
        batches.seeds if chain.dropout else None,
    )
    step_terms = (
        lr,
        terms.get("shift"),
        terms.get("mask"),
        0.0,  # mu of all clients; the next argument has one for each client instead
        terms.get("mu"),
        terms.get("anchor"),
        training.momentum,
        training.weight_decay,
    )
    max_norm = training.clip_grad or math.inf
    adamw = None
    if training.local_optimizer == "adamw":
        rates = (*(training.betas or DEFAULT_BETAS), training.eps or DEFAULT_EPS)
        adamw = torch.tensor(rates, dtype=torch.float64)
    statistics = chain.kernel_statistics(chunk.buffers)
    losses = chain_train_(
        w,
        *pool,
        *cuts,
        *step_terms,
        max_norm,
        adamw,
        grad_sums,
        statistics=statistics,
        merge_single=chunk.net.merge_last_sample,
    )
    if statistics is not None:
        chunk.buffers.copy_(statistics[:, : chunk.buffers.shape[1]])
    return losses


class SGD:
    """Steps of SGD with momentum, weight decay and an objective's terms.

    Args:
        w: The clients' rows [s, Q], which the steps move.
        lr: The step size.
        training: The options of training.
    """

    def __init__(self, w: Tensor, lr: float, training: Training) -> None:
        self.w = w
        self.lr = lr
        self.momentum = training.momentum
        self.weight_decay = training.weight_decay
        self.velocity = torch.zeros_like(w) if training.momentum else None

    def step(self, clients: slice, grads: Tensor, terms: dict[str, Any]) -> None:
        """Moves the rows of `clients` by their gradients [s, Q]."""
        velocity = None if self.velocity is None else self.velocity[clients]
        ops.sgd_step_(
            self.w[clients],
            grads,
            self.lr,
            **terms,
            momentum=self.momentum,
            buffer=velocity,
            weight_decay=self.weight_decay,
        )


class AdamW:
    """Steps of AdamW (Loshchilov and Hutter 2019, Algorithm 2).

    The formula is that of `torch.optim.AdamW`.

    Args:
        w: The clients' rows [s, Q], which the steps move.
        lr: The step size.
        training: The options of training.
        max_steps: The largest number of steps that a client takes.
    """

    def __init__(
        self, w: Tensor, lr: float, training: Training, max_steps: int
    ) -> None:
        self.w = w
        self.lr = lr
        self.decay = training.weight_decay
        self.betas = training.betas or DEFAULT_BETAS
        self.eps = training.eps or DEFAULT_EPS
        self.mean = torch.zeros_like(w)
        self.square = torch.zeros_like(w)
        # The number of steps that each client has taken, [s, 1].
        self.steps = w.new_zeros(len(w), 1, dtype=torch.int64)
        self.bias_corrections = [
            _bias_corrections(beta, max_steps, w) for beta in self.betas
        ]

    def step(self, clients: slice, grads: Tensor, terms: Tensors) -> None:
        """Moves the rows of `clients` by their gradients [s, Q]."""
        w = self.w[clients]
        mean = self.mean[clients]
        square = self.square[clients]
        steps = self.steps[clients]
        shift = terms.get("shift")
        mu = terms.get("mu")
        direction = corrected(w, grads, shift, 0.0, mu, terms.get("anchor"))
        steps += 1  # `steps` is a view of `self.steps`
        mean_beta, square_beta = self.betas
        mean_table, square_table = self.bias_corrections
        mean.lerp_(direction, 1 - mean_beta)
        square.mul_(square_beta)
        square.addcmul_(direction, direction, value=1 - square_beta)
        root = square.sqrt().div_(square_table[steps].sqrt()).add_(self.eps)
        update = mean / root.mul_(mean_table[steps])
        update = update.add_(w, alpha=self.decay).mul_(self.lr)
        if "mask" in terms:
            update = update * terms["mask"]
        w.sub_(update)


def _bias_corrections(beta: float, max_steps: int, w: Tensor) -> Tensor:
    """The numbers `1 - beta**k` for the counts k of steps, from 0 to `max_steps`.

    Python computes the powers one by one: torch's powers of several numbers have other
    last digits than those of one number.
    """
    powers = [1 - beta**k for k in range(max_steps + 1)]
    return to_device(torch.tensor(powers, dtype=torch.float64), w.device).to(w)
