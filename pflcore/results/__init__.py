"""Results of runs: records, tables and pictures."""

from pflcore.results._compare import Comparison
from pflcore.results._history import History, RunEnd
from pflcore.results.record import read

__all__ = ["Comparison", "History", "RunEnd", "read"]
