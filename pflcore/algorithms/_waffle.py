"""WAFFLE (Beaussart et al. 2021) and the two methods that it builds on.

The WAFFLe of Hao et al. 2020 is another method, in `_factorized_waffle.py`.

SCAFFOLD's clients correct each gradient by what they know of the others' gradients.
Weight Erosion's weights fall with a client's distance from one target.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; R
is the number of rounds. x is the server's model, c the server's control variate and c_i
a client's; `delta` are the updates. Weight Erosion's alpha [N] are clients' weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._fedavg import FedAvg, ServerStep
from pflcore.algorithms._protocol import (
    Algorithm,
    Claim,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    momentum_steps,
    normalize_rows,
    squared_norms,
)
from pflcore.check import (
    ClientName,
    NonNegativeFloat,
    Number,
    Weighting,
    Words,
    known_id,
    reject,
    require,
)
from pflcore.train import Clients, Net, Objective, Training


@algorithm_options
class ControlVariates(ServerStep):
    """Base class of SCAFFOLD and WAFFLE: their clients' part, and what these receive.

    Args:
        weighting: Shares of the clients in both means: "uniform" as in the paper,
            or "samples". With "samples" c is the n-weighted mean of the c_i under full
            participation only.
        option: Rule by which a client renews its control variate: "mean_grad", "II"
            or "I". The paper's are "I" and "II".
    """

    weighting: Weighting = "uniform"
    option: Literal["mean_grad", "II", "I"] = "mean_grad"

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        fixed = {}
        if self.option == "II":
            reason = "with option 'II' divides by the sum of SGD's step sizes"
            fixed = {"local_optimizer": reason}
        elif self.option == "I":
            fixed = {"clip_grad": "with option 'I' takes whole gradients"}
        return super().traits._replace(
            clipped_with_update=("control", "c"),
            fixed_training=fixed,
            mean_state=("c",),
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, "c": torch.zeros_like(x0)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {k: state[k].expand(len(cohort.ids), -1) for k in ("x", "c")}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"c": torch.zeros_like(net.w0)[None]}

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        control = Claim(state["c"])
        return {**super().uploads(state, down, cohort), "control": control}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        c = down["c"]
        training = clients.context.training
        lr = clients.lr
        old = client_state["c"]
        # At a step size of 0, the mean gradient is the limit of option II.
        mean = self.option == "mean_grad" or lr == 0
        fit = clients.fit(x, Objective(shift=c - old), mean_grad=mean)
        if self.option == "I":
            new = clients.grad(x) + training.gradient_decay * x
        elif mean:
            new = fit.grad
        else:
            steps = momentum_steps(fit.steps[:, None], training.momentum)
            new = old - c + (x - fit.w) / (steps * lr).to(x)
        upload = {"delta": fit.w.sub_(x), "control": new - old}
        return {"c": new}, upload, fit


@algorithm_options
class Scaffold(ControlVariates, FedAvg):
    """SCAFFOLD (Karimireddy et al. 2020): each step takes `gradient - c_i + c`.

    server: x, c [P] · client: c [P] · down: x, c [S, P] (2 models) · up: delta, control
    [S, P] (2 models; control is c_i' - c_i).

    Algorithm 1: `x <- x + server_lr * mean_S delta_i`, `c <- c + |S| / N * mean_S
    control_i`, so that `c = mean_N c_i` after every round. c_i is what client i knows
    of its own gradients, c what the server knows of all. The new c_i' is, by `option`:

    - "mean_grad": the mean minibatch gradient of the round. It is exact for every local
      optimizer, and equals option II for plain SGD, also at a step size of 0.
    - "II": `c_i - c + (x - y_i) / (sum of step sizes)`, y_i the trained model. With
      momentum m it divides by the effective number of K steps, sum_k (1 - m^(K-k+1)) /
      (1 - m).
    - "I": the full-batch gradient at x (with batch norm the mean of its minibatches').

    SGD's weight decay counts as part of the gradient, and clipped gradients are what is
    averaged. Option II is refused with AdamW, whose steps do not add up to gradients,
    and option I with clipping.

    A robust `mean` takes the place of both means, of the updates and of the control
    variates, each by itself; c is then no mean of the c_i. The run's `clip` shortens a
    client's step of c_i with its update, so that c stays their mean. `Private` and
    `CenteredClipping` are refused: their length holds for one sum of a round, and
    control variates have another length than updates.

    The other options are those of `FedAvg`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = (
            "one without a length with Scaffold, since the length of an update does "
            "not fit its control variates"
        )
        require(self.mean.length is None, "mean", expected, Words(self.mean))

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        changes, mix = super().update(state, up, cohort)
        rows, mean, _ = self.mean(up["control"], cohort, self.weighting)
        c = mean.aggregate(rows, state["c"], len(cohort.ids) / cohort.num_trainable)[0]
        return {**changes, "c": c}, mix


# From (round, rounds) to the globality of a round: 1 is global, 0 local.
Schedule = Callable[[int, int], float]


@algorithm_options
class Waffle(ControlVariates):
    """WAFFLE (Beaussart et al. 2021): SCAFFOLD that drifts from global to one target.

    server: x, c [P], history [N, 2] (each client's unsmoothed weights in the last two
    rounds that it attended) · client: c [P] · down: x, c [S, P] (2 models) · up: delta
    and control [S, P] (2 models). x is the target's personalized model; the others'
    numbers only show what it is to them.

    (The WAFFLe of Hao et al. 2020, with layers of factors, is `FactorizedWaffle`.)

    Algorithms 1 and 2: the means of SCAFFOLD have weights that come from the distances
    between the clients' updates and the target's (`ops.waffle_weights`, eqs. 2 and 3).
    They are averaged with those of the last two rounds; from round 0.95 R on the target
    is alone. Omega and Psi are eq. 4 with slope `do`, or any function of (round,
    rounds).

    Absent clients have weight 0, and the clients of the round share the whole. To be
    absent is not to be unlike: each client's average is over the last two rounds that
    it attended, in shares of an even weight.

    A client without weight still trains against a c that is no longer its own, and may
    run away. The farthest client sets the scale of Algorithm 1's distances, so the next
    one then counts as near: a CNN with ReLU loses its target on plain MNIST. The run's
    `clip` holds its updates.

    Deviations, each with the paper's own reading as an option:

    - `control_agg="recompute"` keeps `c = sum_i weight_i c_i` (but where `clip`
      shortens an upload, since the client keeps its whole c_i). As printed ("literal":
      `c += sum_i weight_i dc_i`) c forgets what it owes each client when weights
      change. Then the gap between c and the target's own c_i freezes once the target is
      alone, and the target cannot reach its optimum.
    - `option="mean_grad"` is as in SCAFFOLD ("II" is the paper's).

    Decisions where the paper is silent: c and c_i start at 0, the history at 1/N, and
    server_lr is 1. The history holds unsmoothed weights. Samples weigh nothing.
    Distances are those of the updates as they are, however many steps a client takes.

    The other options are those of `Scaffold`.

    Args:
        weighting: Always "uniform": the method has weights of its own.
        target: Id of the client for which the model is made, or its name.
        do: Slope of Omega = Psi = `1 / (1 + exp(do * (2 (round + r0) / rounds - 1)))`.
            The larger it is, the more sudden is the turn from global to local.
        r0: Shift of Omega's curve, in rounds. A positive one turns local earlier.
        control_agg: Rule for c: "recompute" or "literal", see above. "literal" is
            Algorithm 2 as printed.
        tie: Weights where all other clients are equally far from the target: "closed"
            counts them as the nearest ones, "uniform" gives every client 1 / N.
        omega: Function of (round, rounds) that takes the place of the paper's curve for
            Omega, from 1 (global) to 0 (local). None takes the curve.
        psi: Function of (round, rounds) for Psi, as `omega` is for Omega. None takes
            Omega.
    """

    weighting: Literal["uniform"] = "uniform"
    target: ClientName = 0
    do: Number = 3.2
    r0: Number = 0.0
    control_agg: Literal["recompute", "literal"] = "recompute"
    tie: Literal["closed", "uniform"] = "closed"
    omega: Schedule | None = None
    psi: Schedule | None = None

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        # With "recompute", the upload is c_i itself, and the client keeps it whole.
        clipped = ("control", "c") if self.control_agg == "literal" else ("control",)
        return super().traits._replace(
            required_clients=(known_id("target", self.target),),
            rounds_reason="goes from global to local over the whole run",
            clipped_with_update=clipped,
            reported_state=("mix",),
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        history = torch.full((n, 2), 1 / n, dtype=torch.float64)
        return {**super().init(x0, n), "history": history}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        new, up, fit = super().train(down, client_state, clients)
        if self.control_agg == "recompute":
            up["control"] = new["c"]
        return new, up, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        weight, history = self.smoothed_weights(state["history"], up["delta"], cohort)
        mix = MixingWeights(weight[None])
        before = None if self.control_agg == "recompute" else state["c"]
        x = mix.aggregate(up["delta"], state["x"], self.server_lr)[0]
        c = mix.aggregate(up["control"], before)[0]
        return {"x": x, "c": c, "history": RowUpdate(cohort.ids, history)}, mix

    def smoothed_weights(
        self, history: Tensor, delta: Tensor, cohort: Cohort
    ) -> tuple[Tensor, Tensor]:
        """Smoothed weights [S] and new history [S, 2] of the cohort, float64."""
        is_target = cohort.ids == known_id("target", self.target)
        omega, psi = self.globality(cohort.round, cohort.rounds)
        distance = ops.pairwise_sqdist(delta[is_target], delta)[0].sqrt().cpu()  # [S]
        row = int(is_target.nonzero())
        weight = ops.waffle_weights(distance, row, omega, psi, self.tie)
        if _is_late(cohort.round, cohort.rounds):
            weight = is_target.double()
        # On the scale of a round with all clients, where an even weight is 1 / N.
        weight = weight * (len(weight) / cohort.num_trainable)
        before = history[cohort.ids]
        new_history = torch.stack([weight, before[:, 0]], 1)
        if _is_late(cohort.round - 2, cohort.rounds):
            # Both rounds before were late, too. The target was alone in them, whichever
            # rounds a client attended.
            before = weight[:, None].expand(-1, 2)
        smooth = (before.sum(1) + weight) / 3
        return smooth / smooth.sum(), new_history

    def globality(self, round_number: int, rounds: int) -> tuple[float, float]:
        """Omega and Psi of a round; rounds are counted from 1.

        Raises ValueError where a given function returns a negative number or NaN.
        """
        z = self.do * ((round_number + self.r0) / (rounds / 2) - 1)
        # 1 / (1 + exp(z)), in a form that never overflows.
        e = math.exp(-abs(z))
        numerator = e if z > 0 else 1.0
        curve = numerator / (1 + e)
        omega = curve if self.omega is None else float(self.omega(round_number, rounds))
        psi = omega if self.psi is None else float(self.psi(round_number, rounds))
        if not (omega >= 0 and psi >= 0):
            reject("omega and psi", "numbers >= 0", (omega, psi))
        return omega, psi


def _is_late(round_number: int, rounds: int) -> bool:
    """True in the last twentieth of a run, from round 0.95 R on."""
    return 20 * round_number >= 19 * rounds


@algorithm_options
class WeightErosion(Algorithm):
    """Weight Erosion (Grimberg et al. 2020): weights fall with distance to a target.

    server: x [P], alpha [N] · client: nothing · down: x [S, P] · up: delta [S, P] (1
    model), passes [S].

    Algorithm 1, with the updates of an epoch of local SGD as gradients (Gengler et al.
    2020): `alpha_i <- max(0, alpha_i - (1 + p_s * passes_i) * p_d * |delta_i -
    delta_target| / |delta_target|)`, from 1; then `x <- x + server_lr * sum_i alpha_i
    delta_i / sum_i alpha_i`. A weight that has reached 0 stays 0; an absent client
    keeps its weight. `passes` counts how often a client's data were seen before, see
    `size_unit`.

    Decision where the papers are silent: without a `p_d` it is `1 / (0.8 * rounds *
    this round's median relative distance)`. At this value the median client's weight
    runs out after 80 % of the rounds, however the distances grow; a mean over the
    rounds so far would lag behind. (Published values fit one data set, one model and
    one number of rounds.)

    Args:
        server_lr: Step size of the server. At 1 it adds the whole weighted mean.
        target: Id of the client for which the model is made, or its name.
        p_d: Distance penalty: loss of weight at a relative distance of 1. None
            calibrates it in every round (the paper: .006 to .0088 on MNIST, 100
            rounds).
        p_s: Size penalty: extra erosion of clients whose data were seen often. 0 has no
            extra erosion.
        size_unit: Unit of `passes`, with b the batch size and n_i the
            samples: "samples" is `floor((round - 1) * b / n_i)`, as printed; "batches"
            takes n_i / b instead of n_i, as the authors' code does; "epochs" counts the
            epochs trained so far.
    """

    server_lr: NonNegativeFloat = 1.0
    target: ClientName = 0
    p_d: NonNegativeFloat | None = None
    p_s: NonNegativeFloat = 0.0
    size_unit: Literal["samples", "batches", "epochs"] = "samples"

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        rounds_reason = ""
        if self.p_d is None:
            rounds_reason = "without p_d calibrates it by the number of rounds"
        fixed = {}
        if self.size_unit == "epochs":
            fixed = {"steps": "with size_unit='epochs' counts the epochs of the rounds"}
        return Traits(
            required_clients=(known_id("target", self.target),),
            fixed_training=fixed,
            rounds_reason=rounds_reason,
        )

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, "alpha": torch.ones(n, dtype=torch.float64)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        """FedAvg's training; uploads also how often the client's data were seen before.

        The server turns these `passes` into extra erosion, by `p_s`. The paper's
        formula counts one minibatch a round, whatever the clients train.
        """
        client_state, up, fit = super().train(down, client_state, clients)
        training = clients.context.training
        passes = self.count_passes(training, clients.round, clients.num_samples)
        return client_state, {**up, "passes": passes}, fit

    def count_passes(
        self,
        training: Training,
        round_number: int,
        num_samples: Tensor,  # [S]
    ) -> Tensor:  # [S] int64
        """The passes over clients' data before a round, in the unit `size_unit`."""
        past_rounds = round_number - 1
        if self.size_unit == "epochs":
            return torch.full_like(num_samples, past_rounds * training.epochs)
        if self.size_unit == "samples":
            return past_rounds * training.batch_size // num_samples
        # The authors' code divides samples by batches, as it is here.
        num_batches = -(-num_samples // training.batch_size)
        return past_rounds * training.batch_size // num_batches

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        like = torch.empty((), dtype=torch.int64)
        passes = Claim(like, low=0, is_whole=True)
        if cohort.training is not None:
            exact = self.count_passes(cohort.training, cohort.round, cohort.num_samples)
            passes = Claim(like, low=exact, high=exact, is_whole=True)
        return {**super().uploads(state, down, cohort), "passes": passes}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        delta = up["delta"]
        is_target = ids == known_id("target", self.target)
        row = int(is_target.nonzero())
        of_target = delta[row : row + 1]
        distance = ops.pairwise_sqdist(of_target, delta)[0].sqrt().cpu()
        # Relative to the length of the target's update; infinite where only the target
        # stood still.
        length = squared_norms(of_target).sqrt().cpu()
        distance = torch.where(distance > 0, distance / length, 0.0)
        p_d = self.p_d
        if p_d is None:
            is_usable = ~is_target & (distance > 0) & distance.isfinite()
            p_d = _calibrated_penalty(distance[is_usable], cohort.rounds)
        loss = p_d * (1 + self.p_s * up["passes"].cpu().double()) * distance
        loss = loss.nan_to_num(0.0, posinf=math.inf)  # 0 * inf: nothing to erode by
        alpha = (state["alpha"][ids] - loss).clamp(min=0)
        mixing = MixingWeights(normalize_rows(alpha[None]))
        x = mixing.aggregate(delta, state["x"], self.server_lr)[0]
        return {"x": x, "alpha": state["alpha"].index_copy(0, ids, alpha)}, mixing

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        alpha = state["alpha"]
        ids = cohort.trainable_clients  # the others were never weighed
        alpha = torch.zeros_like(alpha).index_copy(0, ids, alpha[ids])
        return {"weights": normalize_rows(alpha[None])[0]}


def _calibrated_penalty(distance: Tensor, rounds: int) -> float:
    """The p_d at which the median weight runs out after 80 % of the rounds."""
    if not len(distance):
        return 0.0
    return 1 / (0.8 * rounds * float(distance.median()))
