"""One shared model that is adapted to each client.

FineTune trains it further on the client's data. KnnPer adds a vote of the client's own
nearest samples. PerFedAvg trains a start that is one step away from every client.

Symbols: S clients are in the cohort, s of them take a step together; a model has P
parameters; x is the shared model. A client has n training samples, and B samples are
predicted; z are features [.., H] of samples, y their labels. p and q are predictions of
the shared model and of the neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import CrossEntropyLoss

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._fedopt import FedOpt
from pflcore.algorithms._protocol import (
    GradientFn,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    algorithm_options,
    warn_unused_momentum,
)
from pflcore.algorithms._proximal import FedProx
from pflcore.check import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
)
from pflcore.data._federation import Federation
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.nn._context import forward_context, forward_state
from pflcore.train import Clients, Fit, Net, Objective
from pflcore.train._evaluate import Predict, predict_row
from pflcore.train._losses import (
    binary_cross_entropy,
    cross_entropy,
    hinge,
    loss_name,
)
from pflcore.train._net import Target


@algorithm_options
class FineTune(FedProx, FedOpt):
    """FineTune (Wang et al. 2019, Yu et al. 2020, Motley 4.1): FedAvg, then tuning.

    server: x [P] and the optimizer's state, see `FedOpt` · client: nothing · down: x
    [S, P] (1 model) · up: delta [S, P] (1 model).

    Training is that of `FedOpt`, with FedProx's pull where mu > 0. Every evaluation
    fine-tunes x on each client's training data by the run's optimizer, all layers or
    the last one, and throws the result away: `w_i <- w_i - finetune_lr grad F_i(w_i)`
    from x. Momentum and AdamW's moments start at zero in every epoch.

    - `choose="fixed"` takes `finetune_epochs` epochs.
    - `choose="client"` tries each step size of `lr_grid` with 1 .. `finetune_epochs`
      epochs, and takes what is best on the client's own validation split; for one
      choice for all clients see `pflcore.tune`. Ties go to the earlier candidate, 0
      epochs first. A client without validation samples takes what is best for all the
      others of the federation together (mean over clients), whichever clients are
      evaluated with it: the evaluation of one client fine-tunes all of them.

    Acceptance (the remark of section 4.1): a client with less than `min_size` samples
    keeps x. So does a client whose tuned model does not beat x by more than `margin` on
    its validation split; without validation samples it cannot.

    The other options are those of `FedOpt`.

    Args:
        mu: Strength of FedProx's pull towards x while x is trained. 0 pulls nothing.
        finetune_lr: Step size of the fine-tuning; None takes the run's `lr`, also after
            a schedule.
        finetune_epochs: Epochs of the fine-tuning, or the most that are tried.
        layers: Layers that are fine-tuned: "all", "last", or a pattern of parameter
            names such as "fc*".
        choose: Rule for step size and epochs: "fixed", or "client" for each client's
            choice on its validation data.
        lr_grid: Step sizes to choose from. () has `finetune_lr` alone.
        zero: True counts no fine-tuning as a candidate, too. Motley's silo code does
            not.
        min_size: Number of training samples below which a client keeps x.
        margin: Number by which a tuned model must beat x on the validation split, in
            accuracy or minus the loss. None accepts every tuned model.
    """

    mu: NonNegativeFloat = 0.0
    finetune_lr: NonNegativeFloat | None = None
    finetune_epochs: NonNegativeInt = 5
    layers: str = "all"
    choose: Literal["fixed", "client"] = "fixed"
    lr_grid: tuple[float, ...] = ()
    zero: bool = True
    min_size: NonNegativeInt = 0
    margin: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choose == "fixed":
            self.require_default("choose", "lr_grid")

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
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
        chooses = self.choose == "client" or self.margin is not None
        return super().traits._replace(evaluation_only=tuning, chooses_on_val=chooses)

    def clients_for_model(self, data: Federation, ids: Tensor) -> Tensor:
        chooses = self.choose == "client" and self.finetune_epochs > 0
        if not chooses or "val" not in data.index:
            return ids
        has_val = data.size("val") > 0
        if has_val[ids].all():
            return ids
        judges = has_val & (data.size("train") > 0)
        clients: Tensor = torch.cat([ids, judges.nonzero()[:, 0]]).unique()
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
            # Only the last fit is kept in memory.
            last_fit = deque(self.candidate_fits(x, clients), maxlen=1)[0]
            return last_fit.w, last_fit.buffers
        w = x
        batch_norm = clients.buffers
        best = x.new_full((len(x), 1), -torch.inf)
        if self.zero:
            best = fill_missing(validation_score(clients, x, "choose"))
        for fit in self.candidate_fits(x, clients):
            tuned = clients.after(fit)
            score = fill_missing(validation_score(tuned, fit.w, "choose"))
            is_better = score > best
            best = torch.where(is_better, score, best)
            w = torch.where(is_better, fit.w, w)
            batch_norm = torch.where(is_better, fit.buffers, batch_norm)
        return w, batch_norm

    def candidate_fits(self, x: Tensor, clients: Clients) -> Iterator[Fit]:
        """The fits of x [S, P] after every epoch, by one step size after the other.

        With frozen layers batch norm's statistics stay frozen as well.
        """
        fixed = clients.run_lr if self.finetune_lr is None else self.finetune_lr
        for lr in self.lr_grid or (fixed,):
            yield from self._epoch_fits(x, clients, lr)

    def _epoch_fits(self, x: Tensor, clients: Clients, lr: float) -> Iterator[Fit]:
        """The fits of x [S, P] after every epoch by one step size."""
        net = clients.net
        reshuffles = clients.context.training.reshuffle
        mask = None
        if self.layers != "all":
            mask = head_mask(net) if self.layers == "last" else net.mask(self.layers)
        objective = Objective(mask=mask)
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
    """Values [S, 1] of `values` [S]; NaN becomes the mean of the others."""
    return torch.where(values.isnan(), values.nanmean(), values)[:, None]


def head_mask(net: Net) -> Tensor:
    """Mask [P] on the CPU: True for the head's parameters."""
    mask = torch.zeros(net.size, dtype=torch.bool)
    mask[net.head_slice] = True
    return mask


