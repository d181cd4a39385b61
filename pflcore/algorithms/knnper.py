"""kNN-Per: the shared model and a vote of the client's own nearest training samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.fedopt import FedOpt
from pflcore.algorithms.finetune import value
from pflcore.algorithms.protocol import Payload, Tensors, Traits
from pflcore.check import Count, Share, Whole
from pflcore.data.ragged import onto
from pflcore.train import Clients, Net
from pflcore.train.losses import binary_cross_entropy, cross_entropy, hinge

Kernel = Literal["exp", "inverse", "gauss_dim"]


@dataclass(frozen=True)
class KnnPer(FedOpt):
    """kNN-Per (Marfoq et al. 2022, equations 6 and 7): `p = lam p_knn + (1 - lam) p_x`
    on probabilities.

    server: x [P] and the optimizer's state · client: nothing · down: x (1 model) · up: delta (1
    model). Trains as `FedOpt`; for evaluation each client stores what the head sees of its
    training samples. p_knn weighs the labels of the k nearest (Euclidean distance d) by
    `kernel`: "exp" exp(-d) (the paper), "inverse" 1 / d (an exact match takes all; Motley's
    silo code), "gauss_dim" exp(-d^2 / D) (the authors' code). Targets instead of classes: the
    weighted mean of the neighbours' targets; hinge loss: of their signs, mixed with the score;
    binary cross entropy: of their labels, mixed with the score's probability, and given as a
    logit. Of equally near samples the earlier ones vote. A client with fewer than k samples
    uses all of them. lam = 0 is FedAvg.
    Acceptance (Motley, section 4.3, observation 1, and the remark of 4.1): a client with less than
    `min_size` samples, or whose accuracy (or minus its loss) on its validation split does not beat
    x's by more than `margin`, stays with p_x; without validation samples none beats it.
    """

    k: Count = 10  # neighbours
    lam: Share = 0.5  # 0: the shared model alone, 1: the neighbours alone
    # a neighbour's vote at distance d: exp(-d), 1 / d, or exp(-d^2 / D)
    kernel: Kernel = "exp"
    min_size: Whole = 0  # clients with fewer training samples keep x
    margin: float | None = None  # by how much p must beat x on the validation split

    @property
    def traits(self) -> Traits:
        late = ("k", "lam", "kernel", "min_size", "margin")
        return super().traits._replace(returns="probabilities", late=late)

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        z, y = clients.features(down["x"])  # [S, n, H], [S, n]: short clients are padded
        criterion = clients.net.criterion
        labels = criterion is cross_entropy or isinstance(criterion, nn.CrossEntropyLoss)
        if y.dim() > 2 and labels:
            what = "probabilities" if y.is_floating_point() else "one for each step"
            raise ValueError(
                "data: kNN-Per's neighbours vote with a label a sample, and these targets are "
                f"{what}; give int64 labels [n]."
            )
        n = onto(clients.size, y.device)
        model = {"w": down["x"], "z": z.flatten(2), "y": y, "n": n}
        if self.min_size or self.margin is not None:
            model["lam"] = z.new_full((len(z),), self.lam).masked_fill(n < self.min_size, 0.0)
        if self.margin is not None:
            gain = value(clients, model, predict=self.predict) - value(clients, down["x"])
            model["lam"] = model["lam"].masked_fill(~(gain > self.margin), 0.0)
        return model

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """`(1 - lam) p + lam q`: p are w's probabilities (for numbers its scores), q is the mean of
        the labels y of the k nearest of the first n rows of z [n_max, H] to the features of x (what
        w's head sees), weighted as the option kernel says."""
        features = net.features(model["w"], x).flatten(1)
        weight, near = neighbours(features, model["z"], model["n"], self.k, self.kernel)  # [B, k]
        lam = model.get("lam", self.lam)
        scores, labels = net(model["w"], x), model["y"][near]
        votes = net.scores_classes and net.criterion not in (hinge, binary_cross_entropy)
        if votes and not labels.is_floating_point():
            one_hot = F.one_hot(labels.clamp(min=0), scores.shape[1])
            vote = (weight[..., None] * one_hot).sum(1)
            return (1 - lam) * scores.softmax(1) + lam * vote.to(scores)
        values = torch.where(labels > 0, 1.0, -1.0) if net.criterion is hinge else labels
        weight = weight.view(*weight.shape, *[1] * (labels.dim() - 2))
        mean = (weight * values).sum(1).view_as(scores)
        if net.criterion is not binary_cross_entropy:
            return (1 - lam) * scores + lam * mean.to(scores)
        p = (1 - lam) * scores.double().sigmoid() + lam * mean
        return p.logit(eps=1e-12).to(scores)


def neighbours(
    queries: Tensor, store: Tensor, n: Tensor | int, k: int, kernel: Kernel = "exp"
) -> tuple[Tensor, Tensor]:
    """Weights [B, k'] float64, summing to 1, and places [B, k'] of the k' = min(k, n) nearest of
    the first `n` rows of `store` [n_max, H].

    Weights are a softmax of -d: exp(-d) itself is 0 / 0 for far points. Places past `n` come with
    weight 0.
    """
    square = ops.pairwise_sqdist(queries, store)  # [B, n_max] float64, exact where points coincide
    square[:, torch.arange(len(store), device=store.device) >= n] = torch.inf
    square, near = smallest(square.nan_to_num(torch.inf, torch.inf), min(k, len(store)))
    if kernel == "inverse":
        same = square == 0
        weight = torch.where(same.any(1, keepdim=True), same.double(), square.rsqrt())
        return weight / weight.sum(1, keepdim=True), near
    far = square.sqrt() if kernel == "exp" else square / store.shape[1]
    return torch.softmax(-far, 1), near


def smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row of `values` [B, n] and their places, ascending by (value, place):
    `topk` leaves open which of equals it takes, and that depends on n. A stable sort of everything
    costs 30 times as much."""
    last = values.topk(k, dim=1, largest=False).values.amax(1, keepdim=True)
    less, equal = values < last, values == last
    taken = less | (equal & (equal.cumsum(1) <= k - less.sum(1, keepdim=True)))
    place = taken.nonzero()[:, 1].view(-1, k)
    found, order = values.gather(1, place).sort(dim=1, stable=True)
    return found, place.gather(1, order)
