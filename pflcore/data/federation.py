"""A federation: one pool of samples, and for each client and split the list of samples it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from pflcore.check import Kind, Seed32, checked, some

from . import collect, splits, tabular
from .pool import Pool
from .splits import ClientGroups

if TYPE_CHECKING:
    from .cuts import Partition

CLIENTS = Kind("each client's data in a list", lambda v: hasattr(v, "__iter__") and not isinstance(v, str))
Clients = Annotated[Sequence[Any], CLIENTS]


@dataclass(frozen=True, repr=False)
class Federation(Pool):
    """The data of N clients, without copies: every client is a list of indices into one pool.

    x         [n_pool, ...]        inputs: floating point, or int64 (tokens)
    y         [n_pool] or [n_pool, ...]   int64 labels in 0..classes-1, or floating targets (then ``classes`` is None)
    index     split -> N index lists (int64, [n_i]); "train" is required, "val" and "test" are not; kept as :class:`Ragged`
    classes   C, or None for regression
    relabel   [N, C] int64 or None: client i sees ``relabel[i][y]`` (concept shift); the pool keeps its own labels
    truth     what is known of the clients beside their samples, each value [N, ...]: "group", "optimum", ...
    names     the clients' own names, or None
    scaling   what `standardized` shifted and scaled each client's features by: (mean, deviation), each [N, ...], or None

    A training sample belongs to one client, and no sample to two splits; two clients may share test samples (a common test set).

    Raises ValueError or TypeError, one sentence: no client, a client without training samples, an index out of range or used twice,
    shapes or dtypes that do not fit, labels outside 0..C-1, inputs or targets that are NaN or infinite.
    """

    # -- other federations made from it ----------------------------------------------------------------------------------------

    @checked
    def subset(self, clients: Annotated[Sequence[int] | Tensor, some("clients' numbers in a list")]) -> Federation:
        """Only these clients, renumbered 0.. in the given order; the pool is shared."""
        return splits.subset(self, clients)

    @checked
    def split_clients(self, train: float = 0.8, val: float = 0.1, test: float = 0.1, seed: Seed32 = 13) -> ClientGroups:
        """Cross-device: who trains, who chooses hyper-parameters, who is reported. See :func:`pflcore.data.splits.split_clients`."""
        return splits.split_clients(self, train, val, test, seed)

    @checked
    def halves(self, clients: Sequence[int] | Tensor | None = None, seed: Seed32 = 13, pool: Sequence[str] | None = None) -> Federation:
        """Cross-device: "train" becomes the personalization half, "test" the evaluation half. See :func:`pflcore.data.splits.halves`."""
        return splits.halves(self, clients, seed, pool)

    def keep(self, fraction: float, clients: Sequence[int] | Tensor | None = None) -> Federation:
        """The first part of each training list, at least one sample: nested personalization sets (100, 50, 25 %)."""
        return splits.keep(self, fraction, clients)

    @checked
    def split_samples(self, fractions: Mapping[str, float], seed: Seed32 = 100, pool: Sequence[str] | None = None) -> Federation:
        """Cross-silo: each client's own samples into train, val and test. See :func:`pflcore.data.splits.split_samples`."""
        return splits.split_samples(self, fractions, seed, pool)

    def standardized(self) -> Federation:
        """Each client's features to mean 0 and standard deviation 1 by its own training statistics. A new pool."""
        return splits.standardized(self)

    # -- constructors ----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_partition(
        cls,
        x: Any,
        y: Any,
        partition: Partition,
        *,
        x_test: Any = None,
        y_test: Any = None,
        classes: int | Literal["infer"] | None = "infer",
        name: str = "data",
    ) -> Federation:
        """A training pool, an optional test pool, and a partition of ``cat(y, y_test)`` as :mod:`pflcore.data.partition` makes them."""
        return collect.from_partition(cls, x, y, partition, x_test, y_test, classes, name)

    @classmethod
    @checked
    def from_arrays(
        cls,
        clients: Clients,
        *,
        test: Clients | None = None,
        test_fraction: float = 0.0,
        seed: Seed32 = 0,
        classes: int | Literal["infer"] | None = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Federation:
        """One ``(x, y)`` per client, or one ``{"train": (x, y), "test": (x, y), "val": ...}`` per client. Arrays, tensors or lists.

        ``test``: one ``(x, y)`` per client. ``test_fraction``: cut that part of each client's samples off instead, shuffled by ``seed``.
        Integer targets are labels (``classes="infer"``: the largest label plus one), floating ones regression targets. ``dtype``:
        floating inputs and targets are converted to it; None keeps what came.
        """
        return collect.from_arrays(cls, clients, test, test_fraction, seed, classes, dtype, name)

    @classmethod
    @checked
    def from_table(
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        *,
        test_fraction: float = 0.0,
        seed: Seed32 = 0,
        classes: int | Literal["infer"] | None = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Federation:
        """All samples in one table: ``x [n, ...]``, ``y [n]``, and whose each is, ``client [n]``: whole numbers or strings.

        Arrays or tensors, memory-mapped ones too (with ``dtype=None``, or of that dtype, they stay where they are). Or ``x`` is the path
        of a Parquet or Arrow file, ``y`` and ``client`` name two of its columns (default "y", "client"), and the others are the inputs;
        that needs pyarrow. Clients are numbered in the order of their ids, which are in ``truth["client"]`` where they are numbers.
        Other options as in :meth:`from_arrays`. A million clients of 20 samples take seconds.
        """
        return tabular.from_table(cls, x, y, client, test_fraction, seed, classes, dtype, name)

    @classmethod
    @checked
    def from_datasets(
        cls,
        clients: Clients,
        *,
        test: Clients | None = None,
        test_fraction: float = 0.0,
        seed: Seed32 = 0,
        classes: int | Literal["infer"] | None = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Federation:
        """One torch ``Dataset`` of ``(x, y)`` pairs per client, read once into memory (so a random transform is drawn once).

        Options as in :meth:`from_arrays`; ``test`` is a list of Datasets.
        """
        return collect.from_datasets(cls, clients, test, test_fraction, seed, classes, dtype, name)
