"""Methods that pull local training towards an anchor, by a step along gradient + mu * (w - anchor):
FedProx, and personal models pulled towards a common one: MR-MTL, Ditto, pFedMe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.fedopt import FedOpt
from pflcore.algorithms.protocol import Payload, Tensors, Traits, plain_steps
from pflcore.check import Count, NonNegative
from pflcore.train import Clients, Fit, Net, Objective


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
