"""Whole runs: the loop over rounds, its options, and its results."""

from pflcore.simulation._attacks import Adversary
from pflcore.simulation._exported import load_model
from pflcore.simulation._history import History
from pflcore.simulation._loop import Simulation
from pflcore.simulation._per_target import run_each_target
from pflcore.simulation._settings import Evaluation, Hardware, Robustness

__all__ = [
    "Adversary",
    "Evaluation",
    "Hardware",
    "History",
    "Robustness",
    "Simulation",
    "load_model",
    "run_each_target",
]
