"""Ditto and MR-MTL: a model per client, pulled towards a common one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pflcore.algorithms.base import Payload, Tensors
from pflcore.algorithms.fedopt import FedOpt
from pflcore.ops.kinds import Count, NonNegative
from pflcore.train.bridge import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class Ditto(FedOpt):
    """Li et al. 2021, Algorithm 1 (the solver with a personal pass): a personal model pulled towards the global one.

    server: x [P] and the optimizer's state · client: v [P] · down: x (1 model) · up: delta (1 model).
    The client trains x as FedAvg does and v by `v -= personal_lr (grad(v) + lam (v - x))`, x as received. With every client in every round
    lam = 0 is Local. v starts at the x of the client's first round; until then the client is served x (Motley: a new client's v is x).
    The two passes shuffle separately (Motley; the original shares the batches). Batch norm's statistics are those of v.
    """

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # v is never mixed

    lam: NonNegative = 0.1  # pull towards the global model
    personal_lr: NonNegative | None = None  # step size of v; default: the run's
    personal_epochs: Count | None = None  # epochs of v; default: the run's

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return super().init(net, n)[0], {"v": net.w0}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        x = down["x"]
        delta = local.fit(x, stream="global", probe=True).w.sub_(x)  # v keeps Local's shuffle, so that lam = 0 is Local bit for bit
        v = local.fit(started(own["v"], x, local), prox=(self.lam, x), lr=self.personal_lr, epochs=self.personal_epochs).w
        return {"v": v}, {"delta": delta}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": started(own["v"], down["x"], local)}


@dataclass(frozen=True)
class MRMTL(FedOpt):
    """Mean-regularized multi-task learning (Hanzely and Richtarik 2020; Liu et al. 2022): personal models pulled towards their mean.

    server: x [P] · client: v [P] · down: x (1 model) · up: v's change (1 model). `v -= lr (grad(v) + lam (v - x))`, and x follows the
    mean of the changes: with every client in every round and the plain server step, x is the mean of the v, and lam = 0 is Local.
    v starts at the x of the client's first round; until then the client is served x.
    """

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # v is never mixed

    lam: NonNegative = 0.1  # pull towards the mean

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return super().init(net, n)[0], {"v": net.w0}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        start = started(own["v"], down["x"], local)
        v = local.fit(start, prox=(self.lam, down["x"])).w
        return {"v": v}, {"delta": v - start}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": started(own["v"], down["x"], local)}


def started(v: Tensor, x: Tensor, local: Local) -> Tensor:
    """The clients' own models `v` [S, P], and the shared `x` [S, P] for those who have none yet."""
    return torch.where(local.newcomers(v.device), x, v)
