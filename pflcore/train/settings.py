"""What stays the same over a run."""

from __future__ import annotations

from typing import NamedTuple

from pflcore.data.federation import Federation
from pflcore.train.net import Net
from pflcore.train.training import Training
from pflcore.train.workers import Engine


class Setting(NamedTuple):
    """What stays the same over a run."""

    net: Net
    data: Federation
    training: Training
    engine: Engine
    seed: int = 0
    rounds: int = 1