def validation_score(
    clients: Clients,
    rows: Tensor | Tensors,
    option: str,
    predict: Predict = predict_row,
) -> Tensor:
    """Score of each client's model on the split "val", float64 [S].

    It is the accuracy, or minus the loss where there is no accuracy. A model whose
    outputs hold a NaN has minus infinity; a client without samples of the split has
    NaN. Raises ValueError where no client has samples of the split.

    Args:
        option: Name of the option that asks for the score, for the error.
        rows: The models [S, P], or several tensors [S, ...] that `predict` takes.
    """
    model = rows if isinstance(rows, dict) else {"w": rows}
    size = torch.zeros(len(clients.ids))
    if clients.has_split("val"):
        size = clients.context.data.size("val")[clients.ids]
    has_val = size > 0
    if not has_val.any():
        raise ValueError(
            f"{option}: it is decided on the clients' 'val' split, which these clients "
            "lack; make one with Federation.split(val=0.2), or leave the option out."
        )
    # Each client has a block of its own: a choice must not depend on the others, and
    # last digits may depend on what is computed together.
    judges = replace(clients, known_blocks=torch.arange(len(size)))
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
    """Mask [S]: True where a client takes `model`, False where it keeps x.

    Args:
        alg: The algorithm, whose `min_size` and `margin` decide.
        x: [S, P] the shared model.
        model: The tuned models [S, P], or tensors [S, ...] that `predict` takes.
        after: The clients with the statistics that belong to `model`.
    """
    is_large = to_device(clients.num_samples, x.device) >= alg.min_size
    if alg.margin is None:
        return is_large
    score_of_x = validation_score(clients, x, "margin")
    score = validation_score(after, model, "margin", predict)
    return is_large & (score > score_of_x + alg.margin)


VoteKernel = Literal["exp", "inverse", "gauss_dim"]


