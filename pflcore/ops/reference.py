# ruff: noqa: F401 (names outside of __all__ are for the tests)
"""The specification of the ops: one function of plain PyTorch for each.

Each function stands in its op's file and is the op's default body. So it runs wherever
no kernel is registered, and the tests compare the kernels with it. It does not check
its arguments, and takes all of them by position. Here each function has its op's name:
compare `reference.pairwise_sqdist(a, None)` with `pairwise_sqdist(a)`.
"""

from ._aggregate import reference as aggregate
from ._aggregate import reference_out as aggregate_out
from ._chain import grad_reference as chain_grad
from ._rank1 import backward_reference as rank1_linear_backward
from ._rank1 import reference as rank1_linear
from ._sgd import reference as sgd_step_
from ._sqdist import reference as pairwise_sqdist
from ._weights import feddwa_reference as feddwa_weights
from ._weights import waffle_reference as waffle_weights

__all__ = [
    "aggregate",
    "feddwa_weights",
    "pairwise_sqdist",
    "rank1_linear",
    "sgd_step_",
    "waffle_weights",
]
