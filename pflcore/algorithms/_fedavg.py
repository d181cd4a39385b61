"""Servers that take a step along the mean of the clients' updates, and Local.

- FedAvg takes the mean, or a defence in its place. q-FedAvg's weights grow with a
  client's loss.
- FedOpt's server has an optimizer, for which the mean is a (negative) gradient.
- FedProx, MR-MTL, Ditto and pFedMe pull local training towards an anchor: each step is
  along `gradient + mu * (w - anchor)`. All but FedProx keep a personal model.
- LocalOnly shares nothing.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters. x
is the server's model, `delta` are the updates, `share` [1, S] are the clients' shares
in their mean, v and theta are personal models.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
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
from pflcore.train import Clients, Net, Objective

Defence = Literal["clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust"]
SORT_BLOCK_COLUMNS = 1 << 14  # columns that are sorted at once
# Defences that are told how many clients f are bad. A round has at least 2 f clients
# and so many more.
BYZANTINE_MARGIN = {"krum": 3, "multi_krum": 3, "trimmed_mean": 1}


def krum(
    sqdist: Tensor,  # [S, S]
    f: int,
    m: int,
) -> Tensor:  # [m] int64
    """The `m` clients of the least Krum score, best first.

    A client's score is the sum of its squared distances to its S - f - 2 nearest others
    (Blanchard et al. 2017, section 4). Of equal scores the earlier client comes first.
    """
    to_others = sqdist.double().cpu().clone().fill_diagonal_(torch.inf)
    nearest = to_others.sort(1).values[:, : len(to_others) - f - 2]
    return nearest.sum(1).sort(stable=True).indices[:m]


def sorting_network(s: int) -> Iterator[tuple[int, int]]:
    """Pairs of positions that, put in order one by one, sort s numbers.

    This is Batcher's odd-even merge sort (1968).
    """
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
    """The rows [S, P] with each column sorted.

    For few rows, `torch.sort` takes four times as long.
    """
    ordered = list(rows)
    for i, j in sorting_network(len(ordered)):
        low = torch.minimum(ordered[i], ordered[j])
        high = torch.maximum(ordered[i], ordered[j])
        ordered[i] = low
        ordered[j] = high
    return ordered


def robust_mean(
    defence: str,
    delta: Tensor,  # [S, P]
    share: Tensor,  # [1, S]
    num_byzantine: int,
    trusted_row: int,
) -> tuple[Tensor, Tensor]:  # [R, P], [1, R] float64
    """Rows and weights whose sum replaces the mean of `delta` [S, P].

    Distances are exact ones, `ops.pairwise_sqdist`.

    Args:
        share: the clients' shares in the mean that is replaced
        trusted_row: the trusted client's row, for "fltrust"
    """
    if defence in ("median", "trimmed_mean"):
        removed = (len(delta) - 1) // 2 if defence == "median" else num_byzantine
        return _trimmed_mean(delta, removed)[None], share.new_ones(1, 1)
    if defence in ("krum", "multi_krum"):
        count = 1 if defence == "krum" else len(delta) - num_byzantine
        best = krum(ops.pairwise_sqdist(delta), num_byzantine, count)
        best = to_device(best, share.device)
        return delta, torch.zeros_like(share).index_fill_(1, best, 1 / count)
    norm = squared_norms(delta).sqrt().clamp(min=1e-150)
    if defence == "clip":
        return delta, share * (norm.quantile(0.5) / norm).clamp(max=1.0)
    return delta, _trust_weights(delta, norm, trusted_row)


def _trimmed_mean(delta: Tensor, removed: int) -> Tensor:
    """Mean [P] of each column without its `removed` least and largest numbers."""
    # On the CPU, a block of columns stays in the cache while it is sorted.
    on_cpu = delta.device.type == "cpu"
    width = SORT_BLOCK_COLUMNS if on_cpu else max(1, delta.shape[1])
    means = []
    for block in delta.split(width, 1):
        inner = sort_columns(block)[removed : len(delta) - removed]
        means.append(torch.stack(inner).mean(0))
    return torch.cat(means)


def _trust_weights(
    delta: Tensor,  # [S, P]
    norm: Tensor,  # [S]
    trusted_row: int,
) -> Tensor:  # [1, S]
    """FLTrust's weights: cosines with the trusted update, each update at its length."""
    trusted_norm = norm[trusted_row]
    trusted = delta[trusted_row : trusted_row + 1]
    sqdist = ops.pairwise_sqdist(delta, trusted)[:, 0]
    # Of much shorter updates, of zeros above all, the cosine is rounding.
    has_direction = norm > 1e-12 * trusted_norm
    product = norm**2 + trusted_norm**2 - sqdist  # twice the inner product
    trust = (has_direction * product / (2 * norm * trusted_norm)).clamp(0, 1)
    trust[trusted_row] = 1.0
    return (trust / trust.sum() * trusted_norm / norm)[None]


