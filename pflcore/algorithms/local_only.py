"""Personalization without aggregation, or after it: every client adapts a model to its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pflcore.algorithms.base import Cohort, FedAvg, Payload, Tensors
from pflcore.train.bridge import Local
from pflcore.train.net import Net


@dataclass(frozen=True)
class LocalOnly(FedAvg):
    """Each client trains a model of its own, from one common start, and shares nothing: the baseline of every paper.

    server: nothing · client: w [P] · down: nothing · up: nothing (0 models). `server_lr` and `weighting` have no effect.
    """

    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")
    buffers: ClassVar[tuple[str, ...]] = ("local",)  # nothing is shared

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        return {}, {"w": net.w0}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        return {}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        return {"w": local.fit(own["w"]).w}, {}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        return g

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        return {"w": own["w"]}
