"""Clients that learn how to mix the global model and their own.

An APFL client learns one weight for the whole model, a FedALA client one for each
parameter.

Symbols:

- S clients are in the cohort, s of them take a step together; a model has P parameters.
- x is the model that a client downloads, w its copy in training.
- APFL's v [S, P] are personal models, alpha [S, 1] their weights in the mixtures.
- FedALA's theta [S, P] are the clients' models, W [S, Q] the weights of the last Q
  parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import annotated_types as at
import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import (
    GradientFn,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    algorithm_options,
)
from pflcore.check import (
    Fraction,
    NonNegativeFloat,
    PositiveInt,
    UnitFloat,
    Weighting,
)
from pflcore.data._ragged import Ragged
from pflcore.nn._context import forward_state
from pflcore.train import Clients, Net, Objective
from pflcore.train._context import TrainContext
from pflcore.train._random import client_seeds, client_shuffles

AtLeastTwo = Annotated[int, at.Ge(2)]


@algorithm_options
class APFL(FedAvg):
    """APFL (Deng et al. 2020): each client mixes the global model and its own.

    server: x [P] · client: v [P], alpha [1] · down: x [S, P] · up: delta [S, P] (1
    model).

    Algorithm 1: client i uses `mixed = alpha_i v_i + (1 - alpha_i) w`. w is the global
    model; v_i and alpha_i are the client's own. v starts as w. A step takes one
    minibatch, and the old values throughout:

    - `w -= lr * grad(w)`
    - `v -= lr * alpha * grad(mixed)`
    - at the first step of a round `alpha -= alpha_lr * <v - w, grad(mixed)>`, kept
      within [0, 1]

    Deviations, each with another reading as an option: the paper adapts alpha once a
    round and does not say at which step; the authors' code mixes outputs
    (`mix="logits"`) and adds 0.02 alpha to alpha's gradient (`alpha_decay=0.02`).

    Batch norm's running statistics are those of the mixed model, which is the one that
    is used. With `mix="logits"` they are the same mixture of both models' statistics.
    Momentum and weight decay apply to w and v.

    The other options are those of `FedAvg`.

    Args:
        weighting: Shares of the clients in the mean: "uniform" as in the paper,
            or "samples".
        alpha: Weight of the personal model at the start: 0 is the global model alone, 1
            the personal one.
        adaptive: True learns alpha; False keeps its start.
        alpha_lr: Step size of alpha; None takes that of the training.
        alpha_decay: Strength of a pull of alpha towards 0. At 0, as in the paper, there
            is no pull; the authors' code has 0.02.
        mix: Mixture of a client: "weights" mixes the two models, as in the
            paper; "logits" mixes their scores.
    """

    weighting: Weighting = "uniform"
    alpha: UnitFloat = 0.5
    adaptive: bool = True
    alpha_lr: NonNegativeFloat | None = None
    alpha_decay: NonNegativeFloat = 0.0
    mix: Literal["weights", "logits"] = "weights"

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        reason = "takes steps of SGD along the gradients of two models"
        return super().traits._replace(
            batch_norm=("local",),  # statistics are those of the client's own mixture
            fixed_training={"local_optimizer": reason, "clip_grad": reason},
        )

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        w0 = net.w0[None]
        return {"v": w0, "alpha": torch.full_like(w0[:, :1], self.alpha)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        training = clients.context.training
        lr = clients.lr
        alpha_lr = lr if self.alpha_lr is None else self.alpha_lr
        # Without batch norm two separate gradients of the model's own loss do: kernels
        # may compute them.
        separate = self.mix == "weights" and not clients.net.buffer_names
        gradients = _separate_gradients if separate else _joint_gradients

        # A step works on the rows in place: nothing is copied.
        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            learns = self.adaptive and int(taken[0]) == 0
            by_w, by_v, slope = gradients(rows, grad, learns)
            for key, by_row in (("w", by_w), ("v", by_v)):
                ops.sgd_step_(
                    rows[key],
                    by_row,
                    lr,
                    momentum=training.momentum,
                    buffer=rows.get(f"old {key}"),
                    weight_decay=training.weight_decay,
                )
            if slope is not None:
                alpha = rows["alpha"]
                alpha.sub_(alpha_lr * (slope + self.alpha_decay * alpha)).clamp_(0, 1)
            return {}

        rows = {"w": x, **client_state}
        if training.momentum:
            rows |= {"old w": torch.zeros_like(x), "old v": torch.zeros_like(x)}
        loss = None if separate else self.joint_loss
        objective = Objective(loss=loss)
        fit = clients.each_batch(rows, update, objective)
        new_state = {key: fit.rows[key] for key in client_state}
        return new_state, {"delta": fit.w - x}, fit

    def joint_loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        """Sum of the losses of w and of the mixture.

        `row` [2 P + 1] is w | v | alpha. The gradient in w is that of w's loss, and in
        v and alpha that of the mixture's.
        """
        w, v, alpha = row.split([net.size, net.size, 1])
        before = forward_state.buffers
        loss_of_w = net.loss(w, x, y)
        forward_state.buffers = before  # the statistics that stay are the mixture's
        scores = self.mixture_scores(net, w.detach(), v, alpha, x)
        return loss_of_w + net.batch_loss(scores, y)

    def mixture_scores(
        self, net: Net, w: Tensor, v: Tensor, alpha: Tensor, x: Tensor
    ) -> Tensor:
        """The mixture's scores on `x` [B, ...].

        In training, batch norm's statistics make one move: where scores are mixed, both
        models move those from before, and the results are mixed as the scores are.
        """
        if self.mix == "weights":
            return net(alpha * v + (1 - alpha) * w, x)
        before = forward_state.buffers
        scores_of_v = net(v, x)
        after_v = forward_state.buffers
        forward_state.buffers = before
        scores_of_w = net(w, x)
        if forward_state.train and net.buffer_names:
            share = alpha.detach()
            after_w = forward_state.buffers
            forward_state.buffers = share * after_v + (1 - share) * after_w
        return alpha * scores_of_v + (1 - alpha) * scores_of_w

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        alpha = client_state["alpha"]
        can_train = to_device(clients.have_samples[:, None], alpha.device)
        return {"w": down["x"], **client_state, "alpha": alpha * can_train}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Scores of the model `alpha v + (1 - alpha) w` [P].

        Where the option mix is "logits", the same mixture of both models' scores.
        """
        return self.mixture_scores(net, model["w"], model["v"], model["alpha"], x)


