"""FedAMP and HeurFedAMP: each client is drawn to a mix of the models that are like its own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._latest import latest_models, with_uploads
from pflcore.algorithms.protocol import Algorithm, Changes, Cohort, Mix, Payload, Tensors, Traits
from pflcore.check import NonNegative, Positive, Share
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class FedAMP(Algorithm):
    """Huang et al. 2021, FedAMP: each client is drawn to u_i = sum_j xi_ij w_j, xi_ij = (alpha /
    sigma) exp(-|w_i - w_j|^2 / sigma).

    server: the latest models w [N, P] and xi [N, N] · client: w [P] · down: u [S, P] (1 model) ·
    up: w [S, P] (1 model).
    A client minimises F_i(w) + lam / (2 alpha) |w - u_i|^2 by local training from its own model, or
    from u_i with `start="u"`.
    xi_ii is what is left of 1. Where the others' weights exceed 1 (alpha > sigma / (N - 1) and
    models that are close) it would be
    negative, an extrapolation that swaps models: they are scaled to sum to 1, counted in the
    record's "rescaled";
    `self_weight="literal"` leaves them. An absent client's latest model still gives; the record's
    "last" says from which round.
    Deviation: the paper has everybody in every round. `server_lr` and `weighting` play no part.
    """

    # scale of the squared distances: larger, and all clients attract alike
    sigma: Positive = 1.0
    # step size of the attraction: others weigh alpha / sigma, the pull is lam / alpha
    alpha: Positive = 1.0
    # strength of the pull towards u_i
    lam: NonNegative = 0.1
    start: Literal["own", "u"] = "own"  # where local training starts: the client's own model, or u
    self_weight: Literal["safe", "literal"] = "safe"  # never negative, or 1 minus the rest

    traits = Traits(batch_norm=("local",), models={"w": "server.w"})  # own models are never mixed

    def init(self, x0: Tensor, n: int) -> Tensors:
        return latest_models(x0, n) | {"xi": torch.eye(n, dtype=torch.float64)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"u": ops.aggregate(state["w"], onto(state["xi"][cohort.ids], state["w"].device))}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        start = own["w"] if self.start == "own" else down["u"]
        fit = clients.fit(start, Objective(prox=(self.lam / self.alpha, down["u"])))
        return {"w": fit.w}, {"w": fit.w}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": own["w"]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        changes, new = with_uploads(state, up["w"], cohort)
        return {**changes, "xi": self.mixing(new["sqdist"], new["norm2"], new["last"] > 0)}, None

    def mixing(self, sqdist: Tensor, norm2: Tensor, gives: Tensor) -> Tensor:
        """xi [N, N] from squared distances [N, N], squared norms [N] and who has a model to give,
        bool [N]."""
        n = len(gives)
        usable = gives & ~torch.eye(n, dtype=torch.bool) & gives[:, None]
        xi = (self.alpha / self.sigma) * (-sqdist / self.sigma).exp() * usable
        total = xi.sum(1, keepdim=True)
        if self.self_weight == "safe" and bool((total > 1).any()):
            warnings.warn(
                "FedAMP: the others' weights exceed 1 and are scaled down; alpha <= sigma / "
                f"{n - 1} avoids it.",
                stacklevel=2,
            )
            xi = xi / total.clamp(min=1)
        return xi + (1 - xi.sum(1)).diag()

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """weights [N, N] (row i is what u_i mixes), last [N], rescaled: how many rows had to be
        scaled down."""
        rescaled = (state["xi"].diagonal().abs() < 1e-12).sum()
        return {"weights": state["xi"], "last": state["last"], "rescaled": rescaled}


@dataclass(frozen=True)
class HeurFedAMP(FedAMP):
    """Huang et al. 2021, HeurFedAMP: the others share 1 - xi_ii by a softmax of sigma cos(w_i,
    w_j); xi_ii is fixed.

    State and messages are FedAMP's. The cosine of a model of norm 0 counts as 0. A lone client
    mixes itself.
    """

    # sharpness of the softmax of cosines
    sigma: Positive = 5.0
    xi_self: Share = 0.0  # xi_ii; 0: 1 / N

    def mixing(self, sqdist: Tensor, norm2: Tensor, gives: Tensor) -> Tensor:
        n, length = len(gives), (norm2[:, None] * norm2).sqrt()
        inner = (norm2[:, None] + norm2 - sqdist) / 2
        cosine = torch.where(length > 0, inner / length, 0.0)
        usable = gives & ~torch.eye(n, dtype=torch.bool) & gives[:, None]
        share = (self.sigma * cosine).masked_fill(~usable, -torch.inf).softmax(1)
        share = share.nan_to_num(0.0)  # NaN: nobody else to mix
        xi = (1 - (self.xi_self or 1 / n)) * share
        return xi + (1 - xi.sum(1)).diag()
