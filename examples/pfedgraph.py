"""The server of pFedGraph, a method with a mix of models for each client.

`pflcore.algorithms.PFedGraph` is the whole method, with what its clients do.

Symbols: N clients, S of them in a cohort; P parameters of a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pflcore import pairwise_sqdist
from pflcore.algorithms import (
    Algorithm,
    Changes,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    project_to_simplex,
)
from pflcore.check import PositiveFloat
from pflcore.testing import check
from pflcore.train import Clients


@dataclass(frozen=True)
class PFedGraph(Algorithm):
    """The server's part of pFedGraph (Ye et al. 2023): it learns who helps whom.

    server: x [N, P] (a model for each client) · client: nothing · down: x [S, P] ·
    up: w [S, P]

    The weights p of client i's model minimize `sum_j p_j d_ij + alpha |p - n|^2` over
    the simplex. n_j is the share of the cohort's samples that client j has, and d_ij
    the negative cosine of the updates of i and j. By completing the square, p is the
    point of the simplex that is nearest to `n - d_i / (2 alpha)`. The clients train
    without the paper's regularizer.

    Args:
        alpha: Weight of the pull towards the shares of samples.
    """

    alpha: PositiveFloat = 0.8

    traits = Traits(model_uploads={"w": "down.x"}, reported_state=("mix",))

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x": x0.repeat(n, 1)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {"x": state["x"][cohort.ids]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(down["x"])
        return {}, {"w": fit.w}, fit

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        updates = up["w"] - state["x"][cohort.ids]
        share = cohort.mean_weights("samples").weight.to(updates.device)  # [1, S]
        goal = share + self.cosines(updates) / (2 * self.alpha)
        weight = project_to_simplex(goal)
        # A row of weights for each client: row i makes the model of cohort.ids[i].
        everyone = torch.arange(len(cohort.ids)).expand(len(cohort.ids), -1)
        mix = MixingWeights(weight, everyone, receivers=cohort.ids)
        changes: Changes = {"x": RowUpdate(cohort.ids, mix.aggregate(up["w"]))}
        return changes, mix

    @staticmethod
    def cosines(updates: Tensor) -> Tensor:
        """The cosines [S, S] of updates [S, P], float64, from exact distances."""
        origin = torch.zeros_like(updates[:1])
        square = pairwise_sqdist(updates, origin)  # [S, 1] |u_i|^2
        products = (square + square.T - pairwise_sqdist(updates)) / 2
        lengths = (square * square.T).sqrt()
        return torch.where(lengths > 0, products / lengths, 0.0)


if __name__ == "__main__":
    check(PFedGraph())
    print("PFedGraph keeps the rules.")
