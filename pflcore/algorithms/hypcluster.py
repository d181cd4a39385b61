"""k models for N clients: each client uses the one that fits its own data best."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Payload, Pool, State, Tensors
from pflcore.algorithms.fedopt import FedOpt
from pflcore.local import Local, Setting
from pflcore.local.net import Net
from pflcore.local.random import generator_of
from pflcore.local.workers import onto


def centres(net: Net, k: int, seed: int = 0) -> Tensor:
    """k different initial models [k, P]; the net's own `w0` for k = 1.

    Equal models would tie for every client and stay equal for ever. Where the net draws its weights they are k draws; where it always
    starts at the same point (a linear model at zero), matrices are drawn with standard deviation 1 / sqrt(fan in), the rest stays.
    """
    if k == 1:
        return net.w0[None].clone()
    rows = torch.stack([net.init(seed * k + j + 1) for j in range(k)]).to(net.w0)
    for j in range(1, k):
        if (rows[:j] == rows[j]).all(1).any():
            gen = generator_of("centre", seed, j)
            for name, shape in zip(net.names, net.shapes, strict=True):
                if len(shape) > 1:
                    std = shape[1:].numel() ** -0.5
                    draw = torch.nn.init.trunc_normal_(torch.empty(shape, dtype=net.dtype), std=std, a=-2 * std, b=2 * std, generator=gen)
                    rows[j, net.slices[name]] = draw.reshape(-1).to(rows)
    if len(rows.unique(dim=0)) < k:
        raise ValueError(f"k: this model starts equal {k} times, and equal centres never part; give it a random initialisation.")
    return rows


def losses(rows: Tensor, local: Local) -> Tensor:
    """Each client's mean training loss under each of the models `rows` [k, P], in evaluation mode: [S, k]."""
    found = torch.stack([local.loss(row.expand(len(local.ids), -1)) for row in rows], 1)
    return found.nan_to_num(nan=torch.inf)


def picks(state: State, setting: Setting, clients: Tensor) -> Tensor:
    """Which of the state's models each of `clients` (ids) picks on its training data, as for evaluation: [len(clients)]."""
    return losses(state.g["x"], Local(setting, clients, max(1, state.round), state.buffers[clients])).argmin(1)


@dataclass(frozen=True)
class Ensemble(FedOpt):
    """k independent FedAvg runs; a client uses the model with the lowest loss on its training data (Motley, section 4.2).

    server: x [k, P] and each model's optimizer state · client: nothing · down: k models · up: delta [S, k, P] (k models).
    """

    k: int = 2  # models
    seed: int = 0  # of their initial weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"k: expected at least 1 model, got {self.k}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        x = centres(net, self.k, self.seed)
        return {"x": x, **self.slots(x), "pick": torch.full((n,), -1)}, {}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        return {"x": Pool(g["x"], torch.arange(self.k).expand(len(cohort.ids), -1))}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        return own, {"delta": fit_all(down["x"].rows, local), "pick": losses(down["x"].rows, local).argmin(1)}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        return {**self.improve(g, mean_of_each(up["delta"], cohort)), "pick": noted(g["pick"], up["pick"], cohort)}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": down["x"].rows[losses(down["x"].rows, local).argmin(1)]}

    def report(self, g: Tensors) -> Tensors:
        """ "cluster" [N]: which model each client picked when it last took part, -1 for never."""
        return {"cluster": g["pick"]}


@dataclass(frozen=True)
class HypCluster(FedOpt):
    """HypCluster (Mansour et al. 2020), which is IFCA (Ghosh et al. 2020, Algorithm 1): each client trains the model that fits it best.

    server: x [k, P], each model's optimizer state, pick [N] · client: nothing · down: k models · up: delta (1 model) and the pick.
    `warm` rounds of k independent FedAvg runs may come first (up: k models); their optimizer state is dropped at the end (Motley).
    A model that nobody picked is left as it was, optimizer state included. Ties go to the lower number. HypCluster(k=1) is FedAvg.
    Deviation: for evaluation clients pick anew, on their training data (Motley's silo code uses the last round's pick).
    """

    k: int = 2  # clusters
    warm: int = 0  # rounds of independent FedAvg before the clustering
    seed: int = 0  # of the models' initial weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1 or self.warm < 0:
            raise ValueError(f"k and warm: expected at least 1 cluster and 0 rounds, got {self.k} and {self.warm}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        x = centres(net, self.k, self.seed)
        return {"x": x, **self.slots(x), "pick": torch.full((n,), -1)}, {}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        return {"x": Pool(g["x"], torch.arange(self.k).expand(len(cohort.ids), -1))}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        rows = down["x"].rows
        pick = losses(rows, local).argmin(1)
        if local.round <= self.warm:
            return own, {"delta": fit_all(rows, local), "pick": pick}
        return own, {"delta": local.fit(rows[pick]).w - rows[pick], "pick": pick}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        pick = noted(g["pick"], up["pick"], cohort)
        if cohort.round <= self.warm:
            g = self.improve(g, mean_of_each(up["delta"], cohort))
            return {**g, **(self.slots(g["x"]) if cohort.round == self.warm else {}), "pick": pick}
        mix = F.one_hot(up["pick"], self.k).T * onto(cohort.share, up["pick"].device)  # [k, S]
        total = mix.sum(1, keepdim=True)
        new = self.improve(g, ops.aggregate(up["delta"], mix / total.clamp(min=1e-300)))
        live = total[:, 0] > 0
        for key in new.keys() - {"pick"}:
            new[key] = torch.where(live.view(-1, *[1] * (new[key].dim() - 1)), new[key], g[key])
        return {**new, "pick": pick}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": down["x"].rows[losses(down["x"].rows, local).argmin(1)]}

    def report(self, g: Tensors) -> Tensors:
        """ "cluster" [N]: which cluster each client picked when it last took part, -1 for never."""
        return {"cluster": g["pick"]}

    def restarted(self, setting: Setting, tries: int = 10, share: float = 0.1) -> HypCluster:
        """Random starts that are not lopsided (IFCA's own code): this algorithm with the first of `tries` seeds whose every centre gets
        at least `share` of the clients, or the seed whose smallest cluster is largest. Costs k models down a try."""
        best, seed = -1.0, self.seed
        for s in range(self.seed, self.seed + tries):
            local = Local(setting, torch.arange(setting.data.n), 1, setting.net.b0.expand(setting.data.n, -1).clone())
            pick = losses(centres(setting.net, self.k, s), local).argmin(1)
            least = torch.bincount(pick, minlength=self.k).min().item() / len(pick)
            if least > best:
                best, seed = least, s
            if least >= share:
                break
        return replace(self, seed=seed)


def fit_all(rows: Tensor, local: Local) -> Tensor:
    """Every client trains every model of `rows` [k, P], each with a shuffle of its own: the updates [S, k, P]."""
    streams = ["fit", *(f"fit {j}" for j in range(1, len(rows)))]
    return torch.stack([local.fit(r.expand(len(local.ids), -1), stream=s).w - r for r, s in zip(rows, streams, strict=True)], 1)


def mean_of_each(delta: Tensor, cohort: Cohort) -> Tensor:
    """The weighted mean over clients of `delta` [S, k, P]: [k, P]."""
    return ops.aggregate(delta.flatten(1), onto(cohort.share[None], delta.device))[0].view(delta.shape[1:])


def noted(old: Tensor, pick: Tensor, cohort: Cohort) -> Tensor:
    """Who picked what, [N], with this round's picks written in."""
    return old.index_copy(0, onto(cohort.ids, old.device), pick.to(old))
