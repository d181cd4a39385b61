"""What a federation holds: one pool of samples, and for each client and split the list of samples
it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from pflcore.check import Whole, expect, many, of_hint, some

from .checks import SPLITS, check_clients, check_lists, check_pool
from .fields import IGNORED, Fields, joined, masked
from .ragged import Ragged, onto

LISTS = many(some("index tensors"), "a dict of lists of index tensors by split")
CLASSES = of_hint(Whole | None)._replace(words="a whole number, or None for regression")


class Scaling(NamedTuple):
    """What clients' features were shifted and scaled by, [N, ...] float64: x = (raw - mean) /
    deviation."""

    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True, repr=False)
class Pool:
    """The data of N clients as it is, see :class:`pflcore.Federation`, which makes other
    federations of it too."""

    x: Tensor  # or, when it is made, a dict of tensors
    y: Tensor
    index: Mapping[str, Sequence[Tensor]]
    classes: int | None = None
    relabel: Tensor | None = None
    name: str = "data"
    notes: list[str] = field(default_factory=list)
    truth: dict[str, Tensor] = field(default_factory=dict)
    fields: Fields | None = None
    names: tuple[str, ...] | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        expect("index", LISTS, self.index)
        object.__setattr__(self, "classes", expect("classes", CLASSES, self.classes))
        if isinstance(self.x, Mapping):
            dtypes = [
                v.dtype for v in self.x.values() if isinstance(v, Tensor) and v.is_floating_point()
            ]
            x, fields = joined(self.x, dtypes[0] if dtypes else torch.float32)
            object.__setattr__(self, "x", x)
            object.__setattr__(self, "fields", fields)
        if isinstance(self.y, Tensor):
            object.__setattr__(self, "y", masked(self.y, self.x, self.fields))
        check_pool(self.x, self.y, self.classes, self.index)
        check_lists(self)
        object.__setattr__(
            self, "index", {s: Ragged.of(lists, self.x.device) for s, lists in self.index.items()}
        )
        check_clients(self)

    # -- what it holds -------------------------------------------------------

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
        """Samples per client (or of these ``clients``) and class, as each labels them (after
        ``relabel``): int64 [N, C], on the CPU."""
        if self.classes is None:
            raise ValueError(
                f"counts needs labels: the targets of {self.name} are continuous (classes is None)"
            )
        lists = self.lists(split) if clients is None else self.lists(split).take(clients)
        y = self.y[lists.flat].reshape(len(lists.flat), -1)
        owner = lists.owner()[:, None].expand_as(y)
        if self.y.dim() > 1:  # steps that are left out are nobody's
            owner, y = owner[y != IGNORED][:, None], y[y != IGNORED][:, None]
        if self.relabel is not None:
            y = (self.relabel if clients is None else self.relabel[onto(clients, self.device)])[
                owner, y
            ]
        return (
            torch.bincount(
                (owner * self.classes + y).flatten(), minlength=len(lists) * self.classes
            )
            .view(-1, self.classes)
            .cpu()
        )

    def labels(self, i: int, split: str = "train") -> Tensor:
        """Client i's own labels (after ``relabel``) or targets: [n_i] or [n_i, ...]."""
        y = self.y[self.lists(split)[self._client(i)]]
        return y if self.relabel is None else self.relabel[i][y]

    def client(self, i: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Client i's samples ``(x [n_i, ...], y [n_i])``, labelled as the client labels them. Fresh
        tensors: the pool is never altered."""
        return self.x[self.lists(split)[self._client(i)]], self.labels(i, split)

    def summary(self) -> str:
        """A few lines of text: clients, samples, shapes, sizes, classes per client, what the
        partition noted."""
        size = self.size()
        samples = ", ".join(f"{int(self.size(s).sum()):,} {s}" for s in self.splits)
        what = "targets" if self.classes is None else f"{self.classes} classes"
        shape = f"shape {list(self.shape)}" if self.fields is None else str(self.fields)
        lines = [f"{self.name}: {self.n} clients, {samples} samples of {shape}, {what}"]
        lines.append(
            f"training samples per client: {int(size.min()):,} to {int(size.max()):,}, median "
            f"{int(size.median()):,}"
        )
        if self.classes is not None:
            held = (self.counts() > 0).sum(1)
            lines.append(f"classes per client: {int(held.min())} to {int(held.max())}")
        if self.relabel is not None:
            moved = (self.relabel != torch.arange(self.relabel.shape[1], device=self.device)).any(1)
            lines.append(
                f"concept shift: {int(moved.sum())} of {self.n} clients permute their labels"
            )
        return "\n".join([*lines, *self.notes])

    def __repr__(self) -> str:
        return (
            f"Federation({self.name!r}, n={self.n}, splits={list(self.splits)}, "
            f"shape={list(self.shape)}, classes={self.classes})"
        )

    def to(self, device: str | torch.device) -> Self:
        """The same federation with its pool and index lists on ``device``."""
        if torch.device(device) == self.device:
            return self
        index = {s: self.lists(s).to(device) for s in self.index}
        relabel = None if self.relabel is None else self.relabel.to(device)
        truth = {k: v.to(device) for k, v in self.truth.items()}
        return replace(
            self,
            x=self.x.to(device),
            y=self.y.to(device),
            index=index,
            relabel=relabel,
            truth=truth,
        )

    # -- small helpers -------------------------------------------------------

    def lists(self, split: str) -> Ragged:
        """All clients' index lists of a split."""
        if split not in self.index:
            raise ValueError(
                f"split must be one of {list(self.splits)} for {self.name}, got {split!r}"
            )
        lists = self.index[split]
        assert isinstance(lists, Ragged)
        return lists

    def _client(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise ValueError(f"client must be in 0..{self.n - 1}, got {i}")
        return i
