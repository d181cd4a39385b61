"""Clients that learn what to take: APFL mixes a global and a personal model, FedALA
does so element by element, FedFomo by the models that do better on its data, L2C by
whose updates help.
"""

from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from typing import Annotated, Literal

import annotated_types as at
import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import (
    Algorithm,
    Cohort,
    GradientFn,
    Payload,
    RowUpdate,
    SharedRows,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    algorithm_options,
    map_rows,
    normalize_rows,
)
from pflcore.check import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitFloat,
    Weighting,
)
from pflcore.data._ragged import Ragged, to_device
from pflcore.nn._context import forward_state
from pflcore.ops._sums import scatter_add
from pflcore.train import Clients, Net, Objective
from pflcore.train._clients import TrainContext, align_memory
from pflcore.train._random import client_seeds, client_shuffles, client_uniforms


@algorithm_options
class APFL(FedAvg):
    """Deng et al. 2020, Algorithm 1: client i uses `alpha_i v_i + (1 - alpha_i) w`, w
    global, v_i and alpha_i its own.

    server: x [P] · client: v [P], alpha [1] · down: x [S, P] · up: delta [S, P] (1
    model).

    On one minibatch, from the old values throughout: `w -= lr * grad(w)`,
    `v -= lr * alpha * grad(mixed)` and, at the first step of a round,
    `alpha -= alpha_lr * <v - w, grad(mixed)>`, kept within [0, 1]. v starts as w.

    Deviations, each with another reading as an option: the paper adapts alpha once a
    round and does not say at which step; the authors' code mixes outputs
    (`mix="logits"`) and adds 0.02 alpha to alpha's gradient (`alpha_decay=0.02`). Batch
    norm's running statistics are those of the mixed model, which is the one that is
    used. Momentum and weight decay apply to w and v.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    # share of the personal model at the start: 0 global, 1 local
    alpha: UnitFloat = 0.5
    adaptive: bool = True  # learn alpha
    # alpha's step size; None: that of training
    alpha_lr: NonNegativeFloat | None = None
    alpha_decay: NonNegativeFloat = 0.0  # pull of alpha towards 0
    # the models (the paper), or their scores
    mix: Literal["weights", "logits"] = "weights"

    @property
    def traits(self) -> Traits:
        why = "takes steps of SGD along the gradients of two models"
        # statistics are those of the client's own mixture
        return super().traits._replace(
            batch_norm=("local",), sgd_only_reason=why, no_clip_grad_reason=why
        )

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        w0 = net.w0[None]
        return {"v": w0, "alpha": torch.full_like(w0[:, :1], self.alpha)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        t = clients.context.training
        lr = clients.lr
        P = clients.net.size
        alpha_lr = lr if self.alpha_lr is None else self.alpha_lr
        # two gradients of the model's own loss, which kernels may take
        apart = self.mix == "weights" and not clients.net.buffer_names

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            w = rows["w"]
            v = rows["v"]
            alpha = rows["alpha"]
            learns = self.adaptive and int(taken[0]) == 0
            if apart:
                g = grad(w)
                mixed = grad(torch.lerp(w, v, alpha))
                slope = ((v - w) * mixed).sum(1, keepdim=True) if learns else alpha
                both = g, mixed.mul_(alpha)
            else:
                *both, slope = grad(torch.cat([w, v, alpha], 1)).split([P, P, 1], 1)
            for key, g in zip("wv", both, strict=True):
                ops.sgd_step_(
                    rows[key],
                    g,
                    lr,
                    momentum=t.momentum,
                    buffer=rows.get(f"old {key}"),
                    weight_decay=t.weight_decay,
                )
            if learns:
                alpha.sub_(alpha_lr * (slope + self.alpha_decay * alpha)).clamp_(0, 1)
            return {}  # all of it in place

        rows = {"w": x, **client_state}
        if t.momentum:
            rows |= {"old w": torch.zeros_like(x), "old v": torch.zeros_like(x)}
        fit = clients.each_batch(
            rows, update, Objective(loss=None if apart else self.joint_loss)
        )
        return {k: fit.rows[k] for k in client_state}, {"delta": fit.w - x}, fit

    def joint_loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        """Its gradient in w is that of w's loss, in v and alpha that of the mixture's;
        `row` [2 P + 1] is w | v | alpha."""
        w, v, alpha = row.split([net.size, net.size, 1])
        before = forward_state.buffers
        own = net.loss(w, x, y)
        forward_state.buffers = before  # the statistics that stay are the mixture's
        return own + net.batch_loss(
            self.mixture_scores(net, w.detach(), v, alpha, x), y
        )

    def mixture_scores(
        self, net: Net, w: Tensor, v: Tensor, alpha: Tensor, x: Tensor
    ) -> Tensor:
        """The mixture's scores on `x` [B, ...]."""
        if self.mix == "weights":
            return net(alpha * v + (1 - alpha) * w, x)
        return alpha * net(v, x) + (1 - alpha) * net(w, x)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": down["x"], **client_state}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Scores of the model `alpha v + (1 - alpha) w` [P]; where the option mix is
        "logits", the same mixture of both models' scores."""
        return self.mixture_scores(net, model["w"], model["v"], model["alpha"], x)


