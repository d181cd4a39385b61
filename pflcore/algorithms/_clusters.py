"""Several models for N clients.

In HypCluster and Ensemble each client uses that of k models which fits its data best.
In Clustered FL a cluster of clients splits in two where their updates point apart.

Symbols:

- S clients are in the cohort, N in the federation; a model has P parameters.
- There are k models x [k, P]; b [k, b] are their batch norm statistics.
- `pick` [S] is the model that each client uses, `cluster` [N] the node that it is in.
- m clients are in a cluster that may split; `delta` are updates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._fedavg import ServerStep
from pflcore.algorithms._fedopt import ServerOptimizer
from pflcore.algorithms._protocol import (
    Changes,
    Claim,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    SharedRows,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    normalize_rows,
    squared_norms,
)
from pflcore.check import NonNegativeFloat, NonNegativeInt, PositiveInt, Weighting
from pflcore.ops._directions import cosine_matrix
from pflcore.train import Clients, Net
from pflcore.train._random import generator_of


def loss_per_model(
    rows: Tensor,  # [k, P]
    b: Tensor,  # [k, b]
    clients: Clients,
) -> Tensor:  # [S, k]
    """Mean training losses [S, k] of the clients under each of the models.

    A loss of NaN counts as infinite.
    """
    count = len(clients.ids)
    losses = []
    for row, statistics in zip(rows, b, strict=True):
        with_statistics = replace(clients, buffers=statistics.expand(count, -1))
        losses.append(with_statistics.loss(row.expand(count, -1)))
    return torch.stack(losses, 1).nan_to_num(nan=torch.inf)


@algorithm_options
class Ensemble(ServerOptimizer):
    """Ensemble (Motley, section 4.2): k FedAvg runs, of which a client uses the best.

    server: x [k, P], b [k, b] (each model's batch norm statistics), pick [N] (the model
    that each client used last), and of m, v [k, P] and t [k] what the optimizer needs,
    as in `FedOpt` · client: nothing · down: x [k, P], b [k, b] (k models, shared rows)
    · up: delta [S, k, P], b [S, k, b] (k models), pick [S].

    A client uses the model with the lowest loss on its training data: `pick_i =
    argmin_j F_i(x_j)`. The k runs differ in shuffles and, where the model draws them,
    in initial weights. A client without training samples is evaluated with the model
    that most clients used last.

    Deviation: one cohort a round serves all k models; k separate runs would draw k
    cohorts.

    The other options are those of `FedOpt`, without its mean.

    Args:
        k: Number of models.
    """

    k: PositiveInt = 2

    # Each model has statistics of its own, which are mixed as the model is.
    traits = Traits(batch_norm=("rule",))

    def initial_models(self, net: Net) -> Tensor:
        """The models [k, P] before the first round.

        Each is a draw of the net's weights; for k = 1 it is the net's `w0`.
        """
        if self.k == 1:
            return net.w0[None].clone()
        draws = [net.init(net.seed * self.k + j + 1) for j in range(self.k)]
        return torch.stack(draws).to(net.w0)

    def server_init_args(self, net: Net) -> Tensors:
        return {"x0": self.initial_models(net), "b0": net.b0.repeat(self.k, 1)}

    def init(
        self, x0: Tensor, n: int, b0: Tensor | None = None, **more: Tensor
    ) -> Tensors:
        b = x0[:, :0] if b0 is None else b0
        pick = torch.zeros(n, dtype=torch.long)
        return {"x": x0, "b": b, **self.optimizer_state(x0), "pick": pick, **more}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        count = len(cohort.ids)
        all_models = torch.arange(self.k).expand(count, -1)
        down: Payload = {key: SharedRows(state[key], all_models) for key in ("x", "b")}
        if not cohort.num_samples.all():
            # In an evaluation: clients without training samples cannot choose.
            picks = state["pick"][cohort.trainable_clients]
            down["popular"] = picks.bincount().argmax().expand(count, 1)
        return down

    def choose_models(
        self, down: Payload, clients: Clients
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The downloaded models [k, P], their statistics [k, b], and the picks [S].

        A pick is the number of the client's best model.
        """
        rows = down["x"].rows
        b = down["b"].rows
        pick = loss_per_model(rows, b, clients).argmin(1)
        if "popular" in down:
            can_choose = to_device(clients.have_samples, pick.device)
            popular = to_device(down["popular"][:, 0], pick.device)
            pick = torch.where(can_choose, pick, popular)
        return rows, b, pick

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, b, pick = self.choose_models(down, clients)
        count = len(pick)
        deltas = []
        buffers = []
        for j, row in enumerate(rows):
            with_statistics = replace(clients, buffers=b[j].repeat(count, 1))
            stream = f"fit {j}" if j else "fit"  # each model has its own shuffle
            fit = with_statistics.fit(row.expand(count, -1), stream=stream)
            deltas.append(fit.w.sub_(row))
            buffers.append(fit.buffers)
        upload = {
            "pick": self.encode_choice(pick),
            "delta": torch.stack(deltas, 1),
            "b": torch.stack(buffers, 1),
        }
        return client_state, upload, fit

    def encode_choice(self, pick: Tensor) -> Tensor:
        """The picks [S] as they travel: one byte for up to 256 models."""
        dtype = torch.uint8 if self.k <= 256 else torch.int32
        return pick.to(dtype)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        rows, b, pick = self.choose_models(down, clients)
        return {"w": rows[pick], "batch_norm": b[pick]}

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        return self._expected_uploads(state, state["x"], state["b"])

    def _expected_uploads(self, state: Tensors, delta: Tensor, b: Tensor) -> Uploads:
        """The uploads of clients with these updates and statistics, and their pick."""
        number = self.encode_choice(state["pick"][0])
        return {
            "delta": delta,
            "b": Claim(b, is_statistics=True),
            "pick": Claim(number, low=0, high=self.k - 1, is_whole=True),
        }

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        mean = cohort.mean_weights(self.weighting)
        delta = mean.aggregate(up["delta"].flatten(1)).view(up["delta"].shape[1:])
        b = mean.aggregate(up["b"].flatten(1)).view(up["b"].shape[1:])
        pick = RowUpdate(cohort.ids, up["pick"].cpu().long())
        return {**self.optimizer_step(state, delta), "b": b, "pick": pick}, None

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """Tensors for the record: "rows" [S], the round's clients, and "cluster" [S].

        "cluster" is the model that each of them picked.
        """
        return {"rows": cohort.ids, "cluster": state["pick"][cohort.ids]}


