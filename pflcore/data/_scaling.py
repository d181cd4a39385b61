"""The statistics by which features are standardized.

Symbols: N clients; B samples are in a batch, n in a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scaling(NamedTuple):
    """Statistics by which features were standardized.

    A standardized feature is x = (raw - mean) / deviation.

    Attributes:
        mean: [N, ...] float64, of each client's training samples; of one client [...]
        deviation: of the same shape and samples; 1 where a feature is constant
    """

    mean: Tensor
    deviation: Tensor

    def for_client(self, client: int) -> Scaling:
        """The statistics [...] of one client."""
        return Scaling(self.mean[client], self.deviation[client])

    def apply(self, raw: Tensor) -> Tensor:
        """Raw features [B, ...] of one client, standardized, in their own dtype.

        The statistics are those of one client, [...].
        """
        mean = self.mean.to(raw.device).double()
        deviation = self.deviation.to(raw.device).double()
        return ((raw.double() - mean) / deviation).to(raw.dtype)

    def combine_after(self, first: Scaling) -> Scaling:
        """Statistics of features that were standardized by `first`, then by these."""
        mean = self.mean.to(first.mean.device)
        deviation = self.deviation.to(first.mean.device)
        return Scaling(first.mean + first.deviation * mean, first.deviation * deviation)


def scaling_of(samples: Tensor) -> Scaling:
    """Mean and deviation of samples [n, ...]; 1 where all are equal."""
    is_constant = (samples == samples[0]).all(0)
    deviation = samples.std(0, correction=0)
    return Scaling(samples.mean(0), torch.where(is_constant, 1.0, deviation))
