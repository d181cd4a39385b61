"""k models for N clients: HypCluster and Ensemble, where each client uses the one that fits its
data best; and Clustered FL, where a cluster splits in two whose updates point apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.fedavg import FedAvg, Undefended
from pflcore.algorithms.fedopt import FedOpt
from pflcore.algorithms.protocol import Changes, Cohort, Mix, Payload, Pool, Rows, Tensors, Traits
from pflcore.check import Count, NonNegative, Weighting, Whole
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net
from pflcore.train.random import generator_of


def starts(net: Net, k: int, seed: int | None = None) -> Tensor:
    """The initial models [k, P] of k runs for this seed (default: the net's, which is the run's);
    the net's own `w0` for k = 1."""
    seed = net.seed if seed is None else seed
    return (
        net.w0[None].clone()
        if k == 1
        else torch.stack([net.init(seed * k + j + 1) for j in range(k)]).to(net.w0)
    )


def centres(net: Net, k: int, seed: int | None = None) -> Tensor:
    """k *different* initial models [k, P] for this seed, as `starts` has it.

    Equal models would tie for every client and stay equal for ever. Where the net draws its weights
    they are k draws; where it always starts at the same point (a linear model at zero), the
    matrices of all k are drawn with standard deviation 1 / sqrt(fan in), the rest stays: a model at
    zero beside drawn ones would be the best for everybody.
    """
    seed, rows = net.seed if seed is None else seed, starts(net, k, seed)
    if len(rows.unique(dim=0)) < k:
        for j in range(k):
            gen = generator_of("centre", seed, j)
            for name, shape in zip(net.names, net.shapes, strict=True):
                if len(shape) > 1:
                    std = shape[1:].numel() ** -0.5
                    draw = torch.nn.init.trunc_normal_(
                        torch.empty(shape, dtype=net.dtype),
                        std=std,
                        a=-2 * std,
                        b=2 * std,
                        generator=gen,
                    )
                    rows[j, net.slices[name]] = draw.reshape(-1).to(rows)
    return distinct(rows)


def distinct(rows: Tensor) -> Tensor:
    """The models [k, P]; ValueError where two are equal."""
    if len(rows.unique(dim=0)) < len(rows):
        raise ValueError(
            f"k: this model starts equal {len(rows)} times, and equal centres never part; give it "
            "a random initialisation."
        )
    return rows


def losses(rows: Tensor, b: Tensor, clients: Clients) -> Tensor:
    """Each client's mean training loss under each of the models `rows` [k, P], each with its
    statistics `b` [k, b]: [S, k]."""
    count = len(clients.ids)
    each = [
        replace(clients, buffers=own.expand(count, -1)).loss(row.expand(count, -1))
        for row, own in zip(rows, b, strict=True)
    ]
    return torch.stack(each, 1).nan_to_num(nan=torch.inf)