@algorithm_options
class FedAvg(Algorithm):
    """FedAvg (McMahan et al. 2017, Algorithm 1): the mean of the clients' updates.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    `x <- x + server_lr * sum_i share_i delta_i`; `weighting` is "samples" (the paper's
    n_i / n) or "uniform".

    `defence` puts something else in the mean's place. It expects `num_byzantine` = f
    bad clients in a round of S; d_i are the updates. All but "clip" give every client
    one vote, since the number of its samples is its own word.

    - "clip": `sum_i share_i d_i min(1, M / |d_i|)`, M the median of the norms (Sun et
      al. 2019, with M for their fixed bound, which is `clip` of the run).
    - "median": coordinate by coordinate; of an even number, the mean of the two in the
      middle (Yin et al. 2018, Definition 1).
    - "trimmed_mean": coordinate by coordinate, without the f least and f largest
      (Definition 2).
    - "krum", "multi_krum": the update of the least Krum score, or the mean of the S - f
      updates of the least scores (Blanchard et al. 2017), by exact distances.
    - "fltrust": `sum_i t_i (|r| / |d_i|) d_i / sum_i t_i` with `t_i = max(0, cos(d_i,
      r))`. r is the update of `trusted_client`, which joins every round (Cao et al.
      2021, eqs. 2 to 4; there r is trained by the server on data of its own and is not
      part of the sum).

    With a defence, running statistics of batch norm stay each client's own: they would
    be a way around it.
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
        if self.defence is None:
            return Traits(batch_norm=("average", "local"))
        required = () if self.trusted_client is None else (self.trusted_client,)
        return Traits(batch_norm=("local",), required_clients=required)

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix = self.robust_weights(up["delta"], cohort)
        return {"x": mix.aggregate(rows, state["x"], self.server_lr)[0]}, mix

    def robust_weights(
        self, delta: Tensor, cohort: Cohort
    ) -> tuple[Tensor, MixingWeights]:
        """Rows and their weights: the updates [S, P], or what a defence makes of them.

        A defence takes `num_byzantine`, or as many bad clients as a round of this size
        allows. Raises VoidRound where that is fewer than `num_byzantine` without the
        clients whose uploads were not finite.
        """
        mean = cohort.mean_weights(self.weighting)
        if self.defence is None:
            return delta, mean
        num_byzantine = self.num_byzantine
        if self.defence in BYZANTINE_MARGIN:
            num_byzantine = self._allowed_byzantine(cohort)
        trusted_row = 0
        if self.trusted_client is not None:
            trusted_row = int((cohort.ids == self.trusted_client).nonzero())
        share = to_device(mean.weight, delta.device)
        rows, weight = robust_mean(
            self.defence, delta, share, num_byzantine, trusted_row
        )
        return rows, MixingWeights(weight)

    def _allowed_byzantine(self, cohort: Cohort) -> int:
        clients = len(cohort.ids)
        margin = BYZANTINE_MARGIN[str(self.defence)]
        allowed = min(self.num_byzantine, (clients - margin) // 2)
        if allowed < max(0, self.num_byzantine - cohort.num_dropped):
            raise VoidRound(
                f"defence: {self.defence} against {self.num_byzantine} hostile clients "
                f"needs {2 * self.num_byzantine + margin} in a round, and round "
                f"{cohort.round} has {clients}; lower num_byzantine, or raise "
                "participation."
            )
        return allowed


@algorithm_options
class WithoutDefence:
    """Removes FedAvg's defence from algorithms that do not take the mean's step.

    It stands before the base class, `class X(WithoutDefence, FedAvg)`, and takes away
    the options that go with `defence`. What replaces the mean would do nothing in such
    an algorithm, so no command line and no grid should offer it.
    """

    defence: None = field(default=None, kw_only=True)
    num_byzantine: Literal[1] = field(default=1, kw_only=True)
    trusted_client: None = field(default=None, kw_only=True)


@algorithm_options
class QFedAvg(WithoutDefence, FedAvg):
    """q-FedAvg (Li et al. 2020, Algorithm 2): clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x [S, P] (1 model) · up: delta [S, P] (1
    model), and weight and h [S] (F^q, and the client's term of the sum below).

    With F_i the mean loss of the received x on client i's whole training set, L = 1 /
    (the clients' lr) and p the shares: `x += server_lr * sum p F^q delta / sum p (q
    F^(q-1) L |delta|^2 + F^q)`. These are the paper's sums, with one L cancelled. The
    paper samples clients by their size and sets p = 1: that is `weighting="uniform"`.
    q = 0 is FedAvg.

    Deviation: F is at least 1e-6; at q < 1, F^(q-1) of a client without a loss would
    stop the server.
    """

    q: NonNegativeFloat = 0.001  # 0: FedAvg; larger: fairer

    @property
    def traits(self) -> Traits:
        reason = ""
        if self.q > 0:
            reason = "takes an update over the step size for a gradient"
        return super().traits._replace(sgd_only_reason=reason)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        loss = (clients.loss(down["x"]).double() + 1e-10).clamp(min=1e-6)
        client_state, up, fit = super().train(down, client_state, clients)
        norm2 = torch.linalg.vector_norm(up["delta"], dim=1, dtype=torch.float64) ** 2
        slope = _power(loss, self.q - 1)
        weight = _power(loss, self.q)
        h = self.q * slope * norm2 / (clients.lr or 1) + weight
        return client_state, {**up, "weight": weight, "h": h}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        delta = up["delta"]
        h = up["h"]
        mean = cohort.mean_weights(self.weighting)
        share = to_device(mean.weight, h.device).to(h)
        weight = share * up["weight"]
        step = MixingWeights(weight / (share * h).sum())
        x = step.aggregate(delta, state["x"], self.server_lr)[0]
        return {"x": x}, MixingWeights(weight.cpu())


def _power(values: Tensor, exponent: float) -> Tensor:
    """`values ** exponent` [S]; a client's bits do not depend on the others'."""
    return map_rows(lambda v: v**exponent, values[:, None])[:, 0]


Optimizer = Literal["sgd", "heavy_ball", "nesterov", "ema", "adam", "yogi", "adagrad"]
# Options that have no effect with an optimizer, and must keep their defaults.
UNUSED_OPTIONS = {
    "sgd": ("beta1", "beta2", "tau", "v0", "bias_correction"),
    **dict.fromkeys(
        ("heavy_ball", "nesterov", "ema"), ("beta2", "tau", "v0", "bias_correction")
    ),
    "adagrad": ("beta2",),
}


@algorithm_options
class FedOpt(FedAvg):
    """FedOpt (Reddi et al. 2021, Algorithm 2): FedAvg with a server optimizer.

    server: x [P], and of m, v [P] (momentum, second moment) and t [] (updates so far)
    what the optimizer needs · client: nothing · down: x [S, P] (1 model) · up: delta
    [S, P] (1 model).

    With D the weighted mean of the deltas:

    - sgd: `x += server_lr D`
    - heavy_ball: `m = beta1 m + D; x += server_lr m`, the formula of Hsu et al. 2019
    - nesterov: `m = beta1 m + D; x += server_lr (D + beta1 m)`
    - ema: `m = beta1 m + (1 - beta1) D; x += server_lr m`, Motley's formula; its
      server_lr of 10 at beta1 = .9 is heavy_ball's 1
    - adam: m as in ema, `v = beta2 v + (1 - beta2) D^2; x += server_lr m / (sqrt(v) +
      tau)`
    - yogi: adam with `v -= (1 - beta2) D^2 sign(v - D^2)`
    - adagrad: adam with `v += D^2`

    `bias_correction`: "none" is the paper; "keras" scales the step by `sqrt(1 -
    beta2^t) / (1 - beta1^t)`, as the paper's own code does.
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
        """The optimizer's first state for models `x` [..., P], each with its own."""
        if self.optimizer == "sgd":
            return {}
        m = torch.zeros_like(x)
        if self.optimizer in ("heavy_ball", "nesterov", "ema"):
            return {"m": m}
        v = torch.full_like(x, self.tau**2 if self.v0 is None else self.v0)
        return {"m": m, "v": v, "t": x.new_zeros(x.shape[:-1], dtype=torch.float64)}

    def optimizer_step(self, state: Tensors, d: Tensor) -> Tensors:
        """Models and optimizer state after a step along the mean update `d` [..., P].

        `state` has the models "x" [..., P] and their optimizer state.
        """
        x = state["x"]
        lr = self.server_lr
        beta1 = self.beta1
        if self.optimizer == "sgd":
            return {"x": x + lr * d}
        adds_whole_update = self.optimizer in ("heavy_ball", "nesterov")
        m = beta1 * state["m"] + (d if adds_whole_update else (1 - beta1) * d)
        if self.optimizer == "nesterov":
            return {"x": x + lr * (d + beta1 * m), "m": m}
        if "v" not in state:
            return {"x": x + lr * m, "m": m}
        v = self._second_moment(state["v"], d**2)
        t = state["t"] + 1
        step = m / (v**0.5 + self.tau)
        if self.bias_correction == "keras":
            correction_m = (1 - beta1**t)[..., None].to(d)
            correction_v = (1 - self.beta2**t)[..., None].to(d)
            if self.optimizer == "adagrad":  # a sum needs no correction
                correction_v = torch.ones_like(correction_v)
            step = m * (correction_v**0.5 / correction_m) / (v**0.5 + self.tau)
        return {"x": x + lr * step, "m": m, "v": v, "t": t}

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        beta2 = self.beta2
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "adam":
            return beta2 * v + (1 - beta2) * square
        return v - (1 - beta2) * square * torch.sign(v - square)

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, **self.optimizer_state(x0)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix = self.robust_weights(up["delta"], cohort)
        return {**self.optimizer_step(state, mix.aggregate(rows)[0])}, mix


@algorithm_options
class FedAvgM(FedOpt):
    """FedAvgM (Hsu et al. 2019): FedAvg with server momentum. See `FedOpt`.

    `optimizer` is "heavy_ball", "nesterov" or "ema" (Motley).
    """

    optimizer: Optimizer = "heavy_ball"


@algorithm_options
class FedAdam(FedOpt):
    """FedAdam (Reddi et al. 2021): FedAvg with Adam at the server. See `FedOpt`.

    Motley's cross-device preset is `bias_correction="keras"`, `v0=0`.
    """

    server_lr: NonNegativeFloat = 0.1
    optimizer: Optimizer = "adam"


@algorithm_options
class FedYogi(FedAdam):
    """FedYogi (Reddi et al. 2021): FedAvg with Yogi at the server. See `FedOpt`."""

    optimizer: Optimizer = "yogi"


@algorithm_options
class FedAdagrad(FedAdam):
    """FedAdagrad (Reddi et al. 2021): FedAvg with Adagrad, beta1 = 0. See `FedOpt`."""

    optimizer: Optimizer = "adagrad"
    beta1: Momentum = 0.0


@algorithm_options
class FedProx(FedAvg):
    """FedProx (Li et al. 2020): clients are pulled towards the model they received.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    Algorithm 2: clients minimise `F_i(w) + mu / 2 * |w - x|^2`, x being the model they
    received. The server is FedAvg's. The explicit step is stable only while
    `lr_of_training * mu < 2`. mu = 1 is what the FedDWA and WAFFLe papers found best
    for FedProx.

    Deviation: the paper samples clients with probability
    n_i / n and averages uniformly; here sampling is uniform and the average is weighted
    by n_i, as in the authors' code.
    """

    mu: NonNegativeFloat = 1.0  # strength of the pull towards x; 0 is FedAvg

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        objective = Objective(prox=(self.mu, x)) if self.mu else Objective()
        fit = clients.fit(x, objective)
        return client_state, {"delta": fit.w.sub_(x)}, fit


@algorithm_options
class MRMTL(FedOpt):
    """MR-MTL (Liu et al. 2022): personal models are pulled towards their mean.

    server: x [P] and the optimizer's state, see `FedOpt` · client: v [P] · down: x [S,
    P] (1 model) · up: delta [S, P] (1 model: v's change).

    Mean-regularized multi-task learning (also Hanzely and Richtarik 2020): `v -= lr
    (grad(v) + lam (v - x))`, and x follows the mean of the changes. With every client
    in every round and the plain server step, x is the mean of the v, and lam = 0 is
    Local. v starts at the x of the client's first round; until then the client is
    evaluated with x.
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
    """Ditto (Li et al. 2021): a personal model is pulled towards the global one.

    server: x [P] and the optimizer's state, see `FedOpt` · client: v [P] · down: x [S,
    P] (1 model) · up: delta [S, P] (1 model).

    Algorithm 1, the solver with a personal pass: the client trains x as FedAvg does,
    and v by `v -= personal_lr (grad(v) + lam (v - x))`, x as received. With every
    client in every round lam = 0 is Local. v starts at the x of the client's first
    round; until then the client is evaluated with x (Motley: a new client's v is x).
    The two passes shuffle separately (Motley; the original shares the batches). Batch
    norm's statistics are those of v.
    """

    personal_lr: NonNegativeFloat | None = None  # step size of v; None: the run's
    personal_epochs: PositiveInt | None = None  # epochs of v; None: the run's

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        # v has Local's shuffle, so that lam = 0 is Local bit for bit.
        delta = clients.fit(x, stream="global").w.sub_(x)
        pull = Objective(prox=(self.lam, x))
        fit = clients.fit(
            client_state["v"], pull, lr=self.personal_lr, epochs=self.personal_epochs
        )
        return {"v": fit.w}, {"delta": delta}, fit


@algorithm_options
class PFedMe(FedAvg):
    """pFedMe (Dinh et al. 2020): w follows personal models that are pulled towards it.

    server: x [P] · client: theta [P] · down: x [S, P] · up: delta [S, P] (1 model).

    Algorithm 1: each client's theta minimises `f_i(theta) + lam / 2 |theta - w|^2`, and
    w follows all thetas. Every minibatch of the local epochs takes `inner_steps` steps
    `theta <- theta - personal_lr (grad f(theta) + lam (theta - w))`, then `w <- w -
    lr_of_training lam (w - theta)`. The server's step is `x <- (1 - beta) x + beta
    sum_i share_i w_i`; `server_lr` is beta. theta goes on from where it was, over the
    minibatches and over the rounds; in a client's first round it starts at w. A client
    is evaluated with theta, or with w while it has none. The run's momentum and weight
    decay have no effect.

    Deviations: `weighting` is by samples, as in the authors' code (the paper: uniform);
    absent clients do not train, where their code trains everyone and averages the
    chosen; no extra decay of theta (their optimizer's mu = 0.001).
    """

    lam: NonNegativeFloat = 1.0  # strength of the pull between theta and w
    inner_steps: PositiveInt = 5  # the paper's K, steps towards the proximal point
    personal_lr: NonNegativeFloat = 0.01  # step size of theta

    @property
    def traits(self) -> Traits:
        reason = "takes its paper's own steps of SGD"
        return super().traits._replace(
            batch_norm=("local",),  # theta is never mixed
            sgd_only_reason=reason,
            no_clip_grad_reason=reason,
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
                slope = grad(theta) + self.lam * (theta - w)
                theta = theta - self.personal_lr * slope
            return {"w": w - clients.lr * self.lam * (w - theta), "theta": theta}

        warn_unused_momentum(self, clients)
        x = down["x"]
        fit = clients.each_batch({"w": x, **client_state}, update)
        return {"theta": fit.rows["theta"]}, {"delta": fit.w - x}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": client_state["theta"]}


@algorithm_options
class LocalOnly(Algorithm):
    """Each client trains a model of its own and shares nothing.

    server: nothing · client: w [P] · down: nothing · up: nothing (0 models).

    All start from one common model. It is the baseline of every paper.
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
