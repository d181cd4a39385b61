"""The comparisons with peers; each module holds those of one family of methods."""

import importlib
import pkgutil

from bench.peer_rounds.problem import Comparison


def all_comparisons() -> list[Comparison]:
    """The `COMPARISONS` of every module of this package."""
    found: list[Comparison] = []
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        found.extend(module.COMPARISONS)
    return found
