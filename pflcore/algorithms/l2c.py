"""L2C: each client learns, on validation data, whose updates to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Payload, Pool, Tensors
from pflcore.data.ragged import onto
from pflcore.ops.kinds import NonNegative
from pflcore.train import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class L2C(FedAvg):
    """Li et al. 2022, L2C: each client learns, on validation data, whose updates to take: w_i <- w_i + sum_j softmax(a_i)_j delta_j.

    server: relays the updates, and keeps those of every round that is some client's last · client: w [P], its model before the round
    that is under way, logits a [N] and their Adam state · down: the updates of the client's last round (N models at full
    participation) · up: delta (1 model), and its weights [N] for the record.
    A client mixes when it takes part again, or is evaluated; then its logits take one step of Adam along their exact gradient
    w_j (g . delta_j - sum_m w_m g . delta_m), g the gradient on the split "val" at the mixed model (its sign follows delta = after -
    before); 20 % of each client's training samples are held out for it where there is no such split, and a client of one sample has none
    and keeps its logits. Clients absent from a round are masked out of its softmax. No official code exists; this is the form that
    independent re-implementations agree on. Deviations: one step a round on all validation data; no pruning of neighbours (T0, K0), which
    Table 4 of the FedDWA paper does not count either. `server_lr` and `weighting` play no part.
    """

    alpha_lr: NonNegative = 0.1  # Adam's
    alpha_decay: NonNegative = 0.01  # weight decay of the logits

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # parameters alone are mixed, as others have it too
    needs_val: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")

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
        index = index.masked_fill(who < 0, -1)  # not an update of this client's last round: not sent
        return {"delta": Pool(g["delta"], onto(index, g["delta"].device)), "who": who}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        (rows, index), who = down["delta"], onto(down["who"], own["a"].device)
        x, w = self.mixed(down, own)
        index = index.clamp(min=0)
        new = {"w": x}
        if index.shape[1]:
            slope = (local.grad(x, "val") @ rows.T).double().gather(1, index)  # [S, M] g . delta_j
            new |= self.adam(own, who, w * (slope - (w * slope).sum(1, keepdim=True)))
        n = own["a"].shape[1]
        p = torch.zeros(len(w), n + 1, dtype=w.dtype, device=w.device).scatter(1, torch.where(who < 0, n, who), w)[:, :n]
        return {**own, **new}, {"delta": local.fit(x).w.sub_(x), "p": p}

    def mixed(self, down: Payload, own: Tensors) -> tuple[Tensor, Tensor]:
        """Each client's model [S, P] and the weights [S, M] that made it."""
        (rows, index), who = down["delta"], onto(down["who"], own["a"].device)
        if not index.shape[1]:
            return own["w"], own["a"][:, :0]
        w = own["a"].gather(1, who.clamp(min=0)).masked_fill(who < 0, -torch.inf).softmax(1).nan_to_num(0.0)
        return ops.aggregate(rows, w, index.clamp(min=0), base=own["w"]), w

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
