"""The arithmetic of personalized federated learning, as ops of torch.

- `pairwise_sqdist`: squared distances between models.
- `nearest`: the nearest models of each model.
- `waffle_weights`, `feddwa_weights`: mixing weights from distances.
- `aggregate`: weighted sums of updates.
- `rank1_linear`: a linear layer of rank-1 factors.
- `trimmed_mean`: the mean of each column without its least and largest numbers.
- `mean_around_median`: the mean of the numbers of each column nearest its median.
- `sgd_step_`: an SGD step on the models of many clients.
- `reference`: the specification of each op.
- `backend`: the kernels or references that run the ops.

Each function checks its arguments once and calls an op of the torch library `pflcore`.
One file holds all of an op. Every op has a reference in plain PyTorch, which runs where
no kernel is loaded. An argument's error is `op(name): expected X, got Y; remedy.`

Symbols: N clients; M rows of the result; P parameters; K nearest neighbours. A layer
has B samples of a batch, I inputs, F factors and O outputs. Local training has S
clients of a cohort and Q columns of a row.
"""

from . import _chain as _chain  # defines the ops that only local training calls
from . import reference as reference
from ._aggregate import aggregate
from ._library import backend
from ._nearest import nearest
from ._rank1 import rank1_linear
from ._robust import mean_around_median, trimmed_mean
from ._sgd import sgd_step_
from ._sqdist import pairwise_sqdist
from ._weights import TopK as TopK
from ._weights import feddwa_weights, waffle_weights

__version__ = "0.1.0"  # the version of all of pflcore, with its kernels

__all__ = [
    "aggregate",
    "backend",
    "feddwa_weights",
    "mean_around_median",
    "nearest",
    "pairwise_sqdist",
    "rank1_linear",
    "sgd_step_",
    "trimmed_mean",
    "waffle_weights",
]
