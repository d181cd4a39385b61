"""Models of which a part is shared and a part is the client's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors
from pflcore.check import NonNegative
from pflcore.data.ragged import onto
from pflcore.nn.mode import forward_mode
from pflcore.train import Clients, Fit, Net, Objective
from pflcore.train.losses import REGRESSION, binary_cross_entropy, cross_entropy, hinge, loss_name

CHECKED: WeakSet[Net] = WeakSet()  # models that are their head on their features


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """Chen and Chao 2022, FedRoD (linear): a generic model, and a personal head h that adds its
    scores to the generic ones.

    server: x [P] (body f and generic head g) · client: its head h · down: x [S, P] · up: delta
    [S, P] (1 model; h stays).
    The generic model minimises balanced softmax, CE(g(z) + gamma log n_c), z = f(x) and n_c the
    client's samples of class c; the head minimises CE(g(z) + h(z)) with g(z) and z detached, so
    that it moves nothing but h. Both are trained at once, by the run's SGD. Predicted is
    g(z) + h(z). A client without class c gives it no generic score while it trains. CE is the run's
    loss, another one of class scores as well. Decision where the paper is silent: h starts at zero,
    so that a new client's model is the generic one; `head="copy"` starts at g.
    """

    gamma: NonNegative = 1.0  # strength of the balancing; 0 is cross-entropy
    head: Literal["zeros", "copy"] = "zeros"  # how h starts: as zeros, or as the initial g

    def initial(self, net: Net) -> Tensors:
        if net.criterion in (*REGRESSION, hinge, binary_cross_entropy):
            raise ValueError(
                "loss: FedRoD balances the scores of classes; expected a loss of those, got "
                f"{loss_name(net.criterion)}."
            )
        return super().initial(net)

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        h = net.w0[None, net.head_slice]
        return {"h": h if self.head == "copy" else torch.zeros_like(h)}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        if clients.net not in CHECKED:
            check_head(clients)
        x = down["x"]
        n = onto(clients.counts, x.device).to(x.dtype)
        fit = clients.fit(torch.cat([x, own["h"]], 1), Objective(loss=self.loss, extra={"n": n}))
        w, h = fit.w.split([x.shape[1], own["h"].shape[1]], 1)
        return {"h": h}, {"delta": w - x}, fit

    def loss(self, net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """The sum of both losses at a row x | h [P + H]."""
        w, h = w[: net.size], w[net.size :]
        z = net.features(w, x)
        generic, personal = net.head(w, z), net.head(h, z.detach())
        more = generic.shape[1] - len(extra["n"])  # the model may know more classes than the data
        prior = (F.pad(extra["n"], (0, more)) ** self.gamma).log()
        if net.criterion is not cross_entropy:
            # as good as none, and finite for a loss of every class, as with label smoothing
            prior = prior.clamp(min=-100)
        prior = prior.view(-1, *[1] * (generic.dim() - 2))  # [B, C, T] are scores of T steps
        both = net.criterion(generic.detach() + personal, y)
        return net.criterion(generic + prior, y) + both

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": down["x"], "h": own["h"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """The scores of w [P] plus those that its head gives, with the parameters h [H], on the
        same features."""
        z = net.features(model["w"], x)
        return net.head(model["w"], z) + net.head(model["h"], z)


def check_head(clients: Clients) -> None:
    """ValueError where the model is not its head on its features."""
    net, x = clients.net, clients.setting.data.x[:2]
    row = net.w0 + torch.linspace(-0.1, 0.1, net.size, dtype=net.w0.dtype, device=net.w0.device)
    flipped = row.clone()
    flipped[net.head_slice] *= -1  # scores of both signs: a ReLU behind the head may not show else

    def same(row: Tensor) -> bool:
        return torch.allclose(net.head(row, net.features(row, x)), net(row, x), 1e-3, 1e-4)

    fits = not any(name.startswith(f"{net.head_name}.") for name in net.buffer_names)
    try:
        with torch.no_grad(), forward_mode(False, net.b0):
            fits = fits and same(row) and same(flipped)
    except (RuntimeError, TypeError, IndexError, ValueError):  # whatever such a model says
        fits = False
    if not fits:
        raise ValueError(
            "model: FedRoD adds a second head's scores, so a head must be the last that the model "
            f"does, with weights of its own and no statistics, and {net.head_name!r} is not so; "
            "name it with Net(..., head=...)."
        )
    CHECKED.add(net)
