"""pFedMe: personal models by Moreau envelopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors, Traits, plain_steps
from pflcore.check import Count, NonNegative
from pflcore.train import Clients, Fit, Net


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """Dinh et al. 2020, Algorithm 1: each client's theta minimises f_i(theta) + lam / 2 |theta -
    w|^2; w follows all thetas.

    server: x [P] · client: theta [P] · down: x [S, P] · up: delta [S, P] (1 model).
    For every minibatch of the local epochs: `inner` steps theta <- theta - personal_lr (grad
    f(theta) + lam (theta - w)), then
    w <- w - lr_of_training lam (w - theta). The server's x <- (1 - beta) x + beta sum_i share_i
    w_i: `server_lr` is beta.
    theta goes on from where it was over the minibatches, and over the rounds too (`theta="keep"`)
    or from w at the start of each
    ("restart", the authors' code); in a client's first round it starts at w. Evaluated is theta, w
    for who has none yet.
    The run's momentum and weight decay play no part.
    Deviations: `weighting` is by samples, as in the authors' code (the paper: uniform); absent
    clients do not train, where their code
    trains everybody and averages the chosen; no extra decay of theta (their optimizer's mu =
    0.001).
    """

    lam: NonNegative = 1.0  # strength of the pull between theta and w
    inner: Count = 5  # the paper's K, steps towards the proximal point
    personal_lr: NonNegative = 0.01  # step size of theta
    theta: Literal["keep", "restart"] = "keep"  # a round starts from the last theta, or from w

    @property
    def traits(self) -> Traits:
        why = "takes its paper's own steps of SGD"
        # theta is never mixed
        return super().traits._replace(batch_norm=("local",), only_sgd=why, no_clip_grad=why)

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"theta": down["x"]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        def update(rows: Tensors, grad: Callable[..., Tensor], taken: Tensor) -> Tensors:
            w, theta = rows["w"], rows["theta"]
            for _ in range(self.inner):
                theta = theta - self.personal_lr * (grad(theta) + self.lam * (theta - w))
            return {"w": w - clients.lr * self.lam * (w - theta), "theta": theta}

        plain_steps(self, clients)
        x = down["x"]
        theta = x if self.theta == "restart" else own["theta"]
        fit = clients.each_batch({"w": x, "theta": theta}, update)
        return {"theta": fit.rows["theta"]}, {"delta": fit.w - x}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": own["theta"]}
