"""What several tests of algorithms look at."""

from __future__ import annotations

import copy
from typing import Any

import torch
from small import Setting, Tensors
from torch import Tensor

from pflcore import Local, Net, evaluate
from pflcore.algorithms import FedAvg, State


def views(alg: FedAvg, state: State, s: Setting) -> tuple[Tensors, Local]:
    """Everybody's personalized view as evaluation has it, and what its hook was given."""
    found: list[tuple[Tensors, Local]] = []

    class Watched(type(alg)):  # type: ignore[misc]
        def personal(self, down: Any, own: Tensors, local: Local) -> Tensors:
            found.append((super().personal(down, own, local), local))
            return found[-1][0]

    watched = copy.copy(alg)
    object.__setattr__(watched, "__class__", Watched)
    evaluate(watched, state, s)
    (one,) = found
    return one


def strengths(net: Net) -> Tensor:
    """Where the strengths of a net's factors stand in its rows, layer after layer."""
    return torch.cat([torch.arange(net.size)[at] for name, at in net.slices.items() if name.endswith("strength")])
