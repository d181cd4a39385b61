"""GPFL: one body learns features for all clients and features for each.

Symbols: S clients are in the cohort; a model has P parameters, of which the head h has
D and the body the others; B samples are in a batch; C classes; z are the body's
features [H] of a sample; V are the numbers of the valve; e [C, H] are the embeddings of
the classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import (
    Payload,
    Tensors,
    TrainResult,
    Traits,
    algorithm_options,
)
from pflcore.algorithms._task import check_class_scores, check_sample_labels
from pflcore.check import NonNegativeFloat
from pflcore.train import Clients, Net, Objective
from pflcore.train._random import generator_of


@algorithm_options
class GPFL(FedAvg):
    """GPFL (Zhang et al. 2023): a valve splits features into global and personal ones.

    server: x [Q] (the body, the valve and the embeddings e) · client: h [D], its head ·
    down: x [S, Q] · up: delta [S, Q] (Q = P - D + V + C H numbers; h stays).

    The valve turns features z by a condition c [H] into `relu(z (1 + a(c)) + b(c))`. a
    and b are each a linear layer, ReLU and layer norm. The condition of the global
    features z_G is the mean of e over all classes, that of the personal ones z_P the
    mean over the client's training samples. Both, and the frozen embeddings f, are
    those that the client received.

    On a batch a client minimises `CE(h(z_P), y) + CE(cos(z_G, e), y) + lam |z_G - f_y|
    + mu / 2 (|e|^2 + |valve|^2)`. The norm is that of the matrix [B, H] of a batch. All
    parts are trained together. Scores are h(z_P).

    The paper was not at hand; this is the rule of the code that its first author
    released in PFLlib. Deviation from that code: there the conditions are zeros in the
    first round, and after it those of the embeddings that the client itself has
    trained, as they are computed before the received ones replace these. CE is the
    run's loss, which must be one of classes. The valve and the embeddings begin as
    torch's layers do, by draws from the seed of the model.

    The other options are those of `FedAvg`. The author's `run_me.sh` takes lam=.01 and
    mu=.1 for a CNN of four layers and an MLP, lam=.0001 and mu=0 for ResNet-18 and
    fastText, and lam=.01 and mu=1 for a CNN on human activities. The defaults here are
    the lam of the first ones, without their decay.

    Args:
        lam: Strength of the pull of the global features towards the frozen embeddings
            of their classes.
        mu: Weight decay of the valve and the embeddings.
    """

    lam: NonNegativeFloat = 0.01
    mu: NonNegativeFloat = 0.0

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        return super().traits._replace(head_reason="gives the head features of its own")

    def server_init_args(self, net: Net) -> Tensors:
        check_sample_labels(net, "an embedding of each class")
        check_class_scores(net, "GPFL embeds classes")
        body = net.split(net.w0)[0]
        return {"x0": torch.cat([body, *_initial_parts(net)])}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"h": net.w0[None, net.head_slice]}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        rows, embedding = self._whole_rows(down["x"], client_state["h"], clients.net)
        fixed = {
            "embedding": embedding,
            "general": embedding.mean(1),
            "personal": personal_conditions(embedding, clients),
        }
        fit = clients.fit(rows, Objective(loss=self.loss, extra=fixed))
        w, others = fit.w.split([clients.net.size, rows.shape[1] - clients.net.size], 1)
        body, h = clients.net.split(w)
        return {"h": h}, {"delta": torch.cat([body, others], 1) - down["x"]}, fit

    def _whole_rows(
        self,
        x: Tensor,  # [S, Q]
        h: Tensor,  # [S, D]
        net: Net,
    ) -> tuple[Tensor, Tensor]:  # [S, P + V + C H], [S, C, H]
        """Rows of model, valve and embeddings, and the embeddings alone."""
        num_body = net.size - h.shape[1]
        w = net.join(x[:, :num_body], h)
        num_features = net.num_features
        embedding = x[:, -net.classes * num_features :]
        whole = torch.cat([w, x[:, num_body:]], 1)
        return whole, embedding.unflatten(1, (net.classes, num_features))

    def loss(
        self,
        net: Net,
        row: Tensor,  # [P + V + C H], the model, the valve and the embeddings
        x: Tensor,  # [B, ...], samples
        y: Tensor,  # [B]
        extra: Tensors,
    ) -> Tensor:
        """The loss of one client on a batch."""
        w, others = row.tensor_split([net.size])
        frozen = extra["embedding"]  # [C, H]
        valve, embedding = others.tensor_split([len(others) - frozen.numel()])
        z = net.features(w, x)
        z_personal = turn_features(valve, z, extra["personal"])
        z_general = turn_features(valve, z, extra["general"])
        directions = F.normalize(embedding.view_as(frozen))
        cosines = F.normalize(z_general) @ directions.T
        # Labels below 0 count in nothing.
        apart = (z_general - frozen[y.clamp(min=0)]) * (y >= 0)[:, None]
        loss = net.batch_loss(net.head(w, z_personal), y) + net.batch_loss(cosines, y)
        pull: Tensor = self.lam * torch.linalg.vector_norm(apart)
        return loss + pull + self.mu / 2 * others.square().sum()

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        net = clients.net
        rows, embedding = self._whole_rows(down["x"], client_state["h"], net)
        valve = rows[:, net.size : rows.shape[1] - embedding[0].numel()]
        condition = personal_conditions(embedding, clients)
        return {"w": rows[:, : net.size], "valve": valve, "condition": condition}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """The head's scores [B, C] of the personal features of samples `x` [B, ...]."""
        z = net.features(model["w"], x)
        z_personal = turn_features(model["valve"], z, model["condition"])
        return net.head(model["w"], z_personal)


def personal_conditions(embedding: Tensor, clients: Clients) -> Tensor:
    """The means [S, H] of the embeddings [S, C, H] over each client's samples."""
    counts = to_device(clients.class_counts, embedding.device).to(embedding.dtype)
    # The model may know more classes than the data.
    counts = F.pad(counts, (0, embedding.shape[1] - counts.shape[1]))
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return (shares[..., None] * embedding).sum(1)


def turn_features(
    valve: Tensor,  # [V], for a and for b a weight, a bias, a scale and an offset
    z: Tensor,  # [B, H]
    condition: Tensor,  # [H]
) -> Tensor:
    """The features [B, H] after the valve: `relu(z (1 + a(c)) + b(c))`."""
    h = len(condition)
    outputs: list[Tensor] = []
    for part in valve.chunk(2):
        weight, bias, scale, offset = part.split([h * h, h, h, h])
        hidden = F.linear(condition, weight.view(h, h), bias).relu()
        outputs.append(F.layer_norm(hidden, (h,), scale, offset))
    a, b = outputs
    turned: Tensor = F.relu(z * (1 + a) + b)
    return turned


def _initial_parts(net: Net) -> list[Tensor]:
    """The valve [V] and the embeddings [C H] before round 1, one after the other."""
    h = net.num_features
    generator = generator_of(net.seed, "GPFL")

    def uniform(count: int) -> Tensor:
        draws = torch.rand(count, generator=generator, dtype=torch.float64)
        return (2 * draws - 1) / math.sqrt(h)

    valve = []
    for _ in ("a", "b"):
        valve += [uniform(h * h), uniform(h), torch.ones(h), torch.zeros(h)]
    embedding = torch.randn(net.classes * h, generator=generator, dtype=torch.float64)
    return [part.to(net.w0) for part in (*valve, embedding)]