@algorithm_options
class KnnPer(FedOpt):
    """kNN-Per (Marfoq et al. 2022): a client's nearest samples add a vote to the model.

    server: x [P] and the optimizer's state, see `FedOpt` · client: nothing · down: x
    [S, P] (1 model) · up: delta [S, P] (1 model).

    Training is that of `FedOpt`. For evaluation each client stores what the head sees
    of its training samples, and mixes probabilities: `p = lam p_knn + (1 - lam) p_x`
    (equations 6 and 7). lam = 0 is FedAvg. p_knn weighs the labels of the k nearest
    samples by their Euclidean distance d, see `kernel`.

    Targets that are no classes have the weighted mean of the neighbours' targets. With
    the hinge loss it is the mean of their signs, mixed with the score; with binary
    cross entropy the mean of their labels, mixed with the score's probability and given
    as a logit. Of equally near samples the earlier ones vote. A client with fewer than
    k samples uses all of them, and a client without training samples p_x alone.

    Acceptance (Motley, section 4.3, observation 1, and the remark of 4.1): a client
    with less than `min_size` samples stays with p_x. So does a client for which p does
    not beat p_x by more than `margin` on its validation split, in accuracy or minus its
    loss; without validation samples it cannot.

    The other options are those of `FedOpt`.

    Args:
        k: Number of neighbours that vote.
        lam: Weight of the neighbours' vote: 0 is the shared model alone, 1 the
            neighbours alone.
        kernel: Weight of a neighbour at distance d: "exp" is the paper's
            exp(-d); "inverse" is 1 / d, where an exact match takes all (Motley's silo
            code); "gauss_dim" is exp(-d^2 / D) for D features (the authors' code).
        min_size: Number of training samples below which a client stays with p_x.
        margin: Number by which p must beat p_x on the validation split. None accepts p.
    """

    k: PositiveInt = 10
    lam: UnitFloat = 0.5
    kernel: VoteKernel = "exp"
    min_size: NonNegativeInt = 0
    margin: float | None = None

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        late = ("k", "lam", "kernel", "min_size", "margin")
        return super().traits._replace(
            returns="probabilities",
            evaluation_only=late,
            chooses_on_val=self.margin is not None,
        )

    def server_init_args(self, net: Net) -> Tensors:
        if net.target is not None:
            check_votes(net, net.target)
        return super().server_init_args(net)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        x = down["x"]
        z, y = clients.features(x)  # [S, n, H], [S, n]: short clients are padded
        n = to_device(clients.num_samples, y.device)
        model = {"w": x, "z": z.flatten(2), "y": y, "n": n}
        if self.min_size or self.margin is not None:
            model["lam"] = z.new_full((len(z),), self.lam)
            takes = accept_tuned(self, x, model, clients, clients, self.predict)
            model["lam"] = model["lam"] * takes
        return model

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Predictions `(1 - lam) p + lam q` [B, ...] of model and neighbours.

        p are w's probabilities (for numbers its scores). q is the weighted mean of the
        labels y of the k nearest neighbours, with the weights of the option `kernel`.
        The neighbours are among the first n rows of z [n_max, H], and near to the
        features of x (what w's head sees).
        """
        scores = net(model["w"], x)
        has_classes = net.scores_classes
        has_classes &= net.loss_fn not in (hinge, binary_cross_entropy)
        has_classes &= not model["y"].is_floating_point()
        if model["n"] == 0:  # a client without training samples
            return scores.softmax(1) if has_classes else scores
        features = net.features(model["w"], x).flatten(1)
        weight, near = nearest_neighbours(
            features, model["z"], model["n"], self.k, self.kernel
        )
        lam = model.get("lam", self.lam)
        labels = model["y"][near]
        if has_classes:
            # A sample without a label has no vote.
            has_label = (labels != IGNORED_LABEL)[..., None]
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


def check_votes(net: Net, target: Target) -> None:
    """Raises ValueError where samples have no class for which neighbours can vote.

    Of numbers and of several yes-or-no labels they take a mean.
    """
    is_cross_entropy = net.loss_fn is cross_entropy
    is_cross_entropy |= isinstance(net.loss_fn, CrossEntropyLoss)
    scores_classes = net.scores_classes and not net.single_score
    if (is_cross_entropy or scores_classes) and target.shape:
        raise ValueError(
            "data: kNN-Per's neighbours vote with a label a sample, and these targets "
            "are probabilities, or one for each step; give int64 labels [n]."
        )
    is_known = net.loss_fn in (hinge, binary_cross_entropy)
    if net.scores_classes and net.single_score and not is_known:
        raise ValueError(
            "loss: kNN-Per mixes probabilities of classes, which "
            f"{loss_name(net.loss_fn)} does not give for a single score; take "
            "loss='binary_cross_entropy' or 'hinge'."
        )


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

    Args:
        queries: Features of the samples that are predicted.
        store: Features of a client's training samples; rows from `n` on are padding.
        n: The client's number of training samples.
        kernel: As in `KnnPer`.
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
    - "exact": `w <- w - beta (v - alpha H(w; D'') v)`, by automatic differentiation, in
      the same way on every engine

    A client is evaluated with x after `steps` inner steps on its training data, never
    on test data. The run's momentum and weight decay have no effect. With batch
    norm each of the gradients updates the statistics, but for the exact variant's H v.

    Deviations: `scale_delta` divides delta by |v|, because w + delta v and w - delta v
    are equal in float32 where v is small. Clients weigh by their samples; in the paper
    they weigh the same, as with `weighting="uniform"`.

    The other options are those of `FedAvg`.

    Args:
        variant: Form of the second derivative: "fo" leaves it out (first order), "hf"
            takes finite differences (Hessian-free), "exact" is exact.
        alpha: Step size of the inner step; None takes the run's `lr`, in all rounds.
        beta: Step size of the outer step; None takes that of the round.
        delta: Size of the finite difference, for "hf".
        scale_delta: True divides delta by |v|; False is the paper's.
        steps: Inner steps at evaluation. The paper takes one.
    """

    variant: Literal["fo", "hf", "exact"] = "fo"
    alpha: NonNegativeFloat | None = None
    beta: NonNegativeFloat | None = None
    delta: PositiveFloat = 1e-3
    scale_delta: bool = True
    steps: NonNegativeInt = 1

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        reason = "takes its paper's own steps of SGD"
        fixed = {"local_optimizer": reason, "clip_grad": reason}
        return super().traits._replace(fixed_training=fixed)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        warn_unused_momentum(self, clients)
        alpha = clients.run_lr if self.alpha is None else self.alpha
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
        """H v [s, P] on the step's third minibatch, by the option `variant`."""
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
        alpha = clients.run_lr if self.alpha is None else self.alpha

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            return {"w": rows["w"] - alpha * grad(rows["w"])}

        fit = clients.each_batch(
            {"w": down["x"]}, update, steps=self.steps, stream="adapt"
        )
        return {"w": fit.w, "batch_norm": fit.buffers}


def curvature_loss(net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
    """The loss at w [P]; for a row w | v [2 P] a number with gradient H(w) v.

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
