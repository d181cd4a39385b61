"""Local training of a cohort: models as rows, the clients' steps, and what an algorithm's hook may do with its clients' data."""

from __future__ import annotations

from pflcore.local.group import LossFn
from pflcore.local.hooks import Fit, Local
from pflcore.local.net import Net
from pflcore.local.settings import Setting
from pflcore.local.training import Training
from pflcore.local.workers import Engine, choose_engine, onto

__all__ = ["Engine", "Fit", "Local", "LossFn", "Net", "Setting", "Training", "choose_engine", "onto"]