@algorithm_options
class HypCluster(Ensemble):
    """HypCluster (Mansour et al. 2020): each client trains the model that fits it best.

    server: x [k, P], b [k, b] (each model's batch norm statistics), pick [N] (the model
    that each client picked last), of m, v [k, P] and t [k] what the optimizer needs, as
    in `FedOpt`, and with `shared` common [P] (which parameters all models share) ·
    client: nothing · down: x [k, P], b [k, b] (k models, shared rows; with `shared` x
    [k, Q], the other Q parameters, and common [S, P - Q]) · up: delta [S, P], b [S, b]
    (1 model), pick [S]; in a warm-up round delta [S, k, P], b [S, k, b].

    It is IFCA (Ghosh et al. 2020, Algorithm 1): a client picks `argmin_j F_i(x_j)` and
    trains that model, and each model takes the mean update of the clients that picked
    it. A model that no client picked is left as it was, optimizer state included. Ties
    go to the lower number. HypCluster(k=1) is FedAvg.

    Deviation: for evaluation clients pick anew, on their training data; Motley's silo
    code uses the last round's pick.

    The other options are those of `Ensemble`.

    Args:
        warmup_rounds: Rounds of k independent FedAvg runs before the clustering, in
            which k models go up. Their optimizer state is dropped at the end (Motley).
        shared: Pattern of the names of parameters that all models share, such
            as "conv*"; they are the mean of every client's (weight sharing: IFCA,
            section 5; Motley, section 4.2, observation 2). They travel once, and the k
            models differ in the other layers. "" shares no parameter.
    """

    warmup_rounds: NonNegativeInt = 0
    shared: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and (self.warmup_rounds or self.bias_correction != "none"):
            raise ValueError(
                "shared: k independent runs (warmup_rounds) have no common layers, nor "
                "have clusters of several ages a common bias correction; take "
                "warmup_rounds=0 and bias_correction='none'."
            )

    def initial_models(self, net: Net) -> Tensor:
        """Different models [k, P] for the k clusters.

        Equal models would tie for every client and stay equal for ever. Where the net
        draws its weights, the models are k draws. A net may also start at one point (a
        linear model at zero). Then the matrices of all k models are drawn with standard
        deviation 1 / sqrt(fan in), and the rest stays. No model stays at zero, since it
        would be better for every client than the drawn ones.

        Raises ValueError where the models cannot differ.
        """
        rows = super().initial_models(net)
        if _are_equal(rows):
            for j, row in enumerate(rows):
                _draw_matrices(row, net, generator_of("centre", net.seed, j))
        if self.shared:
            rows = torch.where(self.shared_mask(net), rows[0], rows)
        if _are_equal(rows):
            raise ValueError(
                f"k: this model starts equal {self.k} times, and equal centres never "
                "part; give it a random initialisation."
            )
        return rows

    def shared_mask(self, net: Net) -> Tensor:
        """Mask [P]: True for the parameters that all models share."""
        return net.mask(self.shared).to(net.w0.device)

    def server_init_args(self, net: Net) -> Tensors:
        start = super().server_init_args(net)
        if self.shared:
            start["common"] = self.shared_mask(net)
        return start

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

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        if cohort.round <= self.warmup_rounds:
            return super().uploads(state, down, cohort)
        return self._expected_uploads(state, state["x"][0], state["b"][0])

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        if cohort.round <= self.warmup_rounds:
            of_ensemble, _ = super().update(state, up, cohort)
            if cohort.round == self.warmup_rounds:  # the optimizer starts anew
                of_ensemble |= self.optimizer_state(state["x"])
            return of_ensemble, None
        pick = up["pick"].cpu().long()
        mean = cohort.mean_weights(self.weighting)
        weight = F.one_hot(pick, self.k).T * mean.weight  # [k, S]
        of_model = MixingWeights(normalize_rows(weight))
        x = state["x"]
        is_picked = to_device(weight.any(1), x.device)
        delta = of_model.aggregate(up["delta"])
        moves = is_picked[:, None]
        if "common" in state:
            delta = torch.where(state["common"], mean.aggregate(up["delta"]), delta)
            moves = moves | state["common"]
        stepped = self.optimizer_step(state, delta)
        stepped["b"] = of_model.aggregate(up["b"])
        # A model that no client picked is left as it was.
        changes: Changes = {"pick": RowUpdate(cohort.ids, pick)}
        for key, new in stepped.items():
            takes = {"t": is_picked, "b": is_picked[:, None]}.get(key, moves)
            changes[key] = torch.where(takes, new, state[key])
        return changes, None


