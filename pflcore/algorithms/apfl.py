"""Methods that mix a global and a personal model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import FedAvg, Payload, Tensors, only_sgd
from pflcore.nn.mode import context
from pflcore.ops.kinds import NonNegative, Share, Weighting
from pflcore.train import Training
from pflcore.train.bridge import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class APFL(FedAvg):
    """Deng et al. 2020, Algorithm 1: client i uses `alpha_i v_i + (1 - alpha_i) w`, w global, v_i and alpha_i its own.

    server: x [P] · client: v [P], alpha [1] (and w [P] with `evaluate_on="client"`) · down: x [S, P] · up: delta [S, P] (1 model).
    On one minibatch, from the old values throughout: `w -= lr * grad(w)`, `v -= lr * alpha * grad(mixed)` and, at the first step of a
    round, `alpha -= alpha_lr * <v - w, grad(mixed)>`, kept within [0, 1]. v starts as w.

    Deviations, each with another reading as an option: the paper adapts alpha once a round and does not say at which step; the authors'
    code mixes outputs (`mix="logits"`) and adds 0.02 alpha to alpha's gradient (`alpha_decay=0.02`). Batch norm's running statistics
    are those of the mixed model, which is the one that is used. Momentum and weight decay apply to w and v.
    """

    buffers: ClassVar[tuple[str, ...]] = ("local",)  # those of the client's own mixture

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    alpha: Share = 0.5  # share of the personal model at the start: 0 global, 1 local
    adaptive: bool = True  # learn alpha
    alpha_lr: NonNegative | None = None  # alpha's step size; None: that of training
    alpha_decay: NonNegative = 0.0  # pull of alpha towards 0
    mix: Literal["weights", "logits"] = "weights"  # what is mixed: the models (the paper) or their scores
    evaluate_on: Literal["server", "client"] = "server"  # with which w: the server's newest, or the client's own of its last round

    def check_training(self, training: Training) -> None:
        only_sgd(self, training, "takes steps of SGD along the gradients of two models")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        own = {"v": net.w0, "alpha": torch.full_like(net.w0[:1], self.alpha)}
        return {"x": net.w0}, {**own, "w": net.w0} if self.evaluate_on == "client" else own

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        x, t = down["x"], local.setting.training
        P = x.shape[1]
        alpha_lr = local.lr if self.alpha_lr is None else self.alpha_lr
        apart = self.mix == "weights" and not local.net.buffer_names  # two gradients of the model's own loss, which kernels may take

        def update(rows: Tensors, grad: Callable[..., Tensor], k: int) -> Tensors:
            row, learns = rows["row"], self.adaptive and k == 0  # [s, 2 P + 1]: w | v | alpha
            w, v, alpha = row.split([P, P, 1], 1)
            if apart:
                g, mixed = grad(w.contiguous()), grad(torch.lerp(w, v, alpha))
                slope = ((v - w) * mixed).sum(1, keepdim=True) if learns else alpha
                both = g, mixed.mul_(alpha)
            else:
                *both, slope = grad(row).split([P, P, 1], 1)
            buffers = rows["momentum"].split(P, 1) if t.momentum else (None, None)
            for model, g, buffer in zip((w, v), both, buffers, strict=True):
                ops.sgd_step_(model, g, local.lr, momentum=t.momentum, buffer=buffer, weight_decay=t.weight_decay)
            if learns:
                alpha.copy_((alpha - alpha_lr * (slope + self.alpha_decay * alpha)).clamp(0, 1))
            return {}  # all of it in place

        rows = {"row": torch.cat([x, own["v"], own["alpha"]], 1)}
        if t.momentum:
            rows["momentum"] = torch.zeros_like(rows["row"][:, : 2 * P])
        w, v, alpha = local.each_batch(rows, update, loss=None if apart else self.joint_loss)["row"].split([P, P, 1], 1)
        new = {"v": v, "alpha": alpha}
        return {**new, "w": w} if self.evaluate_on == "client" else new, {"delta": w - x}

    def joint_loss(self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """Its gradient in w is that of w's loss, in v and alpha that of the mixture's; `row` [2 P + 1] is w | v | alpha."""
        w, v, alpha = row.split([net.size, net.size, 1])
        before = context.buffers
        own = net.loss(w, x, y)
        context.buffers = before  # the statistics that stay are the mixture's
        return own + net.criterion(self.mixed(net, w.detach(), v, alpha, x), y)

    def mixed(self, net: Net, w: Tensor, v: Tensor, alpha: Tensor, x: Tensor) -> Tensor:
        if self.mix == "weights":
            return net(alpha * v + (1 - alpha) * w, x)
        return alpha * net(v, x) + (1 - alpha) * net(w, x)

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": own["w"] if self.evaluate_on == "client" else down["x"], "v": own["v"], "alpha": own["alpha"]}

    def predict(self, view: Tensors, net: Net, x: Tensor) -> Tensor:
        """Scores of the model `alpha v + (1 - alpha) w`; where the option mix is "logits", the same mixture of both models' scores."""
        return self.mixed(net, view["w"], view["v"], view["alpha"], x)
