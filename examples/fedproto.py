"""FedProto, a method in which no model travels.

`pflcore.algorithms.FedProto` is the whole method; this one shows its idea alone: what
clients share may be anything that they compute from their samples.

Symbols: S clients of a cohort, P parameters of a model, C classes, H features, B
samples of a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pflcore import Clients, Net, Objective
from pflcore.algorithms import (
    Algorithm,
    Claim,
    Cohort,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
)
from pflcore.check import NonNegativeFloat
from pflcore.testing import check


@dataclass(frozen=True)
class FedProto(Algorithm):
    """FedProto (Tan et al. 2022): clients share the mean feature of each class.

    server: prototypes [C, H], known [C] (1 where a class has a prototype) · client: w
    [P] · down: prototypes [S, C, H], known [S, C] · up: sums [S, C, H] (of a class's
    features), counts [S, C] (of its samples)

    A client's loss is its cross-entropy plus `lam` times the mean squared difference of
    its samples' features and the prototypes of their classes. A prototype is the mean
    feature of a class's samples over the cohort's clients. Each client predicts by its
    own model.

    Args:
        lam: Weight of the pull towards the prototypes; with 0 this is Local.
    """

    lam: NonNegativeFloat = 1.0

    traits = Traits(batch_norm=("local",))

    def server_init_args(self, net: Net) -> Tensors:
        return {"prototypes": net.w0.new_zeros(net.classes, net.num_features)}

    def init(self, prototypes: Tensor, n: int) -> Tensors:
        return {
            "prototypes": prototypes,
            "known": prototypes.new_zeros(len(prototypes)),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        count = len(cohort.ids)
        return {name: rows.expand(count, *rows.shape) for name, rows in state.items()}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        objective = Objective(loss=self.loss, extra=dict(down))
        fit = clients.fit(client_state["w"], objective)
        found = clients.after(fit).class_features(fit.w)
        upload = {"sums": found.sums.to(fit.w), "counts": found.counts.to(fit.w)}
        return {"w": fit.w}, upload, fit

    # The loss of one client on a batch, see MOON. The prototypes are `extra`'s.
    def loss(
        self, net: Net, row: Tensor, x: Tensor, y: Tensor, extra: Tensors
    ) -> Tensor:
        z = net.features(row, x)  # [B, H]
        of_class = y.clamp(min=0)
        is_known = extra["known"][of_class] * (y >= 0)
        difference = (z - extra["prototypes"][of_class]).square().mean(1)
        pull = (is_known * difference).sum() / len(y)
        return net.batch_loss(net.head(row, z), y) + self.lam * pull

    # Each upload that is no update, with the numbers that it may hold: a client has no
    # more samples of its classes than it has samples.
    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        samples = cohort.num_samples
        return {
            "sums": Claim(state["prototypes"]),
            "counts": Claim(state["known"], low=0, is_whole=True, most=samples),
        }

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        counts = up["counts"].sum(0)
        means = up["sums"].sum(0) / counts.clamp(min=1)[:, None]
        is_new = counts > 0
        prototypes = torch.where(is_new[:, None], means, state["prototypes"])
        known = torch.where(is_new, torch.ones_like(counts), state["known"])
        return {"prototypes": prototypes, "known": known}, None


if __name__ == "__main__":
    check(FedProto())
    print("FedProto keeps the rules.")
