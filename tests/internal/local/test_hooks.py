"""Local training: what a step is, which batches it takes, and that both engines do the same."""

import pytest

from pflcore import Training
from pflcore.local.workers import Engine


def test_training_options_are_checked():
    for bad in ({"lr": -1.0}, {"batch_size": 0}, {"epochs": 0}, {"momentum": 1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Training(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engine"):
        Engine("gpu")
