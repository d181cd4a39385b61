"""SCAFFOLD: clients correct each gradient by what they know of the others' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Tensors, only_sgd
from pflcore.ops.kinds import Weighting
from pflcore.train import Training
from pflcore.train.bridge import Fit, Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class Scaffold(FedAvg, averages=True):
    """Karimireddy et al. 2020, Algorithm 1: each step takes `gradient - c_i + c`.

    server: x, c [P] · client: c [P] · down: x, c [S, P] (2 models) · up: delta, control = c_i' - c_i [S, P] (2 models).
    `x <- x + server_lr * mean_S delta_i`, `c <- c + |S| / N * mean_S control_i`, so that `c = mean_N c_i` after every round.
    The new `c_i'` is, by `option`: "mean_grad" the mean minibatch gradient of the round (exact for every local optimizer; equals
    option II for plain SGD, also at a step size of 0); "II" `c_i - c + (x - y_i) / (sum of step sizes)`; "I" the full-batch
    gradient at x (with batch norm the mean of its minibatches'). With momentum option II divides by the effective number of steps, sum_k
    (1 - m^(K-k+1)) / (1 - m). SGD's weight decay counts as part of the gradient, and clipped gradients are what is averaged; option II is
    refused with AdamW, whose steps do not add up to gradients, and option I with clipping.
    `weighting="samples"` weighs x and c alike by n_i; then c is the n-weighted mean of the c_i under full participation only. A `defence`
    takes the place of both means, of the updates and of the control variates, each by itself; c is then no mean of the c_i. The run's
    `clip` shortens a client's step of c_i with its update, so that c stays their mean.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    option: Literal["mean_grad", "II", "I"] = "mean_grad"  # how a client renews its control variate

    def check_training(self, training: Training) -> None:
        if self.option == "II":
            only_sgd(self, training, "with option 'II' divides by the sum of SGD's step sizes", clip=True)
        if self.option == "I" and training.clip_grad is not None:
            raise ValueError("clip_grad: Scaffold with option 'I' takes whole gradients; leave clip_grad out, or take option='mean_grad'.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return {"x": net.w0, "c": torch.zeros_like(net.w0)}, {"c": torch.zeros_like(net.w0)}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        return {k: g[k].expand(len(cohort.ids), -1) for k in ("x", "c")}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        fit, new = self.train(down, own, local)
        return {"c": new}, {"delta": fit.w.sub_(down["x"]), "control": new - own["c"]}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        x = ops.aggregate(*self.defended(up["delta"], cohort), base=g["x"], lr=self.server_lr)[0]
        return {**g, "x": x, "c": ops.aggregate(*self.defended(up["control"], cohort), base=g["c"], lr=len(cohort.ids) / cohort.n)[0]}

    def grown(self, g: Tensors, n: int) -> Tensors:
        return {**g, "c": g["c"] * (n / (n + 1))}  # the mean of one more c_i, which is 0

    def kept(self, new: Tensors, before: Tensors, factor: Tensor) -> Tensors:
        factor = factor.to(new["c"])  # so that c stays the mean of all c_i
        return {**new, "c": torch.where(factor < 1, before["c"] + factor * (new["c"] - before["c"]), new["c"])}

    def train(self, down: Payload, own: Tensors, local: Local) -> tuple[Fit, Tensor]:
        """Corrected local training and the clients' new control variates [S, P]."""
        x, c, t = down["x"], down["c"], local.setting.training
        fit = local.fit(x, shift=c - own["c"], want_grad=self.option == "mean_grad" or local.lr == 0)
        if self.option == "I":
            return fit, local.grad(x) + t.gradient_decay * x
        if self.option == "II" and local.lr > 0:  # its limit at 0 is the mean gradient
            steps, m = fit.lr_sum.double() / local.lr, t.momentum
            steps = steps / (1 - m) - m * (1 - m**steps) / (1 - m) ** 2  # the plain number where m is 0
            return fit, own["c"] - c + (x - fit.w) / (steps * local.lr).to(x)
        assert fit.grad is not None
        return fit, fit.grad
