"""Ditto and MR-MTL: a model per client, pulled towards a common one."""

from __future__ import annotations

from dataclasses import dataclass

from pflcore.algorithms.fedopt import FedOpt
from pflcore.algorithms.protocol import Payload, Tensors, Traits
from pflcore.check import Count, NonNegative
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class MRMTL(FedOpt):
    """Mean-regularized multi-task learning (Hanzely and Richtarik 2020; Liu et al. 2022): personal
    models pulled towards their mean.

    server: x [P] · client: v [P] · down: x (1 model) · up: v's change (1 model). `v -= lr (grad(v)
    + lam (v - x))`, and x follows the
    mean of the changes: with every client in every round and the plain server step, x is the mean
    of the v, and lam = 0 is Local.
    v starts at the x of the client's first round; until then the client is served x.
    """

    lam: NonNegative = 0.1  # pull towards the common model

    @property
    def traits(self) -> Traits:
        return super().traits._replace(batch_norm=("local",))  # v is never mixed

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"v": down["x"]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        fit = clients.fit(own["v"], Objective(prox=(self.lam, down["x"])))
        return {"v": fit.w}, {"delta": fit.w - own["v"]}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": own["v"]}


@dataclass(frozen=True)
class Ditto(MRMTL):
    """Li et al. 2021, Algorithm 1 (the solver with a personal pass): a personal model pulled
    towards the global one.

    server: x [P] and the optimizer's state · client: v [P] · down: x (1 model) · up: delta (1
    model).
    The client trains x as FedAvg does and v by `v -= personal_lr (grad(v) + lam (v - x))`, x as
    received. With every client in every round
    lam = 0 is Local. v starts at the x of the client's first round; until then the client is served
    x (Motley: a new client's v is x).
    The two passes shuffle separately (Motley; the original shares the batches). Batch norm's
    statistics are those of v.
    """

    personal_lr: NonNegative | None = None  # step size of v; None: the run's
    personal_epochs: Count | None = None  # epochs of v; None: the run's

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        x, lr, epochs = down["x"], self.personal_lr, self.personal_epochs
        # v keeps Local's shuffle, so that lam = 0 is Local bit for bit
        delta = clients.fit(x, stream="global").w.sub_(x)
        fit = clients.fit(own["v"], Objective(prox=(self.lam, x)), lr=lr, epochs=epochs)
        return {"v": fit.w}, {"delta": delta}, fit
