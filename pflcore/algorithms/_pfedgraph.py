"""pFedGraph: the server infers a graph of which clients help each other.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; x0
is the common initial model, `w` [S, P] are the models that clients trained, `u` [S, P]
their updates w - x0; `p` [S, S] are the mixing weights, `share` [S] the clients'
shares of the cohort's samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import (
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
    algorithm_options,
    lazy_zeros,
    squared_norms,
)
from pflcore.check import NonNegativeFloat, PositiveFloat
from pflcore.ops._directions import cosine_matrix
from pflcore.train import Clients, Net, Objective


def project_to_simplex(rows: Tensor) -> Tensor:
    """The nearest points [M, S] of the simplex to `rows` [M, S].

    A point of the simplex has no negative number, and its numbers sum to 1. The nearest
    one is `row - t` with zeros for its negative numbers, for the t that makes the sum
    1. It is exact but for rounding: a sort, and no solver.
    """
    # The same number taken from all of a row moves no nearest point. So large numbers
    # do not cancel in the sums.
    rows = rows - rows.amax(1, keepdim=True)
    descending = rows.sort(dim=1, descending=True).values
    counts = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device)
    # The t for which the largest 1, 2, ... numbers are the ones that stay.
    thresholds = (descending.cumsum(1) - 1) / counts
    num_kept = (descending > thresholds).sum(1, keepdim=True)
    return (rows - thresholds.gather(1, num_kept - 1)).clamp(min=0)


@algorithm_options
class PFedGraph(Algorithm):
    """pFedGraph (Ye et al. 2023): a graph of clients whose updates point the same way.

    server: x0 [P] (the common initial model), and for each client x [N, P] (its
    aggregated model) and r [N, P] (the sum of directions below; zeros at first) ·
    client: nothing · down: x and r [S, P] (2 models; with lam=0 only x) · up: w [S, P]
    (1 model).

    The weights p_ij of the cohort's models in client i's model minimise `sum_j p_ij
    d_ij + alpha |p_i - share|^2` over the simplex, with `d_ij = -cos(w_i - x0, w_j -
    x0)`. So p_i is the point of the simplex that is nearest to `share - d_i / (2
    alpha)`, computed by a sort. Then `x_i <- sum_j p_ij w_j` and `r_i <- sum_j p_ij w_j
    / |w_j|`.

    A client trains from x_i and minimises `F_i(w) - lam sum_j p_ij cos(w, w_j)`, which
    is `F_i(w) - lam r_i . w / |w|`. In its first round there is no graph yet, and r_i
    is zero. It is evaluated with x_i. An absent client keeps its x_i and r_i.

    The paper was not at hand. The sign of the clients' term follows from the graph's:
    one objective weighs p_ij by the dissimilarity -cos in both steps, so clients are
    drawn towards their collaborators. The released code adds the term with lam > 0 and
    so pushes them away, which no lam >= 0 does here. Further
    deviations from that code: a cosine above 0.9 stays what it is, where the code makes
    it 1; a client is evaluated before its local training alone, where the code takes
    the better one of before and after on validation data.

    Args:
        alpha: Weight of the pull towards the shares of samples. The larger it is, the
            less the updates matter; the smaller, the fewer collaborators.
        lam: Strength of the pull towards the collaborators' directions; 0 pulls
            nothing.
    """

    alpha: PositiveFloat = 0.8
    lam: NonNegativeFloat = 0.01

    traits = Traits(
        model_uploads={"w": "down.x"},
        per_client_state=("r",),
        reported_state=("mix",),
    )

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {"x0": x0, "x": x0.repeat(n, 1), "r": lazy_zeros(n, x0)}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        down = {"x": state["x"][cohort.ids]}
        return {**down, "r": state["r"][cohort.ids]} if self.lam else down

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        objective = Objective()
        if self.lam:
            objective = Objective(loss=self.loss, extra={"r": down["r"]})
        fit = clients.fit(down["x"], objective)
        return {}, {"w": fit.w}, fit

    def loss(
        self,
        net: Net,
        row: Tensor,  # [P]
        x: Tensor,  # [B, ...], samples
        y: Tensor,  # [B, ...]
        extra: Tensors,
    ) -> Tensor:
        """The run's loss minus `lam r . row / |row|`, in which 0 / 0 counts as 0."""
        length = torch.linalg.vector_norm(row)
        cosines = (extra["r"] * row).sum() / torch.where(length > 0, length, 1.0)
        return net.loss(row, x, y) - self.lam * cosines

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        ids = cohort.ids
        share = cohort.mean_weights("samples").weight[0]
        weight = self.mixing_matrix(up["w"] - state["x0"], share)
        # Row i are the weights of all of the cohort in the model of client ids[i].
        everyone = torch.arange(len(ids)).expand(len(ids), -1)
        mix = MixingWeights(weight, everyone, receivers=ids)
        changes: Changes = {"x": RowUpdate(ids, mix.aggregate(up["w"]))}
        if self.lam:
            inverse = squared_norms(up["w"]).rsqrt().nan_to_num(posinf=0.0).cpu()
            directions = mix._replace(weight=weight * inverse)
            changes["r"] = RowUpdate(ids, directions.aggregate(up["w"]))
        return changes, mix

    def mixing_matrix(
        self,
        updates: Tensor,  # [S, P]
        share: Tensor,  # [S] float64
    ) -> Tensor:
        """The weights [S, S] of the cohort's models in each client's model, float64."""
        cosine = cosine_matrix(updates).cpu()
        return project_to_simplex(
            to_device(share, cosine.device) + cosine / (2 * self.alpha)
        )
