"""Which samples every client takes in which step.

A client's minibatches are a function of (seed, round, client, stream, epoch), so
nothing depends on who else trains, on the engine, or on the number of workers.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from itertools import groupby, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.data._federation import Federation
from pflcore.data._ragged import to_device
from pflcore.train._random import client_seeds, client_shuffles
from pflcore.train._training import Training


class BatchPlan(NamedTuple):
    """How long clients train, and on which of their shuffles."""

    epochs: int | None = None  # None: the run's, or as many as the steps need
    steps: int | None = None  # so many steps instead
    batches: int = 1  # minibatches of a step, each from a shuffle of its own
    stream: str = "fit"  # names the shuffle: two fits of one hook take two streams
    # do clients of all sizes take their k-th minibatches at once?
    together: bool = True


class BatchStep(NamedTuple):
    """The next minibatch of some clients of a chunk: samples [first, last) of an
    epoch."""

    clients: slice  # of the chunk's rows
    epoch: int
    epochs: int  # that these clients train
    place: int  # of the minibatch in its epoch
    first: int
    last: int


@lru_cache(maxsize=4096)
def plan_steps(
    sizes: tuple[int, ...],
    training: Training,
    plan: BatchPlan,
    ragged: bool,
    join: bool,
) -> tuple[list[BatchStep], Tensor, Tensor]:
    """The steps of clients of these sizes [s], largest first; minibatches of an epoch
    [s]; steps each takes [s].

    As `DataLoader(batch_size, drop_last)` cuts them, but a client of less than a batch
    has one; `join`: a last one of a single sample joins the one before. The clients of
    a step have minibatches of one size, so one vmap serves them; of any if `ragged`.
    """
    size = training.batch_size
    cuts = [max(1, n // size if training.drop_last else -(-n // size)) for n in sizes]
    if join and not training.drop_last:
        cuts = [c - (c > 1 and n % size == 1) for n, c in zip(sizes, cuts, strict=True)]
    whole = plan.epochs or training.epochs
    takes = [c * whole if plan.steps is None else plan.steps for c in cuts]
    epochs = [-(-t // c) for t, c in zip(takes, cuts, strict=True)]

    def kind(place: int, i: int) -> tuple[int, int, int]:
        if ragged:
            return epochs[i], (place + 1) * size, 0
        rest = place + 1 == cuts[i] and not (training.drop_last and sizes[i] >= size)
        last = sizes[i] if rest else (place + 1) * size
        return epochs[i], last, 0 if plan.together else sizes[i]

    steps = []
    for epoch, place in product(range(max(epochs)), range(cuts[0])):
        done = [epoch * c + place for c in cuts]
        on = [i for i, c in enumerate(cuts) if place < c and done[i] < takes[i]]
        for (own, last, _), group in groupby(on, partial(kind, place)):
            some = list(group)  # neighbours, since they are sorted by size
            clients = slice(some[0], some[-1] + 1)
            steps.append(BatchStep(clients, epoch, own, place, place * size, last))
    return steps, torch.tensor(cuts), torch.tensor(takes)


class Batches:
    """The minibatches of some clients, as tables of places in the pool."""

    def __init__(
        self,
        data: Federation,
        training: Training,
        key: tuple[int, int],  # the run's seed, the round
        ids: Tensor,  # [s], the clients of most samples first
        plan: BatchPlan,
        ragged: bool,
        join: bool = False,
    ) -> None:
        lists = data.lists("train")
        self.size = lists.size[ids]
        sizes = tuple(self.size.tolist())
        self.steps, self.cuts, self.taken = plan_steps(
            sizes, training, plan, ragged, join
        )
        # the smallest client's, the most
        passes = range(plan.batches * self.steps[-1].epochs)
        fixed = (key[0], 0, plan.stream, 0)  # one order for the whole run
        keys = [(*key, plan.stream, p) if training.reshuffle else fixed for p in passes]
        orders = [
            torch.from_numpy(client_shuffles(client_seeds(ids, *k), sizes))
            for k in keys
        ]
        order = torch.stack(orders, 1).add_(lists.begin[ids][:, None, None])
        # [s, passes, longest]
        self.order = lists.flat.take(to_device(order, lists.flat.device))
        self._key = ids, (*key, plan.stream, "noise"), data.y.device

    @cached_property
    def seeds(self) -> Tensor:
        """Dropout's, [s, passes]."""
        ids, key, device = self._key
        each = [client_seeds(ids, *key, p) for p in range(self.order.shape[1])]
        return to_device(torch.from_numpy(np.stack(each, 1).view(np.int64)), device)

    @cached_property
    def _sizes_on_device(self) -> Tensor:
        """`size` beside the samples: it goes to a card once, not in every step."""
        return to_device(self.size, self.order.device)

    def sample_counts(self, step: BatchStep) -> Tensor:
        """How many samples of a step's minibatch each client has [s], beside the
        samples."""
        rest = self._sizes_on_device[step.clients] - step.first
        return rest.clamp(max=step.last - step.first)

    def places(self, step: BatchStep, which: int = 0) -> Tensor:
        """Where in the pool a step's samples are, [s, B]."""
        return self.order[
            step.clients, step.epoch + which * step.epochs, step.first : step.last
        ]

    def seeds_of(self, step: BatchStep, which: int = 0) -> Tensor:
        """Seeds [s] for a step's dropout."""
        return self.seeds[step.clients, step.epoch + which * step.epochs] + step.place