@dataclass(frozen=True)
class Ensemble(Undefended, FedOpt):
    """k FedAvg runs; a client uses the model with the lowest loss on its training data (Motley,
    section 4.2).

    They differ in shuffles and, where the model draws any, in initial weights; one cohort a round
    serves all k (k runs would draw k).

    server: x [k, P] and each model's optimizer state · client: nothing · down: k models · up: delta
    [S, k, P] (k models).
    """

    k: Count = 2  # models
    seed: int | None = None  # of their initial weights; None: the run's

    @property
    def traits(self) -> Traits:
        # each model's go with it, and are mixed as it is
        return super().traits._replace(batch_norm=("rule",))

    def starts(self, net: Net) -> Tensor:
        """The models [k, P] before the first round."""
        return starts(net, self.k, self.seed)

    def initial(self, net: Net) -> Tensors:
        return {"x0": self.starts(net), "b0": net.b0.repeat(self.k, 1)}

    def init(self, x0: Tensor, n: int, b0: Tensor | None = None) -> Tensors:
        b = x0.new_empty(len(x0), 0) if b0 is None else b0
        return {"x": x0, "b": b, **self.slots(x0), "pick": torch.zeros(n, dtype=torch.long)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        every = torch.arange(self.k).expand(len(cohort.ids), -1)
        return {key: Pool(state[key], every) for key in ("x", "b")}

    def models(self, down: Payload, net: Net) -> Tensor:
        """The models [k, P] that a client was sent."""
        rows: Tensor = down["x"].rows
        return rows

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        rows, b = self.models(down, clients.net), down["b"].rows
        up, fit = fit_all(rows, b, clients)
        return own, {"pick": numbers(losses(rows, b, clients)), **up}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        rows, b = self.models(down, clients.net), down["b"].rows
        pick = losses(rows, b, clients).argmin(1)
        return {"w": rows[pick], "batch_norm": b[pick]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        share = cohort.mean(self.weighting)
        new = self.improve(state, mean_of_each(up["delta"], share))
        pick = Rows(cohort.ids, checked(up["pick"], cohort.ids, self.k))
        return {**new, "b": mean_of_each(up["b"], share), "pick": pick}, None

    def report(self, state: Tensors, mix: Mix | None, cohort: Cohort) -> Tensors:
        """ "cluster" [S]: which model each of the clients "rows" [S], the last round's, picked."""
        return {"rows": cohort.ids, "cluster": state["pick"][cohort.ids]}


@dataclass(frozen=True)
class HypCluster(Ensemble):
    """HypCluster (Mansour et al. 2020), which is IFCA (Ghosh et al. 2020, Algorithm 1): each client
    trains the model that fits it best.

    server: x [k, P], each model's optimizer state, the last cohort's ids and pick [S] · client:
    nothing · down: k models · up:
    delta (1 model) and the pick.
    `warm` rounds of k independent FedAvg runs may come first (up: k models); their optimizer state
    is dropped at the end (Motley).
    A model that nobody picked is left as it was, optimizer state included. Ties go to the lower
    number. HypCluster(k=1) is FedAvg.
    `shared` layers are common to all models, the mean of everybody's (weight sharing: IFCA, section
    5; Motley, section 4.2, observation 2): they travel once, and the k models differ in the others.
    Deviation: for evaluation clients pick anew, on their training data (Motley's silo code uses the
    last round's pick).
    """

    warm: Whole = 0  # rounds of independent FedAvg before the clustering
    shared: str = ""  # parameters that all models share: a pattern of names such as "conv*"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and (self.warm or self.bias_correction != "none"):
            raise ValueError(
                "shared: k independent runs (warm) have no common layers, nor have clusters of "
                "several ages a common bias correction; take warm=0 and bias_correction='none'."
            )

    def starts(self, net: Net) -> Tensor:
        rows = centres(net, self.k, self.seed)
        return distinct(torch.where(self.common(net), rows[0], rows)) if self.shared else rows

    def common(self, net: Net) -> Tensor:
        """Which parameters all models share: bool [P]."""
        return net.mask(self.shared).to(net.w0.device)

    def initial(self, net: Net) -> Tensors:
        start = super().initial(net)
        return start | ({"common": self.common(net)} if self.shared else {})

    def init(
        self, x0: Tensor, n: int, b0: Tensor | None = None, common: Tensor | None = None
    ) -> Tensors:
        return super().init(x0, n, b0) | ({} if common is None else {"common": common})

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        down = super().send(state, cohort)
        if "common" in state:
            x, common = state["x"], state["common"]
            down["x"] = down["x"]._replace(rows=x[:, ~common])
            down["common"] = x[0, common].expand(len(cohort.ids), -1)
        return down

    def models(self, down: Payload, net: Net) -> Tensor:
        rows = super().models(down, net)
        return net.join(rows, down["common"][0], self.shared) if self.shared else rows

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        if clients.round <= self.warm:
            return super().train(down, own, clients)
        rows, b = self.models(down, clients.net), down["b"].rows
        pick = numbers(losses(rows, b, clients))
        start = rows[pick.long()]
        fit = replace(clients, buffers=b[pick.long()]).fit(start)
        return own, {"pick": pick, "delta": fit.w.sub_(start), "b": fit.buffers}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        if cohort.round <= self.warm:
            changes, _ = super().update(state, up, cohort)
            fresh = self.slots(state["x"]) if cohort.round == self.warm else {}
            return {**changes, **fresh}, None
        pick, share = checked(up["pick"], cohort.ids, self.k), cohort.mean(self.weighting).weight[0]
        mix = F.one_hot(pick, self.k).T * share  # [k, S]
        total = mix.sum(1, keepdim=True)
        mean, live = Mix(mix / total.clamp(min=1e-300)), onto(total[:, 0] > 0, state["x"].device)
        delta, common = mean.of(up["delta"]), state.get("common")
        if common is not None:
            whole = cohort.mean(self.weighting).of(up["delta"])
            delta = torch.where(common, whole, delta)
        new = self.improve(state, delta) | {"b": averaged(up["b"], mean)}
        for key, value in new.items():  # a model that nobody picked is left as it was
            some = live.view(-1, *[1] * (value.dim() - 1))
            some = some | common if common is not None and key in ("x", "m", "v") else some
            new[key] = torch.where(some, value, state[key])
        return {**new, "pick": Rows(cohort.ids, pick)}, None


def fit_all(rows: Tensor, b: Tensor, clients: Clients) -> tuple[Tensors, Fit]:
    """Every client trains every model of `rows` [k, P] with statistics `b` [k, b], each with a
    shuffle of its own: "delta" [S, k, P] and the statistics after it, "b" [S, k, b]; and the last
    training."""
    count, fits = len(clients.ids), []
    for j, row in enumerate(rows):
        own = replace(clients, buffers=b[j].repeat(count, 1))
        fits.append(own.fit(row.expand(count, -1), stream=f"fit {j}" if j else "fit"))
    deltas = [fit.w.sub_(row) for fit, row in zip(fits, rows, strict=True)]
    return {"delta": torch.stack(deltas, 1), "b": torch.stack([f.buffers for f in fits], 1)}, fits[
        -1
    ]


def numbers(losses: Tensor) -> Tensor:
    """The lowest of each row of `losses` [S, k], as it travels: one byte for up to 256 models."""
    return losses.argmin(1).to(torch.uint8 if losses.shape[1] <= 256 else torch.int32)


def checked(pick: Tensor, ids: Tensor, k: int) -> Tensor:
    """The models [S] that the clients say they picked, int64, on the CPU. ValueError where there is
    none of that number."""
    pick = pick.cpu().long()
    bad = (pick >= k) | (pick < 0)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ValueError(
            f"client number {int(ids[at])}: it says it picked model {int(pick[at])}, expected 0 to "
            f"{k - 1}; leave it out."
        )
    return pick


def averaged(rows: Tensor, mix: Mix) -> Tensor:
    """The means of `rows` [S, b], also of no columns."""
    return mix.of(rows) if rows.shape[1] else rows.new_empty(len(mix.weight), 0)


def mean_of_each(rows: Tensor, mix: Mix) -> Tensor:
    """The weighted mean over clients of `rows` [S, k, P]: [k, P]."""
    return averaged(rows.flatten(1), mix)[0].view(rows.shape[1:])


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
