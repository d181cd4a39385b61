"""The samples of every client's minibatches.

They are a function of (seed, round, client, stream, epoch). So they depend neither on
which other clients train, nor on the engine, nor on the number of workers.

Symbols: s clients of a chunk, those of most samples first. An epoch is one pass over a
client's samples; a place is the index of a minibatch in its epoch.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from itertools import groupby, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.data._federation import Federation
from pflcore.train._random import client_seeds, client_shuffles
from pflcore.train._training import Training


class BatchPlan(NamedTuple):
    """How long clients train, and on which of their shuffles."""

    epochs: int | None = None  # None: the run's, or as many as the steps need
    steps: int | None = None  # so many steps instead
    batches: int = 1  # minibatches of a step, each from a shuffle of its own
    stream: str = "fit"  # names the shuffle: two fits of one hook take two streams
    # Whether clients of all sizes take their k-th minibatches at once.
    together: bool = True


class BatchStep(NamedTuple):
    """A minibatch of some clients of a chunk: samples [first, last) of an epoch."""

    clients: slice  # of the chunk's rows
    epoch: int
    epochs: int  # that these clients train
    place: int  # of the minibatch in its epoch
    first: int
    last: int


def num_batches_of_epoch(n: int, training: Training, merge_single: bool) -> int:
    """Number of minibatches of a client with `n` samples in an epoch.

    There are as many as `DataLoader(batch_size, drop_last)` makes, but never none: with
    `drop_last`, a client with fewer samples than a batch still has one. With
    `merge_single`, a last one of a single sample joins the one before it, since batch
    norm, for example, cannot train on one sample.
    """
    size = training.batch_size
    if training.drop_last:
        return max(1, n // size)
    batches = max(1, -(-n // size))
    if merge_single and batches > 1 and n % size == 1:
        return batches - 1
    return batches


@lru_cache(maxsize=4096)
def plan_steps(
    sizes: tuple[int, ...],
    training: Training,
    plan: BatchPlan,
    ragged: bool,
    merge_single: bool,
) -> tuple[list[BatchStep], Tensor, Tensor]:
    """The steps of clients of these sizes [s], largest first.

    Also the minibatches of an epoch of each client [s], and the steps that each client
    takes [s]. The clients of a step have minibatches of one size, so that one vmap
    serves them; with `ragged` they may have any sizes.
    """
    cuts = [num_batches_of_epoch(n, training, merge_single) for n in sizes]
    if plan.steps is None:
        num_epochs = plan.epochs or training.epochs
        taken = [batches * num_epochs for batches in cuts]
    else:
        taken = [plan.steps] * len(cuts)
    epochs = [-(-steps // batches) for steps, batches in zip(taken, cuts, strict=True)]
    batch_size = training.batch_size

    def shape(place: int, i: int) -> tuple[int, int, int]:
        """What the clients of one step have in common: epochs, last sample, size."""
        full_last = (place + 1) * batch_size
        if ragged:
            return epochs[i], full_last, 0
        drops_rest = training.drop_last and sizes[i] >= batch_size
        takes_rest = place + 1 == cuts[i] and not drops_rest
        last = sizes[i] if takes_rest else full_last
        return epochs[i], last, 0 if plan.together else sizes[i]

    steps = []
    for epoch, place in product(range(max(epochs)), range(cuts[0])):
        training_clients = []
        for i, batches in enumerate(cuts):
            if place < batches and epoch * batches + place < taken[i]:
                training_clients.append(i)
        first = place * batch_size
        for key, group in groupby(training_clients, partial(shape, place)):
            client_epochs, last, _ = key
            neighbours = list(group)  # since clients are sorted by size
            clients = slice(neighbours[0], neighbours[-1] + 1)
            step = BatchStep(clients, epoch, client_epochs, place, first, last)
            steps.append(step)
    return steps, torch.tensor(cuts), torch.tensor(taken)


class Batches:
    """The minibatches of some clients, as tables of the samples' places in the pool.

    - `steps`: the steps that they take.
    - `cuts` [s]: the minibatches of an epoch.
    - `taken` [s]: the steps that each client takes.
    - `order` [s, passes, longest]: the places, pass by pass in shuffled order.
    """

    def __init__(
        self,
        data: Federation,
        training: Training,
        key: tuple[int, int],  # the run's seed, the round
        ids: Tensor,  # [s], the clients of most samples first
        plan: BatchPlan,
        ragged: bool,
        merge_single: bool = False,
    ) -> None:
        lists = data.lists("train")
        self.size = lists.size[ids]
        sizes = tuple(self.size.tolist())
        steps = plan_steps(sizes, training, plan, ragged, merge_single)
        self.steps, self.cuts, self.taken = steps
        # The last step is one of the smallest clients, which train the most epochs.
        passes = plan.batches * self.steps[-1].epochs
        orders = []
        for number in range(passes):
            shuffle_key: tuple[object, ...] = (*key, plan.stream, number)
            if not training.reshuffle:
                shuffle_key = (key[0], 0, plan.stream, 0)  # one order for the whole run
            seeds = client_seeds(ids, *shuffle_key)
            orders.append(torch.from_numpy(client_shuffles(seeds, sizes)))
        order = torch.stack(orders, 1).add_(lists.begin[ids][:, None, None])
        # [s, passes, longest]
        self.order = lists.flat.take(to_device(order, lists.flat.device))
        self._ids = ids
        self._noise_key = (*key, plan.stream, "noise")
        self._device = data.y.device

    @cached_property
    def seeds(self) -> Tensor:
        """Seeds of dropout [s, passes]."""
        passes = range(self.order.shape[1])
        seeds = [client_seeds(self._ids, *self._noise_key, p) for p in passes]
        table = torch.from_numpy(np.stack(seeds, 1).view(np.int64))
        return to_device(table, self._device)

    @cached_property
    def _sizes_on_device(self) -> Tensor:
        """`size` on the samples' device: it goes there once, not in every step."""
        return to_device(self.size, self.order.device)

    def sample_counts(self, step: BatchStep) -> Tensor:
        """Samples [s] that each client has in a step, on the samples' device."""
        remaining = self._sizes_on_device[step.clients] - step.first
        return remaining.clamp(max=step.last - step.first)

    def places(self, step: BatchStep, which: int = 0) -> Tensor:
        """Places in the pool of the samples of a step's `which`-th minibatch, [s, B].

        The minibatches of a step come from as many shuffles: the passes of the second
        one follow those of the first one.
        """
        number = step.epoch + which * step.epochs
        return self.order[step.clients, number, step.first : step.last]

    def seeds_of(self, step: BatchStep, which: int = 0) -> Tensor:
        """Seeds [s] of the dropout of a step's `which`-th minibatch."""
        number = step.epoch + which * step.epochs
        return self.seeds[step.clients, number] + step.place
