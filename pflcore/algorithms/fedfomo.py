"""FedFomo: clients look for the models that help them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
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
    Pool,
    Rows,
    Tensors,
    Traits,
)
from pflcore.check import Count, NonNegative, Share
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net
from pflcore.train.random import client_seeds, uniforms


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """Zhang et al. 2021, FedFomo: a client moves towards the models that do better than its own on
    its validation data.

    server: the latest models w [N, P], affinities p [N, N] · client: w, its trained model, and old,
    the model before that training
    [P] each · down: m other models, or all there are (m models) · up: w (1 model) and the weights
    found [N].
    a_j = (L(old) - L(w_j)) / |w_j - old|, L on the split "val"; w <- old + sum_j w_j (w_j - old),
    w_j = max(a_j, 0) / sum max(a, 0),
    then local training. The client's own trained model is always a candidate and costs nothing.
    20 % of each client's training samples are held out for that where there is no split "val" (a
    client of one sample has none, and does
    not mix). The server picks the m by affinity, the sum of the a so far; a share `epsilon`,
    falling by `decay` a round, is picked at
    random. Where nothing is better the client goes on from its trained model;
    `none_positive="discard"` goes back to `old`, as the authors'
    code does. A candidate at distance 0, or whose loss is not finite, has weight 0. An absent
    client's model can be sent. `server_lr` and
    `weighting` play no part.
    """

    m: Count = 5  # models downloaded
    epsilon: Share = 0.3  # share of them picked at random in round 1
    decay: NonNegative = 0.05  # by how much it falls in a round
    norm: Literal["l2", "l1"] = "l2"  # of w_j - old; "l1" is the authors' code's default
    none_positive: Literal["keep", "discard"] = "keep"  # the trained model, where nothing is better

    traits = Traits(batch_norm=("local",), needs_val=True, models={"w": "server.w"})

    def init(self, x0: Tensor, n: int) -> Tensors:
        none, seen = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.bool)
        return {"w": x0.repeat(n, 1), "p": none, "found": none, "seen": seen}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None], "old": net.w0[None]}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        ids, n = cohort.ids, cohort.n
        free = state["seen"] & (torch.arange(n) != ids[:, None])  # [S, N] who can be sent to whom
        epsilon = max(0.0, self.epsilon - self.decay * (cohort.round - 1))
        seed = int(torch.randint(1 << 62, (1,), generator=cohort.generator))
        picked = []
        for i in range(min(self.m, int(free.sum(1).max()))):
            # a client's own, independent of the others
            draws = uniforms(client_seeds(ids.tolist(), seed, i), n + 1)
            p = state["p"][ids].masked_fill(~free, -torch.inf)
            # chance decides among equals
            best = (p == p.amax(1, keepdim=True)) & (draws[:, -1:] >= epsilon)
            pick = (draws[:, :-1] + best).masked_fill(~free, -1).argmax(1)
            picked.append(torch.where(free.any(1), pick, -1))
            free = free & (torch.arange(n) != picked[-1][:, None])
        none = torch.empty(len(ids), 0, dtype=torch.long)
        index = torch.stack(picked, 1) if picked else none
        return {"w": Pool(state["w"], onto(index, state["w"].device))}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        rows, index = down["w"]
        given, index = index >= 0, index.clamp(min=0)
        candidates = chain((rows[i] for i in index.T), [own["w"]])  # the own model last
        a = self.gains(own["old"], candidates, clients)  # [S, m + 1]
        a[:, :-1] *= given
        w = mixing_weights(a)
        rest = own["old"] if self.none_positive == "discard" else own["w"]
        better = w.sum(1, keepdim=True) > 0
        start = torch.where(better, w[:, -1:].to(rest) * own["w"], rest)
        if index.shape[1]:
            start = ops.aggregate(rows, w[:, :-1], index, base=start)
        fit = clients.fit(start)
        weights = a.new_zeros(len(a), clients.setting.data.n)
        found = weights.scatter_add_(1, index, a[:, :-1])
        return {"w": fit.w, "old": start}, {"w": fit.w, "a": found}, fit

    def gains(self, old: Tensor, candidates: Iterable[Tensor], clients: Clients) -> Tensor:
        """How much loss falls per distance from `old` [S, P] to each candidate [S, P]: float64
        [S, candidates]."""
        before, gains = clients.loss(old, "val").double(), []
        for c in candidates:
            d = c - old
            length = (d.abs() if self.norm == "l1" else d.square()).sum(1, dtype=torch.float64)
            length = length if self.norm == "l1" else length.sqrt()
            gain = (before - clients.loss(c, "val")) / length
            gains.append(torch.where(length > 0, gain, 0.0))
        return torch.stack(gains, 1).nan_to_num(0.0, 0.0, 0.0)

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": own["w"]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        ids, a = cohort.ids, up["a"].to(state["p"])
        return {
            "w": Rows(ids, up["w"]),
            "p": Rows(ids, state["p"][ids] + a),
            "found": torch.zeros_like(state["p"]).index_copy_(0, ids, a),
            "seen": Rows(ids, ids >= 0),
        }, None

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """weights [N, N]: what each client of this round found for the others' models, before its
        own model's share."""
        return {"weights": mixing_weights(state["found"])}


def mixing_weights(a: Tensor) -> Tensor:
    """`max(a, 0) / sum max(a, 0)` by row; zeros where nothing is positive."""
    a = a.clamp(min=0)
    total = a.sum(1, keepdim=True)
    return torch.where(total > 0, a / total.clamp(min=torch.finfo(a.dtype).tiny), 0.0)
