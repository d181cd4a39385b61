"""Which of torch's losses are ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pflcore.local.losses import CRITERIA, loss_of, squared


def test_torchs_losses_with_default_options_take_the_fast_path() -> None:
    assert loss_of(nn.CrossEntropyLoss()) is CRITERIA["cross_entropy"] and loss_of(nn.MSELoss()) is squared is loss_of(F.mse_loss)
    for loss in (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(weight=torch.ones(4)), nn.CrossEntropyLoss(ignore_index=1)):
        assert loss_of(loss) is loss
    scores, y = torch.randn(5, 1), torch.randn(5)
    assert loss_of(nn.MSELoss())(scores, y) == F.mse_loss(scores[:, 0], y)  # not [5, 1] against [5]
