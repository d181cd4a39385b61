"""k models for N clients: each client uses the one that fits its own data best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Payload, Pool, State, Tensors
from pflcore.algorithms.fedopt import FedOpt
from pflcore.data.ragged import onto
from pflcore.ops.kinds import Count, Whole
from pflcore.train import Local, Setting
from pflcore.train.net import Net
from pflcore.train.random import generator_of


def starts(net: Net, k: int, seed: int | None = None) -> Tensor:
    """The initial models [k, P] of k runs for this seed (default: the net's, which is the run's); the net's own `w0` for k = 1."""
    seed = net.seed if seed is None else seed
    return net.w0[None].clone() if k == 1 else torch.stack([net.init(seed * k + j + 1) for j in range(k)]).to(net.w0)


def centres(net: Net, k: int, seed: int | None = None) -> Tensor:
    """k *different* initial models [k, P] for this seed, as `starts` has it.

    Equal models would tie for every client and stay equal for ever. Where the net draws its weights they are k draws; where it always
    starts at the same point (a linear model at zero), the matrices of all k are drawn with standard deviation 1 / sqrt(fan in), the rest
    stays: a model at zero beside drawn ones would be the best for everybody.
    """
    seed, rows = net.seed if seed is None else seed, starts(net, k, seed)
    if len(rows.unique(dim=0)) < k:
        for j in range(k):
            gen = generator_of("centre", seed, j)
            for name, shape in zip(net.names, net.shapes, strict=True):
                if len(shape) > 1:
                    std = shape[1:].numel() ** -0.5
                    draw = torch.nn.init.trunc_normal_(torch.empty(shape, dtype=net.dtype), std=std, a=-2 * std, b=2 * std, generator=gen)
                    rows[j, net.slices[name]] = draw.reshape(-1).to(rows)
    if len(rows.unique(dim=0)) < k:
        raise ValueError(f"k: this model starts equal {k} times, and equal centres never part; give it a random initialisation.")
    return rows


def losses(rows: Tensor, b: Tensor, local: Local) -> Tensor:
    """Each client's mean training loss under each of the models `rows` [k, P], each with its statistics `b` [k, b]: [S, k]."""
    losses = []
    for row, mine in zip(rows, b, strict=True):
        local.buffers = mine.expand(len(local.ids), -1)
        losses.append(local.loss(row.expand(len(local.ids), -1)))
    return torch.stack(losses, 1).nan_to_num(nan=torch.inf)


def picks(state: State, setting: Setting, clients: Tensor) -> Tensor:
    """Which of the state's models each of `clients` (ids) picks on its training data, as for evaluation: [len(clients)]."""
    return losses(state.g["x"], state.g["b"], Local(setting, clients, max(1, state.round), state.buffers[clients])).argmin(1)


class _Models(FedOpt):
    """k models at the server, each with its batch norm statistics: what HypCluster and the ensemble have in common."""

    buffers: ClassVar[tuple[str, ...]] = ("models",)  # each model's go with it, and are mixed as it is

    k: int
    seed: int | None

    def starts(self, net: Net) -> Tensor:
        """The models [k, P] before the first round."""
        return starts(net, self.k, self.seed)

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        x, none = self.starts(net), torch.empty(0, dtype=torch.int64)
        return {"x": x, "b": net.b0.expand(self.k, -1), **self.slots(x), "ids": none, "pick": none}, {}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        every = torch.arange(self.k).expand(len(cohort.ids), -1)
        return {"x": Pool(g["x"], every), "b": Pool(g["b"], every)}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        rows, b = down["x"].rows, down["b"].rows
        pick = losses(rows, b, local).argmin(1)
        local.buffers = b[pick]
        return {"w": rows[pick]}

    def report(self, g: Tensors) -> Tensors:
        """ "cluster" [S]: which model each of the clients "rows" [S], the last round's, picked."""
        return {"rows": g["ids"], "cluster": g["pick"]}


@dataclass(frozen=True)
class Ensemble(_Models):
    """k FedAvg runs; a client uses the model with the lowest loss on its training data (Motley, section 4.2).

    They differ in shuffles and, where the model draws any, in initial weights; one cohort a round serves all k (k runs would draw k).

    server: x [k, P] and each model's optimizer state · client: nothing · down: k models · up: delta [S, k, P] (k models).
    """

    k: Count = 2  # models
    seed: int | None = None  # of their initial weights; default: the run's

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        rows, b = down["x"].rows, down["b"].rows
        return own, {"pick": numbers(losses(rows, b, local)), **fit_all(rows, b, local)}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        new = {**self.improve(g, mean_of_each(up["delta"], cohort)), "b": mean_of_each(up["b"], cohort)}
        return {**new, "ids": cohort.ids, "pick": checked(up["pick"], cohort.ids, self.k)}


