"""The clients of a round, and the weights of their updates: what servers speak of.

These are the words that the algorithms and the means of `pflcore.robust` share.

Symbols: N clients are in the federation, S of them in a round's cohort; a server makes
M models in a round; a client may take K of the cohort's updates; P parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.train._random import generator_of
from pflcore.train._training import Training

Tensors = dict[str, Tensor]  # a state, or uploads [S, ...], by name


class VoidRound(Exception):
    """Makes the round void: it changes no model.

    `update` raises it, with one sentence that gives the reason, where it cannot compute
    anything from the uploads of this cohort.
    """


class MixingWeights(NamedTuple):
    """The weights of the cohort's updates in each model that the server made.

    The record shows them, and batch norm's statistics are mixed with them.

    Attributes:
        weight: [M, S] float64, the factor of each update of the cohort in each model.
            With `index` it is [M, K]: only the factors of the updates that `index`
            names.
        index: [M, K] int64, the positions in the cohort of the K updates that each
            model mixes. None means that every model has a factor for every update.
        receivers: [M] int64, the ids of the clients whose models they are, one model
            each. None means that there is one model, M = 1, for all clients.
    """

    weight: Tensor  # [M, S] or [M, K]
    # [M, K]. It hides the method `tuple.index`.
    index: Tensor | None = None  # type: ignore[assignment]
    receivers: Tensor | None = None  # [M]

    def aggregate(
        self, updates: Tensor, base: Tensor | None = None, lr: float = 1.0
    ) -> Tensor:
        """The models [M, P]: base + lr * (weight @ updates).

        Args:
            updates: [S, P] of the cohort, in its order.
            base: [P] or [M, P] the models that the updates change. None means zero.
            lr: The step size of the server.
        """
        device = updates.device
        index = None if self.index is None else to_device(self.index, device)
        weight = to_device(self.weight, device)
        return ops.aggregate(updates, weight, index, base, lr)

    def report(self, cohort: Cohort) -> Tensors:
        """The weights by clients' ids, for the record.

        - For one model and a cohort of all clients they are "weights" [N].
        - For one model and a smaller cohort they are "weight" [S], and "index" [S] are
          the ids.
        - With `index` they are "weight" [M, K] of the clients "index" [M, K] in the
          models of the clients "rows" [M].
        """
        if self.index is not None:
            ids = cohort.ids
            return {"rows": ids, "index": ids[self.index.cpu()], "weight": self.weight}
        if len(cohort.ids) == cohort.n:
            return {"weights": self.weight[0]}
        return {"index": cohort.ids, "weight": self.weight[0]}


def cohort_size(participation: float, num_eligible: int) -> int:
    """The number of clients in a round: max(1, floor(participation * n + 0.5)).

    Args:
        participation: The fraction of clients that take part, from 0 to 1.
        num_eligible: The number of clients that may take part.
    """
    return max(1, int(participation * num_eligible + 0.5))


class Cohort(NamedTuple):
    """The clients of one round, as a server's hooks receive them.

    Attributes:
        ids: [S] int64, the numbers of the clients, from 0 to N - 1, in ascending order.
            Row i of an upload [S, ...] comes from the client `ids[i]`.
        num_samples: [S] int64, the number of training samples of each client, in the
            order of `ids`. Most means weigh clients by it.
        n: N, the number of clients of the federation. The server's tables have a row
            for each of them.
        round: The number of this round, counted from 1. In an evaluation it is the
            number of the last round that was played, and at least 1.
        rounds: The number of rounds that the run is planned to have. A schedule over
            the run divides `round` by it.
        seed: The seed of the run. An algorithm that draws takes `generator`, which
            depends on it.
        num_dropped: The number of clients that were left out of this round. They took
            part, but their uploads were not finite, or could not be used.
        purpose: "send" in a round, "evaluation" where models are evaluated. It names
            the stream of `generator`, so that an evaluation changes no draw of a round.
        trainable: The value of `trainable_clients`; None for all clients.
        training: The options of the clients' training. None where the server does not
            know them.
        new: The value of `is_new`; None where all take part for the first time.
        participated: The value of `has_participated`; None where nobody has.
    """

    ids: Tensor  # [S]
    num_samples: Tensor  # [S]
    n: int
    round: int = 1
    rounds: int = 1
    seed: int = 0
    num_dropped: int = 0
    purpose: str = "send"
    trainable: Tensor | None = None  # [T]
    training: Training | None = None
    new: Tensor | None = None  # bool [S]
    participated: Tensor | None = None  # bool [N]

    @property
    def is_new(self) -> Tensor:
        """Mask bool [S] of the clients that take part for the first time."""
        if self.new is None:
            return torch.ones(len(self.ids), dtype=torch.bool)
        return self.new

    @property
    def has_participated(self) -> Tensor:
        """Mask bool [N] of the federation's clients that took part so far.

        It is the run's own table, and the end of the round adds the cohort to it.
        """
        if self.participated is None:
            return torch.zeros(self.n, dtype=torch.bool)
        return self.participated

    @property
    def trainable_clients(self) -> Tensor:
        """The ids [T] of the clients that may take part, ascending.

        They have training samples, and are among the run's `clients`. The others are
        evaluated, and are in no round: they count nowhere.
        """
        return torch.arange(self.n) if self.trainable is None else self.trainable

    @property
    def num_trainable(self) -> int:
        """The number of the clients that may take part.

        A mean over the federation's clients is one over these.
        """
        return self.n if self.trainable is None else len(self.trainable)

    def take(self, kept: Tensor) -> Cohort:
        """The cohort of the clients that the mask `kept`, bool [S], selects.

        The others count as dropped.
        """
        dropped = int((~kept).sum())
        return self._replace(
            ids=self.ids[kept],
            num_samples=self.num_samples[kept],
            num_dropped=self.num_dropped + dropped,
            new=self.is_new[kept],
        )

    def mean_weights(self, weighting: str = "samples") -> MixingWeights:
        """The weights [1, S] of one mean of the cohort, which sum to 1.

        Args:
            weighting: "samples" weighs each client by its training samples, "uniform"
                all clients equally.
        """
        size = self.num_samples
        if weighting != "samples":
            size = torch.ones_like(self.num_samples)
        return MixingWeights((size.double() / size.sum())[None])

    @property
    def generator(self) -> torch.Generator:
        """A new generator, seeded by the run's seed, the round and the purpose.

        Each use of this property starts the same sequence again.
        """
        return generator_of(self.seed, self.round, self.purpose)
