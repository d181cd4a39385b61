"""Personalization without aggregation: every client has a model of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pflcore.algorithms.protocol import (
    Algorithm,
    Changes,
    Cohort,
    Mix,
    Payload,
    Tensors,
    Traits,
)
from pflcore.train import Clients, Fit, Net


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """Each client trains a model of its own, from one common start, and shares nothing: the
    baseline of every paper.

    server: nothing · client: w [P] · down: nothing · up: nothing (0 models).
    """

    traits = Traits(batch_norm=("local",))  # nothing is shared

    def init(self, x0: Tensor, n: int) -> Tensors:
        return {}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        return {}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        return {}, None

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"w": net.w0[None]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        fit = clients.fit(own["w"])
        return {"w": fit.w}, {}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return own
