"""Server optimizers: the cohort's mean update is the (negative) gradient of a step that the server takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, FedAvg, Tensors
from pflcore.ops.kinds import Momentum, NonNegative, Positive
from pflcore.train.net import Net

Optimizer = Literal["sgd", "heavy_ball", "nesterov", "ema", "adam", "yogi", "adagrad"]


Correction = Literal["none", "keras", "torch"]


@dataclass(frozen=True)
class FedOpt(FedAvg, averages=True):
    """Reddi et al. 2021, Algorithm 2, and Hsu et al. 2019: FedAvg with a server optimizer.

    server: x [P], and of m, v [P] (momentum, second moment) and t (updates so far) what the optimizer needs · client: nothing ·
    down: x (1 model) · up: delta (1 model). With D the weighted mean of the deltas:

    sgd         x += server_lr D
    heavy_ball  m = beta1 m + D ;  x += server_lr m                          (Hsu's formula)
    nesterov    m = beta1 m + D ;  x += server_lr (D + beta1 m)
    ema         m = beta1 m + (1 - beta1) D ;  x += server_lr m              (Motley's: 10 at beta1 .9 is heavy_ball's 1)
    adam        m as ema, v = beta2 v + (1 - beta2) D^2 ;  x += server_lr m / (sqrt(v) + tau)
    yogi        v -= (1 - beta2) D^2 sign(v - D^2)      adagrad     v += D^2

    `bias_correction`: "none" is the paper; "keras" scales the step by sqrt(1 - beta2^t) / (1 - beta1^t), as the paper's own code
    does; "torch" corrects v before tau is added, as `torch.optim.Adam`.
    """

    optimizer: Optimizer = "sgd"
    beta1: Momentum = 0.9  # momentum
    beta2: Momentum = 0.99  # second moment (adam, yogi)
    tau: Positive = 1e-3  # added to sqrt(v)
    v0: NonNegative | None = None  # where v starts; default tau^2, as in the paper (Motley's code: 0)
    bias_correction: Correction = "none"

    @property
    def idle(self) -> tuple[str, ...]:
        moments = () if self.optimizer in ("adam", "yogi") else ("beta2",)
        adaptive = () if self.adaptive else ("tau", "v0", "bias_correction")
        return (*super().idle, *moments, *adaptive, *(("beta1",) if self.optimizer == "sgd" else ()))

    @property
    def adaptive(self) -> bool:
        return self.optimizer in ("adam", "yogi", "adagrad")

    def slots(self, x: Tensor) -> Tensors:
        """The optimizer's own fresh state for models `x` [..., P]; each model has its own."""
        s = {} if self.optimizer == "sgd" else {"m": torch.zeros_like(x)}
        if self.adaptive:
            s["v"] = torch.full_like(x, self.tau**2 if self.v0 is None else self.v0)
            s["t"] = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)
        return s

    def improve(self, g: Tensors, d: Tensor) -> Tensors:
        """`g` after the mean update `d` [..., P] of its models `g["x"]` [..., P]."""
        if self.optimizer == "sgd":
            return {**g, "x": g["x"] + self.server_lr * d}
        b1, b2 = self.beta1, self.beta2
        m = b1 * g["m"] + (d if self.optimizer in ("heavy_ball", "nesterov") else (1 - b1) * d)
        if not self.adaptive:
            return {**g, "x": g["x"] + self.server_lr * (d + b1 * m if self.optimizer == "nesterov" else m), "m": m}
        v, t = g["v"], g["t"] + 1
        if self.optimizer == "adam":
            v = b2 * v + (1 - b2) * d**2
        else:
            v = v + d**2 if self.optimizer == "adagrad" else v - (1 - b2) * d**2 * torch.sign(v - d**2)
        first, second = ((1 - b**t)[..., None].to(d) if self.bias_correction != "none" else 1.0 for b in (b1, b2))
        if self.optimizer == "adagrad":
            second = 1.0  # a sum needs no correction
        if self.bias_correction == "torch":
            step = m / first / ((v / second) ** 0.5 + self.tau)
        else:
            step = m * (second**0.5 / first) / (v**0.5 + self.tau)
        return {**g, "x": g["x"] + self.server_lr * step, "m": m, "v": v, "t": t}

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return {"x": net.w0, **self.slots(net.w0)}, {}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        return self.improve(g, ops.aggregate(*self.defended(up["delta"], cohort))[0])


@dataclass(frozen=True)
class FedAvgM(FedOpt):
    """Hsu et al. 2019: FedAvg with server momentum; `optimizer` is "heavy_ball", "nesterov" or "ema" (Motley). See `FedOpt`."""

    optimizer: Optimizer = "heavy_ball"


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """Reddi et al. 2021. Motley's cross-device preset is `bias_correction="keras"`, `v0=0`. See `FedOpt`."""

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
