"""What runs leave: records, tables, pictures."""

from pflcore.results.record import Run, read

__all__ = ["Run", "read"]
