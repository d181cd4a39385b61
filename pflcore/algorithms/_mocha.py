"""MOCHA: a server that keeps all models and learns the relation between their tasks.

Symbols: S clients are in a round's cohort, N in the federation, a task t each; a model
has P parameters; Omega [N, N] is the relation between the tasks, Sigma its inverse; F_t
is the mean loss of a client on its training samples.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Changes,
    Claim,
    Cohort,
    Payload,
    RowUpdate,
    Stop,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    step_bounds,
)
from pflcore.check import Fraction, NonNegativeFloat, PositiveInt
from pflcore.train import Clients, Net, Objective


@algorithm_options
class Mocha(Algorithm):
    """MOCHA (Smith et al. 2017) in primal form: learns models and their relation.

    server: w [N, P], omega [N, N] (Sigma with relation="sigma") · client: w [P] (its
    row) · down: pull [S, P] (`sum_{j != t} Omega_tj w_j`, 1 model), o [S, 1]
    (Omega_tt), and in a round with a client that joins late start [S, P] (the mean of
    the models so far) · up: w [S, P] (1 model), and steps and lr [S, 1] (the number of
    its steps, and their size).

    A client is a task t, and the rows of W [N, P] are the clients' models. MOCHA
    minimises `sum_t F_t(w_t) + (lam / 2) tr(W^T Omega W)` over W and the relation Omega
    [N, N], in turns:

    - One round is one inner iteration: a local epoch of `w_t -= lr (grad + lam
      (Omega_tt w_t + pull_t))`. The pull `pull_t = sum_{j != t} Omega_tj w_j` keeps the
      other models frozen.
    - Every `outer` rounds the server computes `Sigma = (W W^T)^(1/2) / trace` and
      `Omega = ((1 - delta) Sigma + delta I / N)^-1`. At first Sigma is I / N.

    The pull is an explicit block-Jacobi step. It is stable only while the largest
    eigenvalue of `e^(1/2) Omega e^(1/2)` is below 2, with `e_t = (1 - (1 - lr lam
    Omega_tt)^steps) / Omega_tt`. That is checked after every update of Omega, by
    the steps that the clients upload. In every round, `lr lam Omega_tt` has to be below
    2. Otherwise the run stops with a sentence; but a client whose step size is larger
    than the others' is left out instead.

    Decision where the paper is silent: a client that joins late starts from the mean of
    the models so far, and is evaluated with it until then.

    Args:
        lam: Strength of the regulariser. It is not comparable with papers that sum
            losses over samples.
        delta: Share of I / N in the relation, above 0, at most 1. Omega's condition
            number is at most N / delta.
        outer: Rounds between two updates of Omega.
        relation: Matrix that relates the tasks: "omega" is the paper's; "sigma" takes
            Sigma in its place, as Motley's code does. Motley's table can be had only
            with "sigma".
    """

    lam: NonNegativeFloat = 0.01
    delta: Fraction = 0.01
    outer: PositiveInt = 2
    relation: Literal["omega", "sigma"] = "omega"

    traits = Traits(
        batch_norm=("local",),  # every client is evaluated with a model of its own
        model_uploads={"w": "server.w"},
        fixed_training={
            "local_optimizer": "takes its regulariser and its test of stability from "
            "the sum of SGD's step sizes"
        },
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        identity = torch.eye(n, dtype=torch.float64, device=x0.device)
        omega = identity * n if self.relation == "omega" else identity / n
        return {"w": x0.repeat(n, 1), "omega": omega}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        w = state["w"]
        ids = cohort.ids
        column = to_device(ids[:, None], w.device)  # [S, 1]
        omega = state["omega"][column[:, 0]]  # [S, N]
        off_diagonal = omega.scatter(1, column, 0.0)
        down = {
            "pull": ops.aggregate(w, off_diagonal),
            "o": omega.gather(1, column),
        }
        has_participated = cohort.has_participated
        if bool(cohort.is_new.any()) and bool(has_participated.any()):
            mean_model = w[to_device(has_participated, w.device)].mean(0)
            down["start"] = mean_model.expand(len(ids), -1)
        return down

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        # "start" is the mean of the models so far. The first round has no "start".
        return {"w": down.get("start", net.w0[None])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        lr = clients.lr
        w = client_state["w"]
        largest = lr * self.lam * float(down["o"].max())
        self.stop_if_unstable(clients.round, lr, largest)
        mu = (self.lam * down["o"]).to(w)[:, 0]
        pull = Objective(shift=self.lam * down["pull"], prox=(mu, torch.zeros_like(w)))
        fit = clients.fit(w, pull)
        steps = fit.steps[:, None].to(fit.w)
        upload = {"w": fit.w, "steps": steps, "lr": torch.full_like(steps, lr)}
        return {"w": fit.w}, upload, fit

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        number = state["w"].new_empty(1)
        lr = Claim(number, low=0)
        if cohort.training is not None:
            size = cohort.training.lr_at(cohort.round, cohort.rounds)
            lr = Claim(number, low=size, high=size)
        fewest, most = (t[:, None] for t in step_bounds(cohort))
        # A power that is not whole of a negative number would be NaN.
        steps = Claim(number, low=fewest, high=most, is_whole=True)
        return {**super().uploads(state, down, cohort), "steps": steps, "lr": lr}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        changes: Changes = {"w": RowUpdate(ids, up["w"])}
        if cohort.round % self.outer == 0:
            rows = to_device(ids, up["w"].device)
            models = state["w"].index_copy(0, rows, up["w"])
            omega = self._relation_of_trainable(state, models, cohort)
            lr = up["lr"][:, 0].double()
            steps = up["steps"][:, 0].double()
            self.check_stability(omega[rows][:, rows], lr, steps, cohort)
            changes["omega"] = omega
        return changes, None

    def _relation_of_trainable(
        self, state: Tensors, models: Tensor, cohort: Cohort
    ) -> Tensor:
        """The relation [N, N] of the models; clients that cannot train keep theirs."""
        ids = to_device(cohort.trainable_clients, models.device)
        omega = state["omega"].clone()
        omega[ids[:, None], ids] = task_relation(models[ids], self.delta, self.relation)
        return omega

    def check_stability(
        self,
        omega: Tensor,  # [S, S] of the cohort
        lr: Tensor,  # [S] step sizes
        steps: Tensor,  # [S]
        cohort: Cohort,
    ) -> None:
        """Raises Stop where the next exchanges would amplify the models.

        Raises BadUpload instead where some step sizes are larger than the others'.
        """
        eigenvalue = self._largest_eigenvalue(omega, lr, steps)
        usual = lr.median()  # the clients of a run have one step size
        larger = lr > usual * (1 + 1e-6)
        if not eigenvalue < 2 and bool(larger.any()):
            text = (
                "its step size is {:g}, the others' is {:g}, and MOCHA is unstable "
                "with it."
            )
            ids = cohort.ids[larger.cpu()].tolist()
            step_sizes = zip(ids, lr[larger].tolist(), strict=True)
            raise BadUpload({i: text.format(own, usual) for i, own in step_sizes})
        self.stop_if_unstable(cohort.round, lr.max(), eigenvalue)

    def _largest_eigenvalue(self, omega: Tensor, lr: Tensor, steps: Tensor) -> float:
        """Largest eigenvalue of an exchange, or of a local step that is unstable."""
        diagonal = omega.diagonal()
        shrink = lr * self.lam * diagonal
        of_step: float = shrink.max().item()
        if not of_step < 2:  # (1 - shrink)^steps could overflow
            return of_step
        e = (1 - (1 - shrink) ** steps) / diagonal
        root = e.clamp(min=0).sqrt()
        exchange = root[:, None] * omega * root
        largest: float = torch.linalg.eigvalsh(exchange).max().item()
        return max(of_step, largest)

    def stop_if_unstable(
        self,
        round_number: int,
        lr: float | Tensor,  # a tensor [] is copied from a GPU for the message only
        eigenvalue: float,
    ) -> None:
        """Raises Stop for an eigenvalue of 2 or more, or NaN."""
        if not eigenvalue < 2:
            raise Stop(
                f"MOCHA is unstable from round {round_number} on: with lr {lr:g}, lam "
                f"{self.lam:g} and delta {self.delta:g} an exchange amplifies the "
                f"models (eigenvalue {eigenvalue:.3g}, which must be below 2); lower "
                "lr or lam, or raise delta."
            )


def task_relation(w: Tensor, delta: float, kind: str = "omega") -> Tensor:
    """MOCHA's Omega or Sigma [N, N] of the models `w` [N, P], float64.

    `Sigma = (W W^T)^(1/2) / trace` and `Omega = ((1 - delta) Sigma + delta I / N)^-1`.
    W W^T has rank P at most, so its eigenvalues are clamped to 1e-8 from below
    (Motley's value); delta bounds Omega.
    """
    values, vectors = torch.linalg.eigh(w.double() @ w.double().T)
    root = values.clamp(min=1e-8).sqrt()
    eigenvalues = root / root.sum()
    if kind == "omega":
        eigenvalues = 1 / ((1 - delta) * eigenvalues + delta / len(w))
    matrix: Tensor = (vectors * eigenvalues) @ vectors.T
    return matrix