# Gradients [s, P] of w and of v, and the slope [s, 1] of alpha; None where alpha does
# not learn in this step.
MixtureGradients = tuple[Tensor, Tensor, Tensor | None]


def _separate_gradients(
    rows: Tensors, grad: GradientFn, learns: bool
) -> MixtureGradients:
    """APFL's gradients by two passes, of w and of the mixture."""
    w = rows["w"]
    v = rows["v"]
    alpha = rows["alpha"]
    by_w = grad(w)
    by_mixed = grad(torch.lerp(w, v, alpha))
    slope = ((v - w) * by_mixed).sum(1, keepdim=True) if learns else None
    by_v = by_mixed.mul_(alpha)
    return by_w, by_v, slope


def _joint_gradients(rows: Tensors, grad: GradientFn, learns: bool) -> MixtureGradients:
    """APFL's gradients by one pass, of `APFL.joint_loss`."""
    size = rows["w"].shape[1]
    joint = grad(torch.cat([rows["w"], rows["v"], rows["alpha"]], 1))
    by_w, by_v, slope = joint.split([size, size, 1], 1)
    return by_w, by_v, slope if learns else None


@algorithm_options
class FedALA(FedAvg):
    """FedALA (Zhang et al. 2023): each client mixes two models, element by element.

    server: x [P] · client: theta [P], W [Q], begun [1] · down: x [S, P] (1 model) · up:
    delta [S, P] (1 model: theta - x).

    Algorithm 1: a round starts at `theta_i + (x - theta_i) * W_i`, with W_i in [0, 1]
    learned on the client's own data. Then the client trains that start as FedAvg does.
    W is for the last `layers` parameter tensors (Q columns); the lower layers are x's
    (Eq. 4).

    W is learned on a random part `sample` of a client's samples, drawn once a round. It
    starts at 1. Each minibatch takes the step `W <- clip(W - eta * grad f_i(start) * (x
    - theta), 0, 1)` (Eq. 5). The first time goes on until the last `window` losses have
    a standard deviation below `threshold`; every later round takes one epoch. A client
    is evaluated with the start from the newest x; the W for it is learned in the same
    way and thrown away.

    Decisions where the paper is silent: a loss is the mean over an epoch's minibatches;
    the first time ends after `max_epochs` epochs at the latest; batch norm's statistics
    stay while W is learned. Until its first round a client is evaluated with x.

    The other options are those of `FedAvg`.

    Args:
        layers: Number of the last parameter tensors that are mixed by W. None mixes
            all.
        eta: Step size of W.
        sample: Fraction of the client's training samples on which W is learned,
            above 0, at most 1.
        window: Number of the last losses that decide when the first learning of W ends,
            at least 2.
        threshold: Standard deviation of these losses below which the first learning of
            W ends.
        max_epochs: Most epochs of the first learning of W.
    """

    layers: PositiveInt | None = None
    eta: NonNegativeFloat = 1.0
    sample: Fraction = 0.8
    window: AtLeastTwo = 10
    threshold: NonNegativeFloat = 0.1
    max_epochs: PositiveInt = 100

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        return super().traits._replace(batch_norm=super().traits.batch_norm[::-1])

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        mixed_sizes = net.sizes
        if self.layers is not None:
            mixed_sizes = net.sizes[-self.layers :]
        ones = net.w0.new_ones(1, sum(mixed_sizes))
        return {"theta": down["x"], "W": ones, "begun": ones.new_zeros(1, 1)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        start, learned = self.start_models(down["x"], client_state, clients)
        fit = clients.fit(start)
        return {"theta": fit.w, **learned}, {"delta": fit.w - down["x"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": self.start_models(down["x"], client_state, clients)[0]}

    def start_models(
        self, x: Tensor, client_state: Tensors, clients: Clients
    ) -> tuple[Tensor, Tensors]:
        """The models [S, P] that clients train from, and their new mixing state.

        The state is W [S, Q], and "begun" [S, 1]: 1 from the first time on that the
        client learned W.
        """
        theta = client_state["theta"]
        W = client_state["W"].clone()
        lower = x.shape[1] - W.shape[1]  # parameters that are x's
        gap = (x - theta)[:, lower:]
        fixed = {"lower": x[:, :lower], "theta": theta[:, lower:], "gap": gap}
        begun = client_state["begun"]
        learns = gap.ne(0).any(1)  # without a gap W has no effect
        is_first_time = learns & (begun[:, 0] == 0)
        begun = torch.where(learns[:, None], 1, begun)
        context = subsample_training(clients, self.sample)
        clients = replace(clients, context=context)
        losses = W.new_zeros(len(W), 0, dtype=torch.float64)  # [S, epochs]
        for epoch in range(self.max_epochs):
            if not learns.any():
                break
            fixed_rows = {key: rows[learns] for key, rows in fixed.items()}
            W[learns], loss = self._train_mixture(
                W[learns], fixed_rows, clients.take(learns), epoch
            )
            losses = torch.cat([losses, losses.new_zeros(len(W), 1)], 1)
            losses[learns, -1] = loss
            deviation = losses[:, -self.window :].std(1, correction=0)
            goes_on = (deviation >= self.threshold) | (epoch < self.window)
            learns = is_first_time & learns & goes_on
        start = torch.cat([fixed["lower"], fixed["theta"] + gap * W], 1)
        return start, {"W": W, "begun": begun}

    def _train_mixture(
        self, W: Tensor, fixed: Tensors, clients: Clients, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """W [S, Q] after an epoch of Eq. 5, and the mean losses [S]."""

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            moved = rows["W"] - self.eta * grad(rows["W"])
            return {"W": moved.clamp(0, 1)}

        objective = Objective(loss=self.loss, extra=fixed)
        fit = clients.each_batch(
            {"W": W}, update, objective, epochs=1, stream=f"W {epoch}"
        )
        return fit.rows["W"], fit.loss

    def loss(self, net: Net, W: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """f_i at the start that W [Q] makes.

        Its gradient in W is that of Eq. 5.
        """
        upper = extra["theta"] + extra["gap"] * W
        return net.loss(torch.cat([extra["lower"], upper]), x, y)


def subsample_training(clients: Clients, fraction: float) -> TrainContext:
    """The context with a random part of each of these clients' training samples.

    The part is `fraction` of a client's samples, at least one, and drawn anew in every
    round. The context has no samples of other clients.
    """
    context = clients.context
    data = context.data
    ids = clients.ids.sort().values
    lists = data.lists("train").take(ids)
    count = (fraction * lists.size).long().clamp(min=1).minimum(lists.size)
    if clients.net.buffer_names:
        count = _without_single_samples(count, lists.size, context)
    seeds = client_seeds(ids.numpy(), context.seed, clients.round, "sample")
    order = torch.from_numpy(client_shuffles(seeds, lists.size.numpy()))
    is_drawn = torch.arange(order.shape[1]) < count[:, None]
    drawn = (lists.begin[:-1, None] + order)[is_drawn]
    size = torch.zeros(data.n, dtype=torch.int64).index_copy(0, ids, count)
    index = {"train": Ragged(lists.flat[drawn], size)}
    return replace(context, data=data._copy_with(index=index))


def _without_single_samples(
    count: Tensor,  # [S]
    available: Tensor,  # [S]
    context: TrainContext,
) -> Tensor:  # [S]
    """Numbers of samples [S] that leave no batch of a single sample.

    A client with one sample keeps it. Batch norm cannot train on one sample.
    """
    training = context.training
    single_left = (count % training.batch_size == 1) & (not training.drop_last)
    lone = (count == 1) | single_left
    fewer = torch.where(count > 1, count - 1, available.clamp(max=2))
    return torch.where(lone, fewer, count)
