"""FedALA: each client learns, element by element, how much of the global model it takes into its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from pflcore.algorithms.base import FedAvg, Payload, Tensors
from pflcore.algorithms.ditto import started
from pflcore.data.federation import Federation
from pflcore.data.ragged import Ragged, onto, starts
from pflcore.ops import kinds
from pflcore.ops.kinds import Count, Fraction, NonNegative, Whole
from pflcore.train import Local, Setting
from pflcore.train.net import Net
from pflcore.train.random import client_seeds, shuffles


@dataclass(frozen=True)
class FedALA(FedAvg):
    """Zhang et al. 2023, FedALA (Algorithm 1): a round starts at theta_i + (x - theta_i) * W_i, with W_i in [0, 1] learned on own data.

    server: x [P] · client: theta [P], W [Q], begun [1] · down: x (1 model) · up: delta = theta - x (1 model).
    W stands for the last `layers` parameter tensors (Q columns); the lower layers are x's (Eq. 4). On a random part `sample` of a client's
    samples, drawn once a round, W <- clip(W - eta * grad f_i(start) * (x - theta), 0, 1) for each minibatch (Eq. 5), from W = 1: the first
    time until the last `window` losses have a standard deviation below `threshold`, and one epoch in every later round. Then the client
    trains the start as FedAvg does. Evaluated is the start with the newest x, its W learned on in the same way and thrown away.

    Decisions where the paper is silent: a loss is the mean over an epoch's minibatches; the first time ends after `most` epochs at the
    latest; batch norm's statistics stay while W is learned. Until its first round a client is served x.
    """

    layers: Whole = 0  # W is for so many of the last parameter tensors; 0: all
    eta: NonNegative = 1.0  # step size of W
    sample: Fraction = 0.8  # part of the client's samples that W is learned on
    window: Annotated[int, kinds.whole(2)] = 10  # the first time ends where so many losses ...
    threshold: NonNegative = 0.1  # ... deviate by less
    most: Count = 100  # epochs of the first time at most

    buffers: ClassVar[tuple[str, ...]] = ("local", "average")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        ones = torch.ones_like(net.w0[: sum(net.sizes[-self.layers :])])
        return {"x": net.w0}, {"theta": net.w0, "W": ones, "begun": torch.zeros_like(ones[:1])}

    def loss(self, net: Net, W: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """f_i at the start that W [Q] makes; its gradient in W is that of Eq. 5."""
        return net.loss(torch.cat([extra["low"], extra["theta"] + extra["gap"] * W]), x, y)

    def mixed(self, x: Tensor, own: Tensors, local: Local) -> tuple[Tensor, Tensors]:
        """Where the clients start [S, P], and what they know then of W."""
        theta, W, begun = started(own["theta"], x, local), own["W"].clone(), own["begun"].clone()
        low = x.shape[1] - W.shape[1]
        extra = {"low": x[:, :low], "theta": theta[:, low:], "gap": (x - theta)[:, low:]}

        def update(rows: Tensors, grad: Callable[..., Tensor], k: int) -> Tensors:
            return {"W": (rows["W"] - self.eta * grad(rows["W"])).clamp(0, 1)}

        learns, setting = extra["gap"].ne(0).any(1), sampled(local, self.sample)
        first, losses = learns & (begun[:, 0] == 0), W.new_zeros(len(W), 0, dtype=torch.float64)
        begun[learns] = 1
        for epoch in range(self.most):
            at = learns.nonzero()[:, 0]
            if not len(at):
                break
            part = Local(setting, local.ids[at.cpu()], local.round, local.buffers[at])
            more = {k: v[at] for k, v in extra.items()}
            W[at] = part.each_batch({"W": W[at]}, update, loss=self.loss, extra=more, epochs=1, stream=f"W {epoch}")["W"]
            assert part.train_loss is not None
            losses = torch.cat([losses, torch.zeros_like(losses.new_empty(len(W), 1)).index_copy(0, at, part.train_loss[:, None])], 1)
            spread = losses[:, -self.window :].std(1, correction=0)
            learns = first & learns & ((spread >= self.threshold) | (epoch < self.window))
        return torch.cat([extra["low"], extra["theta"] + extra["gap"] * W], 1), {"W": W, "begun": begun}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        start, new = self.mixed(down["x"], own, local)
        theta = local.fit(start).w
        return {"theta": theta, **new}, {"delta": theta - down["x"]}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": self.mixed(down["x"], own, local)[0]}


class _Part(Federation):
    def __post_init__(self) -> None:
        """Nothing is checked: it is a part of one that was."""


def sampled(local: Local, fraction: float) -> Setting:
    """The setting with a random `fraction` of each of these clients' training samples (at least one) in this round, and nobody else's."""
    data, ids = local.setting.data, local.ids.sort().values
    lists = data.lists("train").take(ids)
    count = (fraction * lists.size).long().clamp(min=1)
    if local.net.buffer_names:  # batch norm cannot train on one sample: no batch of one that the whole list does not have
        t = local.setting.training
        lone = (count == 1) | (count % t.batch_size == 1) & (not t.drop_last)
        count = torch.where(lone, torch.where(count > 1, count - 1, lists.size.clamp(max=2)), count)
    order = torch.from_numpy(shuffles(client_seeds(ids.numpy(), local.setting.seed, local.round, "sample"), lists.size.numpy()))
    at = (lists.begin[:-1, None] + order)[torch.arange(order.shape[1]) < count[:, None]]
    size = torch.zeros(data.n, dtype=torch.int64).index_copy(0, ids, count)
    index = {"train": Ragged(lists.flat[onto(at, lists.flat.device)], starts(size))}
    return local.setting._replace(data=_Part(data.x, data.y, index, data.classes, data.relabel, data.name, fields=data.fields))
