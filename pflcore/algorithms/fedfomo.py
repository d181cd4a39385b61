"""FedFomo: a client moves towards the models that do better than its own on its validation data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Commit, FedAvg, Payload, Pool, Tensors
from pflcore.data.ragged import onto
from pflcore.ops.kinds import Count, NonNegative, Share
from pflcore.train import Local
from pflcore.train.net import Net
from pflcore.train.random import client_seeds, uniforms


@dataclass(frozen=True)
class FedFomo(FedAvg):
    """Zhang et al. 2021, FedFomo: a client moves towards the models that do better than its own on its validation data.

    server: the latest models w [N, P], affinities p [N, N] · client: w, its trained model, and old, the model before that training
    [P] each · down: m other models, or all there are (m models) · up: w (1 model) and the weights found [N].
    a_j = (L(old) - L(w_j)) / |w_j - old|, L on the split "val"; w <- old + sum_j w_j (w_j - old), w_j = max(a_j, 0) / sum max(a, 0),
    then local training. The client's own trained model is always a candidate and costs nothing.
    20 % of each client's training samples are held out for that where there is no split "val" (a client of one sample has none, and does
    not mix). The server picks the m by affinity, the sum of the a so far; a share `epsilon`, falling by `decay` a round, is picked at
    random. Where nothing is better the client goes on from its trained model; `none_positive="discard"` goes back to `old`, as the authors'
    code does. A candidate at distance 0, or whose loss is not finite, has weight 0. An absent client's model can be sent. `server_lr` and
    `weighting` play no part.
    """

    m: Count = 5  # models downloaded
    epsilon: Share = 0.3  # share of them picked at random in round 1
    decay: NonNegative = 0.05  # by how much it falls in a round
    norm: Literal["l2", "l1"] = "l2"  # of w_j - old: "l2", or "l1", the authors' code's default
    none_positive: Literal["keep", "discard"] = "keep"  # "keep" the trained model or "discard" it

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # parameters alone are mixed, as others have it too
    needs_val: ClassVar[bool] = True  # needs a split "val" of each client's data
    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        g = {"w": net.w0.expand(n, -1), "p": torch.zeros(n, n, dtype=torch.float64), "seen": torch.zeros(n, dtype=torch.bool)}
        return g, {"w": net.w0, "old": net.w0}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        ids, seen = cohort.ids, g["seen"]
        free = seen & (torch.arange(cohort.n) != ids[:, None])  # [S, N] who can be sent to whom
        epsilon = max(0.0, self.epsilon - self.decay * (cohort.round - 1))
        seed = int(torch.randint(1 << 62, (1,), generator=gen))
        picked = []
        for i in range(min(self.m, int(free.sum(1).max()))):
            draws = uniforms(client_seeds(ids.tolist(), seed, i), cohort.n + 1)  # a client's own, whoever else is there
            p = g["p"][ids].masked_fill(~free, -torch.inf)
            best = (p == p.amax(1, keepdim=True)) & (draws[:, -1:] >= epsilon)  # chance decides among equals
            pick = (draws[:, :-1] + best).masked_fill(~free, -1).argmax(1)
            picked.append(torch.where(free.any(1), pick, -1))
            free = free & (torch.arange(cohort.n) != picked[-1][:, None])
        index = torch.stack(picked, 1) if picked else torch.empty(len(ids), 0, dtype=torch.long)
        return {"w": Pool(g["w"], onto(index, g["w"].device))}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        rows, index = down["w"]
        given, index = index >= 0, index.clamp(min=0)
        a = self.gains(own["old"], chain((rows[i] for i in index.T), [own["w"]]), local)  # [S, m + 1], the own model last
        a[:, :-1] *= given
        w, a = mixing_weights(a), a.cpu()
        rest = own["old"] if self.none_positive == "discard" else own["w"]
        start = torch.where(w.sum(1, keepdim=True) > 0, w[:, -1:].to(rest) * own["w"], rest)
        if index.shape[1]:
            start = ops.aggregate(rows, w[:, :-1], index, base=start)
        new = local.fit(start).w
        weights = torch.zeros(len(a), local.setting.data.n, dtype=a.dtype).scatter_add_(1, index.cpu(), a[:, :-1])
        return {"w": new, "old": start}, {"w": new, "a": weights}

    def gains(self, old: Tensor, candidates: Iterable[Tensor], local: Local) -> Tensor:
        """How much loss falls per distance from `old` [S, P] to each candidate [S, P]: float64 [S, candidates]."""
        before = local.loss(old, "val").double()
        gains = []
        for c in candidates:
            d = c - old
            length = d.abs().sum(1, dtype=torch.float64) if self.norm == "l1" else d.square().sum(1, dtype=torch.float64).sqrt()
            gains.append(torch.where(length > 0, (before - local.loss(c, "val")) / length, 0.0))
        return torch.stack(gains, 1).nan_to_num(0.0, 0.0, 0.0)

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        a, seen = up["a"].to(g["p"]), torch.ones(len(cohort.ids), dtype=torch.bool)
        affinity = torch.zeros_like(g["p"]).index_copy_(0, cohort.ids, a)
        Commit(cohort.ids, (g["w"], up["w"]), (g["p"], g["p"][cohort.ids] + a), (g["seen"], seen)).write()
        return {**g, "found": affinity}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": own["w"]}

    def report(self, g: Tensors) -> Tensors:
        """weights [N, N]: what each client of this round found for the others' models, before its own model's share."""
        return {"weights": mixing_weights(g["found"])} if "found" in g else {}


def mixing_weights(a: Tensor) -> Tensor:
    """`max(a, 0) / sum max(a, 0)` by row; zeros where nothing is positive."""
    a = a.clamp(min=0)
    total = a.sum(1, keepdim=True)
    return torch.where(total > 0, a / total.clamp(min=torch.finfo(a.dtype).tiny), 0.0)
