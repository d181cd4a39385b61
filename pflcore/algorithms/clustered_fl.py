"""Clustered FL: a cluster splits in two where its clients' updates point apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.fedavg import FedAvg, Undefended
from pflcore.algorithms.protocol import Changes, Cohort, Mix, Payload, Tensors
from pflcore.check import NonNegative, Weighting, Whole
from pflcore.data.ragged import onto


@dataclass(frozen=True)
class ClusteredFL(Undefended, FedAvg):
    """Sattler et al. 2021, Algorithm 2 (CFL), with the conditions of the authors' code.

    server: x, way [nodes, P], child [nodes], cluster [N] · client: nothing · down: the cluster's x
    [S, P] · up: delta [S, P] (1 model).
    A cluster splits where |mean delta| < eps1 and max |delta| > eps2, more than two of its clients
    took part and `first` rounds
    are over; the two halves are those of agglomerative clustering by the updates' cosines, and
    already this round's means are theirs.
    With `relative` the one condition on norms is |mean delta| < eps1 max |delta|, which depends on
    neither model nor learning rate, but
    goes on to split clusters of one kind when they have converged and noise is all that is left (18
    clients of 2 kinds: 9 pairs): `gamma`
    is what ends it. eps1 = .4 and eps2 = 1.6 are the authors' values for one model and learning
    rate; where updates are smaller they never
    split and this is FedAvg.
    `linkage="complete"` is the authors' code, "single" the paper's optimal bipartition (least
    largest cosine across); `gamma` > 0
    adds the paper's sqrt((1 - largest cosine across) / 2) > gamma. Only clients of the round
    decide. Clusters are the leaves of a tree,
    as in the paper: its inner nodes keep the model at which they split, and `way`, the mean updates
    of the two halves. Who was absent then
    is served that model, and its next update from it, which counts for this only, takes the client
    to the half of the larger cosine.
    Deviation: `weighting` is uniform, as in the code. A client's number is its own at every level.
    """

    weighting: Weighting = "uniform"
    # a cluster is split where its mean update is shorter than this
    eps1: NonNegative = 0.4
    # and its longest update is longer than this
    eps2: NonNegative = 1.6
    relative: bool = False  # eps1 is a share of the longest update; no eps2
    first: Whole = 20  # rounds before the first split
    # of the bipartition: complete, as in the authors' code, or single
    linkage: Literal["complete", "single"] = "complete"
    gamma: NonNegative = 0.0  # least separation of the two halves; 0: not asked for

    def init(self, x0: Tensor, n: int) -> Tensors:
        x, cluster = x0[None], torch.zeros(n, dtype=torch.long)
        return {"x": x, "way": torch.zeros_like(x), "child": torch.tensor([-1]), "cluster": cluster}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"x": state["x"][onto(state["cluster"][cohort.ids], state["x"].device)]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        x, way, child, delta = state["x"], state["way"], state["child"], up["delta"]
        cluster, ids = state["cluster"].clone(), cohort.ids
        at = cluster[ids]  # the node whose model each was sent
        lost = child[at] >= 0
        for i in lost.nonzero()[:, 0].tolist():
            cluster[ids[i]] = self.half(delta[i : i + 1], way, int(child[at[i]]))
        new = len(x)
        for c in (child < 0).nonzero()[:, 0].tolist():
            members = (at == c).nonzero()[:, 0]  # places in the cohort
            second = None
            if cohort.round > self.first and len(members) > 2:
                second = self.split(delta[onto(members, delta.device)])
            if second is not None:
                cluster[ids[members]] = len(x) + second.long()
                child = child.index_fill(0, torch.tensor([c]), len(x))
                child = torch.cat([child, torch.tensor([-1, -1])])
                x = torch.cat([x, x[c : c + 1], x[c : c + 1]])
        share = cohort.mean(self.weighting).weight[0]
        mix = F.one_hot(cluster[ids], len(x)).T * share * ~lost
        mean = Mix(mix / mix.sum(1, keepdim=True).clamp(min=1e-300))
        way = torch.cat([way, Mix(mean.weight[new:]).of(delta)]) if len(x) > new else way
        changes: Changes = {"x": mean.of(delta, x, self.server_lr), "way": way, "child": child}
        same = (cluster[:, None] == cluster[ids]) * share
        return {**changes, "cluster": cluster}, Mix(same, rows=torch.arange(cohort.n))

    def half(self, delta: Tensor, way: Tensor, child: int) -> int:
        """The half of a split node, `child` or the next, to whose way an update [1, P] is
        nearer."""
        rows = torch.cat([delta, way[child : child + 2]])
        norm = ops.pairwise_sqdist(rows, torch.zeros_like(rows[:1]))[:, 0].sqrt().cpu()
        cosine = cosines(ops.pairwise_sqdist(rows).cpu(), norm)[0, 1:]
        return child + int(cosine.argmax())

    def route(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        return {"cluster": self.update(state, up, cohort)[0]["cluster"]}  # a level a round

    def split(self, delta: Tensor) -> Tensor | None:
        """Who of a cluster's clients, by their updates [m, P], leaves for a new one: bool [m], or
        None where it stays whole."""
        uniform = torch.full(
            (1, len(delta)), 1 / len(delta), dtype=torch.float64, device=delta.device
        )
        rows = torch.cat([delta, ops.aggregate(delta, uniform)])
        norm = ops.pairwise_sqdist(rows, torch.zeros_like(rows[:1]))[:, 0].sqrt().cpu()
        mean, largest = norm[-1], norm[:-1].max()
        if not (
            mean < self.eps1 * largest
            if self.relative
            else mean < self.eps1 and largest > self.eps2
        ):
            return None
        cosine = cosines(ops.pairwise_sqdist(delta).cpu(), norm[:-1])
        second = bipartition(cosine, self.linkage)
        return (
            None
            if self.gamma and ((1 - across(cosine, second)) / 2) ** 0.5 <= self.gamma
            else second
        )

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """cluster [N]: which node of the tree each client is in; one that has split since, for who
        has not been there."""
        return {"cluster": state["cluster"]}


def cosines(sqdist: Tensor, norm: Tensor) -> Tensor:
    """Cosines [m, m] from squared distances and norms [m]; 0 where a norm is 0. Exact distances
    make cosines near 1 exact too."""
    length = norm[:, None] * norm
    return torch.where(
        length > 0, (norm[:, None] ** 2 + norm**2 - sqdist) / (2 * length), 0.0
    ).clamp(-1, 1)


def groups(similarity: Tensor, k: int, linkage: str = "complete") -> Tensor:
    """At most k groups of m clients by agglomerative clustering of `similarity` [m, m]: each one's
    group [m], called by its first client.

    The two most similar groups merge until k are left; groups are as similar as their least similar
    pair ("complete") or their most similar one ("single", which makes the largest similarity across
    two halves as small as it can be).
    """
    link = similarity.double().clone()
    link.fill_diagonal_(-torch.inf)
    group = torch.arange(len(link))
    for _ in range(len(link) - k):
        a, b = sorted(divmod(int(link.argmax()), len(link)))
        merged = (
            torch.minimum(link[a], link[b])
            if linkage == "complete"
            else torch.maximum(link[a], link[b])
        )
        link[a], link[:, a] = merged, merged
        link[a, a] = -torch.inf
        link[b], link[:, b] = -torch.inf, -torch.inf
        group[group == b] = a
    return group


def bipartition(similarity: Tensor, linkage: str = "complete") -> Tensor:
    """Two halves of m >= 2 clients, as `groups` has them: bool [m], False for client 0's half."""
    group = groups(similarity, 2, linkage)
    return group != group[0]


def across(similarity: Tensor, second: Tensor) -> float:
    """The largest similarity between the two halves."""
    return float(similarity[second][:, ~second].max())
