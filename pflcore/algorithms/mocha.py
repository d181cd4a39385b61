"""MOCHA: a model per client and a learned relation between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.protocol import (
    Algorithm,
    Changes,
    Cohort,
    Mix,
    Payload,
    Rows,
    Stop,
    Tensors,
    Traits,
)
from pflcore.check import Count, Fraction, NonNegative
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class Mocha(Algorithm):
    """MOCHA (Smith et al. 2017) in primal form: min over W, Omega of `sum_t mean_loss_t(w_t) + (lam
    / 2) tr(W^T Omega W)`.

    server: w [N, P], omega [N, N], seen [N] · client: w [P] (its row) · down: `sum_{j != t}
    Omega_tj w_j` (1 model) and a scalar · up: w
    (1 model) and two scalars. One round is one inner iteration: a local epoch of `w_t -= lr (grad +
    lam (Omega_tt w_t + pull_t))`, the
    others
    frozen. Every `outer` rounds `Sigma = (W W^T)^(1/2) / trace` and `Omega = ((1 - delta) Sigma +
    delta I / N)^-1`; at first Sigma = I / N.

    `relation="sigma"` puts Sigma where Omega belongs, which is what Motley's code does (its table
    cannot be had otherwise). The pull is an explicit block-Jacobi step, stable only while the
    largest eigenvalue of `e^(1/2) Omega e^(1/2)` is below 2, `e_t = (1 - (1 - lr lam
    Omega_tt)^steps) / Omega_tt`: checked after every update of Omega, and in every round lr lam
    Omega_tt < 2; where it fails the run stops with a sentence. Decision where the paper is silent:
    a client that joins late starts from the mean of the models so far, and is served it until then.
    lam is not comparable with papers that sum over samples. Weights of the clients (`weighting`)
    play no part, nor does `server_lr`.
    """

    lam: NonNegative = 0.01  # strength of the regulariser
    # how much of I / N is mixed into Sigma: Omega's condition is <= N / delta
    delta: Fraction = 0.01
    outer: Count = 2  # rounds between two updates of Omega
    # what relates the tasks: omega, or sigma in its stead, as in Motley's code
    relation: Literal["omega", "sigma"] = "omega"

    traits = Traits(
        batch_norm=("local",),  # everybody trains a model of its own
        models={"w": "server.w"},
        only_sgd="takes its regulariser and its test of stability from the sum of SGD's step sizes",
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        eye = torch.eye(n, dtype=torch.float64, device=x0.device)
        omega = eye * n if self.relation == "omega" else eye / n
        return {"w": x0.repeat(n, 1), "omega": omega, "seen": torch.zeros(n, dtype=torch.bool)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        w, seen = state["w"], state["seen"]
        start: Tensors = {}
        if bool(seen.any()) and not bool(seen[cohort.ids].all()):  # sent where somebody needs it
            start = {"start": w[onto(seen, w.device)].mean(0).expand(len(cohort.ids), -1)}
        ids = onto(cohort.ids, state["omega"].device)
        rows = state["omega"][ids]  # [S, N]
        others = rows.scatter(1, ids[:, None], 0.0)
        return {"pull": ops.aggregate(w, others), "o": rows.gather(1, ids[:, None]), **start}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": down.get("start", net.w0[None])}  # from the mean of the models so far

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        lr = clients.lr
        shrink = lr * self.lam * float(down["o"].max())
        if not shrink < 2:
            raise self.unstable(clients.round, lr, shrink)
        mu = (self.lam * down["o"]).to(own["w"])[:, 0]
        pull = Objective(shift=self.lam * down["pull"], prox=(mu, torch.zeros_like(own["w"])))
        fit = clients.fit(own["w"], pull)
        lr_sum = (fit.steps * lr)[:, None].to(fit.w)
        return {"w": fit.w}, {"w": fit.w, "lr_sum": lr_sum, "lr": torch.full_like(lr_sum, lr)}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": own["w"]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        ids = cohort.ids
        changes: Changes = {"w": Rows(ids, up["w"]), "seen": Rows(ids, ids >= 0)}
        if cohort.round % self.outer == 0:
            at = onto(ids, up["w"].device)
            omega = relation(state["w"].index_copy(0, at, up["w"]), self.delta, self.relation)
            lr, lr_sum = (up[k][:, 0].double() for k in ("lr", "lr_sum"))
            self.check(omega[at][:, at], lr, lr_sum, cohort.round)
            changes["omega"] = omega
        return changes, None

    def check(self, omega: Tensor, lr: Tensor, lr_sum: Tensor, round: int) -> None:
        """Stop where the next exchanges would amplify W, by omega [N, N] and step sizes [N]."""
        o = omega.diagonal()
        shrink = lr * self.lam * o
        e = (1 - (1 - shrink) ** (lr_sum / lr.clamp(min=1e-300)).round()) / o
        root = e.clamp(min=0).sqrt()
        largest = torch.linalg.eigvalsh(root[:, None] * omega * root).max().item()
        value = max(shrink.max().item(), largest)
        if not value < 2:
            raise self.unstable(round, lr.max().item(), value)

    def unstable(self, round: int, lr: float, value: float) -> Stop:
        return Stop(
            f"MOCHA is unstable from round {round} on: with lr {lr:g}, lam {self.lam:g} and delta "
            f"{self.delta:g} an exchange amplifies the models (eigenvalue {value:.3g}, which must "
            "be below 2); lower lr or lam, or raise delta."
        )


def relation(w: Tensor, delta: float, kind: str = "omega", eps: float = 1e-8) -> Tensor:
    """Sigma = (W W^T)^(1/2) / trace [N, N] float64 of `w` [N, P], or Omega = ((1 - delta) Sigma +
    delta I / N)^-1.

    W W^T has rank P at most: its eigenvalues are clamped to `eps` from below (Motley's value), and
    delta bounds Omega.
    """
    rows = w.double()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    root = values.clamp(min=eps).sqrt()
    root = root / root.sum()
    if kind == "omega":
        root = 1 / ((1 - delta) * root + delta / len(w))
    matrix: Tensor = (vectors * root) @ vectors.T
    return matrix
