"""Servers that keep all models [N, P] and relate the clients.

FedAMP and HeurFedAMP mix models that are close. SFL smooths models over a graph. MOCHA
learns the relation between tasks. FedDWA mixes the models nearest to where a client is
heading; the quadratic programme of its Eq. 12 is solved here, too.

Symbols:

- S clients are in a round's cohort, N in the federation; a model has P parameters.
- `w` are the models that clients trained, a row each: [S, P] or [N, P].
- `x` is the model from which a client trains.
- `u` are the mixed models of FedAMP and SFL, towards which training is pulled.
- `g` are FedDWA's guidance models; K models around one of them are mixed.
- F_i is the mean loss of client i on its training samples.
"""

import math
from dataclasses import field, fields
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._clusters import cosine_matrix
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Changes,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    Stop,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    algorithm_options,
    lazy_zeros,
    normalize_rows,
    squared_norms,
)
from pflcore.check import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
    reject,
    warn_caller,
)
from pflcore.train import Clients, Net, Objective


@algorithm_options
class LatestModels(Algorithm):
    """Base of servers that mix the latest models by their distances.

    server: w [N, P], and of them sqdist [N, N], norm2 [N], last [N] (the round of the
    upload, 0: none) and weights [N, N], row i what client i's model mixes.

    A subclass computes the mixing weights by `mixing_matrix`.
    """

    traits = Traits(model_uploads={"w": "server.w"}, reported_state=("weights",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        identity = torch.eye(n, dtype=torch.float64)
        return {
            "w": x0.repeat(n, 1),
            "sqdist": torch.zeros_like(identity),
            "norm2": squared_norms(x0[None]).cpu().expand(n),
            "last": torch.zeros(n, dtype=torch.long),
            "weights": identity,
        }

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        models = up["w"]
        to_all, to_cohort, norm2 = _distances(models, state["w"])
        # The stored models of the cohort are outdated: their uploads replace them.
        to_all = to_all.index_copy(1, ids, to_cohort)
        sqdist = state["sqdist"].index_copy(0, ids, to_all)
        sqdist.index_copy_(1, ids, to_all.T)  # in place: this copy is new
        norm2 = state["norm2"].index_copy(0, ids, norm2)
        last = state["last"].index_fill(0, ids, cohort.round)
        weights = self.mixing_matrix(sqdist, norm2, has_model=last > 0)
        changes: Changes = {
            "w": RowUpdate(ids, models),
            "sqdist": sqdist,
            "norm2": norm2,
            "last": last,
            "weights": weights,
        }
        # Every client's mixed model changes, also an absent client's. The record shows
        # what the uploads of this round weigh in each of them.
        mixing = MixingWeights(weights[:, ids], receivers=torch.arange(cohort.n))
        return changes, mixing

    def mixing_matrix(
        self,
        sqdist: Tensor,  # [N, N]
        norm2: Tensor,  # [N]
        has_model: Tensor,  # bool [N]: the client has uploaded a model
    ) -> Tensor:  # [N, N] float64
        """Mixing weights [N, N] from squared distances and squared norms."""
        raise NotImplementedError(f"{type(self).__name__} has no mixing.")


def _distances(
    models: Tensor,  # [S, P] of the cohort
    stored: Tensor,  # [N, P]
) -> tuple[Tensor, Tensor, Tensor]:  # [S, N], [S, S], [S], on the CPU
    """Squared distances of models to all stored ones and each other; squared norms."""
    origin = torch.zeros_like(models[:1])
    distances = [
        ops.pairwise_sqdist(models, others) for others in (stored, models, origin)
    ]
    on_cpu = torch.cat(distances, 1).cpu()  # one copy: each would wait for the GPU
    to_all, to_cohort, norm2 = on_cpu.split([len(stored), len(models), 1], 1)
    return to_all, to_cohort, norm2[:, 0]


def mixing_mask(has_model: Tensor) -> Tensor:
    """Mask [N, N]: True where client i may mix client j's model.

    Both have uploaded a model, and they are not the same client.
    """
    both_have = has_model & has_model[:, None]
    itself = torch.eye(len(has_model), dtype=torch.bool)
    return both_have & ~itself


@algorithm_options
class FedAMP(LatestModels):
    """FedAMP (Huang et al. 2021): close models attract each other.

    server: the latest models w [N, P] and weights [N, N] (xi), see `LatestModels` ·
    client: w [P] · down: u [S, P] (1 model) · up: w [S, P] (1 model).

    Client i is drawn to `u_i = sum_j xi_ij w_j`. Another client's model weighs `xi_ij =
    (alpha / sigma) exp(-|w_i - w_j|^2 / sigma)`; the client's own weight xi_ii is the
    rest of 1. By local training the client minimises `F_i(w) + lam / (2 alpha) |w -
    u_i|^2`. It starts from its own model, or from u_i with `start="u"`; it is evaluated
    with the model that it trained. The latest model of an absent client still attracts.

    Where the others' weights sum to more than 1, xi_ii would be negative: u_i would lie
    beyond the other models, and the models would swap places. The others' weights are
    then scaled to sum to 1, with a warning. That can happen where alpha > sigma / (N -
    1) and models are close. The defaults, alpha = sigma = 1, are the paper's form, not
    a choice that fits N clients: with more than two clients they warn as long as models
    are close, so at least in the first rounds. `alpha = sigma / (N - 1)` never warns.

    Deviation: clients may be absent; the paper has every client in every round.
    """

    # scale of the squared distances; a large one attracts all clients alike
    sigma: PositiveFloat = 1.0
    # step size of the attraction: others weigh alpha / sigma, the pull is lam / alpha
    alpha: PositiveFloat = 1.0
    # strength of the pull towards u_i
    lam: NonNegativeFloat = 0.1
    # where local training starts: the client's own model, or u
    start: Literal["own", "u"] = "own"

    # Also with start="u", a client is evaluated with the model that it trained, never
    # with the mixed one. So its running statistics are those of its own training.
    traits = LatestModels.traits._replace(
        batch_norm=("local",), reported_state=("weights", "last")
    )

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """Tensors for the record: "weights" [N, N], "last" [N] and "rescaled" [].

        "last" is the round of the model that each client gives, 0 for none. "rescaled"
        counts the clients whose weights were scaled down, so that the own one is 0.
        """
        own_weight = state["weights"].diagonal()
        rescaled = (own_weight.abs() < 1e-12).sum()  # a sum to 1 is subject to rounding
        return {**super().report(state, mix, cohort), "rescaled": rescaled}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        mixing = MixingWeights(state["weights"][cohort.ids])
        return {"u": mixing.aggregate(state["w"])}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        start = client_state["w"] if self.start == "own" else down["u"]
        pull = Objective(prox=(self.lam / self.alpha, down["u"]))
        fit = clients.fit(start, pull)
        client_state = {"w": fit.w}
        upload = {"w": fit.w}
        return client_state, upload, fit

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        attraction = (self.alpha / self.sigma) * (-sqdist / self.sigma).exp()
        xi = attraction * mixing_mask(has_model)
        total = xi.sum(1, keepdim=True)
        if bool((total > 1).any()):
            warn_caller(
                "FedAMP: the others' weights exceed 1 and are scaled down; alpha <= "
                f"sigma / {len(has_model) - 1} avoids it."
            )
            xi = xi / total.clamp(min=1)
        return _with_own_weight(xi)


def _with_own_weight(weights: Tensor) -> Tensor:
    """Weights [N, N] whose diagonal makes every row sum to 1."""
    return weights + (1 - weights.sum(1)).diag()


@algorithm_options
class HeurFedAMP(FedAMP):
    """HeurFedAMP (Huang et al. 2021): FedAMP with cosines instead of distances.

    State and messages are FedAMP's. The own weight xi_ii is fixed. The others share the
    rest by a softmax of `sigma cos(w_i, w_j)`. The cosine with a model of norm 0 counts
    as 0. A client without others mixes only its own model.
    """

    # sharpness of the softmax of cosines
    sigma: PositiveFloat = 5.0
    xi_self: UnitFloat = 0.0  # xi_ii; 0: 1 / N

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        no_pair = ~mixing_mask(has_model)
        cosine = cosine_matrix(sqdist, norm2).masked_fill(no_pair, -torch.inf)
        share = (self.sigma * cosine).softmax(1)
        share = share.nan_to_num(0.0)  # NaN: a row without others
        own_weight = self.xi_self
        if own_weight == 0:
            own_weight = 1 / len(has_model)
        return _with_own_weight((1 - own_weight) * share)


@algorithm_options
class SFL(LatestModels):
    """SFL (Chen et al. 2022): models smoothed over a graph of clients, and their mean.

    server: the latest models w [N, P] and weights [N, N] (s A^L + (1 - s) I), see
    `LatestModels` · client: nothing · down: x, u [S, P] (2 models: the readout and the
    client's own row of X'; the paper's tables count 1) · up: w [S, P] (1 model).

    With X [N, P] the latest models, the smoothed models are `X' = s A^L X + (1 - s) X`.
    A client receives its row u_i of X', and the readout x, the mean of all rows. It
    trains from x and minimises `F_i(w) + lam1 / 2 |w - u_i|^2 + lam2 / 2 |w - x|^2`. It
    is evaluated with u_i; a client that never took part has the readout as its u_i.

    The graph A [N, N] has self loops and rows that sum to 1. It is `adjacency`, in
    which a client without a self loop gets one of weight 1; without `adjacency` it
    joins each client to the `k` nearest models.

    Deviations: the regularisers are squared and have a gradient; in the released code
    they are neither squared nor connected to the parameters, so they have no effect.
    Neighbours are the nearest clients; the released code's learned graph keeps the
    farthest.
    """

    # a given graph [N, N] on the CPU; None: the nearest models
    adjacency: Tensor | None = field(default=None, compare=False)
    k: PositiveInt = 5  # neighbours beside the client itself
    layers: PositiveInt = 3  # L
    # share of the graph's means in X'; 0: nothing is smoothed
    s: UnitFloat = 1.0
    # strength of the pull towards the smoothed model u_i
    lam1: NonNegativeFloat = 0.3
    # strength of the pull towards the readout x
    lam2: NonNegativeFloat = 0.3

    def __eq__(self, other: object) -> bool:
        """True for equal options, graphs included, number by number.

        The dataclass's own comparison leaves the graph out (`compare=False`): `==` of
        two tensors is a tensor. Its hash leaves the graph out, too, as a hash may.
        """
        if type(other) is not type(self):
            return NotImplemented
        if not _same_graph(self.adjacency, other.adjacency):
            return False
        names = [f.name for f in fields(self) if f.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def adjacency_matrix(
        self,
        sqdist: Tensor,  # [N, N]
        has_model: Tensor,  # bool [N]
    ) -> Tensor:  # [N, N] float64
        """The graph with self loops, not normalized.

        Raises ValueError where the given graph does not fit N clients.
        """
        graph = self.adjacency
        if graph is None:
            return self._nearest_graph(sqdist, has_model)
        n = len(sqdist)
        if graph.shape != (n, n) or not bool((graph >= 0).all()):
            reject(
                "adjacency", f"{n} x {n} numbers >= 0 (a newcomer counts, too)", graph
            )
        lacks_loop = (graph.diagonal() == 0).double()
        return graph.double() + lacks_loop.diag()

    def _nearest_graph(self, sqdist: Tensor, has_model: Tensor) -> Tensor:
        distance = sqdist.masked_fill(~has_model, torch.inf)
        distance.fill_diagonal_(-1)  # a client is its own nearest neighbour
        order = distance.sort(dim=1, stable=True).indices
        neighbours = order[:, : self.k + 1]
        return torch.zeros_like(sqdist).scatter_(1, neighbours, 1.0)

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        # Nobody mixes a client without a model, be the graph given or learned.
        graph = self.adjacency_matrix(sqdist, has_model) * has_model
        graph = normalize_rows(graph)
        identity = torch.eye(len(graph), dtype=graph.dtype)
        has_neighbours = graph.any(1, keepdim=True)
        graph = torch.where(has_neighbours, graph, identity)
        smoothing = torch.linalg.matrix_power(graph, self.layers)
        weights: Tensor = self.s * smoothing + (1 - self.s) * identity
        if bool(has_model.any()):
            # A client without a model gets the mean of the others' rows, the readout.
            weights[~has_model] = weights[has_model].mean(0)
        return weights

    def add_client(self, state: Tensors, n: int) -> Tensors:
        # Raises ValueError where a given graph has no row for the newcomer.
        self.adjacency_matrix(
            sqdist=torch.zeros(n + 1, n + 1),
            has_model=torch.ones(n + 1, dtype=torch.bool),
        )
        return state

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        weights = state["weights"]
        readout = weights.mean(0, keepdim=True)
        mixing = MixingWeights(torch.cat([weights[cohort.ids], readout]))
        models = mixing.aggregate(state["w"])
        return {"x": models[-1].expand(len(cohort.ids), -1), "u": models[:-1]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        mu = self.lam1 + self.lam2
        objective = Objective()
        if mu:
            # The two squared distances have the gradient of one, to a weighted mean.
            anchor = (self.lam1 * down["u"] + self.lam2 * down["x"]) / mu
            objective = Objective(prox=(mu, anchor))
        fit = clients.fit(down["x"], objective)
        return client_state, {"w": fit.w}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": down["u"]}


def _same_graph(graph: Tensor | None, other: Tensor | None) -> bool:
    """True for equal numbers, or where neither graph is given."""
    if graph is None or other is None:
        return graph is other
    return graph.shape == other.shape and bool((graph == other).all())


@algorithm_options
class Mocha(Algorithm):
    """MOCHA (Smith et al. 2017) in primal form: learns models and their relation.

    server: w [N, P], omega [N, N], seen [N] (who has taken part) · client: w [P] (its
    row) · down: pull [S, P] (`sum_{j != t} Omega_tj w_j`, 1 model), o [S, 1]
    (Omega_tt), and in a round with a client that joins late start [S, P] (the mean of
    the models so far) · up: w [S, P] (1 model), and lr_sum and lr [S, 1] (the sum of
    the step sizes, and one of them).

    A client is a task t, and the rows of W [N, P] are the clients' models. MOCHA
    minimises `sum_t F_t(w_t) + (lam / 2) tr(W^T Omega W)` over W and the relation Omega
    [N, N], in turns:

    - One round is one inner iteration: a local epoch of `w_t -= lr (grad + lam
      (Omega_tt w_t + pull_t))`. The pull `pull_t = sum_{j != t} Omega_tj w_j` keeps the
      other models frozen.
    - Every `outer` rounds the server computes `Sigma = (W W^T)^(1/2) / trace` and
      `Omega = ((1 - delta) Sigma + delta I / N)^-1`. At first Sigma is I / N.

    The pull is an explicit block-Jacobi step. It is stable only while the largest
    eigenvalue of `e^(1/2) Omega e^(1/2)` is below 2, with `e_t = (1 - (1 - lr lam
    Omega_tt)^steps) / Omega_tt`. That is checked after every update of Omega. In every
    round, `lr lam Omega_tt` has to be below 2. Otherwise the run stops with a sentence;
    but a client whose step size is larger than the others' is left out instead.

    `relation="sigma"` uses Sigma instead of Omega, as Motley's code does; its table can
    be had only so. Decision where the paper is silent: a client that joins late starts
    from the mean of the models so far, and is evaluated with it until then. lam is not
    comparable with papers that sum losses over samples.
    """

    lam: NonNegativeFloat = 0.01  # strength of the regulariser
    # how much of I / N is mixed into Sigma: Omega's condition is <= N / delta
    delta: Fraction = 0.01
    outer: PositiveInt = 2  # rounds between two updates of Omega
    # what relates the tasks: omega, or sigma in its stead, as in Motley's code
    relation: Literal["omega", "sigma"] = "omega"

    traits = Traits(
        batch_norm=("local",),  # every client is evaluated with a model of its own
        model_uploads={"w": "server.w"},
        sgd_only_reason="takes its regulariser and its test of stability from the sum "
        "of SGD's step sizes",
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        identity = torch.eye(n, dtype=torch.float64, device=x0.device)
        omega = identity * n if self.relation == "omega" else identity / n
        return {
            "w": x0.repeat(n, 1),
            "omega": omega,
            "seen": torch.zeros(n, dtype=torch.bool),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        w = state["w"]
        seen = state["seen"]
        ids = cohort.ids
        column = to_device(ids[:, None], w.device)  # [S, 1]
        omega = state["omega"][column[:, 0]]  # [S, N]
        off_diagonal = omega.scatter(1, column, 0.0)
        down = {
            "pull": ops.aggregate(w, off_diagonal),
            "o": omega.gather(1, column),
        }
        has_newcomer = not bool(seen[ids].all())
        if has_newcomer and bool(seen.any()):
            mean_model = w[to_device(seen, w.device)].mean(0)
            down["start"] = mean_model.expand(len(ids), -1)
        return down

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        # "start" is the mean of the models so far; there is none in the first round.
        return {"w": down.get("start", net.w0[None])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        lr = clients.lr
        w = client_state["w"]
        largest = lr * self.lam * float(down["o"].max())
        self.stop_if_unstable(clients.round, lr, largest)
        mu = (self.lam * down["o"]).to(w)[:, 0]
        pull = Objective(shift=self.lam * down["pull"], prox=(mu, torch.zeros_like(w)))
        fit = clients.fit(w, pull)
        # The server divides one by the other, see `local_steps`.
        lr_sum = (fit.steps * lr)[:, None].to(fit.w)
        upload = {"w": fit.w, "lr_sum": lr_sum, "lr": torch.full_like(lr_sum, lr)}
        return {"w": fit.w}, upload, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        seen = torch.ones_like(ids, dtype=torch.bool)
        changes: Changes = {
            "w": RowUpdate(ids, up["w"]),
            "seen": RowUpdate(ids, seen),
        }
        if cohort.round % self.outer == 0:
            rows = to_device(ids, up["w"].device)
            models = state["w"].index_copy(0, rows, up["w"])
            omega = task_relation(models, self.delta, self.relation)
            lr = up["lr"][:, 0].double()
            lr_sum = up["lr_sum"][:, 0].double()
            self.check_stability(omega[rows][:, rows], lr, lr_sum, cohort)
            changes["omega"] = omega
        return changes, None

    def check_stability(
        self,
        omega: Tensor,  # [S, S] of the cohort
        lr: Tensor,  # [S] step sizes
        lr_sum: Tensor,  # [S] step size times steps
        cohort: Cohort,
    ) -> None:
        """Raises Stop where the next exchanges would amplify the models.

        Raises BadUpload instead where some step sizes are larger than the others'.
        """
        eigenvalue = self._largest_eigenvalue(omega, lr, lr_sum)
        usual = lr.median()  # the clients of a run have one step size
        larger = lr > usual * (1 + 1e-6)
        if not eigenvalue < 2 and bool(larger.any()):
            text = (
                "its step size is {:g}, the others' is {:g}, and MOCHA is unstable "
                "with it."
            )
            ids = cohort.ids[larger.cpu()].tolist()
            step_sizes = zip(ids, lr[larger].tolist(), strict=True)
            raise BadUpload({i: text.format(own, usual) for i, own in step_sizes})
        self.stop_if_unstable(cohort.round, lr.max(), eigenvalue)

    def _largest_eigenvalue(self, omega: Tensor, lr: Tensor, lr_sum: Tensor) -> float:
        """Largest eigenvalue of an exchange, or of a local step that is unstable."""
        diagonal = omega.diagonal()
        shrink = lr * self.lam * diagonal
        of_step: float = shrink.max().item()
        if not of_step < 2:  # (1 - shrink)^steps could overflow
            return of_step
        e = (1 - (1 - shrink) ** local_steps(lr_sum, lr)) / diagonal
        root = e.clamp(min=0).sqrt()
        exchange = root[:, None] * omega * root
        largest: float = torch.linalg.eigvalsh(exchange).max().item()
        return max(of_step, largest)

    def stop_if_unstable(
        self,
        round_number: int,
        lr: float | Tensor,  # a tensor [] is copied from a GPU for the message only
        eigenvalue: float,
    ) -> None:
        """Raises Stop for an eigenvalue of 2 or more, or NaN."""
        if not eigenvalue < 2:
            raise Stop(
                f"MOCHA is unstable from round {round_number} on: with lr {lr:g}, lam "
                f"{self.lam:g} and delta {self.delta:g} an exchange amplifies the "
                f"models (eigenvalue {eigenvalue:.3g}, which must be below 2); lower "
                "lr or lam, or raise delta."
            )


def local_steps(lr_sum: Tensor, lr: Tensor) -> Tensor:
    """Number of steps [S] of each client, from step size times steps and step size.

    A client uploads both in its model's dtype, so the quotient is rounded: it is exact
    for some millions of steps in float32. A client with a step size of 0 has moved
    nothing, and counts as one without steps.
    """
    return (lr_sum / lr.clamp(min=1e-300)).round()  # never 0 / 0


def task_relation(w: Tensor, delta: float, kind: str = "omega") -> Tensor:
    """MOCHA's Omega or Sigma [N, N] of the models `w` [N, P], float64.

    `Sigma = (W W^T)^(1/2) / trace` and `Omega = ((1 - delta) Sigma + delta I / N)^-1`.
    W W^T has rank P at most, so its eigenvalues are clamped to 1e-8 from below
    (Motley's value); delta bounds Omega.
    """
    values, vectors = torch.linalg.eigh(w.double() @ w.double().T)
    root = values.clamp(min=1e-8).sqrt()
    eigenvalues = root / root.sum()
    if kind == "omega":
        eigenvalues = 1 / ((1 - delta) * eigenvalues + delta / len(w))
    matrix: Tensor = (vectors * eigenvalues) @ vectors.T
    return matrix


def inner_products(
    to_guide: Tensor,  # [K] |g - w_j|^2, exact
    between: Tensor,  # [K, K] |w_j - w_k|^2, exact
) -> Tensor:  # [K, K] float64
    """FedDWA's Gram matrix (Eq. 11): the inner products `(g - w_j) . (g - w_k)`.

    They come from squared distances alone: `(|g - w_j|^2 + |g - w_k|^2 - |w_j -
    w_k|^2) / 2`. Over the simplex, the first two terms are linear in p, and the
    curvature is that of `between`. Where the models are much closer to each other than
    to the guide, a small number is subtracted from a large sum, and float64 rounds off
    what is below 1e-16 of the sum. So models are told apart that differ by a millionth
    of their distance to the guide (1e-12 of its square), and not much closer ones.

    The default `ridge` of `simplex_qp` is coarser: it makes an even mix of models that
    are closer than some hundred-thousandth of that distance. ridge=0 does not.
    """
    return (to_guide[:, None] + to_guide - between) / 2


SOLVED_DESCENT = 1e-13  # a descent below it is rounding; the right side is 1


def simplex_qp(gram: Tensor, ridge: float = 1e-10) -> Tensor:
    """The p [K] >= 0 with sum 1 that minimises `p . gram p`, float64.

    `gram` [K, K] is positive semidefinite. `ridge` times the mean of the diagonal is
    added to the diagonal, which selects the shortest p where several are optimal; 0
    adds nothing.

    The sum of 1 is not a constraint of the search. The q >= 0 that minimises `q . gram
    q + (sum(q) - 1)^2` has the direction of p, and dividing by its sum gives p. The
    term `sum(q)^2` adds 1 to every entry of the matrix, and the right side is 1. The
    active set method of Lawson and Hanson finds q (1974, Solving least squares
    problems, algorithm NNLS): the coordinate with the steepest descent is freed, the
    free ones move towards their optimum, and those that would become negative are fixed
    at 0 again.
    """
    k = len(gram)
    gram = gram.double().cpu()
    scale = float(gram.diagonal().max())
    if scale <= 0:  # every model equals the guide
        return torch.full((k,), 1 / k, dtype=torch.float64)
    gram = (gram + gram.T) / (2 * scale)
    ridges = ridge * gram.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    matrix = gram + ridges + 1
    q = torch.zeros(k, dtype=torch.float64)
    # The objective falls in every pass; the bound guards against rounding.
    for _ in range(20 * k):
        free = q > 0
        descent = (1 - matrix @ q).masked_fill(free, 0)
        if descent.max() <= SOLVED_DESCENT:
            break
        free[descent.argmax()] = True
        q = _descend_to_optimum(matrix, q, free)
    return q / q.sum()


def _descend_to_optimum(
    matrix: Tensor,  # [K, K]
    q: Tensor,  # [K] >= 0
    free: Tensor,  # bool [K]
) -> Tensor:  # [K] >= 0
    """The optimum over the free coordinates, or over fewer of them.

    On the straight way to the optimum, the first coordinates that reach 0 are fixed
    there. The way goes on from that point without them.
    """
    while True:
        ones = q.new_ones(int(free.sum()), 1)
        target = torch.zeros_like(q)
        # gelsd: the shortest solution where the system is singular
        solution = torch.linalg.lstsq(matrix[free][:, free], ones, driver="gelsd")
        target[free] = solution.solution[:, 0]
        becomes_zero = free & (target <= 0)
        if not becomes_zero.any():
            return target
        # A coordinate that was just freed is 0 and may stay there: never 0 / 0.
        distance = (q - target).clamp(min=torch.finfo(q.dtype).tiny)
        reach = (q / distance).masked_fill(~becomes_zero, torch.inf)
        step = reach.min()  # the share of the way at which the first one is 0
        q = (q + step * (target - q)).masked_fill(reach <= step, 0)
        free = q > 0


# With `search="auto"`, a cohort of at least this many clients looks for its neighbours
# by `ops.nearest`: by groups where models are at least as long as the second constant,
# so that the distance of a pair costs more than the bookkeeping; else block by block.
GROUP_SEARCH_MIN_CLIENTS = 1000
GROUP_SEARCH_MIN_COLUMNS = 1 << 10


@algorithm_options
class FedDWA(Algorithm):
    """FedDWA (Liu et al. 2023): mixes the models nearest to where a client is heading.

    server: x [N, P] (the personalized models), x0 [P] (the model of clients that have
    not taken part), seen [N] (the clients that have), and with guidance="previous" last
    [N, P] (each client's upload) · client: nothing (with guidance="kept" last [P], has
    [1]) · down: x [S, P] (1 model, client i's x_i) · up: w, g [S, P] (2 models: the
    trained one and the guidance; 1 with "previous" and "current").

    A round goes like this (Algorithm 1):

    1. The server sends client i its personalized model x_i. At first it is x0.
    2. The client trains x_i on its own data. The trained model is w_i.
    3. The client looks ahead: it goes on training from w_i, to see where that would
       lead it. The model that it gets is its guidance g_i. The client uploads w_i and
       g_i. (Some kinds of `guidance` do not look ahead, see below.)
    4. The server computes the squared distances `|g_i - w_j|^2` from each guidance to
       the models of only this cohort. Models of absent clients are not mixed.
    5. The server mixes the k models nearest to g_i into the new x_i: `x_i = sum_j p_ij
       w_j`, with weights p_ij that are proportional to `1 / |g_i - w_j|^2` (Eqs. 8 and
       15) and sum to 1.

    So a client's next model lies near the model that it was heading to. The client's
    own w_i competes like any other model, and is perhaps not among the k; where g_i is
    very near w_i, it takes almost all the weight. An absent client keeps its x_i, bit
    for bit. A client is evaluated with x_i, or by `serve="guidance"` with the guidance
    that it would compute after training x_i.

    `guidance` decides which model is g_i. The first three kinds train ahead from w_i,
    and leave no trace: the client's state stays as it was after its training.

    - "epoch" trains for `lookahead` more epochs. (The authors' code trains for as many
      as a round has.)
    - "steps" trains on `lookahead` more minibatches.
    - "full_grad" takes `lookahead` steps of SGD on the gradient of all its samples
      (Eq. 16), with the run's momentum and weight decay.
    - "previous" takes the w_i of the client's last round, which the server has cached
      (App. C.6, case ii). In its first round a client takes its present w_i.
    - "kept" takes the same model, but the client has cached it and uploads both (case
      i).
    - "current" takes the trained model itself (section 4.1). Its distance to itself is
      0, so Eq. 15 gives it, and exact copies, all the weight: FedDWA becomes Local, as
      it does in a client's first round with "previous" and "kept". One step of
      "full_grad" at the paper's step size of .01 comes close: the weight of w_i is
      above .999.

    `search` decides how the nearest models are found, not which they are. "exact"
    computes all S * S distances at once. "groups" (`ops.nearest`) gives the same bits
    from few distances where clients form clusters; where they do not, it computes more
    than all of them, by a share of about 2 / sqrt(S). "auto" is "exact" for cohorts of
    fewer than 1000 clients, and "groups" for larger ones; large cohorts of models of
    fewer than 1024 numbers are searched for all pairs, block by block.

    Deviation: with `lookahead` > 1 each epoch, minibatch or step goes on from the one
    before it; the authors' code starts each of them again from w_i.

    Not in the paper: `power` makes the weights proportional to `1 / |g_i - w_j|^(2
    power)`. `stride` rescales g_i - w_i, so that its length is `stride` times the
    distance from w_i to the nearest other model, which takes all S * S distances.
    Without `stride` the look ahead becomes shorter as gradients become smaller, and w_i
    takes more and more of the weight.
    """

    k: PositiveInt = 5  # how many models are mixed, at most the cohort
    # the client's guidance model: trained for epochs or steps, along whole gradients,
    # or its previous model (the server's copy, or kept by the client) or current one
    guidance: Literal["epoch", "steps", "full_grad", "previous", "kept", "current"] = (
        "epoch"
    )
    lookahead: PositiveInt = 1  # epochs, minibatches or gradient steps of the guidance
    # how the nearest models are found
    search: Literal["auto", "exact", "groups"] = "auto"
    # of the inverse squared distances: 1 is Eq. 15, 0 an even mix of the k nearest
    power: NonNegativeFloat = 1.0
    # the guidance's step, in distances to the nearest other model
    stride: PositiveFloat | None = None
    # evaluated: the mix x_i, or the guidance after training it and looking ahead
    serve: Literal["mix", "guidance"] = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._trains_ahead:
            self.require_default("guidance", "serve")

    @property
    def _trains_ahead(self) -> bool:
        return self.guidance in ("epoch", "steps", "full_grad")

    @property
    def traits(self) -> Traits:
        reason = ""
        if self.guidance == "full_grad":
            reason = (
                "with guidance='full_grad' takes steps of SGD along whole gradients"
            )
        cache = ("last",) if self.guidance == "previous" else ()
        return Traits(
            batch_norm=("local", "average"),  # local in the authors' code
            sgd_only_reason=reason,
            no_clip_grad_reason=reason,
            model_uploads={"w": "down.x", "g": "down.x"},
            per_client_state=("x", "seen", *cache),
            evaluation_only=("serve",),
            reported_state=("mix",),
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        state = {
            "x0": x0,
            "x": lazy_zeros(n, x0),
            "seen": torch.zeros(n, dtype=torch.bool),
        }
        if self.guidance == "previous":
            state["last"] = lazy_zeros(n, x0)
        return state

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        x = state["x"][cohort.ids]
        seen = to_device(state["seen"][cohort.ids, None], x.device)
        return {"x": torch.where(seen, x, state["x0"])}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        if self.guidance != "kept":
            return {}
        x = down["x"]
        # "has" is 0 until "last" holds a trained model, then 1: clients keep numbers of
        # the model's dtype.
        return {"last": x, "has": torch.zeros_like(x[:, :1])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(down["x"])
        upload = {"w": fit.w}
        if self.guidance == "kept":
            has_last = client_state["has"] > 0
            upload["g"] = torch.where(has_last, client_state["last"], fit.w)
            client_state = {
                "last": fit.w,
                "has": torch.ones_like(client_state["has"]),
            }
        elif self._trains_ahead:
            upload["g"] = self.look_ahead(fit.w, clients.after(fit))
        return client_state, upload, fit

    def look_ahead(
        self,
        w: Tensor,  # [S, P]
        clients: Clients,
    ) -> Tensor:  # [S, P]
        """Guidance models of clients whose models are `w`; the clients stay as is."""
        if self.guidance == "epoch":
            return clients.fit(w, epochs=self.lookahead, stream="ahead").w
        if self.guidance == "steps":
            return clients.fit(w, steps=self.lookahead, stream="ahead").w
        training = clients.context.training
        velocity = torch.zeros_like(w)
        for _ in range(self.lookahead):
            grad = clients.grad(w)
            velocity = training.momentum * velocity + grad + training.weight_decay * w
            w = w - clients.lr * velocity
        return w

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        if self.serve == "mix":
            return {"w": down["x"]}
        fit = clients.fit(down["x"])
        guide = self.look_ahead(fit.w, clients.after(fit))
        return {"w": guide, "batch_norm": fit.buffers}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        w = up["w"]
        guide = up.get("g", w)
        changes = Changes(seen=RowUpdate(ids, torch.ones_like(ids, dtype=torch.bool)))
        if self.guidance == "previous":
            has_previous = to_device(state["seen"][ids, None], w.device)
            guide = torch.where(has_previous, state["last"][ids], w)
            changes["last"] = RowUpdate(ids, w)
        if self.stride is not None:
            guide = scale_guidance(guide, w, self.stride)
        weight, neighbours = self.mixing_weights(guide, w)
        if self.power != 1:
            # Relative to the largest, so that no power turns all weights into 0.
            relative = weight / weight.max(1, keepdim=True).values
            weight = normalize_rows(relative**self.power)
        mixing = MixingWeights(weight, neighbours, receivers=ids)
        changes["x"] = RowUpdate(ids, mixing.aggregate(w))
        return changes, mixing

    def mixing_weights(
        self,
        guide: Tensor,  # [S, P]
        w: Tensor,  # [S, P]
    ) -> tuple[Tensor, Tensor]:  # weights [S, K], neighbours [S, K]
        """Weights [S, K] of the models nearest to each guide, and their rows in `w`."""
        is_large = len(w) >= GROUP_SEARCH_MIN_CLIENTS
        if self.search == "exact" or (self.search == "auto" and not is_large):
            return ops.feddwa_weights(ops.pairwise_sqdist(guide, w), self.k)
        is_long = w.shape[1] >= GROUP_SEARCH_MIN_COLUMNS
        method: Literal["exact", "groups"] = "exact"  # all pairs, block by block
        if self.search == "groups" or is_long:
            method = "groups"
        sqdist, neighbours = ops.nearest(guide, w, self.k, method)
        # The neighbours are sorted by distance, and so are the weights.
        weight = ops.feddwa_weights(sqdist, self.k).weight
        return weight, neighbours


@algorithm_options
class FedDWAQP(FedDWA):
    """FedDWA with Eq. 12 solved exactly, instead of by the paper's approximation.

    State and messages are FedDWA's. The new x_i is the point nearest to the guidance in
    the convex hull of the k nearest models. With `k` at least the cohort's size no
    model is left out.

    Eq. 12 minimises `p . G p` over the simplex, with G the Gram matrix of Eq. 11. The
    paper keeps only the diagonal of G (Eq. 14), whose optimum is Eq. 15. `theta` leads
    from there (0) to the whole G (1). Eq. 13, the optimum without p >= 0, is not
    offered: its weights may be negative.
    """

    search: Literal["exact"] = "exact"  # it needs all distances
    power: Literal[1] = 1  # it solves for its weights
    theta: UnitFloat = 1.0  # how much of the Gram matrix's off-diagonal counts
    # times the Gram matrix's mean diagonal, added: the shortest of several optimal p
    ridge: NonNegativeFloat = 1e-10

    def mixing_weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        to_guide = ops.pairwise_sqdist(guide, w).cpu()
        between = ops.pairwise_sqdist(w).cpu()
        neighbours = ops.feddwa_weights(to_guide, self.k).index
        weight = torch.empty(neighbours.shape, dtype=torch.float64)
        for i, near in enumerate(neighbours):
            gram = inner_products(to_guide[i, near], between[near][:, near])
            diagonal = gram.diagonal().diag()
            blend = self.theta * gram + (1 - self.theta) * diagonal
            weight[i] = simplex_qp(blend, self.ridge)
        return to_device(weight, w.device), to_device(neighbours, w.device)


def scale_guidance(
    guide: Tensor,  # [S, P]
    w: Tensor,  # [S, P]
    stride: float,
) -> Tensor:  # [S, P]
    """Guidance models at `stride` times the distance of the nearest other model.

    The direction from `w` stays. A client whose guidance is its own model, or that is
    alone, keeps its guidance. Where an exact copy of its model is in the cohort, the
    guidance becomes the model itself.
    """
    to_others = ops.pairwise_sqdist(w).fill_diagonal_(math.inf)
    to_nearest = to_others.min(1).values.sqrt()
    step = guide - w
    length = torch.linalg.vector_norm(step, dim=1, dtype=torch.float64)
    scale = stride * to_nearest / length
    scale = scale.where(scale.isfinite(), 1.0)[:, None].to(w)
    scaled: Tensor = w + step * scale
    return scaled
