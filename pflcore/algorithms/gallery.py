"""Rivals of FedDWA whose server mixes the clients' latest models by how similar they are: distances -> mixing matrix.

They need nothing of a client but its model. The server keeps everybody's latest upload [N, P] and the distances between them, of
which a round renews the cohort's alone; a client that never took part gives nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Tensors, written
from pflcore.engine import onto
from pflcore.flat import Net
from pflcore.local import Local


def gallery(net: Net, n: int) -> Tensors:
    """A server's state of everybody's latest model: w [N, P], sqdist [N, N], norm2 [N], last [N] (the round of the upload, 0: none)."""
    norm2 = ops.pairwise_sqdist(net.w0[None], torch.zeros_like(net.w0)[None])[0].cpu()
    distance = torch.zeros(n, n, dtype=torch.float64)
    return {"w": net.w0.expand(n, -1), "sqdist": distance, "norm2": norm2.expand(n), "last": torch.zeros(n, dtype=torch.long)}


def hung(g: Tensors, w: Tensor, cohort: Cohort) -> Tensors:
    """The gallery's distances, norms and rounds when the cohort's models `w` [S, P] have been written into g["w"]."""
    ids, rows = cohort.ids, ops.pairwise_sqdist(w, g["w"]).cpu()
    norm2 = ops.pairwise_sqdist(w, torch.zeros_like(w[:1]))[:, 0].cpu()
    return {
        **g,
        "sqdist": g["sqdist"].index_copy(0, ids, rows).index_copy_(1, ids, rows.T),
        "norm2": g["norm2"].index_copy(0, ids, norm2),
        "last": g["last"].index_fill(0, ids, cohort.round),
    }


@dataclass(frozen=True)
class FedAMP(FedAvg):
    """Huang et al. 2021, FedAMP: each client is drawn to u_i = sum_j xi_ij w_j, xi_ij = (alpha / sigma) exp(-|w_i - w_j|^2 / sigma).

    server: the latest models w [N, P] and xi [N, N] · client: w [P] · down: u [S, P] (1 model) · up: w [S, P] (1 model).
    A client minimises F_i(w) + lam / (2 alpha) |w - u_i|^2 by local training from its own model, or from u_i with `start="u"`.
    xi_ii is what is left of 1. Where the others' weights exceed 1 (alpha > sigma / (N - 1) and models that are close) it would be
    negative, an extrapolation that swaps models: they are scaled to sum to 1, counted in the record's "rescaled";
    `self_weight="literal"` leaves them. An absent client's latest model still gives; the record's "last" says from which round.
    Deviation: the paper has everybody in every round. `lr` and `weighting` play no part.
    """

    sigma: float = 1.0
    alpha: float = 1.0
    lam: float = 0.1
    start: str = "own"  # local training starts from the client's "own" model or from "u"
    self_weight: str = "safe"  # "safe": never negative, "literal": 1 minus the rest

    server_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.sigma > 0 and self.alpha > 0 and self.lam >= 0):
            raise ValueError(f"sigma, alpha, lam: expected sigma, alpha > 0 and lam >= 0, got {self.sigma}, {self.alpha}, {self.lam}.")
        if self.start not in ("own", "u"):
            raise ValueError(f"start: expected 'own' or 'u', got {self.start!r}.")
        if self.self_weight not in ("safe", "literal"):
            raise ValueError(f"self_weight: expected 'safe' or 'literal', got {self.self_weight!r}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return gallery(net, n) | {"xi": torch.eye(n, dtype=torch.float64)}, {"w": net.w0}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        return {"u": ops.aggregate(g["w"], onto(g["xi"][cohort.ids], g["w"].device))}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        start = own["w"] if self.start == "own" else down["u"]
        w = local.fit(start, prox=(self.lam / self.alpha, down["u"])).w
        return {"w": w}, {"w": w}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        with written(g["w"], cohort.ids, up["w"]):
            g = hung(g, up["w"], cohort)
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

    sigma: float = 5.0
    xi_self: float = 0.0  # xi_ii; 0: 1 / N

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.xi_self <= 1:
            raise ValueError(f"xi_self: expected a weight from 0 to 1, got {self.xi_self}.")

    def mixing(self, sqdist: Tensor, norm2: Tensor, gives: Tensor) -> Tensor:
        n, length = len(gives), (norm2[:, None] * norm2).sqrt()
        cosine = torch.where(length > 0, (norm2[:, None] + norm2 - sqdist) / (2 * length), 0.0)
        usable = gives & ~torch.eye(n, dtype=torch.bool) & gives[:, None]
        share = (self.sigma * cosine).masked_fill(~usable, -torch.inf).softmax(1).nan_to_num(0.0)  # NaN: nobody else to mix
        xi = (1 - (self.xi_self or 1 / n)) * share
        return xi + (1 - xi.sum(1)).diag()


@dataclass(frozen=True)
class SFL(FedAvg):
    """Chen et al. 2022, SFL: models smoothed over a graph of the clients, X' = s A^L X + (1 - s) X, and their mean, the readout.

    server: the latest models w [N, P] and M = s A^L + (1 - s) I [N, N] · client: nothing · down: the readout x and the client's own
    row u of X' [S, P] (2 models; the paper's tables count 1) · up: w [S, P] (1 model).
    A client trains from the readout and minimises F_i(w) + lam1 / 2 |w - u_i|^2 + lam2 / 2 |w - x|^2; tested is u_i.
    A, with self loops and rows that sum to 1: "knn_models" the `k` nearest by the models' distance; "oracle_labels" by the overlap of
    the clients' label shares, which tells the server the labels and is no fair rival; or the path of an [N, N] .npy file.
    Deviations: squared regularisers with a gradient, where the released code's are not squared and detached, so without effect;
    neighbours are the nearest clients, where its learned graph keeps the farthest. Who never took part holds the readout.
    """

    adjacency: str = "knn_models"  # "knn_models", "oracle_labels" or the path of a .npy file
    k: int = 5  # neighbours beside itself
    layers: int = 3  # L
    s: float = 1.0
    lam1: float = 0.3
    lam2: float = 0.3

    server_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjacency not in ("knn_models", "oracle_labels") and not self.adjacency.endswith(".npy"):
            raise ValueError(f"adjacency: expected 'knn_models', 'oracle_labels' or a path ending in .npy, got {self.adjacency!r}.")
        if self.k < 1 or self.layers < 1 or not 0 <= self.s <= 1 or min(self.lam1, self.lam2) < 0:
            raise ValueError("k, layers, s, lam1, lam2: expected k, layers >= 1, 0 <= s <= 1 and lam1, lam2 >= 0.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        g = gallery(net, n) | {"mix": torch.eye(n, dtype=torch.float64)}
        if self.adjacency.endswith(".npy"):
            g["graph"] = torch.from_numpy(np.load(self.adjacency, allow_pickle=False)).double()
            if g["graph"].shape != (n, n) or bool((g["graph"] < 0).any()):
                found = tuple(g["graph"].shape)
                raise ValueError(f"adjacency: expected {n} x {n} numbers >= 0 in {self.adjacency}, got {found} or a negative one.")
        return g | ({"labels": torch.zeros(n, net.classes)} if self.adjacency == "oracle_labels" else {}), {}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        mix = onto(torch.cat([g["mix"][cohort.ids], g["mix"].mean(0, keepdim=True)]), g["w"].device)
        rows = ops.aggregate(g["w"], mix)
        return {"x": rows[-1].expand(len(cohort.ids), -1), "u": rows[:-1]}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        both = self.lam1 + self.lam2
        anchor = (self.lam1 * down["u"] + self.lam2 * down["x"]) / (both or 1)  # two squares make one
        up = {"w": local.fit(down["x"], prox=(both, anchor) if both else None).w}
        return own, up | ({"labels": local.counts / local.size[:, None]} if self.adjacency == "oracle_labels" else {})

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        with written(g["w"], cohort.ids, up["w"]):
            g = hung(g, up["w"], cohort)
            seen = g["last"] > 0
            if "labels" in up:
                g["labels"] = g["labels"].index_copy(0, cohort.ids, up["labels"].to(g["labels"]))
                graph = torch.minimum(g["labels"][:, None], g["labels"]).sum(2).double()
            else:
                graph = g["graph"] if "graph" in g else nearest(g["sqdist"], self.k, seen)
            return {**g, "mix": smoothing(graph, seen, self.layers, self.s)}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": down["u"]}

    def report(self, g: Tensors) -> Tensors:
        """weights [N, N]: row i is what client i's model mixes."""
        return {"weights": g["mix"]}


def nearest(sqdist: Tensor, k: int, usable: Tensor) -> Tensor:
    """Adjacency [N, N] of ones: each client's k nearest among the `usable` [N] and itself."""
    far = sqdist.masked_fill(~usable, torch.inf)
    far.fill_diagonal_(-1)
    order = far.sort(dim=1, stable=True).indices[:, : k + 1]
    return torch.zeros_like(sqdist).scatter_(1, order, 1.0) * usable


def smoothing(graph: Tensor, usable: Tensor, layers: int, s: float) -> Tensor:
    """SFL's `s A^L + (1 - s) I` [N, N] from an adjacency [N, N]: rows that sum to 1; a row of zeros keeps its own model.

    Clients that are not `usable` [N] (they have no model) give nothing, and get the mean of the others' rows.
    """
    a = graph * usable
    total = a.sum(1, keepdim=True)
    eye = torch.eye(len(a), dtype=a.dtype)
    a = torch.where(total > 0, a / total.clamp(min=torch.finfo(a.dtype).tiny), eye)
    mix: Tensor = s * torch.linalg.matrix_power(a, layers) + (1 - s) * eye
    if bool(usable.any()):
        mix[~usable] = mix[usable].mean(0)
    return mix
