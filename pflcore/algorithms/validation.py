"""Rivals of FedDWA whose clients find their mixing weights themselves, on validation data: FedFomo and L2C."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Commit, FedAvg, Payload, Pool, Tensors
from pflcore.engine import onto
from pflcore.flat import Net
from pflcore.local import Local


@dataclass(frozen=True)
class FedFomo(FedAvg):
    """Zhang et al. 2021, FedFomo: a client moves towards the models that do better than its own on its validation data.

    server: the latest models w [N, P], affinities p [N, N] · client: w, its trained model, and old, the model before that training
    [P] each · down: m other models (m models) · up: w (1 model) and the weights found [N].
    a_j = (L(old) - L(w_j)) / |w_j - old|, L on the split "val"; w <- old + sum_j w_j (w_j - old), w_j = max(a_j, 0) / sum max(a, 0),
    then local training. The client's own trained model is always a candidate and costs nothing.
    The server picks the m by affinity, the sum of the a so far; a share `epsilon`, falling by `decay` a round, is picked at random.
    Where nothing is better the client goes on from its trained model; `none_positive="discard"` goes back to `old`, as the
    authors' code does. A candidate at distance 0, or whose loss is not finite, has weight 0. An absent client's model can be sent.
    `lr` and `weighting` play no part.
    """

    m: int = 5  # models downloaded
    epsilon: float = 0.3  # share of them picked at random in round 1
    decay: float = 0.05  # by how much it falls in a round
    norm: str = "l2"  # of w_j - old: "l2", or "l1", the authors' code's default
    none_positive: str = "keep"  # "keep" the trained model or "discard" it

    needs_val: ClassVar[bool] = True  # needs a split "val" of each client's data

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m < 1:
            raise ValueError(f"m: expected at least 1 model to download, got {self.m}.")
        if not (0 <= self.epsilon <= 1 and self.decay >= 0):
            raise ValueError(f"epsilon, decay: expected a share from 0 to 1 and a number >= 0, got {self.epsilon} and {self.decay}.")
        if self.norm not in ("l1", "l2"):
            raise ValueError(f"norm: expected 'l1' or 'l2', got {self.norm!r}.")
        if self.none_positive not in ("keep", "discard"):
            raise ValueError(f"none_positive: expected 'keep' or 'discard', got {self.none_positive!r}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        g = {"w": net.w0.expand(n, -1), "p": torch.zeros(n, n, dtype=torch.float64), "seen": torch.zeros(n, dtype=torch.bool)}
        return g, {"w": net.w0, "old": net.w0}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        ids, seen = cohort.ids, g["seen"]
        free = seen & (torch.arange(cohort.n) != ids[:, None])  # [S, N] who can be sent to whom
        count = min(self.m, int(free.sum(1).min()))
        epsilon = max(0.0, self.epsilon - self.decay * (cohort.round - 1))
        picked = []
        for _ in range(count):
            chance = torch.rand(free.shape, generator=gen, dtype=torch.float64)
            explore = torch.rand(len(ids), 1, generator=gen) < epsilon
            p = g["p"][ids].masked_fill(~free, -torch.inf)
            best = (p == p.amax(1, keepdim=True)) & ~explore  # chance decides among equals
            picked.append((chance + best).masked_fill(~free, -1).argmax(1))
            free = free & (torch.arange(cohort.n) != picked[-1][:, None])
        index = torch.stack(picked, 1) if picked else torch.empty(len(ids), 0, dtype=torch.long)
        return {"w": Pool(g["w"], onto(index, g["w"].device))}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        rows, index = down["w"]
        a = self.gains(own["old"], chain((rows[i] for i in index.T), [own["w"]]), local)  # [S, m + 1], the own model last
        w, a = mixing_weights(a), a.cpu()
        rest = own["old"] if self.none_positive == "discard" else own["w"]
        start = torch.where(w.sum(1, keepdim=True) > 0, w[:, -1:].to(rest) * own["w"], rest)
        if index.shape[1]:
            start = ops.aggregate(rows, w[:, :-1], index, base=start)
        new = local.fit(start).w
        found = torch.zeros(len(a), local.setting.data.n, dtype=a.dtype).scatter_(1, index.cpu(), a[:, :-1])
        return {"w": new, "old": start}, {"w": new, "a": found}

    def gains(self, old: Tensor, candidates: Iterable[Tensor], local: Local) -> Tensor:
        """How much loss falls per distance from `old` [S, P] to each candidate [S, P]: float64 [S, candidates]."""
        before = local.loss(old, "val").double()
        found = []
        for c in candidates:
            d = c - old
            length = d.abs().sum(1, dtype=torch.float64) if self.norm == "l1" else d.square().sum(1, dtype=torch.float64).sqrt()
            found.append(torch.where(length > 0, (before - local.loss(c, "val")) / length, 0.0))
        return torch.stack(found, 1).nan_to_num(0.0, 0.0, 0.0)

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        a, seen = up["a"].to(g["p"]), torch.ones(len(cohort.ids), dtype=torch.bool)
        found = torch.zeros_like(g["p"]).index_copy_(0, cohort.ids, a)
        Commit(cohort.ids, (g["w"], up["w"]), (g["p"], g["p"][cohort.ids] + a), (g["seen"], seen)).write()
        return {**g, "found": found}

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


@dataclass(frozen=True)
class L2C(FedAvg):
    """Li et al. 2022, L2C: each client learns, on validation data, whose updates to take: w_i <- w_i + sum_j softmax(a_i)_j delta_j.

    server: relays the updates, and keeps those of every round that is some client's last · client: w [P], its model before the round
    that is under way, logits a [N] and their Adam state · down: the updates of the client's last round (N models at full
    participation) · up: delta (1 model), and its weights [N] for the record.
    A client mixes when it takes part again, or is evaluated; then its logits take one step of Adam along their exact gradient
    w_j (g . delta_j - sum_m w_m g . delta_m), g the gradient on the split "val" at the mixed model (its sign follows delta = after -
    before). Clients absent from a round are masked out of its softmax. No official code exists; this is the form that independent
    re-implementations agree on. Deviations: one step a round on all validation data; no pruning of neighbours (T0, K0), which
    Table 4 of the FedDWA paper does not count either. `lr` and `weighting` play no part.
    """

    alpha_lr: float = 0.1  # Adam's
    alpha_decay: float = 0.01  # weight decay of the logits

    needs_val: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.alpha_lr >= 0 and self.alpha_decay >= 0):
            raise ValueError(f"alpha_lr, alpha_decay: expected numbers >= 0, got {self.alpha_lr} and {self.alpha_decay}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        none, zeros = torch.empty(0, dtype=torch.long), torch.zeros(n, dtype=torch.float64, device=net.w0.device)
        g = {"delta": net.w0.new_empty(0, net.size), "who": none, "round": none, "last": torch.zeros(n, dtype=torch.long)}
        g["p"] = torch.zeros(n, n, dtype=torch.float64)
        return g, {"w": net.w0, "a": zeros, "m": zeros, "v": zeros, "t": zeros[:1]}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        mine = g["round"] == g["last"][cohort.ids][:, None]  # [S, R]
        width = int(mine.sum(1).max()) if mine.numel() else 0
        index = mine.byte().sort(dim=1, descending=True, stable=True).indices[:, :width]
        who = g["who"][index].masked_fill(~mine.gather(1, index), -1)
        return {"delta": Pool(g["delta"], onto(index, g["delta"].device)), "who": who}  # -1: not an update of this client's last round

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        (rows, index), who = down["delta"], onto(down["who"], own["a"].device)
        x, w = self.mixed(down, own)
        new = {"w": x}
        if index.shape[1]:
            slope = (local.grad(x, "val") @ rows.T).double().gather(1, index)  # [S, M] g . delta_j
            new |= self.adam(own, who, w * (slope - (w * slope).sum(1, keepdim=True)))
        n = own["a"].shape[1]
        p = torch.zeros(len(w), n + 1, dtype=w.dtype, device=w.device).scatter(1, torch.where(who < 0, n, who), w)[:, :n]
        return {**own, **new}, {"delta": local.fit(x).w - x, "p": p}

    def mixed(self, down: Payload, own: Tensors) -> tuple[Tensor, Tensor]:
        """Each client's model [S, P] and the weights [S, M] that made it."""
        (rows, index), who = down["delta"], onto(down["who"], own["a"].device)
        if not index.shape[1]:
            return own["w"], own["a"][:, :0]
        w = own["a"].gather(1, who.clamp(min=0)).masked_fill(who < 0, -torch.inf).softmax(1).nan_to_num(0.0)
        return ops.aggregate(rows, w, index, base=own["w"]), w

    def adam(self, own: Tensors, who: Tensor, slope: Tensor) -> Tensors:
        """One step of Adam on the logits of the clients `who` [S, M] along `slope` [S, M]; the others' stay."""
        n = own["a"].shape[1]
        full, at = torch.zeros(len(who), n + 1, dtype=slope.dtype, device=slope.device), torch.where(who < 0, n, who)
        full = full.scatter(1, at, slope)[:, :n]
        live = torch.zeros(len(who), n + 1, dtype=torch.bool, device=who.device).scatter(1, at, True)[:, :n]
        d = full + self.alpha_decay * own["a"]
        t = own["t"] + live.any(1, keepdim=True)
        m, v = 0.9 * own["m"] + 0.1 * d, 0.999 * own["v"] + 0.001 * d**2
        once = t.clamp(min=1)
        a = own["a"] - self.alpha_lr * (m / (1 - 0.9**once)) / ((v / (1 - 0.999**once)).sqrt() + 1e-8)
        return {"t": t} | {k: torch.where(live, new, own[k]) for k, new in (("a", a), ("m", m), ("v", v))}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        last = g["last"].clone()
        last[cohort.ids] = cohort.round
        kept = torch.isin(g["round"], last)
        return {
            "delta": torch.cat([g["delta"][onto(kept, g["delta"].device)], up["delta"]]),
            "who": torch.cat([g["who"][kept], cohort.ids]),
            "round": torch.cat([g["round"][kept], torch.full_like(cohort.ids, cohort.round)]),
            "last": last,
            "p": torch.zeros_like(g["p"]).index_copy_(0, cohort.ids, up["p"].to(g["p"])),
        }

    def report(self, g: Tensors) -> Tensors:
        """weights [N, N]: what the clients of this round made of the updates of their last one; zeros for the absent and at first."""
        return {"weights": g["p"]}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": self.mixed(down, own)[0]}
