"""pflcore: a compact algorithm core for personalized federated learning."""

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

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "TopK",
    "aggregate",
    "backend",
    "feddwa_weights",
    "pairwise_sqdist",
    "rank1_linear",
    "waffle_weights",
]
