"""FedAS: received bodies are aligned with one's own, and Fisher traces are weights.

Symbols: S clients are in the cohort; a model has P parameters, of which its body has K;
C classes; H features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pflcore.algorithms._adaptation import head_mask
from pflcore.algorithms._protocol import (
    Algorithm,
    Claim,
    Cohort,
    GradientFn,
    MixingWeights,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    normalize_rows,
    squared_norms,
)
from pflcore.algorithms._task import check_class_scores, check_sample_labels
from pflcore.check import NonNegativeFloat, PositiveInt
from pflcore.train import Clients, Net, Objective


@algorithm_options
class FedAS(Algorithm):
    """FedAS (Yang et al. 2024): aligns the received body, and weighs by Fisher traces.

    server: x [K] (the body) · client: w [P] · down: x [S, K] · up: delta [S, K], trace
    [S].

    A round of client i:

    1. By the model w_i of its last round it computes the mean feature of each class.
    2. It trains the received body for `align_epochs` so that its features approach
       them: a minibatch's loss is the sum over its classes of the mean squared
       difference.
    3. It trains the aligned body and its own head by the run's loss. This is the new
       w_i, with which it is evaluated.
    4. It computes the trace of w_i's empirical Fisher information: the sum over
       minibatches of an epoch of the squared length of the loss's gradient, in
       evaluation mode.

    The server takes `x <- sum_i t_i body_i / sum_i t_i`, t_i being the traces: a client
    that has trained little counts more or less by how steep its loss still is. Where
    all traces are 0, clients count equally. A client that joins has the received body
    and the initial head for w_i.

    The rule is that of the authors' code, since the paper was not at hand. There the
    client's loss is the cross entropy. It aligns on minibatches of 16, here on the
    run's. The default of `align_lr` is that of their code.

    Args:
        align_epochs: Epochs of the alignment.
        align_lr: Step size of the alignment; 0 aligns nothing.
    """

    align_epochs: PositiveInt = 1
    align_lr: NonNegativeFloat = 0.01

    # w is never mixed, so statistics of batch norm are its own.
    traits = Traits(batch_norm=("local",), reported_state=("mix",))

    def server_init_args(self, net: Net) -> Tensors:
        if self.align_lr:
            check_sample_labels(net, "a mean feature of each class")
            check_class_scores(net, "FedAS aligns the features of classes")
        return {"x0": net.split(net.w0)[0]}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        head = net.split(net.w0)[1]
        return {"w": net.join(down["x"], head.expand(len(down["x"]), -1))}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        net = clients.net
        own = client_state["w"]
        w = net.join(down["x"], net.split(own)[1])
        has_body = down["x"].shape[1] > 0
        if self.align_lr and has_body:
            w = self.align(w, own, clients)
        fit = clients.fit(w)
        delta = net.split(fit.w)[0] - down["x"]
        trace = fisher_trace(fit.w, clients.after(fit))
        return {"w": fit.w}, {"delta": delta, "trace": trace}, fit

    def align(
        self,
        w: Tensor,  # [S, P]
        own: Tensor,  # [S, P]
        clients: Clients,
    ) -> Tensor:  # [S, P]
        """Models `w` whose bodies have approached the mean features of `own`."""
        prototypes = clients.class_features(own).means.to(w)
        objective = Objective(
            loss=alignment_loss,
            extra={"prototypes": prototypes},
            mask=~head_mask(clients.net),
        )
        return clients.fit(
            w, objective, epochs=self.align_epochs, lr=self.align_lr, stream="align"
        ).w

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        trace = Claim(state["x"].new_empty(()), low=0)
        return {**super().uploads(state, down, cohort), "trace": trace}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        share = trace_shares(up["trace"])
        mix = MixingWeights(share)
        return {"x": mix.aggregate(up["delta"], state["x"])[0]}, mix


def alignment_loss(
    net: Net,
    row: Tensor,  # [P]
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B]
    extra: Tensors,  # prototypes [C, H]
) -> Tensor:
    """Sum [] over a batch's classes of the mean squared difference to the prototype."""
    of_class = y.clamp(min=0)
    distance = (net.features(row, x) - extra["prototypes"][of_class]).square().mean(1)
    has_label = (y >= 0).to(distance)
    member = one_hot(of_class, net.classes) * has_label[:, None]
    counts = member.sum(0)[of_class].clamp(min=1)  # of the sample's class in the batch
    return (has_label * distance / counts).sum()


def fisher_trace(w: Tensor, clients: Clients) -> Tensor:
    """The traces [S] of the empirical Fisher information of models `w` [S, P].

    They are sums over minibatches, of the squared length of the gradient in evaluation
    mode.
    """

    def add_squared_gradient(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
        length2 = squared_norms(grad(rows["w"]))
        return {"trace": rows["trace"] + length2.to(w)[:, None]}

    rows = {"w": w, "trace": torch.zeros_like(w[:, :1])}
    fit = clients.each_batch(
        rows,
        add_squared_gradient,
        Objective(loss=evaluated_loss),
        epochs=1,
        stream="fisher",
    )
    return fit.rows["trace"][:, 0]


def evaluated_loss(
    net: Net,
    row: Tensor,  # [P]
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B]
    extra: Tensors,
) -> Tensor:
    """The run's loss [] on a batch, in evaluation mode."""
    with net.in_evaluation_mode():
        return net.loss(row, x, y)


def trace_shares(trace: Tensor) -> Tensor:
    """The clients' shares [1, S] by their traces [S]; equal ones where all are 0."""
    weight = trace.double().clamp(min=0)[None]
    return normalize_rows(torch.where(weight.any(), weight, 1.0))
