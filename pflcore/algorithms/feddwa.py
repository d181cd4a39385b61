"""FedDWA: every client's model is a mix of the models nearest to where the client is going; and the
quadratic programme of its Eq. 12: least `p . W p` over the simplex, `sum(p) = 1`, `p >= 0`.
"""

from __future__ import annotations

import math
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
    Tensors,
    Trained,
    Traits,
    Updated,
    options,
    shares,
    zero_rows,
)
from pflcore.check import Count, NonNegative, Positive, Share
from pflcore.data.ragged import onto
from pflcore.train import Clients, Net


def inner_products(to_guide: Tensor, between: Tensor) -> Tensor:
    """FedDWA's W (Eq. 11) from exact squared distances alone.

    to_guide [K]: |g - w_j|^2; between [K, K]: |w_j - w_k|^2; float64 [K, K]: (g - w_j) . (g - w_k).
    Its curvature on the simplex comes from `between` alone, so that nothing is lost where the
    models are much closer to each other than to the guide.
    """
    return (to_guide[:, None] + to_guide - between) / 2


def simplex_qp(w: Tensor, ridge: float = 1e-10, tolerance: float = 1e-13) -> Tensor:
    """The p [K] that minimises `p . w p` over the simplex, for a positive semidefinite `w` [K, K];
    float64.

    An active set: start at the best vertex, let the constraint with the most negative gradient go,
    and walk to the optimum of the face that is reached, dropping what becomes negative on the way
    (Wolfe 1976, Finding the nearest point in a polytope). `ridge` times the mean of the diagonal is
    added to it, which picks the shortest p where several are optimal; 0 adds nothing.
    """
    k, w = len(w), w.double().cpu()
    scale = float(w.diagonal().max())
    if scale <= 0:  # every model is the guide itself
        return torch.full((k,), 1 / k, dtype=torch.float64)
    w = (w + w.T) / (2 * scale)
    w = w + ridge * w.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    p = torch.zeros(k, dtype=torch.float64)
    p[w.diagonal().argmin()] = 1
    # the objective falls at every pass, so none repeats; the bound is for rounding
    for _ in range(20 * k):
        slope = w @ p
        j = int(slope.argmin())
        if slope[j] >= p @ slope - tolerance or p[j] > 0:
            break
        p = _to_face(w, p, [*p.nonzero()[:, 0].tolist(), j])
    return p / p.sum()


def _to_face(w: Tensor, p: Tensor, free: list[int]) -> Tensor:
    """From p to the optimum of the face of the coordinates `free`, or to that of the smaller face
    where the way there ends."""
    while len(free) > 1:
        system = w.new_ones(len(free) + 1, len(free) + 1)
        system[:-1, :-1], system[-1, -1] = w[free][:, free], 0
        right = w.new_zeros(len(free) + 1, 1)
        right[-1] = 1
        # the shortest one where the system is singular
        aim = torch.linalg.lstsq(system, right, driver="gelsd").solution[:-1, 0]
        here, p = p[free], torch.zeros_like(p)
        falls = aim <= 0
        if not falls.any():
            p[free] = aim
            return p
        way = (here - aim).clamp(min=torch.finfo(torch.float64).tiny)
        reach = (here / way).masked_fill(~falls, torch.inf)
        step = reach.min().clamp(max=1)
        p[free] = (here + step * (aim - here)).masked_fill(falls & (reach <= step), 0).clamp(min=0)
        free = p.nonzero()[:, 0].tolist()
    return p / p.sum()


MANY = 1000  # clients of a cohort from which on the nearest are looked for in blocks, by groups
LONG = 1 << 10  # where rows are so long that a pair costs


