"""The ops, and the SGD step of local training.

Each function checks its arguments once and calls an op of the torch library `pflcore`.
One file holds all of an op. Every op has a reference in plain PyTorch, which runs where
no kernel is loaded (see `pflcore.backend()`).

Symbols: N clients; M rows of the result; P parameters; K nearest neighbours; B samples
of a batch; I inputs, F factors and O outputs of a layer; S clients of a cohort; Q
columns of a row.
"""

from . import _chain as _chain  # defines the ops that only local training calls
from . import reference as reference  # the specification of the ops
from . import stream as stream
from ._aggregate import aggregate
from ._library import backend
from ._nearest import nearest
from ._rank1 import rank1_linear
from ._sgd import sgd_step_
from ._sqdist import pairwise_sqdist
from ._weights import TopK as TopK
from ._weights import feddwa_weights, waffle_weights

__version__ = "0.1.0"  # pflcore's, kernels and all

__all__ = [
    "aggregate",
    "backend",
    "feddwa_weights",
    "nearest",
    "pairwise_sqdist",
    "rank1_linear",
    "sgd_step_",
    "waffle_weights",
]
