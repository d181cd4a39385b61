"""Results of runs: records, tables and pictures."""

from pflcore.simulation._compare import Comparison
from pflcore.simulation._history import History, RunEnd
from pflcore.simulation.record import read

__all__ = ["Comparison", "History", "RunEnd", "read"]
