"""Results of runs: records, tables and pictures."""

from pflcore.results.record import Run, read

__all__ = ["Run", "read"]
