"""FedALA: each client learns, element by element, how much of the global model it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import annotated_types as at
import torch
from torch import Tensor

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors, Traits
from pflcore.check import Count, Fraction, NonNegative, Whole
from pflcore.data.federation import Federation
from pflcore.data.ragged import Ragged, onto, starts
from pflcore.train import Clients, Fit, Net, Objective, Setting
from pflcore.train.random import client_seeds, shuffles


@dataclass(frozen=True)
class FedALA(FedAvg):
    """Zhang et al. 2023, FedALA (Algorithm 1): a round starts at theta_i + (x - theta_i) * W_i,
    with W_i in [0, 1] learned on own data.

    server: x [P] · client: theta [P], W [Q], begun [1] · down: x (1 model) · up: delta = theta - x
    (1 model).
    W is of the last `layers` parameter tensors (Q columns); the lower layers are x's (Eq. 4).
    On a random part `sample` of a client's samples, drawn once a round,
    W <- clip(W - eta * grad f_i(start) * (x - theta), 0, 1) for each minibatch (Eq. 5), from W = 1:
    the first time until the last `window` losses have a standard deviation below `threshold`, and
    one epoch in every later round. Then the client trains the start as FedAvg does. Evaluated is
    the start with the newest x, its W learned on in the same way and thrown away.

    Decisions where the paper is silent: a loss is the mean over an epoch's minibatches; the first
    time ends after `most` epochs at the latest; batch norm's statistics stay while W is learned.
    Until its first round a client is served x.
    """

    layers: Whole = 0  # W is for so many of the last parameter tensors; 0: all
    eta: NonNegative = 1.0  # step size of W
    sample: Fraction = 0.8  # part of the client's samples that W is learned on
    window: Annotated[int, at.Ge(2)] = 10  # the first time ends where so many losses ...
    threshold: NonNegative = 0.1  # ... deviate by less
    most: Count = 100  # epochs of the first time at most

    @property
    def traits(self) -> Traits:
        return super().traits._replace(batch_norm=super().traits.batch_norm[::-1])

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        ones = net.w0.new_ones(1, sum(net.sizes[-self.layers :]))
        return {"theta": down["x"], "W": ones, "begun": ones.new_zeros(1, 1)}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        start, new = self.mixed(down["x"], own, clients)
        fit = clients.fit(start)
        return {"theta": fit.w, **new}, {"delta": fit.w - down["x"]}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": self.mixed(down["x"], own, clients)[0]}

    def mixed(self, x: Tensor, own: Tensors, clients: Clients) -> tuple[Tensor, Tensors]:
        """Where the clients start [S, P], and what they know then of W."""
        theta, W, begun = own["theta"], own["W"].clone(), own["begun"]
        low = x.shape[1] - W.shape[1]
        gap = (x - theta)[:, low:]
        extra = {"low": x[:, :low], "theta": theta[:, low:], "gap": gap}
        learns = gap.ne(0).any(1)
        first, losses = learns & (begun[:, 0] == 0), W.new_zeros(len(W), 0, dtype=torch.float64)
        begun = torch.where(learns[:, None], 1, begun)
        part = replace(clients, setting=sampled(clients, self.sample))
        for epoch in range(self.most):
            if not learns.any():
                break
            more = Objective(loss=self.loss, extra={k: v[learns] for k, v in extra.items()})
            some, rows, stream = part.take(learns), {"W": W[learns]}, f"W {epoch}"
            fit = some.each_batch(rows, self.step, more, epochs=1, stream=stream)
            W[learns] = fit.rows["W"]
            new = losses.new_zeros(len(W), 1)
            new[learns, 0] = fit.loss
            losses = torch.cat([losses, new], 1)
            spread = losses[:, -self.window :].std(1, correction=0)
            goes_on = (spread >= self.threshold) | (epoch < self.window)
            learns = first & learns & goes_on
        start = torch.cat([extra["low"], extra["theta"] + gap * W], 1)
        return start, {"W": W, "begun": begun}

    def step(self, rows: Tensors, grad: Callable[..., Tensor], taken: Tensor) -> Tensors:
        """Eq. 5, for rows W [s, Q]."""
        return {"W": (rows["W"] - self.eta * grad(rows["W"])).clamp(0, 1)}

    def loss(self, net: Net, W: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """f_i at the start that W [Q] makes; its gradient in W is that of Eq. 5."""
        return net.loss(torch.cat([extra["low"], extra["theta"] + extra["gap"] * W]), x, y)


class _Part(Federation):
    def __post_init__(self) -> None:
        """Nothing is checked: it is a part of one that was."""


def sampled(clients: Clients, fraction: float) -> Setting:
    """The setting with a random `fraction` of each of these clients' training samples (at least
    one) in this round, and nobody else's."""
    setting, ids = clients.setting, clients.ids.sort().values
    data, lists = setting.data, setting.data.lists("train").take(ids)
    count = (fraction * lists.size).long().clamp(min=1)
    if clients.net.buffer_names:
        # batch norm cannot train on one sample: no batch of one that the whole list does not have
        t = setting.training
        lone = (count == 1) | (count % t.batch_size == 1) & (not t.drop_last)
        fewer = torch.where(count > 1, count - 1, lists.size.clamp(max=2))
        count = torch.where(lone, fewer, count)
    seeds = client_seeds(ids.numpy(), setting.seed, clients.round, "sample")
    order = torch.from_numpy(shuffles(seeds, lists.size.numpy()))
    places = (lists.begin[:-1, None] + order)[torch.arange(order.shape[1]) < count[:, None]]
    size = torch.zeros(data.n, dtype=torch.int64).index_copy(0, ids, count)
    flat = lists.flat[onto(places, lists.flat.device)]
    index = {"train": Ragged(flat, starts(size))}
    args = (data.x, data.y, index, data.classes, data.relabel, data.name)
    return setting._replace(data=_Part(*args, fields=data.fields))
