"""Modules for models that pflcore trains.

They work in every engine, and draw random numbers that belong to a client and a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.check import PositiveFloat, checked, require
from pflcore.nn._dropout import Dropout
from pflcore.nn._factorized import FactorizedConv2d, FactorizedLinear, factorize

__all__ = [
    "Dropout",
    "FactorizedConv2d",
    "FactorizedLinear",
    "Normalize",
    "factorize",
]


@checked
class Normalize(nn.Module):
    """The first layer of a model whose inputs are shifted and scaled by channel.

    It gives (x - mean) / std, in training and in evaluation, so the model takes raw
    inputs wherever it goes: in a round, for newcomers, in a file. The numbers are never
    trained and never travel. Augmentation comes before it, so a border or a square of
    zeros is black.

    Args:
        mean: The mean of each channel.
        std: The standard deviation of each channel, above 0.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[PositiveFloat]) -> None:
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)
        expected = f"a number for each of {len(self.mean)} channels"
        require(len(self.std) == len(self.mean), "std", expected, std)
        # As buffers they would travel with batch norm's statistics.
        self.shift = nn.Parameter(torch.tensor(self.mean), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(self.std), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The inputs [B, C, ...], normalized."""
        shape = (-1, *[1] * (x.dim() - 2))
        return (x - self.shift.view(shape)) / self.scale.view(shape)

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}"
