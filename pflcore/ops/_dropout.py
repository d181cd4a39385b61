"""Dropout whose random numbers have no state.

Each number is a hash of the client's seed, the layer and the place. So a kernel, the
reference and `pflcore.nn.Dropout` draw the same ones, in any order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# 2^64 / golden ratio, as int64: successive counters become numbers far apart.
_STEP = -7046029254386353131
# The multipliers of SplitMix's 64-bit finaliser (Steele et al. 2014).
_MIX = (-4658895280553007687, -7723592293110705685)
RANDOM_BITS = 24  # of a random integer


def logical_shift(z: Tensor, bits: int) -> Tensor:
    """The int64 numbers `z`, shifted right with zeros in front.

    Torch's `>>` repeats the sign bit instead.
    """
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def splitmix_hash(z: Tensor) -> Tensor:
    """A bijective hash of int64 numbers, elementwise.

    The bits of the result look independent, even for successive numbers.
    """
    z = (z ^ logical_shift(z, 30)) * _MIX[0]
    z = (z ^ logical_shift(z, 27)) * _MIX[1]
    return z ^ logical_shift(z, 31)


def hashed_integers(
    seed: Tensor,  # [...] int64
    layer: int,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:  # [..., *shape] int64
    """Random integers from 0 to 2^24 - 1.

    They depend on the seed, on `layer` and on each element's place alone.

    Args:
        layer: The number of a layer among those that draw random numbers.
    """
    places = torch.arange(math.prod(shape), device=seed.device) * _STEP
    # Python's numbers do not overflow, so the product is wrapped to int64 here.
    layer_step = (layer * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)
    layer_seed = splitmix_hash(seed + layer_step)
    words = splitmix_hash(layer_seed[..., None] + places)
    return logical_shift(words, 64 - RANDOM_BITS).view(*seed.shape, *shape)


def apply_dropout(
    x: Tensor,  # [...]
    p: float,
    numbers: Tensor,  # [...] of `hashed_integers`
) -> Tensor:  # [...]
    """The values, with zeros where a random number is below `p`.

    The others are divided by 1 - p. A random number is an integer in units of 2^-24.
    """
    if p >= 1:
        return x * 0
    is_kept = numbers >= round(p * (1 << RANDOM_BITS))
    return x * is_kept.to(x.dtype) / (1 - p)
