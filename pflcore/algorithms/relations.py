"""Servers that keep everybody's latest model [N, P] and how the clients are related: FedAMP and
HeurFedAMP mix models that are alike, SFL smooths them over a graph, MOCHA learns the relation.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.clusters import cosines
from pflcore.algorithms.protocol import (
    Algorithm,
    Changes,
    Cohort,
    Mix,
    Payload,
    Rows,
    Stop,
    Tensors,
    Trained,
    Traits,
    Updated,
    options,
    shares,
    squares,
)
from pflcore.check import Count, Fraction, NonNegative, Positive, Share, refuse
from pflcore.data.ragged import onto
from pflcore.train import Clients, Net, Objective


def latest_models(x0: Tensor, n: int) -> Tensors:
    """The first state of such a server: w [N, P], sqdist [N, N], norm2 [N], last [N] (the round of
    the upload, 0: none)."""
    norm2, last = squares(x0[None]).cpu().expand(n), torch.zeros(n, dtype=torch.long)
    distance = torch.zeros(n, n, dtype=torch.float64)
    return {"w": x0.repeat(n, 1), "sqdist": distance, "norm2": norm2, "last": last}


def with_uploads(state: Tensors, w: Tensor, cohort: Cohort) -> tuple[Changes, Tensors]:
    """The cohort's models `w` [S, P] as rows to be written, and the new distances, norms and
    rounds: those of the cohort alone are taken anew."""
    ids = cohort.ids
    distances = [ops.pairwise_sqdist(w, to) for to in (state["w"], w, torch.zeros_like(w[:1]))]
    # looked at once
    rows, among, norm2 = torch.cat(distances, 1).cpu().split([cohort.n, len(ids), 1], 1)
    rows = rows.index_copy(1, ids, among)
    new = {
        "sqdist": state["sqdist"].index_copy(0, ids, rows).index_copy_(1, ids, rows.T),
        "norm2": state["norm2"].index_copy(0, ids, norm2[:, 0]),
        "last": state["last"].index_fill(0, ids, cohort.round),
    }
    return {"w": Rows(ids, w), **new}, new


def others(gives: Tensor) -> Tensor:
    """Who mixes whom, bool [N, N], by who has a model to give, bool [N]: nobody itself."""
    return gives & gives[:, None] & ~torch.eye(len(gives), dtype=torch.bool)


@options
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
    record's "rescaled". An absent client's latest model still gives; the record's "last" says from
    which round.
    Deviation: the paper has everybody in every round. `server_lr` and `weighting` play no part.
    """

    # scale of the squared distances: larger, and all clients attract alike
    sigma: Positive = 1.0
    # step size of the attraction: others weigh alpha / sigma, the pull is lam / alpha
    alpha: Positive = 1.0
    # strength of the pull towards u_i
    lam: NonNegative = 0.1
    start: Literal["own", "u"] = "own"  # where local training starts: the client's own model, or u

    traits = Traits(batch_norm=("local",), models={"w": "server.w"})  # own models are never mixed

    def init(self, x0: Tensor, n: int) -> Tensors:
        return latest_models(x0, n) | {"xi": torch.eye(n, dtype=torch.float64)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"u": Mix(state["xi"][cohort.ids]).of(state["w"])}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> Trained:
        start = own["w"] if self.start == "own" else down["u"]
        fit = clients.fit(start, Objective(prox=(self.lam / self.alpha, down["u"])))
        return {"w": fit.w}, {"w": fit.w}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> Updated:
        changes, new = with_uploads(state, up["w"], cohort)
        return {**changes, "xi": self.mixing(new["sqdist"], new["norm2"], new["last"] > 0)}, None

    def mixing(self, sqdist: Tensor, norm2: Tensor, gives: Tensor) -> Tensor:
        """xi [N, N] from squared distances [N, N], squared norms [N] and who has a model to give,
        bool [N]."""
        xi = (self.alpha / self.sigma) * (-sqdist / self.sigma).exp() * others(gives)
        total = xi.sum(1, keepdim=True)
        if bool((total > 1).any()):
            warnings.warn(
                "FedAMP: the others' weights exceed 1 and are scaled down; alpha <= sigma / "
                f"{len(gives) - 1} avoids it.",
                stacklevel=2,
            )
            xi = xi / total.clamp(min=1)
        return xi + (1 - xi.sum(1)).diag()

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """weights [N, N] (row i is what u_i mixes), last [N], rescaled: how many rows had to be
        scaled down."""
        rescaled = (state["xi"].diagonal().abs() < 1e-12).sum()
        return {"weights": state["xi"], "last": state["last"], "rescaled": rescaled}