def _are_equal(rows: Tensor) -> bool:
    """True where at least two of the rows [k, P] are the same."""
    return len(rows.unique(dim=0)) < len(rows)


def _draw_matrices(row: Tensor, net: Net, generator: torch.Generator) -> None:
    """Draws the matrices of a model [P], in place."""
    for name, shape in zip(net.names, net.shapes, strict=True):
        if len(shape) > 1:
            std = shape[1:].numel() ** -0.5
            draw = torch.empty(shape, dtype=net.dtype)
            nn.init.trunc_normal_(draw, 0.0, std, -2 * std, 2 * std, generator)
            row[net.slices[name]] = draw.flatten()


@algorithm_options
class ClusteredFL(ServerStep):
    """Clustered FL (Sattler et al. 2021, CFL): a cluster splits where updates part.

    server: x, way [nodes, P], child [nodes], cluster [N] (the node each client is in;
    one that has split since, for clients that were absent then) · client: nothing ·
    down: x [S, P] (1 model, the cluster's) · up: delta [S, P] (1 model).

    Algorithm 2, with the conditions of the authors' code. A cluster splits where |mean
    delta| < eps1 and max |delta| > eps2, more than two of its clients took part, and
    `first` rounds are over. The two halves are those of agglomerative clustering by the
    updates' cosines, and already this round's means are theirs. Only clients of the
    round decide.

    Clusters are the leaves of a tree, as in the paper. Its inner nodes keep the model
    at which they split, and `way`, the mean updates of the two halves. A client that
    was absent then is sent that model. Its next update from it counts only for this: it
    takes the client to the half of the larger cosine.

    Deviation: `weighting` is uniform, as in the authors' code. A client keeps its
    number at every level of the tree.

    The other options are those of `FedAvg`, without its mean.

    Args:
        weighting: Shares of the clients in a cluster's mean: "uniform" or "samples".
        eps1: Bound on the norm of a cluster's mean update: above it no cluster
            splits. 0.4 is the authors' value for one model and learning rate.
        eps2: Bound on the norm of a cluster's longest update: below it no cluster
            splits. 1.6 is the authors' value for the same model. Where updates are
            smaller, clusters never split and this is FedAvg.
        relative: True takes one condition on norms in place of both: |mean delta| <
            eps1 max |delta|. It depends on neither model nor learning rate. But it goes
            on to split clusters of one kind when they have converged and only noise is
            left (18 clients of 2 kinds: 9 pairs); `gamma` ends that.
        first: Rounds before the first split.
        linkage: Similarity of two groups in the bipartition: "complete" is the authors'
            code, "single" the paper's optimal bipartition (least largest cosine
            across).
        gamma: Least separation of the two halves, from 0 to 1. A positive gamma adds
            the paper's condition `sqrt((1 - largest cosine across) / 2) > gamma`.
    """

    weighting: Weighting = "uniform"
    eps1: NonNegativeFloat = 0.4
    eps2: NonNegativeFloat = 1.6
    relative: bool = False
    first: NonNegativeInt = 20
    linkage: Literal["complete", "single"] = "complete"
    gamma: NonNegativeFloat = 0.0

    traits = Traits(growing_state=("x", "way", "child"), reported_state=("cluster",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {
            "x": x0[None],
            "way": torch.zeros_like(x0[None]),
            "child": torch.tensor([-1]),
            "cluster": torch.zeros(n, dtype=torch.long),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"x": state["x"][state["cluster"][cohort.ids]]}

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        return {"delta": state["x"][0]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        delta = up["delta"]
        node = state["cluster"][ids]  # the node whose model each client was sent
        # [S]: True where the node has split since the client last took part
        has_split = state["child"][node] >= 0
        tree = {key: state[key] for key in ("x", "child", "cluster")}
        tree["cluster"] = self._descend(state, ids[has_split], delta[has_split])
        if cohort.round > self.first:
            for leaf in (state["child"] < 0).nonzero()[:, 0].tolist():
                members = (node == leaf).nonzero()[:, 0]  # rows of the cohort
                tree = self._split_leaf(tree, leaf, ids[members], delta[members])
        x = tree["x"]
        cluster = tree["cluster"]
        share = cohort.mean_weights(self.weighting).weight
        weight = F.one_hot(cluster[ids], len(x)).T * share
        # The update of a client whose node has split is from another model.
        mean = MixingWeights(normalize_rows(weight * ~has_split))
        num_old_nodes = len(state["x"])
        new_ways = MixingWeights(mean.weight[num_old_nodes:]).aggregate(delta)
        tree["way"] = torch.cat([state["way"], new_ways])
        tree["x"] = mean.aggregate(delta, x, self.server_lr)
        same_cluster = (cluster[:, None] == cluster[ids]) * share
        mixing = MixingWeights(same_cluster, receivers=torch.arange(cohort.n))
        changes: Changes = {**tree}
        return changes, mixing

    def _descend(self, state: Tensors, ids: Tensor, delta: Tensor) -> Tensor:
        """The clusters [N] after clients of split nodes have moved to a half.

        Client `ids[i]` moves to the half whose way is nearer to its update `delta[i]`.
        """
        cluster = state["cluster"].clone()
        for i, client in enumerate(ids.tolist()):
            first_half = int(state["child"][cluster[client]])
            ways = state["way"][first_half : first_half + 2]
            half = int(cosine_matrix(delta[i : i + 1], ways).argmax())
            cluster[client] = first_half + half
        return cluster

    def _split_leaf(
        self,
        tree: Tensors,  # x [nodes, P], child [nodes], cluster [N]
        leaf: int,
        ids: Tensor,  # [m] the leaf's clients in this round
        delta: Tensor,  # [m, P]
    ) -> Tensors:
        """The tree, with two more nodes where the updates split the leaf."""
        second = self.bipartition(delta) if len(ids) > 2 else None
        if second is None:
            return tree
        x = tree["x"]
        first_half = len(x)
        child = torch.cat([tree["child"], torch.tensor([-1, -1])])
        child[leaf] = first_half
        cluster = tree["cluster"].clone()
        cluster[ids] = first_half + second.long()
        return {
            "x": torch.cat([x, x[[leaf, leaf]]]),
            "child": child,
            "cluster": cluster,
        }

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        # The client goes down one level of the tree in a round.
        return {"cluster": self.update(state, up, cohort)[0]["cluster"]}

    def bipartition(self, delta: Tensor) -> Tensor | None:
        """Mask [m] of a cluster's clients that leave for a new one.

        `delta` [m, P] are their updates. The result is None where the cluster stays
        whole.
        """
        m = len(delta)
        even = torch.full((1, m), 1 / m, dtype=torch.float64)
        mean = MixingWeights(even).aggregate(delta)
        norm2 = squared_norms(torch.cat([delta, mean])).cpu()
        *norms, norm_of_mean = norm2.sqrt().tolist()
        longest = max(norms)
        bound = self.eps1 * longest if self.relative else self.eps1
        if norm_of_mean >= bound:
            return None
        if not self.relative and longest <= self.eps2:
            return None
        cosine = cosine_matrix(delta).cpu()
        group = agglomerate(cosine, 2, self.linkage)
        second = group != group[0]
        largest_across = cosine[second][:, ~second].max()
        if self.gamma and ((1 - largest_across) / 2) ** 0.5 <= self.gamma:
            return None
        return second


def agglomerate(similarity: Tensor, k: int, linkage: str = "complete") -> Tensor:
    """Groups [m] of m clients by agglomerative clustering of `similarity` [m, m].

    There are k groups at most; the number of a group is that of its first client. The
    two most similar groups merge until k are left. Groups are as similar as their least
    similar pair ("complete") or their most similar one ("single"). "single" makes the
    largest similarity across two halves as small as it can be.
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
