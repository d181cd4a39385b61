"""Local training of a cohort: models as rows, the clients' steps, and what an algorithm's hook may
do with its clients' data."""

from pflcore.data._ragged import onto
from pflcore.train._choose import prepared
from pflcore.train._clients import Clients, Fit, Setting
from pflcore.train._engines import Engine, LossFn, Objective
from pflcore.train._net import Net
from pflcore.train._training import Training
from pflcore.train._workers import Workers

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
