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


PFLLIB_NORM = (
    "PFLlib pulls by `alpha / 2 * |w - x|` (clientdyn.py, `torch.norm(v1 - "
    "self.global_model_vector, 2)`), the paper by `alpha / 2 * |w - x|^2`"
)

COMPARISONS = [
    Comparison("fedavg", "pfllib", pfllib_play("serveravg:FedAvg")),
    Comparison("fedavg", "flbench", flbench_play("fedavg:FedAvgServer")),
    Comparison(
        "moon",
        "pfllib",
        pfllib_play("servermoon:MOON", mu=5.0, tau=0.5),
        {"mu": 5.0, "temperature": 0.5},
    ),
    Comparison(
        "moon",
        "flbench",
        flbench_play("moon:MOONServer", mu=5.0, tau=0.5),
        {"mu": 5.0, "temperature": 0.5},
    ),
    Comparison(
        "feddyn",
        "pfllib",
        pfllib_play("serverdyn:FedDyn", alpha=0.5),
        {"alpha": 0.5},
        reason=PFLLIB_NORM,
    ),
    # FL-bench leaves `alpha * w` of the pull to the optimizer's weight decay, and
    # weighs the mean of the models by samples.
    Comparison(
        "feddyn",
        "flbench",
        flbench_play(
            "feddyn:FedDynServer", weight_decay=0.5, alpha=0.5, max_grad_norm=1e9
        ),
        {"alpha": 0.5, "weighting": "samples"},
    ),
    Comparison(
        "fedntd",
        "pfllib",
        pfllib_play("serverntd:FedNTD", beta=0.7, tau=2.0),
        {"beta": 0.7, "temperature": 2.0, "weighting": "uniform"},
    ),
]
