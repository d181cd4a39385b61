"""Methods whose aggregation weights come from how alike the clients' models or updates are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.protocol import Algorithm, Changes, Cohort, Mix, Payload, Tensors, Traits
from pflcore.check import NonNegative, Whole
from pflcore.train import Clients, Fit


@dataclass(frozen=True)
class WeightErosion(Algorithm):
    """Grimberg et al. 2020, Algorithm 1, with the updates of an epoch of local SGD as gradients
    (Gengler et al. 2020).

    server: x [P], alpha [N] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model), passes
    [S].
    `alpha_i <- max(0, alpha_i - (1 + p_s * passes_i) * p_d * |delta_i - delta_target| /
    |delta_target|)`, from 1; then
    `x <- x + server_lr * sum_i alpha_i delta_i / sum_i alpha_i`. A weight of 0 is lost for good; an
    absent client keeps its own.
    `passes` is `floor((round - 1) * b / n_i)`, b the batch size ("samples", as printed), n_i / b in
    the place of n_i ("batches", the
    authors' code) or the epochs trained so far ("epochs").

    Decision where the papers are silent: without a `p_d` it is `1 / (0.8 * rounds * this round's
    median relative distance)`, at which the median client's weight runs out after 80 % of the
    rounds, however the distances grow; what a mean over the rounds so far lags behind. (Published
    values fit one data set, one model and one number of rounds.)
    """

    server_lr: NonNegative = 1.0  # step size of the server
    target: Whole = 0  # the client for whom the model is made
    p_d: NonNegative | None = None  # distance penalty; None: calibrated in every round (the paper:
    # .006 to .0088 on MNIST, 100 rounds)
    p_s: NonNegative = 0.0  # size penalty: extra erosion of clients whose data were seen often
    size_unit: Literal["samples", "batches", "epochs"] = "samples"  # how passes are counted

    @property
    def traits(self) -> Traits:
        return Traits(required=(self.target,))

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, "alpha": torch.ones(n, dtype=torch.float64)}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        own, up, fit = super().train(down, own, clients)
        t, n, before = clients.setting.training, clients.size, clients.round - 1
        if self.size_unit == "epochs":
            return own, {**up, "passes": torch.full_like(n, before * t.epochs)}, fit
        n = n if self.size_unit == "samples" else -(-n // t.batch_size)
        return own, {**up, "passes": before * t.batch_size // n}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        distance, p_d, ids = self.relative(up["delta"], cohort), self.p_d, cohort.ids
        if p_d is None:
            others = distance[(ids != self.target) & (distance > 0) & distance.isfinite()]
            p_d = 1 / (0.8 * cohort.rounds * float(others.median())) if len(others) else 0.0
        loss = p_d * (1 + self.p_s * up["passes"].cpu().double()) * distance
        loss = loss.nan_to_num(0.0, posinf=math.inf)  # 0 * inf is 0: nothing to erode by
        mine = (state["alpha"][ids] - loss).clamp(min=0)
        mix = Mix((mine / mine.sum())[None])
        x = mix.of(up["delta"], state["x"], self.server_lr)[0]
        return {"x": x, "alpha": state["alpha"].index_copy(0, ids, mine)}, mix

    def relative(self, delta: Tensor, cohort: Cohort) -> Tensor:
        """`|delta_i - delta_target| / |delta_target|`, [S] float64 on the CPU; infinite where only
        the target stood still."""
        at = int((cohort.ids == self.target).nonzero())
        mine = delta[at : at + 1]
        distance = ops.pairwise_sqdist(mine, delta)[0].sqrt().cpu()
        size = ops.pairwise_sqdist(mine, torch.zeros_like(mine))[0].sqrt().cpu()
        return torch.where(distance > 0, distance / size, 0.0)

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        return {"weights": state["alpha"] / state["alpha"].sum()}
