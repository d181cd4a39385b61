"""FedOpt (Reddi et al. 2021): servers that take an optimizer's step.

The clients' mean update stands for a (negative) gradient.

Symbols: P parameters of a model; x is the server's model; D (`d`) is the clients' mean
update; m and v are the optimizer's momentum and second moment, t its steps so far.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pflcore.algorithms._fedavg import FedAvg, ServerStep
from pflcore.algorithms._protocol import (
    Cohort,
    Tensors,
    UpdateResult,
    algorithm_options,
)
from pflcore.check import (
    Momentum,
    NonNegativeFloat,
    PositiveFloat,
)

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
class ServerOptimizer(ServerStep):
    """Base class of servers that take an optimizer's step, of one model or of several.

    Args:
        optimizer: Server optimizer, one
            of "sgd", "heavy_ball", "nesterov", "ema", "adam", "yogi" or "adagrad".
        beta1: Decay of the momentum m in a round, from 0 to below 1, for all but "sgd".
            0.9 is the value of the paper's Adam and Yogi.
        beta2: Decay of the second moment v in a round, from 0 to below 1, for "adam"
            and "yogi". 0.99 is the paper's value.
        tau: The paper's tau, a number above 0 that is added to sqrt(v),
            for "adam", "yogi" and "adagrad". It bounds the step where updates are
            small.
        v0: Start of v, for "adam", "yogi" and "adagrad". None is the paper's tau^2;
            Motley's code starts at 0.
        bias_correction: "none", as in the paper, leaves the moments as they
            are. "keras", as in the paper's own code, multiplies the step by `sqrt(1 -
            beta2^t) / (1 - beta1^t)`.
    """

    optimizer: Optimizer = "sgd"
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    tau: PositiveFloat = 1e-3
    v0: NonNegativeFloat | None = None
    bias_correction: Literal["none", "keras"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_default("optimizer", *UNUSED_OPTIONS.get(self.optimizer, ()))

    def optimizer_state(self, x: Tensor) -> Tensors:
        """The optimizer's first state for models `x` [..., P].

        Each model has a state of its own.
        """
        if self.optimizer == "sgd":
            return {}
        m = torch.zeros_like(x)
        if self.optimizer in ("heavy_ball", "nesterov", "ema"):
            return {"m": m}
        v0 = self.tau**2 if self.v0 is None else self.v0
        v = torch.full_like(x, v0)
        t = x.new_zeros(x.shape[:-1], dtype=torch.float64)
        return {"m": m, "v": v, "t": t}

    def optimizer_step(self, state: Tensors, d: Tensor) -> Tensors:
        """Models and optimizer state after a step along the mean update.

        `state` has the models "x" [..., P] and their optimizer state; `d` [..., P] is
        the mean update of each model.
        """
        x = state["x"]
        lr = self.server_lr
        beta1 = self.beta1
        if self.optimizer == "sgd":
            return {"x": x + lr * d}
        adds_whole_update = self.optimizer in ("heavy_ball", "nesterov")
        added = d if adds_whole_update else (1 - beta1) * d
        m = beta1 * state["m"] + added
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
        """The second moment [..., P] after a round with the squared update `square`."""
        beta2 = self.beta2
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "adam":
            return beta2 * v + (1 - beta2) * square
        return v - (1 - beta2) * square * torch.sign(v - square)


@algorithm_options
class FedOpt(ServerOptimizer, FedAvg):
    """FedOpt (Reddi et al. 2021, Algorithm 2): FedAvg with a server optimizer.

    server: x [P], and of m, v [P] (momentum, second moment) and t [] (updates so far)
    what the optimizer needs · client: nothing · down: x [S, P] (1 model) · up: delta
    [S, P] (1 model).

    With D the weighted mean of the deltas, or a robust one:

    - sgd: `x += server_lr D`
    - heavy_ball: `m = beta1 m + D; x += server_lr m`, the formula of Hsu et al. 2019
    - nesterov: `m = beta1 m + D; x += server_lr (D + beta1 m)`
    - ema: `m = beta1 m + (1 - beta1) D; x += server_lr m`, Motley's formula; its
      server_lr of 10 at beta1 = .9 is heavy_ball's 1
    - adam: m as in ema, `v = beta2 v + (1 - beta2) D^2; x += server_lr m / (sqrt(v) +
      tau)`
    - yogi: adam with `v -= (1 - beta2) D^2 sign(v - D^2)`
    - adagrad: adam with `v += D^2`

    The other options are those of `FedAvg`.
    """

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {**super().init(x0, n), **self.optimizer_state(x0)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        rows, mix, kept = self.mean(up["delta"], cohort, self.weighting, state)
        new = self.optimizer_step(state, mix.aggregate(rows)[0])
        return {**new, **kept}, mix


@algorithm_options
class FedAvgM(FedOpt):
    """FedAvgM (Hsu et al. 2019): FedAvg with server momentum. See `FedOpt`.

    The other options are those of `FedOpt`.

    Args:
        optimizer: Form of the momentum: "heavy_ball" is the paper's formula; "nesterov"
            looks one step ahead; "ema" is Motley's running mean.
    """

    optimizer: Optimizer = "heavy_ball"


@algorithm_options
class FedAdam(FedOpt):
    """FedAdam (Reddi et al. 2021): FedAvg with Adam at the server. See `FedOpt`.

    Motley's cross-device preset is `bias_correction="keras"`, `v0=0`. The other options
    are those of `FedOpt`.

    Args:
        server_lr: Step size of the server. It is smaller than FedAvg's, since Adam
            divides the step by the size of past updates.
        optimizer: Server optimizer, "adam" for this algorithm.
    """

    server_lr: NonNegativeFloat = 0.1
    optimizer: Optimizer = "adam"


@algorithm_options
class FedYogi(FedAdam):
    """FedYogi (Reddi et al. 2021): FedAvg with Yogi at the server. See `FedOpt`.

    The other options are those of `FedAdam`.

    Args:
        optimizer: Server optimizer, "yogi" for this algorithm.
    """

    optimizer: Optimizer = "yogi"


@algorithm_options
class FedAdagrad(FedAdam):
    """FedAdagrad (Reddi et al. 2021): FedAvg with Adagrad, beta1 = 0. See `FedOpt`.

    The other options are those of `FedAdam`.

    Args:
        optimizer: Server optimizer, "adagrad" for this algorithm.
        beta1: Decay of the momentum m in a round, from 0 to below 1. At 0, the paper's
            value, m is the mean update of this round.
    """

    optimizer: Optimizer = "adagrad"
    beta1: Momentum = 0.0
