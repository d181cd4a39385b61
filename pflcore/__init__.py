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
    from .protocol import cross_device, cross_silo
    from .simulation import History, Simulation
    from .tuning import tune

__version__ = "0.1.0"

_LATER = {
    "ALGORITHMS": "algorithms",
    "Federation": "data",
    "History": "simulation",
    "Net": "flat",
    "Simulation": "simulation",
    "Training": "local",
    "cross_device": "protocol",
    "cross_silo": "protocol",
    "tune": "tuning",
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
    "cross_device",
    "cross_silo",
    "feddwa_weights",
    "pairwise_sqdist",
    "rank1_linear",
    "tune",
    "waffle_weights",
]


def __getattr__(name: str) -> Any:
    """What simulations need is imported when it is first asked for: somebody who wants the ops loads the ops."""
    if name not in _LATER:
        raise AttributeError(f"module 'pflcore' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"pflcore.{_LATER[name]}"), name)
