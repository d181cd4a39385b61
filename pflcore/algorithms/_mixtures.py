"""Clients that learn what to take from others.

An APFL client learns how to mix the global model and its own, a FedALA client does so
element by element. A FedFomo client takes the models that do better on its data, and an
L2C client the updates that help.

Symbols:

- S clients are in the cohort, N in the federation; a model has P parameters.
- M models or updates are sent to a client; `index` [S, M] are their shared rows.
- `w` [S, P] are models, `v` [S, P] APFL's personal ones; x is what a client downloads.
- FedALA's W [S, Q] are weights of the last Q parameters; theta are the clients' models.
- FedFomo's a [S, M + 1] are gains; L2C's a [N] are the logits of a client's weights.
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
    Changes,
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
from pflcore.data._ragged import Ragged
from pflcore._device import to_device
from pflcore.nn._context import forward_state
from pflcore.ops._sums import scatter_add
from pflcore.train import Clients, Net, Objective
from pflcore.train._context import TrainContext
from pflcore.train._evaluate import align_memory
from pflcore.train._random import client_seeds, client_shuffles, client_uniforms


@algorithm_options
class APFL(FedAvg):
    """APFL (Deng et al. 2020): each client mixes the global model and its own.

    server: x [P] · client: v [P], alpha [1] · down: x [S, P] · up: delta [S, P] (1
    model).

    Algorithm 1: client i uses `mixed = alpha_i v_i + (1 - alpha_i) w`. w is the global
    model; v_i and alpha_i are the client's own. v starts as w. A step takes one
    minibatch, and the old values throughout:

    - `w -= lr * grad(w)`
    - `v -= lr * alpha * grad(mixed)`
    - at the first step of a round `alpha -= alpha_lr * <v - w, grad(mixed)>`, kept
      within [0, 1]

    Deviations, each with another reading as an option: the paper adapts alpha once a
    round and does not say at which step; the authors' code mixes outputs
    (`mix="logits"`) and adds 0.02 alpha to alpha's gradient (`alpha_decay=0.02`).

    Batch norm's running statistics are those of the mixed model, which is the one that
    is used. Momentum and weight decay apply to w and v.
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
        reason = "takes steps of SGD along the gradients of two models"
        return super().traits._replace(
            batch_norm=("local",),  # statistics are those of the client's own mixture
            sgd_only_reason=reason,
            no_clip_grad_reason=reason,
        )

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        w0 = net.w0[None]
        return {"v": w0, "alpha": torch.full_like(w0[:, :1], self.alpha)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        training = clients.context.training
        lr = clients.lr
        size = clients.net.size
        alpha_lr = lr if self.alpha_lr is None else self.alpha_lr
        # Two gradients of the model's own loss: kernels may compute them.
        separate = self.mix == "weights" and not clients.net.buffer_names

        # It works on the rows in place.
        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            w = rows["w"]
            v = rows["v"]
            alpha = rows["alpha"]
            learns = self.adaptive and int(taken[0]) == 0
            if separate:
                by_w = grad(w)
                by_mixed = grad(torch.lerp(w, v, alpha))
                slope = ((v - w) * by_mixed).sum(1, keepdim=True) if learns else alpha
                by_v = by_mixed.mul_(alpha)
            else:
                joint = grad(torch.cat([w, v, alpha], 1))
                by_w, by_v, slope = joint.split([size, size, 1], 1)
            for key, g in (("w", by_w), ("v", by_v)):
                ops.sgd_step_(
                    rows[key],
                    g,
                    lr,
                    momentum=training.momentum,
                    buffer=rows.get(f"old {key}"),
                    weight_decay=training.weight_decay,
                )
            if learns:
                alpha.sub_(alpha_lr * (slope + self.alpha_decay * alpha)).clamp_(0, 1)
            return {}

        rows = {"w": x, **client_state}
        if training.momentum:
            rows |= {"old w": torch.zeros_like(x), "old v": torch.zeros_like(x)}
        objective = Objective(loss=None if separate else self.joint_loss)
        fit = clients.each_batch(rows, update, objective)
        new_state = {key: fit.rows[key] for key in client_state}
        return new_state, {"delta": fit.w - x}, fit

    def joint_loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        """Sum of the loss of w and the mixture's; `row` [2 P + 1] is w | v | alpha.

        Its gradient in w is that of w's loss, and in v and alpha that of the mixture's.
        """
        w, v, alpha = row.split([net.size, net.size, 1])
        before = forward_state.buffers
        loss_of_w = net.loss(w, x, y)
        forward_state.buffers = before  # the statistics that stay are the mixture's
        scores = self.mixture_scores(net, w.detach(), v, alpha, x)
        return loss_of_w + net.batch_loss(scores, y)

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
        """Scores of the model `alpha v + (1 - alpha) w` [P].

        Where the option mix is "logits", the same mixture of both models' scores.
        """
        return self.mixture_scores(net, model["w"], model["v"], model["alpha"], x)


@algorithm_options
class FedALA(FedAvg):
    """FedALA (Zhang et al. 2023): each client mixes two models, element by element.

    server: x [P] · client: theta [P], W [Q], begun [1] · down: x [S, P] (1 model) · up:
    delta [S, P] (1 model: theta - x).

    Algorithm 1: a round starts at `theta_i + (x - theta_i) * W_i`, with W_i in [0, 1]
    learned on the client's own data. Then the client trains that start as FedAvg does.
    W is for the last `layers` parameter tensors (Q columns); the lower layers are x's
    (Eq. 4).

    W is learned on a random part `sample` of a client's samples, drawn once a round. It
    starts at 1. Each minibatch takes the step `W <- clip(W - eta * grad f_i(start) * (x
    - theta), 0, 1)` (Eq. 5). The first time goes on until the last `window` losses have
    a standard deviation below `threshold`; every later round takes one epoch. A client
    is evaluated with the start from the newest x; the W for it is learned in the same
    way and thrown away.

    Decisions where the paper is silent: a loss is the mean over an epoch's minibatches;
    the first time ends after `max_epochs` epochs at the latest; batch norm's statistics
    stay while W is learned. Until its first round a client is evaluated with x.
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
        start, learned = self.start_models(down["x"], client_state, clients)
        fit = clients.fit(start)
        return {"theta": fit.w, **learned}, {"delta": fit.w - down["x"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": self.start_models(down["x"], client_state, clients)[0]}

    def start_models(
        self, x: Tensor, client_state: Tensors, clients: Clients
    ) -> tuple[Tensor, Tensors]:
        """The models [S, P] that clients train from, and their new W and "begun"."""
        theta = client_state["theta"]
        W = client_state["W"].clone()
        lower = x.shape[1] - W.shape[1]  # parameters that are x's
        gap = (x - theta)[:, lower:]
        fixed = {"lower": x[:, :lower], "theta": theta[:, lower:], "gap": gap}
        begun = client_state["begun"]
        learns = gap.ne(0).any(1)  # elsewhere W has no effect
        is_first_time = learns & (begun[:, 0] == 0)
        begun = torch.where(learns[:, None], 1, begun)
        context = subsample_training(clients, self.sample)
        clients = replace(clients, context=context)
        losses = W.new_zeros(len(W), 0, dtype=torch.float64)  # [S, epochs]
        for epoch in range(self.max_epochs):
            if not learns.any():
                break
            W[learns], loss = self._train_mixture(
                W[learns],
                {key: rows[learns] for key, rows in fixed.items()},
                clients.take(learns),
                epoch,
            )
            losses = torch.cat([losses, losses.new_zeros(len(W), 1)], 1)
            losses[learns, -1] = loss
            deviation = losses[:, -self.window :].std(1, correction=0)
            goes_on = (deviation >= self.threshold) | (epoch < self.window)
            learns = is_first_time & learns & goes_on
        start = torch.cat([fixed["lower"], fixed["theta"] + gap * W], 1)
        return start, {"W": W, "begun": begun}

    def _train_mixture(
        self, W: Tensor, fixed: Tensors, clients: Clients, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """W [S, Q] after an epoch of Eq. 5, and its mean loss [S]."""

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            moved = rows["W"] - self.eta * grad(rows["W"])
            return {"W": moved.clamp(0, 1)}

        objective = Objective(loss=self.loss, extra=fixed)
        fit = clients.each_batch(
            {"W": W}, update, objective, epochs=1, stream=f"W {epoch}"
        )
        return fit.rows["W"], fit.loss

    def loss(self, net: Net, W: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """f_i at the start that W [Q] makes; its gradient in W is that of Eq. 5."""
        upper = extra["theta"] + extra["gap"] * W
        return net.loss(torch.cat([extra["lower"], upper]), x, y)


def subsample_training(clients: Clients, fraction: float) -> TrainContext:
    """The context with a random part of each of these clients' training samples.

    The part is `fraction` of a client's samples, at least one, and drawn anew in every
    round. The context has no samples of other clients.
    """
    context = clients.context
    data = context.data
    ids = clients.ids.sort().values
    lists = data.lists("train").take(ids)
    count = (fraction * lists.size).long().clamp(min=1)
    if clients.net.buffer_names:
        count = _without_single_samples(count, lists.size, context)
    seeds = client_seeds(ids.numpy(), context.seed, clients.round, "sample")
    order = torch.from_numpy(client_shuffles(seeds, lists.size.numpy()))
    is_drawn = torch.arange(order.shape[1]) < count[:, None]
    drawn = (lists.begin[:-1, None] + order)[is_drawn]
    size = torch.zeros(data.n, dtype=torch.int64).index_copy(0, ids, count)
    index = {"train": Ragged(lists.flat[drawn], size)}
    return context._replace(data=data._copy_with(index=index))


def _without_single_samples(
    count: Tensor,  # [S]
    available: Tensor,  # [S]
    context: TrainContext,
) -> Tensor:  # [S]
    """Numbers of samples that leave no batch of a single sample, if there are two.

    Batch norm cannot train on one sample.
    """
    training = context.training
    single_left = (count % training.batch_size == 1) & (not training.drop_last)
    lone = (count == 1) | single_left
    fewer = torch.where(count > 1, count - 1, available.clamp(max=2))
    return torch.where(lone, fewer, count)


@algorithm_options
class FedFomo(Algorithm):
    """FedFomo (Zhang et al. 2021): a client moves towards the models that do better.

    server: the latest models w [N, P], affinities p [N, N], weights [N, N] (what each
    client of this round found for the others' models, before its own model's share) and
    seen [N] (who has taken part) · client: w, old [P] (its trained model, and the model
    before that training) · down: w [N, P] (shared rows: m other models, or all there
    are; m models) · up: w [S, P] (1 model) and a [S, N] (what was found for each). a_j
    = (L(old) - L(w_j)) / |w_j - old|, L on the split "val"; w <- old + sum_j w_j (w_j -
    old), w_j = max(a_j, 0) / sum max(a, 0), then local training.

    A candidate is better where its loss on the client's validation data is lower. The
    client's own trained model is always a candidate and costs nothing. Where there is
    no split "val", 20 % of each client's training samples are held out for it; a client
    of one sample has none, and does not mix.

    The server picks the m candidates by affinity, the sum of the a so far. A share
    `epsilon` of them, which falls by `decay` a round, is picked at random. An absent
    client's model can be sent, too. A candidate at distance 0, or whose loss is not
    finite, has weight 0.

    Deviation: where nothing is better, the client goes on from its trained model; the
    authors' code goes back to `old`.
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
        everyone = torch.arange(n)
        affinity = state["p"][ids]
        # [S, N]: True where the client may still be sent that client's model
        is_free = state["seen"] & (everyone != ids[:, None])
        epsilon = max(0.0, self.epsilon - self.decay * (cohort.round - 1))
        seed = int(torch.randint(1 << 62, (1,), generator=cohort.generator))
        index = torch.empty(len(ids), 0, dtype=torch.long)
        for i in range(min(self.m, int(is_free.sum(1).max()))):
            # A client's draws do not depend on the others of the cohort. The last one
            # decides whether the pick is random.
            draws = client_uniforms(client_seeds(ids.tolist(), seed, i), n + 1)
            by_affinity = draws[:, -1:] >= epsilon
            affinity = affinity.masked_fill(~is_free, -torch.inf)
            is_best = affinity == affinity.amax(1, keepdim=True)
            # A best one gets 1 more than its draw, so the draws decide among equals.
            score = draws[:, :-1] + (is_best & by_affinity)
            pick = score.masked_fill(~is_free, -1).argmax(1)
            pick = torch.where(is_free.any(1), pick, -1)[:, None]
            index = torch.cat([index, pick], 1)
            is_free = is_free & (everyone != pick)
        return {"w": SharedRows(state["w"], to_device(index, state["w"].device))}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, index = down["w"]
        is_sent = index >= 0
        index = index.clamp(min=0)
        old = client_state["old"]
        trained = client_state["w"]
        a = self._gains(rows, index, old, trained, clients)
        a[:, :-1] *= is_sent
        weights = a.clamp(min=0)
        # Added one by one: columns of zeros, for other clients, change no digit so.
        total = reduce(torch.add, weights.unbind(1))[:, None]
        weights = weights / total.clamp(min=torch.finfo(weights.dtype).tiny)
        has_better = (a > 0).any(1, keepdim=True)
        own_weight = torch.where(has_better, weights[:, -1:].to(trained), 1)
        start = ops.aggregate(rows, weights[:, :-1], index, own_weight * trained)
        fit = clients.fit(start)
        zeros = a.new_zeros(len(a), clients.context.data.n)
        gain_of_client = scatter_add(zeros, index, a[:, :-1])
        upload = {"w": fit.w, "a": gain_of_client}
        return {"w": fit.w, "old": start}, upload, fit

    def _gains(
        self,
        rows: Tensor,  # [R, P]
        index: Tensor,  # [S, M]
        old: Tensor,  # [S, P]
        trained: Tensor,  # [S, P]
        clients: Clients,
    ) -> Tensor:  # [S, M + 1]
        """How much lower each candidate's loss is than that of `old`, per distance.

        The last candidate is the client's own trained model.
        """
        before = clients.loss(old, "val").double()
        gains = []
        # One candidate at a time: all of them may not fit into memory.
        for candidate in chain((rows[i] for i in index.T), [trained]):
            square = (candidate - old).square().sum(1, dtype=torch.float64)
            length = square.sqrt()
            gain = (before - clients.loss(candidate, "val")) / length
            gains.append(torch.where(length > 0, gain, 0.0))
        return torch.stack(gains, 1).nan_to_num(0.0, 0.0, 0.0)

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        gains = up["a"].to(state["p"])
        weights = torch.zeros_like(state["p"])
        weights.index_copy_(0, ids, normalize_rows(gains.clamp(min=0)))
        seen = torch.ones_like(ids, dtype=torch.bool)
        changes: Changes = {
            "w": RowUpdate(ids, up["w"]),
            "p": RowUpdate(ids, state["p"][ids] + gains),
            "weights": weights,
            "seen": RowUpdate(ids, seen),
        }
        return changes, None


@algorithm_options
class L2C(Algorithm):
    """L2C (Li et al. 2022): each client learns whose updates to take.

    server: the updates of every round that is some client's last, which it relays:
    delta [U, P], who [U] sent each and in which round [U]; last [N] (each client's last
    round, 0: none), and weights [N, N] (what the clients of this round made of the
    updates of their last one; zeros for the absent and at first) · client: w [P] (its
    model before the round that is under way), logits a [N] and Adam's m, v [N], t [1] ·
    down: delta [U, P] (shared rows: the updates of the client's last round, N models at
    full participation) and who [S, M] (the senders; -1: none) · up: delta [S, P] (1
    model) and weights [S, N] (for the record).

    A client mixes when it takes part again, or is evaluated: `w_i <- w_i + sum_j
    softmax(a_i)_j delta_j` over the updates of its last round. Clients that were absent
    from that round are masked out of the softmax. Then its logits a_i take one step of
    Adam along their exact gradient `w_j (g . delta_j - sum_m w_m g . delta_m)`. There
    w_j are the softmax's weights, and g is the gradient on the split "val" at the mixed
    model; its sign follows delta = after - before. Where there is no such split, 20 %
    of each client's training samples are held out for it; a client of one sample has
    none and keeps its logits.

    No official code exists; this is the form that independent re-implementations agree
    on. Deviations: one step a round on all validation data; no pruning of neighbours
    (T0, K0), which Table 4 of the FedDWA paper does not count either.
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
        adam = {"m": zeros, "v": zeros, "t": zeros[:, :1]}
        return {"w": net.w0[None], "a": zeros, **adam}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        # [S, U]: True for the updates of the client's last round
        of_last = state["round"] == state["last"][cohort.ids][:, None]
        # Each client gets as many columns as the largest round has updates.
        width = int(state["round"].bincount().max()) if of_last.numel() else 0
        order = of_last.byte().sort(dim=1, descending=True, stable=True).indices
        index = order[:, :width]
        who = state["who"][index].masked_fill(~of_last.gather(1, index), -1)
        index = index.masked_fill(who < 0, -1)  # of another round: not sent
        delta = state["delta"]
        return {"delta": SharedRows(delta, to_device(index, delta.device)), "who": who}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, index = down["delta"]
        x, weights, who = self.mixed_models(down, client_state)
        # [S, U] g . delta_j, client by client: the last digits of a product with all
        # gradients would depend on all clients.
        products = [rows @ align_memory(g) for g in clients.grad(x, "val")]
        slope = torch.stack(products).double().gather(1, index.clamp(min=0))
        slope = weights * (slope - (weights * slope).sum(1, keepdim=True))
        new_state = self._adam_step(client_state, who, slope)
        fit = clients.fit(x)
        n = client_state["a"].shape[1]
        upload = {
            "delta": fit.w.sub_(x),
            "weights": scatter_to_clients(who, weights, n),
        }
        return {"w": x, **new_state}, upload, fit

    def _adam_step(
        self,
        client_state: Tensors,
        who: Tensor,  # [S, M]
        slope: Tensor,  # [S, M]
    ) -> Tensors:
        """Logits a, and Adam's m, v and t, after a step; only those of `who` move."""
        a = client_state["a"]
        n = a.shape[1]
        moves = scatter_to_clients(who, torch.ones_like(slope), n) > 0
        d = scatter_to_clients(who, slope, n) + self.alpha_decay * a
        t = client_state["t"] + moves.any(1, keepdim=True)
        m = 0.9 * client_state["m"] + 0.1 * d
        v = 0.999 * client_state["v"] + 0.001 * d**2
        steps = t.clamp(min=1)  # where no logit moves, t may be 0
        decay_m = map_rows(partial(torch.pow, 0.9), steps)
        decay_v = map_rows(partial(torch.pow, 0.999), steps)
        root = (v / (1 - decay_v)).sqrt() + 1e-8
        moved = {"a": a - self.alpha_lr * (m / (1 - decay_m)) / root, "m": m, "v": v}
        new_state = {
            key: torch.where(moves, value, client_state[key])
            for key, value in moved.items()
        }
        return {"t": t, **new_state}

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": self.mixed_models(down, client_state)[0]}

    def mixed_models(
        self, down: Payload, client_state: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each client's model, the weights that made it, and whose updates they weigh.

        [S, P], [S, M] and [S, M]; -1 stands for no client.
        """
        rows, index = down["delta"]
        a = client_state["a"]
        who = to_device(down["who"], a.device)
        is_nobody = who < 0
        logits = a.gather(1, who.clamp(min=0)).masked_fill(is_nobody, -torch.inf)
        weights = logits.softmax(1).nan_to_num(0.0)  # NaN: no updates at all
        x = ops.aggregate(rows, weights, index.clamp(min=0), client_state["w"])
        return x, weights, who

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        this_round = torch.full_like(ids, cohort.round)
        last = state["last"].index_copy(0, ids, this_round)
        # An update stays as long as its round is some client's last one.
        stays = torch.isin(state["round"], last)
        weights = torch.zeros_like(state["weights"])
        weights.index_copy_(0, ids, up["weights"].to(weights))
        changes: Changes = {
            "delta": torch.cat([state["delta"][stays], up["delta"]]),
            "who": torch.cat([state["who"][stays], ids]),
            "round": torch.cat([state["round"][stays], this_round]),
            "last": last,
            "weights": weights,
        }
        return changes, None


def scatter_to_clients(who: Tensor, values: Tensor, n: int) -> Tensor:
    """Values [S, M] of the clients `who` [S, M] in their columns of [S, n].

    A value of -1, of no client, goes to a last column that is left out.
    """
    table = values.new_zeros(len(who), n + 1)
    return table.scatter(1, torch.where(who < 0, n, who), values)[:, :n]
