"""Servers that take a step along the mean of the clients' updates.

FedAvg takes the mean, or a defence in its place. q-FedAvg's weights grow with a
client's loss.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; x
is the server's model, `delta` [S, P] are the updates, `share` [1, S] the clients'
shares in their mean.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._defences import (
    BYZANTINE_NEEDS,
    DEFENCES_WITH,
    NEIGHBOR_MIXING_NEEDS,
    Defence,
    Facts,
    private_mean,
    robust_mean,
)
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Cohort,
    MixingWeights,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    VoidRound,
    algorithm_options,
    map_rows,
)
from pflcore.check import (
    ClientName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Weighting,
    Words,
    known_id,
    reject,
)
from pflcore.train import Clients
from pflcore.train._random import generator_of


@algorithm_options
class FedAvg(Algorithm):
    """FedAvg (McMahan et al. 2017, Algorithm 1): the mean of the clients' updates.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    `x <- x + server_lr * sum_i share_i delta_i`. The shares follow `weighting`.

    `defence` puts a robust aggregate in the place of the mean. It expects
    `num_byzantine` = f bad clients in a round of S; d_i are the updates. All defences
    but "clip" give every client one vote, since a client may lie about the number of
    its samples.

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
      2021, eqs. 2 to 4). Deviation: there the server trains r on data of its own, and r
      is not part of the sum.

    `neighbor_mixing` puts the mean of the S - f nearest updates in the place of each
    update, before the defence (Allouah et al. 2023, Algorithm 2).

    With a defence, running statistics of batch norm stay each client's own. Their mean
    would be a way around the defence.

    Args:
        server_lr: Step size of the server. At 1, the paper's value, the server adds the
            whole mean update.
        weighting: Shares of the clients in the mean: "samples" is the paper's n_i /
            n, "uniform" gives every client the same share.
        defence: Robust aggregate in the place of the
            mean: "clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust",
            "geometric_median", "mean_around_median", "bulyan", "centered_clipping" or
            "dp". None takes the mean.
        num_byzantine: Number f of bad clients in a round, for the
            defences "trimmed_mean", "krum", "multi_krum", "mean_around_median" and
            "bulyan", and for `neighbor_mixing`.
        trusted_client: Id or name of the client that "fltrust" trusts. None with every
            other defence.
        neighbor_mixing: Mix each update with its nearest neighbours before the defence.
        clip_norm: The largest length of an update in the sum of "dp", or the largest
            distance from the center in "centered_clipping". None with every other
            defence.
        clip_steps: Number of steps of "centered_clipping".
        noise_multiplier: Standard deviation of the noise on the sum of "dp", in units
            of `clip_norm`. None with every other defence.
        expected_clients: The expected number of clients of a round, by which "dp"
            divides: the probability of each client times the number of clients. None
            means all clients with training samples.
    """

    server_lr: NonNegativeFloat = 1.0
    weighting: Weighting = "samples"
    defence: Defence | None = field(default=None, kw_only=True)
    num_byzantine: NonNegativeInt = field(default=1, kw_only=True)
    trusted_client: ClientName | None = field(default=None, kw_only=True)
    neighbor_mixing: bool = field(default=False, kw_only=True)
    clip_norm: PositiveFloat | None = field(default=None, kw_only=True)
    clip_steps: PositiveInt = field(default=1, kw_only=True)
    noise_multiplier: NonNegativeFloat | None = field(default=None, kw_only=True)
    expected_clients: PositiveFloat | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.defence == "fltrust") != (self.trusted_client is not None):
            reject(
                "trusted_client",
                "a client's number with defence='fltrust', None without it",
                self.trusted_client,
            )
        for option, defences in DEFENCES_WITH.items():
            is_used = self.defence in defences
            if option == "num_byzantine":
                is_used = is_used or self.neighbor_mixing
            if not is_used:
                remedy = f"it belongs to defence={' or '.join(map(repr, defences))}"
                self.require_default("defence", option, remedy=remedy)
        if self.defence in DEFENCES_WITH["clip_norm"] and self.clip_norm is None:
            reject("clip_norm", f"a number with defence={self.defence!r}", None)
        if self.defence == "dp" and self.noise_multiplier is None:
            reject("noise_multiplier", "a number with defence='dp'", None)

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        if self.defence is None:
            return Traits(batch_norm=("average", "local"))
        required: tuple[int, ...] = ()
        if self.trusted_client is not None:
            required = (known_id("trusted_client", self.trusted_client),)
        return Traits(batch_norm=("local",), required_clients=required)

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, **self.init_center(x0)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix = self.robust_weights(up["delta"], cohort, state.get("center"))
        x = mix.aggregate(rows, state["x"], self.server_lr)[0]
        return {"x": x, **self.new_center(rows, mix)}, mix

    def update_without_clients(self, state: Tensors, cohort: Cohort) -> Changes:
        if self.defence != "dp":
            return {}
        nothing = {"delta": torch.zeros_like(state["x"])[None]}
        return self.update(state, nothing, cohort)[0]

    def check_sampling(
        self, sampling: str, participation: float, num_eligible: int, num_trainable: int
    ) -> None:
        most = max(1, int(participation * num_eligible + 0.5))
        self._check_cohort_size(num_eligible if sampling == "poisson" else most)
        if self.defence != "dp":
            return
        joins_always = participation == 1 and sampling == "uniform"
        if sampling != "poisson" and not joins_always:
            reject(
                "sampling",
                "'poisson' with defence='dp', or participation=1: its privacy is that "
                "of clients who join independently of each other",
                sampling,
            )
        expected = participation * num_eligible
        given = self.expected_clients or num_trainable
        if not math.isclose(given, expected, rel_tol=1e-6):
            reject(
                "expected_clients",
                f"{expected:g}, participation times the clients that may take part "
                f"(give expected_clients={expected:g})",
                given,
            )

    def _check_cohort_size(self, most: int) -> None:
        """Raises ValueError where every round would be void.

        Args:
            most: The most clients that a round of the run can have.
        """
        needed = self._clients_needed()
        if needed is not None and needed > most:
            expected = (
                f"rounds of at least {needed} clients for defence={self.defence!r} "
                f"against {self.num_byzantine} hostile ones"
            )
            remedy = "lower num_byzantine, or raise participation"
            reject("num_byzantine", expected, Words(f"{most}"), remedy=remedy)

    def init_center(self, x0: Tensor) -> Tensors:
        """The "center" [P] of "centered_clipping" before round 1, for the state.

        It is empty for every other defence, which needs no center.
        """
        if self.defence != "centered_clipping":
            return {}
        return {"center": torch.zeros_like(x0)}

    def new_center(self, rows: Tensor, mix: MixingWeights) -> Tensors:
        """The "center" [P] of the next round: the aggregate of this one."""
        if self.defence != "centered_clipping":
            return {}
        return {"center": mix.aggregate(rows)[0]}

    def robust_weights(
        self, delta: Tensor, cohort: Cohort, center: Tensor | None = None
    ) -> tuple[Tensor, MixingWeights]:
        """Rows [R, P] and their weights: the updates, or a robust form of them.

        A defence expects `num_byzantine` bad clients, or fewer in a small round. Raises
        VoidRound where a round of this size allows fewer than `num_byzantine` minus the
        clients that were left out of it.

        Args:
            delta: [S, P] the updates.
            cohort: The clients that sent them.
            center: [P] the aggregate of the last round, for "centered_clipping".
        """
        mean = cohort.mean_weights(self.weighting)
        if self.defence is None:
            return delta, mean
        if self.defence == "dp":
            rows = self._private_mean(delta, cohort)
            return rows, MixingWeights(torch.ones(1, 1, dtype=torch.float64))
        f = self._allowed_byzantine(cohort)
        facts = Facts(f, 0, self.clip_norm, self.clip_steps, center)
        if self.trusted_client is not None:
            trusted_id = known_id("trusted_client", self.trusted_client)
            trusted_row = int((cohort.ids == trusted_id).nonzero())
            facts = facts._replace(trusted_row=trusted_row)
        share = to_device(mean.weight, delta.device)
        rows, weight = robust_mean(
            self.defence, delta, share, facts, self.neighbor_mixing
        )
        return rows, MixingWeights(weight)

    def _private_mean(self, delta: Tensor, cohort: Cohort) -> Tensor:
        """The mean [1, P] of the updates with noise, by "dp"."""
        assert self.clip_norm is not None and self.noise_multiplier is not None
        return private_mean(
            delta,
            self.clip_norm,
            self.noise_multiplier,
            self.expected_clients or cohort.num_trainable,
            generator_of(cohort.seed, cohort.round, "noise of the sum"),
        )

    def _allowed_byzantine(self, cohort: Cohort) -> int:
        """The number of bad clients that a round of this size allows."""
        needs = self._needs()
        if needs is None:
            return self.num_byzantine
        factor, margin = needs
        clients = len(cohort.ids)
        allowed = min(self.num_byzantine, (clients - margin) // factor)
        if allowed < max(0, self.num_byzantine - cohort.num_dropped):
            raise VoidRound(
                f"defence: {self.defence} against {self.num_byzantine} hostile clients "
                f"needs {self._clients_needed()} in a round, and round {cohort.round} "
                f"has {clients}; lower num_byzantine, or raise participation."
            )
        return allowed

    def _needs(self) -> tuple[int, int] | None:
        """The clients that a round needs, as in `BYZANTINE_NEEDS`; None for any."""
        needs = BYZANTINE_NEEDS.get(str(self.defence))
        if needs is None and self.neighbor_mixing:
            return NEIGHBOR_MIXING_NEEDS
        return needs

    def _clients_needed(self) -> int | None:
        """The clients that a round needs against `num_byzantine`; None for any."""
        needs = self._needs()
        return needs and needs[0] * self.num_byzantine + needs[1]


@algorithm_options
class WithoutDefence:
    """Removes FedAvg's defence from algorithms that do not take the mean's step.

    It stands before the base class, `class X(WithoutDefence, FedAvg)`, and takes away
    the options that go with `defence`. A robust aggregate would have no effect in those
    algorithms, so no command line and no grid should offer it.

    Args:
        defence: Always None: the algorithm takes no robust aggregate.
        num_byzantine: Always 1, without effect.
        trusted_client: Always None.
        neighbor_mixing: Always False.
        clip_steps: Always 1, without effect.
        clip_norm: Always None.
        noise_multiplier: Always None.
        expected_clients: Always None.
    """

    defence: None = field(default=None, kw_only=True)
    num_byzantine: Literal[1] = field(default=1, kw_only=True)
    trusted_client: None = field(default=None, kw_only=True)
    neighbor_mixing: Literal[False] = field(default=False, kw_only=True)
    clip_steps: Literal[1] = field(default=1, kw_only=True)
    clip_norm: None = field(default=None, kw_only=True)
    noise_multiplier: None = field(default=None, kw_only=True)
    expected_clients: None = field(default=None, kw_only=True)


@algorithm_options
class QFedAvg(WithoutDefence, FedAvg):
    """q-FedAvg (Li et al. 2020, Algorithm 2): clients with a high loss weigh more.

    server: x [P] · client: nothing · down: x [S, P] (1 model) · up: delta [S, P] (1
    model), and weight and h [S] (F^q, and the client's term of the sum below).

    With F_i the mean loss of the received x on client i's whole training set, L = 1 /
    (the clients' lr) and p the shares: `x += server_lr * sum p F^q delta / sum p (q
    F^(q-1) L |delta|^2 + F^q)`. These are the paper's sums, with one L cancelled. The
    paper samples clients by their size and sets p = 1: that is `weighting="uniform"`.

    Deviation: F is at least 1e-6. At q < 1, F^(q-1) of a client without a loss would
    stop the server.

    The other options are those of `FedAvg`, without a defence.

    Args:
        q: Exponent of the losses in the weights. 0 is FedAvg; a larger q makes the
            clients' losses more equal.
    """

    q: NonNegativeFloat = 0.001

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
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
