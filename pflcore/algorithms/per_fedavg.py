"""Per-FedAvg: a shared model that is a good start, one gradient step from everybody's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors, Traits, plain_steps
from pflcore.check import NonNegative, Positive, Whole
from pflcore.nn.mode import context, forward_mode
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """Fallah et al. 2020, Algorithm 1: w minimises sum_i share_i f_i(w - alpha grad f_i(w)).

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model). The server is
    FedAvg's.
    A local step takes minibatches D, D', D'' of independent shuffles: u = w - alpha grad f(w; D), v
    = grad f(u; D'), then
    w <- w - beta v ("fo"), w - beta (v - alpha (grad f(w + delta v; D'') - grad f(w - delta v;
    D'')) / (2 delta)) ("hf"), or
    w - beta (v - alpha H(w; D'') v) ("exact", by automatic differentiation; on every engine alike).
    Evaluated is x after `steps` such inner steps on the client's training data, never on test data.
    Deviations: `scaled` divides delta by |v|, because w + delta v and w - delta v are equal in
    float32 where v is small (False is the
    paper's); clients weigh by their samples (the paper: alike; `weighting="uniform"`). alpha and
    beta are the run's learning rate unless
    given; its momentum and weight decay play no part. With batch norm each of the gradients updates
    the statistics, but for the
    exact variant's H v.
    """

    # first-order, Hessian-free (finite differences) or exact
    variant: Literal["fo", "hf", "exact"] = "fo"
    alpha: NonNegative | None = None  # the inner step size; None: the run's
    beta: NonNegative | None = None  # the outer step size; None: the run's
    delta: Positive = 1e-3  # of the finite difference
    scaled: bool = True  # delta / |v| instead of delta
    steps: Whole = 1  # inner steps at evaluation

    @property
    def traits(self) -> Traits:
        why = "takes its paper's own steps of SGD"
        return super().traits._replace(only_sgd=why, no_clip_grad=why)

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        plain_steps(self, clients)
        alpha, beta = (clients.lr if v is None else v for v in (self.alpha, self.beta))

        def update(rows: Tensors, grad: Callable[..., Tensor], taken: Tensor) -> Tensors:
            w = rows["w"]
            v = grad(w - alpha * grad(w), 1)
            return {"w": w - beta * (v - alpha * self.curvature(w, v, grad))}

        x, objective = down["x"], Objective()
        if self.variant == "exact":
            # torch 2.15 refuses gradients of gradients through batch norm under vmap
            objective = Objective(loss=along, alone=bool(clients.net.buffer_names))
        batches = 2 if self.variant == "fo" else 3
        fit = clients.each_batch({"w": x}, update, objective, batches=batches)
        return own, {"delta": fit.w - x}, fit

    def curvature(self, w: Tensor, v: Tensor, grad: Callable[..., Tensor]) -> Tensor:
        """H v [s, P] on the step's third minibatch, as the variant has it."""
        if self.variant == "fo":
            return torch.zeros_like(v)
        if self.variant == "exact":
            return grad(torch.cat([w, v], 1), 2)[:, : w.shape[1]]
        delta: Tensor | float = self.delta
        if self.scaled:
            delta = self.delta / v.norm(dim=1, keepdim=True).clamp(min=1e-30)
        return (grad(w + delta * v, 2) - grad(w - delta * v, 2)) / (2 * delta)

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        if not self.steps:
            return {"w": down["x"]}
        alpha = clients.lr if self.alpha is None else self.alpha

        def update(rows: Tensors, grad: Callable[..., Tensor], taken: Tensor) -> Tensors:
            return {"w": rows["w"] - alpha * grad(rows["w"])}

        fit = clients.each_batch({"w": down["x"]}, update, steps=self.steps, stream="adapt")
        return {"w": fit.w, "batch_norm": fit.buffers}


def along(net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
    """The loss at w [P]; for a row [w | v] of twice the length a number whose gradient in w is H(w)
    v.

    H v is made inside, gradient of gradient: differentiating a gradient from outside `vmap` is
    wrong for batch norm (torch 2.13).
    """
    if len(w) == net.size:
        return net.loss(w, x, y)
    row, v = w.detach().split(net.size)
    # what these passes do to the statistics stays inside
    with forward_mode(context.train, context.buffers, context.seed):
        slope = torch.func.grad(lambda u: net.loss(u, x, y))
        product: Tensor = torch.func.vjp(slope, row)[1](v)[0]  # type: ignore[misc]
    return (w[: net.size] * product).sum()
