"""FedAMP and HeurFedAMP: each client is drawn to a mix of the models that are like its own, which is all the server needs of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._latest import latest_models, with_uploads
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Tensors, written
from pflcore.data.ragged import onto
from pflcore.ops.kinds import NonNegative, Positive, Share
from pflcore.train import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class FedAMP(FedAvg):
    """Huang et al. 2021, FedAMP: each client is drawn to u_i = sum_j xi_ij w_j, xi_ij = (alpha / sigma) exp(-|w_i - w_j|^2 / sigma).

    server: the latest models w [N, P] and xi [N, N] · client: w [P] · down: u [S, P] (1 model) · up: w [S, P] (1 model).
    A client minimises F_i(w) + lam / (2 alpha) |w - u_i|^2 by local training from its own model, or from u_i with `start="u"`.
    xi_ii is what is left of 1. Where the others' weights exceed 1 (alpha > sigma / (N - 1) and models that are close) it would be
    negative, an extrapolation that swaps models: they are scaled to sum to 1, counted in the record's "rescaled";
    `self_weight="literal"` leaves them. An absent client's latest model still gives; the record's "last" says from which round.
    Deviation: the paper has everybody in every round. `server_lr` and `weighting` play no part.
    """

    sigma: Positive = 1.0
    alpha: Positive = 1.0
    lam: NonNegative = 0.1
    start: Literal["own", "u"] = "own"  # local training starts from the client's "own" model or from "u"
    self_weight: Literal["safe", "literal"] = "safe"  # "safe": never negative, "literal": 1 minus the rest

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # the client's own model is never mixed
    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return latest_models(net, n) | {"xi": torch.eye(n, dtype=torch.float64)}, {"w": net.w0}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        return {"u": ops.aggregate(g["w"], onto(g["xi"][cohort.ids], g["w"].device))}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        start = own["w"] if self.start == "own" else down["u"]
        w = local.fit(start, prox=(self.lam / self.alpha, down["u"])).w
        return {"w": w}, {"w": w}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        with written(g["w"], cohort.ids, up["w"]):
            g = with_uploads(g, up["w"], cohort)
            return {**g, "xi": self.mixing(g["sqdist"], g["norm2"], g["last"] > 0)}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": own["w"]}

    def mixing(self, sqdist: Tensor, norm2: Tensor, gives: Tensor) -> Tensor:
        """xi [N, N] from squared distances [N, N], squared norms [N] and who has a model to give, bool [N]."""
        n = len(gives)
        usable = gives & ~torch.eye(n, dtype=torch.bool) & gives[:, None]
        xi = (self.alpha / self.sigma) * (-sqdist / self.sigma).exp() * usable
        total = xi.sum(1, keepdim=True)
        if self.self_weight == "safe" and bool((total > 1).any()):
            warnings.warn(f"FedAMP: the others' weights exceed 1 and are scaled down; alpha <= sigma / {n - 1} avoids it.", stacklevel=2)
            xi = xi / total.clamp(min=1)
        return xi + (1 - xi.sum(1)).diag()

    def report(self, g: Tensors) -> Tensors:
        """weights [N, N] (row i is what u_i mixes), last [N], rescaled: how many rows had to be scaled down."""
        return {"weights": g["xi"], "last": g["last"], "rescaled": (g["xi"].diagonal().abs() < 1e-12).sum()}


@dataclass(frozen=True)
class HeurFedAMP(FedAMP):
    """Huang et al. 2021, HeurFedAMP: the others share 1 - xi_ii by a softmax of sigma cos(w_i, w_j); xi_ii is fixed.

    State and messages are FedAMP's. The cosine of a model of norm 0 counts as 0. A lone client mixes itself.
    """

    sigma: Positive = 5.0
    xi_self: Share = 0.0  # xi_ii; 0: 1 / N

    def mixing(self, sqdist: Tensor, norm2: Tensor, gives: Tensor) -> Tensor:
        n, length = len(gives), (norm2[:, None] * norm2).sqrt()
        cosine = torch.where(length > 0, (norm2[:, None] + norm2 - sqdist) / (2 * length), 0.0)
        usable = gives & ~torch.eye(n, dtype=torch.bool) & gives[:, None]
        share = (self.sigma * cosine).masked_fill(~usable, -torch.inf).softmax(1).nan_to_num(0.0)  # NaN: nobody else to mix
        xi = (1 - (self.xi_self or 1 / n)) * share
        return xi + (1 - xi.sum(1)).diag()
