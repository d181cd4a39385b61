"""WAFFLE: SCAFFOLD whose averages drift from everybody to the clients that help one target."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.fedavg import Undefended
from pflcore.algorithms.protocol import Changes, Cohort, Mix, Payload, Rows, Tensors, Traits
from pflcore.algorithms.scaffold import Scaffold
from pflcore.check import Number, Whole
from pflcore.train import Clients, Fit

Schedule = Callable[[int, int], float]  # (round, rounds) -> how global: 1 global, 0 local


@dataclass(frozen=True)
class Waffle(Undefended, Scaffold):
    """Beaussart et al. 2021, Algorithms 1 and 2: SCAFFOLD whose averages drift from global to what
    helps one client, the `target`.

    server: x, c [P], history [2, N] of unsmoothed weights, the last cohort's ids and weights [S] ·
    client: c [P] · down: x, c [S, P]
    (2 models) · up: delta and control [S, P] (2 models). x is the target's personalized model; the
    others' numbers only show what it is
    to them.
    The weights come from the distances between the clients' updates and the target's
    (`ops.waffle_weights`, eqs. 2 and 3) and are averaged
    with those of the last two rounds; from round 0.95 R on the target is alone. Omega and Psi are
    eq. 4 with slope `do`, or any function
    of (round, rounds). Absent clients have weight 0, and those present share the whole: each
    client's average is over the last two rounds
    that it attended, in shares of an even one, since absence is no unlikeness (with a quarter of 12
    equal clients a round the target's
    mean weight is .56, what a round alone gives it; averaged as weight 0, absence made it .74). A
    client without weight still trains
    against a c that is no longer its own and may run away; the farthest sets the scale of Algorithm
    1's distances, so the next one then
    counts as near (a CNN with ReLU loses its target on plain MNIST): `clip` holds such updates.

    Deviations, each with the paper's own reading as an option: `control_agg="recompute"` keeps `c =
    sum_i weight_i c_i` (but where `clip` shortens an upload, since the client keeps its whole c_i);
    as printed ("literal": `c += sum_i weight_i dc_i`) c forgets what it owes each client when
    weights change, the gap between c and the target's own c_i freezes once the target is alone, and
    the target cannot reach its optimum. `option="mean_grad"` is as in SCAFFOLD ("II" is the
    paper's). Decisions where the paper is silent: c and c_i start at 0, the history at 1/N,
    server_lr 1, the history holds unsmoothed weights, no weighting by samples, distances are the
    updates' as they are, whatever a client's steps.
    """

    weighting: Literal["uniform"] = "uniform"  # the method has weights of its own
    target: Whole = 0  # the client for whom the model is made
    do: Number = 3.2  # slope of Omega = Psi = 1 / (1 + exp(do * (2 (round + r0) / rounds - 1)))
    r0: Number = 0.0  # shifts that curve: positive turns local earlier
    control_agg: Literal["recompute", "literal"] = "recompute"  # "literal": Algorithm 2 as printed
    tie: Literal["closed", "uniform"] = "closed"  # weights where all others are equally far
    omega: Schedule | None = None  # a function of (round, rounds) instead of the paper's curve
    psi: Schedule | None = None  # the same for Psi; by default Psi is Omega

    @property
    def traits(self) -> Traits:
        recomputed = self.control_agg == "recompute"  # then c is made anew of what is uploaded
        clipped = ("control",) if recomputed else ("control", "c")
        return super().traits._replace(required=(self.target,), clipped=clipped)

    def init(self, x0: Tensor, n: int) -> Tensors:
        even = torch.full((n, 2), 1 / n, dtype=torch.float64)
        return super().init(x0, n) | {"history": even}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        new, up, fit = super().train(down, own, clients)
        return new, up | ({"control": new["c"]} if self.control_agg == "recompute" else {}), fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        weight, new = self.weights(state["history"], up["delta"], cohort)
        mix, before = Mix(weight[None]), None if self.control_agg == "recompute" else state["c"]
        history = Rows(cohort.ids, new)
        x = mix.of(up["delta"], state["x"], self.server_lr)[0]
        return {"x": x, "c": mix.of(up["control"], before)[0], "history": history}, mix

    def weights(self, history: Tensor, delta: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """The smoothed weights of the cohort [S], and its new history [S, 2]; both float64."""
        at = int((cohort.ids == self.target).nonzero())
        dist = ops.pairwise_sqdist(delta[at : at + 1], delta)[0].sqrt().cpu()  # [S]
        mine = ops.waffle_weights(dist, at, *self.globality(cohort.round, cohort.rounds), self.tie)
        if 20 * cohort.round >= 19 * cohort.rounds:  # 0.95 R, in integers
            mine = torch.zeros_like(mine).index_fill_(0, torch.tensor([at]), 1.0)
        mine = mine * (len(mine) / cohort.n)  # as large as in a round of everybody
        before = history[cohort.ids]  # of the last two rounds that each one attended
        new = torch.stack([mine, before[:, 0]], 1)
        if 20 * (cohort.round - 2) >= 19 * cohort.rounds:  # the last two rounds were the target's
            before = mine[:, None].expand(-1, 2)
        smooth = (before.sum(1) + mine) / 3
        return smooth / smooth.sum(), new

    def globality(self, round: int, rounds: int) -> tuple[float, float]:
        """Omega and Psi of this round (1-based)."""
        z = self.do * ((round + self.r0) / (rounds / 2) - 1)
        e = math.exp(-abs(z))  # never overflows
        curve = (e if z > 0 else 1.0) / (1 + e)
        omega = curve if self.omega is None else float(self.omega(round, rounds))
        psi = omega if self.psi is None else float(self.psi(round, rounds))
        if not (omega >= 0 and psi >= 0):
            raise ValueError(
                f"omega and psi: expected numbers >= 0, got {omega} and {psi} in round {round}."
            )
        if omega > 1:
            warnings.warn("omega exceeds 1: other clients may outweigh the target.", stacklevel=2)
        return omega, psi

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """ "weights" [N] where everybody took part, else "weight" [S] of the clients "index"
        [S]."""
        return {} if mix is None else mix.report(cohort)
