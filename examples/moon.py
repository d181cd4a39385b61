"""MOON, a method whose clients train with a loss of their own.

It is also among pflcore's methods, as `moon`, and the two give the same models.

Symbols: S clients of a cohort, P parameters of a model, B samples of a batch, H
features, C classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pflcore import Clients, FedAvg, Net, Objective
from pflcore.algorithms import Payload, Tensors, TrainResult
from pflcore.check import NonNegativeFloat, PositiveFloat
from pflcore.testing import check


@dataclass(frozen=True)
class MOON(FedAvg):
    """MOON (Li et al. 2021): features stay near those of the shared model.

    server: x [P] · client: last [P] (its model after its last training) · down: x
    [S, P] · up: delta [S, P]

    With z, z_g and z_p the features of a sample under the model in training, the shared
    model and the client's last model, a sample's loss is its cross-entropy plus `mu *
    -log(exp(cos(z, z_g) / T) / (exp(cos(z, z_g) / T) + exp(cos(z, z_p) / T)))`.

    Args:
        mu: Weight of the second term; with 0 this is FedAvg.
        temperature: T.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"last": down["x"]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        models = {"shared": down["x"], "last": client_state["last"]}
        fit = clients.fit(down["x"], Objective(loss=self.loss, extra=models))
        return {"last": fit.w}, {"delta": fit.w - down["x"]}, fit

    # The loss of one client on a batch: `row` [P], x [B, ...], y [B]. `extra` holds the
    # client's rows [P] of what `Objective(extra=)` was given for the cohort.
    def loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        z, scores = net.features_and_scores(row, x)  # [B, H], [B, C]
        with net.as_reference():  # without gradients
            z_shared = net.features(extra["shared"], x)
            z_last = net.features(extra["last"], x)
        near = cosine_similarity(z, z_shared, dim=1) / self.temperature
        far = cosine_similarity(z, z_last, dim=1) / self.temperature
        contrast = torch.logaddexp(near, far) - near
        return net.batch_loss(scores, y) + self.mu * contrast.mean()


if __name__ == "__main__":
    check(MOON())
    print("MOON keeps the rules.")
