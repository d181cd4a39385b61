"""FedDWA: every client's model is a mix of the models nearest to where the client is going."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Commit, FedAvg, Payload, Tensors, only_sgd
from pflcore.algorithms.qp import inner_products, simplex_qp
from pflcore.data.ragged import onto
from pflcore.ops.kinds import Count, NonNegative, Positive, Share
from pflcore.train import Local, Training
from pflcore.train.net import Net

MANY = 1000  # clients of a cohort from which on the nearest are looked for in blocks, by groups where rows are so long that a pair costs:
LONG = 1 << 10


@dataclass(frozen=True)
class FedDWA(FedAvg):
    """Liu et al. 2023, Algorithm 1: w_i <- sum_j p_ij w_j over the k nearest, p_ij ~ 1 / |g_i - w_j|^2 (Eqs. 8 and 15).

    server: x [N, P], the personalized models; of the last round's cohort its ids [S] and near and p [S, K], whose models each mixes and
    how; and the guidance's cache with "previous" · client: nothing · down: x_i [S, P] (1 model) · up: w, g [S, P] (2 models: the trained
    one and the guidance; 1 with "previous" and "current").
    The guidance is where the client's next step would lead: "epoch" trains `ahead` epochs more (the authors' code as many as a round has),
    "steps" so many minibatches, "full_grad" takes so many full-batch gradient steps (Eq. 16), "previous" is the model of the client's last
    round (App. C.6, cached by the server; a client without one keeps its own model). Nothing of the look ahead stays with the client.
    "current" (section 4.1) is the trained model itself: its distance to itself is 0, so Eq. 15 gives it (and exact copies) the whole
    weight, and FedDWA is Local. So it nearly is with one step of "full_grad" at the paper's step size of .01: a self weight above .999. A
    client ranks among its own neighbours like any other and may miss its own k. Who is absent keeps its model, bit for bit. Deviations:
    `ahead` > 1 goes on from where it is; the authors' code starts again each time. `server_lr` and `weighting` play no part.
    `search` says how the nearest are looked for, not which they are: "exact" takes all S * S distances; "groups" (`ops.nearest`) gives the
    same bits from few of them where clients form clusters, and takes some 2 / sqrt(S) more than all where they do not; "auto" is "groups"
    from 1000 clients of a cohort on, unless their models are tiny.
    Not of the paper: weights ~ 1 / |g_i - w_j|^(2 power), with 0 an even mix of the same neighbours; and `stride`, which moves the guidance
    along its direction until it is so many times as far from its client's model as the nearest other model is (as it stands the step,
    and with it the distance to the client itself, shrinks with the gradient, until the client's own model has all the weight).
    """

    k: Count = 5  # how many models are mixed, at most the cohort
    guidance: Literal["epoch", "steps", "full_grad", "previous", "current"] = "epoch"
    ahead: Count = 1  # epochs, minibatches or gradient steps of the guidance
    newcomer: Literal["init", "mean"] = "init"  # a client's first model: "init", the common one, or "mean", that of the models so far
    search: Literal["auto", "exact", "groups"] = "auto"  # how the nearest models are found: "exact", "groups", or by the cohort's size
    power: NonNegative = 1.0  # of the inverse squared distances: 1 is Eq. 15, 0 weighs the k nearest alike
    stride: Positive | None = None  # the guidance's step, in distances to the nearest other model; None: as it is
    serve: Literal["mix", "guidance"] = "mix"  # evaluated: the client's "mix", or the "guidance" that it would train from that (Table 3)

    late: ClassVar[tuple[str, ...]] = ("serve",)
    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")
    buffers: ClassVar[tuple[str, ...]] = ("local", "average")  # local in the authors' code

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.serve == "guidance" and self.guidance in ("previous", "current"):
            raise ValueError(
                f"serve: 'guidance' is trained ahead of a client's model; guidance={self.guidance!r} trains nothing, use 'mix'."
            )

    def check_training(self, training: Training) -> None:
        if self.guidance == "full_grad":
            only_sgd(self, training, "with guidance='full_grad' takes steps of SGD along whole gradients")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        rows, k = net.w0.expand(n, -1), min(self.k, n)
        g = {"x": rows, "seen": torch.zeros(n, dtype=torch.bool), "ids": torch.empty(0, dtype=torch.int64)}
        g |= {"near": torch.empty(0, k, dtype=torch.int64), "p": torch.empty(0, k, dtype=torch.float64)}
        return (g | {"last": rows} if self.guidance == "previous" else g), {}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        x, seen = g["x"][onto(cohort.ids, g["x"].device)], g["seen"]
        if self.newcomer == "mean" and bool(seen.any()):
            x[~seen[cohort.ids]] = g["x"][seen].mean(0)
        return {"x": x}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        w = local.fit(down["x"]).w
        return own, {"w": w} if self.guidance in ("previous", "current") else {"w": w, "g": self.look_ahead(w, local)}

    def look_ahead(self, w: Tensor, local: Local) -> Tensor:
        """The guidance models [S, P] of clients at `w` [S, P]; the clients stay as they are."""
        if self.guidance != "full_grad":
            length: dict[str, Any] = {"epochs" if self.guidance == "epoch" else "steps": self.ahead}
            return local.fit(w, stream="ahead", probe=True, **length).w
        t, move = local.setting.training, torch.zeros_like(w)
        for _ in range(self.ahead):
            move = t.momentum * move + local.grad(w) + t.weight_decay * w
            w = w - local.lr * move
        return w

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        if self.serve == "mix":
            return {"w": down["x"]}
        return {"w": self.look_ahead(local.fit(down["x"]).w, local)}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        ids, w = cohort.ids, up["w"]
        guide = up.get("g", w)
        if "last" in g:
            guide = torch.where(onto(g["seen"][ids][:, None], w.device), g["last"][onto(ids, w.device)], w)
        weight, index = self.weights(guide if self.stride is None else strided(guide, w, self.stride), w)
        if self.power != 1:
            weight = (weight / weight.max(1, keepdim=True).values) ** self.power  # of the largest: no power makes all of them 0
            weight = weight / weight.sum(1, keepdim=True)
        p, near = (g[k].new_zeros(len(ids), min(self.k, cohort.n)) for k in ("p", "near"))
        p[:, : index.shape[1]], near[:, : index.shape[1]] = weight.to(p), ids[index.cpu()]
        last = [(g["last"], w)] if "last" in g else []
        Commit(ids, (g["x"], ops.aggregate(w, weight, index)), *last, (g["seen"], torch.ones(len(ids), dtype=torch.bool))).write()
        return {**g, "ids": ids, "near": near, "p": p}

    def statistics(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensor:
        mix = spread(g["p"], torch.searchsorted(cohort.ids, g["near"]).clamp(max=len(cohort.ids) - 1), len(cohort.ids))  # [S, S]
        return mix.new_zeros(cohort.n, len(cohort.ids)).index_copy_(0, cohort.ids, mix)

    def weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The mixing weights [S, K] and whose models they weigh [S, K], for guidance [S, P] and models [S, P]."""
        if self.search == "groups" or (self.search == "auto" and len(w) >= MANY):
            d, near = ops.nearest(guide, w, self.k, "groups" if self.search == "groups" or w.shape[1] >= LONG else "exact")
        else:
            d = ops.pairwise_sqdist(guide, w)
            near = self.nearest(d)
            d = d.gather(1, near)
        weight, order = ops.feddwa_weights(d, min(self.k, len(w)))
        return weight, near.gather(1, order)

    def nearest(self, d: Tensor) -> Tensor:
        """The k nearest [S, K] by distances [S, S], nearest first; of equals the lowest index."""
        index: Tensor = ops.feddwa_weights(d, self.k).index
        return index

    def report(self, g: Tensors) -> Tensors:
        """Of the clients who took part, `rows` [S]: whose models they were given, `index` [S, K], and with which `weight` [S, K]."""
        return {"rows": g["ids"], "index": g["near"], "weight": g["p"]}