@options
class FedDWA(Algorithm):
    """Liu et al. 2023, Algorithm 1: w_i <- sum_j p_ij w_j over the k nearest, p_ij ~ 1 / |g_i -
    w_j|^2 (Eqs. 8 and 15).

    server: x [N, P], the personalized models; of the last round's cohort its ids [S] and near and p
    [S, K], whose models each mixes and
    how; and the guidance's cache with "previous" · client: nothing · down: x_i [S, P] (1 model) ·
    up: w, g [S, P] (2 models: the trained
    one and the guidance; 1 with "previous" and "current").
    The guidance is where the client's next step would lead: "epoch" trains `ahead` epochs more (the
    authors' code as many as a round has),
    "steps" so many minibatches, "full_grad" takes so many full-batch gradient steps (Eq. 16),
    "previous" is the model of the client's last
    round (App. C.6, cached by the server, its case ii; a client without one keeps its own model),
    "kept" the same, cached by the client, which uploads both (case i: client: last [P] and whether
    it has one [1]). Nothing of the look ahead stays with the client.
    "current" (section 4.1) is the trained model itself: its distance to itself is 0, so Eq. 15
    gives it (and exact copies) the whole
    weight, and FedDWA is Local. So it nearly is with one step of "full_grad" at the paper's step
    size of .01: a self weight above .999. A
    client ranks among its own neighbours like any other and may miss its own k. Who is absent keeps
    its model, bit for bit. Deviations:
    `ahead` > 1 goes on from where it is; the authors' code starts again each time. `server_lr` and
    `weighting` play no part.
    `search` says how the nearest are looked for, not which they are: "exact" takes all S * S
    distances; "groups" (`ops.nearest`) gives the
    same bits from few of them where clients form clusters, and takes some 2 / sqrt(S) more than all
    where they do not; "auto" is "groups"
    from 1000 clients of a cohort on, unless their models are tiny.
    Not of the paper: weights ~ 1 / |g_i - w_j|^(2 power), with 0 an even mix of the same
    neighbours; and `stride`, which moves the guidance
    along its direction until it is so many times as far from its client's model as the nearest
    other model is (as it stands the step,
    and with it the distance to the client itself, shrinks with the gradient, until the client's own
    model has all the weight).
    """

    k: Count = 5  # how many models are mixed, at most the cohort
    # the client's guidance model: trained for epochs or steps, along whole gradients, or its
    # previous model (the server's copy, or kept by the client) or current one
    guidance: Literal["epoch", "steps", "full_grad", "previous", "kept", "current"] = "epoch"
    ahead: Count = 1  # epochs, minibatches or gradient steps of the guidance
    # a newcomer's model: the common one, or the mean so far
    first: Literal["init", "mean"] = "init"
    search: Literal["auto", "exact", "groups"] = "auto"  # how the nearest models are found
    power: NonNegative = 1.0  # of the inverse squared distances: 1 is Eq. 15, 0 an even mix
    stride: Positive | None = None  # the guidance's step, in distances to the nearest other model
    serve: Literal["mix", "guidance"] = "mix"  # evaluated: the mix, or what it is trained to next

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.serve == "guidance" and self.guidance in ("previous", "kept", "current"):
            raise ValueError(
                "serve: 'guidance' is trained ahead of a client's model; "
                f"guidance={self.guidance!r} trains nothing, use 'mix'."
            )

    @property
    def traits(self) -> Traits:
        why = "with guidance='full_grad' takes steps of SGD along whole gradients"
        why = why if self.guidance == "full_grad" else ""
        return Traits(
            batch_norm=("local", "average"),  # local in the authors' code
            only_sgd=why,
            no_clip_grad=why,
            models={"w": "down.x", "g": "down.x"},
            per_client=("x", "seen", *(["last"] if self.guidance == "previous" else [])),
            late=("serve",),
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        state = {"x0": x0, "x": zero_rows(n, x0), "seen": torch.zeros(n, dtype=torch.bool)}
        return state | ({"last": zero_rows(n, x0)} if self.guidance == "previous" else {})

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        x, seen, ids = state["x"], state["seen"], cohort.ids
        first = x[seen].mean(0) if self.first == "mean" and bool(seen.any()) else state["x0"]
        return {"x": torch.where(onto(seen[ids, None], x.device), x[ids], first)}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        x = down["x"]
        return {"last": x, "has": torch.zeros_like(x[:, :1])} if self.guidance == "kept" else {}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> Trained:
        fit = clients.fit(down["x"])
        if self.guidance == "kept":
            last = torch.where(own["has"] > 0, own["last"], fit.w)
            kept = {"last": fit.w.clone(), "has": torch.ones_like(own["has"])}
            return kept, {"w": fit.w, "g": last}, fit
        if self.guidance in ("previous", "current"):
            return own, {"w": fit.w}, fit
        return own, {"w": fit.w, "g": self.look_ahead(fit.w, clients.after(fit))}, fit

    def look_ahead(self, w: Tensor, clients: Clients) -> Tensor:
        """The guidance models [S, P] of clients at `w` [S, P]; the clients stay as they are."""
        if self.guidance == "epoch":
            return clients.fit(w, epochs=self.ahead, stream="ahead").w
        if self.guidance == "steps":
            return clients.fit(w, steps=self.ahead, stream="ahead").w
        t, move = clients.setting.training, torch.zeros_like(w)
        for _ in range(self.ahead):
            move = t.momentum * move + clients.grad(w) + t.weight_decay * w
            w = w - clients.lr * move
        return w

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        if self.serve == "mix":
            return {"w": down["x"]}
        fit = clients.fit(down["x"])
        return {"w": self.look_ahead(fit.w, clients.after(fit)), "batch_norm": fit.buffers}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> Updated:
        ids, w = cohort.ids, up["w"]
        guide, changes = up.get("g", w), Changes(seen=Rows(ids, ids >= 0))
        if "last" in state:
            guide = torch.where(onto(state["seen"][ids, None], w.device), state["last"][ids], w)
            changes["last"] = Rows(ids, w)
        if self.stride is not None:
            guide = strided(guide, w, self.stride)
        weight, near = self.weights(guide, w)
        if self.power != 1:  # of the largest: no power makes all of them 0
            weight = shares((weight / weight.max(1, keepdim=True).values) ** self.power)
        mix = Mix(weight, near, ids)
        return {**changes, "x": Rows(ids, mix.of(w))}, mix

    def weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The mixing weights [S, K] and whose models they weigh [S, K], for guidance [S, P] and
        models [S, P]."""
        if self.search == "groups" or (self.search == "auto" and len(w) >= MANY):
            by = "groups" if self.search == "groups" or w.shape[1] >= LONG else "exact"
            d, near = ops.nearest(guide, w, self.k, by)
            weight, order = ops.feddwa_weights(d, min(self.k, len(w)))
            return weight, near.gather(1, order)
        return ops.feddwa_weights(ops.pairwise_sqdist(guide, w), self.k)

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """Of the clients who took part, `rows` [S]: whose models they were given, `index` [S, K],
        and with which `weight` [S, K]."""
        return {} if mix is None else mix.report(cohort)


@options
class FedDWAQP(FedDWA):
    """FedDWA with Eq. 12 solved as it stands: the point nearest to the guidance in the convex hull
    of the k nearest models.

    State and messages are FedDWA's. The paper keeps W's diagonal alone (Eq. 14), whose optimum is
    Eq. 15; `theta` leads from that (0) to the whole W (1). With `k` at least the cohort's size
    nothing is left out; otherwise the problem is solved again among the k nearest models. Eq. 13,
    the optimum without p >= 0, is no option: its weights may be negative.
    """

    search: Literal["exact"] = "exact"  # it needs all distances
    power: Literal[1] = 1  # it solves for its weights
    theta: Share = 1.0  # how much of W's off-diagonal counts
    ridge: NonNegative = 1e-10  # times W's mean diagonal, added: the shortest of several optimal p

    def weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        d, between = ops.pairwise_sqdist(guide, w).cpu(), ops.pairwise_sqdist(w).cpu()
        index = ops.feddwa_weights(d, self.k).index
        weight = torch.empty(index.shape, dtype=torch.float64)
        for i, near in enumerate(index):
            inner = inner_products(d[i, near], between[near][:, near])
            diagonal = inner.diagonal().diag()
            weight[i] = simplex_qp(self.theta * inner + (1 - self.theta) * diagonal, self.ridge)
        return onto(weight, w.device), onto(index, w.device)


def strided(guide: Tensor, w: Tensor, stride: float) -> Tensor:
    """Guidance models [S, P] in the same direction from `w` [S, P], `stride` times as far as the
    nearest other model is."""
    gap = ops.pairwise_sqdist(w).fill_diagonal_(math.inf).min(1).values.sqrt()
    step = guide - w
    scale = stride * gap / torch.linalg.vector_norm(step, dim=1, dtype=torch.float64)
    moved: Tensor = w + step * scale.where(scale.isfinite(), 1.0)[:, None].to(w)
    return moved
