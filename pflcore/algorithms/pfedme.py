"""pFedMe: a shared model that is a good start, a proximal point away from everybody's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore.algorithms.base import FedAvg, Payload, Tensors, only_sgd, plain_steps
from pflcore.ops.kinds import Count, NonNegative
from pflcore.train import Training
from pflcore.train.bridge import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """Dinh et al. 2020, Algorithm 1: each client's theta minimises f_i(theta) + lam / 2 |theta - w|^2; w follows all thetas.

    server: x [P] · client: theta [P] · down: x [S, P] · up: delta [S, P] (1 model).
    For every minibatch of the local epochs: `inner` steps theta <- theta - personal_lr (grad f(theta) + lam (theta - w)), then
    w <- w - lr_of_training lam (w - theta). The server's x <- (1 - beta) x + beta sum_i share_i w_i: `server_lr` is beta.
    theta goes on from where it was over the minibatches, and over the rounds too (`theta="keep"`) or from w at the start of each
    ("restart", the authors' code); in a client's first round it starts at w. Evaluated is theta, w for who has none yet.
    The run's momentum and weight decay play no part.
    Deviations: `weighting` is by samples, as in the authors' code (the paper: uniform); absent clients do not train, where their code
    trains everybody and averages the chosen; no extra decay of theta (their optimizer's mu = 0.001).
    """

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # theta is never mixed

    lam: NonNegative = 1.0  # strength of the pull between theta and w
    inner: Count = 5  # the paper's K, steps towards the proximal point
    personal_lr: NonNegative = 0.01  # step size of theta
    theta: Literal["keep", "restart"] = "keep"  # a round starts from the client's last theta ("keep") or from w ("restart")

    def check_training(self, training: Training) -> None:
        only_sgd(self, training, "takes its paper's own steps of SGD")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return {"x": net.w0}, {"theta": net.w0}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        def update(rows: Tensors, grad: Callable[..., Tensor], k: int) -> Tensors:
            w, theta = rows["w"], rows["theta"]
            for _ in range(self.inner):
                theta = theta - self.personal_lr * (grad(theta) + self.lam * (theta - w))
            return {"w": w - local.lr * self.lam * (w - theta), "theta": theta}

        plain_steps(self, local)
        x = down["x"]
        theta = x if self.theta == "restart" else torch.where(local.newcomers(x.device), x, own["theta"])
        rows = local.each_batch({"w": x, "theta": theta}, update)
        return {"theta": rows["theta"]}, {"delta": rows["w"] - x}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": torch.where(local.newcomers(down["x"].device), down["x"], own["theta"])}
