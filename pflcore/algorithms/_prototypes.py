"""Class prototypes, and FedProto, whose clients share nothing else.

A prototype is the mean of the features of a class's samples. The server keeps one for
each class that some client has shown it.

Symbols: S clients are in the cohort; a model has P parameters; C classes; H features;
z are features [B, H] and y labels [B] of B samples.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Claim,
    Cohort,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
)
from pflcore.algorithms._task import check_class_scores, check_sample_labels
from pflcore.check import NonNegativeFloat, Weighting
from pflcore.train import Clients, Net, Objective


def zero_prototypes(net: Net) -> Tensor:
    """Zeros [C, H], in the shape of the prototypes of a model.

    Raises ValueError where samples have no class.
    """
    check_sample_labels(net, "a mean feature of each class")
    check_class_scores(net, "prototypes are of classes")
    return net.w0.new_zeros(net.classes, net.num_features)


def send_to_all(state: Tensors, cohort: Cohort, *names: str) -> Payload:
    """Tensors [...] of the server's state for every client, [S, ...]."""
    count = len(cohort.ids)
    return {name: state[name].expand(count, *state[name].shape) for name in names}


def client_prototypes(clients: Clients, w: Tensor) -> Tensors:
    """The upload of the models `w` [S, P]: "prototypes" [S, C, H], "counts" [S, C]."""
    found = clients.class_features(w)
    return {"prototypes": found.means.to(w), "counts": found.counts.to(w)}


def counts_claim(state: Tensors, cohort: Cohort) -> Claim:
    """The claim of "counts" [C]: a client's samples of each class.

    Together they are no more samples than the client has.
    """
    samples = cohort.num_samples
    return Claim(state["known"], low=0, is_whole=True, most=samples)


def mean_prototypes(state: Tensors, up: Tensors, weighting: str) -> Changes:
    """The new "prototypes" [C, H] and "known" [C] of the server.

    A class of which no client of the cohort has samples keeps its prototype.

    Args:
        state: The server's state.
        up: The uploads that `client_prototypes` made.
        weighting: "samples" weighs a client's prototype by its samples of the class,
            "uniform" those of all clients that have the class equally.
    """
    weight = up["counts"].double()
    if weighting == "uniform":
        weight = (weight > 0).double()
    total = weight.sum(0)  # [C]
    sums = torch.einsum("sc,sch->ch", weight, up["prototypes"].double())
    means = sums / total.clamp(min=1)[:, None]
    is_new = total > 0
    prototypes = state["prototypes"]
    return {
        "prototypes": torch.where(is_new[:, None], means.to(prototypes), prototypes),
        "known": torch.where(is_new, 1, state["known"]),
    }


def prototype_distance(z: Tensor, y: Tensor, extra: Tensors) -> Tensor:
    """Mean squared difference [] of features and the prototypes of their classes.

    The mean is one over all samples and features. Samples without a label, or of a
    class without a prototype, add 0.

    Args:
        z: [B, H] the features.
        y: [B] the labels.
        extra: "prototypes" [C, H] and "known" [C].
    """
    of_class = y.clamp(min=0)
    counts = extra["known"][of_class] * (y >= 0)
    distance = (z - extra["prototypes"][of_class]).square().mean(1)
    return (counts * distance).sum() / len(y)


@algorithm_options
class FedProto(Algorithm):
    """FedProto (Tan et al. 2022): clients share the mean feature of each class.

    server: prototypes [C, H], known [C] (1 where a class has a prototype) · client: w
    [P] · down: prototypes [S, C, H], known [S, C] · up: prototypes [S, C, H] (the
    client's own), counts [S, C] (of its samples). No model travels.

    A client minimises its loss plus `lam` times the mean squared difference of its
    samples' features and the prototypes of their classes. After its training it uploads
    the mean feature of each of its classes, and the server takes their mean. A sample
    is given the class of the nearest prototype, by the features of the client's own
    model. Its scores are minus the squared distances. While no class has a prototype,
    the head gives the scores.

    The rule is taken from the paper's abstract and first pages and from the authors'
    code, in which the pull is on each sample. Deviations from that code:

    - The prototypes are those of the trained model in evaluation mode. There they
      average the features that the model had before each step of its last epoch.
    - A sample may be given any class that has a prototype, as in PFLlib. There it is
      one of the classes of the client's own samples.

    Args:
        lam: Weight of the pull towards the prototypes.
        prototype_weighting: Shares of the clients in a prototype: "samples" counts a
            client's samples of the class, "uniform" (the authors' code) is the same
            share for all clients that have the class.
        predict_by: What gives a sample's class: the nearest of the "prototypes", or the
            "head" of the client's model.
    """

    lam: NonNegativeFloat = 1.0
    prototype_weighting: Weighting = "samples"
    predict_by: Literal["prototypes", "head"] = "prototypes"

    traits = Traits(
        batch_norm=("local",),
        model_uploads={"prototypes": "down.prototypes"},
        evaluation_only=("predict_by",),
    )

    def server_init_args(self, net: Net) -> Tensors:
        return {"x0": zero_prototypes(net)}

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"prototypes": x0, "known": x0.new_zeros(len(x0))}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return send_to_all(state, cohort, "prototypes", "known")

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        objective = Objective()
        if self.lam:
            extra = {name: down[name] for name in ("prototypes", "known")}
            objective = Objective(loss=self.loss, extra=extra)
        fit = clients.fit(client_state["w"], objective)
        return {"w": fit.w}, client_prototypes(clients.after(fit), fit.w), fit

    def loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        """The run's loss [] on a batch, plus the pull towards the prototypes."""
        z, scores = net.features_and_scores(row, x)
        pull = prototype_distance(z, y, extra)
        return net.batch_loss(scores, y) + self.lam * pull

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        counts = counts_claim(state, cohort)
        return {**super().uploads(state, down, cohort), "counts": counts}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        return mean_prototypes(state, up, self.prototype_weighting), None

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        model = {"w": client_state["w"]}
        if self.predict_by == "prototypes":
            model |= {"prototypes": down["prototypes"], "known": down["known"]}
        return model

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Minus the squared distances [B, C] to the prototypes, or the head's scores.

        A class without a prototype has a lower score than all others.
        """
        if self.predict_by == "head":
            return net(model["w"], x)
        z, head_scores = net.features_and_scores(model["w"], x)
        # The other modes subtract large numbers from each other.
        exact = "donot_use_mm_for_euclid_dist"
        scores = -torch.cdist(z, model["prototypes"], compute_mode=exact).square()
        is_known = model["known"] > 0
        lowest = scores.min(1, keepdim=True).values - 100
        scores = torch.where(is_known, scores, lowest)
        return torch.where(is_known.any(), scores, head_scores)
