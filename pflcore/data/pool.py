"""What a federation holds, one pool of samples and for each client and split the list of samples it
holds; and what it refuses, each with one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self

from pflcore.check import Whole, expect, many, of_hint, shown, some
from pflcore.data.fields import IGNORED, Fields, joined, masked
from pflcore.data.ragged import Ragged, onto

SPLITS = ("train", "val", "test")


def check_pool(
    x: Tensor, y: Tensor, classes: int | None, index: Mapping[str, Sequence[Tensor]]
) -> None:
    for what, t in (("x", x), ("y", y)):
        _check_kind_of(what, t)
    if x.dim() < 1 or y.dim() < 1 or len(x) != len(y):
        raise ValueError(
            f"x and y must have one row per sample, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    if x.device != y.device:
        raise ValueError(f"x and y must be on one device, got {x.device} and {y.device}")
    for what, t in (("x", x), ("y", y)):
        # min and max keep NaN and Inf and need no mask as large as the pool
        finite = not (t.is_floating_point() and t.numel()) or torch.stack(t.aminmax()).isfinite()
        if finite is not True and not bool(finite.all()):
            bad = int((~t.isfinite()).reshape(len(t), -1).any(1).nonzero()[0])
            raise ValueError(
                f"{what} must be finite, got NaN or Inf in sample {bad}{_owner(bad, index)}: clean "
                "the data first"
            )
    if classes is not None:
        _check_labels(y, classes)


def _check_kind_of(what: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{what} must be a tensor, got {type(t).__name__}: use Federation.from_arrays for "
            "arrays"
        )
    if t.layout != torch.strided:
        raise TypeError(
            f"{what} must be a dense tensor, got {t.layout}: convert it with {what}.to_dense()"
        )
    if not (t.is_floating_point() or t.dtype == torch.int64):
        raise TypeError(
            f"{what} must be floating point or int64, got {t.dtype}: convert it (tokens: to "
            "int64, images: to float, then normalise)"
        )


def _check_labels(y: Tensor, classes: int) -> None:
    if classes < 1:
        raise ValueError(f"classes must be at least 1, or None for regression, got {classes}")
    if y.dtype != torch.int64:
        raise TypeError(
            f"y must hold int64 labels where classes is given ({classes}), got {y.dtype}: pass "
            "classes=None for regression"
        )
    labels = y[y != IGNORED] if y.dim() > 1 else y
    low, high = (int(v) for v in labels.aminmax()) if labels.numel() else (0, 0)
    if low == -1 and high <= 1 and not bool((y == 0).any()):
        raise ValueError(
            "y must hold labels in 0..1, got -1 and 1: pass (y > 0) as integers, which hinge takes "
            "too"
        )
    if low < 0 or high >= classes:
        raise ValueError(f"y must hold labels in 0..{classes - 1}, got {low}..{high}")


def _owner(sample: int, index: Mapping[str, Sequence[Tensor]]) -> str:
    for split, lists in index.items():
        for i, rows in enumerate(lists):
            if isinstance(rows, Tensor) and bool((rows == sample).any()):
                return (
                    f", number {int((rows == sample).nonzero()[0])} of client {i}'s {split} samples"
                )
    return ""


def check_lists(fed: Any) -> None:
    """What came as N lists: whether each split has one list of the right kind per client."""
    unknown = [s for s in fed.index if s not in SPLITS]
    if unknown or "train" not in fed.index:
        raise ValueError(
            "index must hold the split 'train' and may hold 'val' and 'test', got "
            f"{list(fed.index)}"
        )
    n = len(fed.index["train"])
    if n == 0:
        raise ValueError("a federation needs at least one client, got none")
    for split in fed.splits:
        lists = fed.index[split]
        if len(lists) != n:
            raise ValueError(
                f"index[{split!r}] must hold one list per client ({n}), got {len(lists)}"
            )
        if isinstance(lists, Ragged):
            _check_kind(lists.flat, f"index[{split!r}]", fed.x.device)
            continue
        for i, rows in enumerate(lists):
            _check_kind(rows, f"index[{split!r}][{i}]", fed.x.device)


def check_clients(fed: Any) -> None:
    pool = len(fed.x)
    # which split holds the sample, 0: none
    where = torch.zeros(pool, dtype=torch.int8, device=fed.x.device)
    for number, split in enumerate(fed.splits, 1):
        lists = fed.lists(split)
        every = lists.flat
        if split == "train" and not bool(lists.size.all()):
            without_samples((lists.size == 0).nonzero()[:, 0].tolist())
        if not len(every):
            continue
        low, high = (int(v) for v in every.aminmax())
        if low < 0 or high >= pool:
            i = int(lists.owner()[(every < 0) | (every >= pool)][0])
            low, high = (int(v) for v in lists[i].aminmax())
            raise ValueError(f"index[{split!r}][{i}] must lie in 0..{pool - 1}, got {low}..{high}")
        if bool(where[every].any()):
            raise ValueError(
                f"a sample must belong to one split, but sample {int(every[where[every] > 0][0])} "
                f"is in {split!r} and another"
            )
        where[every] = number
        if int((where == number).sum()) == len(every):
            continue
        shared = split == "test"  # clients may share a test set, but none counts a sample twice
        key = lists.owner() * pool + every if shared else every
        key = key.sort().values
        twice = key[1:][key[1:] == key[:-1]]
        if len(twice):
            who = f"client {int(twice[0]) // pool}" if shared else "two clients, or one twice,"
            raise ValueError(
                f"index[{split!r}] must not overlap, but {who} holds sample {int(twice[0]) % pool} "
                "more than once"
            )
    _check_extras(fed, fed.n)


def without_samples(clients: Sequence[object]) -> NoReturn:
    """Refuses clients that have nothing to train on."""
    if len(clients) == 1:
        raise ValueError(
            f"client {clients[0]} has no training samples: leave it out, or give it at least one"
        )
    first = ", ".join(str(c) for c in clients[:5]) + (", ..." if len(clients) > 5 else "")
    raise ValueError(
        f"{len(clients)} clients have no training samples ({first}): leave them out, or give each "
        "at least one"
    )


def _check_kind(rows: Tensor, what: str, device: torch.device) -> None:
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        got = (
            f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        )
        raise TypeError(f"{what} must be a one-dimensional int64 tensor, got {got}")
    if rows.device != device:
        raise ValueError(f"{what} must be on the pool's device {device}, got {rows.device}")


def _check_extras(fed: Any, n: int) -> None:
    if fed.names is not None and (
        len(fed.names) != n or not all(isinstance(name, str) for name in fed.names)
    ):
        raise ValueError(f"names must be a string for each client ({n}), got {shown(fed.names)}")
    for key, value in fed.truth.items():
        if value.dim() < 1 or len(value) != n:
            raise ValueError(
                f"truth[{key!r}] must have one row per client ({n}), got shape {list(value.shape)}"
            )
    if fed.relabel is None:
        return
    if fed.classes is not None and bool((fed.y == IGNORED).any()):
        raise ValueError("relabel needs a label at every step, but some are left out")
    if fed.classes is None:
        raise ValueError("relabel needs labels, but classes is None")
    if fed.relabel.dtype != torch.int64 or tuple(fed.relabel.shape) != (n, fed.classes):
        raise ValueError(
            f"relabel must be int64 [{n}, {fed.classes}], got {fed.relabel.dtype} "
            f"{list(fed.relabel.shape)}"
        )
    if int(fed.relabel.min()) < 0 or int(fed.relabel.max()) >= fed.classes:
        raise ValueError(
            f"relabel must map to labels in 0..{fed.classes - 1}, got "
            f"{int(fed.relabel.min())}..{int(fed.relabel.max())}"
        )
    if fed.relabel.device != fed.x.device:
        raise ValueError(
            f"relabel must be on the pool's device {fed.x.device}, got {fed.relabel.device}"
        )


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
