"""Division of a cohort's work among blocks, batches and threads.

- A block holds the clients that are computed at once. The last digits of their results
  may depend on each other, so the blocks depend on the whole cohort, and on nothing
  else but what stays the same over a run.
- A part holds the clients that one thread takes at a time. The engines "loop" and
  "vmap" take one block after another. A chain's kernels compute each client by itself,
  so their parts may be cut anywhere.

So no bit depends on the number of threads.

Symbols: S clients of the cohort; P weights of the model; Q columns of a row. A position
is the number of a client in the cohort.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pflcore.data._ragged import Ragged
from pflcore.train._context import TrainContext

# Samples of a batch of an evaluation. With 1,000 samples or more, a forward pass takes
# twice as long for each sample.
EVAL_BATCH = 125
# Samples of the clients that share the batches of an evaluation. The last batch of a
# block is seldom full, so a block is long; and it ends, so that threads share the work.
SHARED_BATCH_SAMPLES = 64 * EVAL_BATCH
# Weights of a cohort from which two threads share it. With fewer weights, waking a
# thread takes longer than its work.
TWO_PARTS_MIN_WEIGHTS = 1 << 18
# The work of a chain's cohort is its samples times its weights. More parts occupy more
# threads, and balance clients of different sizes better. But every part costs the same
# call from Python, so there are few parts where there is little work.
FOUR_PARTS_MIN_WORK = 1 << 22
SIXTEEN_PARTS_MIN_WORK = 1 << 28
# Work of a step of a part that outweighs the step's Python. Where Python takes the
# steps, every part runs that Python, and one thread runs Python at a time.
PYTHON_STEP_WORK = 1 << 23
# Parts of an evaluation by a chain's kernels, and the samples times weights from which
# there are several. The reason is that of the parts of a training.
CHAIN_EVAL_PARTS = 8
CHAIN_EVAL_PARTS_MIN_WORK = 1 << 24


def assign_blocks(
    context: TrainContext,
    ids: Tensor,  # [S] of the whole cohort
    eval_samples: Tensor | None = None,  # [S] samples of each client, in an evaluation
) -> Tensor:
    """Number [S] of each client's block.

    The last digits of what torch computes over several clients depend on the others:
    the elements at the end of a tensor go through other instructions than those before.
    A program that computes whole blocks, in any order and in any number of threads,
    gets the same bits.

    Under vmap a block has at most `clients_per_block` clients, neighbours by size.
    Without vmap each client trains alone. In an evaluation without vmap, neighbours
    share the batches of a model that all of them have.
    """
    count = len(ids)
    if context.engine.autograd != "vmap":
        if eval_samples is None:
            return torch.arange(count)
        samples_before = eval_samples.cumsum(0) - eval_samples
        return samples_before // SHARED_BATCH_SAMPLES
    # A GPU computes one block after another, so two small blocks gain nothing there.
    on_cpu = context.data.device.type == "cpu"
    two_threads = on_cpu and count * context.net.size >= TWO_PARTS_MIN_WEIGHTS
    min_blocks = 2 if two_threads else 1
    full_blocks = -(-count // context.clients_per_block)
    blocks = min(count, max(full_blocks, min_blocks))
    if blocks == 1:
        return torch.zeros(count, dtype=torch.int64)
    starts = [count * j // blocks for j in range(1, blocks)]
    rank = torch.arange(count)
    block_of_rank = torch.searchsorted(
        torch.tensor(starts, dtype=torch.int64), rank, right=True
    )
    order = order_by_size(context.data.size("train")[ids], ids)
    return torch.empty_like(rank).scatter_(0, order, block_of_rank)


def order_by_size(size: Tensor, ids: Tensor) -> Tensor:
    """Positions [S] of clients, those of most samples first; ties by id."""
    # The last key of `lexsort` decides first.
    return torch.from_numpy(np.lexsort((ids.numpy(), -size.numpy())))


def split_by_block(values: Tensor, block_numbers: Tensor) -> Sequence[Tensor]:
    """The values of each block.

    `values` [S] and `block_numbers` [S] have an entry for each client.
    """
    sizes: list[int] = block_numbers.unique(return_counts=True)[1].tolist()
    order = block_numbers.argsort(stable=True)
    blocks: Sequence[Tensor] = values[order].split(sizes)
    return blocks


def num_kernel_parts(
    context: TrainContext,
    num_samples: Tensor,  # [S] training samples of each client
    width: int,  # Q
    *,
    steps_in_python: bool,
) -> int:
    """Number of parts of a cohort that a chain's kernels train.

    With `steps_in_python` the kernels compute the gradients alone, and Python takes the
    steps. Otherwise the kernels take all steps.
    """
    count = len(num_samples)
    parts = min(count, _num_parts_for_work(num_samples, width))
    if not steps_in_python:
        return parts
    step_work = count * context.training.batch_size * width
    return min(parts, max(2, step_work // PYTHON_STEP_WORK))


def _num_parts_for_work(num_samples: Tensor, width: int) -> int:
    """Number of parts that share a cohort's work, before other limits."""
    work = int(num_samples.sum()) * width
    if work >= SIXTEEN_PARTS_MIN_WORK:
        return 16
    if work >= FOUR_PARTS_MIN_WORK:
        return 4
    return 2 if len(num_samples) * width >= TWO_PARTS_MIN_WEIGHTS else 1


def even_parts(order: Tensor, parts: int) -> list[Tensor]:
    """Entries of `order` [S] in parts of about as many clients each."""
    count = len(order)
    cuts = [count * j // parts for j in range(parts + 1)]
    return [order[first:last] for first, last in pairwise(cuts)]


def even_sample_slices(lists: Ragged, num_weights: int) -> list[slice]:
    """Slices of neighbouring clients with about as many samples in `lists` each.

    They are the parts of an evaluation of models of `num_weights` weights by a chain's
    kernels.
    """
    count = len(lists)
    samples = len(lists.flat)
    has_much_work = samples * num_weights >= CHAIN_EVAL_PARTS_MIN_WORK
    max_parts = CHAIN_EVAL_PARTS if has_much_work else 1
    parts = min(count, max_parts)
    shares = torch.arange(1, parts) * samples // parts
    cuts = torch.searchsorted(lists.begin, shares).tolist()
    bounds = pairwise([0, *cuts, count])
    # A client with many samples may span several shares, between which no client lies.
    return [slice(first, last) for first, last in bounds if first < last]
