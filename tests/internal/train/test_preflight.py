"""What cannot be trained is refused in one sentence before anything is written."""

import pytest
import torch.nn as nn
from small import images

from pflcore import Simulation
from pflcore.train import memory


def test_a_run_that_cannot_fit_is_refused_with_the_number(monkeypatch):
    monkeypatch.setattr(memory, "capacity", lambda device: 1000)
    with pytest.raises(
        MemoryError,
        match=r"^memory: the run needs about [\d.]+ KiB beside data and activations, and cpu has "
        r"1000 B; let",
    ):
        Simulation("local", nn.Linear(6, 4), images())
