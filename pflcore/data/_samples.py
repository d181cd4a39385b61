"""What a federation holds, what it refuses, and what it can be asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import Self

from pflcore.check import PositiveInt, check_fields, reject, require
from pflcore.data._inputs import (
    DENSE_TEXT,
    IGNORED_LABEL,
    Fields,
    mask_labels,
    to_inputs,
)
from pflcore.data._ragged import Ragged, to_device

SPLITS = ("train", "val", "test")


class Scaling(NamedTuple):
    """Statistics by which features were standardized: x = (raw - mean) / deviation."""

    # [N, ...] float64, of each client's training samples; of one client [...]
    mean: Tensor
    deviation: Tensor  # the same; 1 where a feature is constant

    def for_client(self, client: int) -> "Scaling":
        """The statistics [...] of one client."""
        return Scaling(self.mean[client], self.deviation[client])

    def apply(self, raw: Tensor) -> Tensor:
        """Raw features [B, ...] standardized by one client's statistics, in their
        own dtype."""
        mean, deviation = (v.to(raw.device).double() for v in self)
        return ((raw.double() - mean) / deviation).to(raw.dtype)

    def combine_after(self, first: "Scaling") -> "Scaling":
        """Both as one: features that were standardized by `first` and then by these."""
        mean, deviation = (v.to(first.mean.device) for v in self)
        return Scaling(first.mean + first.deviation * mean, first.deviation * deviation)


@dataclass(frozen=True, repr=False)
class ClientSamples:
    """The data of N clients as index lists into one pool; see `Federation`, which
    adds the rest."""

    x: Tensor  # or, when it is made, a dict of tensors
    y: Tensor
    index: Mapping[str, Any]
    classes: PositiveInt | None = None
    relabel: Tensor | None = None
    name: str = "data"
    facts: Mapping[str, Any] = field(default_factory=dict)
    truth: Mapping[str, Tensor] = field(default_factory=dict)
    fields: Fields | None = None
    names: tuple[str | int, ...] | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        x = self.x
        fields = self.fields
        if isinstance(x, Mapping):
            dtype = next((v.dtype for v in x.values() if v.is_floating_point()), None)
            x, fields = to_inputs(x, "x", dtype)
            self.__dict__.update(x=x, fields=fields)
        check_fields(self)
        index = {
            s: _ragged(f"index[{s!r}]", lists, x.device)
            for s, lists in self.index.items()
        }
        self.__dict__.update(y=mask_labels(self.y, x, fields), index=index)
        self._check_index()
        self._check_pool()
        self._check_clients()

    def _copy_with(self, **changes: Any) -> Self:
        """With other fields, unchecked: for what is right by construction."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__ | changes)
        return new

    # what it holds ------------------------------------------------------------

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

    def lists(self, split: str) -> Ragged:
        """All clients' index lists of a split."""
        require(split in self.index, "split", f"one of {', '.join(self.splits)}", split)
        lists: Ragged = self.index[split]
        return lists

    def size(self, split: str = "train") -> Tensor:
        """Samples per client: int64 [N], on the CPU."""
        return self.lists(split).size

    def counts(self, split: str = "train", clients: Tensor | None = None) -> Tensor:
        """Samples per client (or of these `clients` [S]) and class, as each labels them
        (after `relabel`): int64 [N, C], on the CPU."""
        if self.classes is None:
            reject(
                "counts", "labels (the targets are numbers: classes is None)", self.y
            )
        ids = torch.arange(self.n) if clients is None else clients
        lists = self.lists(split).take(ids)
        y = self.y[lists.flat].reshape(len(lists.flat), -1)
        owner = lists.owners()[:, None].expand_as(y)
        known = y != IGNORED_LABEL
        y = y.where(known, 0)
        if self.relabel is not None:
            y = self.relabel[to_device(ids, self.device)[owner], y]
        # a place for what has no label: a mask would wait
        last = len(lists) * self.classes
        place = (owner * self.classes + y).where(known, last).flatten()
        counts = torch.bincount(place, minlength=last + 1)[:last]
        return counts.view(-1, self.classes).cpu()

    def labels(self, i: int, split: str = "train") -> Tensor:
        """Client i's own labels (after `relabel`) or targets: [n_i] or [n_i, ...]."""
        require(0 <= i < self.n, "client", f"a number from 0 to {self.n - 1}", i)
        y = self.y[self.lists(split)[i]]
        return y if self.relabel is None else self.relabel[i][y]

    def client(self, i: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Client i's samples x [n_i, ...], y [n_i, ...], labelled as the client labels
        them. Fresh tensors: the pool is never altered."""
        y = self.labels(i, split)
        return self.x[self.lists(split)[i]], y

    def summary(self) -> str:
        """A few lines of text: clients, samples, shapes, sizes, classes per client,
        the facts."""
        none = {
            f"clients without {s} samples": int((self.size(s) == 0).sum())
            for s in self.splits
        }
        lines = {
            "clients": self.n,
            "samples": {s: len(self.lists(s).flat) for s in self.splits},
            "training samples per client": _range(self.size()),
            "inputs": self.fields or list(self.shape),
            "classes": self.classes,
            "classes per client": self.classes and _range((self.counts() > 0).sum(1)),
            "labels permuted by client (concept shift)": self.relabel is not None,
            "standardized by client": self.scaling is not None,
            **none,
            **self.facts,
        }
        return "\n".join([self.name, *(f"{k}: {v}" for k, v in lines.items() if v)])

    def __repr__(self) -> str:
        size = f"n={self.n}, splits={list(self.splits)}, shape={list(self.shape)}"
        return f"Federation({self.name!r}, {size}, classes={self.classes})"

    def to(self, device: str | torch.device) -> Self:
        """The same federation with its pool and index lists on `device`."""
        if torch.device(device) == self.device:
            return self

        def moved(v: Any) -> Any:
            return v.to(device) if isinstance(v, Tensor | Ragged) else v

        return self._copy_with(**tree_map(moved, self.__dict__))

    # what it refuses ----------------------------------------------------------

    def _check_index(self) -> None:
        """A list per client and split; a sample is in one split, and in one list but
        for test."""
        known = "train" in self.index and set(self.index) <= set(SPLITS)
        require(
            known,
            "index",
            "the split 'train', and perhaps 'val' and 'test'",
            list(self.index),
        )
        pool = len(self.x) if self.x.dim() else 0
        used = torch.zeros(pool, dtype=torch.bool, device=self.device)
        for split, lists in self.index.items():
            name = f"index[{split!r}]"
            flat = lists.flat
            require(
                len(lists) == self.n,
                name,
                f"a list for each of {self.n} clients",
                len(lists),
            )
            for place in ((flat < 0) | (flat >= pool)).nonzero()[:1, 0].tolist():
                i = int(lists.owners()[place])
                reject(f"{name}[{i}]", f"samples in 0..{pool - 1}", int(flat[place]))
            seen = torch.zeros_like(used)
            seen[flat] = True
            if int(seen.sum()) != len(flat):  # clients may share test samples
                key = lists.owners() * pool + flat if split == "test" else flat
                once = len(key.unique()) == len(key)
                require(once, name, "a sample once, in one client's list", flat)
            both = (seen & used).nonzero()[:1, 0].tolist()
            require(not both, name, "samples of no other split", both)
            used |= seen
        none = (self.size() == 0).nonzero()[:, 0].tolist()
        each = f"a sample to train on for each; leave out the {len(none)} without"
        names = (
            self.names if self.names and len(self.names) == self.n else range(self.n)
        )
        require(not none, "clients", each, [names[i] for i in none[:5]])

    def _check_pool(self) -> None:
        """Dense numbers on one device, finite, and labels within the classes."""
        x = self.x
        y = self.y
        alike = x.dim() and y.dim() and len(x) == len(y) and x.device == y.device
        require(alike, "y", f"a row per row of x, {list(x.shape)} on {x.device}", y)
        for name, t in (("x", x), ("y", y)):
            number = t.is_floating_point() or t.dtype == torch.int64
            require(number and t.layout == torch.strided, name, DENSE_TEXT, t)
            # min and max keep NaN and Inf and need no mask as large as the pool
            floats = t.is_floating_point() and t.numel()
            if floats and not bool(torch.stack(t.aminmax()).isfinite().all()):
                bad = int((~t.isfinite()).reshape(len(t), -1).any(1).nonzero()[0])
                reject(
                    name,
                    f"finite numbers, also in sample {bad}{self._describe_holder(bad)}",
                    t[bad],
                )
        if self.classes is not None:
            right = (
                f"int64 labels in 0..{self.classes - 1} (classes=None for regression)"
            )
            require(y.dtype == torch.int64, "y", right, y)
            labels = y[y != IGNORED_LABEL]
            low, high = (int(v) for v in labels.aminmax()) if labels.numel() else (0, 0)
            if low == -1 and not bool((labels == 0).any()):
                right += "; of -1 and 1 give (y > 0)"
            elif y.dim() > 1:
                right += f"; labels that count in nothing are {IGNORED_LABEL}"
                if low >= 0:
                    right += (
                        ", or leave classes to be inferred and give the loss "
                        f"nn.CrossEntropyLoss(ignore_index={high})"
                    )
            require(low >= 0 and high < self.classes, "y", right, [low, high])

    def _describe_holder(self, sample: int) -> str:
        for split, lists in self.index.items():
            for place in (lists.flat == sample).nonzero()[:1, 0].tolist():
                i = int(lists.owners()[place])
                return (
                    f", number {place - int(lists.begin[i])} of client {i}'s "
                    f"{split} samples"
                )
        return ""

    def _check_clients(self) -> None:
        """`truth`, `names` and `relabel` have a row per client."""
        for key, value in {**self.truth, "names": self.names}.items():
            row_each = value is None or (np.ndim(value) > 0 and len(value) == self.n)
            require(row_each, key, f"a row for each of {self.n} clients", value)
        r = self.relabel
        classes = self.classes or 0
        if r is not None:
            fits = r.dtype == torch.int64 and r.shape == (self.n, classes)
            fits = (
                fits
                and r.device == self.device
                and bool(((r >= 0) & (r < classes)).all())
            )
            right = (
                f"int64 [{self.n}, {classes}], labels in 0..{classes - 1} on "
                f"{self.device}"
            )
            right += ", and a label at every step of every sample"
            require(
                fits and classes and not bool((self.y == IGNORED_LABEL).any()),
                "relabel",
                right,
                r,
            )


def _ragged(name: str, lists: Any, device: torch.device) -> Ragged:
    """The lists of a split as `Ragged`, each int64 [n_i] on the pool's device."""
    rows = [lists.flat] if isinstance(lists, Ragged) else lists
    several = isinstance(rows, Sequence) and len(rows) > 0
    require(several, name, "a list of index tensors, at least one", rows)
    for i, r in enumerate(rows):
        whole = isinstance(r, Tensor) and r.dtype == torch.int64 and r.dim() == 1
        require(
            whole and r.device == device,
            f"{name}[{i}]",
            f"an int64 tensor [n] on {device}",
            r,
        )
    return lists if isinstance(lists, Ragged) else Ragged.from_lists(rows)


def _range(sizes: Tensor) -> str:
    low, high = sizes.aminmax()
    return f"{low} to {high}, median {sizes.median()}"
