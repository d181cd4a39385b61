"""Local steps: SGD and AdamW on the rows of a chunk's clients.

A chain's kernels take all steps by one call where they can. Otherwise Python takes one
step after another, with the gradients of the chunk.

Symbols: s clients of a chunk or of a step; Q columns of a row; w rows of weights.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pflcore import ops
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
        optimizer = AdamW(w, lr, training)
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
    """Steps of AdamW (Loshchilov and Hutter 2019, Algorithm 2) by torch's fused kernel.

    Args:
        w: The clients' rows [s, Q], which the steps move.
        lr: The step size.
        training: The options of training.
    """

    def __init__(self, w: Tensor, lr: float, training: Training) -> None:
        self.w = w
        self.lr = lr
        self.decay = training.weight_decay
        self.betas = training.betas or DEFAULT_BETAS
        self.eps = training.eps or DEFAULT_EPS
        self.mean = torch.zeros_like(w)
        self.square = torch.zeros_like(w)
        self.taken = [0] * len(w)  # the number of steps of each client

    def step(self, clients: slice, grads: Tensor, terms: Tensors) -> None:
        """Moves the rows of `clients` by their gradients [s, Q]."""
        w = self.w[clients]
        shift = terms.get("shift")
        mu = terms.get("mu")
        direction = corrected(w, grads, shift, 0.0, mu, terms.get("anchor"))
        mask = terms.get("mask")
        start = None if mask is None else w.clone()
        # Clients of fewer minibatches are behind in later epochs. Rows of clients that
        # have taken equally many steps are one tensor, since torch counts for tensors.
        taken = self.taken[clients]
        counts = [count for count, _ in groupby(taken)]
        lengths = [len([*run]) for _, run in groupby(taken)]
        mean_beta, square_beta = self.betas
        adamw(
            [*w.split(lengths)],
            [*direction.contiguous().split(lengths)],
            [*self.mean[clients].split(lengths)],
            [*self.square[clients].split(lengths)],
            [],
            [w.new_full((), count, dtype=torch.float32) for count in counts],
            fused=True,
            amsgrad=False,
            beta1=mean_beta,
            beta2=square_beta,
            lr=self.lr,
            weight_decay=self.decay,
            eps=self.eps,
            maximize=False,
        )
        self.taken[clients] = [count + 1 for count in taken]
        if start is not None and mask is not None:
            w.copy_(start.lerp(w, mask))  # exact where a mask is 0 or 1
