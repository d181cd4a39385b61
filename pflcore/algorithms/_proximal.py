"""Clients that are pulled towards an anchor while they train, and Local.

Each local step is along `gradient + mu * (w - anchor)`. FedProx pulls the shared model
itself. MR-MTL, Ditto and pFedMe keep a personal model. LocalOnly keeps one that nothing
pulls.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; x
is the server's model, w a client's copy in training; v and theta are personal models;
`delta` are updates.
"""

from __future__ import annotations

from torch import Tensor

from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._fedopt import FedOpt
from pflcore.algorithms._protocol import (
    Algorithm,
    Cohort,
    GradientFn,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    algorithm_options,
    warn_unused_momentum,
)
from pflcore.check import (
    NonNegativeFloat,
    PositiveInt,
)
from pflcore.train import Clients, Net, Objective


@algorithm_options
class FedProx(FedAvg):
    """FedProx (Li et al. 2020): clients are pulled towards the model they received.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    Algorithm 2: clients minimise `F_i(w) + mu / 2 * |w - x|^2`, x being the model they
    received. The server is FedAvg's. The explicit step is stable only while
    `lr_of_training * mu < 2`.

    Deviation: the paper samples clients with probability n_i / n and averages
    uniformly. Here sampling is uniform and the average is weighted by n_i, as in the
    authors' code.

    The other options are those of `FedAvg`.

    Args:
        mu: Strength of the pull towards x; 0 is FedAvg. 1 is what the papers of FedDWA
            and WAFFLe (Hao et al. 2020) found best for FedProx.
    """

    mu: NonNegativeFloat = 1.0

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        objective = Objective(prox=(self.mu, x)) if self.mu else Objective()
        fit = clients.fit(x, objective)
        return client_state, {"delta": fit.w.sub_(x)}, fit


@algorithm_options
class MRMTL(FedOpt):
    """MR-MTL (Liu et al. 2022): personal models are pulled towards their mean.

    server: x [P] and the optimizer's state, see `FedOpt` · client: v [P] · down: x [S,
    P] (1 model) · up: delta [S, P] (1 model: v's change).

    Mean-regularized multi-task learning (also Hanzely and Richtarik 2020): `v -= lr
    (grad(v) + lam (v - x))`, and x follows the mean of the changes. With every client
    in every round and the plain server step, x is the mean of the v, and lam = 0 is
    Local. v starts at the x of the client's first round; until then the client is
    evaluated with x.

    The other options are those of `FedOpt`.

    Args:
        lam: Strength of the pull of a personal model towards the common one; 0 pulls
            nothing.
    """

    lam: NonNegativeFloat = 0.1

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        return super().traits._replace(batch_norm=("local",))  # v is never mixed

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"v": down["x"]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(client_state["v"], Objective(prox=(self.lam, down["x"])))
        return {"v": fit.w}, {"delta": fit.w - client_state["v"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": client_state["v"]}


@algorithm_options
class Ditto(MRMTL):
    """Ditto (Li et al. 2021): a personal model is pulled towards the global one.

    server: x [P] and the optimizer's state, see `FedOpt` · client: v [P] · down: x [S,
    P] (1 model) · up: delta [S, P] (1 model).

    Algorithm 1, the solver with a personal pass: the client trains x as FedAvg does,
    and v by `v -= personal_lr (grad(v) + lam (v - x))`, x as received. With every
    client in every round lam = 0 is Local. v starts at the x of the client's first
    round; until then the client is evaluated with x (Motley: a new client's v is x).
    Batch norm's statistics are those of v.

    Deviation: the two passes shuffle separately, as Motley's do. In the original they
    share the batches.

    The other options are those of `MRMTL`.

    Args:
        personal_lr: Step size of v; None takes the run's `lr`.
        personal_epochs: Epochs of v in a round; None takes the run's `epochs`.
    """

    personal_lr: NonNegativeFloat | None = None
    personal_epochs: PositiveInt | None = None

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        # v has Local's shuffle, so that lam = 0 is Local bit for bit.
        delta = clients.fit(x, stream="global").w.sub_(x)
        pull = Objective(prox=(self.lam, x))
        fit = clients.fit(
            client_state["v"], pull, lr=self.personal_lr, epochs=self.personal_epochs
        )
        return {"v": fit.w}, {"delta": delta}, fit


@algorithm_options
class PFedMe(FedAvg):
    """pFedMe (Dinh et al. 2020): w follows personal models that are pulled towards it.

    server: x [P] · client: theta [P] · down: x [S, P] · up: delta [S, P] (1 model).

    Algorithm 1: each client's theta minimises `f_i(theta) + lam / 2 |theta - w|^2`, and
    w follows all thetas. Every minibatch of the local epochs takes `inner_steps` steps
    `theta <- theta - personal_lr (grad f(theta) + lam (theta - w))`, then `w <- w -
    lr_of_training lam (w - theta)`. The server's step is `x <- (1 - beta) x + beta
    sum_i share_i w_i`; `server_lr` is beta. theta goes on from where it was, over the
    minibatches and over the rounds; in a client's first round it starts at w. A client
    is evaluated with theta, or with w while it has none. The run's momentum and weight
    decay have no effect.

    Deviations:

    - `weighting` is by samples, as in the authors' code (the paper: uniform).
    - Absent clients do not train. The authors' code trains all clients and averages the
      chosen ones.
    - theta has no further decay (the authors' optimizer has one, mu = 0.001).

    The other options are those of `FedAvg`.

    Args:
        lam: Strength of the pull between theta and w, the paper's lambda.
        inner_steps: Steps of theta for each minibatch, the paper's K.
        personal_lr: Step size of theta.
    """

    lam: NonNegativeFloat = 1.0
    inner_steps: PositiveInt = 5
    personal_lr: NonNegativeFloat = 0.01

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        reason = "takes its paper's own steps of SGD"
        return super().traits._replace(
            batch_norm=("local",),  # theta is never mixed
            fixed_training={"local_optimizer": reason, "clip_grad": reason},
        )

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"theta": down["x"]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            w = rows["w"]
            theta = rows["theta"]
            for _ in range(self.inner_steps):
                slope = grad(theta) + self.lam * (theta - w)
                theta = theta - self.personal_lr * slope
            return {"w": w - clients.lr * self.lam * (w - theta), "theta": theta}

        warn_unused_momentum(self, clients)
        x = down["x"]
        fit = clients.each_batch({"w": x, **client_state}, update)
        return {"theta": fit.rows["theta"]}, {"delta": fit.w - x}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": client_state["theta"]}


@algorithm_options
class LocalOnly(Algorithm):
    """Local: each client trains a model of its own and shares nothing.

    server: nothing · client: w [P] · down: nothing · up: nothing (0 models).

    `w_i <- w_i - lr grad F_i(w_i)`; all clients start from one common model. Personal
    models of every other algorithm are compared with it. It has no options.
    """

    traits = Traits(batch_norm=("local",))  # nothing is shared

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        return {}, None

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(client_state["w"])
        return {"w": fit.w}, {}, fit
