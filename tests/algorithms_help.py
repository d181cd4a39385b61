"""What several tests of algorithms look at."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from small import Setting, Tensors, images
from torch import Tensor

from pflcore import Federation, Local, Net, evaluate
from pflcore.algorithms import Cohort, FedAvg, State


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


def t(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Any, want: Any, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64), rtol=rtol, atol=atol)


def cohort(ids: Sequence[int], n: int, round: int = 1) -> Cohort:
    """Clients who have the same weight, in one of 100 rounds."""
    share = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
    return Cohort(torch.tensor(ids), share, torch.ones(len(ids), dtype=torch.long), n, round, 100)


def federation(sizes: Sequence[int] = (7, 20, 31)) -> Federation:
    """`images` in float64."""
    d = images(sizes)
    return Federation(d.x.double(), d.y, d.index, d.classes, d.relabel)


def strengths(net: Net) -> Tensor:
    """Where the strengths of a net's factors stand in its rows, layer after layer."""
    return torch.cat([torch.arange(net.size)[at] for name, at in net.slices.items() if name.endswith("strength")])
