"""Local training of a cohort: models as rows, the clients' steps, and what an algorithm's hook may
do with its clients' data."""

from pflcore.data.ragged import onto
from pflcore.train.choose import prepared
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
