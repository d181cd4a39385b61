"""FedAvg, the mean of the clients' updates, and what stands beside it: defences in the mean's
place, q-FedAvg, whose weights grow with a client's loss, and Local, where nothing is shared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
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
    Tensors,
    Traits,
    Void,
)
from pflcore.check import NonNegative, Weighting, Whole, refuse
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net

Defence = Literal["clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust"]
BLOCK = 1 << 14  # columns that are sorted at once
COUNTING = ("krum", "multi_krum", "trimmed_mean")  # those that take how many clients are hostile


def krum(sqdist: Tensor, f: int, m: int) -> Tensor:
    """The `m` clients, best first, whose squared distances [S, S] to their S - f - 2 nearest others
    have the least sums (Blanchard et al. 2017, section 4). Of equals the earlier one."""
    others = sqdist.double().cpu().clone().fill_diagonal_(torch.inf)
    return others.sort(1).values[:, : len(others) - f - 2].sum(1).sort(stable=True).indices[:m]


@functools.cache
def comparisons(s: int) -> list[tuple[int, int]]:
    """What sorts s numbers: Batcher's odd-even merge sort (1968), pairs of places to be put in
    order."""
    n = 1 << (s - 1).bit_length()
    sizes = [
        (p, k)
        for p in (1 << i for i in range(n.bit_length() - 1))
        for k in (p >> i for i in range(p.bit_length()))
    ]
    places = [(p, k, i + j) for p, k in sizes for j in range(k % p, n - k, 2 * k) for i in range(k)]
    return [(a, a + k) for p, k, a in places if a // (2 * p) == (a + k) // (2 * p) and a + k < s]


def ascending(rows: Tensor) -> list[Tensor]:
    """The rows [S, P], each column sorted: a quarter of `sort`'s time along rows, which is not made
    for few."""
    r = list(rows)
    for a, b in comparisons(len(r)):
        r[a], r[b] = torch.minimum(r[a], r[b]), torch.maximum(r[a], r[b])
    return r


def fewer(defence: str, hostile: int, count: int, lost: int) -> int | None:
    """How many of `count` clients may be hostile: `hostile`, or where so few are left the most that
    they allow, but never below `hostile` less the `lost`, whose uploads were not finite. None: they
    allow no such number."""
    most = {
        "krum": (count - 3) // 2,
        "multi_krum": (count - 3) // 2,
        "trimmed_mean": (count - 1) // 2,
    }.get(defence, hostile)
    return min(hostile, most) if most >= max(0, hostile - lost) else None


def defended(
    defence: str, delta: Tensor, share: Tensor, hostile: int, root: int
) -> tuple[Tensor, Tensor]:
    """Rows and their weights [1, rows], float64, whose sum takes the place of the mean of `delta`
    [S, P] in the shares `share` [1, S].

    `root` is the trusted client's place among the S. Distances are exact ones,
    `ops.pairwise_sqdist`.
    """
    s = len(delta)
    if defence in ("median", "trimmed_mean"):
        cut, width = (
            (s - 1) // 2 if defence == "median" else hostile,
            BLOCK if delta.device.type == "cpu" else delta.shape[1],
        )
        parts = [
            torch.stack(ascending(part)[cut : s - cut]).mean(0)
            for part in delta.split(max(1, width), 1)
        ]
        return torch.cat(parts)[None], share.new_ones(1, 1)
    if defence in ("krum", "multi_krum"):
        m = 1 if defence == "krum" else s - hostile
        return delta, torch.zeros_like(share).index_fill_(
            1, krum(ops.pairwise_sqdist(delta), hostile, m).to(share.device), 1 / m
        )
    norm = ops.pairwise_sqdist(delta, torch.zeros_like(delta[:1]))[:, 0].sqrt().clamp(min=1e-150)
    if defence == "clip":
        return delta, share * (norm.quantile(0.5) / norm).clamp(max=1.0)
    own, far = norm[root], ops.pairwise_sqdist(delta, delta[root : root + 1])[:, 0]
    heard = norm > 1e-12 * own  # of shorter updates, of zeros above all, the cosine is rounding
    trust = (
        (heard * (norm**2 + own**2 - far) / (2 * norm * own))
        .clamp(0, 1)
        .index_fill_(0, torch.tensor([root], device=norm.device), 1.0)
    )
    return delta, (trust / trust.sum() * own / norm)[None]


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """McMahan et al. 2017, Algorithm 1.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).
    `x <- x + server_lr * sum_i share_i delta_i`; `weighting` is "samples" (the paper's n_i / n) or
    "uniform".

    `defence` takes something else than the mean, with `hostile` = f bad clients in a
    round of S; d_i are the updates. All but "clip" give every client one voice, since the number of
    its samples is its own word.
    "clip": sum_i share_i d_i min(1, M / |d_i|), M the median of the norms (Sun et al. 2019 with M
    for the fixed bound, which is `clip` of the run) · "median": coordinate by coordinate, of an
    even number the mean of the two in the middle (Yin et al. 2018, Definition 1) · "trimmed_mean":
    coordinate by coordinate without the f least and f largest (Definition 2) · "krum",
    "multi_krum": the update, or the mean of the S - f updates, of the least Krum score (Blanchard
    et al. 2017), by exact distances · "fltrust": sum_i t_i (|r| / |d_i|) d_i / sum_i t_i with
    t_i = max(0, cos(d_i, r)) and r the update of the trusted client `root`, who joins every round
    (Cao et al. 2021, eqs. 2 to 4, where r is trained by the server on data of its own and is not
    part of the sum).
    Running statistics of batch norm stay each client's own then: they would be a way around the
    defence.
    """

    server_lr: NonNegative = 1.0  # step size of the server
    weighting: Weighting = "samples"  # or uniform
    defence: Defence | None = field(default=None, kw_only=True)  # in the mean's place
    hostile: Whole = field(default=1, kw_only=True)  # bad clients a round: krum's, trimmed_mean's
    root: Whole | None = field(default=None, kw_only=True)  # the client that fltrust trusts

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.defence == "fltrust") != (self.root is not None):
            refuse("root", "a client's number with defence='fltrust', None without it", self.root)
        if self.hostile != 1 and self.defence not in COUNTING:
            refuse("hostile", "its default beside this defence, which counts nobody", self.hostile)

    @property
    def traits(self) -> Traits:
        required = () if self.root is None else (self.root,)
        policies = ("average", "local") if self.defence is None else ("local",)
        return Traits(batch_norm=policies, required=required)

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        rows, mix = self.defended(up["delta"], cohort)
        return {"x": mix.of(rows, state["x"], self.server_lr)[0]}, mix

    def defended(self, delta: Tensor, cohort: Cohort) -> tuple[Tensor, Mix]:
        """Rows and their mix: the updates [S, P] in their shares, or what the defence makes of
        them. Void where the cohort is too small for it."""
        mean = cohort.mean(self.weighting)
        if self.defence is None:
            return delta, mean
        hostile = fewer(self.defence, self.hostile, len(delta), cohort.lost)
        if hostile is None:
            least = 2 * self.hostile + (1 if self.defence == "trimmed_mean" else 3)
            raise Void(
                f"defence: {self.defence} against {self.hostile} hostile clients needs {least} in "
                f"a round, and round {cohort.round} has {len(delta)}; lower hostile, or raise "
                "participation."
            )
        root = 0 if self.root is None else int((cohort.ids == self.root).nonzero())
        share = onto(mean.weight, delta.device)
        rows, weight = defended(self.defence, delta, share, hostile, root)
        return rows, Mix(weight)


@dataclass(frozen=True)
class Undefended:
    """Narrows FedAvg's options for who takes no step along the mean of the updates."""

    defence: None = field(default=None, kw_only=True)
    hostile: Literal[1] = field(default=1, kw_only=True)
    root: None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class QFedAvg(Undefended, FedAvg):
    """Li et al. 2020 (q-FFL), Algorithm 2: clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x (1 model) · up: delta (1 model) and two scalars. With
    F_i the mean loss of the received
    x on client i's whole training set, L = 1 / (the clients' lr) and p the shares:
    `x += server_lr * sum p F^q delta / sum p (q F^(q-1) L |delta|^2 + F^q)`: the paper's sums, with
    one L cancelled.
    The paper samples clients by their size and sets p = 1: that is `weighting="uniform"`. q = 0 is
    FedAvg.
    Deviation: F is clamped to 1e-6 (at q < 1, F^(q-1) of a client with no loss would stop the
    server).
    """

    q: NonNegative = 0.001  # 0: FedAvg; larger: fairer

    @property
    def traits(self) -> Traits:
        why = "takes an update over the step size for a gradient" if self.q > 0 else ""
        return super().traits._replace(only_sgd=why)

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        f = (clients.loss(down["x"]).double() + 1e-10).clamp(min=1e-6)
        own, up, fit = super().train(down, own, clients)
        norm = torch.linalg.vector_norm(up["delta"], dim=1, dtype=torch.float64) ** 2
        h = self.q * f ** (self.q - 1) * norm / (clients.lr or 1) + f**self.q
        return own, {**up, "weight": f**self.q, "h": h}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        share = onto(cohort.mean(self.weighting).weight, up["h"].device).to(up["h"])
        weight: Tensor = share * up["weight"]
        mix = Mix(weight / (share * up["h"]).sum())
        x = mix.of(up["delta"], state["x"], self.server_lr)[0]
        return {"x": x}, Mix(weight.cpu())


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """Each client trains a model of its own, from one common start, and shares nothing: the
    baseline of every paper.

    server: nothing · client: w [P] · down: nothing · up: nothing (0 models).
    """

    traits = Traits(batch_norm=("local",))  # nothing is shared

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        return {}, None

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        fit = clients.fit(own["w"])
        return {"w": fit.w}, {}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return own
