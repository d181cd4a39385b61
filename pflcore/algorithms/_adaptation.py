"""One shared model that is adapted to each client.

- FineTune trains it further on the client's data.
- KnnPer adds a vote of the client's own nearest samples.
- PerFedAvg trains a start that is one step away from every client.
- SplitModel keeps some columns with the client: FedPer, LG-FedAvg, FedRep, FedBABU and
  FedBN are its presets.
- FedRoD has a personal head that adds its scores.

Symbols: S clients are in the cohort; s of them take a step together; a model has P
parameters, K of them shared; x is the shared model; z are features [.., H].
"""

from __future__ import annotations

import glob
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import CrossEntropyLoss
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore import ops
from pflcore.algorithms._fedavg import FedAvg, FedOpt, FedProx
from pflcore.algorithms._protocol import (
    GradientFn,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    algorithm_options,
    warn_unused_momentum,
)
from pflcore.check import (
    Expectation,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
    Weighting,
    are_names,
    warn_caller,
)
from pflcore.data._federation import Federation
from pflcore.data._inputs import IGNORED_LABEL
from pflcore._device import to_device
from pflcore.nn._context import forward_context, forward_state
from pflcore.train import Clients, Fit, Net, Objective
from pflcore.train._evaluate import Predict, predict_row
from pflcore.train._losses import (
    REGRESSION_LOSSES,
    binary_cross_entropy,
    cross_entropy,
    hinge,
    loss_name,
)


