"""q-FedAvg: clients with a high loss weigh more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg, Undefended
from pflcore.algorithms.protocol import Changes, Cohort, Mix, Payload, Tensors, Traits
from pflcore.check import NonNegative
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit


@dataclass(frozen=True)
class QFedAvg(Undefended, FedAvg):
    """Li et al. 2020 (q-FFL), Algorithm 2: clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x (1 model) · up: delta (1 model) and two scalars. With
    F_i the mean loss of the received
    x on client i's whole training set, L = 1 / (the clients' lr) and p the shares:
    `x += server_lr * sum p F^q delta / sum p (q F^(q-1) L |delta|^2 + F^q)`: the paper's sums, with
    one L cancelled.
    The paper samples clients by their size and sets p = 1: that is `weighting="uniform"`. q = 0 is
    FedAvg.
    Deviation: F is clamped to 1e-6 (at q < 1, F^(q-1) of a client with no loss would stop the
    server).
    """

    q: NonNegative = 0.001  # 0: FedAvg; larger: fairer

    @property
    def traits(self) -> Traits:
        why = "takes an update over the step size for a gradient" if self.q > 0 else ""
        return super().traits._replace(only_sgd=why)

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        f = (clients.loss(down["x"]).double() + 1e-10).clamp(min=1e-6)
        own, up, fit = super().train(down, own, clients)
        norm = torch.linalg.vector_norm(up["delta"], dim=1, dtype=torch.float64) ** 2
        h = self.q * f ** (self.q - 1) * norm / (clients.lr or 1) + f**self.q
        return own, {**up, "weight": f**self.q, "h": h}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        share = onto(cohort.mean(self.weighting).weight, up["h"].device).to(up["h"])
        weight: Tensor = share * up["weight"]
        mix = Mix(weight / (share * up["h"]).sum())
        x = mix.of(up["delta"], state["x"], self.server_lr)[0]
        return {"x": x}, Mix(weight.cpu())
