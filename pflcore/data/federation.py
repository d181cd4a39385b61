"""A federation: one pool of samples, and for each client and split the list of samples it holds."""

from __future__ import annotations

from dataclasses import dataclass

from . import splits
from .tabular import Tabled


@dataclass(frozen=True, repr=False)
class Federation(Tabled):
    """The data of N clients, without copies: every client is a list of indices into one pool.

    x         [n_pool, ...]        inputs: floating point, or int64 (tokens)
    y         [n_pool] or [n_pool, ...]   int64 labels in 0..classes-1, or floating targets (then
    ``classes`` is None)
    index     split -> N index lists (int64, [n_i]); "train" is required, "val" and "test" are not;
    kept as :class:`Ragged`
    classes   C, or None for regression
    relabel   [N, C] int64 or None: client i sees ``relabel[i][y]`` (concept shift); the pool keeps
    its own labels
    truth     what is known of the clients beside their samples, each value [N, ...]: "group",
    "optimum", ...
    names     the clients' own names, or None
    scaling   what `standardized` shifted and scaled each client's features by: (mean, deviation),
    each [N, ...], or None

    A training sample belongs to one client, and no sample to two splits; two clients may share test
    samples (a common test set).

    Raises ValueError or TypeError, one sentence: no client, a client without training samples, an
    index out of range or used twice, shapes or dtypes that do not fit, labels outside 0..C-1,
    inputs or targets that are NaN or infinite.
    """

    # other federations made from it
    subset = splits.subset
    split_clients = splits.split_clients
    halves = splits.halves
    keep = splits.keep
    split_samples = splits.split_samples
    standardized = splits.standardized
