"""FedNova: clients that take more steps weigh no more.

Symbols: S clients are in the cohort; a model has P parameters; x is the server's model,
`delta` are the updates, p_i the clients' shares, a_i the steps that a client's
gradients count for.
"""

from __future__ import annotations

import torch

from pflcore._device import to_device
from pflcore.algorithms._fedavg import ServerStep
from pflcore.algorithms._protocol import (
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
    momentum_steps,
    step_bounds,
)
from pflcore.train import Clients


@algorithm_options
class FedNova(ServerStep):
    """FedNova (Wang et al. 2020): updates are divided by the steps behind them.

    server: x [P] · client: nothing · down: x [S, P] (1 model) · up: delta [S, P] (1
    model) and steps [S] (a_i).

    `x <- x + server_lr * a * sum_i p_i delta_i / a_i` with `a = sum_i p_i a_i`, the
    effective number of steps. A client that takes t steps has `a_i = t`, and with
    momentum m `a_i = (t - m (1 - m^t) / (1 - m)) / (1 - m)`: the sum of the factors
    with which its gradients are in its update. t are the steps that it really took, of
    epochs over its samples or by `Training(steps=)`. Where all clients take equally
    many steps this is FedAvg. SGD's weight decay counts as part of the gradient.

    The rule is taken from the paper's abstract and first pages. FedLab computes the
    same rounds.

    The other options are those of `FedAvg`, without its mean.
    """

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        reason = "divides an update by the number of its steps of SGD"
        return super().traits._replace(fixed_training={"local_optimizer": reason})

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        client_state, up, fit = super().train(down, client_state, clients)
        steps = momentum_steps(fit.steps, clients.context.training.momentum)
        return client_state, {**up, "steps": steps}, fit

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        momentum = 0.0 if cohort.training is None else cohort.training.momentum
        fewest, most = (momentum_steps(t, momentum) for t in step_bounds(cohort))
        steps = Claim(torch.empty((), dtype=torch.float64), low=fewest, high=most)
        return {**super().uploads(state, down, cohort), "steps": steps}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        steps = up["steps"].cpu().double()
        mean = cohort.mean_weights(self.weighting)
        share = mean.weight[0]
        # Measured from the first client's, so that equal steps give exactly that number
        # and the bits of FedAvg.
        effective = steps[0] + share @ (steps - steps[0])
        weight = share * (effective / steps)
        step = MixingWeights(to_device(weight[None], up["delta"].device))
        return {"x": step.aggregate(up["delta"], state["x"], self.server_lr)[0]}, mean
