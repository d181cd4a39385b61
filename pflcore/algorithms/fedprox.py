"""Methods that pull local training towards an anchor: a step along gradient + mu * (w - anchor)."""

from __future__ import annotations

from dataclasses import dataclass

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors
from pflcore.check import NonNegative
from pflcore.train import Clients, Fit, Objective


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Li et al. 2020, Algorithm 2: clients minimise `F_i(w) + mu / 2 * |w - x|^2`, x being the
    model they received.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model). The server is
    FedAvg's.
    Deviation: the paper samples clients with probability n_i / n and averages uniformly; here
    sampling is uniform and the average
    is weighted by n_i, as in the authors' code. mu = 1 is what the FedDWA and WAFFLe papers found
    best for it. The explicit step is stable
    only while `lr_of_training * mu < 2`.
    """

    mu: NonNegative = 1.0  # strength of the pull towards x; 0 is FedAvg

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        x = down["x"]
        fit = clients.fit(x, Objective(prox=(self.mu, x)))
        return own, {"delta": fit.w.sub_(x)}, fit
