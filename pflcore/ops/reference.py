"""The specification of the ops: each of them, computed by plain PyTorch.

`reference.pairwise_sqdist(a)` is `pairwise_sqdist(a)` with the same arguments, checks,
gradients and types of results, computed by torch's own operations on the device of its
tensors. So the result is what a kernel must agree with.

The plain functions stand in the files of the ops. They are the ops' default bodies,
which run wherever no kernel is registered.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from . import _aggregate, _nearest, _rank1, _robust, _sgd, _sqdist, _weights
from ._library import RunReferences

__all__ = [
    "aggregate",
    "feddwa_weights",
    "mean_around_median",
    "nearest",
    "pairwise_sqdist",
    "rank1_linear",
    "sgd_step_",
    "trimmed_mean",
    "waffle_weights",
]
F = TypeVar("F", bound=Callable[..., Any])


def by_reference(op: F) -> F:
    """The public function of an op, computed by references."""

    @functools.wraps(op)
    def reference(*args: Any, **kwargs: Any) -> Any:
        with RunReferences():
            return op(*args, **kwargs)

    return cast(F, reference)


aggregate = by_reference(_aggregate.aggregate)
feddwa_weights = by_reference(_weights.feddwa_weights)
mean_around_median = by_reference(_robust.mean_around_median)
nearest = by_reference(_nearest.nearest)
pairwise_sqdist = by_reference(_sqdist.pairwise_sqdist)
rank1_linear = by_reference(_rank1.rank1_linear)
sgd_step_ = by_reference(_sgd.sgd_step_)
trimmed_mean = by_reference(_robust.trimmed_mean)
waffle_weights = by_reference(_weights.waffle_weights)
