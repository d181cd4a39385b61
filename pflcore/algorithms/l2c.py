"""L2C: each client learns whose updates to take."""

from __future__ import annotations

from dataclasses import dataclass

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
    Tensors,
    Traits,
)
from pflcore.check import NonNegative
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net


@dataclass(frozen=True)
class L2C(Algorithm):
    """Li et al. 2022, L2C: each client learns, on validation data, whose updates to take: w_i <-
    w_i + sum_j softmax(a_i)_j delta_j.

    server: relays the updates, and keeps those of every round that is some client's last · client:
    w [P], its model before the round
    that is under way, logits a [N] and their Adam state · down: the updates of the client's last
    round (N models at full
    participation) · up: delta (1 model), and its weights [N] for the record.
    A client mixes when it takes part again, or is evaluated; then its logits take one step of Adam
    along their exact gradient
    w_j (g . delta_j - sum_m w_m g . delta_m), g the gradient on the split "val" at the mixed model
    (its sign follows delta = after -
    before); 20 % of each client's training samples are held out for it where there is no such
    split, and a client of one sample has none
    and keeps its logits. Clients absent from a round are masked out of its softmax. No official
    code exists; this is the form that
    independent re-implementations agree on. Deviations: one step a round on all validation data; no
    pruning of neighbours (T0, K0), which
    Table 4 of the FedDWA paper does not count either. `server_lr` and `weighting` play no part.
    """

    alpha_lr: NonNegative = 0.1  # Adam's
    alpha_decay: NonNegative = 0.01  # weight decay of the logits

    traits = Traits(batch_norm=("local",), needs_val=True)  # parameters alone are mixed

    def init(self, x0: Tensor, n: int) -> Tensors:
        none = torch.empty(0, dtype=torch.long)
        relayed = {"delta": x0.new_empty(0, len(x0)), "who": none, "round": none}
        p = torch.zeros(n, n, dtype=torch.float64)
        return {**relayed, "last": torch.zeros(n, dtype=torch.long), "p": p}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        zeros = torch.zeros(1, n, dtype=torch.float64, device=net.w0.device)
        return {"w": net.w0[None], "a": zeros, "m": zeros, "v": zeros, "t": zeros[:, :1]}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        mine = state["round"] == state["last"][cohort.ids][:, None]  # [S, R]
        width = int(mine.sum(1).max()) if mine.numel() else 0
        index = mine.byte().sort(dim=1, descending=True, stable=True).indices[:, :width]
        who = state["who"][index].masked_fill(~mine.gather(1, index), -1)
        index = index.masked_fill(who < 0, -1)  # no update of this client's last round: not sent
        return {"delta": Pool(state["delta"], onto(index, state["delta"].device)), "who": who}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        (rows, index), who = down["delta"], onto(down["who"], own["a"].device)
        x, w = self.mixed(down, own)
        index, new = index.clamp(min=0), {"w": x}
        if index.shape[1]:
            # [S, M] g . delta_j
            slope = (clients.grad(x, "val") @ rows.T).double().gather(1, index)
            new |= self.adam(own, who, w * (slope - (w * slope).sum(1, keepdim=True)))
        fit = clients.fit(x)
        return {**own, **new}, {"delta": fit.w.sub_(x), "p": spread(who, w, own["a"].shape[1])}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": self.mixed(down, own)[0]}

    def mixed(self, down: Payload, own: Tensors) -> tuple[Tensor, Tensor]:
        """Each client's model [S, P] and the weights [S, M] that made it."""
        (rows, index), who = down["delta"], onto(down["who"], own["a"].device)
        if not index.shape[1]:
            return own["w"], own["a"][:, :0]
        w = own["a"].gather(1, who.clamp(min=0)).masked_fill(who < 0, -torch.inf)
        w = w.softmax(1).nan_to_num(0.0)
        return ops.aggregate(rows, w, index.clamp(min=0), base=own["w"]), w

    def adam(self, own: Tensors, who: Tensor, slope: Tensor) -> Tensors:
        """One step of Adam on the logits of the clients `who` [S, M] along `slope` [S, M]; the
        others' stay."""
        n = own["a"].shape[1]
        live = spread(who, torch.ones_like(slope), n) > 0
        d = spread(who, slope, n) + self.alpha_decay * own["a"]
        t = own["t"] + live.any(1, keepdim=True)
        m, v = 0.9 * own["m"] + 0.1 * d, 0.999 * own["v"] + 0.001 * d**2
        once = t.clamp(min=1)
        root = (v / (1 - 0.999**once)).sqrt() + 1e-8
        a = own["a"] - self.alpha_lr * (m / (1 - 0.9**once)) / root
        moved = {"a": a, "m": m, "v": v}
        return {"t": t} | {k: torch.where(live, new, own[k]) for k, new in moved.items()}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        ids, round = cohort.ids, torch.full_like(cohort.ids, cohort.round)
        last = state["last"].index_copy(0, ids, round)
        kept = torch.isin(state["round"], last)
        delta = state["delta"][onto(kept, state["delta"].device)]
        return {
            "delta": torch.cat([delta, up["delta"]]),
            "who": torch.cat([state["who"][kept], ids]),
            "round": torch.cat([state["round"][kept], round]),
            "last": last,
            "p": torch.zeros_like(state["p"]).index_copy_(0, ids, up["p"].to(state["p"])),
        }, None

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """weights [N, N]: what the clients of this round made of the updates of their last one;
        zeros for the absent and at first."""
        return {"weights": state["p"]}


def spread(who: Tensor, values: Tensor, n: int) -> Tensor:
    """Values [S, M] of the clients `who` [S, M] (-1: of nobody) as a row for each of the n: [S,
    n]."""
    whole = values.new_zeros(len(who), n + 1)
    return whole.scatter(1, torch.where(who < 0, n, who), values)[:, :n]
