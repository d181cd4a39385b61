"""Whole runs: the loop over rounds, what it keeps, and what comes out."""

from pflcore.simulation.everyone import for_everyone
from pflcore.simulation.history import History
from pflcore.simulation.loop import Simulation
from pflcore.simulation.settings import Adversary, Evaluation, Hardware, Robustness

__all__ = [
    "Adversary",
    "Evaluation",
    "Hardware",
    "History",
    "Robustness",
    "Simulation",
    "for_everyone",
]
