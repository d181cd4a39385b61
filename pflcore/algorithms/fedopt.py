"""Server optimizers: the cohort's mean update is the (negative) gradient of a server's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Changes, Cohort, Mix, Tensors
from pflcore.check import Momentum, NonNegative, Positive, refuse

Optimizer = Literal["sgd", "heavy_ball", "nesterov", "ema", "adam", "yogi", "adagrad"]
IDLE = {  # options that play no part beside an optimizer
    "sgd": ("beta1", "beta2", "tau", "v0", "bias_correction"),
    **dict.fromkeys(("heavy_ball", "nesterov", "ema"), ("beta2", "tau", "v0", "bias_correction")),
    "adagrad": ("beta2",),
}


@dataclass(frozen=True)
class FedOpt(FedAvg):
    """Reddi et al. 2021, Algorithm 2, and Hsu et al. 2019: FedAvg with a server optimizer.

    server: x [P], and of m, v [P] (momentum, second moment) and t (updates so far) what the
    optimizer needs · client: nothing ·
    down: x (1 model) · up: delta (1 model). With D the weighted mean of the deltas:

    sgd         x += server_lr D
    heavy_ball  m = beta1 m + D ;  x += server_lr m                          (Hsu's formula)
    nesterov    m = beta1 m + D ;  x += server_lr (D + beta1 m)
    ema         m = beta1 m + (1 - beta1) D ;  x += server_lr m              (Motley's: 10 at beta1
    .9 is heavy_ball's 1)
    adam        m as ema, v = beta2 v + (1 - beta2) D^2 ;  x += server_lr m / (sqrt(v) + tau)
    yogi        v -= (1 - beta2) D^2 sign(v - D^2)      adagrad     v += D^2

    `bias_correction`: "none" is the paper; "keras" scales the step by sqrt(1 - beta2^t) / (1 -
    beta1^t), as the paper's own code does; "torch" corrects v before tau is added, as
    `torch.optim.Adam`.
    """

    # the server's: sgd, heavy_ball, nesterov, ema, adagrad, adam or yogi
    optimizer: Optimizer = "sgd"
    beta1: Momentum = 0.9  # momentum
    beta2: Momentum = 0.99  # second moment (adam, yogi)
    tau: Positive = 1e-3  # added to sqrt(v)
    v0: NonNegative | None = None  # where v starts; None: tau^2, as in the paper (Motley's code: 0)
    # of Adam's moments: none, as in the paper; keras or torch, as those libraries do
    bias_correction: Literal["none", "keras", "torch"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in IDLE.get(self.optimizer, ()):
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                refuse(
                    name, f"its default beside optimizer={self.optimizer!r}", getattr(self, name)
                )

    @property
    def adaptive(self) -> bool:
        """Whether each parameter has a step size of its own."""
        return self.optimizer in ("adam", "yogi", "adagrad")

    def slots(self, x: Tensor) -> Tensors:
        """The optimizer's own first state for models `x` [..., P]; each model has its own."""
        s = {} if self.optimizer == "sgd" else {"m": torch.zeros_like(x)}
        if self.adaptive:
            s["v"] = torch.full_like(x, self.tau**2 if self.v0 is None else self.v0)
            s["t"] = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)
        return s

    def improve(self, state: Tensors, d: Tensor) -> Tensors:
        """What the mean update `d` [..., P] makes of the models state["x"] [..., P] and the
        slots."""
        x, lr, b1, b2 = state["x"], self.server_lr, self.beta1, self.beta2
        if self.optimizer == "sgd":
            return {"x": x + lr * d}
        m = b1 * state["m"] + (d if self.optimizer in ("heavy_ball", "nesterov") else (1 - b1) * d)
        if not self.adaptive:
            return {"x": x + lr * (d + b1 * m if self.optimizer == "nesterov" else m), "m": m}
        v, t = self.second(state["v"], d**2), state["t"] + 1
        first, second = (
            (1 - b**t)[..., None].to(d) if self.bias_correction != "none" else 1.0 for b in (b1, b2)
        )
        if self.optimizer == "adagrad":
            second = 1.0  # a sum needs no correction
        if self.bias_correction == "torch":
            step = m / first / ((v / second) ** 0.5 + self.tau)
        else:
            step = m * (second**0.5 / first) / (v**0.5 + self.tau)
        return {"x": x + lr * step, "m": m, "v": v, "t": t}

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The second moment v [..., P] after one more square [..., P]."""
        if self.optimizer == "adam":
            return self.beta2 * v + (1 - self.beta2) * square
        if self.optimizer == "adagrad":
            return v + square
        return v - (1 - self.beta2) * square * torch.sign(v - square)

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0, **self.slots(x0)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        rows, mix = self.defended(up["delta"], cohort)
        return {**self.improve(state, mix.of(rows)[0])}, mix


@dataclass(frozen=True)
class FedAvgM(FedOpt):
    """Hsu et al. 2019: FedAvg with server momentum; `optimizer` is "heavy_ball", "nesterov" or
    "ema" (Motley). See `FedOpt`.
    """

    optimizer: Optimizer = "heavy_ball"


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """Reddi et al. 2021. Motley's cross-device preset is `bias_correction="keras"`, `v0=0`. See
    `FedOpt`.
    """

    server_lr: NonNegative = 0.1
    optimizer: Optimizer = "adam"


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """Reddi et al. 2021. See `FedOpt`."""

    server_lr: NonNegative = 0.1
    optimizer: Optimizer = "yogi"


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """Reddi et al. 2021, with beta1 = 0 as there. See `FedOpt`."""

    server_lr: NonNegative = 0.1
    optimizer: Optimizer = "adagrad"
    beta1: Momentum = 0.0
