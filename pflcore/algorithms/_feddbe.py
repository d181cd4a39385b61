"""FedDBE: a client's bias is an offset of its own, so shared features need have none.

Symbols: S clients are in the cohort; a model has P parameters; H features; z are the
features [B, H] of B samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Cohort,
    GradientFn,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    warn_unused_momentum,
)
from pflcore.check import Fraction, NonNegativeFloat
from pflcore.train import Clients, Net, Objective
from pflcore.train._clients import Update


@algorithm_options
class FedDBE(Algorithm):
    """FedDBE (Zhang et al. 2023): an offset for each client takes the bias of features.

    server: x [P], mean [H], known [] (1 once there is a mean) · client: v [H], its
    offset · down: x [S, P], mean [S, H], known [S] · up: delta [S, P], mean [S,
    H] (the r below).

    The client's scores are those of the head on z + v. It minimises its loss plus
    `kappa / 2` times the mean squared difference of r and `mean`, where r is a running
    mean of its features: `r <- (1 - momentum) r + momentum mean(z)` at each minibatch,
    from r = 0 at the start of its training. x and v take the same steps of SGD; the
    server averages x by samples, and v stays.

    The first round only prepares: clients train x without an offset, and the server
    keeps the mean by samples of the r that they end with. It leaves x as it was. In
    later rounds only the updates count.

    The rule is taken from the paper's abstract and first pages and from the authors'
    code, which PFLlib has, too. The defaults of kappa and momentum are those of its
    `run_me.sh`, for a CNN of four layers; in PFLlib nothing pulls unless kappa is
    given. With a momentum of .1 and few minibatches, r stays a part of the mean
    feature. Deviation from that code: where the first cohort is a part of the clients,
    the mean is that of its clients; there it is of all.

    Args:
        kappa: Weight of the pull of a client's mean feature towards the common mean.
        momentum: Share of a minibatch in the running mean; 1 takes each minibatch's
            mean feature alone.
        offset: Whether clients have an offset; without it v stays 0.
    """

    kappa: NonNegativeFloat = 50.0
    momentum: Fraction = 1.0
    offset: bool = True

    traits = Traits(
        batch_norm=("average", "local"),
        model_uploads={"mean": "down.mean"},
        fixed_training={
            "local_optimizer": "takes steps of SGD with the model and an offset",
            "clip_grad": "takes steps along gradients",
        },
        head_reason="adds an offset to the features",
    )

    def server_init_args(self, net: Net) -> Tensors:
        return {"x0": net.w0, "mean": net.w0.new_zeros(net.num_features)}

    def init(self, x0: Tensor, n: int, **more: Tensor) -> Tensors:
        return {"x": x0, "mean": more["mean"], "known": x0.new_zeros(())}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        count = len(cohort.ids)
        return {name: row.expand(count, *row.shape) for name, row in state.items()}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"v": torch.zeros_like(down["mean"])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        warn_unused_momentum(self, clients)
        x = down["x"]
        v = client_state["v"]
        # The running mean r is a part of the row, so that the loss sees it.
        rows = {"w": torch.cat([x, v, torch.zeros_like(v)], 1)}
        extra = {"mean": down["mean"], "known": down["known"]}
        fit = clients.each_batch(
            rows, self.make_step(clients), Objective(loss=self.loss, extra=extra)
        )
        w, v, r = fit.w.split([x.shape[1], v.shape[1], v.shape[1]], 1)
        return {"v": v}, {"delta": w - x, "mean": r}, fit

    def make_step(self, clients: Clients) -> Update:
        """The step that each minibatch takes: SGD of x and v, and the running mean."""
        num_features = clients.net.num_features

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            slope = grad(rows["w"])
            factor = slope.new_full((slope.shape[1],), clients.lr)
            # The loss's gradient by r is r - mean(z), so this moves r towards mean(z).
            factor[-num_features:] = self.momentum
            return {"w": rows["w"] - factor * slope}

        return update

    def loss(
        self,
        net: Net,
        row: Tensor,  # [P + 2 H], the model, v and r
        x: Tensor,  # [B, ...]
        y: Tensor,  # [B, ...]
        extra: Tensors,  # mean [H], known []
    ) -> Tensor:
        """The run's loss [] with the offset, plus the pull towards the common mean."""
        h = net.num_features
        w, v, r = row.tensor_split([net.size, net.size + h])
        z = net.features(w, x)
        batch_mean = z.flatten(0, -2).mean(0)  # also over the steps of a sequence
        known = extra["known"]
        if self.offset:
            z = z + known * v
        running = (1 - self.momentum) * r.detach() + self.momentum * batch_mean
        pull = (running - extra["mean"]).square().mean() / 2
        tracking = (r - batch_mean.detach()).square().sum() / 2
        # It has a gradient, and no value: the record shows the loss alone.
        tracking = tracking - tracking.detach()
        loss = net.batch_loss(net.head(w, z), y)
        return loss + self.kappa * known * pull + tracking

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        return {**super().uploads(state, down, cohort), "delta": state["x"]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        mix = cohort.mean_weights("samples")
        # Read on the device: a GPU would have to be waited for.
        is_known = state["known"] > 0
        x = mix.aggregate(up["delta"], state["x"])[0]
        mean = mix.aggregate(up["mean"])[0]
        changes: Changes = {
            "x": torch.where(is_known, x, state["x"]),
            "mean": torch.where(is_known, state["mean"], mean),
            "known": torch.ones_like(state["known"]),
        }
        return changes, mix

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": down["x"], "v": client_state["v"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """The head's scores [B, C] of the features plus the offset v [H]."""
        return net.head(model["w"], net.features(model["w"], x) + model["v"])
