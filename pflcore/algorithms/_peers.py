"""Clients that choose which other clients' models or updates to take.

A FedFomo client takes the models that do better on its data, an L2C client the updates
that help.

Symbols:

- S clients are in the cohort, N in the federation; a model has P parameters.
- M models or updates are sent to a client; `index` [S, M] are their shared rows.
- U updates are what an L2C server relays; `who` are their senders.
- `w` [S, P] are models; FedFomo's `old` [S, P] are those before the last training.
- FedFomo's a [S, M + 1] are gains; L2C's a [S, N] are the logits of clients' weights.
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import chain

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Claim,
    Cohort,
    Payload,
    RowUpdate,
    SharedRows,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    map_rows,
    normalize_rows,
)
from pflcore.check import (
    NonNegativeFloat,
    PositiveInt,
    UnitFloat,
)
from pflcore.ops._sums import scatter_add
from pflcore.train import Clients, Net
from pflcore.train._evaluate import align_memory
from pflcore.train._random import client_seeds, client_uniforms


@algorithm_options
class FedFomo(Algorithm):
    """FedFomo (Zhang et al. 2021): a client moves towards the models that do better.

    server: the latest models w [N, P], affinities p [N, N] and weights [N, N] (what
    each client of this round found for the others' models, before its own model's
    share) · client: w, old [P] (its trained model,
    and the model before that training) · down: w [N, P] (shared rows: m other models,
    or all there are; m models) · up: w [S, P] (1 model) and a [S, N] (what was found
    for each). L is the loss on the split "val".

    A round of a client: `a_j = (L(old) - L(w_j)) / |w_j - old|`; `w <- old + sum_j b_j
    (w_j - old)` with `b_j = max(a_j, 0) / sum max(a, 0)`; then local training from w.

    A candidate w_j is better where its loss on the client's validation data is lower.
    The client's own trained model is always a candidate and costs no traffic. Where
    there is no split "val", 20 % of each client's training samples are held out for it;
    a client of one sample has no held-out sample, and does not mix.

    The server picks the m candidates by affinity, the sum of the a so far. An absent
    client's model can be sent, too. A candidate at distance 0, or whose loss is not
    finite, has weight 0.

    Deviation: where no candidate is better, the client goes on from its trained model;
    the authors' code goes back to `old`.

    Args:
        m: Models of other clients that a client downloads in a round, at most.
        epsilon: Share of the downloaded models that the server picks at random in
            round 1, from 0 to 1.
        decay: Number by which the random share falls in each round, down to 0.
    """

    m: PositiveInt = 5
    epsilon: UnitFloat = 0.3
    decay: NonNegativeFloat = 0.05

    traits = Traits(
        batch_norm=("local",),
        needs_val=True,
        model_uploads={"w": "server.w"},
        reported_state=("weights",),
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        none = torch.zeros(n, n, dtype=torch.float64)
        return {"w": x0.repeat(n, 1), "p": none, "weights": none}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None], "old": net.w0[None]}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        ids = cohort.ids
        n = cohort.n
        everyone = torch.arange(n)
        affinity = state["p"][ids]
        # [S, N]: True where the server may still send the row's client that model
        is_free = cohort.has_participated & (everyone != ids[:, None])
        epsilon = max(0.0, self.epsilon - self.decay * (cohort.round - 1))
        seed = int(torch.randint(1 << 62, (1,), generator=cohort.generator))
        index = torch.empty(len(ids), 0, dtype=torch.long)
        most_candidates = int(is_free.sum(1).max())
        for i in range(min(self.m, most_candidates)):
            # A client's draws do not depend on the others of the cohort. The last one
            # decides whether the pick is random.
            draws = client_uniforms(
                client_seeds(ids.tolist(), seed, i), cohort.num_trainable + 1
            )
            # A client that cannot train has no model that could be picked.
            columns = torch.cat([cohort.trainable_clients, torch.tensor([n])])
            draws = draws.new_zeros(len(ids), n + 1).index_copy(1, columns, draws)
            by_affinity = draws[:, -1:] >= epsilon
            affinity = affinity.masked_fill(~is_free, -torch.inf)
            is_best = affinity == affinity.amax(1, keepdim=True)
            # The best affinities get 1 more than their draws. So the draws decide among
            # equal ones.
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
        # Added one by one: then columns of zeros, for other clients, change no digit.
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
        """The fall of the loss from `old` to each candidate, per distance.

        The last candidate is the client's own trained model.
        """
        before = clients.loss(old, "val").double()
        gains = []
        # One candidate after the other: all of them may not fit into memory.
        for candidate in chain((rows[i] for i in index.T), [trained]):
            square = (candidate - old).square().sum(1, dtype=torch.float64)
            length = square.sqrt()
            gain = (before - clients.loss(candidate, "val")) / length
            gains.append(torch.where(length > 0, gain, 0.0))
        return torch.stack(gains, 1).nan_to_num(0.0, 0.0, 0.0)

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        # A gain is a loss over a distance. Within these, sums over rounds are finite.
        most = torch.finfo(torch.float32).max
        gains = Claim(state["p"][0], low=-most, high=most)
        return {**super().uploads(state, down, cohort), "a": gains}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        gains = up["a"].to(state["p"])
        weights = torch.zeros_like(state["p"])
        weights.index_copy_(0, ids, normalize_rows(gains.clamp(min=0)))
        changes: Changes = {
            "w": RowUpdate(ids, up["w"]),
            "p": RowUpdate(ids, state["p"][ids] + gains),
            "weights": weights,
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
    model; its sign follows delta = after - before. In a federation without that split,
    20 % of each client's training samples are held out for it; a client of one sample
    has no held-out sample and keeps its logits.

    No official code exists; this is the form that independent re-implementations agree
    on. Deviations: one step a round on all validation data; no pruning of neighbours
    (T0, K0), which Table 4 of the FedDWA paper does not count either.

    Args:
        alpha_lr: Step size of Adam for the logits a.
        alpha_decay: Weight decay of the logits. At 0 they decay towards no value.
    """

    alpha_lr: NonNegativeFloat = 0.1
    alpha_decay: NonNegativeFloat = 0.01

    # Only parameters are mixed, no statistics of batch norm.
    traits = Traits(
        batch_norm=("local",),
        needs_val=True,
        growing_state=("delta", "who", "round"),
        reported_state=("weights",),
    )

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
        # Each client gets a column for every update of the largest round.
        width = int(state["round"].bincount().max()) if of_last.numel() else 0
        order = of_last.byte().sort(dim=1, descending=True, stable=True).indices
        index = order[:, :width]
        who = state["who"][index].masked_fill(~of_last.gather(1, index), -1)
        # An update of another round is not sent.
        index = index.masked_fill(who < 0, -1)
        delta = state["delta"]
        return {"delta": SharedRows(delta, to_device(index, delta.device)), "who": who}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, index = down["delta"]
        x, weights, who = self.mixed_models(down, client_state)
        # Products [S, U] g . delta_j, client by client: the last digits of a product
        # with all gradients would depend on all clients.
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
        """Logits a, and Adam's m, v and t, after a step.

        Only the logits of the clients `who` move.
        """
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
        step = self.alpha_lr * (m / (1 - decay_m)) / root
        moved = {"a": a - step, "m": m, "v": v}
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
        """The clients' models [S, P], and the weights and senders that made them.

        The senders [S, M] are the clients whose updates the weights [S, M] are for; -1
        stands for no client.
        """
        rows, index = down["delta"]
        a = client_state["a"]
        who = to_device(down["who"], a.device)
        is_nobody = who < 0
        logits = a.gather(1, who.clamp(min=0)).masked_fill(is_nobody, -torch.inf)
        weights = logits.softmax(1).nan_to_num(0.0)  # NaN: no updates at all
        x = ops.aggregate(rows, weights, index.clamp(min=0), client_state["w"])
        return x, weights, who

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        return {
            "delta": state["delta"].new_empty(state["delta"].shape[1]),
            "weights": Claim(state["weights"][0], low=0, high=1, most=1),
        }

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
    """Values [S, M] of clients in the clients' columns of a table [S, n].

    `who` [S, M] are the clients. A value of the client -1, which stands for no client,
    is left out.
    """
    table = values.new_zeros(len(who), n + 1)
    return table.scatter(1, torch.where(who < 0, n, who), values)[:, :n]
