"""Methods that train one model for all clients, compared with peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from bench.peer_rounds import flbench, pfllib
from bench.peer_rounds.problem import Comparison, Play


def pfllib_play(place: str, **options: Any) -> Play:
    """The global model of a server of PFLlib after the rounds."""

    def play(checkout: Path) -> Tensor:
        return pfllib.global_model(pfllib.server_after(checkout, place, **options))

    return play


def flbench_play(place: str, **options: Any) -> Play:
    """The global model of a server of FL-bench after the rounds."""

    def play(checkout: Path) -> Tensor:
        return flbench.global_model(flbench.server_after(checkout, place, **options))

    return play


COMPARISONS = [
    Comparison("fedavg", "pfllib", pfllib_play("serveravg:FedAvg")),
    Comparison("fedavg", "flbench", flbench_play("fedavg:FedAvgServer")),
]
