"""Methods that train one model for all clients, compared with peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.peer_rounds import fedlab, flbench, fluke, pfllib
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


# Steps of each client in a round, for FedNova.
UNEVEN_STEPS = (1, 4, 2, 5)
PFLLIB_NORM = (
    "PFLlib pulls by alpha / 2 times the norm of w - x (clientdyn.py, `torch.norm(v1 - "
    "self.global_model_vector, 2)`), the paper by alpha / 2 times its square"
)

FLBENCH_DECAY = (
    "FL-bench leaves alpha * w of the pull to weight decay, so it is given a weight "
    "decay of alpha"
)
FLUKE_SUM = (
    "fluke's new model is sum_i v_i w_i with v_i = p_i a / a_i (fednova.py, "
    "`aggregate_models(self.model, client_models, weights, ...)`), the paper's x + "
    "sum_i v_i (w_i - x); the v_i do not sum to 1"
)


def steps_of_client(round: int, client: int, generator: torch.Generator) -> int:
    """The steps of a client in every round."""
    return UNEVEN_STEPS[client]


def fluke_fednova(checkout: Path) -> Tensor:
    """The model of fluke's FedNova, whose clients take their steps by epochs."""
    return fluke.global_model_after(checkout, "fednova", "FedNova", UNEVEN_STEPS)


def fedlab_fednova(checkout: Path) -> Tensor:
    """The model of FedLab's FedNova, whose clients take their steps by epochs."""
    return fedlab.fednova_model(checkout, UNEVEN_STEPS, "weighted_com")


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
    Comparison(
        "feddyn",
        "flbench",
        flbench_play(
            "feddyn:FedDynServer", weight_decay=0.5, alpha=0.5, max_grad_norm=1e9
        ),
        {"alpha": 0.5, "weighting": "samples"},
        reason=FLBENCH_DECAY,
    ),
    Comparison(
        "fedntd",
        "pfllib",
        pfllib_play("serverntd:FedNTD", beta=0.7, tau=2.0),
        {"beta": 0.7, "temperature": 2.0, "weighting": "uniform"},
    ),
    Comparison(
        "fednova",
        "fluke",
        fluke_fednova,
        training={"epochs": 1, "steps": steps_of_client},
        reason=FLUKE_SUM,
    ),
    Comparison(
        "fednova",
        "fedlab",
        fedlab_fednova,
        {"weighting": "uniform"},
        training={"epochs": 1, "steps": steps_of_client},
    ),
]
