"""One shared model, made each client's own: by fine-tuning; by a vote of the client's
own nearest samples, kNN-Per; from a start one step from everybody, Per-FedAvg; or by
columns that stay with the client: FedPer, LG-FedAvg, FedRep, FedBABU, FedBN, and
FedRoD, whose personal head adds its scores.
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
from pflcore.data._ragged import to_device
from pflcore.nn._context import forward_context, forward_state
from pflcore.train import Clients, Fit, Net, Objective
from pflcore.train._clients import Predict, predict_row
from pflcore.train._losses import (
    REGRESSION_LOSSES,
    binary_cross_entropy,
    cross_entropy,
    hinge,
    loss_name,
)


@algorithm_options
class FineTune(FedProx, FedOpt):
    """FedAvg + fine-tuning (Wang et al. 2019; Yu et al. 2020; Motley, section 4.1).

    server: x [P] and the optimizer's state, see `FedOpt` · client: nothing · down: x
    [S, P] (1 model) · up: delta [S, P] (1 model).

    Trains as `FedOpt`; every evaluation fine-tunes x on each client's training data by
    the run's optimizer, all layers or the last one, and throws the result away.
    `choose="fixed"` takes `finetune_epochs` epochs. "client" tries each step size of
    `lr_grid` with 1 .. `finetune_epochs` epochs and keeps what is best on the client's
    own validation split (for one choice for all clients see `pflcore.tune`); ties go to
    the earlier candidate, 0 epochs first. A client without validation samples takes
    what is best for all the others of the federation together (mean over clients),
    whoever is evaluated beside it: to evaluate it alone fine-tunes all of them.
    Momentum and AdamW's moments start at zero in every epoch. Acceptance (the remark of
    section 4.1): a client with less than `min_size` samples, or whose validation value
    does not beat x's by more than `margin` (without validation samples it cannot),
    keeps x.
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
        )
        return super().traits._replace(evaluation_only=(*tuning, "min_size", "margin"))

    def clients_for_model(self, data: Federation, ids: Tensor) -> Tensor:
        if (
            self.choose == "fixed"
            or not self.finetune_epochs
            or "val" not in data.index
        ):
            return ids
        judges = data.size("val") > 0
        if judges[ids].all():
            return ids
        everybody: Tensor = torch.cat([ids, judges.nonzero()[:, 0]]).unique()
        return everybody

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        x = down["x"]
        if not self.finetune_epochs:
            return {"w": x}
        w, batch_norm = self.finetune(x, clients)
        takes = accept_tuned(self, x, w, clients, replace(clients, buffers=batch_norm))[
            :, None
        ]
        batch_norm = torch.where(takes, batch_norm, clients.buffers)
        return {"w": torch.where(takes, w, x), "batch_norm": batch_norm}

    def finetune(self, x: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
        """The fine-tuned models [S, P], or the best candidate of each client on its
        validation split; and their batch norm's statistics."""
        if self.choose == "fixed":
            last = deque(self.candidate_fits(x, clients), 1)[0]
            return last.w, last.buffers
        w = x
        batch_norm = clients.buffers
        best = (
            fill_missing(validation_score(clients, x))
            if self.zero
            else x.new_full((len(x), 1), -torch.inf)
        )
        for fit in self.candidate_fits(x, clients):
            now = fill_missing(validation_score(clients.after(fit), fit.w))
            better = now > best
            best = torch.where(better, now, best)
            w = torch.where(better, fit.w, w)
            batch_norm = torch.where(better, fit.buffers, batch_norm)
        return w, batch_norm

    def candidate_fits(self, x: Tensor, clients: Clients) -> Iterator[Fit]:
        """What every epoch of fine-tuning with every step size makes of x [S, P]. With
        frozen layers batch norm's statistics stay frozen as well."""
        net = clients.net
        mask = None
        shuffles = clients.context.training.reshuffle
        if self.layers != "all":
            mask = head_mask(net) if self.layers == "last" else net.mask(self.layers)
        for lr in self.lr_grid or (self.finetune_lr,):
            now = clients
            rows = x
            for epoch in range(1, self.finetune_epochs + 1):
                stream = f"finetune {epoch}" if shuffles else "finetune"
                fit = now.fit(
                    rows, Objective(mask=mask), epochs=1, lr=lr, stream=stream
                )
                if mask is not None:
                    fit = fit._replace(buffers=clients.buffers)
                now = clients.after(fit)
                rows = fit.w
                yield fit


def fill_missing(values: Tensor) -> Tensor:
    """Each client's value [S, 1], the others' mean where it has none, by values [S]
    or NaN."""
    return torch.where(values.isnan(), values.nanmean(), values)[:, None]


def head_mask(net: Net) -> Tensor:
    """Which parameters are the head's: bool [P] on the CPU."""
    mask = torch.zeros(net.size, dtype=torch.bool)
    mask[net.head_slice] = True
    return mask


def validation_score(
    clients: Clients, rows: Tensor | Tensors, predict: Predict = predict_row
) -> Tensor:
    """How good each client's model, a row of `rows` [S, P] or of several tensors, is on
    the split "val": accuracy, or minus the loss where there is none. float64 [S].

    A model whose outputs hold a NaN counts as worst, minus infinity; a client without
    samples of the split has NaN.
    """
    model = rows if isinstance(rows, dict) else {"w": rows}
    size = torch.zeros(len(clients.ids))
    if clients.has_split("val"):
        size = clients.context.data.size("val")[clients.ids]
    # a choice depends on it, so nobody shares a batch
    some = size > 0
    seen = replace(clients, block_numbers=torch.arange(len(size)))
    if not some.any():
        raise ValueError(
            "choose: fine-tuning is tuned on the clients' 'val' split, which these "
            "clients lack; "
            "make one with Federation.split, or choose on validation clients with "
            "pflcore.tuning."
        )
    if not some.all():
        seen = seen.take(some)
        model = {k: v[some] for k, v in model.items()}
    loss, right = seen.evaluate(model, "val", predict)
    values = -loss.double() if right is None else right
    values = values.masked_fill(loss.isnan(), -torch.inf)
    return values.new_full(some.shape, torch.nan).masked_scatter(
        to_device(some, values.device), values
    )


def accept_tuned(
    alg: FineTune | KnnPer,
    x: Tensor,
    model: Tensor | Tensors,
    clients: Clients,
    after: Clients,
    predict: Predict = predict_row,
) -> Tensor:
    """Which clients, with the statistics of `after`, take `model` and not x: bool
    [S]."""
    takes = to_device(clients.num_samples, x.device) >= alg.min_size
    if alg.margin is None:
        return takes
    return takes & (
        validation_score(after, model, predict)
        > validation_score(clients, x) + alg.margin
    )


VoteKernel = Literal["exp", "inverse", "gauss_dim"]


@algorithm_options
class KnnPer(FedOpt):
    """kNN-Per (Marfoq et al. 2022, equations 6 and 7): `p = lam p_knn + (1 - lam) p_x`
    on probabilities.

    server: x [P] and the optimizer's state, see `FedOpt` · client: nothing · down: x
    [S, P] (1 model) · up: delta [S, P] (1 model).

    Trains as `FedOpt`; for evaluation each client stores what the head sees of its
    training samples. p_knn weighs the labels of the k nearest (Euclidean distance d) by
    `kernel`: "exp" exp(-d) (the paper), "inverse" 1 / d (an exact match takes all;
    Motley's silo code), "gauss_dim" exp(-d^2 / D) (the authors' code). Targets instead
    of classes: the weighted mean of the neighbours' targets; hinge loss: of their
    signs, mixed with the score; binary cross entropy: of their labels, mixed with the
    score's probability, and given as a logit. Of equally near samples the earlier ones
    vote. A client with fewer than k samples uses all of them. lam = 0 is FedAvg.
    Acceptance (Motley, section 4.3, observation 1, and the remark of 4.1): a client
    with less than `min_size` samples, or whose accuracy (or minus its loss) on its
    validation split does not beat x's by more than `margin`, stays with p_x; without
    validation samples none beats it.
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
        criterion = clients.net.loss_fn
        z, y = clients.features(x)  # [S, n, H], [S, n]: short clients are padded
        if y.dim() > 2 and (
            criterion is cross_entropy or isinstance(criterion, CrossEntropyLoss)
        ):
            raise ValueError(
                "data: kNN-Per's neighbours vote with a label a sample, and these "
                "targets are "
                "probabilities, or one for each step; give int64 labels [n]."
            )
        model = {
            "w": x,
            "z": z.flatten(2),
            "y": y,
            "n": to_device(clients.num_samples, y.device),
        }
        if self.min_size or self.margin is not None:
            model["lam"] = z.new_full((len(z),), self.lam)
            model["lam"] = model["lam"] * accept_tuned(
                self, x, model, clients, clients, self.predict
            )
        return model

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """`(1 - lam) p + lam q`: p are w's probabilities (for numbers its scores), q is
        the mean of the labels y of the k nearest of the first n rows of z [n_max, H] to
        the features of x (what w's head sees), weighted as the option kernel says."""
        features = net.features(model["w"], x).flatten(1)
        # [B, k]
        weight, near = nearest_neighbours(
            features, model["z"], model["n"], self.k, self.kernel
        )
        lam = model.get("lam", self.lam)
        scores = net(model["w"], x)
        labels = model["y"][near]
        votes = net.scores_classes and net.loss_fn not in (hinge, binary_cross_entropy)
        if votes and not labels.is_floating_point():
            # who has no label has no vote
            counts = (labels != IGNORED_LABEL)[..., None]
            labels = F.one_hot(labels.clamp(min=0), scores.shape[1]) * counts
            scores = scores.softmax(1)
        elif net.loss_fn is hinge:
            labels = torch.where(labels > 0, 1.0, -1.0)
        weight = weight.view(*weight.shape, *[1] * (labels.dim() - 2))
        mean = (weight * labels).sum(1).view_as(scores)
        if net.loss_fn is not binary_cross_entropy:
            return (1 - lam) * scores + lam * mean.to(scores)
        p = (1 - lam) * scores.double().sigmoid() + lam * mean
        return p.logit(eps=1e-12).to(scores)


def nearest_neighbours(
    queries: Tensor, store: Tensor, n: Tensor | int, k: int, kernel: VoteKernel = "exp"
) -> tuple[Tensor, Tensor]:
    """Weights [B, k'] float64, summing to 1, and places [B, k'] of the k' = min(k, n)
    nearest of the first `n` rows of `store` [n_max, H].

    Weights are a softmax of -d: exp(-d) itself is 0 / 0 for far points.
    """
    store = store[: int(n)]  # the others are there for clients of more samples
    # [B, n] float64, exact where points coincide
    square = ops.pairwise_sqdist(queries, store)
    near = ops.feddwa_weights(square, k).index
    square = square.nan_to_num(torch.inf, torch.inf).gather(1, near)
    if kernel == "inverse":
        same = square == 0
        weight = torch.where(same.any(1, keepdim=True), same.double(), square.rsqrt())
        return weight / weight.sum(1, keepdim=True), near
    far = square.sqrt() if kernel == "exp" else square / store.shape[1]
    return torch.softmax(-far, 1), near


@algorithm_options
class PerFedAvg(FedAvg):
    """Fallah et al. 2020, Algorithm 1: w minimises sum_i share_i f_i(w - alpha grad
    f_i(w)).

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    The server is FedAvg's. A local step takes minibatches D, D', D'' of independent
    shuffles: u = w
    - alpha grad f(w; D), v = grad f(u; D'), then w <- w - beta v ("fo"), w - beta (v -
    alpha (grad f(w + delta v; D'') - grad f(w - delta v; D'')) / (2 delta)) ("hf"), or
    w - beta (v - alpha H(w; D'') v) ("exact", by automatic differentiation; on every
    engine alike). Evaluated is x after `steps` such inner steps on the client's
    training data, never on test data. Deviations: `scale_delta` divides delta by |v|,
    because w + delta v and w - delta v are equal in float32 where v is small (False is
    the paper's); clients weigh by their samples (the paper: alike;
    `weighting="uniform"`). alpha and beta are the run's learning rate unless given; its
    momentum and weight decay play no part. With batch norm each of the gradients
    updates the statistics, but for the exact variant's H v.
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
        why = "takes its paper's own steps of SGD"
        return super().traits._replace(sgd_only_reason=why, no_clip_grad_reason=why)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        warn_unused_momentum(self, clients)
        alpha, beta = (clients.lr if v is None else v for v in (self.alpha, self.beta))

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            w = rows["w"]
            v = grad(w - alpha * grad(w), 1)
            return {"w": w - beta * (v - alpha * self.hessian_vector(w, v, grad))}

        # torch 2.15 refuses gradients of gradients through batch norm under vmap
        exact = Objective(
            loss=curvature_loss, never_vmap=bool(clients.net.buffer_names)
        )
        objective = exact if self.variant == "exact" else Objective()
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
    """The loss at w [P]; for a row [w | v] of twice the length a number whose gradient
    in w is H(w) v.

    H v is made inside, gradient of gradient: differentiating a gradient from outside
    `vmap` is wrong for batch norm (torch 2.13).
    """
    if len(w) == net.size:
        return net.loss(w, x, y)
    row, v = w.detach().split(net.size)
    # what these passes do to the statistics stays inside
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
    """Shared columns x are averaged, private columns h stay: client i's model is (x,
    h_i). The classes below are its presets.

    server: x [K] · client: h [P - K] (with order="body" nothing) · down: x [S, K] · up:
    delta [S, K] (the shared columns alone).
    joint      (x_i, h_i) <- SGD on f_i at (x, h_i), both at once
    alternate  h_i <- SGD on f_i(x, .) for `private_epochs`, x_i <- SGD on f_i(., h_i) for the run's
               epochs
    body       x_i <- SGD on f_i(., h), h the initial columns of all clients
    and x <- x + server_lr sum_i share_i (x_i - x). Evaluated is (x, h_i), trained on by
    `finetune_epochs` epochs that are thrown away. A client that never took part has the
    initial h; `adapt` gives a newcomer one. While h alone is trained batch norm's
    running statistics stay. `clip_grad` measures the whole gradient, frozen columns
    too.
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
        """Which columns are private, bool [P] on the CPU; none where a model has no
        batch norm."""
        if self.private == "batch_norm":
            layers = {
                k for k, m in net.module.named_modules() if isinstance(m, _BatchNorm)
            }
            names = [k for k in net.names if k.rpartition(".")[0] in layers]
            return net.mask(*map(glob.escape, names))
        if self.private in ("head", "body"):
            head = head_mask(net)
            return head if self.private == "head" else ~head
        return net.mask(
            *([self.private] if isinstance(self.private, str) else self.private)
        )

    def merge_columns(self, net: Net, x: Tensor, client_state: Tensors) -> Tensor:
        """The clients' models [S, P]."""
        private = to_device(self.private_mask(net), x.device)
        w = net.w0.repeat(len(x), 1).masked_scatter_(~private, x)
        return w.masked_scatter_(private, client_state["h"]) if client_state else w

    def server_init_args(self, net: Net) -> Tensors:
        private = self.private_mask(net)
        if private.all() or not private.any():
            lacks = f"the model has no {self.private} parameter, so all of it"
            what = "the whole model is private, so nothing" if private.any() else lacks
            warn_caller(f"private: {what} is shared.")
        return {"x0": net.w0[~private]}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return (
            {} if self.order == "body" else {"h": net.w0[None, self.private_mask(net)]}
        )

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        private = self.private_mask(clients.net)
        w = self.merge_columns(clients.net, down["x"], client_state)
        if self.order == "alternate":
            alone = Objective(mask=private)
            w = clients.fit(w, alone, epochs=self.private_epochs, stream="private").w
        fit = clients.fit(
            w, Objective(mask=None if self.order == "joint" else ~private)
        )
        new = {"h": fit.w[:, private]} if client_state else {}
        return new, {"delta": fit.w[:, ~private] - down["x"]}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        tuned = FineTune(
            finetune_epochs=self.finetune_epochs, finetune_lr=self.finetune_lr
        )
        return tuned.model(
            {"x": self.merge_columns(clients.net, down["x"], client_state)},
            client_state,
            clients,
        )


@algorithm_options
class FedPer(SplitModel):
    """Arivazhagan et al. 2019, FedPer (Algorithms 1 and 2): the head W_P stays,
    W_B <- sum_i n_i / n W_B,i, both trained together.

    See `SplitModel`.
    """

    order: Literal["joint"] = "joint"
    private_epochs: None = None


@algorithm_options
class LGFedAvg(FedPer):
    """Liang et al. 2020, LG-FedAvg (Algorithm 1): the lower layers stay, the head
    theta_g <- sum_i n_i / n theta_g,i is shared.

    Both are trained together; how many layers are shared is `private`'s to say. See
    `SplitModel`.
    """

    # all but the head; or "head", "batch_norm", or names
    private: PrivateColumns = "body"


@algorithm_options
class FedRep(SplitModel):
    """Collins et al. 2021, FedRep (Algorithm 1): first the private head on the frozen
    body, then the body; phi <- 1 / (r n) sum_i phi_i.

    See `SplitModel`.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    order: Literal["alternate"] = "alternate"


@algorithm_options
class FedBABU(SplitModel):
    """Oh et al. 2022, FedBABU (Algorithm 1): the body alone is trained, on the initial
    head; every evaluation fine-tunes all layers.

    See `SplitModel`. A client keeps nothing between rounds, and a newcomer is
    fine-tuned like everybody.
    """

    order: Literal["body"] = "body"
    private_epochs: None = None
    finetune_epochs: NonNegativeInt = 5  # epochs of all columns at every evaluation


@algorithm_options
class FedBN(FedPer):
    """Li et al. 2021, FedBN (Algorithm 1): batch norm's parameters and statistics stay,
    other layers w <- 1 / K sum_i w_i.

    See `SplitModel`. On a model without batch norm it is FedAvg, and says so.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    private: PrivateColumns = "batch_norm"


@algorithm_options
class FedRoD(FedAvg):
    """Chen and Chao 2022, FedRoD (linear): a generic model, and a personal head h that
    adds its scores to the generic ones.

    server: x [P] (body f and generic head g) · client: h [H], its head · down: x [S, P]
    · up: delta [S, P] (1 model; h stays).

    The generic model minimises balanced softmax, CE(g(z) + gamma log n_c), z = f(x) and
    n_c the client's samples of class c; the head minimises CE(g(z) + h(z)) with g(z)
    and z detached, so that it moves nothing but h. Both are trained at once, by the
    run's SGD. Predicted is g(z) + h(z). A client without class c gives it no generic
    score while it trains. CE is the run's loss, another one of class scores as well.
    Decision where the paper is silent: h starts at zero, so that a new client's model
    is the generic one.
    """

    gamma: NonNegativeFloat = 1.0  # strength of the balancing; 0 is cross-entropy

    def server_init_args(self, net: Net) -> Tensors:
        if net.loss_fn in (*REGRESSION_LOSSES, hinge, binary_cross_entropy):
            raise ValueError(
                "loss: FedRoD balances the scores of classes; expected a loss of "
                "those, got "
                f"{loss_name(net.loss_fn)}."
            )
        return super().server_init_args(net)

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"h": torch.zeros_like(net.w0[None, net.head_slice])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        check_additive_head(clients)
        x = down["x"]
        n = to_device(clients.class_counts, x.device).to(x.dtype)
        fit = clients.fit(
            torch.cat([x, client_state["h"]], 1),
            Objective(loss=self.loss, extra={"n": n}),
        )
        P = x.shape[1]
        return {"h": fit.w[:, P:]}, {"delta": fit.w[:, :P] - x}, fit

    def loss(self, net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """The sum of both losses at a row x | h [P + H]."""
        w, h = w.tensor_split([net.size])
        z = net.features(w, x)
        generic = net.head(w, z)
        personal = net.head(h, z.detach())
        # the model may know more classes than the data
        more = generic.shape[1] - len(extra["n"])
        prior = (F.pad(extra["n"], (0, more)) ** self.gamma).log()
        if net.loss_fn is not cross_entropy:
            # as good as none, and finite for a loss of every class, as with label
            # smoothing
            prior = prior.clamp(min=-100)
        # [B, C, T] are scores of T steps
        prior = prior.view(-1, *[1] * (generic.dim() - 2))
        both = net.batch_loss(generic.detach() + personal, y)
        return net.batch_loss(generic + prior, y) + both

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": down["x"], "h": client_state["h"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """The scores of w [P] plus those that its head gives, with the parameters h
        [H], on the same features."""
        z = net.features(model["w"], x)
        return net.head(model["w"], z) + net.head(model["h"], z)


def check_additive_head(clients: Clients) -> None:
    """ValueError where the model is not its head on its features."""
    net = clients.net
    x = clients.context.data.x[:2]
    fits = not any(name.startswith(f"{net.head_name}.") for name in net.buffer_names)
    row = net.w0 + torch.linspace(
        -0.1, 0.1, net.size, dtype=net.dtype, device=net.w0.device
    )
    turned = row.clone()
    turned[net.head_slice] *= -1
    try:
        with torch.no_grad(), forward_context(False, net.b0):
            # a ReLU behind the head may not show at scores of one sign
            for w in (row, turned):
                fits &= torch.allclose(
                    net.head(w, net.features(w, x)), net(w, x), 1e-3, 1e-4
                )
    except (RuntimeError, TypeError, IndexError, ValueError):
        # whatever such a model says
        fits = False
    if not fits:
        raise ValueError(
            "model: FedRoD adds a second head's scores, so a head must be the last "
            "that the model "
            f"does, with weights of its own and no statistics, and {net.head_name!r} "
            "is not so; "
            "name it with Net(..., head=...)."
        )
