"""FedDyn: clients whose stationary points become those of the whole loss.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; x
is the server's model and h its state, g_i a client's gradient; `delta` are the updates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore.algorithms._fedavg import ServerStep
from pflcore.algorithms._protocol import (
    Cohort,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    algorithm_options,
)
from pflcore.check import PositiveFloat, Weighting
from pflcore.train import Clients, Net, Objective


@algorithm_options
class FedDyn(ServerStep):
    """FedDyn (Acar et al. 2021): local losses that agree with the whole loss.

    server: x, h [P] · client: g [P] (its gradient, by the model that it trained last) ·
    down: x [S, P] (1 model) · up: delta [S, P] (1 model).

    Client i minimises `F_i(w) - <g_i, w> + alpha / 2 * |w - x|^2` from x,
    by the run's optimizer; then `g_i <- g_i - alpha delta_i`. The server takes `h <- h
    - alpha / N * sum_S delta_i` and `x <- x + server_lr * (mean_S delta_i - h / alpha)`
    with N all clients. g and h start at 0, and h is the mean of the g_i of all N
    clients, also of those that are absent.

    With a small alpha clients train as FedAvg's do, but the server does not: with all
    clients `-h / alpha` is the sum of all mean updates so far, which is a momentum that
    never decays.

    The rule is taken from the paper's abstract and first pages. Deviation from the
    authors' code: there client i's alpha is multiplied by the mean number of samples
    over its own, so that the rounds are the same where all clients have equally many.
    FL-bench computes the same rounds with `weighting="samples"`, where its weight decay
    is alpha (it leaves that part of the gradient to it) and no gradient is longer than
    its `max_grad_norm` of 10.

    The other options are those of `FedAvg`, without its mean.

    Args:
        alpha: Strength of the pull towards x. The steps are stable only while
            `lr_of_training * alpha < 2`.
        weighting: Shares of the clients in the mean of x: "uniform" or "samples". h is
            uniform in both.
    """

    alpha: PositiveFloat = 0.1
    weighting: Weighting = "uniform"

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        return super().traits._replace(clipped_with_update=("g",), mean_state=("h",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, "h": torch.zeros_like(x0)}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"g": torch.zeros_like(net.w0)[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        g = client_state["g"]
        fit = clients.fit(x, Objective(prox=(self.alpha, x), shift=-g))
        delta = fit.w.sub_(x)
        return {"g": g - self.alpha * delta}, {"delta": delta}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        delta = up["delta"]
        share = len(cohort.ids) / cohort.num_trainable
        uniform = cohort.mean_weights("uniform")
        h = uniform.aggregate(delta, state["h"], -self.alpha * share)[0]
        mean = cohort.mean_weights(self.weighting)
        step = mean.aggregate(delta)[0] - h / self.alpha
        return {"x": state["x"] + self.server_lr * step, "h": h}, mean
