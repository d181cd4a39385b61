"""FedDWA (Liu et al. 2023): mixes the models nearest to where a client is heading.

`FedDWA` weighs them by Eq. 15, `FedDWAQP` by the quadratic programme of Eq. 12.

Symbols:

- S clients are in a round's cohort, N in the federation; a model has P parameters.
- `x` [N, P] are the personalized models from which clients train.
- `w` [S, P] are the models that the clients trained.
- `g` [S, P] are their guidance models (`guide`): where further training leads them.
- `p` [S, K] are mixing weights: of the K models of `w` nearest to each guide.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    algorithm_options,
    lazy_zeros,
    normalize_rows,
)
from pflcore.check import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
)
from pflcore.ops._directions import cosine_matrix
from pflcore.train import Clients, Net


def inner_products(
    w: Tensor,  # [K, P]
    g: Tensor,  # [P]
) -> Tensor:  # [K, K] float64
    """FedDWA's Gram matrix (Eq. 11): inner products `(g - w_j) . (g - w_k)`.

    They are cosines times lengths, each as exact as float64 is, so that a model which
    is very far away leaves the others' as they are.

    Models are told apart that differ by a millionth of their distance to the guide
    (1e-12 of its square), and not much closer ones. The default `ridge` of `simplex_qp`
    is coarser: it makes an even mix of models that are closer than some
    hundred-thousandth of that distance. ridge=0 does not.
    """
    length = ops.pairwise_sqdist(w, g[None])[:, 0].sqrt()
    return length[:, None] * length * cosine_matrix(w, origin=g)


# A descent below this is only rounding: the right side of the system is at most 1.
SOLVED_DESCENT = 1e-13


def simplex_qp(gram: Tensor, ridge: float = 1e-10) -> Tensor:
    """The p [K] >= 0 with sum 1 that minimises `p . gram p`, float64.

    Coordinates are q_j = length_j p_j, with the diagonal's roots as lengths in units of
    the least one: so a large entry of the diagonal takes no digits from the others. The
    sum of 1 is not a constraint of the search. With a_j = 1 / length_j, the q >= 0 that
    minimises `q . C q + (a . q - 1)^2` has the direction of the optimum, and dividing
    by `a . q` gives it. C is gram in these coordinates, its diagonal is 1. The active
    set method of Lawson and Hanson finds q (1974, Solving least squares problems,
    algorithm NNLS): the coordinate with the steepest descent is freed, the free ones
    move towards their optimum, and those that would become negative are fixed at 0
    again.

    Args:
        gram: [K, K] positive semidefinite.
        ridge: Share by which the diagonal grows. It selects the shortest p where
            several are optimal; 0 adds nothing.
    """
    k = len(gram)
    gram = gram.double().cpu()
    length = gram.diagonal().sqrt()
    if length.max() <= 0:  # every model equals the guide
        return torch.full((k,), 1 / k, dtype=torch.float64)
    # The length of a model that equals the guide is 0; this is as good.
    length = length.clamp(min=1e-15 * length[length > 0].min())
    a = length.min() / length
    matrix = (gram + gram.T) / 2 / length[:, None] / length
    matrix += ridge * torch.eye(k, dtype=torch.float64) + a[:, None] * a
    q = torch.zeros(k, dtype=torch.float64)
    # The objective falls in every pass; the bound guards against rounding.
    for _ in range(20 * k):
        free = q > 0
        descent = (a - matrix @ q).masked_fill(free, 0)
        if descent.max() <= SOLVED_DESCENT:
            break
        free[descent.argmax()] = True
        q = _descend_to_optimum(matrix, a, q, free)
    p = a * q
    return p / p.sum()


def _descend_to_optimum(
    matrix: Tensor,  # [K, K]
    right_side: Tensor,  # [K]
    q: Tensor,  # [K] >= 0
    free: Tensor,  # bool [K]
) -> Tensor:  # [K] >= 0
    """The optimum over the free coordinates, or over fewer of them.

    On the straight way to the optimum, the first coordinates that reach 0 are fixed
    there. The way goes on from that point without them.
    """
    while True:
        target = torch.zeros_like(q)
        # gelsd: the shortest solution where the system is singular
        solution = torch.linalg.lstsq(
            matrix[free][:, free], right_side[free, None], driver="gelsd"
        )
        target[free] = solution.solution[:, 0]
        becomes_zero = free & (target <= 0)
        if not becomes_zero.any():
            return target
        # A coordinate that was just freed is 0 and may stay there: never 0 / 0.
        distance = (q - target).clamp(min=torch.finfo(q.dtype).tiny)
        reach = (q / distance).masked_fill(~becomes_zero, torch.inf)
        step = reach.min()  # the share of the way at which the first one is 0
        q = (q + step * (target - q)).masked_fill(reach <= step, 0)
        free = q > 0


# With `search="auto"`, a cohort of at least this many clients looks for its neighbours
# by `ops.nearest`: by groups where models are at least as long as the second constant,
# so that the distance of a pair costs more than the bookkeeping; else block by block.
GROUP_SEARCH_MIN_CLIENTS = 1000
GROUP_SEARCH_MIN_COLUMNS = 1 << 10


@algorithm_options
class FedDWA(Algorithm):
    """FedDWA (Liu et al. 2023): mixes the models nearest to where a client is heading.

    server: x [N, P] (the personalized models), x0 [P] (the model of clients that have
    not taken part), and with guidance="previous" last [N, P] (each client's upload) ·
    client: nothing (with guidance="kept" last [P], has [1], which is 1 once the client
    has a last model) · down: x [S, P] (1 model, client i's x_i) · up: w, g [S, P] (2
    models: the trained one and the guidance; 1 with "previous" and "current").

    Letters: N clients of the federation, S of them in a round's cohort, P parameters of
    a model. K models are mixed for each client: k, or S where the cohort is smaller.

    A round goes like this (Algorithm 1):

    1. The server sends client i its personalized model x_i. At first it is x0.
    2. The client trains x_i on its own data. The trained model is w_i.
    3. The client looks ahead: it goes on training from w_i, to see where that would
       lead it. The model that it gets is its guidance g_i. The client uploads w_i and
       g_i. (Some kinds of `guidance` do not look ahead, see below.)
    4. The server computes the squared distances `|g_i - w_j|^2` from each guidance to
       the models of only this cohort. Models of absent clients are not mixed.
    5. The server mixes the k models nearest to g_i into the new x_i: `x_i = sum_j p_ij
       w_j`, with weights p_ij that are proportional to `1 / |g_i - w_j|^2` (Eqs. 8 and
       15) and sum to 1.

    The client's own w_i competes like any other model, and is perhaps not among the k;
    where g_i is very near w_i, it takes almost all the weight. An absent client keeps
    its x_i.

    `guidance` decides which model is g_i. The first three kinds train ahead from w_i,
    and leave no trace: the client's state stays as it was after its training.

    - "epoch" trains for `lookahead` more epochs. (The authors' code trains for as many
      as a round has.)
    - "steps" trains on `lookahead` more minibatches.
    - "full_grad" takes `lookahead` steps of SGD on the gradient of all its samples (Eq.
      16), with the run's momentum and weight decay.
    - "previous" takes the w_i of the client's last round, which the server has cached
      (App. C.6, case ii). In its first round a client takes its present w_i.
    - "kept" takes the same model, but the client has cached it and uploads both (case
      i).
    - "current" takes the trained model itself (section 4.1). Its distance to itself is
      0, so Eq. 15 gives it, and exact copies, all the weight: FedDWA becomes Local, as
      it does in a client's first round with "previous" and "kept". One step of
      "full_grad" at the paper's step size of .01 comes close.

    Deviation: with `lookahead` > 1 each epoch, minibatch or step goes on from the one
    before it; the authors' code starts each of them again from w_i.

    Not in the paper: `power`, `stride`, and `serve="guidance"`.

    Args:
        k: Number of models that are mixed into a client's model. With a k larger than
            the cohort the whole cohort is mixed.
        guidance: Kind of the guidance model: "epoch", "steps" and "full_grad" train
            ahead; "previous" (the server's copy) and "kept" (the client's own copy)
            take the client's previous model; "current" takes its trained one.
        lookahead: Epochs, minibatches or gradient steps that a client trains ahead
            (step 3 above), by `guidance`. With "full_grad", 1 is the paper's Eq. 16.
        search: Method that finds the nearest models, without effect on which they
            are. "exact" computes all S * S distances together. "groups" (`ops.nearest`)
            gives the same bits from few distances where clients form clusters; where
            they do not, it computes more than all of them, by a share of about 2 /
            sqrt(S). "auto" is "exact" for cohorts of fewer than 1000 clients,
            and "groups" for larger ones; large cohorts of models of fewer than 1024
            numbers are searched for all pairs, block by block.
        power: Exponent of the inverse squared distances: p_ij is proportional
            to `1 / |g_i - w_j|^(2 power)`. 1 is Eq. 15, 0 an even mix of the k nearest.
        stride: Length of g_i - w_i, in distances from w_i to the nearest other model.
            The guidance is rescaled to it, which takes all S * S distances. None leaves
            the guidance as it is: it comes nearer to w_i as gradients become
            smaller, and w_i takes more and more of the weight.
        serve: Model that a client is evaluated with: "mix" is x_i, "guidance" is the
            guidance that the client would compute after training x_i.
    """

    k: PositiveInt = 5
    guidance: Literal["epoch", "steps", "full_grad", "previous", "kept", "current"] = (
        "epoch"
    )
    lookahead: PositiveInt = 1
    search: Literal["auto", "exact", "groups"] = "auto"
    power: NonNegativeFloat = 1.0
    stride: PositiveFloat | None = None
    serve: Literal["mix", "guidance"] = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._trains_ahead:
            self.require_default("guidance", "serve")

    @property
    def _trains_ahead(self) -> bool:
        """True for the kinds of guidance that look ahead by training."""
        return self.guidance in ("epoch", "steps", "full_grad")

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        fixed = {}
        if self.guidance == "full_grad":
            reason = (
                "with guidance='full_grad' takes steps of SGD along whole gradients"
            )
            fixed = {"local_optimizer": reason, "clip_grad": reason}
        cache = ("last",) if self.guidance == "previous" else ()
        sends_guidance = self._trains_ahead or self.guidance == "kept"
        models = {"w": "down.x"}
        if sends_guidance:
            models["g"] = "down.x"
        return Traits(
            batch_norm=("local", "average"),  # local in the authors' code
            fixed_training=fixed,
            model_uploads=models,
            per_client_state=("x", *cache),
            evaluation_only=("serve",),
            reported_state=("mix",),
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        state = {"x0": x0, "x": lazy_zeros(n, x0)}
        if self.guidance == "previous":
            state["last"] = lazy_zeros(n, x0)
        return state

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        x = state["x"][cohort.ids]
        is_new = to_device(cohort.is_new[:, None], x.device)
        return {"x": torch.where(is_new, state["x0"], x)}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        if self.guidance != "kept":
            return {}
        x = down["x"]
        # "has" is 0 until "last" holds a trained model, then 1: clients keep numbers of
        # the model's dtype.
        return {"last": x, "has": torch.zeros_like(x[:, :1])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(down["x"])
        upload = {"w": fit.w}
        if self.guidance == "kept":
            has_last = client_state["has"] > 0
            upload["g"] = torch.where(has_last, client_state["last"], fit.w)
            client_state = {
                "last": fit.w,
                "has": torch.ones_like(client_state["has"]),
            }
        elif self._trains_ahead:
            upload["g"] = self.look_ahead(fit.w, clients.after(fit))
        return client_state, upload, fit

    def look_ahead(
        self,
        w: Tensor,  # [S, P]
        clients: Clients,
    ) -> Tensor:  # [S, P]
        """Guidance models of clients whose models are `w`; the clients stay as is."""
        if self.guidance == "epoch":
            return clients.fit(w, epochs=self.lookahead, stream="ahead").w
        if self.guidance == "steps":
            return clients.fit(w, steps=self.lookahead, stream="ahead").w
        training = clients.context.training
        velocity = torch.zeros_like(w)
        for _ in range(self.lookahead):
            grad = clients.grad(w)
            velocity = training.momentum * velocity + grad + training.weight_decay * w
            w = w - clients.lr * velocity
        return w

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        if self.serve == "mix":
            return {"w": down["x"]}
        fit = clients.fit(down["x"])
        guide = self.look_ahead(fit.w, clients.after(fit))
        return {"w": guide, "batch_norm": fit.buffers}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        w = up["w"]
        guide = up.get("g", w)
        changes: Changes = {}
        if self.guidance == "previous":
            is_new = to_device(cohort.is_new[:, None], w.device)
            guide = torch.where(is_new, w, state["last"][ids])
            changes["last"] = RowUpdate(ids, w)
        if self.stride is not None:
            guide = scale_guidance(guide, w, self.stride)
        weight, neighbours = self.mixing_weights(guide, w)
        if self.power != 1:
            # Relative to the largest, so that no power turns all weights into 0.
            relative = weight / weight.max(1, keepdim=True).values
            weight = normalize_rows(relative**self.power)
        mixing = MixingWeights(weight, neighbours, receivers=ids)
        changes["x"] = RowUpdate(ids, mixing.aggregate(w))
        return changes, mixing

    def mixing_weights(
        self,
        guide: Tensor,  # [S, P]
        w: Tensor,  # [S, P]
    ) -> tuple[Tensor, Tensor]:  # weights [S, K], neighbours [S, K]
        """Weights [S, K] of the models nearest to each guide, and their rows.

        The rows [S, K] are positions in `w`, nearest first.
        """
        is_large = len(w) >= GROUP_SEARCH_MIN_CLIENTS
        if self.search == "exact" or (self.search == "auto" and not is_large):
            return ops.feddwa_weights(ops.pairwise_sqdist(guide, w), self.k)
        is_long = w.shape[1] >= GROUP_SEARCH_MIN_COLUMNS
        method: Literal["exact", "groups"] = "exact"  # all pairs, block by block
        if self.search == "groups" or is_long:
            method = "groups"
        sqdist, neighbours = ops.nearest(guide, w, self.k, method)
        # The neighbours are sorted by distance, and so are the weights.
        weight = ops.feddwa_weights(sqdist, self.k).weight
        return weight, neighbours


@algorithm_options
class FedDWAQP(FedDWA):
    """FedDWA-QP (Liu et al. 2023): FedDWA with Eq. 12 solved exactly.

    State and messages are FedDWA's. The new x_i is the point nearest to the guidance in
    the convex hull of the k nearest models. With `k` at least the cohort's size no
    model is left out.

    Eq. 12 minimises `p . G p` over the simplex, with G the Gram matrix of Eq. 11. The
    paper keeps only the diagonal of G (Eq. 14), whose optimum is Eq. 15. `theta` leads
    from there to the whole G. Eq. 13, the optimum without p >= 0, is not offered: its
    weights may be negative.

    The other options are those of `FedDWA`.

    Args:
        search: Always "exact": the Gram matrix needs all distances.
        power: Always 1: the weights are solved for.
        theta: Share of the Gram matrix's off-diagonal that counts, from 0 (Eq. 15)
            to 1 (Eq. 12).
        ridge: Share by which the Gram matrix's diagonal grows. It selects the shortest
            of several optimal p; 0 adds nothing.
    """

    search: Literal["exact"] = "exact"
    power: Literal[1] = 1
    theta: UnitFloat = 1.0
    ridge: NonNegativeFloat = 1e-10

    def mixing_weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        neighbours = ops.feddwa_weights(ops.pairwise_sqdist(guide, w), self.k).index
        weight = torch.empty(neighbours.shape, dtype=torch.float64)
        for i, near in enumerate(neighbours):
            gram = inner_products(w[near], guide[i]).cpu()
            diagonal = gram.diagonal().diag()
            blend = self.theta * gram + (1 - self.theta) * diagonal
            weight[i] = simplex_qp(blend, self.ridge)
        return to_device(weight, w.device), neighbours


def scale_guidance(
    guide: Tensor,  # [S, P]
    w: Tensor,  # [S, P]
    stride: float,
) -> Tensor:  # [S, P]
    """Guidance models at `stride` times the distance of the nearest other model.

    The direction from `w` stays. A client whose guidance is its own model, or that is
    alone, keeps its guidance. Where an exact copy of its model is in the cohort, the
    guidance becomes the model itself.
    """
    to_others = ops.pairwise_sqdist(w).fill_diagonal_(math.inf)
    to_nearest = to_others.min(1).values.sqrt()
    step = guide - w
    length = torch.linalg.vector_norm(step, dim=1, dtype=torch.float64)
    scale = stride * to_nearest / length
    scale = scale.where(scale.isfinite(), 1.0)[:, None].to(w)
    scaled: Tensor = w + step * scale
    return scaled