@algorithm_options
class FineTune(FedProx, FedOpt):
    """FedAvg, then fine-tuning (Wang et al. 2019; Yu et al. 2020; Motley 4.1).

    server: x [P] and the optimizer's state, see `FedOpt` · client: nothing · down: x
    [S, P] (1 model) · up: delta [S, P] (1 model).

    Training is that of `FedOpt`. Every evaluation fine-tunes x on each client's
    training data by the run's optimizer, all layers or the last one, and throws the
    result away. Momentum and AdamW's moments start at zero in every epoch.

    - `choose="fixed"` takes `finetune_epochs` epochs.
    - `choose="client"` tries each step size of `lr_grid` with 1 .. `finetune_epochs`
      epochs, and takes what is best on the client's own validation split; for one
      choice for all clients see `pflcore.tune`. Ties go to the earlier candidate, 0
      epochs first. A client without validation samples takes what is best for all the
      others of the federation together (mean over clients), whichever clients are
      evaluated beside it: evaluating it alone fine-tunes all of them.

    Acceptance (the remark of section 4.1): a client keeps x if it has less than
    `min_size` samples, or if its tuned model does not beat x by more than `margin` on
    its validation split. Without validation samples it cannot.
    """

    # FedProx's pull towards x while x is trained: FedProx + fine-tuning
    mu: NonNegativeFloat = 0.0
    finetune_lr: NonNegativeFloat | None = None  # step size; default: the run's
    finetune_epochs: NonNegativeInt = 5  # epochs, or the most that are tried
    layers: str = "all"  # "all", "last", or a pattern of parameter names such as "fc*"
    # step size and epochs: fixed, or each client's choice on its validation data
    choose: Literal["fixed", "client"] = "fixed"
    # step sizes to choose from; default: finetune_lr alone
    lr_grid: tuple[float, ...] = ()
    zero: bool = True  # no fine-tuning is a candidate too (Motley's silo code: not)
    min_size: NonNegativeInt = 0  # clients with fewer training samples keep x
    # by how much a tuned model must beat x on the validation split
    margin: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choose == "fixed":
            self.require_default("choose", "lr_grid")

    @property
    def traits(self) -> Traits:
        tuning = (
            "finetune_lr",
            "finetune_epochs",
            "layers",
            "choose",
            "lr_grid",
            "zero",
            "min_size",
            "margin",
        )
        return super().traits._replace(evaluation_only=tuning)

    def clients_for_model(self, data: Federation, ids: Tensor) -> Tensor:
        chooses = self.choose == "client" and self.finetune_epochs > 0
        if not chooses or "val" not in data.index:
            return ids
        has_val = data.size("val") > 0
        if has_val[ids].all():
            return ids
        clients: Tensor = torch.cat([ids, has_val.nonzero()[:, 0]]).unique()
        return clients

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        x = down["x"]
        if not self.finetune_epochs:
            return {"w": x}
        w, batch_norm = self.finetune(x, clients)
        after = replace(clients, buffers=batch_norm)
        takes = accept_tuned(self, x, w, clients, after)[:, None]
        batch_norm = torch.where(takes, batch_norm, clients.buffers)
        return {"w": torch.where(takes, w, x), "batch_norm": batch_norm}

    def finetune(self, x: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
        """The fine-tuned models [S, P], and their batch norm's statistics.

        With `choose="client"` they are each client's best ones on its validation split.
        """
        if self.choose == "fixed":
            last_fit = deque(self.candidate_fits(x, clients), maxlen=1)[0]
            return last_fit.w, last_fit.buffers
        w = x
        batch_norm = clients.buffers
        best = x.new_full((len(x), 1), -torch.inf)
        if self.zero:
            best = fill_missing(validation_score(clients, x))
        for fit in self.candidate_fits(x, clients):
            score = fill_missing(validation_score(clients.after(fit), fit.w))
            is_better = score > best
            best = torch.where(is_better, score, best)
            w = torch.where(is_better, fit.w, w)
            batch_norm = torch.where(is_better, fit.buffers, batch_norm)
        return w, batch_norm

    def candidate_fits(self, x: Tensor, clients: Clients) -> Iterator[Fit]:
        """The fits of x [S, P] after every epoch, one step size after the other.

        With frozen layers batch norm's statistics stay frozen as well.
        """
        net = clients.net
        reshuffles = clients.context.training.reshuffle
        mask = None
        if self.layers != "all":
            mask = head_mask(net) if self.layers == "last" else net.mask(self.layers)
        objective = Objective(mask=mask)
        for lr in self.lr_grid or (self.finetune_lr,):
            tuned = clients
            rows = x
            for epoch in range(1, self.finetune_epochs + 1):
                stream = f"finetune {epoch}" if reshuffles else "finetune"
                fit = tuned.fit(rows, objective, epochs=1, lr=lr, stream=stream)
                if mask is not None:
                    fit = fit._replace(buffers=clients.buffers)
                tuned = clients.after(fit)
                rows = fit.w
                yield fit


def fill_missing(values: Tensor) -> Tensor:
    """Values [S, 1] of `values` [S]; the mean of the others in place of NaN."""
    return torch.where(values.isnan(), values.nanmean(), values)[:, None]


def head_mask(net: Net) -> Tensor:
    """Mask [P] on the CPU: True for the head's parameters."""
    mask = torch.zeros(net.size, dtype=torch.bool)
    mask[net.head_slice] = True
    return mask


def validation_score(
    clients: Clients, rows: Tensor | Tensors, predict: Predict = predict_row
) -> Tensor:
    """Score of each client's model on the split "val", float64 [S].

    It is the accuracy, or minus the loss where there is none. A model whose outputs
    hold a NaN has minus infinity; a client without samples of the split has NaN.

    Args:
        rows: the models [S, P], or several tensors [S, ...] that `predict` takes
    """
    model = rows if isinstance(rows, dict) else {"w": rows}
    size = torch.zeros(len(clients.ids))
    if clients.has_split("val"):
        size = clients.context.data.size("val")[clients.ids]
    has_val = size > 0
    if not has_val.any():
        raise ValueError(
            "choose: fine-tuning is tuned on the clients' 'val' split, which these "
            "clients lack; make one with Federation.split, or choose on validation "
            "clients with pflcore.tuning."
        )
    # Each client has a block of its own: a choice must not depend on the others, and
    # last digits may depend on what is computed together.
    judges = replace(clients, block_numbers=torch.arange(len(size)))
    if not has_val.all():
        judges = judges.take(has_val)
        model = {key: tensor[has_val] for key, tensor in model.items()}
    loss, accuracy = judges.evaluate(model, "val", predict)
    scores = -loss.double() if accuracy is None else accuracy
    scores = scores.masked_fill(loss.isnan(), -torch.inf)
    no_scores = scores.new_full(has_val.shape, torch.nan)
    return no_scores.masked_scatter(to_device(has_val, scores.device), scores)


def accept_tuned(
    alg: FineTune | KnnPer,
    x: Tensor,
    model: Tensor | Tensors,
    clients: Clients,
    after: Clients,
    predict: Predict = predict_row,
) -> Tensor:
    """Mask [S]: True where a client takes `model`, False where it keeps x [S, P].

    `after` are the clients with the statistics that belong to `model`.
    """
    is_large = to_device(clients.num_samples, x.device) >= alg.min_size
    if alg.margin is None:
        return is_large
    score = validation_score(after, model, predict)
    return is_large & (score > validation_score(clients, x) + alg.margin)


VoteKernel = Literal["exp", "inverse", "gauss_dim"]


@algorithm_options
class KnnPer(FedOpt):
    """kNN-Per (Marfoq et al. 2022): a client's nearest samples vote beside the model.

    server: x [P] and the optimizer's state, see `FedOpt` · client: nothing · down: x
    [S, P] (1 model) · up: delta [S, P] (1 model).

    Training is that of `FedOpt`. For evaluation each client stores what the head sees
    of its training samples, and mixes probabilities: `p = lam p_knn + (1 - lam) p_x`
    (equations 6 and 7). lam = 0 is FedAvg. p_knn weighs the labels of the k nearest
    samples, at the Euclidean distance d, by `kernel`:

    - "exp": exp(-d), the paper's
    - "inverse": 1 / d, where an exact match takes all (Motley's silo code)
    - "gauss_dim": exp(-d^2 / D), D features (the authors' code)

    Targets that are no classes have the weighted mean of the neighbours' targets. With
    the hinge loss it is the mean of their signs, mixed with the score; with binary
    cross entropy the mean of their labels, mixed with the score's probability and given
    as a logit. Of equally near samples the earlier ones vote. A client with fewer than
    k samples uses all of them.

    Acceptance (Motley, section 4.3, observation 1, and the remark of 4.1): a client
    stays with p_x if it has less than `min_size` samples, or if p does not beat p_x by
    more than `margin` on its validation split, in accuracy or minus its loss. Without
    validation samples it cannot.
    """

    k: PositiveInt = 10  # neighbours
    lam: UnitFloat = 0.5  # 0: the shared model alone, 1: the neighbours alone
    # a neighbour's vote at distance d: exp(-d), 1 / d, or exp(-d^2 / D)
    kernel: VoteKernel = "exp"
    min_size: NonNegativeInt = 0  # clients with fewer training samples keep x
    margin: float | None = None  # by how much p must beat x on the validation split

    @property
    def traits(self) -> Traits:
        late = ("k", "lam", "kernel", "min_size", "margin")
        return super().traits._replace(returns="probabilities", evaluation_only=late)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        x = down["x"]
        z, y = clients.features(x)  # [S, n, H], [S, n]: short clients are padded
        if y.dim() > 2 and is_cross_entropy(clients.net):
            raise ValueError(
                "data: kNN-Per's neighbours vote with a label a sample, and these "
                "targets are probabilities, or one for each step; give int64 labels "
                "[n]."
            )
        n = to_device(clients.num_samples, y.device)
        model = {"w": x, "z": z.flatten(2), "y": y, "n": n}
        if self.min_size or self.margin is not None:
            model["lam"] = z.new_full((len(z),), self.lam)
            takes = accept_tuned(self, x, model, clients, clients, self.predict)
            model["lam"] = model["lam"] * takes
        return model

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """`(1 - lam) p + lam q` [B, ...] of the model's and neighbours' predictions.

        p are w's probabilities (for numbers its scores). q is the mean of the labels y
        of the k nearest of the first n rows of z [n_max, H] to the features of x (what
        w's head sees), weighted as the option kernel says.
        """
        features = net.features(model["w"], x).flatten(1)
        weight, near = nearest_neighbours(
            features, model["z"], model["n"], self.k, self.kernel
        )
        lam = model.get("lam", self.lam)
        scores = net(model["w"], x)
        labels = model["y"][near]
        has_classes = net.scores_classes
        has_classes &= net.loss_fn not in (hinge, binary_cross_entropy)
        if has_classes and not labels.is_floating_point():
            has_label = (labels != IGNORED_LABEL)[..., None]  # no label, no vote
            labels = F.one_hot(labels.clamp(min=0), scores.shape[1]) * has_label
            scores = scores.softmax(1)
        elif net.loss_fn is hinge:
            labels = torch.where(labels > 0, 1.0, -1.0)
        weight = weight.view(*weight.shape, *[1] * (labels.dim() - 2))
        mean = (weight * labels).sum(1).view_as(scores)
        if net.loss_fn is not binary_cross_entropy:
            return (1 - lam) * scores + lam * mean.to(scores)
        p = (1 - lam) * scores.double().sigmoid() + lam * mean
        return p.logit(eps=1e-12).to(scores)


def is_cross_entropy(net: Net) -> bool:
    """Whether the net's loss is cross entropy, pflcore's or torch's."""
    loss_fn = net.loss_fn
    return loss_fn is cross_entropy or isinstance(loss_fn, CrossEntropyLoss)


def nearest_neighbours(
    queries: Tensor,  # [B, H]
    store: Tensor,  # [n_max, H]
    n: Tensor | int,
    k: int,
    kernel: VoteKernel = "exp",
) -> tuple[Tensor, Tensor]:  # [B, k'] float64, [B, k']
    """Weights and rows of the nearest of the first `n` rows of `store`.

    There are k' = min(k, n) of them, and their weights sum to 1. Weights are a softmax
    of -d, since exp(-d) itself is 0 / 0 for far points.
    """
    store = store[: int(n)]  # the other rows fill up to clients of more samples
    # [B, n] float64, exact where points coincide
    square = ops.pairwise_sqdist(queries, store)
    near = ops.feddwa_weights(square, k).index
    square = square.nan_to_num(torch.inf, torch.inf).gather(1, near)
    if kernel == "inverse":
        is_same = square == 0
        has_same = is_same.any(1, keepdim=True)
        weight = torch.where(has_same, is_same.double(), square.rsqrt())
        return weight / weight.sum(1, keepdim=True), near
    distance = square.sqrt() if kernel == "exp" else square / store.shape[1]
    return torch.softmax(-distance, 1), near


@algorithm_options
class PerFedAvg(FedAvg):
    """Per-FedAvg (Fallah et al. 2020): a start that is one step from every client.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    Algorithm 1: w minimises `sum_i share_i f_i(w - alpha grad f_i(w))`. The server is
    FedAvg's. A local step takes minibatches D, D', D'' of independent shuffles, `u = w
    - alpha grad f(w; D)` and `v = grad f(u; D')`. Then, by `variant`:

    - "fo": `w <- w - beta v`
    - "hf": `w <- w - beta (v - alpha (grad f(w + delta v; D'') - grad f(w - delta v;
      D'')) / (2 delta))`
    - "exact": `w <- w - beta (v - alpha H(w; D'') v)`, by automatic differentiation; on
      every engine alike

    A client is evaluated with x after `steps` such inner steps on its training data,
    never on test data. alpha and beta are the run's learning rate unless given; its
    momentum and weight decay have no effect. With batch norm each of the gradients
    updates the statistics, but for the exact variant's H v.

    Deviations: `scale_delta` divides delta by |v|, because w + delta v and w - delta v
    are equal in float32 where v is small (False is the paper's); clients weigh by their
    samples (the paper: alike; `weighting="uniform"`).
    """

    # first-order, Hessian-free (finite differences) or exact
    variant: Literal["fo", "hf", "exact"] = "fo"
    alpha: NonNegativeFloat | None = None  # the inner step size; None: the run's
    beta: NonNegativeFloat | None = None  # the outer step size; None: the run's
    delta: PositiveFloat = 1e-3  # of the finite difference
    scale_delta: bool = True  # delta / |v| instead of delta
    steps: NonNegativeInt = 1  # inner steps at evaluation

    @property
    def traits(self) -> Traits:
        reason = "takes its paper's own steps of SGD"
        return super().traits._replace(
            sgd_only_reason=reason, no_clip_grad_reason=reason
        )

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        warn_unused_momentum(self, clients)
        alpha = clients.lr if self.alpha is None else self.alpha
        beta = clients.lr if self.beta is None else self.beta

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            w = rows["w"]
            v = grad(w - alpha * grad(w), 1)
            curvature = self.hessian_vector(w, v, grad)
            return {"w": w - beta * (v - alpha * curvature)}

        objective = Objective()
        if self.variant == "exact":
            # torch 2.15 refuses gradients of gradients through batch norm under vmap.
            has_batch_norm = bool(clients.net.buffer_names)
            objective = Objective(loss=curvature_loss, never_vmap=has_batch_norm)
        batches = 2 if self.variant == "fo" else 3
        fit = clients.each_batch({"w": down["x"]}, update, objective, batches=batches)
        return client_state, {"delta": fit.w - down["x"]}, fit

    def hessian_vector(self, w: Tensor, v: Tensor, grad: GradientFn) -> Tensor:
        """H v [s, P] on the step's third minibatch, as the variant has it."""
        if self.variant == "fo":
            return torch.zeros_like(v)
        if self.variant == "exact":
            return grad(torch.cat([w, v], 1), 2)[:, : w.shape[1]]
        delta: Tensor | float = self.delta
        if self.scale_delta:
            delta = self.delta / v.norm(dim=1, keepdim=True).clamp(min=1e-30)
        return (grad(w + delta * v, 2) - grad(w - delta * v, 2)) / (2 * delta)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        if not self.steps:
            return {"w": down["x"]}
        alpha = clients.lr if self.alpha is None else self.alpha

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            return {"w": rows["w"] - alpha * grad(rows["w"])}

        fit = clients.each_batch(
            {"w": down["x"]}, update, steps=self.steps, stream="adapt"
        )
        return {"w": fit.w, "batch_norm": fit.buffers}


def curvature_loss(net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
    """The loss at w [P]; for a row w | v [2 P] a number with the gradient H(w) v in w.

    H v is made inside, gradient of gradient: differentiating a gradient from outside
    `vmap` is wrong for batch norm (torch 2.13).
    """
    if len(w) == net.size:
        return net.loss(w, x, y)
    row, v = w.detach().split(net.size)
    # These passes leave the statistics as they are.
    with forward_context(
        forward_state.train, forward_state.buffers, forward_state.seed
    ):
        slope = torch.func.grad(lambda u: net.loss(u, x, y))
        product: Tensor = torch.func.vjp(slope, row)[1](v)[0]  # type: ignore[misc]
    return (w[: net.size] * product).sum()


PRIVATE_TEXT = "'head', 'body', 'batch_norm' or patterns of parameter names"
PrivateColumns = Annotated[
    str | tuple[str, ...],
    Expectation(PRIVATE_TEXT, lambda v: are_names(v) and len(v) > 0),
]


@algorithm_options
class SplitModel(FedAvg):
    """Shared columns x are averaged, private columns h stay with their client.

    Client i's model is (x, h_i). The classes below are its presets.

    server: x [K] · client: h [P - K] (with order="body" nothing) · down: x [S, K] · up:
    delta [S, K] (the shared columns alone).

    A round trains by `order`, and then `x <- x + server_lr sum_i share_i (x_i - x)`:

    - "joint": (x_i, h_i) by SGD on f_i from (x, h_i), both at once
    - "alternate": first h_i by SGD on f_i(x, .) for `private_epochs`, then x_i by SGD
      on f_i(., h_i) for the run's epochs
    - "body": x_i by SGD on f_i(., h), with h the initial columns of all clients

    A client is evaluated with (x, h_i), trained on by `finetune_epochs` epochs that are
    thrown away. A client that never took part has the initial h; `adapt` gives a
    newcomer one. While only h is trained, batch norm's running statistics stay.
    `clip_grad` measures the whole gradient, frozen columns too.
    """

    private: PrivateColumns = "head"  # or "body", "batch_norm", or patterns of names
    # both; private first; shared alone
    order: Literal["joint", "alternate", "body"] = "joint"
    # with "alternate": of the private columns; None: the run's
    private_epochs: PositiveInt | None = None
    finetune_epochs: NonNegativeInt = 0  # epochs of all columns at every evaluation
    finetune_lr: NonNegativeFloat | None = None  # their step size; None: the run's

    @property
    def traits(self) -> Traits:
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

        With "batch_norm" it has none where the model has no batch norm.
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
    trained together. See `SplitModel`.
    """

    order: Literal["joint"] = "joint"
    private_epochs: None = None


@algorithm_options
class LGFedAvg(FedPer):
    """LG-FedAvg (Liang et al. 2020): the lower layers stay with their client.

    Algorithm 1: the head `theta_g <- sum_i n_i / n theta_g,i` is shared, and both are
    trained together. `private` says how many layers stay. See `SplitModel`.
    """

    # all but the head; or "head", "batch_norm", or names
    private: PrivateColumns = "body"


@algorithm_options
class FedRep(SplitModel):
    """FedRep (Collins et al. 2021): trains a private head, then the shared body.

    Algorithm 1: the head on the frozen body, then the body on the frozen head; `phi <-
    1 / (r n) sum_i phi_i`. See `SplitModel`.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    order: Literal["alternate"] = "alternate"


@algorithm_options
class FedBABU(SplitModel):
    """FedBABU (Oh et al. 2022, Algorithm 1): trains only the body, on the initial head.

    Every evaluation fine-tunes all layers. A client keeps nothing between rounds, and a
    newcomer is fine-tuned like every client. See `SplitModel`.
    """

    order: Literal["body"] = "body"
    private_epochs: None = None
    finetune_epochs: NonNegativeInt = 5  # epochs of all columns at every evaluation


@algorithm_options
class FedBN(FedPer):
    """FedBN (Li et al. 2021): batch norm stays with its client.

    Algorithm 1: batch norm's parameters and statistics stay, other layers `w <- 1 / K
    sum_i w_i`. On a model without batch norm it is FedAvg, and says so. See
    `SplitModel`.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    private: PrivateColumns = "batch_norm"


@algorithm_options
class FedRoD(FedAvg):
    """FedRoD (Chen and Chao 2022, linear): a personal head adds to generic scores.

    server: x [P] (body f and generic head g) · client: h [H], its head · down: x [S, P]
    · up: delta [S, P] (1 model; h stays).

    With the features z = f(x), scores are g(z) + h(z). The generic model minimises
    balanced softmax, CE(g(z) + gamma log n_c), n_c the client's samples of class c. The
    head minimises CE(g(z) + h(z)) with g(z) and z detached, so that it moves only h.
    Both are trained at once, by the run's SGD. A client without class c gives it no
    generic score while it trains. CE is the run's loss; another loss of class scores
    serves as well.

    Decision where the paper is silent: h starts at zero, so that a new client's model
    is the generic one.
    """

    gamma: NonNegativeFloat = 1.0  # strength of the balancing; 0 is cross-entropy

    def server_init_args(self, net: Net) -> Tensors:
        if net.loss_fn in (*REGRESSION_LOSSES, hinge, binary_cross_entropy):
            raise ValueError(
                "loss: FedRoD balances the scores of classes; expected a loss of "
                f"those, got {loss_name(net.loss_fn)}."
            )
        return super().server_init_args(net)

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"h": torch.zeros_like(net.w0[None, net.head_slice])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        check_additive_head(clients)
        x = down["x"]
        class_counts = to_device(clients.class_counts, x.device).to(x.dtype)
        rows = torch.cat([x, client_state["h"]], 1)
        fit = clients.fit(
            rows, Objective(loss=self.loss, extra={"class_counts": class_counts})
        )
        size = x.shape[1]
        return {"h": fit.w[:, size:]}, {"delta": fit.w[:, :size] - x}, fit

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
            # Clamped, so that a loss that looks at every class, as with label
            # smoothing, is finite; a probability of exp(-100) is as good as none.
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


def check_additive_head(clients: Clients) -> None:
    """Raises ValueError where the model is not its head on its features.

    It is tried on two samples at two points: a ReLU behind the head may not show at
    scores of one sign.
    """
    net = clients.net
    x = clients.context.data.x[:2]
    fits = not any(name.startswith(f"{net.head_name}.") for name in net.buffer_names)
    noise = torch.linspace(-0.1, 0.1, net.size, dtype=net.dtype, device=net.w0.device)
    point = net.w0 + noise
    negative_head = point.clone()
    negative_head[net.head_slice] *= -1
    try:
        with torch.no_grad(), forward_context(False, net.b0):
            for w in (point, negative_head):
                by_head = net.head(w, net.features(w, x))
                fits &= torch.allclose(by_head, net(w, x), rtol=1e-3, atol=1e-4)
    except (RuntimeError, TypeError, IndexError, ValueError):
        fits = False  # such a model may fail in any of these ways
    if not fits:
        raise ValueError(
            "model: FedRoD adds a second head's scores, so a head must be the last "
            "that the model does, with weights of its own and no statistics, and "
            f"{net.head_name!r} is not so; name it with Net(..., head=...)."
        )
