"""SFL: models smoothed over a graph of the clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._latest import latest_models, with_uploads
from pflcore.algorithms.protocol import Algorithm, Changes, Cohort, Mix, Payload, Tensors, Traits
from pflcore.check import Count, NonNegative, Share
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class SFL(Algorithm):
    """Chen et al. 2022, SFL: models smoothed over a graph of the clients, X' = s A^L X + (1 - s) X,
    and their mean, the readout.

    server: the latest models w [N, P] and M = s A^L + (1 - s) I [N, N] · client: nothing · down:
    the readout x and the client's own
    row u of X' [S, P] (2 models; the paper's tables count 1) · up: w [S, P] (1 model).
    A client trains from the readout and minimises F_i(w) + lam1 / 2 |w - u_i|^2 + lam2 / 2 |w -
    x|^2; tested is u_i.
    A, with self loops and rows that sum to 1: "knn_models" the `k` nearest by the models' distance;
    "oracle_labels" by the overlap of
    the clients' label shares, which tells the server the labels and is no fair rival; or the path
    of an [N, N] .npy file, in which
    a client without a self loop gets one of weight 1.
    Deviations: squared regularisers with a gradient, where the released code's are not squared and
    detached, so without effect;
    neighbours are the nearest clients, where its learned graph keeps the farthest. Who never took
    part holds the readout.
    """

    adjacency: str = "knn_models"  # "knn_models", "oracle_labels" or the path of a .npy file
    k: Count = 5  # neighbours beside itself
    layers: Count = 3  # L
    # share of the graph's means in X'; 0: nothing is smoothed
    s: Share = 1.0
    # strength of the pull towards the smoothed model u_i
    lam1: NonNegative = 0.3
    # strength of the pull towards the readout x
    lam2: NonNegative = 0.3

    traits = Traits(models={"w": "server.w"})

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("knn_models", "oracle_labels")
        if self.adjacency not in known and not self.adjacency.endswith(".npy"):
            raise ValueError(
                "adjacency: expected 'knn_models', 'oracle_labels' or a path ending in .npy, got "
                f"{self.adjacency!r}."
            )

    def initial(self, net: Net) -> Tensors:
        oracle = self.adjacency == "oracle_labels"
        return {"x0": net.w0} | ({"labels": torch.zeros(net.classes)} if oracle else {})

    def init(self, x0: Tensor, n: int, labels: Tensor | None = None) -> Tensors:
        state = latest_models(x0, n) | {"mix": torch.eye(n, dtype=torch.float64)}
        state |= {} if labels is None else {"labels": labels.repeat(n, 1)}
        return state | ({"graph": self.graph(n)} if self.adjacency.endswith(".npy") else {})

    def graph(self, n: int) -> Tensor:
        """The adjacency [N, N] in the file."""
        graph = torch.from_numpy(np.load(self.adjacency, allow_pickle=False)).double()
        if graph.shape != (n, n) or bool((graph < 0).any()):
            raise ValueError(
                f"adjacency: expected {n} x {n} numbers >= 0 in {self.adjacency}, got "
                f"{tuple(graph.shape)} or a negative one; a newcomer counts, too."
            )
        return graph + torch.diag((graph.diagonal() == 0).double())

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        mix = torch.cat([state["mix"][cohort.ids], state["mix"].mean(0, keepdim=True)])
        rows = ops.aggregate(state["w"], onto(mix, state["w"].device))
        return {"x": rows[-1].expand(len(cohort.ids), -1), "u": rows[:-1]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        both = self.lam1 + self.lam2
        # two squares are one
        anchor = (self.lam1 * down["u"] + self.lam2 * down["x"]) / (both or 1)
        fit = clients.fit(down["x"], Objective(prox=(both, anchor) if both else None))
        oracle = self.adjacency == "oracle_labels"
        labels = {"labels": clients.counts / clients.size[:, None]} if oracle else {}
        return own, {"w": fit.w, **labels}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": down["u"]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        changes, new = with_uploads(state, up["w"], cohort)
        seen = new["last"] > 0
        if "labels" in up:
            labels = state["labels"].index_copy(0, cohort.ids, up["labels"].to(state["labels"]))
            changes["labels"] = labels
            graph = torch.minimum(labels[:, None], labels).sum(2).double()
        elif "graph" in state:
            graph = state["graph"]
        else:
            graph = nearest(new["sqdist"], self.k, seen)
        mix = smoothing(graph, seen, self.layers, self.s)
        # of the neighbours, those who are present
        return {**changes, "mix": mix}, Mix(mix[:, cohort.ids], rows=torch.arange(cohort.n))

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """weights [N, N]: row i is what client i's model mixes."""
        return {"weights": state["mix"]}


def nearest(sqdist: Tensor, k: int, usable: Tensor) -> Tensor:
    """Adjacency [N, N] of ones: each client's k nearest among the `usable` [N] and itself."""
    far = sqdist.masked_fill(~usable, torch.inf)
    far.fill_diagonal_(-1)
    order = far.sort(dim=1, stable=True).indices[:, : k + 1]
    return torch.zeros_like(sqdist).scatter_(1, order, 1.0) * usable


def smoothing(graph: Tensor, usable: Tensor, layers: int, s: float) -> Tensor:
    """SFL's `s A^L + (1 - s) I` [N, N] from an adjacency [N, N]: rows that sum to 1; a row of zeros
    keeps its own model.

    Clients that are not `usable` [N] (they have no model) give nothing, and get the mean of the
    others' rows.
    """
    a = graph * usable
    total = a.sum(1, keepdim=True)
    eye = torch.eye(len(a), dtype=a.dtype)
    a = torch.where(total > 0, a / total.clamp(min=torch.finfo(a.dtype).tiny), eye)
    mix: Tensor = s * torch.linalg.matrix_power(a, layers) + (1 - s) * eye
    if bool(usable.any()):
        mix[~usable] = mix[usable].mean(0)
    return mix
