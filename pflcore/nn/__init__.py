"""Modules for models that pflcore trains."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.check import Share, checked
from pflcore.nn._factorized import FactorizedConv2d, FactorizedLinear, factorize
from pflcore.nn._mode import context
from pflcore.ops._chain import dropped, uniform

__all__ = ["Dropout", "FactorizedConv2d", "FactorizedLinear", "factorize"]


@checked
class Dropout(nn.Module):
    """`nn.Dropout` whose numbers belong to the client and the step, so that results repeat for any
    number of workers.

    While pflcore trains, the mask is a hash of the client's own seed of this step, the number of
    the random layer within the forward pass, and the element's place: the same in every engine, and
    usable under `torch.vmap`. Training such a module by hand, outside pflcore, draws from torch's
    global generator as `nn.Dropout` does. In evaluation it is the identity.
    """

    def __init__(self, p: Share = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """`x` [...] with elements dropped, as `nn.Dropout`."""
        if not self.training or self.p == 0:
            return x
        if context.seed is None:
            return F.dropout(x, self.p, training=True)
        layer, context.layer = context.layer, context.layer + 1
        return dropped(x, self.p, uniform(context.seed, layer, x.shape))

    def extra_repr(self) -> str:
        return f"p={self.p}"