@dataclass(frozen=True)
class HypCluster(_Models):
    """HypCluster (Mansour et al. 2020), which is IFCA (Ghosh et al. 2020, Algorithm 1): each client trains the model that fits it best.

    server: x [k, P], each model's optimizer state, the last cohort's ids and pick [S] · client: nothing · down: k models · up:
    delta (1 model) and the pick.
    `warm` rounds of k independent FedAvg runs may come first (up: k models); their optimizer state is dropped at the end (Motley).
    A model that nobody picked is left as it was, optimizer state included. Ties go to the lower number. HypCluster(k=1) is FedAvg.
    Deviation: for evaluation clients pick anew, on their training data (Motley's silo code uses the last round's pick).
    """

    k: Count = 2  # clusters
    warm: Whole = 0  # rounds of independent FedAvg before the clustering
    seed: int | None = None  # of the models' initial weights; default: the run's

    def starts(self, net: Net) -> Tensor:
        return centres(net, self.k, self.seed)

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        rows, b = down["x"].rows, down["b"].rows
        pick = numbers(losses(rows, b, local))
        if local.round <= self.warm:
            return own, {"pick": pick, **fit_all(rows, b, local)}
        start, local.buffers = rows[pick.long()], b[pick.long()]
        delta = local.fit(start).w.sub_(start)
        return own, {"pick": pick, "delta": delta, "b": local.buffers}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        who = {"ids": cohort.ids, "pick": checked(up["pick"], cohort.ids, self.k)}
        if cohort.round <= self.warm:
            g = self.improve(g, mean_of_each(up["delta"], cohort)) | {"b": mean_of_each(up["b"], cohort)}
            return {**g, **(self.slots(g["x"]) if cohort.round == self.warm else {}), **who}
        mix = F.one_hot(who["pick"], self.k).T * onto(cohort.share, who["pick"].device)  # [k, S]
        total = mix.sum(1, keepdim=True)
        mix = mix / total.clamp(min=1e-300)
        new = self.improve(g, ops.aggregate(up["delta"], mix)) | {"b": averaged(up["b"], mix)}
        live = total[:, 0] > 0
        for key in new.keys() - who.keys():
            new[key] = torch.where(live.view(-1, *[1] * (new[key].dim() - 1)), new[key], g[key])
        return {**new, **who}


def fit_all(rows: Tensor, b: Tensor, local: Local) -> Tensors:
    """Every client trains every model of `rows` [k, P] with statistics `b` [k, b], each with a shuffle of its own: "delta" [S, k, P]
    and the statistics after it, "b" [S, k, b]."""
    deltas, fits = [], []
    for j, row in enumerate(rows):
        local.buffers = b[j].repeat(len(local.ids), 1)
        deltas.append(local.fit(row.expand(len(local.ids), -1), stream=f"fit {j}" if j else "fit").w.sub_(row))
        fits.append(local.buffers)
    return {"delta": torch.stack(deltas, 1), "b": torch.stack(fits, 1)}


def numbers(losses: Tensor) -> Tensor:
    """The lowest of each row of `losses` [S, k], as it travels: one byte for up to 256 models."""
    return losses.argmin(1).to(torch.uint8 if losses.shape[1] <= 256 else torch.int32)


def checked(pick: Tensor, ids: Tensor, k: int) -> Tensor:
    """The models [S] that the clients say they picked, int64. ValueError where there is none of that number."""
    bad = (pick.long() >= k) | (pick.long() < 0)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ValueError(f"client number {int(ids[at])}: it says it picked model {int(pick[at])}, expected 0 to {k - 1}; leave it out.")
    return pick.long()


def averaged(rows: Tensor, mix: Tensor) -> Tensor:
    """`mix` [k, S] times `rows` [S, b], also of no columns."""
    return ops.aggregate(rows, mix) if rows.shape[1] else rows.new_empty(len(mix), 0)


def mean_of_each(delta: Tensor, cohort: Cohort) -> Tensor:
    """The weighted mean over clients of `delta` [S, k, P]: [k, P]."""
    return averaged(delta.flatten(1), onto(cohort.share[None], delta.device))[0].view(delta.shape[1:])
