"""Ditto and MR-MTL: a model per client, pulled towards a common one."""

from __future__ import annotations

from dataclasses import dataclass

from pflcore.algorithms.base import Payload, Tensors
from pflcore.algorithms.fedopt import FedOpt
from pflcore.local import Local
from pflcore.local.net import Net


@dataclass(frozen=True)
class Ditto(FedOpt):
    """Li et al. 2021, Algorithm 1 (the solver with a personal pass): a personal model pulled towards the global one.

    server: x [P] and the optimizer's state · client: v [P] (starts at x's start) · down: x (1 model) · up: delta (1 model).
    The client trains x as FedAvg does and v by `v -= personal_lr (grad(v) + lam (v - x))`, x as received. lam = 0 is Local.
    The two passes shuffle separately (Motley; the original shares the batches).
    """

    lam: float = 0.1  # pull towards the global model
    personal_lr: float | None = None  # step size of v; default: the run's
    personal_epochs: int | None = None  # epochs of v; default: the run's

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lam >= 0:
            raise ValueError(f"lam: expected a number >= 0, got {self.lam}.")
        if self.personal_epochs is not None and self.personal_epochs < 1:
            raise ValueError(f"personal_epochs: expected at least 1, or None for the run's, got {self.personal_epochs}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return super().init(net, n)[0], {"v": net.w0}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        x = down["x"]
        delta = local.fit(x, stream="global").w - x  # v keeps Local's shuffle, so that lam = 0 is Local bit for bit
        v = local.fit(own["v"], prox=(self.lam, x), lr=self.personal_lr, epochs=self.personal_epochs).w
        return {"v": v}, {"delta": delta}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": own["v"]}


@dataclass(frozen=True)
class MRMTL(FedOpt):
    """Mean-regularized multi-task learning (Hanzely and Richtarik 2020; Liu et al. 2022): personal models pulled towards their mean.

    server: x [P] · client: v [P] · down: x (1 model) · up: v's change (1 model). `v -= lr (grad(v) + lam (v - x))`, and x follows the
    mean of the changes: with every client in every round and the plain server step, x is the mean of the v. lam = 0 is Local.
    """

    lam: float = 0.1  # pull towards the mean

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lam >= 0:
            raise ValueError(f"lam: expected a number >= 0, got {self.lam}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return super().init(net, n)[0], {"v": net.w0}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        v = local.fit(own["v"], prox=(self.lam, down["x"])).w
        return {"v": v}, {"delta": v - own["v"]}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": own["v"]}
