"""Models of which a part is shared and a part is the client's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore.algorithms.base import FedAvg, Payload, Tensors
from pflcore.data.ragged import onto
from pflcore.nn.mode import forward_mode
from pflcore.ops.kinds import NonNegative
from pflcore.train import Local
from pflcore.train.losses import REGRESSION, binary_cross_entropy, cross_entropy, hinge, loss_name
from pflcore.train.net import Net

CHECKED: WeakSet[Net] = WeakSet()  # models that are their head on their features


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """Chen and Chao 2022, FedRoD (linear): a generic model, and a personal head h that adds its scores to the generic ones.

    server: x [P] (body f and generic head g) · client: its head h · down: x [S, P] · up: delta [S, P] (1 model; h stays).
    The generic model minimises balanced softmax, CE(g(z) + gamma log n_c), z = f(x) and n_c the client's samples of class c; the head
    minimises CE(g(z) + h(z)) with g(z) and z detached, so that it moves nothing but h. Both are trained at once, by the run's SGD.
    Predicted is g(z) + h(z). A client without class c gives it no generic score while it trains. CE is the run's loss, another one of
    class scores as well. Decision where the paper is silent: h starts at zero, so that a new client's model is the generic one;
    `head="copy"` starts at g.
    """

    gamma: NonNegative = 1.0  # strength of the balancing; 0 is cross-entropy
    head: Literal["zeros", "copy"] = "zeros"  # how h starts: "zeros" or as a "copy" of the generic head's initial weights

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        if net.criterion in (*REGRESSION, hinge, binary_cross_entropy):
            raise ValueError(f"loss: FedRoD balances the scores of classes; expected a loss of those, got {loss_name(net.criterion)}.")
        h = net.w0[net.head_slice]
        return {"x": net.w0}, {"h": h if self.head == "copy" else torch.zeros_like(h)}

    def loss(self, net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """The sum of both losses at a row [x | h]."""
        z = net.features(w[: net.size], x)
        generic, personal = net.head(w[: net.size], z), net.head(w[net.size :], z.detach())
        n = F.pad(extra["n"], (0, generic.shape[1] - len(extra["n"])))  # the model may know more classes than the data has
        prior = (n**self.gamma).log()
        if net.criterion is not cross_entropy:
            prior = prior.clamp(min=-100)  # as good as none, and finite for a loss that looks at every class, as with label smoothing
        prior = prior.view(-1, *[1] * (generic.dim() - 2))  # [B, C, T] are scores of T steps
        return net.criterion(generic + prior, y) + net.criterion(generic.detach() + personal, y)

    def check(self, local: Local) -> None:
        """ValueError where the model is not its head on its features."""
        net, x = local.net, local.setting.data.x[:2]
        row = net.w0 + torch.linspace(-0.1, 0.1, net.size).to(net.w0)
        flipped = row.clone()
        flipped[net.head_slice] *= -1  # scores of both signs, else a ReLU behind the head may not show
        same = not any(name.startswith(f"{net.head_name}.") for name in net.buffer_names)
        try:
            with torch.no_grad(), forward_mode(False, net.b0):
                for r in (row, flipped) if same else ():
                    same = same and torch.allclose(net.head(r, net.features(r, x)), net(r, x), rtol=1e-3, atol=1e-4)
        except (RuntimeError, TypeError, IndexError, ValueError):  # whatever such a model says
            same = False
        if not same:
            raise ValueError(
                "model: FedRoD adds a second head's scores, so a head must be the last that the model does, with weights of its own and no "
                f"statistics, and {net.head_name!r} is not so; name it with Net(..., head=...)."
            )
        CHECKED.add(net)

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        if local.net not in CHECKED:
            self.check(local)
        x = down["x"]
        n = onto(local.counts, x.device).to(x.dtype)
        w = local.fit(torch.cat([x, own["h"]], 1), loss=self.loss, extra={"n": n}).w
        return {"h": w[:, x.shape[1] :]}, {"delta": w[:, : x.shape[1]] - x}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": down["x"], "h": own["h"]}

    def predict(self, view: Tensors, net: Net, x: Tensor) -> Tensor:
        """The scores of w plus those that its head gives, with the parameters h, on the same features."""
        z = net.features(view["w"], x)
        return net.head(view["w"], z) + net.head(view["h"], z)