@algorithm_options
class FedALA(FedAvg):
    """Zhang et al. 2023, FedALA (Algorithm 1): a round starts at theta_i + (x -
    theta_i) * W_i, with W_i in [0, 1] learned on own data.

    server: x [P] · client: theta [P], W [Q], begun [1] · down: x [S, P] (1 model) · up:
    delta [S, P] (1 model: theta - x).

    W is of the last `layers` parameter tensors (Q columns); the lower layers are x's
    (Eq. 4). On a random part `sample` of a client's samples, drawn once a round, W <-
    clip(W - eta * grad f_i(start) * (x - theta), 0, 1) for each minibatch (Eq. 5), from
    W = 1: the first time until the last `window` losses have a standard deviation below
    `threshold`, and one epoch in every later round. Then the client trains the start as
    FedAvg does. Evaluated is the start with the newest x, its W learned on in the same
    way and thrown away.

    Decisions where the paper is silent: a loss is the mean over an epoch's minibatches;
    the first time ends after `max_epochs` epochs at the latest; batch norm's statistics
    stay while W is learned. Until its first round a client is served x.
    """

    layers: NonNegativeInt = 0  # W is for so many of the last parameter tensors; 0: all
    eta: NonNegativeFloat = 1.0  # step size of W
    sample: Fraction = 0.8  # part of the client's samples that W is learned on
    # the first time ends where so many losses ...
    window: Annotated[int, at.Ge(2)] = 10
    threshold: NonNegativeFloat = 0.1  # ... deviate by less
    max_epochs: PositiveInt = 100  # epochs of the first time at most

    @property
    def traits(self) -> Traits:
        return super().traits._replace(batch_norm=super().traits.batch_norm[::-1])

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        ones = net.w0.new_ones(1, sum(net.sizes[-self.layers :]))
        return {"theta": down["x"], "W": ones, "begun": ones.new_zeros(1, 1)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        start, new = self.start_models(down["x"], client_state, clients)
        fit = clients.fit(start)
        return {"theta": fit.w, **new}, {"delta": fit.w - down["x"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": self.start_models(down["x"], client_state, clients)[0]}

    def start_models(
        self, x: Tensor, client_state: Tensors, clients: Clients
    ) -> tuple[Tensor, Tensors]:
        """Where the clients start [S, P], and what they know then of W."""
        theta = client_state["theta"]
        W = client_state["W"].clone()
        begun = client_state["begun"]
        low = x.shape[1] - W.shape[1]
        gap = (x - theta)[:, low:]
        extra = {"low": x[:, :low], "theta": theta[:, low:], "gap": gap}
        learns = gap.ne(0).any(1)
        first = learns & (begun[:, 0] == 0)
        losses = W.new_zeros(len(W), 0, dtype=torch.float64)
        begun = torch.where(learns[:, None], 1, begun)
        part = replace(clients, context=subsample_training(clients, self.sample))
        for epoch in range(self.max_epochs):
            if not learns.any():
                break
            fit = part.take(learns).each_batch(
                {"W": W[learns]},
                lambda rows, grad, _: {
                    "W": (rows["W"] - self.eta * grad(rows["W"])).clamp(0, 1)
                },
                Objective(
                    loss=self.loss, extra={k: v[learns] for k, v in extra.items()}
                ),
                epochs=1,
                stream=f"W {epoch}",
            )
            W[learns] = fit.rows["W"]
            losses = torch.cat([losses, losses.new_zeros(len(W), 1)], 1)
            losses[learns, -1] = fit.loss
            spread = losses[:, -self.window :].std(1, correction=0)
            learns = (
                first & learns & ((spread >= self.threshold) | (epoch < self.window))
            )
        start = torch.cat([extra["low"], extra["theta"] + gap * W], 1)
        return start, {"W": W, "begun": begun}

    def loss(self, net: Net, W: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """f_i at the start that W [Q] makes; its gradient in W is that of Eq. 5."""
        return net.loss(
            torch.cat([extra["low"], extra["theta"] + extra["gap"] * W]), x, y
        )


def subsample_training(clients: Clients, fraction: float) -> TrainContext:
    """The setting with a random `fraction` of each of these clients' training samples
    (at least one) in this round, and nobody else's."""
    context = clients.context
    ids = clients.ids.sort().values
    data = context.data
    lists = context.data.lists("train").take(ids)
    count = (fraction * lists.size).long().clamp(min=1)
    if clients.net.buffer_names:
        # batch norm cannot train on one sample: no batch of one that the whole list
        # does not have
        t = context.training
        lone = (count == 1) | (count % t.batch_size == 1) & (not t.drop_last)
        fewer = torch.where(count > 1, count - 1, lists.size.clamp(max=2))
        count = torch.where(lone, fewer, count)
    seeds = client_seeds(ids.numpy(), context.seed, clients.round, "sample")
    order = torch.from_numpy(client_shuffles(seeds, lists.size.numpy()))
    places = (lists.begin[:-1, None] + order)[
        torch.arange(order.shape[1]) < count[:, None]
    ]
    size = torch.zeros(data.n, dtype=torch.int64).index_copy(0, ids, count)
    return context._replace(
        data=data._copy_with(index={"train": Ragged(lists.flat[places], size)})
    )


@algorithm_options
class FedFomo(Algorithm):
    """Zhang et al. 2021, FedFomo: a client moves towards the models that do better than
    its own on its validation data.

    server: the latest models w [N, P], affinities p [N, N], weights [N, N] (what each
    client of this round found for the others' models, before its own model's share) and
    seen [N] (who has taken part) · client: w, old [P] (its trained model, and the model
    before that training) · down: w [N, P] (shared rows: m other models, or all there
    are; m models) · up: w [S, P] (1 model) and a [S, N] (what was found for each). a_j
    = (L(old) - L(w_j)) / |w_j - old|, L on the split "val"; w <- old + sum_j w_j (w_j -
    old), w_j = max(a_j, 0) / sum max(a, 0), then local training.

    The client's own trained model is always a candidate and costs nothing. 20 % of each
    client's training samples are held out for that where there is no split "val" (a
    client of one sample has none, and does not mix). The server picks the m by
    affinity, the sum of the a so far; a share `epsilon`, falling by `decay` a round, is
    picked at random. Where nothing is better the client goes on from its trained model
    (the authors' code goes back to `old`). A candidate at distance 0, or whose loss is
    not finite, has weight 0. An absent client's model can be sent.
    """

    m: PositiveInt = 5  # models downloaded
    epsilon: UnitFloat = 0.3  # share of them picked at random in round 1
    decay: NonNegativeFloat = 0.05  # by how much it falls in a round

    traits = Traits(
        batch_norm=("local",),
        needs_val=True,
        model_uploads={"w": "server.w"},
        reported_state=("weights",),
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        none = torch.zeros(n, n, dtype=torch.float64)
        seen = torch.zeros(n, dtype=torch.bool)
        return {"w": x0.repeat(n, 1), "p": none, "weights": none, "seen": seen}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None], "old": net.w0[None]}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        ids = cohort.ids
        n = cohort.n
        everybody = torch.arange(n)
        p = state["p"][ids]
        # [S, N] who can be sent to whom
        free = state["seen"] & (everybody != ids[:, None])
        epsilon = max(0.0, self.epsilon - self.decay * (cohort.round - 1))
        seed = int(torch.randint(1 << 62, (1,), generator=cohort.generator))
        index = torch.empty(len(ids), 0, dtype=torch.long)
        for i in range(min(self.m, int(free.sum(1).max()))):
            # a client's own, independent of the others
            draws = client_uniforms(client_seeds(ids.tolist(), seed, i), n + 1)
            p = p.masked_fill(~free, -torch.inf)
            # chance decides among equals
            best = (p == p.amax(1, keepdim=True)) & (draws[:, -1:] >= epsilon)
            pick = (draws[:, :-1] + best).masked_fill(~free, -1).argmax(1)
            pick = torch.where(free.any(1), pick, -1)[:, None]
            index = torch.cat([index, pick], 1)
            free = free & (everybody != pick)
        return {"w": SharedRows(state["w"], to_device(index, state["w"].device))}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, index = down["w"]
        given = index >= 0
        index = index.clamp(min=0)
        before = clients.loss(client_state["old"], "val").double()
        gains = []
        for candidate in chain(
            (rows[i] for i in index.T), [client_state["w"]]
        ):  # the own model last
            length = (
                (candidate - client_state["old"])
                .square()
                .sum(1, dtype=torch.float64)
                .sqrt()
            )
            gain = (before - clients.loss(candidate, "val")) / length
            gains.append(torch.where(length > 0, gain, 0.0))
        a = torch.stack(gains, 1).nan_to_num(0.0, 0.0, 0.0)  # [S, m + 1]
        a[:, :-1] *= given
        w = a.clamp(min=0)
        better = (a > 0).any(1, keepdim=True)
        # added up one by one: columns for others, of zeros here, change no digit
        total = reduce(torch.add, w.unbind(1))[:, None]
        w = w / total.clamp(min=torch.finfo(w.dtype).tiny)
        start = (
            torch.where(better, w[:, -1:].to(client_state["w"]), 1) * client_state["w"]
        )
        start = ops.aggregate(rows, w[:, :-1], index, start)
        fit = clients.fit(start)
        zeros = a.new_zeros(len(a), clients.context.data.n)
        found = scatter_add(zeros, index, a[:, :-1])
        return {"w": fit.w, "old": start}, {"w": fit.w, "a": found}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        a = up["a"].to(state["p"])
        return {
            "w": RowUpdate(ids, up["w"]),
            "p": RowUpdate(ids, state["p"][ids] + a),
            "weights": torch.zeros_like(state["p"]).index_copy_(
                0, ids, normalize_rows(a.clamp(min=0))
            ),
            "seen": RowUpdate(ids, ids >= 0),
        }, None


@algorithm_options
class L2C(Algorithm):
    """Li et al. 2022, L2C: each client learns, on validation data, whose updates to
    take: w_i <- w_i + sum_j softmax(a_i)_j delta_j.

    server: the updates of every round that is some client's last, which it relays:
    delta [U, P], who [U] sent each and in which round [U]; last [N] (each client's last
    round, 0: none), and weights [N, N] (what the clients of this round made of the
    updates of their last one; zeros for the absent and at first) · client: w [P] (its
    model before the round that is under way), logits a [N] and Adam's m, v [N], t [1] ·
    down: delta [U, P] (shared rows: the updates of the client's last round, N models at
    full participation) and who [S, M] (the senders; -1: none) · up: delta [S, P] (1
    model) and weights [S, N] (for the record).

    A client mixes when it takes part again, or is evaluated; then its logits take one
    step of Adam along their exact gradient w_j (g . delta_j - sum_m w_m g . delta_m), g
    the gradient on the split "val" at the mixed model (its sign follows delta = after -
    before); 20 % of each client's training samples are held out for it where there is
    no such split, and a client of one sample has none and keeps its logits. Clients
    absent from a round are masked out of its softmax. No official code exists; this is
    the form that independent re-implementations agree on. Deviations: one step a round
    on all validation data; no pruning of neighbours (T0, K0), which Table 4 of the
    FedDWA paper does not count either.
    """

    alpha_lr: NonNegativeFloat = 0.1  # Adam's
    alpha_decay: NonNegativeFloat = 0.01  # weight decay of the logits

    # parameters alone are mixed
    traits = Traits(batch_norm=("local",), needs_val=True, reported_state=("weights",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        none = torch.empty(0, dtype=torch.long)
        return {
            "delta": x0.new_empty(0, len(x0)),
            "who": none,
            "round": none,
            "last": torch.zeros(n, dtype=torch.long),
            "weights": torch.zeros(n, n, dtype=torch.float64),
        }

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        zeros = torch.zeros(1, n, dtype=torch.float64, device=net.w0.device)
        return {
            "w": net.w0[None],
            "a": zeros,
            "m": zeros,
            "v": zeros,
            "t": zeros[:, :1],
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        mine = state["round"] == state["last"][cohort.ids][:, None]  # [S, R]
        # as many columns whoever is there: the largest round's
        width = int(state["round"].bincount().max()) if mine.numel() else 0
        index = mine.byte().sort(dim=1, descending=True, stable=True).indices[:, :width]
        who = state["who"][index].masked_fill(~mine.gather(1, index), -1)
        # no update of this client's last round: not sent
        index = index.masked_fill(who < 0, -1)
        return {
            "delta": SharedRows(
                state["delta"], to_device(index, state["delta"].device)
            ),
            "who": who,
        }

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, index = down["delta"]
        x, w, who = self.mixed_models(down, client_state)
        # [S, M] g . delta_j, client by client: the last digits of a product of all
        # depend on all
        slope = torch.stack([rows @ align_memory(g) for g in clients.grad(x, "val")])
        slope = slope.double().gather(1, index.clamp(min=0))
        slope = w * (slope - (w * slope).sum(1, keepdim=True))
        n = client_state["a"].shape[1]
        # one step of Adam on the logits of those in `who`; the others' stay
        live = scatter_to_clients(who, torch.ones_like(slope), n) > 0
        d = scatter_to_clients(who, slope, n) + self.alpha_decay * client_state["a"]
        t = client_state["t"] + live.any(1, keepdim=True)
        m = 0.9 * client_state["m"] + 0.1 * d
        v = 0.999 * client_state["v"] + 0.001 * d**2
        once = t.clamp(min=1)
        first, second = (map_rows(partial(torch.pow, b), once) for b in (0.9, 0.999))
        root = (v / (1 - second)).sqrt() + 1e-8
        moved = {
            "a": client_state["a"] - self.alpha_lr * (m / (1 - first)) / root,
            "m": m,
            "v": v,
        }
        new = {
            k: torch.where(live, value, client_state[k]) for k, value in moved.items()
        }
        fit = clients.fit(x)
        up = {"delta": fit.w.sub_(x), "weights": scatter_to_clients(who, w, n)}
        return {"w": x, "t": t, **new}, up, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": self.mixed_models(down, client_state)[0]}

    def mixed_models(
        self, down: Payload, client_state: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each client's model [S, P], the weights [S, M] that made it and whose updates
        they weigh [S, M]."""
        rows, index = down["delta"]
        who = to_device(down["who"], client_state["a"].device)
        w = (
            client_state["a"]
            .gather(1, who.clamp(min=0))
            .masked_fill(who < 0, -torch.inf)
        )
        w = w.softmax(1).nan_to_num(0.0)
        return ops.aggregate(rows, w, index.clamp(min=0), client_state["w"]), w, who

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        round = torch.full_like(cohort.ids, cohort.round)
        weights = state["weights"]
        last = state["last"].index_copy(0, ids, round)
        kept = torch.isin(state["round"], last)
        return {
            "delta": torch.cat([state["delta"][kept], up["delta"]]),
            "who": torch.cat([state["who"][kept], ids]),
            "round": torch.cat([state["round"][kept], round]),
            "last": last,
            "weights": torch.zeros_like(weights).index_copy_(
                0, ids, up["weights"].to(weights)
            ),
        }, None


def scatter_to_clients(who: Tensor, values: Tensor, n: int) -> Tensor:
    """Values [S, M] of the clients `who` [S, M] (-1: of nobody) as a row for each of
    the n: [S, n]."""
    whole = values.new_zeros(len(who), n + 1)
    return whole.scatter(1, torch.where(who < 0, n, who), values)[:, :n]
