"""Whole runs: the loop over rounds, what it keeps, and what comes out."""

from pflcore.simulation._everyone import for_everyone
from pflcore.simulation._history import History
from pflcore.simulation._loop import Simulation
from pflcore.simulation._settings import Adversary, Evaluation, Hardware, Robustness

__all__ = [
    "Adversary",
    "Evaluation",
    "Hardware",
    "History",
    "Robustness",
    "Simulation",
    "for_everyone",
]
