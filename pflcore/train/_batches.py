"""The samples of every client's minibatches.

They are a function of (seed, round, client, stream, epoch). So they depend neither on
which other clients train, nor on the engine, nor on the number of workers.

Symbols: s clients of a chunk, those of most samples first; B samples of a minibatch. An
epoch is one pass over a client's samples. Where a step has several minibatches, each of
them comes from passes of its own, so there are more passes than epochs.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.data._federation import Federation
from pflcore.train._random import U64, client_seeds, client_shuffles, random_words
from pflcore.train._training import Training


class BatchPlan(NamedTuple):
    """The length of a training, and the shuffles of its samples.

    Attributes:
        epochs: The number of epochs. None means the run's number, or as many as the
            steps need.
        steps: The number of steps of each client, instead of a number of epochs: one
            for all, or a tuple with one for each client.
        batches: The number of minibatches of a step. Each of them comes from another
            shuffle.
        stream: The name of the shuffles. Two trainings of one hook that shall take
            different minibatches need two names.
        together: True where clients of all sizes take their k-th minibatches at once.
    """

    epochs: int | None = None
    steps: int | tuple[int, ...] | None = None
    batches: int = 1
    stream: str = "fit"
    together: bool = True


class BatchStep(NamedTuple):
    """A step of some clients, on one minibatch of each.

    Attributes:
        clients: The clients, as a slice of the chunk's rows.
        epoch: The number of the epoch, from 0.
        epochs: The number of epochs that these clients train.
        place: The number of the minibatch in its epoch, from 0.
        first: The first sample of the minibatch, in the epoch's order.
        last: The end of the minibatch: one behind its last sample. A client that has
            fewer samples ends earlier.
    """

    clients: slice
    epoch: int
    epochs: int
    place: int
    first: int
    last: int


class EpochRule(NamedTuple):
    """The rule by which a client's samples become the minibatches of an epoch.

    Attributes:
        batch_size: The number of samples of a minibatch.
        drop_last: True where a smaller last minibatch is left out.
        merge_single: True where a last minibatch of a single sample joins the one
            before it.
    """

    batch_size: int
    drop_last: bool
    merge_single: bool


def num_batches_of_epoch(n: int, rule: EpochRule) -> int:
    """Number of minibatches of a client with `n` samples in an epoch.

    There are as many as `DataLoader(batch_size, drop_last)` makes, and at least one:
    with `drop_last`, a client with fewer samples than a batch still has a minibatch.
    With `merge_single`, a last minibatch of a single sample joins the one before it,
    since batch norm, for example, cannot train on one sample.
    """
    size = rule.batch_size
    if rule.drop_last:
        return max(1, n // size)
    batches = max(1, -(-n // size))
    if rule.merge_single and batches > 1 and n % size == 1:
        return batches - 1
    return batches


def _steps_taken(cuts: list[int], plan: BatchPlan) -> list[int]:
    """The number of steps of each client, with `cuts` minibatches of an epoch each."""
    if plan.steps is None:
        assert plan.epochs is not None  # `Batches` has put the run's number there
        return [batches * plan.epochs for batches in cuts]
    if isinstance(plan.steps, int):
        return [plan.steps] * len(cuts)
    return list(plan.steps)


@lru_cache(maxsize=4096)
def plan_steps(
    sizes: tuple[int, ...], rule: EpochRule, plan: BatchPlan, ragged: bool
) -> tuple[list[BatchStep], Tensor, Tensor]:
    """The steps of some clients, with two numbers of each client.

    The numbers are the minibatches of an epoch [s] and the steps that a client takes
    [s]. Everything that they depend on is an argument, as the results are kept.

    Args:
        sizes: The number of each client's samples, in descending order.
        rule: The rule for the minibatches of an epoch.
        plan: The length of the training. It has a number of epochs, or of steps.
        ragged: If true, the clients of a step may have minibatches of any sizes. If
            false, all have one size, since one call of vmap serves them.
    """
    cuts = [num_batches_of_epoch(n, rule) for n in sizes]
    taken = _steps_taken(cuts, plan)
    epochs = [-(-steps // batches) for steps, batches in zip(taken, cuts, strict=True)]
    if isinstance(plan.steps, tuple) and plan.batches == 1:
        # Nothing depends on a client's number of epochs then, and clients with one
        # number share their steps.
        epochs = [max(epochs)] * len(epochs)
    batch_size = rule.batch_size

    def common_key(place: int, i: int) -> tuple[int, int, int]:
        """Epochs, last sample and size, which one step's clients have in common.

        The size is 0 where it does not count.
        """
        full_last = (place + 1) * batch_size
        drops_rest = rule.drop_last and sizes[i] >= batch_size
        takes_rest = place + 1 == cuts[i] and not drops_rest
        last = sizes[i] if takes_rest else full_last
        if ragged:
            # A sample that joins the minibatch counts, and missing ones do not.
            return epochs[i], max(last, full_last), 0
        size = 0 if plan.together else sizes[i]
        return epochs[i], last, size

    steps = []
    for epoch, place in product(range(max(epochs)), range(cuts[0])):
        training_clients = []
        for i, batches in enumerate(cuts):
            if place < batches and epoch * batches + place < taken[i]:
                training_clients.append(i)
        first = place * batch_size
        keys = []
        for rank, i in enumerate(training_clients):
            # Clients are sorted by size, so those with one key are neighbours, unless
            # one between them has taken all of its steps. The last number differs then.
            keys.append((*common_key(place, i), i - rank))
        for key, group in groupby(zip(keys, training_clients, strict=True), _first):
            client_epochs, last, _, _ = key
            neighbours = [i for _, i in group]
            clients = slice(neighbours[0], neighbours[-1] + 1)
            step = BatchStep(clients, epoch, client_epochs, place, first, last)
            steps.append(step)
    return steps, torch.tensor(cuts), torch.tensor(taken)


def _first(pair: tuple[Any, Any]) -> Any:
    """The first one of two values."""
    return pair[0]


class Batches:
    """The minibatches of some clients, as tables of places in the pool.

    Attributes:
        steps: The steps that the clients take.
        size: The number of each client's samples, [s] on the CPU.
        cuts: The number of minibatches of an epoch of each client, [s].
        taken: The number of steps that each client takes, [s].
        order: The places of each client's samples, pass by pass in shuffled order,
            [s, passes, longest] on the samples' device.
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
        plan_of_steps = plan_steps
        if isinstance(plan.steps, tuple) and len({*plan.steps}) > 1:
            # Another round may have other numbers, for which no cache has room.
            plan_of_steps = plan_steps.__wrapped__  # type: ignore[assignment]
        if plan.steps is None:
            plan = plan._replace(epochs=plan.epochs or training.epochs)
        rule = EpochRule(training.batch_size, training.drop_last, merge_single)
        steps = plan_of_steps(sizes, rule, plan, ragged)
        self.steps, self.cuts, self.taken = steps
        epochs = -(-self.taken // self.cuts)
        passes = plan.batches * int(epochs.max())
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
        self._key = (*key, plan.stream)
        self._device = data.y.device

    @cached_property
    def seeds(self) -> Tensor:
        """Seeds of each client's dropout in each pass, [s, passes]."""
        table = torch.from_numpy(self._words("noise").view(np.int64))
        return to_device(table, self._device)

    @cached_property
    def _augment_words(self) -> U64:
        """A random word of each client's augmentation in each pass, [s, passes]."""
        return self._words("augment")

    def _words(self, purpose: str) -> U64:
        """A random word for each client and pass, [s, passes]."""
        passes = range(self.order.shape[1])
        words = [client_seeds(self._ids, *self._key, purpose, p) for p in passes]
        return np.stack(words, 1)

    @cached_property
    def _sizes_on_device(self) -> Tensor:
        """`size` on the samples' device, to which it goes only once."""
        return to_device(self.size, self.order.device)

    def sample_counts(self, step: BatchStep) -> Tensor:
        """Number [s] of each client's samples in a step, on their device."""
        remaining = self._sizes_on_device[step.clients] - step.first
        return remaining.clamp(max=step.last - step.first)

    def places(self, step: BatchStep, which: int = 0) -> Tensor:
        """Places [s, B] in the pool of a step's `which`-th minibatch.

        Each minibatch of a step comes from passes of its own. Those of the second one
        follow all those of the first one.
        """
        number = step.epoch + which * step.epochs
        return self.order[step.clients, number, step.first : step.last]

    def augment_seeds(self, step: BatchStep, which: int = 0) -> U64:
        """Random words [s, B] for the augmentation of a minibatch's samples.

        They are those of the samples' numbers in their pass, which has each sample
        once.
        """
        number = step.epoch + which * step.epochs
        words = self._augment_words[step.clients, number]
        last = min(step.last, self.order.shape[2])
        return random_words(words, last - step.first, step.first)

    def batch_sizes(self, step: BatchStep) -> list[int]:
        """Number [s] of each client's samples in a step, as Python has them."""
        remaining = self.size[step.clients] - step.first
        sizes: list[int] = remaining.clamp(max=step.last - step.first).tolist()
        return sizes

    def seeds_of(self, step: BatchStep, which: int = 0) -> Tensor:
        """Seeds [s] of dropout for a step's `which`-th minibatch."""
        number = step.epoch + which * step.epochs
        return self.seeds[step.clients, number] + step.place
