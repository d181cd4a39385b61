"""MOON and FedNTD: clients whose loss compares their model with the shared one.

Symbols: S clients are in the cohort; a model has P parameters; a batch has B samples,
with H features each and C classes. x is the server's model, `delta` are the updates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, log_softmax

from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import (
    Payload,
    Tensors,
    TrainResult,
    algorithm_options,
)
from pflcore.algorithms._task import check_class_scores
from pflcore.check import NonNegativeFloat, PositiveFloat
from pflcore.train import Clients, Net, Objective
from pflcore.train._losses import mean_over_steps


@algorithm_options
class MOON(FedAvg):
    """MOON (Li, He and Song 2021): features stay near those of the shared model.

    server: x [P] · client: last [P] (its model after its last training) · down: x [S,
    P] · up: delta [S, P] (1 model).

    With z, z_x and z_last the features of a sample under the model in training, x and
    the client's last model, the loss of the sample is its cross entropy plus `mu *
    -log(exp(cos(z, z_x) / T) / (exp(cos(z, z_x) / T) + exp(cos(z, z_last) / T)))`. In a
    client's first round its last model is x, where the second term has no gradient. x
    and the last model are in evaluation mode, as in the authors' code.

    The features are what the head sees. The authors' models have a projection head of
    two layers before the last layer: a model that has these layers gives the same
    features, and any other model trains as it is.

    The rule is taken from the paper's abstract and first pages and from the authors'
    code. FL-bench computes the same rounds. So do the authors' code and PFLlib where
    all clients take part from round 1 on; there the last model of a client that joins
    later is the initial model instead of x.

    The other options are those of `FedAvg`.

    Args:
        mu: Weight of the second term. 0 is FedAvg.
        temperature: The temperature T, which divides the cosines.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"last": down["x"]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        objective = Objective()
        if self.mu:
            models = {"x": x, "last": client_state["last"]}
            objective = Objective(loss=self.loss, extra=models)
        fit = clients.fit(x, objective)
        return {"last": fit.w}, {"delta": fit.w - x}, fit

    def loss(
        self,
        net: Net,
        row: Tensor,  # [P]
        x: Tensor,  # [B, ...], samples
        y: Tensor,  # [B, ...]
        extra: Tensors,
    ) -> Tensor:
        """The run's loss of a model `row` plus `mu` times the contrast of its features.

        `extra` has the shared model "x" [P] and the client's "last" [P].
        """
        z, scores = net.features_and_scores(row, x)
        with net.as_reference():
            z_shared = net.features(extra["x"], x)
            z_last = net.features(extra["last"], x)
        near = cosine_similarity(z, z_shared, dim=-1) / self.temperature
        far = cosine_similarity(z, z_last, dim=-1) / self.temperature
        contrast = torch.logaddexp(near, far) - near
        return net.batch_loss(scores, y) + self.mu * contrast.mean()


@algorithm_options
class FedNTD(FedAvg):
    """FedNTD (Lee et al. 2022): the shared model is kept where a label says nothing.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).

    The loss of a sample is its cross entropy plus `beta T^2 KL(q_x | q)`. q and q_x are
    the probabilities of the classes but the sample's own, by the model in training and
    by x: `softmax(scores / T)` without the score of the true class. With two classes
    one is left, and the method is FedAvg. x is in evaluation mode.

    The rule is taken from the paper's abstract and first pages and from the authors'
    code. PFLlib computes the same rounds. The factor T^2 is that of the authors' code;
    at T = 1 it plays no part.

    The other options are those of `FedAvg`.

    Args:
        beta: Weight of the second term. 0 is FedAvg.
        temperature: The temperature T, which divides the scores.
    """

    beta: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 1.0

    def server_init_args(self, net: Net) -> Tensors:
        check_class_scores(net, "FedNTD compares the scores of classes")
        return super().server_init_args(net)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        objective = Objective()
        if self.beta:
            objective = Objective(loss=self.loss, extra={"x": x})
        fit = clients.fit(x, objective)
        return client_state, {"delta": fit.w.sub_(x)}, fit

    def loss(
        self,
        net: Net,
        row: Tensor,  # [P]
        x: Tensor,  # [B, ...], samples
        y: Tensor,  # [B, ...]
        extra: Tensors,
    ) -> Tensor:
        """The run's loss of a model `row` plus `beta` times the distillation's.

        `extra` has the shared model "x" [P].
        """
        scores = net(row, x)
        with net.as_reference():
            shared_scores = net(extra["x"], x)
        classes = torch.arange(scores.shape[1], device=y.device)
        # Scores may be those of T steps, [B, C, T].
        is_true = y[:, None] == classes.view(-1, *[1] * (y.dim() - 1))
        log_q = self._log_not_true(scores, is_true)
        log_q_shared = self._log_not_true(shared_scores, is_true)
        q_shared = log_q_shared.exp().masked_fill(is_true, 0)
        divergence = (q_shared * (log_q_shared - log_q)).sum(1)
        if y.dim() > 1:
            divergence = mean_over_steps(divergence, y)
        term = self.beta * self.temperature**2 * divergence.mean()
        return net.batch_loss(scores, y) + term

    def _log_not_true(self, scores: Tensor, is_true: Tensor) -> Tensor:
        """Logarithms of the probabilities of the classes that are not true.

        They are 0 for the true class, which counts in no sum.
        """
        others = (scores / self.temperature).masked_fill(is_true, -torch.inf)
        return log_softmax(others, 1).masked_fill(is_true, 0)
