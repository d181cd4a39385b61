"""MOCHA: a model per client and a learned relation between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Stop, Tensors, only_sgd, written
from pflcore.data.ragged import onto
from pflcore.ops.kinds import Count, Fraction, NonNegative
from pflcore.train import Local, Training
from pflcore.train.net import Net


@dataclass(frozen=True)
class Mocha(FedAvg):
    """MOCHA (Smith et al. 2017) in primal form: min over W, Omega of `sum_t mean_loss_t(w_t) + (lam / 2) tr(W^T Omega W)`.

    server: w [N, P], omega [N, N], seen [N] · client: w [P] (its row) · down: `sum_{j != t} Omega_tj w_j` (1 model) and a scalar · up: w
    (1 model) and two scalars. One round is one inner iteration: a local epoch of `w_t -= lr (grad + lam (Omega_tt w_t + pull_t))`, the
    others
    frozen. Every `outer` rounds `Sigma = (W W^T)^(1/2) / trace` and `Omega = ((1 - delta) Sigma + delta I / N)^-1`; at first Sigma = I / N.

    `relation="sigma"` puts Sigma where Omega belongs, which is what Motley's code does (its table cannot be had otherwise).
    The pull is an explicit block-Jacobi step, stable only while the largest eigenvalue of `e^(1/2) Omega e^(1/2)` is below 2,
    `e_t = (1 - (1 - lr lam Omega_tt)^steps) / Omega_tt`: checked after every update of Omega, and in every round lr lam Omega_tt < 2;
    where it fails the run stops with a sentence.
    Decision where the paper is silent: a client that joins late starts from the mean of the models so far, and is served it until then.
    lam is not comparable with papers that sum over samples. Weights of the clients (`weighting`) play no part, nor does `server_lr`.
    """

    lam: NonNegative = 0.01  # strength of the regulariser
    delta: Fraction = 0.01  # how much of I / N is mixed into Sigma: Omega's condition number is at most N / delta
    outer: Count = 2  # rounds between two updates of Omega
    relation: Literal["omega", "sigma"] = "omega"

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # everybody trains a model of its own
    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")

    def check_training(self, training: Training) -> None:
        only_sgd(self, training, "takes its regulariser and its test of stability from the sum of SGD's step sizes", clip=True)

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        eye = torch.eye(n, dtype=torch.float64, device=net.w0.device)
        g = {"w": net.w0.expand(n, -1), "omega": eye * n if self.relation == "omega" else eye / n}
        return g | {"seen": torch.zeros(n, dtype=torch.bool)}, {"w": net.w0}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        new, start = g["seen"].any() & ~g["seen"][cohort.ids], {}  # they start from the mean, which is sent where somebody needs it
        if bool(new.any()):
            start = {"start": g["w"][onto(g["seen"], g["w"].device)].mean(0).expand(len(new), -1)}
        ids = onto(cohort.ids, g["omega"].device)
        rows = g["omega"][ids]  # [S, N]
        diagonal = rows.gather(1, ids[:, None])  # [S, 1]
        others = rows.scatter(1, ids[:, None], 0.0)
        return {"pull": ops.aggregate(g["w"], others), "o": diagonal, **start}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        shrink = local.lr * self.lam * float(down["o"].max())
        if not shrink < 2:
            raise self.unstable(local.round, local.lr, shrink)
        mu = (self.lam * down["o"]).to(own["w"])
        fit = local.fit(self.start(down, own, local), shift=self.lam * down["pull"], prox=(mu[:, 0], torch.zeros_like(own["w"])))
        return {"w": fit.w}, {"w": fit.w, "lr_sum": fit.lr_sum, "lr": torch.full_like(fit.lr_sum, local.lr)}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        w, omega = g["w"], g["omega"]
        with written(w, cohort.ids, up["w"]):
            if cohort.round % self.outer == 0:
                ids = onto(cohort.ids, w.device)
                omega = relation(w, self.delta, self.relation)
                self.check(omega[ids][:, ids], up["lr"][:, 0].double(), up["lr_sum"][:, 0].double(), cohort.round)
            return {"w": w, "omega": omega, "seen": g["seen"].index_fill(0, cohort.ids, True)}

    def start(self, down: Payload, own: Tensors, local: Local) -> Tensor:
        """The clients' own models [S, P], the mean of the others' for those who have none yet."""
        return torch.where(local.newcomers(own["w"].device), down["start"], own["w"]) if "start" in down else own["w"]

    def check(self, omega: Tensor, lr: Tensor, lr_sum: Tensor, round: int) -> None:
        """Stop where the next exchanges would amplify W."""
        o = omega.diagonal()
        shrink = lr * self.lam * o
        e = (1 - (1 - shrink) ** (lr_sum / lr.clamp(min=1e-300)).round()) / o
        root = e.clamp(min=0).sqrt()
        value = max(shrink.max().item(), torch.linalg.eigvalsh(root[:, None] * omega * root).max().item())
        if not value < 2:
            raise self.unstable(round, lr.max().item(), value)

    def unstable(self, round: int, lr: float, value: float) -> Stop:
        return Stop(
            f"MOCHA is unstable from round {round} on: with lr {lr:g}, lam {self.lam:g} and delta {self.delta:g} "
            f"an exchange amplifies the models (eigenvalue {value:.3g}, which must be below 2); "
            "lower lr or lam, or raise delta."
        )

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": self.start(down, own, local)}


def relation(w: Tensor, delta: float, kind: str = "omega", eps: float = 1e-8) -> Tensor:
    """Sigma = (W W^T)^(1/2) / trace [N, N] float64 of `w` [N, P], or Omega = ((1 - delta) Sigma + delta I / N)^-1.

    W W^T has rank P at most: its eigenvalues are clamped to `eps` from below (Motley's value), and delta bounds Omega.
    """
    rows = w.double()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    root = values.clamp(min=eps).sqrt()
    root = root / root.sum()
    if kind == "omega":
        root = 1 / ((1 - delta) * root + delta / len(w))
    matrix: Tensor = (vectors * root) @ vectors.T
    return matrix
