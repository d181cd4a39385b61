"""Servers that keep everybody's model [N, P] and how the clients are related: FedAMP
and HeurFedAMP mix models that are alike, SFL smooths them over a graph, MOCHA learns
the relation, FedDWA mixes the models nearest to where a client is going; and the
quadratic programme of its Eq. 12: least `p . W p` over the simplex, `sum(p) = 1`,
`p >= 0`.
"""

import math
from dataclasses import field, fields
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
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
from pflcore.data._ragged import to_device
from pflcore.train import Clients, Net, Objective


@algorithm_options
class LatestModels(Algorithm):
    """Mixes everybody's latest model by weights that `mixing_matrix` makes of the
    models' distances.

    server: w [N, P], and of them sqdist [N, N], norm2 [N], last [N] (the round of the
    upload, 0: none) and weights [N, N], row i what client i's model mixes.
    """

    traits = Traits(model_uploads={"w": "server.w"}, reported_state=("weights",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        weights = torch.eye(n, dtype=torch.float64)
        return {
            "w": x0.repeat(n, 1),
            "sqdist": torch.zeros_like(weights),
            "norm2": squared_norms(x0[None]).cpu().expand(n),
            "last": torch.zeros(n, dtype=torch.long),
            "weights": weights,
        }

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        w = up["w"]  # of the cohort alone distances are taken anew
        distances = [
            ops.pairwise_sqdist(w, to)
            for to in (state["w"], w, torch.zeros_like(w[:1]))
        ]
        # looked at once
        rows, among, norm2 = (
            torch.cat(distances, 1).cpu().split([cohort.n, len(ids), 1], 1)
        )
        rows = rows.index_copy(1, ids, among)
        new = {
            "sqdist": state["sqdist"]
            .index_copy(0, ids, rows)
            .index_copy_(1, ids, rows.T),
            "norm2": state["norm2"].index_copy(0, ids, norm2[:, 0]),
            "last": state["last"].index_fill(0, ids, cohort.round),
        }
        weights = self.mixing_matrix(new["sqdist"], new["norm2"], new["last"] > 0)
        # of the models mixed, those of who is present
        mix = MixingWeights(weights[:, ids], receivers=torch.arange(cohort.n))
        return {"w": RowUpdate(ids, w), **new, "weights": weights}, mix

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        """The weights [N, N] float64 from squared distances [N, N], squared norms [N]
        and who has a model to give, bool [N]."""
        raise NotImplementedError(f"{type(self).__name__} has no mixing.")


def mixing_mask(has_model: Tensor) -> Tensor:
    """Who mixes whom, bool [N, N], by who has a model to give, bool [N]: nobody
    itself."""
    return has_model & has_model[:, None] & ~torch.eye(len(has_model), dtype=torch.bool)


@algorithm_options
class FedAMP(LatestModels):
    """Huang et al. 2021, FedAMP: each client is drawn to u_i = sum_j xi_ij w_j, xi_ij =
    (alpha / sigma) exp(-|w_i - w_j|^2 / sigma).

    server: the latest models w [N, P] and weights [N, N] (xi), see `LatestModels` ·
    client: w [P] · down: u [S, P] (1 model) · up: w [S, P] (1 model).

    A client minimises F_i(w) + lam / (2 alpha) |w - u_i|^2 by local training from its
    own model, or from u_i with `start="u"`. xi_ii is what is left of 1. Where the
    others' weights exceed 1 (alpha > sigma / (N - 1) and models that are close) it
    would be negative, an extrapolation that swaps models: they are scaled to sum to 1,
    with a warning. With the defaults, alpha = sigma, that is so for more than two
    clients as long as their models are close, in the first rounds at least;
    alpha = sigma / (N - 1) never needs it. An absent client's latest model still gives.
    Deviation: the paper has everybody in every round.
    """

    # scale of the squared distances: larger, and all clients attract alike
    sigma: PositiveFloat = 1.0
    # step size of the attraction: others weigh alpha / sigma, the pull is lam / alpha
    alpha: PositiveFloat = 1.0
    # strength of the pull towards u_i
    lam: NonNegativeFloat = 0.1
    # where local training starts: the client's own model, or u
    start: Literal["own", "u"] = "own"

    # statistics stay with their client: it serves the model that it trained, also from
    # u
    traits = LatestModels.traits._replace(
        batch_norm=("local",), reported_state=("weights", "last")
    )

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """ "weights" [N, N], "last" [N] (the round of the model that each client gives,
        0: none),
        and "rescaled" []: how many clients' weights were scaled down, so that none is
        its own."""
        weights = state["weights"]
        rescaled = (weights.diagonal().abs() < 1e-12).sum()
        return {**super().report(state, mix, cohort), "rescaled": rescaled}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"u": MixingWeights(state["weights"][cohort.ids]).aggregate(state["w"])}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        start = client_state["w"] if self.start == "own" else down["u"]
        fit = clients.fit(start, Objective(prox=(self.lam / self.alpha, down["u"])))
        return {"w": fit.w}, {"w": fit.w}, fit

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        xi = (
            (self.alpha / self.sigma)
            * (-sqdist / self.sigma).exp()
            * mixing_mask(has_model)
        )
        total = xi.sum(1, keepdim=True)
        if bool((total > 1).any()):
            warn_caller(
                "FedAMP: the others' weights exceed 1 and are scaled down; alpha <= "
                "sigma / "
                f"{len(has_model) - 1} avoids it."
            )
            xi = xi / total.clamp(min=1)
        return xi + (1 - xi.sum(1)).diag()


@algorithm_options
class HeurFedAMP(FedAMP):
    """Huang et al. 2021, HeurFedAMP: the others share 1 - xi_ii by a softmax of sigma
    cos(w_i, w_j); xi_ii is fixed.

    State and messages are FedAMP's. The cosine of a model of norm 0 counts as 0. A lone
    client mixes itself.
    """

    # sharpness of the softmax of cosines
    sigma: PositiveFloat = 5.0
    xi_self: UnitFloat = 0.0  # xi_ii; 0: 1 / N

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        cosine = cosine_matrix(sqdist, norm2).masked_fill(
            ~mixing_mask(has_model), -torch.inf
        )
        # NaN: nobody else to mix
        share = (self.sigma * cosine).softmax(1).nan_to_num(0.0)
        xi = (1 - (self.xi_self or 1 / len(has_model))) * share
        return xi + (1 - xi.sum(1)).diag()


@algorithm_options
class SFL(LatestModels):
    """Chen et al. 2022, SFL: models smoothed over a graph of the clients, X' = s A^L X
    + (1 - s) X, and their mean, the readout.

    server: the latest models w [N, P] and weights [N, N] (s A^L + (1 - s) I), see
    `LatestModels` · client: nothing · down: x, u [S, P] (2 models: the readout and the
    client's own row of X'; the paper's tables count 1) · up: w [S, P] (1 model).

    A client trains from the readout and minimises F_i(w) + lam1 / 2 |w - u_i|^2 +
    lam2 / 2 |w - x|^2; tested is u_i. A has self loops and rows that sum to 1: of
    `adjacency` [N, N] >= 0, in which a client without a self loop gets one of weight 1;
    without it, of the `k` nearest by the models' distance. Deviations: squared
    regularisers with a gradient, where the released code's are not squared and
    detached, so without effect; neighbours are the nearest clients, where its learned
    graph keeps the farthest. Who never took part holds the readout.
    """

    # a given graph [N, N] on the CPU; None: the nearest models
    adjacency: Tensor | None = field(default=None, compare=False)
    k: PositiveInt = 5  # neighbours beside itself
    layers: PositiveInt = 3  # L
    # share of the graph's means in X'; 0: nothing is smoothed
    s: UnitFloat = 1.0
    # strength of the pull towards the smoothed model u_i
    lam1: NonNegativeFloat = 0.3
    # strength of the pull towards the readout x
    lam2: NonNegativeFloat = 0.3

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [f.name for f in fields(self) if f.compare]
        graph = self.adjacency
        another = other.adjacency
        if graph is None or another is None:
            same = graph is another
        else:
            same = graph.shape == another.shape and bool((graph == another).all())
        return same and all(getattr(self, k) == getattr(other, k) for k in names)

    def adjacency_matrix(self, sqdist: Tensor, has_model: Tensor) -> Tensor:
        """The adjacency [N, N], from squared distances [N, N] and who has a model,
        bool [N]."""
        given = self.adjacency
        n = len(sqdist)
        if given is None:  # ones: the k nearest of those who have a model, and itself
            far = sqdist.masked_fill(~has_model, torch.inf)
            far.fill_diagonal_(-1)
            order = far.sort(dim=1, stable=True).indices[:, : self.k + 1]
            return torch.zeros_like(sqdist).scatter_(1, order, 1.0) * has_model
        if given.shape != (n, n) or not bool((given >= 0).all()):
            reject(
                "adjacency", f"{n} x {n} numbers >= 0 (a newcomer counts, too)", given
            )
        return given.double() + (given.diagonal() == 0).double().diag()

    def mixing_matrix(self, sqdist: Tensor, norm2: Tensor, has_model: Tensor) -> Tensor:
        a = normalize_rows(self.adjacency_matrix(sqdist, has_model) * has_model)
        eye = torch.eye(len(a), dtype=a.dtype)
        # a row of zeros keeps its own model
        a = torch.where(a.any(1, keepdim=True), a, eye)
        mix: Tensor = (
            self.s * torch.linalg.matrix_power(a, self.layers) + (1 - self.s) * eye
        )
        if bool(has_model.any()):  # who has no model gets the mean of the others' rows
            mix[~has_model] = mix[has_model].mean(0)
        return mix

    def add_client(self, state: Tensors, n: int) -> Tensors:
        self.adjacency_matrix(
            torch.zeros(n + 1, n + 1), torch.ones(n + 1, dtype=torch.bool)
        )
        return state  # a given graph has a row for the newcomer, or there is none

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        weights = state["weights"]
        rows = MixingWeights(
            torch.cat([weights[cohort.ids], weights.mean(0, keepdim=True)])
        ).aggregate(state["w"])
        return {"x": rows[-1].expand(len(cohort.ids), -1), "u": rows[:-1]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        both = self.lam1 + self.lam2
        # two squares are one
        anchor = (self.lam1 * down["u"] + self.lam2 * down["x"]) / (both or 1)
        fit = clients.fit(down["x"], Objective(prox=(both, anchor) if both else None))
        return client_state, {"w": fit.w}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": down["u"]}


@algorithm_options
class Mocha(Algorithm):
    """MOCHA (Smith et al. 2017) in primal form: min over W, Omega of `sum_t
    mean_loss_t(w_t) + (lam / 2) tr(W^T Omega W)`.

    server: w [N, P], omega [N, N], seen [N] (who has taken part) · client: w [P] (its
    row) · down: pull [S, P] (`sum_{j != t} Omega_tj w_j`, 1 model), o [S, 1]
    (Omega_tt), and in a round with a client that joins late start [S, P] (the mean of
    the models so far) · up: w [S, P] (1 model), and lr_sum and lr [S, 1] (the sum of
    the step sizes, and one of them).

    One round is one inner iteration: a local epoch of `w_t -= lr (grad + lam (Omega_tt
    w_t + pull_t))`, the others frozen. Every `outer` rounds `Sigma = (W W^T)^(1/2) /
    trace` and `Omega = ((1 - delta) Sigma + delta I / N)^-1`; at first Sigma = I / N.

    `relation="sigma"` puts Sigma where Omega belongs, which is what Motley's code does
    (its table cannot be had otherwise). The pull is an explicit block-Jacobi step,
    stable only while the largest eigenvalue of `e^(1/2) Omega e^(1/2)` is below 2, `e_t
    = (1 - (1 - lr lam Omega_tt)^steps) / Omega_tt`: checked after every update of
    Omega, and in every round lr lam Omega_tt < 2; where it fails the run stops with a
    sentence, but a client whose step size is larger than the others' is left out
    instead. Decision where the paper is silent: a client that joins late starts from
    the mean of the models so far, and is served it until then. lam is not comparable
    with papers that sum over samples.
    """

    lam: NonNegativeFloat = 0.01  # strength of the regulariser
    # how much of I / N is mixed into Sigma: Omega's condition is <= N / delta
    delta: Fraction = 0.01
    outer: PositiveInt = 2  # rounds between two updates of Omega
    # what relates the tasks: omega, or sigma in its stead, as in Motley's code
    relation: Literal["omega", "sigma"] = "omega"

    traits = Traits(
        batch_norm=("local",),  # everybody trains a model of its own
        model_uploads={"w": "server.w"},
        sgd_only_reason="takes its regulariser and its test of stability from the sum "
        "of SGD's step sizes",
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        eye = torch.eye(n, dtype=torch.float64, device=x0.device)
        omega = eye * n if self.relation == "omega" else eye / n
        return {
            "w": x0.repeat(n, 1),
            "omega": omega,
            "seen": torch.zeros(n, dtype=torch.bool),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        w = state["w"]
        seen = state["seen"]
        ids = cohort.ids
        at = to_device(ids[:, None], w.device)
        rows = state["omega"][at[:, 0]]  # [S, N]
        down = {
            "pull": ops.aggregate(w, rows.scatter(1, at, 0.0)),
            "o": rows.gather(1, at),
        }
        # sent where somebody needs it
        if bool(seen.any()) and not bool(seen[ids].all()):
            down["start"] = w[to_device(seen, w.device)].mean(0).expand(len(ids), -1)
        return down

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        # from the mean of the models so far
        return {"w": down.get("start", net.w0[None])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        lr = clients.lr
        self.stop_if_unstable(clients.round, lr, lr * self.lam * float(down["o"].max()))
        mu = (self.lam * down["o"]).to(client_state["w"])[:, 0]
        pull = Objective(
            shift=self.lam * down["pull"],
            prox=(mu, torch.zeros_like(client_state["w"])),
        )
        fit = clients.fit(client_state["w"], pull)
        # the server has the steps by division; without a step size they move nothing,
        # and count 0
        lr_sum = (fit.steps * lr)[:, None].to(fit.w)
        return (
            {"w": fit.w},
            {"w": fit.w, "lr_sum": lr_sum, "lr": torch.full_like(lr_sum, lr)},
            fit,
        )

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        changes: Changes = {
            "w": RowUpdate(ids, up["w"]),
            "seen": RowUpdate(ids, ids >= 0),
        }
        if cohort.round % self.outer == 0:
            at = to_device(ids, up["w"].device)
            omega = task_relation(
                state["w"].index_copy(0, at, up["w"]), self.delta, self.relation
            )
            lr, lr_sum = (up[k][:, 0].double() for k in ("lr", "lr_sum"))
            self.check_stability(omega[at][:, at], lr, lr_sum, cohort)
            changes["omega"] = omega
        return changes, None

    def check_stability(
        self, omega: Tensor, lr: Tensor, lr_sum: Tensor, cohort: Cohort
    ) -> None:
        """Stop where the next exchanges would amplify W, by the cohort's omega [S, S]
        and its step sizes [S]; BadUpload where some step sizes are larger than the
        others'."""
        o = omega.diagonal()
        shrink = lr * self.lam * o
        value = shrink.max().item()
        if value < 2:
            e = (1 - (1 - shrink) ** (lr_sum / lr.clamp(min=1e-300)).round()) / o
            root = e.clamp(min=0).sqrt()
            largest = torch.linalg.eigvalsh(root[:, None] * omega * root).max().item()
            value = max(value, largest)
        usual = lr.median()  # the clients of a run have one
        odd = lr > usual * (1 + 1e-6)
        if not value < 2 and bool(odd.any()):
            said = (
                "its step size is {:g}, the others' is {:g}, and MOCHA is unstable "
                "with it."
            )
            pairs = zip(cohort.ids[odd.cpu()].tolist(), lr[odd].tolist(), strict=True)
            raise BadUpload({i: said.format(own, usual) for i, own in pairs})
        self.stop_if_unstable(cohort.round, lr.max(), value)

    def stop_if_unstable(self, round: int, lr: float | Tensor, value: float) -> None:
        """Stop where an eigenvalue is 2 or more; only then is a step size [1] on a
        card read."""
        if not value < 2:
            raise Stop(
                f"MOCHA is unstable from round {round} on: with lr {lr:g}, lam "
                f"{self.lam:g} and "
                f"delta {self.delta:g} an exchange amplifies the models (eigenvalue "
                f"{value:.3g}, "
                "which must be below 2); lower lr or lam, or raise delta."
            )


def task_relation(w: Tensor, delta: float, kind: str = "omega") -> Tensor:
    """Sigma = (W W^T)^(1/2) / trace [N, N] float64 of `w` [N, P], or Omega = ((1 -
    delta) Sigma + delta I / N)^-1.

    W W^T has rank P at most: its eigenvalues are clamped to 1e-8 from below (Motley's
    value), and delta bounds Omega.
    """
    values, vectors = torch.linalg.eigh(w.double() @ w.double().T)
    root = values.clamp(min=1e-8).sqrt()
    root = root / root.sum()
    if kind == "omega":
        root = 1 / ((1 - delta) * root + delta / len(w))
    matrix: Tensor = (vectors * root) @ vectors.T
    return matrix


def inner_products(to_guide: Tensor, between: Tensor) -> Tensor:
    """FedDWA's W (Eq. 11) from exact squared distances alone.

    to_guide [K]: |g - w_j|^2; between [K, K]: |w_j - w_k|^2; float64 [K, K]: (g - w_j)
    . (g - w_k). Its curvature on the simplex comes from `between` alone, so that little
    is lost where the models are much closer to each other than to the guide: down to a
    millionth of its distance float64 tells them apart. Of models closer than some
    hundred-thousandth the default `ridge` makes an even mix; ridge=0 does not.
    """
    return (to_guide[:, None] + to_guide - between) / 2


def simplex_qp(w: Tensor, ridge: float = 1e-10) -> Tensor:
    """The p [K] that minimises `p . w p` over the simplex, for a positive semidefinite
    `w` [K, K]; float64.

    It is the direction of the q >= 0 that minimises `q . w q + (sum(q) - 1)^2`, which
    Lawson and Hanson's active set finds (1974, Solving least squares problems,
    algorithm NNLS): the coordinate with the steepest descent becomes free, and on the
    way to the optimum of the free ones what would become negative is fixed at 0 again.
    `ridge` times the mean of the diagonal is added to it, which picks the shortest p
    where several are optimal; 0 adds nothing.
    """
    k = len(w)
    w = w.double().cpu()
    scale = float(w.diagonal().max())
    if scale <= 0:  # every model is the guide itself
        return torch.full((k,), 1 / k, dtype=torch.float64)
    w = (w + w.T) / (2 * scale)
    w = w + ridge * w.diagonal().mean() * torch.eye(k, dtype=torch.float64) + 1
    q = torch.zeros(k, dtype=torch.float64)
    # the objective falls at every pass; the bound is for rounding
    for _ in range(20 * k):
        gain = (1 - w @ q).masked_fill(q > 0, 0)
        if gain.max() <= 1e-13:
            break
        free = q > 0
        free[gain.argmax()] = True
        q = _descend_to_optimum(w, q, free)
    return q / q.sum()


def _descend_to_optimum(w: Tensor, q: Tensor, free: Tensor) -> Tensor:
    """From q to the optimum where the coordinates `free`, bool [K], or those of them
    that stay above 0 on the way, are not 0."""
    while True:
        ones = q.new_ones(int(free.sum()), 1)
        aim = torch.zeros_like(q)
        # the shortest one where the system is singular
        aim[free] = torch.linalg.lstsq(w[free][:, free], ones, driver="gelsd").solution[
            :, 0
        ]
        falls = free & (aim <= 0)
        if not falls.any():
            return aim
        way = (q - aim).clamp(min=torch.finfo(q.dtype).tiny)
        reach = (q / way).masked_fill(~falls, torch.inf)
        step = reach.min()
        q = (q + step * (aim - q)).masked_fill(reach <= step, 0)
        free = q > 0


# clients of a cohort from which on the nearest are looked for in blocks, by groups
GROUP_SEARCH_MIN_CLIENTS = 1000
GROUP_SEARCH_MIN_COLUMNS = 1 << 10  # where rows are so long that a pair costs


@algorithm_options
class FedDWA(Algorithm):
    """Liu et al. 2023, Algorithm 1: w_i <- sum_j p_ij w_j over the k nearest, p_ij ~ 1
    / |g_i - w_j|^2 (Eqs. 8 and 15).

    server: x [N, P] (the personalized models), x0 [P] (the model of who has not taken
    part), seen [N] (who has), and with guidance="previous" last [N, P] (each client's
    upload) · client: nothing (with guidance="kept" last [P], has [1]) · down: x [S, P]
    (1 model, client i's x_i) · up: w, g [S, P] (2 models: the trained one and the
    guidance; 1 with "previous" and "current").

    The guidance is where the client's next step would lead: "epoch" trains `lookahead`
    epochs more (the authors' code as many as a round has), "steps" so many minibatches,
    "full_grad" takes so many full-batch gradient steps (Eq. 16), "previous" is the
    model of the client's last round (App. C.6, cached by the server, its case ii; a
    client without one keeps its own model), "kept" the same, cached by the client,
    which uploads both (case i). Nothing of the look ahead stays with the client.
    "current" (section 4.1) is the trained model itself: its distance to itself is 0, so
    Eq. 15 gives it (and exact copies) the whole weight, and FedDWA is Local. So it
    nearly is with one step of "full_grad" at the paper's step size of .01: a self
    weight above .999. A client ranks among its own neighbours like any other and may
    miss its own k. Who is absent keeps its model, bit for bit. Deviations: `lookahead`
    > 1 goes on from where it is; the authors' code starts again each time. `search`
    says how the nearest are looked for, not which they are: "exact" takes all S * S
    distances; "groups" (`ops.nearest`) gives the same bits from few of them where
    clients form clusters, and takes some 2 / sqrt(S) more than all where they do not;
    "auto" is "groups" from 1000 clients of a cohort on, unless their models are tiny.
    Not of the paper: weights ~ 1 /
    |g_i - w_j|^(2 power), with 0 an even mix of the same neighbours; and `stride`, which moves the
    guidance along its direction until it is so many times as far from its client's
    model as the nearest other model is (as it stands the step, and with it the distance
    to the client itself, shrinks with the gradient, until the client's own model has
    all the weight).
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
    # of the inverse squared distances: 1 is Eq. 15, 0 an even mix
    power: NonNegativeFloat = 1.0
    # the guidance's step, in distances to the nearest other model
    stride: PositiveFloat | None = None
    # evaluated: the mix, or what it is trained to next
    serve: Literal["mix", "guidance"] = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance in ("previous", "kept", "current"):  # nothing is trained ahead
            self.require_default("guidance", "serve")

    @property
    def traits(self) -> Traits:
        why = "with guidance='full_grad' takes steps of SGD along whole gradients"
        why = why if self.guidance == "full_grad" else ""
        return Traits(
            batch_norm=("local", "average"),  # local in the authors' code
            sgd_only_reason=why,
            no_clip_grad_reason=why,
            model_uploads={"w": "down.x", "g": "down.x"},
            per_client_state=(
                "x",
                "seen",
                *(["last"] if self.guidance == "previous" else []),
            ),
            evaluation_only=("serve",),
            reported_state=("mix",),
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        state = {
            "x0": x0,
            "x": lazy_zeros(n, x0),
            "seen": torch.zeros(n, dtype=torch.bool),
        }
        return state | (
            {"last": lazy_zeros(n, x0)} if self.guidance == "previous" else {}
        )

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        x = state["x"][cohort.ids]
        seen = state["seen"][cohort.ids, None]
        # a newcomer's is x0
        return {"x": torch.where(to_device(seen, x.device), x, state["x0"])}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        x = down["x"]
        return (
            {"last": x, "has": torch.zeros_like(x[:, :1])}
            if self.guidance == "kept"
            else {}
        )

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(down["x"])
        up = {"w": fit.w}
        if self.guidance == "kept":
            up["g"] = torch.where(client_state["has"] > 0, client_state["last"], fit.w)
            client_state = {
                "last": fit.w.clone(),
                "has": torch.ones_like(client_state["has"]),
            }
        elif self.guidance not in ("previous", "current"):
            up["g"] = self.look_ahead(fit.w, clients.after(fit))
        return client_state, up, fit

    def look_ahead(self, w: Tensor, clients: Clients) -> Tensor:
        """The guidance models [S, P] of clients at `w` [S, P]; the clients stay as
        they are."""
        if self.guidance == "epoch":
            return clients.fit(w, epochs=self.lookahead, stream="ahead").w
        if self.guidance == "steps":
            return clients.fit(w, steps=self.lookahead, stream="ahead").w
        t = clients.context.training
        move = torch.zeros_like(w)
        for _ in range(self.lookahead):
            move = t.momentum * move + clients.grad(w) + t.weight_decay * w
            w = w - clients.lr * move
        return w

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        if self.serve == "mix":
            return {"w": down["x"]}
        fit = clients.fit(down["x"])
        return {
            "w": self.look_ahead(fit.w, clients.after(fit)),
            "batch_norm": fit.buffers,
        }

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        w = up["w"]
        guide = up.get("g", w)
        changes = Changes(seen=RowUpdate(ids, ids >= 0))
        if "last" in state:
            guide = torch.where(
                to_device(state["seen"][ids, None], w.device), state["last"][ids], w
            )
            changes["last"] = RowUpdate(ids, w)
        if self.stride is not None:
            guide = scale_guidance(guide, w, self.stride)
        weight, near = self.mixing_weights(guide, w)
        if self.power != 1:  # of the largest: no power makes all of them 0
            weight = normalize_rows(
                (weight / weight.max(1, keepdim=True).values) ** self.power
            )
        mix = MixingWeights(weight, near, ids)
        return {**changes, "x": RowUpdate(ids, mix.aggregate(w))}, mix

    def mixing_weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The mixing weights [S, K] and whose models they weigh [S, K], for guidance
        [S, P] and models [S, P]."""
        if self.search == "groups" or (
            self.search == "auto" and len(w) >= GROUP_SEARCH_MIN_CLIENTS
        ):
            by_groups = (
                self.search == "groups" or w.shape[1] >= GROUP_SEARCH_MIN_COLUMNS
            )
            d, near = ops.nearest(guide, w, self.k, "groups" if by_groups else "exact")
            # which are the nearest first
            return ops.feddwa_weights(d, self.k).weight, near
        return ops.feddwa_weights(ops.pairwise_sqdist(guide, w), self.k)


@algorithm_options
class FedDWAQP(FedDWA):
    """FedDWA with Eq. 12 solved as it stands: the point nearest to the guidance in the
    convex hull of the k nearest models.

    State and messages are FedDWA's. The paper keeps W's diagonal alone (Eq. 14), whose
    optimum is Eq. 15; `theta` leads from that (0) to the whole W (1). With `k` at least
    the cohort's size nothing is left out; otherwise the problem is solved again among
    the k nearest models. Eq. 13, the optimum without p >= 0, is no option: its weights
    may be negative.
    """

    search: Literal["exact"] = "exact"  # it needs all distances
    power: Literal[1] = 1  # it solves for its weights
    theta: UnitFloat = 1.0  # how much of W's off-diagonal counts
    # times W's mean diagonal, added: the shortest of several optimal p
    ridge: NonNegativeFloat = 1e-10

    def mixing_weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        d = ops.pairwise_sqdist(guide, w).cpu()
        between = ops.pairwise_sqdist(w).cpu()
        index = ops.feddwa_weights(d, self.k).index
        weight = torch.empty(index.shape, dtype=torch.float64)
        for i, near in enumerate(index):
            inner = inner_products(d[i, near], between[near][:, near])
            diagonal = inner.diagonal().diag()
            weight[i] = simplex_qp(
                self.theta * inner + (1 - self.theta) * diagonal, self.ridge
            )
        return to_device(weight, w.device), to_device(index, w.device)


def scale_guidance(guide: Tensor, w: Tensor, stride: float) -> Tensor:
    """Guidance models [S, P] in the same direction from `w` [S, P], `stride` times as
    far as the nearest other model is."""
    gap = ops.pairwise_sqdist(w).fill_diagonal_(math.inf).min(1).values.sqrt()
    step = guide - w
    scale = stride * gap / torch.linalg.vector_norm(step, dim=1, dtype=torch.float64)
    moved: Tensor = w + step * scale.where(scale.isfinite(), 1.0)[:, None].to(w)
    return moved
