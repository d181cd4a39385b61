"""The mean of the clients' updates: FedAvg, with defences in the mean's place;
q-FedAvg, whose weights grow with a client's loss; server optimizers, for which the mean
is the (negative) gradient of a step; methods that pull local training towards an
anchor, by a step along gradient + mu * (w - anchor): FedProx, and personal models
pulled towards a common one, MR-MTL, Ditto, pFedMe; and Local, where nothing is shared.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._protocol import (
    Algorithm,
    Cohort,
    GradientFn,
    MixingWeights,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    VoidRound,
    algorithm_options,
    map_rows,
    squared_norms,
    warn_unused_momentum,
)
from pflcore.check import (
    Momentum,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Weighting,
    reject,
)
from pflcore.data._ragged import to_device
from pflcore.train import Clients, Net, Objective

Defence = Literal["clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust"]
SORT_BLOCK_COLUMNS = 1 << 14  # columns that are sorted at once
# those that take how many clients are hostile: a round has more than twice as many, by
# so many
BYZANTINE_MARGIN = {"krum": 3, "multi_krum": 3, "trimmed_mean": 1}


def krum(sqdist: Tensor, f: int, m: int) -> Tensor:
    """The `m` clients, best first, whose squared distances [S, S] to their S - f - 2
    nearest others have the least sums (Blanchard et al. 2017, section 4). Of equals the
    earlier one."""
    others = sqdist.double().cpu().clone().fill_diagonal_(torch.inf)
    return (
        others.sort(1)
        .values[:, : len(others) - f - 2]
        .sum(1)
        .sort(stable=True)
        .indices[:m]
    )


def sorting_network(s: int) -> Iterator[tuple[int, int]]:
    """What sorts s numbers: Batcher's odd-even merge sort (1968), pairs of places to be
    put in order."""
    p = k = 1
    while p < s:
        for j in range(k % p, s - k, 2 * k):
            for i in range(j, min(j + k, s - k)):
                if i // (2 * p) == (i + k) // (2 * p):
                    yield i, i + k
        k //= 2
        if not k:
            p = k = 2 * p


def sort_columns(rows: Tensor) -> list[Tensor]:
    """The rows [S, P], each column sorted: a quarter of `sort`'s time along rows, which
    is not made for few."""
    r = list(rows)
    for a, b in sorting_network(len(r)):
        r[a], r[b] = torch.minimum(r[a], r[b]), torch.maximum(r[a], r[b])
    return r


def robust_mean(
    defence: str, delta: Tensor, share: Tensor, hostile: int, root: int
) -> tuple[Tensor, Tensor]:
    """Rows and their weights [1, rows], float64, whose sum takes the place of the mean
    of `delta` [S, P] in the shares `share` [1, S].

    `trusted_client` is the trusted client's place among the S. Distances are exact
    ones, `ops.pairwise_sqdist`.
    """
    s = len(delta)
    if defence in ("median", "trimmed_mean"):
        cut = (s - 1) // 2 if defence == "median" else hostile
        width = (
            SORT_BLOCK_COLUMNS if delta.device.type == "cpu" else max(1, delta.shape[1])
        )
        parts = [
            torch.stack(sort_columns(part)[cut : s - cut])
            for part in delta.split(width, 1)
        ]
        return torch.cat([part.mean(0) for part in parts])[None], share.new_ones(1, 1)
    if defence in ("krum", "multi_krum"):
        m = 1 if defence == "krum" else s - hostile
        chosen = to_device(krum(ops.pairwise_sqdist(delta), hostile, m), share.device)
        return delta, torch.zeros_like(share).index_fill_(1, chosen, 1 / m)
    norm = squared_norms(delta).sqrt().clamp(min=1e-150)
    if defence == "clip":
        return delta, share * (norm.quantile(0.5) / norm).clamp(max=1.0)
    own = norm[root]
    far = ops.pairwise_sqdist(delta, delta[root : root + 1])[:, 0]
    # of shorter updates, of zeros above all, the cosine is rounding
    heard = norm > 1e-12 * own
    trust = (heard * (norm**2 + own**2 - far) / (2 * norm * own)).clamp(0, 1)
    trust[root] = 1.0
    return delta, (trust / trust.sum() * own / norm)[None]


@algorithm_options
class FedAvg(Algorithm):
    """McMahan et al. 2017, Algorithm 1.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    `x <- x + server_lr * sum_i share_i delta_i`; `weighting` is "samples" (the paper's
    n_i / n) or "uniform".

    `defence` takes something else than the mean, with `num_byzantine` = f bad clients
    in a round of S; d_i are the updates. All but "clip" give every client one voice,
    since the number of its samples is its own word. "clip": sum_i share_i d_i min(1, M
    / |d_i|), M the median of the norms (Sun et al. 2019 with M for the fixed bound,
    which is `clip` of the run) · "median": coordinate by coordinate, of an even number
    the mean of the two in the middle (Yin et al. 2018, Definition 1)
    · "trimmed_mean": coordinate by coordinate without the f least and f largest
    (Definition 2) · "krum", "multi_krum": the update, or the mean of the S - f updates,
    of the least Krum score (Blanchard et al. 2017), by exact distances · "fltrust":
    sum_i t_i (|r| / |d_i|) d_i / sum_i t_i with t_i = max(0, cos(d_i, r)) and r the
    update of `trusted_client`, who joins every round (Cao et al. 2021, eqs. 2 to 4,
    where r is trained by the server on data of its own and is not part of the sum).
    Running statistics of batch norm stay each client's own then: they would be a way
    around the defence.
    """

    server_lr: NonNegativeFloat = 1.0  # step size of the server
    weighting: Weighting = "samples"  # or uniform
    defence: Defence | None = field(default=None, kw_only=True)  # in the mean's place
    # bad clients a round: krum's, trimmed_mean's
    num_byzantine: NonNegativeInt = field(default=1, kw_only=True)
    # the client that fltrust trusts
    trusted_client: NonNegativeInt | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.defence == "fltrust") != (self.trusted_client is not None):
            reject(
                "trusted_client",
                "a client's number with defence='fltrust', None without it",
                self.trusted_client,
            )
        if self.defence not in BYZANTINE_MARGIN:
            self.require_default("defence", "num_byzantine")

    @property
    def traits(self) -> Traits:
        return Traits(
            batch_norm=("average", "local") if self.defence is None else ("local",),
            required_clients=()
            if self.trusted_client is None
            else (self.trusted_client,),
        )

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix = self.robust_weights(up["delta"], cohort)
        return {"x": mix.aggregate(rows, state["x"], self.server_lr)[0]}, mix

    def robust_weights(
        self, delta: Tensor, cohort: Cohort
    ) -> tuple[Tensor, MixingWeights]:
        """Rows and their mix: the updates [S, P] in their shares, or what the defence
        makes of them. `num_byzantine` may be as many as those who are left allow, but
        never fewer than itself less those whose uploads were not finite: then the round
        is void."""
        mean = cohort.mean_weights(self.weighting)
        hostile = self.num_byzantine
        if self.defence is None:
            return delta, mean
        if self.defence in BYZANTINE_MARGIN:
            more = BYZANTINE_MARGIN[self.defence]
            hostile = min(hostile, (len(delta) - more) // 2)
            if hostile < max(0, self.num_byzantine - cohort.num_dropped):
                raise VoidRound(
                    f"defence: {self.defence} against {self.num_byzantine} hostile "
                    "clients needs "
                    f"{2 * self.num_byzantine + more} in a round, and round "
                    f"{cohort.round} has "
                    f"{len(delta)}; lower num_byzantine, or raise participation."
                )
        root = (
            0
            if self.trusted_client is None
            else int((cohort.ids == self.trusted_client).nonzero())
        )
        share = to_device(mean.weight, delta.device)
        rows, weight = robust_mean(self.defence, delta, share, hostile, root)
        return rows, MixingWeights(weight)


@algorithm_options
class WithoutDefence:
    """A base class that takes FedAvg's `defence` away, and the options that go with it:
    `class X(WithoutDefence, FedAvg)`.

    It is for an algorithm whose step is not along the mean of the updates: what
    replaces that mean would do nothing, so no command line or grid should offer it.
    """

    defence: None = field(default=None, kw_only=True)
    num_byzantine: Literal[1] = field(default=1, kw_only=True)
    trusted_client: None = field(default=None, kw_only=True)


@algorithm_options
class QFedAvg(WithoutDefence, FedAvg):
    """Li et al. 2020 (q-FFL), Algorithm 2: clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x [S, P] (1 model) · up: delta [S, P] (1
    model), and weight and h [S] (F^q, and the client's term of the sum below).

    With F_i the mean loss of the received x on client i's whole training set, L = 1 /
    (the clients' lr) and p the shares: `x += server_lr * sum p F^q delta / sum p (q
    F^(q-1) L |delta|^2 + F^q)`: the paper's sums, with one L cancelled. The paper
    samples clients by their size and sets p = 1: that is `weighting="uniform"`. q = 0
    is FedAvg. Deviation: F is clamped to 1e-6 (at q < 1, F^(q-1) of a client with no
    loss would stop the server).
    """

    q: NonNegativeFloat = 0.001  # 0: FedAvg; larger: fairer

    @property
    def traits(self) -> Traits:
        why = "takes an update over the step size for a gradient" if self.q > 0 else ""
        return super().traits._replace(sgd_only_reason=why)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        f = (clients.loss(down["x"]).double() + 1e-10).clamp(min=1e-6)
        client_state, up, fit = super().train(down, client_state, clients)
        norm = torch.linalg.vector_norm(up["delta"], dim=1, dtype=torch.float64) ** 2
        slope = map_rows(lambda v: v ** (self.q - 1), f[:, None])[:, 0]
        weight = map_rows(lambda v: v**self.q, f[:, None])[:, 0]
        h = self.q * slope * norm / (clients.lr or 1) + weight
        return client_state, {**up, "weight": weight, "h": h}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        share = to_device(
            cohort.mean_weights(self.weighting).weight, up["h"].device
        ).to(up["h"])
        weight = share * up["weight"]
        mix = MixingWeights(weight / (share * up["h"]).sum())
        return {
            "x": mix.aggregate(up["delta"], state["x"], self.server_lr)[0]
        }, MixingWeights(weight.cpu())


Optimizer = Literal["sgd", "heavy_ball", "nesterov", "ema", "adam", "yogi", "adagrad"]
UNUSED_OPTIONS = {  # options that play no part beside an optimizer
    "sgd": ("beta1", "beta2", "tau", "v0", "bias_correction"),
    **dict.fromkeys(
        ("heavy_ball", "nesterov", "ema"), ("beta2", "tau", "v0", "bias_correction")
    ),
    "adagrad": ("beta2",),
}


@algorithm_options
class FedOpt(FedAvg):
    """Reddi et al. 2021, Algorithm 2, and Hsu et al. 2019: FedAvg with a server
    optimizer.

    server: x [P], and of m, v [P] (momentum, second moment) and t [] (updates so far)
    what the optimizer needs · client: nothing · down: x [S, P] (1 model) · up: delta
    [S, P] (1 model).

    With D the weighted mean of the deltas:

    sgd         x += server_lr D
    heavy_ball  m = beta1 m + D ;  x += server_lr m                          (Hsu's formula)
    nesterov    m = beta1 m + D ;  x += server_lr (D + beta1 m)
    ema         m = beta1 m + (1 - beta1) D ;  x += server_lr m              (Motley's: 10 at beta1
    .9 is heavy_ball's 1)
    adam        m as ema, v = beta2 v + (1 - beta2) D^2 ;  x += server_lr m / (sqrt(v) + tau)
    yogi        v -= (1 - beta2) D^2 sign(v - D^2)      adagrad     v += D^2

    `bias_correction`: "none" is the paper; "keras" scales the step by sqrt(1 - beta2^t)
    / (1 - beta1^t), as the paper's own code does.
    """

    # the server's: sgd, heavy_ball, nesterov, ema, adagrad, adam or yogi
    optimizer: Optimizer = "sgd"
    beta1: Momentum = 0.9  # momentum
    beta2: Momentum = 0.99  # second moment (adam, yogi)
    tau: PositiveFloat = 1e-3  # added to sqrt(v)
    # where v starts; None: tau^2, as in the paper (Motley's code: 0)
    v0: NonNegativeFloat | None = None
    # of Adam's moments: none, as in the paper, or as Keras does
    bias_correction: Literal["none", "keras"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_default("optimizer", *UNUSED_OPTIONS.get(self.optimizer, ()))

    def optimizer_state(self, x: Tensor) -> Tensors:
        """The optimizer's own first state for models `x` [..., P]; each model has
        its own."""
        if self.optimizer == "sgd":
            return {}
        m = torch.zeros_like(x)
        if self.optimizer in ("heavy_ball", "nesterov", "ema"):
            return {"m": m}
        v = torch.full_like(x, self.tau**2 if self.v0 is None else self.v0)
        return {"m": m, "v": v, "t": x.new_zeros(x.shape[:-1], dtype=torch.float64)}

    def optimizer_step(self, state: Tensors, d: Tensor) -> Tensors:
        """What the mean update `d` [..., P] makes of the models state["x"] [..., P] and
        the slots."""
        x = state["x"]
        lr = self.server_lr
        b1 = self.beta1
        b2 = self.beta2
        if self.optimizer == "sgd":
            return {"x": x + lr * d}
        m = b1 * state["m"] + (
            d if self.optimizer in ("heavy_ball", "nesterov") else (1 - b1) * d
        )
        if "v" not in state:
            return {
                "x": x + lr * (d + b1 * m if self.optimizer == "nesterov" else m),
                "m": m,
            }
        v = state["v"]
        square = d**2
        t = state["t"] + 1
        if self.optimizer == "adagrad":
            v = v + square
        elif self.optimizer == "adam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * torch.sign(v - square)
        step = m / (v**0.5 + self.tau)
        if self.bias_correction == "keras":
            first, second = ((1 - b**t)[..., None].to(d) for b in (b1, b2))
            if self.optimizer == "adagrad":
                second = torch.ones_like(second)  # a sum needs no correction
            step = m * (second**0.5 / first) / (v**0.5 + self.tau)
        return {"x": x + lr * step, "m": m, "v": v, "t": t}

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, **self.optimizer_state(x0)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix = self.robust_weights(up["delta"], cohort)
        return {**self.optimizer_step(state, mix.aggregate(rows)[0])}, mix


@algorithm_options
class FedAvgM(FedOpt):
    """Hsu et al. 2019: FedAvg with server momentum; `optimizer` is "heavy_ball",
    "nesterov" or "ema" (Motley). See `FedOpt`.
    """

    optimizer: Optimizer = "heavy_ball"


@algorithm_options
class FedAdam(FedOpt):
    """Reddi et al. 2021. Motley's cross-device preset is `bias_correction="keras"`,
    `v0=0`. See `FedOpt`.
    """

    server_lr: NonNegativeFloat = 0.1
    optimizer: Optimizer = "adam"


@algorithm_options
class FedYogi(FedAdam):
    """Reddi et al. 2021. See `FedOpt`."""

    optimizer: Optimizer = "yogi"


@algorithm_options
class FedAdagrad(FedAdam):
    """Reddi et al. 2021, with beta1 = 0 as there. See `FedOpt`."""

    optimizer: Optimizer = "adagrad"
    beta1: Momentum = 0.0


@algorithm_options
class FedProx(FedAvg):
    """Li et al. 2020, Algorithm 2: clients minimise `F_i(w) + mu / 2 * |w - x|^2`, x
    being the model they received.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    The server is FedAvg's. Deviation: the paper samples clients with probability
    n_i / n and averages uniformly; here sampling is uniform and the average is weighted
    by n_i, as in the authors' code. mu = 1 is what the FedDWA and WAFFLe papers found
    best for it. The explicit step is stable only while `lr_of_training * mu < 2`.
    """

    mu: NonNegativeFloat = 1.0  # strength of the pull towards x; 0 is FedAvg

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        fit = clients.fit(x, Objective(prox=(self.mu, x) if self.mu else None))
        return client_state, {"delta": fit.w.sub_(x)}, fit


@algorithm_options
class MRMTL(FedOpt):
    """Mean-regularized multi-task learning (Hanzely and Richtarik 2020; Liu et al.
    2022): personal models pulled towards their mean.

    server: x [P] and the optimizer's state, see `FedOpt` · client: v [P] · down: x [S,
    P] (1 model) · up: delta [S, P] (1 model: v's change).

    `v -= lr (grad(v) + lam (v - x))`, and x follows the mean of the changes: with every
    client in every round and the plain server step, x is the mean of the v, and lam = 0
    is Local. v starts at the x of the client's first round; until then the client is
    served x.
    """

    lam: NonNegativeFloat = 0.1  # pull towards the common model

    @property
    def traits(self) -> Traits:
        return super().traits._replace(batch_norm=("local",))  # v is never mixed

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"v": down["x"]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(client_state["v"], Objective(prox=(self.lam, down["x"])))
        return {"v": fit.w}, {"delta": fit.w - client_state["v"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": client_state["v"]}


@algorithm_options
class Ditto(MRMTL):
    """Li et al. 2021, Algorithm 1 (the solver with a personal pass): a personal model
    pulled towards the global one.

    server: x [P] and the optimizer's state, see `FedOpt` · client: v [P] · down: x [S,
    P] (1 model) · up: delta [S, P] (1 model).

    The client trains x as FedAvg does and v by
    `v -= personal_lr (grad(v) + lam (v - x))`, x as received. With every client in
    every round lam = 0 is Local. v starts at the x of the client's first round; until
    then the client is served x (Motley: a new client's v is x). The two passes shuffle
    separately (Motley; the original shares the batches). Batch norm's statistics are
    those of v.
    """

    personal_lr: NonNegativeFloat | None = None  # step size of v; None: the run's
    personal_epochs: PositiveInt | None = None  # epochs of v; None: the run's

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        # v keeps Local's shuffle, so that lam = 0 is Local bit for bit
        delta = clients.fit(x, stream="global").w.sub_(x)
        pull = Objective(prox=(self.lam, x))
        fit = clients.fit(
            client_state["v"], pull, lr=self.personal_lr, epochs=self.personal_epochs
        )
        return {"v": fit.w}, {"delta": delta}, fit


@algorithm_options
class PFedMe(FedAvg):
    """Dinh et al. 2020, Algorithm 1: each client's theta minimises f_i(theta) + lam / 2
    |theta - w|^2; w follows all thetas.

    server: x [P] · client: theta [P] · down: x [S, P] · up: delta [S, P] (1 model).

    For every minibatch of the local epochs: `inner_steps` steps theta <- theta -
    personal_lr (grad f(theta) + lam (theta - w)), then w <- w - lr_of_training lam (w -
    theta). The server's x <- (1
    - beta) x + beta sum_i share_i w_i: `server_lr` is beta. theta goes on from where it
    was, over the minibatches and over the rounds; in a client's first round it starts
    at w. Evaluated is theta, w for who has none yet. The run's momentum and weight
    decay play no part. Deviations: `weighting` is by samples, as in the authors' code
    (the paper: uniform); absent clients do not train, where their code trains everybody
    and averages the chosen; no extra decay of theta (their optimizer's mu = 0.001).
    """

    lam: NonNegativeFloat = 1.0  # strength of the pull between theta and w
    inner_steps: PositiveInt = 5  # the paper's K, steps towards the proximal point
    personal_lr: NonNegativeFloat = 0.01  # step size of theta

    @property
    def traits(self) -> Traits:
        why = "takes its paper's own steps of SGD"
        # theta is never mixed
        return super().traits._replace(
            batch_norm=("local",), sgd_only_reason=why, no_clip_grad_reason=why
        )

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"theta": down["x"]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            w = rows["w"]
            theta = rows["theta"]
            for _ in range(self.inner_steps):
                theta = theta - self.personal_lr * (
                    grad(theta) + self.lam * (theta - w)
                )
            return {"w": w - clients.lr * self.lam * (w - theta), "theta": theta}

        warn_unused_momentum(self, clients)
        x = down["x"]
        fit = clients.each_batch({"w": x, **client_state}, update)
        return {"theta": fit.rows["theta"]}, {"delta": fit.w - x}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": client_state["theta"]}


@algorithm_options
class LocalOnly(Algorithm):
    """Each client trains a model of its own, from one common start, and shares nothing:
    the baseline of every paper.

    server: nothing · client: w [P] · down: nothing · up: nothing (0 models).
    """

    traits = Traits(batch_norm=("local",))  # nothing is shared

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        return {}, None

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(client_state["w"])
        return {"w": fit.w}, {}, fit
