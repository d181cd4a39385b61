"""k models for N clients: HypCluster and Ensemble, where each client uses the one that
fits its data best; and Clustered FL, where a cluster splits in two whose updates point
apart.
"""

from dataclasses import replace
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._fedavg import FedAvg, FedOpt, WithoutDefence
from pflcore.algorithms._protocol import (
    BadUpload,
    Changes,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    SharedRows,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    algorithm_options,
    normalize_rows,
    squared_norms,
)
from pflcore.check import NonNegativeFloat, NonNegativeInt, PositiveInt, Weighting
from pflcore.data._ragged import to_device
from pflcore.train import Clients, Net
from pflcore.train._random import generator_of


def loss_per_model(rows: Tensor, b: Tensor, clients: Clients) -> Tensor:
    """Each client's mean training loss under each of the models `rows` [k, P], each
    with its statistics `b` [k, b]: [S, k]."""
    count = len(clients.ids)
    each = [
        replace(clients, buffers=own.expand(count, -1)).loss(row.expand(count, -1))
        for row, own in zip(rows, b, strict=True)
    ]
    return torch.stack(each, 1).nan_to_num(nan=torch.inf)


@algorithm_options
class Ensemble(WithoutDefence, FedOpt):
    """k FedAvg runs; a client uses the model with the lowest loss on its training data
    (Motley, section 4.2).

    They differ in shuffles and, where the model draws any, in initial weights; one
    cohort a round serves all k (k runs would draw k).

    server: x [k, P], b [k, b] (each model's batch norm statistics), pick [N] (the model
    that each client used last), and of m, v [k, P] and t [k] what the optimizer needs,
    as in `FedOpt` · client: nothing · down: x [k, P], b [k, b] (k models, shared rows)
    · up: delta [S, k, P], b [S, k, b] (k models), pick [S].
    """

    k: PositiveInt = 2  # models

    # each model's go with it, and are mixed as it is
    traits = Traits(batch_norm=("rule",))

    def initial_models(self, net: Net) -> Tensor:
        """The models [k, P] before the first round; the net's own `w0` for k = 1."""
        if self.k == 1:
            return net.w0[None].clone()
        draws = [net.init(net.seed * self.k + j + 1) for j in range(self.k)]
        return torch.stack(draws).to(net.w0)

    def server_init_args(self, net: Net) -> Tensors:
        return {"x0": self.initial_models(net), "b0": net.b0.repeat(self.k, 1)}

    def init(
        self, x0: Tensor, n: int, b0: Tensor | None = None, **more: Tensor
    ) -> Tensors:
        return {
            "x": x0,
            "b": x0[:, :0] if b0 is None else b0,
            **self.optimizer_state(x0),
            "pick": torch.zeros(n, dtype=torch.long),
            **more,
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        every = torch.arange(self.k).expand(len(cohort.ids), -1)
        return {key: SharedRows(state[key], every) for key in ("x", "b")}

    def choose_models(
        self, down: Payload, clients: Clients
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The models [k, P] that were sent with their statistics [k, b], and which of
        them is best for each client [S]."""
        rows = down["x"].rows
        b = down["b"].rows
        return rows, b, loss_per_model(rows, b, clients).argmin(1)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, b, pick = self.choose_models(down, clients)
        count = len(pick)
        fits = []
        for j, row in enumerate(rows):  # each with a shuffle of its own
            one = replace(clients, buffers=b[j].repeat(count, 1))
            fits.append(
                one.fit(row.expand(count, -1), stream=f"fit {j}" if j else "fit")
            )
        delta = torch.stack(
            [fit.w.sub_(row) for fit, row in zip(fits, rows, strict=True)], 1
        )
        b = torch.stack([fit.buffers for fit in fits], 1)
        return (
            client_state,
            {"pick": self.encode_choice(pick), "delta": delta, "b": b},
            fits[-1],
        )

    def encode_choice(self, pick: Tensor) -> Tensor:
        """The picks [S] as they travel: one byte for up to 256 models."""
        return pick.to(torch.uint8 if self.k <= 256 else torch.int32)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        rows, b, pick = self.choose_models(down, clients)
        return {"w": rows[pick], "batch_norm": b[pick]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        mean = cohort.mean_weights(self.weighting)
        delta, b = (
            mean.aggregate(up[k].flatten(1)).view(up[k].shape[1:])
            for k in ("delta", "b")
        )
        pick = RowUpdate(cohort.ids, self.decode_choice(up, cohort))
        return {**self.optimizer_step(state, delta), "b": b, "pick": pick}, None

    def decode_choice(self, up: Tensors, cohort: Cohort) -> Tensor:
        """The models [S] that the clients say they picked. BadUpload where there is
        none of that number."""
        pick = up["pick"].cpu().long()
        last = self.k - 1
        picked = zip(cohort.ids.tolist(), pick.tolist(), strict=True)
        none = {i: j for i, j in picked if not 0 <= j <= last}
        if none:
            said = "it says it picked model {}, expected 0 to {}; leave it out."
            raise BadUpload({i: said.format(j, last) for i, j in none.items()})
        return pick

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """ "cluster" [S]: which model each of the clients "rows" [S], the last
        round's, picked."""
        return {"rows": cohort.ids, "cluster": state["pick"][cohort.ids]}


@algorithm_options
class HypCluster(Ensemble):
    """HypCluster (Mansour et al. 2020), which is IFCA (Ghosh et al. 2020, Algorithm 1):
    each client trains the model that fits it best.

    server: x [k, P], b [k, b] (each model's batch norm statistics), pick [N] (the model
    that each client picked last), of m, v [k, P] and t [k] what the optimizer needs, as
    in `FedOpt`, and with `shared` common [P] (which parameters all models share) ·
    client: nothing · down: x [k, P], b [k, b] (k models, shared rows; with `shared` x
    [k, Q], the other Q parameters, and common [S, P - Q]) · up: delta [S, P], b [S, b]
    (1 model), pick [S]; in a warm-up round delta [S, k, P], b [S, k, b].

    `warmup_rounds` rounds of k independent FedAvg runs may come first (up: k models);
    their optimizer state is dropped at the end (Motley). A model that nobody picked is
    left as it was, optimizer state included. Ties go to the lower number.
    HypCluster(k=1) is FedAvg. `shared` layers are common to all models, the mean of
    everybody's (weight sharing: IFCA, section 5; Motley, section 4.2, observation 2):
    they travel once, and the k models differ in the others. Deviation: for evaluation
    clients pick anew, on their training data (Motley's silo code uses the last round's
    pick).
    """

    # rounds of independent FedAvg before the clustering
    warmup_rounds: NonNegativeInt = 0
    # parameters that all models share: a pattern of names such as "conv*"
    shared: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and (self.warmup_rounds or self.bias_correction != "none"):
            raise ValueError(
                "shared: k independent runs (warmup_rounds) have no common layers, nor "
                "have clusters of "
                "several ages a common bias correction; take warmup_rounds=0 and "
                "bias_correction='none'."
            )

    def initial_models(self, net: Net) -> Tensor:
        """k *different* models [k, P]: equal ones would tie for every client and stay
        equal for ever. ValueError where they cannot differ.

        Where the net draws its weights they are k draws; where it always starts at the
        same point (a linear model at zero), the matrices of all k are drawn with
        standard deviation 1 / sqrt(fan in), the rest stays: a model at zero beside
        drawn ones would be the best for everybody.
        """
        rows = super().initial_models(net)
        if len(rows.unique(dim=0)) < self.k:
            for j, row in enumerate(rows):
                gen = generator_of("centre", net.seed, j)
                for name, shape in zip(net.names, net.shapes, strict=True):
                    if len(shape) > 1:
                        std = shape[1:].numel() ** -0.5
                        draw = torch.empty(shape, dtype=net.dtype)
                        nn.init.trunc_normal_(draw, 0.0, std, -2 * std, 2 * std, gen)
                        row[net.slices[name]] = draw.flatten()
        if self.shared:
            rows = torch.where(self.shared_mask(net), rows[0], rows)
        if len(rows.unique(dim=0)) < self.k:
            raise ValueError(
                f"k: this model starts equal {self.k} times, and equal centres never "
                "part; give it "
                "a random initialisation."
            )
        return rows

    def shared_mask(self, net: Net) -> Tensor:
        """Which parameters all models share: bool [P]."""
        return net.mask(self.shared).to(net.w0.device)

    def server_init_args(self, net: Net) -> Tensors:
        start = super().server_init_args(net)
        return start | ({"common": self.shared_mask(net)} if self.shared else {})

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        down = super().send(state, cohort)
        if "common" in state:
            x = state["x"]
            common = state["common"]
            down["x"] = down["x"]._replace(rows=x[:, ~common])
            down["common"] = x[0, common].expand(len(cohort.ids), -1)
        return down

    def choose_models(
        self, down: Payload, clients: Clients
    ) -> tuple[Tensor, Tensor, Tensor]:
        if "common" in down:
            rows = clients.net.join(down["x"].rows, down["common"][0], self.shared)
            down = {**down, "x": down["x"]._replace(rows=rows)}
        return super().choose_models(down, clients)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        if clients.round <= self.warmup_rounds:
            return super().train(down, client_state, clients)
        rows, b, pick = self.choose_models(down, clients)
        start = rows[pick]
        fit = replace(clients, buffers=b[pick]).fit(start)
        up = {
            "pick": self.encode_choice(pick),
            "delta": fit.w.sub_(start),
            "b": fit.buffers,
        }
        return client_state, up, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        if cohort.round <= self.warmup_rounds:
            changes, _ = super().update(state, up, cohort)
            fresh = (
                self.optimizer_state(state["x"])
                if cohort.round == self.warmup_rounds
                else {}
            )
            return {**changes, **fresh}, None
        pick = self.decode_choice(up, cohort)
        mean = cohort.mean_weights(self.weighting)
        mix = F.one_hot(pick, self.k).T * mean.weight  # [k, S]
        each = MixingWeights(normalize_rows(mix))
        live = to_device(mix.any(1), state["x"].device)
        delta = each.aggregate(up["delta"])
        moves = live[:, None]
        if "common" in state:
            delta = torch.where(state["common"], mean.aggregate(up["delta"]), delta)
            moves = moves | state["common"]
        # a model that nobody picked is left as it was
        moved = {"t": live, "b": live[:, None]}
        new = self.optimizer_step(state, delta) | {"b": each.aggregate(up["b"])}
        changes = {
            k: torch.where(moved.get(k, moves), v, state[k]) for k, v in new.items()
        }
        return {**changes, "pick": RowUpdate(cohort.ids, pick)}, None


@algorithm_options
class ClusteredFL(WithoutDefence, FedAvg):
    """Sattler et al. 2021, Algorithm 2 (CFL), with the conditions of the authors' code.

    server: x, way [nodes, P], child [nodes], cluster [N] (the node each client is in;
    one that has split since, for who has not been there) · client: nothing · down: x
    [S, P] (1 model, the cluster's) · up: delta [S, P] (1 model).

    A cluster splits where |mean delta| < eps1 and max |delta| > eps2, more than two of
    its clients took part and `first` rounds are over; the two halves are those of
    agglomerative clustering by the updates' cosines, and already this round's means are
    theirs. With `relative` the one condition on norms is |mean delta| < eps1 max
    |delta|, which depends on neither model nor learning rate, but goes on to split
    clusters of one kind when they have converged and noise is all that is left (18
    clients of 2 kinds: 9 pairs): `gamma` is what ends it. eps1 = .4 and eps2 = 1.6 are
    the authors' values for one model and learning rate; where updates are smaller they
    never split and this is FedAvg. `linkage="complete"` is the authors' code, "single"
    the paper's optimal bipartition (least largest cosine across); `gamma` > 0 adds the
    paper's sqrt((1 - largest cosine across) / 2) > gamma. Only clients of the round
    decide. Clusters are the leaves of a tree, as in the paper: its inner nodes keep the
    model at which they split, and `way`, the mean updates of the two halves. Who was
    absent then is served that model, and its next update from it, which counts for this
    only, takes the client to the half of the larger cosine. Deviation: `weighting` is
    uniform, as in the code. A client's number is its own at every level.
    """

    weighting: Weighting = "uniform"
    # a cluster is split where its mean update is shorter than this
    eps1: NonNegativeFloat = 0.4
    # and its longest update is longer than this
    eps2: NonNegativeFloat = 1.6
    relative: bool = False  # eps1 is a share of the longest update; no eps2
    first: NonNegativeInt = 20  # rounds before the first split
    # of the bipartition: complete, as in the authors' code, or single
    linkage: Literal["complete", "single"] = "complete"
    # least separation of the two halves; 0: not asked for
    gamma: NonNegativeFloat = 0.0

    traits = Traits(reported_state=("cluster",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {
            "x": x0[None],
            "way": torch.zeros_like(x0[None]),
            "child": torch.tensor([-1]),
            "cluster": torch.zeros(n, dtype=torch.long),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"x": state["x"][state["cluster"][cohort.ids]]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        x = state["x"]
        ids = cohort.ids
        delta = up["delta"]
        nodes = len(state["x"])
        child = state["child"].clone()
        cluster = state["cluster"].clone()
        at = cluster[ids]  # the node whose model each was sent
        lost = child[at] >= 0
        for i in lost.nonzero()[:, 0].tolist():
            half = int(child[at[i]])
            ways = state["way"][half : half + 2]
            cluster[ids[i]] = half + int(F.cosine_similarity(delta[i], ways).argmax())
        leaves = (
            (child < 0).nonzero()[:, 0].tolist() if cohort.round > self.first else []
        )
        for c in leaves:
            members = (at == c).nonzero()[:, 0]  # places in the cohort
            second = self.bipartition(delta[members]) if len(members) > 2 else None
            if second is not None:
                cluster[ids[members]] = len(x) + second.long()
                child[c] = len(x)
                child = torch.cat([child, torch.tensor([-1, -1])])
                x = torch.cat([x, x[[c, c]]])
        share = cohort.mean_weights(self.weighting).weight
        mean = MixingWeights(
            normalize_rows(F.one_hot(cluster[ids], len(x)).T * share * ~lost)
        )
        way = torch.cat(
            [state["way"], MixingWeights(mean.weight[nodes:]).aggregate(delta)]
        )
        x = mean.aggregate(delta, x, self.server_lr)
        same = (cluster[:, None] == cluster[ids]) * share
        mix = MixingWeights(same, receivers=torch.arange(cohort.n))
        return {"x": x, "way": way, "child": child, "cluster": cluster}, mix

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        # a level a round
        return {"cluster": self.update(state, up, cohort)[0]["cluster"]}

    def bipartition(self, delta: Tensor) -> Tensor | None:
        """Who of a cluster's clients, by their updates [m, P], leaves for a new one:
        bool [m], or None where it stays whole."""
        m = len(delta)
        mean = MixingWeights(torch.full((1, m), 1 / m, dtype=torch.float64)).aggregate(
            delta
        )
        norm2 = squared_norms(torch.cat([delta, mean])).cpu()
        *each, middle = norm2.sqrt().tolist()
        if middle >= self.eps1 * (max(each) if self.relative else 1):
            return None
        if not (self.relative or max(each) > self.eps2):
            return None
        cosine = cosine_matrix(ops.pairwise_sqdist(delta).cpu(), norm2[:-1])
        group = agglomerate(cosine, 2, self.linkage)
        second = group != group[0]
        across = cosine[second][:, ~second].max()
        return (
            None if self.gamma and ((1 - across) / 2) ** 0.5 <= self.gamma else second
        )


def cosine_matrix(sqdist: Tensor, norm2: Tensor) -> Tensor:
    """Cosines [m, m] from squared distances and squared norms [m]; 0 where a norm is 0.
    Exact distances make cosines near 1 exact too."""
    length = (norm2[:, None] * norm2).sqrt()
    cosine = (norm2[:, None] + norm2 - sqdist) / 2 / length
    return torch.where(length > 0, cosine, 0.0).clamp(-1, 1)


def agglomerate(similarity: Tensor, k: int, linkage: str = "complete") -> Tensor:
    """At most k groups of m clients by agglomerative clustering of `similarity` [m, m]:
    each one's group [m], called by its first client.

    The two most similar groups merge until k are left; groups are as similar as their
    least similar pair ("complete") or their most similar one ("single", which makes the
    largest similarity across two halves as small as it can be).
    """
    link = similarity.double().clone().fill_diagonal_(-torch.inf)
    merge = torch.minimum if linkage == "complete" else torch.maximum
    group = torch.arange(len(link))
    for _ in range(len(link) - k):
        a, b = sorted(divmod(int(link.argmax()), len(link)))
        link[a] = link[:, a] = merge(link[a], link[b])
        link[b] = link[:, b] = link[a, a] = -torch.inf
        group[group == b] = a
    return group
