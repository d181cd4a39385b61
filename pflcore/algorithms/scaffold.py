"""SCAFFOLD: clients correct each gradient by what they know of the others' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Changes, Cohort, Mix, Payload, Tensors, Traits
from pflcore.check import Weighting
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Karimireddy et al. 2020, Algorithm 1: each step takes `gradient - c_i + c`.

    server: x, c [P] · client: c [P] · down: x, c [S, P] (2 models) · up: delta, control = c_i' -
    c_i [S, P] (2 models).
    `x <- x + server_lr * mean_S delta_i`, `c <- c + |S| / N * mean_S control_i`, so that `c =
    mean_N c_i` after every round.
    The new `c_i'` is, by `option`: "mean_grad" the mean minibatch gradient of the round (exact for
    every local optimizer; equals
    option II for plain SGD, also at a step size of 0); "II" `c_i - c + (x - y_i) / (sum of step
    sizes)`; "I" the full-batch
    gradient at x (with batch norm the mean of its minibatches'). With momentum option II divides by
    the effective number of steps, sum_k
    (1 - m^(K-k+1)) / (1 - m). SGD's weight decay counts as part of the gradient, and clipped
    gradients are what is averaged; option II is
    refused with AdamW, whose steps do not add up to gradients, and option I with clipping.
    `weighting="samples"` weighs x and c alike by n_i; then c is the n-weighted mean of the c_i
    under full participation only. A `defence`
    takes the place of both means, of the updates and of the control variates, each by itself; c is
    then no mean of the c_i. The run's
    `clip` shortens a client's step of c_i with its update, so that c stays their mean.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    option: Literal["mean_grad", "II", "I"] = "mean_grad"  # how a client renews its control variate

    @property
    def traits(self) -> Traits:
        traits = super().traits._replace(clipped=("control", "c"))
        if self.option == "II":
            return traits._replace(
                only_sgd="with option 'II' divides by the sum of SGD's step sizes"
            )
        return traits._replace(
            no_clip_grad="with option 'I' takes whole gradients" if self.option == "I" else ""
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, "c": torch.zeros_like(x0)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {k: state[k].expand(len(cohort.ids), -1) for k in ("x", "c")}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"c": torch.zeros_like(net.w0)[None]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        fit, new = self.corrected(down, own, clients)
        return {"c": new}, {"delta": fit.w.sub_(down["x"]), "control": new - own["c"]}, fit

    def corrected(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Fit, Tensor]:
        """Corrected local training and the clients' new control variates [S, P]."""
        x, c, t, lr = down["x"], down["c"], clients.setting.training, clients.lr
        mean = self.option == "mean_grad" or lr == 0
        fit = clients.fit(x, Objective(shift=c - own["c"]), mean_grad=mean)
        if self.option == "I":
            return fit, clients.grad(x) + t.gradient_decay * x
        if mean:  # of option II the limit at a step size of 0
            return fit, fit.grad
        steps, m = fit.steps[:, None], t.momentum
        steps = steps / (1 - m) - m * (1 - m**steps) / (1 - m) ** 2  # the plain number where m is 0
        return fit, own["c"] - c + (x - fit.w) / (steps * lr).to(x)

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        changes, mix = super().update(state, up, cohort)
        rows, mean = self.defended(up["control"], cohort)
        c = mean.of(rows, state["c"], len(cohort.ids) / cohort.n)[0]
        return {**changes, "c": c}, mix

    def grow(self, state: Tensors, n: int) -> Tensors:
        return {**state, "c": state["c"] * (n / (n + 1))}  # the mean of one more c_i, which is 0
