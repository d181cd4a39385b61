"""pflcore: a compact algorithm core for personalized federated learning."""

from typing import TYPE_CHECKING, Any

from .ops import (
    Backend,
    TopK,
    aggregate,
    backend,
    feddwa_weights,
    pairwise_sqdist,
    rank1_linear,
    waffle_weights,
)

if TYPE_CHECKING:
    from .algorithms import ALGORITHMS
    from .data import Federation
    from .flat import Net
    from .local import Training
    from .simulation import History, Simulation

__version__ = "0.1.0"

_LATER = {
    "ALGORITHMS": "algorithms",
    "Federation": "data",
    "History": "simulation",
    "Net": "flat",
    "Simulation": "simulation",
    "Training": "local",
}

__all__ = [
    "ALGORITHMS",
    "Backend",
    "Federation",
    "History",
    "Net",
    "Simulation",
    "TopK",
    "Training",
    "aggregate",
    "backend",
    "feddwa_weights",
    "pairwise_sqdist",
    "rank1_linear",
    "waffle_weights",
]


def __getattr__(name: str) -> Any:
    """What simulations need is imported when it is first asked for: somebody who wants the ops loads the ops."""
    if name not in _LATER:
        raise AttributeError(f"module 'pflcore' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"pflcore.{_LATER[name]}"), name)
