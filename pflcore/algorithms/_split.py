"""Models of which one part is shared and another stays with its client.

SplitModel averages the shared columns; FedPer, LG-FedAvg, FedRep, FedBABU and FedBN are
its presets. In FedRoD the whole model is shared, and a personal head adds its scores.

Symbols: S clients are in the cohort; a model has P parameters, K of them shared; x is
the shared part, h a client's private part; z are features [B, H] of B samples.
"""

from __future__ import annotations

import glob
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore._device import to_device
from pflcore.algorithms._adaptation import FineTune, head_mask
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import (
    Payload,
    Tensors,
    TrainResult,
    Traits,
    algorithm_options,
)
from pflcore.algorithms._task import check_class_scores
from pflcore.check import (
    Expectation,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Weighting,
    are_names,
    warn_caller,
)
from pflcore.train import Clients, Net, Objective
from pflcore.train._losses import cross_entropy

PRIVATE_TEXT = "'head', 'body', 'batch_norm' or patterns of parameter names"
PrivateColumns = Annotated[
    str | tuple[str, ...],
    Expectation(PRIVATE_TEXT, lambda v: are_names(v) and len(v) > 0),
]


@algorithm_options
class SplitModel(FedAvg):
    """Shared columns x are averaged, private columns h stay with their client.

    Client i's model is (x, h_i). FedPer, LG-FedAvg, FedRep, FedBABU and FedBN are its
    presets.

    server: x [K] · client: h [P - K] (with order="body" nothing) · down: x [S, K] · up:
    delta [S, K] (the shared columns alone).

    A round trains by `order`, and then `x <- x + server_lr sum_i share_i (x_i - x)`:

    - "joint": (x_i, h_i) by SGD on f_i from (x, h_i), both together
    - "alternate": first h_i by SGD on f_i(x, .) for `private_epochs`, then x_i by SGD
      on f_i(., h_i) for the run's epochs
    - "body": x_i by SGD on f_i(., h), with h the initial columns of all clients

    A client is evaluated with (x, h_i), trained on by `finetune_epochs` epochs that are
    thrown away. A client that never took part has the initial h; `adapt` gives a
    newcomer one. While only h is trained, batch norm's running statistics stay.
    `clip_grad` measures the whole gradient, frozen columns too.

    The other options are those of `FedAvg`.

    Args:
        private: Columns that stay with their client: "head", "body" (all but the
            head), "batch_norm" (parameters of batch norm), or patterns of parameter
            names.
        order: Order of training: "joint" trains both parts together, "alternate" the
            private part first, "body" the shared part alone.
        private_epochs: Epochs of the private part with "alternate"; None takes the
            run's `epochs`.
        finetune_epochs: Epochs of all columns at every evaluation.
        finetune_lr: Step size of these epochs; None takes the run's `lr`, also after a
            schedule.
    """

    private: PrivateColumns = "head"
    order: Literal["joint", "alternate", "body"] = "joint"
    private_epochs: PositiveInt | None = None
    finetune_epochs: NonNegativeInt = 0
    finetune_lr: NonNegativeFloat | None = None

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        policies = super().traits.batch_norm
        if self.private == "body":  # the layers that statistics belong to are private
            policies = policies[::-1]
        elif self.private == "batch_norm":
            policies = ("local",)
        return super().traits._replace(
            evaluation_only=("finetune_epochs", "finetune_lr"), batch_norm=policies
        )

    def private_mask(self, net: Net) -> Tensor:
        """Mask [P] on the CPU: True for private columns.

        With "batch_norm" it is False everywhere where the model has no batch norm.
        """
        if self.private == "batch_norm":
            return _batch_norm_mask(net)
        if self.private == "head":
            return head_mask(net)
        if self.private == "body":
            return ~head_mask(net)
        patterns = self.private
        if isinstance(patterns, str):
            patterns = (patterns,)
        return net.mask(*patterns)

    def merge_columns(self, net: Net, x: Tensor, client_state: Tensors) -> Tensor:
        """The clients' models [S, P], of shared and private columns."""
        private = to_device(self.private_mask(net), x.device)
        w = net.w0.repeat(len(x), 1).masked_scatter_(~private, x)
        return w.masked_scatter_(private, client_state["h"]) if client_state else w

    def server_init_args(self, net: Net) -> Tensors:
        private = self.private_mask(net)
        if private.all() or not private.any():
            text = f"the model has no {self.private} parameter, so all of it"
            if private.any():
                text = "the whole model is private, so nothing"
            warn_caller(f"private: {text} is shared.")
        return {"x0": net.w0[~private]}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        if self.order == "body":
            return {}
        return {"h": net.w0[None, self.private_mask(net)]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        private = self.private_mask(clients.net)
        w = self.merge_columns(clients.net, down["x"], client_state)
        if self.order == "alternate":
            private_only = Objective(mask=private)
            w = clients.fit(
                w, private_only, epochs=self.private_epochs, stream="private"
            ).w
        mask = None if self.order == "joint" else ~private
        fit = clients.fit(w, Objective(mask=mask))
        new_state = {"h": fit.w[:, private]} if client_state else {}
        return new_state, {"delta": fit.w[:, ~private] - down["x"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        finetune = FineTune(
            finetune_epochs=self.finetune_epochs, finetune_lr=self.finetune_lr
        )
        w = self.merge_columns(clients.net, down["x"], client_state)
        return finetune.model({"x": w}, client_state, clients)


def _batch_norm_mask(net: Net) -> Tensor:
    """Mask [P] on the CPU: True for the parameters of batch norm's layers."""
    layers = set()
    for layer, module in net.module.named_modules():
        if isinstance(module, _BatchNorm):
            layers.add(layer)
    names = [name for name in net.names if name.rpartition(".")[0] in layers]
    return net.mask(*map(glob.escape, names))


@algorithm_options
class FedPer(SplitModel):
    """FedPer (Arivazhagan et al. 2019): the head stays with its client.

    Algorithms 1 and 2: the head W_P stays, `W_B <- sum_i n_i / n W_B,i`, and both are
    trained together. See `SplitModel`, whose options are the others.

    Args:
        order: Always "joint": both parts are trained together.
        private_epochs: Always None.
    """

    order: Literal["joint"] = "joint"
    private_epochs: None = None


@algorithm_options
class LGFedAvg(FedPer):
    """LG-FedAvg (Liang et al. 2020): the lower layers stay with their client.

    Algorithm 1: the head `theta_g <- sum_i n_i / n theta_g,i` is shared, and both are
    trained together. See `SplitModel`, whose options are the others.

    Args:
        private: Columns that stay with their client: "body" is all but the head;
            patterns of parameter names say how many layers stay; also "head"
            or "batch_norm".
    """

    private: PrivateColumns = "body"


@algorithm_options
class FedRep(SplitModel):
    """FedRep (Collins et al. 2021): trains a private head, then the shared body.

    Algorithm 1: the head on the frozen body, then the body on the frozen head; `phi <-
    1 / (r n) sum_i phi_i`. See `SplitModel`, whose options are the others.

    Args:
        weighting: Shares of the clients in the mean: "uniform" as in the paper,
            or "samples".
        order: Always "alternate": the private part is trained first.
    """

    weighting: Weighting = "uniform"
    order: Literal["alternate"] = "alternate"


@algorithm_options
class FedBABU(SplitModel):
    """FedBABU (Oh et al. 2022, Algorithm 1): trains only the body, on the initial head.

    Every evaluation fine-tunes all layers. A client keeps nothing between rounds, and a
    newcomer is fine-tuned like every client. See `SplitModel`, whose options are the
    others.

    Args:
        order: Always "body": only the shared part is trained.
        private_epochs: Always None.
        finetune_epochs: Epochs of all columns at every evaluation.
    """

    order: Literal["body"] = "body"
    private_epochs: None = None
    finetune_epochs: NonNegativeInt = 5


@algorithm_options
class FedBN(FedPer):
    """FedBN (Li et al. 2021): batch norm stays with its client.

    Algorithm 1: batch norm's parameters and statistics stay, other layers `w <- 1 / K
    sum_i w_i`. On a model without batch norm it is FedAvg, and warns. See `SplitModel`,
    whose options are the others.

    Args:
        weighting: Shares of the clients in the mean: "uniform" as in the paper,
            or "samples".
        private: Columns that stay with their client: "batch_norm" for this algorithm.
    """

    weighting: Weighting = "uniform"
    private: PrivateColumns = "batch_norm"


@algorithm_options
class FedRoD(FedAvg):
    """FedRoD (Chen and Chao 2022, linear): a personal head adds to generic scores.

    server: x [P] (body f and generic head g) · client: h [H], its head · down: x [S, P]
    · up: delta [S, P] (1 model; h stays).

    With the features z = f(x), scores are g(z) + h(z). The generic model minimises
    balanced softmax, CE(g(z) + gamma log n_c), n_c the client's samples of class c. The
    head minimises CE(g(z) + h(z)) with g(z) and z detached, so that it moves only h.
    Both are trained together, by the run's SGD. A client without class c gives it no
    generic score while it trains. CE is the run's loss; another loss of class scores
    serves as well.

    Decision where the paper is silent: h starts at zero, so that a new client's model
    is the generic one.

    The other options are those of `FedAvg`.

    Args:
        gamma: Strength of the balancing. 1 is balanced softmax, as in the paper; 0 is
            cross entropy.
    """

    gamma: NonNegativeFloat = 1.0

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        return super().traits._replace(head_reason="adds a second head's scores")

    def server_init_args(self, net: Net) -> Tensors:
        check_class_scores(net, "FedRoD balances the scores of classes")
        return super().server_init_args(net)

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"h": torch.zeros_like(net.w0[None, net.head_slice])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        class_counts = to_device(clients.class_counts, x.device).to(x.dtype)
        rows = torch.cat([x, client_state["h"]], 1)
        fit = clients.fit(
            rows, Objective(loss=self.loss, extra={"class_counts": class_counts})
        )
        size = x.shape[1]
        delta = fit.w[:, :size] - x
        return {"h": fit.w[:, size:]}, {"delta": delta}, fit

    def loss(
        self,
        net: Net,
        row: Tensor,  # [P + H], the shared model and the personal head
        x: Tensor,  # [B, ...], samples
        y: Tensor,  # [B, ...]
        extra: Tensors,
    ) -> Tensor:
        """The generic model's balanced softmax plus the personal head's loss.

        Each moves its own part: the generic model does not see the personal scores, and
        the head sees generic scores and features as constants.
        """
        w, h = row.tensor_split([net.size])
        z = net.features(w, x)
        generic = net.head(w, z)
        personal = net.head(h, z.detach())  # `Net.head` takes a head alone, too
        counts = extra["class_counts"]  # [C], this client's
        # The model may know more classes than the data.
        padding = generic.shape[1] - len(counts)
        prior = (F.pad(counts, (0, padding)) ** self.gamma).log()
        if net.loss_fn is not cross_entropy:
            # Label smoothing has a loss of every class. Clamped, it is finite; a
            # probability of exp(-100) has no effect.
            prior = prior.clamp(min=-100)
        # Scores may be those of T steps, [B, C, T].
        prior = prior.view(-1, *[1] * (generic.dim() - 2))
        personal_loss = net.batch_loss(generic.detach() + personal, y)
        return net.batch_loss(generic + prior, y) + personal_loss

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": down["x"], "h": client_state["h"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Scores of w [P] plus those of its head with the parameters h [H]."""
        z = net.features(model["w"], x)
        return net.head(model["w"], z) + net.head(model["h"], z)
