"""FedCAC: clients share their critical parameters with those whose are the same.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; x
is the common model; `w` [S, P] are the models that clients trained, M_i [P] the mask of
client i's critical parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore import ops
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
    normalize_rows,
)
from pflcore.check import PositiveFloat, UnitFloat, Weighting
from pflcore.train import Clients, Net


@algorithm_options
class FedCAC(Algorithm):
    """FedCAC (Wu et al. 2023): the critical parameters come from similar clients alone.

    server: x [P], and for each client custom [N, P] (the mean of its collaborators'
    models) and mask [N, P] (M_i, whose rows are zeros at first) · client: nothing ·
    down: x [S, P] (1 model) · up: w [S, P] (1 model) and mask [S, P] (true or false).

    Client i trains from the model that it is also evaluated with: custom_i where M_i is
    1, else x. After training from x_i to w_i, the parameter k is the more critical the
    larger `|(w_ik - x_ik) w_ik|` is. In each tensor of parameters the share `tau` of
    the largest ones is M_i; a parameter of which this is 0 is never critical, and equal
    ones are critical together.

    The server computes the overlap `O_ij = 1 - |M_i - M_j|_1 / (2 |M_i|_1)` from exact
    distances. The collaborators of client i are itself and all j with `O_ij >= mean +
    (round / beta) (max - mean)`, where mean and max are those of the overlaps of two
    different clients. So each client has ever fewer of them, and after round beta
    mostly none. custom_i is the plain mean of their models, and x the mean of all
    models, weighed by `weighting`.

    The rule is taken from the paper's abstract and first pages and from its authors'
    code in Fling (`fedcac_group.py`, `fedcac_client.py`). PFLlib's code has the same
    rule, but sends the initial model for custom_i after round 1. Decisions here:
    clients may be absent; then masks are compared within the cohort, and an absent
    client keeps its M_i and custom_i. The server puts a client's model together and
    sends one.

    Args:
        tau: Share of the parameters of each tensor that are critical, from 0 to 1. At 0
            this is FedAvg.
        beta: Round from which on only the most similar clients collaborate.
        weighting: Shares of the clients in the mean x: "samples" or "uniform".
    """

    tau: UnitFloat = 0.5
    beta: PositiveFloat = 100.0
    weighting: Weighting = "samples"

    traits = Traits(
        model_uploads={"w": "down.x"},
        per_client_state=("custom", "mask"),
        reported_state=("mix",),
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        nothing_critical = torch.zeros_like(x0, dtype=torch.bool)
        return {
            "x": x0,
            "custom": lazy_zeros(n, x0),
            "mask": lazy_zeros(n, nothing_critical),
        }

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        custom, mask = state["custom"][cohort.ids], state["mask"][cohort.ids]
        return {"x": torch.where(mask, custom, state["x"])}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        x = down["x"]
        fit = clients.fit(x)
        mask = self.critical_parameters(clients.net, x, fit.w)
        return {}, {"w": fit.w, "mask": mask}, fit

    def critical_parameters(self, net: Net, start: Tensor, trained: Tensor) -> Tensor:
        """Masks [S, P] of the critical parameters of models trained from `start`."""
        sensitivity = ((trained - start) * trained).abs()
        masks = []
        for columns in net.slices.values():
            part = sensitivity[:, columns]
            masks.append(_largest(part, int(self.tau * part.shape[1])))
        return torch.cat(masks, 1)

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        mask = Claim(torch.empty_like(state["x"], dtype=torch.bool))
        return {**super().uploads(state, down, cohort), "mask": mask}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids, models, mask = cohort.ids, up["w"], up["mask"]
        weight = normalize_rows(self.collaborators(mask, cohort.round).double())
        everyone = torch.arange(len(ids)).expand(len(ids), -1)
        mix = MixingWeights(weight, everyone, receivers=ids)
        mean = cohort.mean_weights(self.weighting)
        changes: Changes = {
            "x": mean.aggregate(models)[0],
            "custom": RowUpdate(ids, mix.aggregate(models)),
            "mask": RowUpdate(ids, mask),
        }
        return changes, mix

    def collaborators(
        self,
        mask: Tensor,  # [S, P]
        number: int,
    ) -> Tensor:
        """Mask [S, S]: True where client i collaborates with j in round `number`."""
        critical = mask.float()
        size = critical.sum(1, keepdim=True, dtype=torch.float64)
        # Masks have whole squared distances, which float64 holds exactly.
        overlap = 1 - ops.pairwise_sqdist(critical) / (2 * size)
        overlap = torch.where(size > 0, overlap, 0.0)
        itself = torch.eye(len(mask), dtype=torch.bool, device=mask.device)
        others = overlap[~itself]
        if not len(others):
            return itself
        most = others.max()
        # The mean of equal numbers may be larger than each in its last digit.
        mean = others.mean().clamp(max=most)
        least = torch.lerp(mean, most, number / self.beta)
        return itself | (overlap >= least)


def _largest(values: Tensor, count: int) -> Tensor:
    """Mask [S, Q] of the `count` largest numbers of each row [S, Q], but of zeros.

    Numbers that equal the least of these are among them, too.
    """
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.topk(count, dim=1).values[:, -1:]
    return (values >= least) & (values > 0)
