"""A federation: one pool of samples, and for each client and split the list of samples it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pflcore import kinds

from .checks import SPLITS, check_clients, check_lists, check_pool
from .ragged import Ragged

if TYPE_CHECKING:
    from .cuts import Partition
    from .splits import ClientGroups


CLIENTS = kinds.Kind("each client's data in a list", lambda v: hasattr(v, "__iter__") and not isinstance(v, str))


@kinds.takes(
    index=kinds.many(kinds.some("index tensors"), "a dict of lists of index tensors by split"),
    classes=kinds.number(words="a whole number, or None for regression"),
)
@dataclass(frozen=True, repr=False)
class Federation:
    """The data of N clients, without copies: every client is a list of indices into one pool.

    x         [n_pool, ...]        inputs: floating point, or int64 (tokens)
    y         [n_pool] or [n_pool, ...]   int64 labels in 0..classes-1, or floating targets (then ``classes`` is None)
    index     split -> N index lists (int64, [n_i]); "train" is required, "val" and "test" are not; kept as :class:`Ragged`
    classes   C, or None for regression
    relabel   [N, C] int64 or None: client i sees ``relabel[i][y]`` (concept shift); the pool keeps its own labels
    truth     what is known of the clients beside their samples, each value [N, ...]: "group", "optimum", ...

    A training sample belongs to one client, and no sample to two splits; two clients may share test samples (a common test set).

    Raises ValueError or TypeError, one sentence: no client, a client without training samples, an index out of range or used twice,
    shapes or dtypes that do not fit, labels outside 0..C-1, inputs or targets that are NaN or infinite.
    """

    x: Tensor
    y: Tensor
    index: Mapping[str, Sequence[Tensor]]
    classes: int | None = None
    relabel: Tensor | None = None
    name: str = "data"
    notes: list[str] = field(default_factory=list)
    truth: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pool(self.x, self.y, self.classes, self.index)
        check_lists(self)
        object.__setattr__(self, "index", {s: Ragged.of(lists, self.x.device) for s, lists in self.index.items()})
        check_clients(self)

    # -- what it holds ---------------------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """N, the number of clients."""
        return len(self.index["train"])

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that exist, in the order train, val, test."""
        return tuple(s for s in SPLITS if s in self.index)

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.x.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    def size(self, split: str = "train") -> Tensor:
        """Samples per client: int64 [N], on the CPU."""
        return self.lists(split).size

    def counts(self, split: str = "train", clients: Tensor | None = None) -> Tensor:
        """Samples per client (or of these ``clients``) and class, as each labels them (after ``relabel``): int64 [N, C], on the CPU."""
        if self.classes is None:
            raise ValueError(f"counts needs labels: the targets of {self.name} are continuous (classes is None)")
        lists = self.lists(split) if clients is None else self.lists(split).take(clients)
        y = self.y[lists.flat].reshape(len(lists.flat), -1)
        owner = lists.owner()[:, None]
        if self.relabel is not None:
            y = (self.relabel if clients is None else self.relabel[clients.to(self.device)])[owner, y]
        return torch.bincount((owner * self.classes + y).flatten(), minlength=len(lists) * self.classes).view(-1, self.classes).cpu()

    def labels(self, i: int, split: str = "train") -> Tensor:
        """Client i's own labels (after ``relabel``) or targets: [n_i] or [n_i, ...]."""
        y = self.y[self.lists(split)[self._client(i)]]
        return y if self.relabel is None else self.relabel[i][y]

    def client(self, i: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Client i's samples ``(x [n_i, ...], y [n_i])``, labelled as the client labels them. Fresh tensors: the pool is never altered."""
        return self.x[self.lists(split)[self._client(i)]], self.labels(i, split)

    def pooled(
        self, split: str = "test", clients: Sequence[int] | Tensor | None = None, limit: int = 1000, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Motley's out-of-distribution set: up to ``limit`` samples ``(x, y)`` drawn from these clients' ``split`` without replacement.

        Every sample keeps the label its owner gives it. One fixed draw by ``seed``, the same for whoever is tested on it.
        """
        from .splits import pooled

        return pooled(self, split, clients, limit, seed)

    def summary(self) -> str:
        """A few lines of text: clients, samples, shapes, sizes, classes per client, what the partition noted."""
        size = self.size()
        samples = ", ".join(f"{int(self.size(s).sum()):,} {s}" for s in self.splits)
        what = "targets" if self.classes is None else f"{self.classes} classes"
        lines = [f"{self.name}: {self.n} clients, {samples} samples of shape {list(self.shape)}, {what}"]
        lines.append(f"training samples per client: {int(size.min()):,} to {int(size.max()):,}, median {int(size.median()):,}")
        if self.classes is not None:
            held = (self.counts() > 0).sum(1)
            lines.append(f"classes per client: {int(held.min())} to {int(held.max())}")
        if self.relabel is not None:
            moved = (self.relabel != torch.arange(self.relabel.shape[1], device=self.device)).any(1)
            lines.append(f"concept shift: {int(moved.sum())} of {self.n} clients permute their labels")
        return "\n".join([*lines, *self.notes])

    def __repr__(self) -> str:
        return f"Federation({self.name!r}, n={self.n}, splits={list(self.splits)}, shape={list(self.shape)}, classes={self.classes})"

    # -- other federations made from it ----------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> Federation:
        """The same federation with its pool and index lists on ``device``."""
        if torch.device(device) == self.device:
            return self
        index = {s: self.lists(s).to(device) for s in self.index}
        relabel = None if self.relabel is None else self.relabel.to(device)
        truth = {k: v.to(device) for k, v in self.truth.items()}
        return replace(self, x=self.x.to(device), y=self.y.to(device), index=index, relabel=relabel, truth=truth)

    def subset(self, clients: Sequence[int] | Tensor) -> Federation:
        """Only these clients, renumbered 0.. in the given order; the pool is shared."""
        from .splits import subset

        return subset(self, clients)

    def split_clients(self, train: float = 0.8, val: float = 0.1, test: float = 0.1, seed: int = 13) -> ClientGroups:
        """Cross-device: who trains, who chooses hyper-parameters, who is reported. See :func:`pflcore.data.splits.split_clients`."""
        from .splits import split_clients

        return split_clients(self, train, val, test, seed)

    def halves(self, clients: Sequence[int] | Tensor | None = None, seed: int = 13, pool: Sequence[str] | None = None) -> Federation:
        """Cross-device: "train" becomes the personalization half, "test" the evaluation half. See :func:`pflcore.data.splits.halves`."""
        from .splits import halves

        return halves(self, clients, seed, pool)

    def keep(self, fraction: float, clients: Sequence[int] | Tensor | None = None) -> Federation:
        """The first part of each training list, at least one sample: nested personalization sets (100, 50, 25 %)."""
        from .splits import keep

        return keep(self, fraction, clients)

    def split_samples(self, fractions: Mapping[str, float], seed: int = 100, pool: Sequence[str] | None = None) -> Federation:
        """Cross-silo: each client's own samples into train, val and test. See :func:`pflcore.data.splits.split_samples`."""
        from .splits import split_samples

        return split_samples(self, fractions, seed, pool)

    def standardized(self) -> Federation:
        """Each client's features to mean 0 and standard deviation 1 by its own training statistics. A new pool."""
        from .splits import standardized

        return standardized(self)

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
        from .collect import from_partition

        return from_partition(cls, x, y, partition, x_test, y_test, classes, name)

    @classmethod
    @kinds.takes(clients=CLIENTS)
    def from_arrays(
        cls,
        clients: Sequence[Any],
        *,
        test: Sequence[Any] | None = None,
        test_fraction: float = 0.0,
        seed: int = 0,
        classes: int | Literal["infer"] | None = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Federation:
        """One ``(x, y)`` per client, or one ``{"train": (x, y), "test": (x, y), "val": ...}`` per client. Arrays, tensors or lists.

        ``test``: one ``(x, y)`` per client. ``test_fraction``: cut that part of each client's samples off instead, shuffled by ``seed``.
        Integer targets are labels (``classes="infer"``: the largest label plus one), floating ones regression targets. ``dtype``:
        floating inputs and targets are converted to it; None keeps what came.
        """
        from .collect import from_arrays

        return from_arrays(cls, clients, test, test_fraction, seed, classes, dtype, name)

    @classmethod
    def from_table(
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        *,
        test_fraction: float = 0.0,
        seed: int = 0,
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
        from .tabular import from_table

        return from_table(cls, x, y, client, test_fraction, seed, classes, dtype, name)

    @classmethod
    @kinds.takes(clients=CLIENTS, test_fraction=kinds.number())
    def from_datasets(
        cls,
        clients: Sequence[Any],
        *,
        test: Sequence[Any] | None = None,
        test_fraction: float = 0.0,
        seed: int = 0,
        classes: int | Literal["infer"] | None = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Federation:
        """One torch ``Dataset`` of ``(x, y)`` pairs per client, read once into memory (so a random transform is drawn once).

        Options as in :meth:`from_arrays`; ``test`` is a list of Datasets.
        """
        from .collect import from_datasets

        return from_datasets(cls, clients, test, test_fraction, seed, classes, dtype, name)

    # -- small helpers ---------------------------------------------------------------------------------------------------------

    def lists(self, split: str) -> Ragged:
        """All clients' index lists of a split."""
        if split not in self.index:
            raise ValueError(f"split must be one of {list(self.splits)} for {self.name}, got {split!r}")
        lists = self.index[split]
        assert isinstance(lists, Ragged)
        return lists

    def _client(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise ValueError(f"client must be in 0..{self.n - 1}, got {i}")
        return i
