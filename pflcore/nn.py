"""Modules for models that pflcore trains."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore import kinds
from pflcore._mode import context
from pflcore.factorized import FactorizedConv2d, FactorizedLinear, factorize

__all__ = ["Dropout", "FactorizedConv2d", "FactorizedLinear", "factorize", "mixed", "uniform"]

__all__ = ["Dropout"]

_STEP = -7046029254386353131  # 2^64 / golden ratio, as int64: successive counters land far apart
_MIX = (-4658895280553007687, -7723592293110705685)  # the multipliers of the 64-bit finaliser of SplitMix (Steele et al. 2014)


def _shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # >> repeats the sign bit; a hash needs zeros


def mixed(z: Tensor) -> Tensor:
    """A bijective hash of int64 numbers, elementwise: bits of the result look independent even for successive numbers."""
    z = (z ^ _shifted(z, 30)) * _MIX[0]
    z = (z ^ _shifted(z, 27)) * _MIX[1]
    return z ^ _shifted(z, 31)


def uniform(seed: Tensor, layer: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Integers from 0 to 2^24 - 1, of this shape, a function of `seed` ([] int64), `layer` and each element's place alone."""
    count = 1
    for s in shape:
        count *= s
    places = torch.arange(count, device=seed.device) * _STEP
    jump = (layer * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped by hand: Python's numbers do not overflow
    return _shifted(mixed(mixed(seed + jump) + places), 40).view(shape)


@kinds.takes(p=kinds.number(0, 1, "a probability in [0, 1]"))
class Dropout(nn.Module):
    """`nn.Dropout` whose numbers belong to the client and the step, so that results repeat for any number of workers.

    While pflcore trains, the mask is a hash of the client's own seed of this step, the number of the random layer within the forward
    pass, and the element's place: the same in every engine, and usable under `torch.vmap`. Training such a module by hand, outside
    pflcore, draws from torch's global generator as `nn.Dropout` does. In evaluation it is the identity.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p: expected a probability from 0 to 1, got {p}.")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if context.seed is None:
            return F.dropout(x, self.p, training=True)
        layer, context.layer = context.layer, context.layer + 1
        if self.p == 1:
            return x * 0
        keep = uniform(context.seed, layer, x.shape) >= round(self.p * (1 << 24))
        return x * keep.to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
