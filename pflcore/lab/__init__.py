"""What stands around the core: data by name, results, tuning and the command line.

Nothing of the core imports it. It may need the extras.
"""

__all__: list[str] = []
