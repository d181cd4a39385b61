"""q-FedAvg: clients with a high loss weigh more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Tensors, only_sgd
from pflcore.data.ragged import onto
from pflcore.ops.kinds import NonNegative
from pflcore.train import Local, Training


@dataclass(frozen=True)
class QFedAvg(FedAvg):
    """Li et al. 2020 (q-FFL), Algorithm 2: clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x (1 model) · up: delta (1 model) and two scalars. With F_i the mean loss of the received
    x on client i's whole training set, L = 1 / (the clients' lr) and p the shares:
    `x += server_lr * sum p F^q delta / sum p (q F^(q-1) L |delta|^2 + F^q)`: the paper's sums, with one L cancelled.
    The paper samples clients by their size and sets p = 1: that is `weighting="uniform"`. q = 0 is FedAvg.
    Deviation: F is clamped to 1e-6 (at q < 1, F^(q-1) of a client with no loss would stop the server).
    """

    q: NonNegative = 0.001  # 0: FedAvg; larger: fairer

    def check_training(self, training: Training) -> None:
        if self.q > 0:
            only_sgd(self, training, "takes an update over the step size for a gradient", clip=True)

    def client(self, down: Tensors, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        f = (local.loss(down["x"]).double() + 1e-10).clamp(min=1e-6)
        delta = local.fit(down["x"]).w.sub_(down["x"])
        norm = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64) ** 2
        return own, {"delta": delta, "weight": f**self.q, "h": self.q * f ** (self.q - 1) * norm / (local.lr or 1) + f**self.q}

    def statistics(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensor:
        return (cohort.share * up["weight"].cpu())[None]

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        share = onto(cohort.share, up["h"].device).to(up["h"].dtype)
        weight = share * up["weight"] / (share * up["h"]).sum()
        return {**g, "x": ops.aggregate(up["delta"], weight[None], base=g["x"], lr=self.server_lr)[0]}
