"""How reports of many weights are read."""

from __future__ import annotations

import torch

from pflcore.simulation.everyone import whole


def test_long_weights_are_read_as_short_ones() -> None:
    index, weight = torch.tensor([0, 2]), torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert whole({"index": index, "weight": weight}, 3) == {"weights": [0.25, 0.0, 0.75]}
    assert whole({"index": [0, 2], "weight": [0.1, 0.9]}, 3) == {"weights": [0.1, 0.0, 0.9]}
