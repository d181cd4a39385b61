"""Local training of a cohort: models as rows, the clients' steps, and what an algorithm's hook may
do with its clients' data."""

from __future__ import annotations

from pflcore.data.federation import Federation
from pflcore.data.ragged import onto
from pflcore.train.choose import choose
from pflcore.train.clients import Clients, Fit, Setting
from pflcore.train.engines import Engine, LossFn, Objective
from pflcore.train.net import Net
from pflcore.train.training import Training
from pflcore.train.workers import Workers

__all__ = [
    "Clients",
    "Engine",
    "Fit",
    "LossFn",
    "Net",
    "Objective",
    "Setting",
    "Training",
    "Workers",
    "onto",
    "prepared",
]


def prepared(
    net: Net,
    data: Federation,
    training: Training,
    engine: str = "auto",  # or "chain", "loop", "vmap"
    workers: int | None = None,
    seed: int = 0,
    rounds: int = 1,
) -> Setting:
    """What a run needs, after one trial: model, data and criterion fit together, and what trains
    the model is the model. ValueError in one sentence where something does not fit."""
    net, chosen = choose(net, data, training, engine)
    return Setting(net, data, training, chosen, Workers(workers), seed, rounds)