@dataclass(frozen=True)
class FedDWAQP(FedDWA):
    """FedDWA with Eq. 12 solved as it stands: the point nearest to the guidance in the convex hull of the k nearest models.

    State and messages are FedDWA's. The paper keeps W's diagonal alone (Eq. 14), whose optimum is Eq. 15; `theta` leads from that
    (0) to the whole W (1). With `k` at least the cohort's size nothing is left out; otherwise the problem is solved again among the
    k nearest models. Eq. 13, the optimum without p >= 0, is no option: its weights may be negative.
    """

    theta: Share = 1.0  # how much of W's off-diagonal counts
    ridge: NonNegative = 1e-10  # times W's mean diagonal, added to it: the shortest of several optimal p

    unused: ClassVar[tuple[str, ...]] = (*FedDWA.unused, "search", "power")  # it needs all distances, and solves for its weights

    def weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        d, between = ops.pairwise_sqdist(guide, w).cpu(), ops.pairwise_sqdist(w).cpu()
        index = self.nearest(d)
        weight = torch.empty(index.shape, dtype=torch.float64)
        for i, near in enumerate(index):
            inner = inner_products(d[i, near], between[near][:, near])
            weight[i] = simplex_qp(self.theta * inner + (1 - self.theta) * inner.diagonal().diag(), self.ridge)
        return onto(weight, w.device), onto(index, w.device)


def strided(guide: Tensor, w: Tensor, stride: float) -> Tensor:
    """Guidance models [S, P] in the same direction from `w` [S, P], `stride` times as far as the nearest other model is."""
    gap, step = ops.pairwise_sqdist(w).fill_diagonal_(math.inf).min(1).values.sqrt(), guide - w
    scale = stride * gap / torch.linalg.vector_norm(step, dim=1, dtype=torch.float64)
    moved: Tensor = w + step * scale.where(scale.isfinite(), 1.0)[:, None].to(w)
    return moved


def spread(p: Tensor, near: Tensor, n: int) -> Tensor:
    """Weights [M, K] of the clients `near` [M, K] as a matrix [M, n]."""
    return torch.zeros(len(p), n, dtype=p.dtype).scatter_add_(1, near, p)
