"""The five ops, and the SGD step of local training: check once, say what is wrong,
dispatch. One file per noun, all of an op in it.

Letters: N clients, M rows of the result, P parameters, K kept neighbours, B batch, I
inputs, F factors, O outputs, S clients of the cohort, Q a row's length. Every op has a
pure-PyTorch reference, which runs where no kernel is loaded (`pflcore.backend()`).
"""

from . import _chain as _chain  # the ops that only pflcore's own training calls
from . import reference as reference  # the specification of the five
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
