"""Methods that mix a global and a personal model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors, Traits
from pflcore.check import NonNegative, Share, Weighting
from pflcore.nn.mode import context
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class APFL(FedAvg):
    """Deng et al. 2020, Algorithm 1: client i uses `alpha_i v_i + (1 - alpha_i) w`, w global, v_i
    and alpha_i its own.

    server: x [P] · client: v [P], alpha [1] (and w [P] with `evaluate_on="client"`) · down: x [S,
    P] · up: delta [S, P] (1 model).
    On one minibatch, from the old values throughout: `w -= lr * grad(w)`, `v -= lr * alpha *
    grad(mixed)` and, at the first step of a
    round, `alpha -= alpha_lr * <v - w, grad(mixed)>`, kept within [0, 1]. v starts as w.

    Deviations, each with another reading as an option: the paper adapts alpha once a round and does
    not say at which step; the authors' code mixes outputs (`mix="logits"`) and adds 0.02 alpha to
    alpha's gradient (`alpha_decay=0.02`). Batch norm's running statistics are those of the mixed
    model, which is the one that is used. Momentum and weight decay apply to w and v.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    alpha: Share = 0.5  # share of the personal model at the start: 0 global, 1 local
    adaptive: bool = True  # learn alpha
    alpha_lr: NonNegative | None = None  # alpha's step size; None: that of training
    alpha_decay: NonNegative = 0.0  # pull of alpha towards 0
    mix: Literal["weights", "logits"] = "weights"  # the models (the paper), or their scores
    evaluate_on: Literal["server", "client"] = "server"  # with the server's newest w, or the own

    @property
    def traits(self) -> Traits:
        why = "takes steps of SGD along the gradients of two models"
        # statistics are those of the client's own mixture
        return super().traits._replace(batch_norm=("local",), only_sgd=why, no_clip_grad=why)

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        w0 = net.w0[None]
        own = {"v": w0, "alpha": torch.full_like(w0[:, :1], self.alpha)}
        return {**own, "w": w0} if self.evaluate_on == "client" else own

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        x, t, lr = down["x"], clients.setting.training, clients.lr
        P = x.shape[1]
        alpha_lr = lr if self.alpha_lr is None else self.alpha_lr
        # two gradients of the model's own loss, which kernels may take
        apart = self.mix == "weights" and not clients.net.buffer_names

        def update(rows: Tensors, grad: Callable[..., Tensor], taken: Tensor) -> Tensors:
            row, learns = rows["row"], self.adaptive and int(taken[0]) == 0  # [s, 2 P + 1]
            w, v, alpha = row.split([P, P, 1], 1)
            if apart:
                g, mixed = grad(w.contiguous()), grad(torch.lerp(w, v, alpha))
                slope = ((v - w) * mixed).sum(1, keepdim=True) if learns else alpha
                both = g, mixed.mul_(alpha)
            else:
                *both, slope = grad(row).split([P, P, 1], 1)
            buffers = rows["momentum"].split(P, 1) if t.momentum else (None, None)
            for model, g, buffer in zip((w, v), both, buffers, strict=True):
                ops.sgd_step_(
                    model, g, lr, momentum=t.momentum, buffer=buffer, weight_decay=t.weight_decay
                )
            if learns:
                slope = slope + self.alpha_decay * alpha
                alpha.copy_((alpha - alpha_lr * slope).clamp(0, 1))
            return {}  # all of it in place

        rows = {"row": torch.cat([x, own["v"], own["alpha"]], 1)}
        if t.momentum:
            rows["momentum"] = torch.zeros_like(rows["row"][:, : 2 * P])
        fit = clients.each_batch(rows, update, Objective(loss=None if apart else self.joint_loss))
        w, v, alpha = fit.rows["row"].split([P, P, 1], 1)
        new = {"v": v, "alpha": alpha}
        return {**new, "w": w} if self.evaluate_on == "client" else new, {"delta": w - x}, fit

    def joint_loss(self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """Its gradient in w is that of w's loss, in v and alpha that of the mixture's; `row`
        [2 P + 1] is w | v | alpha."""
        w, v, alpha = row.split([net.size, net.size, 1])
        before = context.buffers
        own = net.loss(w, x, y)
        context.buffers = before  # the statistics that stay are the mixture's
        return own + net.criterion(self.mixed(net, w.detach(), v, alpha, x), y)

    def mixed(self, net: Net, w: Tensor, v: Tensor, alpha: Tensor, x: Tensor) -> Tensor:
        """The mixture's scores on `x` [B, ...]."""
        if self.mix == "weights":
            return net(alpha * v + (1 - alpha) * w, x)
        return alpha * net(v, x) + (1 - alpha) * net(w, x)

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        w = own["w"] if self.evaluate_on == "client" else down["x"]
        return {"w": w, "v": own["v"], "alpha": own["alpha"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Scores of the model `alpha v + (1 - alpha) w` [P]; where the option mix is "logits", the
        same mixture of both models' scores."""
        return self.mixed(net, model["w"], model["v"], model["alpha"], x)
