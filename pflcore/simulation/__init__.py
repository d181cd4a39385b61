"""Whole runs: the loop over rounds, what it keeps, and what comes out."""

from pflcore.simulation.everyone import for_everyone
from pflcore.simulation.history import History
from pflcore.simulation.loop import Simulation

__all__ = ["History", "Simulation", "for_everyone"]
