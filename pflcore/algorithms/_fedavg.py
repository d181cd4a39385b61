"""Servers that take a step along the mean of the clients' updates.

FedAvg takes the mean of the clients, or a robust one. q-FedAvg's weights grow with a
client's loss.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; x
is the server's model, `delta` [S, P] are the updates, `share` [1, S] the clients'
shares in their mean.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Claim,
    Cohort,
    MixingWeights,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    map_rows,
)
from pflcore.check import NonNegativeFloat, Weighting
from pflcore.robust import MeanOption, WeightedMean, mean_of
from pflcore.train import Clients


@algorithm_options
class ServerStep(Algorithm):
    """Base class of servers that step along a mean of the clients' updates.

    Args:
        server_lr: Step size of the server. At 1, the paper's value, the server adds the
            whole mean update.
        weighting: Shares of the clients in the mean: "samples" is the paper's n_i /
            n, "uniform" gives every client the same share.
    """

    server_lr: NonNegativeFloat = 1.0
    weighting: Weighting = "samples"


@algorithm_options
class FedAvg(ServerStep):
    """FedAvg (McMahan et al. 2017, Algorithm 1): the mean of the clients' updates.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    `x <- x + server_lr * sum_i share_i delta_i`. The shares follow `weighting`. A
    robust mean takes the place of the sum; then running statistics of batch norm stay
    each client's own. `pflcore.robust` has the means and their formulas.

    Args:
        mean: Mean of the updates, a value of `pflcore.robust` such as
            `Krum(num_byzantine=2)`, or its text "krum:2".
    """

    mean: MeanOption = field(default=WeightedMean(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", mean_of(self.mean))
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        traits = Traits(required_clients=self.mean.required_clients)
        if self.mean.mixes_statistics:
            return traits
        return traits._replace(batch_norm=("local",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, **self.mean.init(x0)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix, kept = self.mean(up["delta"], cohort, self.weighting, state)
        x = mix.aggregate(rows, state["x"], self.server_lr)[0]
        return {"x": x, **kept}, mix

    def update_without_clients(self, state: Tensors, cohort: Cohort) -> Changes:
        if not self.mean.acts_without_clients:
            return {}
        nothing = {"delta": torch.zeros_like(state["x"])[None]}
        return self.update(state, nothing, cohort)[0]


# The bounds of a loss: see the deviation of `QFedAvg`, and the largest float32.
MIN_LOSS = 1e-6
MAX_LOSS = 3.4e38


@algorithm_options
class QFedAvg(ServerStep):
    """q-FedAvg (Li et al. 2020, Algorithm 2): clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x [S, P] (1 model) · up: delta [S, P] (1
    model), and weight and h [S] (F^q, and the client's term of the sum below).

    With F_i the mean loss of the received x on client i's whole training set, L = 1 /
    (the clients' lr) and p the shares: `x += server_lr * sum p F^q delta / sum p (q
    F^(q-1) L |delta|^2 + F^q)`. These are the paper's sums, with one L cancelled. The
    paper samples clients by their size and sets p = 1: that is `weighting="uniform"`.

    Deviations: F is at least 1e-6, since at q < 1 F^(q-1) of a client without a loss
    would stop the server. Of an update that the server shortens, h is that of what is
    left.

    The other options are those of `FedAvg`, without its mean.

    Args:
        q: Exponent of the losses in the weights. 0 is FedAvg; a larger q makes the
            clients' losses more equal.
    """

    q: NonNegativeFloat = 0.001

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        if self.q == 0:
            return Traits()
        reason = "takes an update over the step size for a gradient"
        return Traits(fixed_training={"local_optimizer": reason})

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        loss = (clients.loss(down["x"]).double() + 1e-10).clamp(min=MIN_LOSS)
        client_state, up, fit = super().train(down, client_state, clients)
        norm2 = torch.linalg.vector_norm(up["delta"], dim=1, dtype=torch.float64) ** 2
        slope = _power(loss, self.q - 1)
        weight = _power(loss, self.q)
        h = self.q * slope * norm2 / (clients.lr or 1) + weight
        return client_state, {**up, "weight": weight, "h": h}, fit

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        number = torch.empty((), dtype=torch.float64)
        bounds = torch.tensor([MIN_LOSS, MAX_LOSS], dtype=torch.float64)
        least, most = (bounds**self.q).tolist()
        weight = Claim(number, low=least, high=most)
        h = Claim(number, low=lambda up: up["weight"])
        if cohort.training is not None:
            lr = cohort.training.lr_at(cohort.round, cohort.rounds)
            h = h._replace(high=lambda up: self._term(up["delta"], up["weight"], lr))
        return {**super().uploads(state, down, cohort), "weight": weight, "h": h}

    def _term(self, delta: Tensor, weight: Tensor, lr: float) -> Tensor:
        """The term h [S] of updates [S, P] of clients with weights F^q [S]."""
        if not self.q:
            return weight
        norm2 = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64) ** 2
        slope = _power(weight, (self.q - 1) / self.q)  # F^(q - 1)
        curvature: Tensor = self.q * slope * norm2 / (lr or 1)
        return curvature + weight

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        delta = up["delta"]
        h = self._terms_of_used(up, cohort)
        mean = cohort.mean_weights(self.weighting)
        share = to_device(mean.weight, h.device).to(h)
        weight = share * up["weight"]
        step = MixingWeights(weight / (share * h).sum())
        x = step.aggregate(delta, state["x"], self.server_lr)[0]
        return {"x": x}, MixingWeights(weight.cpu())

    def _terms_of_used(self, up: Tensors, cohort: Cohort) -> Tensor:
        """The terms h [S] of the updates that are used.

        A client knows nothing of a server that shortens its update: the term of the
        long one would make the step of all clients small.
        """
        if cohort.training is None:
            return up["h"]
        lr = cohort.training.lr_at(cohort.round, cohort.rounds)
        term = self._term(up["delta"], up["weight"], lr)
        # A client's own term has other last digits.
        is_larger = up["h"] > term * (1 + 1e-9)
        return torch.where(is_larger, term.to(up["h"]), up["h"])


def _power(values: Tensor, exponent: float) -> Tensor:
    """`values ** exponent` [S]; a client's bits do not depend on the others'."""
    return map_rows(lambda v: v**exponent, values[:, None])[:, 0]
