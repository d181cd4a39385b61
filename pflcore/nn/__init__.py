"""Modules for models that pflcore trains.

They work in every engine, and draw random numbers that belong to a client and a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.check import PositiveFloat, UnitFloat, checked, require
from pflcore.nn._context import forward_state
from pflcore.nn._factorized import FactorizedConv2d, FactorizedLinear, factorize
from pflcore.ops._chain import apply_dropout, hashed_integers

__all__ = [
    "Dropout",
    "FactorizedConv2d",
    "FactorizedLinear",
    "Normalize",
    "factorize",
]


@checked
class Dropout(nn.Module):
    """`nn.Dropout` whose random numbers belong to the client and the step.

    So results repeat for any number of workers. While pflcore trains, the mask is a
    hash of the client's seed of this step, of the number of the random layer within the
    forward pass, and of the element's place. The mask is the same in every engine, and
    works under `torch.vmap`. Outside of pflcore such a module draws from torch's global
    generator, as `nn.Dropout` does. In evaluation mode it is the identity.

    Args:
        p: The probability with which an element is dropped.
    """

    def __init__(self, p: UnitFloat = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """`x` [...] with elements dropped, in training mode.

        The other elements are divided by 1 - p.
        """
        if not self.training or self.p == 0:
            return x
        if forward_state.seed is None:
            return F.dropout(x, self.p, training=True)
        layer = forward_state.random_layer
        forward_state.random_layer = forward_state.random_layer + 1
        numbers = hashed_integers(forward_state.seed, layer, x.shape)
        return apply_dropout(x, self.p, numbers)

    def extra_repr(self) -> str:
        return f"p={self.p}"


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