@options
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
        cosine = cosines(sqdist, norm2).masked_fill(~others(gives), -torch.inf)
        share = (self.sigma * cosine).softmax(1).nan_to_num(0.0)  # NaN: nobody else to mix
        xi = (1 - (self.xi_self or 1 / len(gives))) * share
        return xi + (1 - xi.sum(1)).diag()


@options
class SFL(Algorithm):
    """Chen et al. 2022, SFL: models smoothed over a graph of the clients, X' = s A^L X + (1 - s) X,
    and their mean, the readout.

    server: the latest models w [N, P] and M = s A^L + (1 - s) I [N, N] · client: nothing · down:
    the readout x and the client's own
    row u of X' [S, P] (2 models; the paper's tables count 1) · up: w [S, P] (1 model).
    A client trains from the readout and minimises F_i(w) + lam1 / 2 |w - u_i|^2 + lam2 / 2 |w -
    x|^2; tested is u_i.
    A, with self loops and rows that sum to 1: "knn_models" the `k` nearest by the models' distance;
    or the path of an [N, N] .npy file, in which a client without a self loop gets one of weight 1.
    Deviations: squared regularisers with a gradient, where the released code's are not squared and
    detached, so without effect;
    neighbours are the nearest clients, where its learned graph keeps the farthest. Who never took
    part holds the readout.
    """

    adjacency: str = "knn_models"  # "knn_models" or the path of a .npy file
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
        if self.adjacency != "knn_models" and not self.adjacency.endswith(".npy"):
            refuse("adjacency", "'knn_models' or a path ending in .npy", self.adjacency)

    def init(self, x0: Tensor, n: int) -> Tensors:
        state = latest_models(x0, n) | {"mix": torch.eye(n, dtype=torch.float64)}
        return state | ({"graph": self.graph(n)} if self.adjacency != "knn_models" else {})

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
        rows = Mix(mix).of(state["w"])
        return {"x": rows[-1].expand(len(cohort.ids), -1), "u": rows[:-1]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> Trained:
        both = self.lam1 + self.lam2
        # two squares are one
        anchor = (self.lam1 * down["u"] + self.lam2 * down["x"]) / (both or 1)
        fit = clients.fit(down["x"], Objective(prox=(both, anchor) if both else None))
        return own, {"w": fit.w}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": down["u"]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> Updated:
        changes, new = with_uploads(state, up["w"], cohort)
        seen, graph = new["last"] > 0, state.get("graph")
        if graph is None:
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
    a = shares(graph * usable)
    eye = torch.eye(len(a), dtype=a.dtype)
    a = torch.where(a.any(1, keepdim=True), a, eye)
    mix: Tensor = s * torch.linalg.matrix_power(a, layers) + (1 - s) * eye
    if bool(usable.any()):
        mix[~usable] = mix[usable].mean(0)
    return mix


@options
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
        w, seen, ids = state["w"], state["seen"], cohort.ids
        rows, at = state["omega"][ids], onto(ids[:, None], w.device)  # [S, N]
        down = {"pull": ops.aggregate(w, rows.scatter(1, at, 0.0)), "o": rows.gather(1, at)}
        if bool(seen.any()) and not bool(seen[ids].all()):  # sent where somebody needs it
            down["start"] = w[seen].mean(0).expand(len(ids), -1)
        return down

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": down.get("start", net.w0[None])}  # from the mean of the models so far

    def train(self, down: Payload, own: Tensors, clients: Clients) -> Trained:
        lr = clients.lr
        shrink = lr * self.lam * float(down["o"].max())
        if not shrink < 2:
            raise self.unstable(clients.round, lr, shrink)
        mu = (self.lam * down["o"]).to(own["w"])[:, 0]
        pull = Objective(shift=self.lam * down["pull"], prox=(mu, torch.zeros_like(own["w"])))
        fit = clients.fit(own["w"], pull)
        lr_sum = (fit.steps * lr)[:, None].to(fit.w)
        return {"w": fit.w}, {"w": fit.w, "lr_sum": lr_sum, "lr": torch.full_like(lr_sum, lr)}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> Updated:
        ids = cohort.ids
        changes: Changes = {"w": Rows(ids, up["w"]), "seen": Rows(ids, ids >= 0)}
        if cohort.round % self.outer == 0:
            w = state["w"].index_copy(0, onto(ids, up["w"].device), up["w"])
            omega = relation(w, self.delta, self.relation)
            lr, lr_sum = (up[k][:, 0].double() for k in ("lr", "lr_sum"))
            self.check(omega[ids][:, ids], lr, lr_sum, cohort.round)
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
    values, vectors = torch.linalg.eigh(w.double() @ w.double().T)
    root = values.clamp(min=eps).sqrt()
    root = root / root.sum()
    if kind == "omega":
        root = 1 / ((1 - delta) * root + delta / len(w))
    matrix: Tensor = (vectors * root) @ vectors.T
    return matrix
