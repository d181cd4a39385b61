"""Methods whose aggregation weights come from how alike the clients' models or updates are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Tensors
from pflcore.data.ragged import onto
from pflcore.ops.kinds import NonNegative, Whole
from pflcore.train import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class WeightErosion(FedAvg):
    """Grimberg et al. 2020, Algorithm 1, with the updates of an epoch of local SGD as gradients (Gengler et al. 2020).

    server: x [P], alpha [N] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model), passes [S].
    `alpha_i <- max(0, alpha_i - (1 + p_s * passes_i) * p_d * |delta_i - delta_target| / |delta_target|)`, from 1; then
    `x <- x + server_lr * sum_i alpha_i delta_i / sum_i alpha_i`. A weight of 0 is lost for good; an absent client keeps its own.
    `passes` is `floor((round - 1) * b / n_i)`, b the batch size ("samples", as printed), n_i / b in the place of n_i ("batches", the
    authors' code) or the epochs trained so far ("epochs").

    Decision where the papers are silent: without a `p_d` it is `1 / (0.8 * rounds * this round's median relative distance)`, at which the
    median client's weight runs out after 80 % of the rounds, however the distances grow; what a mean over the rounds so far lags behind.
    (Published values fit one data set, one model and one number of rounds.)
    """

    target: Whole = 0  # the client for whom the model is made
    p_d: NonNegative | None = None  # distance penalty; None: calibrated in every round (the paper: .006 to .0088 on MNIST, 100 rounds)
    p_s: NonNegative = 0.0  # size penalty: extra erosion of clients whose data have been seen often
    size_unit: Literal["samples", "batches", "epochs"] = "samples"  # how passes over a client's data are counted

    unused: ClassVar[tuple[str, ...]] = ("weighting",)

    @property
    def required(self) -> tuple[int, ...]:
        return (self.target,)

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return {"x": net.w0, "alpha": torch.ones(n, dtype=torch.float64)}, {}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        t, n = local.setting.training, local.size
        seen = (local.round - 1) * t.batch_size
        if self.size_unit == "epochs":
            passes = torch.full_like(n, (local.round - 1) * t.epochs)
        else:
            passes = seen // (n if self.size_unit == "samples" else -(-n // t.batch_size))
        return own, {"delta": local.fit(down["x"]).w.sub_(down["x"]), "passes": passes}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        distance, p_d = self.relative(up["delta"], cohort), self.p_d
        if p_d is None:
            others = distance[(cohort.ids != self.target) & (distance > 0) & distance.isfinite()]
            p_d = 1 / (0.8 * cohort.rounds * float(others.median())) if len(others) else 0.0
        loss = p_d * (1 + self.p_s * up["passes"].cpu().double()) * distance
        alpha = g["alpha"].clone()
        alpha[cohort.ids] = (alpha[cohort.ids] - loss.nan_to_num(0.0, posinf=math.inf)).clamp(min=0)  # 0 * inf is 0: nothing to erode by
        mix = alpha[cohort.ids] / alpha[cohort.ids].sum()
        x = ops.aggregate(up["delta"], onto(mix[None], g["x"].device), base=g["x"], lr=self.server_lr)[0]
        return {"x": x, "alpha": alpha}

    def statistics(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensor:
        return g["alpha"][None, cohort.ids]

    def relative(self, delta: Tensor, cohort: Cohort) -> Tensor:
        """`|delta_i - delta_target| / |delta_target|`, [S] float64 on the CPU; infinite where only the target stood still."""
        at = int((cohort.ids == self.target).nonzero())
        mine = delta[at : at + 1]
        distance = ops.pairwise_sqdist(mine, delta)[0].sqrt().cpu()
        size = ops.pairwise_sqdist(mine, torch.zeros_like(mine))[0].sqrt().cpu()
        return torch.where(distance > 0, distance / size, 0.0)

    def report(self, g: Tensors) -> Tensors:
        return {"weights": g["alpha"] / g["alpha"].sum()}
