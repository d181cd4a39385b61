"""The samples of a federation: the data, their checks, and questions about them.

Symbols: N clients (`n` in code), S of them in a selection, C classes; client i has n_i
samples in a split; B samples are in a batch; D numbers are in a row of fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import Self

from pflcore._device import to_device
from pflcore._html import html_table
from pflcore.check import PositiveInt, check_fields, client_id, reject, require
from pflcore.data._inputs import (
    DENSE_TEXT,
    IGNORED_LABEL,
    Fields,
    mask_labels,
    to_inputs,
)
from pflcore.data._picture import (
    MAX_CLIENTS,
    bin_targets,
    draw_counts,
    draw_sizes,
)
from pflcore.data._ragged import Ragged

SPLITS = ("train", "val", "test")
VOID_BYTE = 255  # the usual label of a pixel that counts in nothing


class Scaling(NamedTuple):
    """Statistics by which features were standardized.

    A standardized feature is x = (raw - mean) / deviation.

    Attributes:
        mean: [N, ...] float64, of each client's training samples; of one client [...]
        deviation: of the same shape and samples; 1 where a feature is constant
    """

    mean: Tensor
    deviation: Tensor

    def for_client(self, client: int) -> Scaling:
        """The statistics [...] of one client."""
        return Scaling(self.mean[client], self.deviation[client])

    def apply(self, raw: Tensor) -> Tensor:
        """Raw features [B, ...] of one client, standardized, in their own dtype.

        The statistics are those of one client, [...].
        """
        mean = self.mean.to(raw.device).double()
        deviation = self.deviation.to(raw.device).double()
        return ((raw.double() - mean) / deviation).to(raw.dtype)

    def combine_after(self, first: Scaling) -> Scaling:
        """Statistics of features that were standardized by `first`, then by these."""
        mean = self.mean.to(first.mean.device)
        deviation = self.deviation.to(first.mean.device)
        return Scaling(first.mean + first.deviation * mean, first.deviation * deviation)


@dataclass(frozen=True, repr=False)
class ClientSamples:
    """The data of N clients as index lists into one pool.

    `Federation` describes the fields. It adds constructors, and federations that are
    made from it.
    """

    x: Tensor  # `__init__` also accepts a dict of tensors
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
    columns: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        x = self.x
        fields = self.fields
        if isinstance(x, Mapping):
            float_dtypes = (v.dtype for v in x.values() if v.is_floating_point())
            x, fields = to_inputs(x, "x", next(float_dtypes, None))
            # A frozen dataclass refuses assignments to its fields, but not to its
            # `__dict__`.
            self.__dict__.update(x=x, fields=fields)
        check_fields(self)
        index = {}
        for split, lists in self.index.items():
            index[split] = _to_ragged(f"index[{split!r}]", lists, x.device)
        self.__dict__.update(y=mask_labels(self.y, x, fields), index=index)
        self._check_index()
        self._check_has_samples()
        self._check_names()
        self._check_pool()
        self._check_clients()

    def _copy_with(self, **changes: Any) -> Self:
        """A copy with other values of some fields, which are not checked.

        It is for values that are right by construction.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__ | changes)
        return new

    # contents -----------------------------------------------------------------

    @property
    def n(self) -> int:
        """N, the number of clients."""
        return len(self.index["train"])

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that exist, in the order train, val, test."""
        return tuple(split for split in SPLITS if split in self.index)

    @property
    def device(self) -> torch.device:
        """The device of the pool and the index lists."""
        return self.x.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    def lists(self, split: str) -> Ragged:
        """All clients' index lists of a split, int64 [n_i] each.

        Raises ValueError for a split that does not exist.
        """
        require(split in self.index, "split", f"one of {', '.join(self.splits)}", split)
        lists: Ragged = self.index[split]
        return lists

    def size(self, split: str = "train", *, labelled: bool = False) -> Tensor:
        """The number of samples of each client: int64 [N], on the CPU.

        Args:
            split: split of the samples
            labelled: count only samples with a label that counts in something: those of
                a run whose loss leaves the others out, such as cross entropy
        """
        lists = self.lists(split)
        if not labelled:
            return lists.size
        owners = lists.owners()[self.is_labelled[lists.flat]]
        return owners.cpu().bincount(minlength=self.n)

    @property
    def is_labelled(self) -> Tensor:
        """True for the samples of the pool with a label that counts: bool [n]."""
        counts = self.y != IGNORED_LABEL
        return counts if counts.dim() == 1 else counts.flatten(1).any(1)

    @property
    def trainable_clients(self) -> Tensor | None:
        """The ids [T] of the clients with training samples; None where all have."""
        lists: Ragged = self.index["train"]
        return lists.nonempty

    def counts(self, split: str = "train", clients: Tensor | None = None) -> Tensor:
        """The number of samples by client and class: int64 [N, C], on the CPU.

        Labels are the client's own (after `relabel`). With `clients` [S] the counts are
        theirs, [S, C]. Raises ValueError where the targets are numbers.
        """
        if self.classes is None:
            expected = "labels (the targets are numbers: classes is None)"
            reject("counts", expected, self.y)
        ids = torch.arange(self.n) if clients is None else clients
        lists = self.lists(split).take(ids)
        y = _by_step(self.y[lists.flat])
        owner = lists.owners()[:, None].expand_as(y)
        known = y != IGNORED_LABEL
        y = y.where(known, 0)
        if self.relabel is not None:
            y = self.relabel[to_device(ids, self.device)[owner], y]
        # Steps without a label are counted in one more cell, which is cut off. A mask
        # that selects the others would make the CPU wait for the device.
        num_cells = len(lists) * self.classes
        cell = (owner * self.classes + y).where(known, num_cells).flatten()
        counts = torch.bincount(cell, minlength=num_cells + 1)[:num_cells]
        return counts.view(-1, self.classes).cpu()

    def client_id(self, client: int | str) -> int:
        """The id of a client that is given by its id or by its name.

        Raises ValueError where there is no such client.
        """
        return client_id("client", client, self.n, self.names)

    def names_of(self, ids: Sequence[int]) -> list[str | int]:
        """The names of clients; their ids where they have no names."""
        names = self.names
        return [*ids] if names is None else [names[i] for i in ids]

    def labels(self, i: int | str, split: str = "train") -> Tensor:
        """Client i's own labels (after `relabel`) or targets: [n_i] or [n_i, ...].

        Raises ValueError where there is no such client or split.

        Args:
            i: id or name of the client
            split: split of the samples
        """
        i = self.client_id(i)
        y = self.y[self.lists(split)[i]]
        return y if self.relabel is None else self.relabel[i][y]

    def client(self, i: int | str, split: str = "train") -> tuple[Tensor, Tensor]:
        """Client i's samples x [n_i, ...] and y [n_i, ...], with its own labels.

        The tensors are copies, so writing to them does not change the pool.

        Args:
            i: id or name of the client
            split: split of the samples
        """
        i = self.client_id(i)
        y = self.labels(i, split)
        return self.x[self.lists(split)[i]], y

    def label_skew(self, split: str = "train") -> float:
        """The mean distance of a client's class shares from those of all clients.

        It is 0 where all clients have the same shares, and near 1 where no class has
        samples of two clients. The distance of shares p_i and p [C] is
        sum_c |p_ic - p_c| / 2 (total variation); p is the mean of all p_i. Clients
        without a label are left out. Raises ValueError where the targets are numbers.

        Args:
            split: split whose labels are counted
        """
        counts = self.counts(split).double()
        counts = counts[counts.sum(1) > 0]
        if not len(counts):
            return 0.0
        shares = counts / counts.sum(1, keepdim=True)
        return float((shares - shares.mean(0)).abs().sum(1).mean() / 2)

    def plot(self, split: str = "train") -> Any:
        """A picture of which client holds which samples, as a matplotlib figure.

        Each column is a client and each row a class. The area of a dot is proportional
        to the number of samples. Numbers to predict are counted in 20 bins of equal
        width. Where a target has several numbers, bars show the clients' sizes instead.
        A notebook shows the figure; `.savefig("cut.png")` saves it. Of more than 200
        clients the first 200 are drawn.

        Raises ImportError, with the command that installs it, without matplotlib.

        Args:
            split: split whose samples are counted
        """
        sizes = self.size(split)
        title = f"{self.name}: {self.n} clients, {int(sizes.sum()):,} {split} samples"
        ids = torch.arange(min(self.n, MAX_CLIENTS))
        if len(ids) < self.n:
            title = f"{title} (the first {len(ids)} of {self.n} clients)"
        if self.classes is not None:
            return draw_counts(self.counts(split, ids), title, self.names)
        lists = self.lists(split).take(ids)
        targets = _by_step(self.y[lists.flat]).cpu()
        if targets.shape[1] != 1 or not len(targets):
            return draw_sizes(sizes[: len(ids)], title, self.names)
        counts, edges = bin_targets(targets[:, 0], lists.owners().cpu(), len(ids))
        return draw_counts(counts, title, self.names, edges)

    def summary(self) -> str:
        """Lines of text: numbers of clients and samples, shapes, and facts."""
        classes_per_client = None
        label_skew = None
        if self.classes:
            classes_per_client = _describe_range((self.counts() > 0).sum(1))
            label_skew = (
                f"{self.label_skew():.2f} (0: clients are equal; 1: no class in common)"
            )
        facts: dict[str, Any] = {
            "clients": self.n,
            "samples": {split: len(self.lists(split).flat) for split in self.splits},
            "training samples per client": _describe_range(self.size()),
            "inputs": self.fields or list(self.shape),
            "classes": self.classes,
            "classes per client": classes_per_client,
            "label skew": label_skew,
            "labels permuted by client (concept shift)": self.relabel is not None,
            "standardized by client": self.scaling is not None,
        }
        for split in self.splits:
            num_empty = int((self.size(split) == 0).sum())
            facts[f"clients without {split} samples"] = num_empty
        if not self.y.is_floating_point():
            facts["labels that count in nothing"] = int((self.y == IGNORED_LABEL).sum())
            facts["samples without a label that counts"] = self._num_unlabelled()
        facts |= self.facts
        lines = [f"{key}: {value}" for key, value in facts.items() if value]
        return "\n".join([self.name, *lines])

    def _num_unlabelled(self) -> dict[str, int]:
        """The numbers of samples that a run leaves out for their labels, by split."""
        if bool(self.is_labelled.all()):
            return {}
        numbers = {}
        for split in self.splits:
            left_out = self.size(split) - self.size(split, labelled=True)
            numbers[split] = int(left_out.sum())
        return {split: number for split, number in numbers.items() if number}

    def __repr__(self) -> str:
        size = f"n={self.n}, splits={list(self.splits)}, shape={list(self.shape)}"
        return f"Federation({self.name!r}, {size}, classes={self.classes})"

    def _repr_html_(self) -> str:
        """The lines of `summary` as a table, for notebooks."""
        rows = [("fact", "value")]
        for line in self.summary().splitlines()[1:]:
            fact, _, value = line.partition(": ")
            rows.append((fact, value))
        return html_table(f"Federation {self.name}", rows)

    def to(self, device: str | torch.device) -> Self:
        """The same federation with its pool and index lists on `device`."""
        if torch.device(device) == self.device:
            return self

        def move_value(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor | Ragged) else value

        return self._copy_with(**tree_map(move_value, self.__dict__))

    # checks -------------------------------------------------------------------

    def _check_index(self) -> None:
        """Raises ValueError for index lists that do not fit the pool."""
        known = "train" in self.index and set(self.index) <= set(SPLITS)
        expected = "the split 'train', and perhaps 'val' and 'test'"
        require(known, "index", expected, list(self.index))
        pool_size = len(self.x) if self.x.dim() else 0
        used = torch.zeros(pool_size, dtype=torch.bool, device=self.device)
        for split in self.index:
            self._check_positions(split, pool_size)
            in_split = torch.zeros_like(used)
            in_split[self.index[split].flat] = True
            self._check_repeats(split, in_split)
            used_twice = (in_split & used).nonzero()[:1, 0].tolist()
            expected = "samples of no other split"
            require(not used_twice, f"index[{split!r}]", expected, used_twice)
            used |= in_split

    def _check_positions(self, split: str, pool_size: int) -> None:
        """Raises ValueError unless clients have lists of positions in the pool."""
        lists = self.index[split]
        name = f"index[{split!r}]"
        expected = f"a list for each of {self.n} clients"
        require(len(lists) == self.n, name, expected, len(lists))
        flat = lists.flat
        outside = ((flat < 0) | (flat >= pool_size)).nonzero()[:1, 0].tolist()
        if outside:
            position = outside[0]
            client = int(lists.owners()[position])
            expected = f"samples in 0..{pool_size - 1}"
            reject(f"{name}[{client}]", expected, int(flat[position]))

    def _check_repeats(self, split: str, in_split: Tensor) -> None:
        """Raises ValueError where a sample is twice in a split.

        Clients may share test samples, but each client has a sample once.

        Args:
            in_split: bool, as long as the pool: True for samples of the split
        """
        lists = self.index[split]
        flat = lists.flat
        if int(in_split.sum()) == len(flat):
            return
        key = flat
        if split == "test":
            key = lists.owners() * len(in_split) + flat
        is_unique = len(key.unique()) == len(key)
        expected = "a sample once, in one client's list"
        require(is_unique, f"index[{split!r}]", expected, flat)

    def _check_has_samples(self) -> None:
        """Raises ValueError for a client without any sample.

        A client without training samples is evaluated alone.
        """
        total = torch.stack([lists.size for lists in self.index.values()]).sum(0)
        empty = (total == 0).nonzero()[:, 0].tolist()
        expected = f"a sample of each, of any split; leave out the {len(empty)} without"
        names: Sequence[str | int] = range(self.n)
        if self.names and len(self.names) == self.n:
            names = self.names
        require(not empty, "clients", expected, [names[i] for i in empty[:5]])

    def _check_pool(self) -> None:
        """Raises ValueError for values in the pool that no federation may have.

        x and y must be dense and finite, and the labels must be of known classes.
        """
        x = self.x
        y = self.y
        same_rows = x.dim() and y.dim() and len(x) == len(y)
        fits = same_rows and x.device == y.device
        require(fits, "y", f"a row per row of x, {list(x.shape)} on {x.device}", y)
        self._check_numbers("x", x)
        self._check_numbers("y", y)
        if self.classes is not None:
            self._check_labels(self.classes)

    def _check_numbers(self, name: str, values: Tensor) -> None:
        """Raises ValueError unless values are dense, and finite floats or int64."""
        is_float = values.is_floating_point()
        is_number = is_float or values.dtype == torch.int64
        fits = is_number and values.layout == torch.strided
        require(fits, name, DENSE_TEXT, values)
        if not is_float or not values.numel():
            return
        # A NaN or Inf shows in the smallest or the largest value. To find these two
        # takes no mask as large as the pool.
        if bool(torch.stack(values.aminmax()).isfinite().all()):
            return
        in_sample = (~values.isfinite()).reshape(len(values), -1).any(1)
        sample = int(in_sample.nonzero()[0])
        column = ""
        if name == "x" and self.columns is not None and values.dim() == 2:
            position = int((~values[sample].isfinite()).nonzero()[0])
            column = f", column {self.columns[position]!r}"
        place = f"sample {sample}{column}{self._describe_holder(sample)}"
        reject(name, f"finite numbers, also in {place}", values[sample])

    def _check_labels(self, classes: int) -> None:
        """Raises ValueError unless labels are int64 in 0..classes-1, or ignored."""
        y = self.y
        expected = f"int64 labels in 0..{classes - 1} (classes=None for regression)"
        require(y.dtype == torch.int64, "y", expected, y)
        labels = y[y != IGNORED_LABEL]
        low = 0
        high = 0
        if labels.numel():
            smallest, largest = labels.aminmax()
            low = int(smallest)
            high = int(largest)
        if low == -1 and not bool((labels == 0).any()):
            expected += "; of -1 and 1 give (y > 0)"
        elif y.dim() > 1 or high == VOID_BYTE:
            void = low if low < 0 else high
            expected += f"; of a label that counts in nothing give ignored_label={void}"
        require(low >= 0 and high < classes, "y", expected, [low, high])

    def _describe_holder(self, sample: int) -> str:
        """Text that names the client that has a sample, or ""."""
        for split, lists in self.index.items():
            positions = (lists.flat == sample).nonzero()[:1, 0].tolist()
            if positions:
                client = int(lists.owners()[positions[0]])
                number = positions[0] - int(lists.begin[client])
                if self.names is None or len(self.names) != self.n:
                    return f", number {number} of client {client}'s {split} samples"
                name = self.names[client]
                return f", number {number} of the {split} samples of client {name!r}"
        return ""

    def _check_clients(self) -> None:
        """Raises ValueError unless what is known of the clients fits them."""
        for key, value in {**self.truth, "names": self.names}.items():
            fits = value is None or (np.ndim(value) > 0 and len(value) == self.n)
            require(fits, key, f"a row for each of {self.n} clients", value)
        if self.relabel is not None:
            self._check_relabel(self.relabel)

    def _check_names(self) -> None:
        """Raises ValueError unless columns and classes have one name each."""
        width = self.shape[0] if len(self.shape) == 1 and self.fields is None else 0
        counts = {"columns": width, "class_names": self.classes or 0}
        for key, count in counts.items():
            names = getattr(self, key)
            fits = names is None or len(set(names)) == len(names) == count
            require(fits, key, f"{count} different names", names)

    def _check_relabel(self, relabel: Tensor) -> None:
        """Raises ValueError unless each client has a label for every class.

        Samples with ignored labels cannot be relabelled.
        """
        classes = self.classes or 0
        shape = (self.n, classes)
        has_form = relabel.dtype == torch.int64 and relabel.shape == shape
        fits = has_form and classes and relabel.device == self.device
        fits = fits and bool(((relabel >= 0) & (relabel < classes)).all())
        fits = fits and not bool((self.y == IGNORED_LABEL).any())
        expected = f"int64 {list(shape)}, labels in 0..{classes - 1} on {self.device}"
        expected += ", and a label at every step of every sample"
        require(fits, "relabel", expected, relabel)


def _to_ragged(name: str, lists: Any, device: torch.device) -> Ragged:
    """The lists of a split as `Ragged`.

    Raises ValueError where one is not int64 [n_i] on the pool's device.
    """
    rows = [lists.flat] if isinstance(lists, Ragged) else lists
    has_lists = isinstance(rows, Sequence) and len(rows) > 0
    require(has_lists, name, "a list of index tensors, at least one", rows)
    expected = f"an int64 tensor [n] on {device}"
    for i, row in enumerate(rows):
        has_form = (
            isinstance(row, Tensor) and row.dtype == torch.int64 and row.dim() == 1
        )
        fits = has_form and row.device == device
        require(fits, f"{name}[{i}]", expected, row)
    return lists if isinstance(lists, Ragged) else Ragged.from_lists(rows)


def _describe_range(sizes: Tensor) -> str:
    """The smallest and the largest size [N], and the median, in words."""
    low, high = sizes.aminmax()
    return f"{low} to {high}, median {sizes.median()}"


def _by_step(y: Tensor) -> Tensor:
    """Targets [n, T] of samples of T steps each, which is 1 where y is [n]."""
    return y[:, None] if y.dim() == 1 else y.flatten(1)
