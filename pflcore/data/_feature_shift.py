"""Feature shift: clients that see the same things differently.

A shift is a function of a client's samples and of an amount, which is drawn for the
client: an angle, a deviation, or a constant.

Symbols: client i has samples x [n_i, ...]; images are [n_i, C, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample

from pflcore.check import reject, require
from pflcore.data._deal import seeded_stream

ShiftName = Literal["rotation", "noise", "brightness"]
ShiftFunction = Callable[[int, Tensor, Generator], Tensor]
FeatureShift = ShiftName | ShiftFunction


def _rotate(x: Tensor, degrees: float, generator: Generator) -> Tensor:
    """Images turned against the clock, with pixels between four others as their mean.

    Raises ValueError for samples that are no images.
    """
    require(x.dim() == 4, "shift", "images [n, channels, height, width] to turn", x)
    angle = math.radians(degrees)
    height, width = x.shape[-2:]
    # The grid counts from -1 to 1 along each axis, so pixels may be no squares in it.
    rows = [
        [math.cos(angle), -math.sin(angle) * height / width, 0],
        [math.sin(angle) * width / height, math.cos(angle), 0],
    ]
    turn = torch.tensor([rows], dtype=x.dtype, device=x.device)
    grid = affine_grid(turn, [1, *x.shape[1:]], align_corners=False)
    grid = grid.expand(len(x), -1, -1, -1)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


def _add_noise(x: Tensor, deviation: float, generator: Generator) -> Tensor:
    """Samples with normal noise."""
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x + deviation * noise.to(x.device)


def _add_constant(x: Tensor, constant: float, generator: Generator) -> Tensor:
    """Samples with a constant added to each number."""
    return x + constant


class NamedShift(NamedTuple):
    """A shift that has a name.

    Attributes:
        apply: the function of samples, an amount and a generator
        strength: largest amount of a client, where none is said
        signed: True where amounts may be below 0
    """

    apply: Callable[[Tensor, float, Generator], Tensor]
    strength: float
    signed: bool


SHIFTS: dict[str, NamedShift] = {
    "rotation": NamedShift(_rotate, 45.0, signed=True),
    "noise": NamedShift(_add_noise, 0.5, signed=False),
    "brightness": NamedShift(_add_constant, 0.5, signed=True),
}


def shift_client(
    client: int,
    x: Tensor,  # [n_i, ...]
    shift: Any,
    strength: float | None,
    seed: int,
) -> tuple[Tensor, float]:
    """The samples as the client sees them, and its amount (0 of a function).

    Raises ValueError where a function returns another shape, or numbers that are not
    finite, and where it is given a strength.

    Args:
        client: number of the client
        x: the client's samples
        shift: a name of `SHIFTS`, or a function
        strength: largest amount; None for that of the name
        seed: seeds the client's draws
    """
    stream = seeded_stream(seed, f"feature shift {client}")
    fraction = float(stream.random_sample())
    generator = torch.Generator().manual_seed(int(stream.randint(2**31)))
    if isinstance(shift, str):
        named = SHIFTS[shift]
        limit = named.strength if strength is None else strength
        amount = limit * (2 * fraction - 1 if named.signed else fraction)
        return (x if amount == 0 else named.apply(x, amount, generator)), amount
    expected = "None, as the function of the shift has none"
    require(strength is None, "strength", expected, strength)
    shifted = shift(client, x.clone(), generator)
    place = f"shift of client {client}"
    fits = isinstance(shifted, Tensor) and shifted.shape == x.shape
    require(fits, place, f"samples of shape {list(x.shape)}", shifted)
    if not bool(shifted.isfinite().all()):
        reject(place, "finite numbers", "NaN or infinite ones")
    return shifted.to(x.dtype), 0.0
