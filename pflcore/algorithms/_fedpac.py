"""FedPAC: features that agree, and heads that are mixed by what they were trained on.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters, of
which its head has F and its body, the rest, K; C classes; H features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._adaptation import head_mask
from pflcore.algorithms._feddwa import inner_products, simplex_qp
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Claim,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    lazy_zeros,
)
from pflcore.algorithms._prototypes import (
    client_prototypes,
    counts_claim,
    mean_prototypes,
    prototype_distance,
    send_to_all,
    zero_prototypes,
)
from pflcore.check import NonNegativeFloat, PositiveInt, Weighting
from pflcore.train import Clients, Net, Objective


@algorithm_options
class FedPAC(Algorithm):
    """FedPAC (Xu et al. 2023): aligned features, and heads mixed by class statistics.

    server: x [K] (the body), head0 [F], head [N, F] (of the clients that took
    part), prototypes [C, H], known [C] (1 where a class has a prototype) · client:
    nothing · down: x [S, K], head [S, F], prototypes [S, C, H], known [S, C] · up:
    delta [S, K], head [S, F], prototypes [S, C, H], counts [S, C], statistics [S, C *
    H] (h below), variance [S].

    A round of client i:

    1. By the model that it received, it computes h_i, the share of each class times the
       class's mean feature, and `V_i = (mean |z|^2 - |h_i|^2) / n_i`, the variance of
       h_i.
    2. It trains its head for `head_epochs` on the frozen body, then the body on the
       frozen head. The body's loss is the run's plus `lam` times the mean squared
       difference of features and the prototypes of their classes.
    3. It uploads both, and its trained model's mean feature of each class.

    The server takes `x <- x + sum_i n_i / n delta_i`, the means of the prototypes, and
    for each client the head `sum_j p_ij head_j`. p_i minimises `sum_j p_ij^2 V_j +
    |sum_j p_ij (h_i - h_j)|^2` over the simplex. An absent client keeps its
    head.

    The rule is taken from the paper's abstract and first pages and from the authors'
    code. Deviations from that code:

    - The matrix of the quadratic programme is made of the exact distances of all h, and
      solved exactly. There eigenvalues below .01 count as 0 where one of them is
      negative, and so do weights below .001, before the others are divided by their
      sum.
    - A sample whose class has no prototype is not pulled. There it is pulled towards
      the client's own mean feature of the class before its training, except in round 1.
    - The head takes the run's step size. There it is .1 beside .01 for the body
      (`head_lr=0.1, lr=0.01`), and both have a momentum of .5 and a weight decay of
      .0005.

    Args:
        lam: Weight of the pull of features towards the prototypes; 0 pulls nothing.
        mix_heads: Whether heads are mixed. Without it each client has its own head;
            with lam=0 besides, that is FedRep.
        head_epochs: Epochs of the head in a round.
        head_lr: Step size of the head; None takes the run's `lr`.
        prototype_weighting: Shares of the clients in a prototype: "samples" counts a
            client's samples of the class, "uniform" is the same share for all clients
            that have the class.
    """

    lam: NonNegativeFloat = 1.0
    mix_heads: bool = True
    head_epochs: PositiveInt = 1
    head_lr: NonNegativeFloat | None = None
    prototype_weighting: Weighting = "samples"

    traits = Traits(
        batch_norm=("local",),
        model_uploads={"head": "down.head", "prototypes": "down.prototypes"},
        per_client_state=("head",),
        reported_state=("mix",),
    )

    def server_init_args(self, net: Net) -> Tensors:
        body, head = net.split(net.w0)
        return {"x0": body, "head0": head, "prototypes": zero_prototypes(net)}

    def init(self, x0: Tensor, n: int, **more: Tensor) -> Tensors:
        return {
            "x": x0,
            "head0": more["head0"],
            "head": lazy_zeros(n, more["head0"]),
            "prototypes": more["prototypes"],
            "known": more["prototypes"].new_zeros(len(more["prototypes"])),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        head = state["head"][cohort.ids]
        is_new = to_device(cohort.is_new[:, None], head.device)
        down = send_to_all(state, cohort, "x", "prototypes", "known")
        return down | {"head": torch.where(is_new, state["head0"], head)}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        net = clients.net
        w = net.join(down["x"], down["head"])
        statistics, variance = class_statistics(clients, w)
        is_head = head_mask(net)
        # The name of FedRep's first training: with lam=0 the minibatches are the same.
        w = clients.fit(
            w,
            Objective(mask=is_head),
            epochs=self.head_epochs,
            lr=self.head_lr,
            stream="private",
        ).w
        objective = Objective(mask=~is_head)
        if self.lam:
            extra = {name: down[name] for name in ("prototypes", "known")}
            objective = Objective(loss=self.loss, extra=extra, mask=~is_head)
        fit = clients.fit(w, objective)
        body, head = net.split(fit.w)
        up = {
            "delta": body - down["x"],
            "head": head,
            "statistics": statistics,
            "variance": variance,
            **client_prototypes(clients.after(fit), fit.w),
        }
        return client_state, up, fit

    def loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        """The run's loss [] on a batch, plus the pull towards the prototypes."""
        z, scores = net.features_and_scores(row, x)
        pull = prototype_distance(z, y, extra)
        return net.batch_loss(scores, y) + self.lam * pull

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        prototypes = state["prototypes"]
        return {
            **super().uploads(state, down, cohort),
            "delta": state["x"],
            "counts": counts_claim(state, cohort),
            "statistics": Claim(prototypes.flatten()),
            "variance": Claim(prototypes.new_empty(()), low=0),
        }

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        weight = torch.eye(len(ids), dtype=torch.float64)
        if self.mix_heads:
            weight = head_weights(up["statistics"], up["variance"])
        everybody = torch.arange(len(ids)).expand(len(ids), -1)
        mix = MixingWeights(weight, everybody, receivers=ids)
        mean = cohort.mean_weights("samples")
        changes = mean_prototypes(state, up, self.prototype_weighting)
        changes["x"] = mean.aggregate(up["delta"], state["x"])[0]
        changes["head"] = RowUpdate(ids, mix.aggregate(up["head"]))
        return changes, mix

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        return {"head": RowUpdate(cohort.ids, up["head"])}

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": clients.net.join(down["x"], down["head"])}


def class_statistics(clients: Clients, w: Tensor) -> tuple[Tensor, Tensor]:
    """The h [S, C * H] of clients with models `w` [S, P], and their variances [S]."""
    found = clients.class_features(w)
    n = found.counts.sum(1).clamp(min=1)  # [S]
    h = (found.sums / n[:, None, None]).flatten(1)
    # The difference is taken in float64: its error is 1e-16 of the mean square, which
    # is less than what the rounding of float32 features does to a variance (4e-15).
    variance = (found.square / n - h.square().sum(1)) / n
    # Rounding may make a variance of 0 negative.
    return h.to(w), variance.clamp(min=0).to(w)


def head_weights(
    statistics: Tensor,  # [S, C * H]
    variance: Tensor,  # [S]
) -> Tensor:  # [S, S] float64
    """The weights of all heads in each client's head, whose rows sum to 1."""
    noise = variance.double().clamp(min=0).diag()
    grams = torch.stack([inner_products(statistics, row) for row in statistics])
    return torch.stack([simplex_qp(gram) for gram in (grams + noise).cpu()])
