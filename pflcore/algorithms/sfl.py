"""SFL: models smoothed over a graph of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._latest import latest_models, with_uploads
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Tensors, written
from pflcore.data.ragged import onto
from pflcore.ops.kinds import Count, NonNegative, Share
from pflcore.train import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class SFL(FedAvg):
    """Chen et al. 2022, SFL: models smoothed over a graph of the clients, X' = s A^L X + (1 - s) X, and their mean, the readout.

    server: the latest models w [N, P] and M = s A^L + (1 - s) I [N, N] · client: nothing · down: the readout x and the client's own
    row u of X' [S, P] (2 models; the paper's tables count 1) · up: w [S, P] (1 model).
    A client trains from the readout and minimises F_i(w) + lam1 / 2 |w - u_i|^2 + lam2 / 2 |w - x|^2; tested is u_i.
    A, with self loops and rows that sum to 1: "knn_models" the `k` nearest by the models' distance; "oracle_labels" by the overlap of
    the clients' label shares, which tells the server the labels and is no fair rival; or the path of an [N, N] .npy file, in which
    a client without a self loop gets one of weight 1.
    Deviations: squared regularisers with a gradient, where the released code's are not squared and detached, so without effect;
    neighbours are the nearest clients, where its learned graph keeps the farthest. Who never took part holds the readout.
    """

    adjacency: str = "knn_models"  # "knn_models", "oracle_labels" or the path of a .npy file
    k: Count = 5  # neighbours beside itself
    layers: Count = 3  # L
    s: Share = 1.0
    lam1: NonNegative = 0.3
    lam2: NonNegative = 0.3

    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjacency not in ("knn_models", "oracle_labels") and not self.adjacency.endswith(".npy"):
            raise ValueError(f"adjacency: expected 'knn_models', 'oracle_labels' or a path ending in .npy, got {self.adjacency!r}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        g = latest_models(net, n) | {"mix": torch.eye(n, dtype=torch.float64)}
        if self.adjacency.endswith(".npy"):
            g["graph"] = self.graph(n)
        return g | ({"labels": torch.zeros(n, net.classes)} if self.adjacency == "oracle_labels" else {}), {}

    def graph(self, n: int) -> Tensor:
        """The adjacency [N, N] in the file."""
        graph = torch.from_numpy(np.load(self.adjacency, allow_pickle=False)).double()
        if graph.shape != (n, n) or bool((graph < 0).any()):
            raise ValueError(
                f"adjacency: expected {n} x {n} numbers >= 0 in {self.adjacency}, got {tuple(graph.shape)} or a negative one; a newcomer "
                "counts, too."
            )
        return graph + torch.diag((graph.diagonal() == 0).double())

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
            g = with_uploads(g, up["w"], cohort)
            seen = g["last"] > 0
            if "labels" in up:
                g["labels"] = g["labels"].index_copy(0, cohort.ids, up["labels"].to(g["labels"]))
                graph = torch.minimum(g["labels"][:, None], g["labels"]).sum(2).double()
            else:
                graph = g["graph"] if "graph" in g else nearest(g["sqdist"], self.k, seen)
            return {**g, "mix": smoothing(graph, seen, self.layers, self.s)}

    def statistics(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensor:
        return g["mix"][:, cohort.ids]  # of the neighbours, those who are present

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
