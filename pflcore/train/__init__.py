"""Local training of a cohort: models as rows, the clients' steps, and what an algorithm's hook may do with its clients' data."""

from __future__ import annotations

from pflcore.data.federation import Federation
from pflcore.train.group import LossFn
from pflcore.train.hooks import Fit, Local
from pflcore.train.net import Net
from pflcore.train.path import Path, choose_path
from pflcore.train.preflight import check_run
from pflcore.train.settings import Setting
from pflcore.train.training import Training
from pflcore.train.workers import Engine, one_thread, onto

__all__ = ["Engine", "Fit", "Local", "LossFn", "Net", "Path", "Setting", "Training", "onto", "prepared"]


def prepared(
    net: Net, data: Federation, training: Training, engine: str = "auto", workers: int | None = None, seed: int = 0, rounds: int = 1
) -> tuple[Setting, Path]:
    """What a run needs, after one forward and backward pass of one batch: model, data and criterion fit together, and the path that
    trains the model is the model. ValueError or TypeError in one sentence where something does not fit."""
    with one_thread():
        net = net.reading(data.fields)
        check_run(net, data, training)
        net, path, chain = choose_path(net, data, engine)
    if chain is not None and training.local_optimizer != "sgd":
        path = path._replace(why=f"{path.why}; it gives the gradients, and AdamW takes its steps in torch")
    return Setting(net, data, training, Engine(path.engine, workers, chain), seed, rounds), path
