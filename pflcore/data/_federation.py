"""A federation: the data of N clients, its constructors, and questions about it.

Symbols: N clients (`n` in code), S of them in a selection; client i has n_i samples in
a split; C classes; n samples are in a table or a pool, m in a piece of it; B samples
are in a batch; D numbers are in a row of fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import Self

from pflcore._device import to_device
from pflcore.check import (
    Expectation,
    Fraction,
    Momentum,
    NonNegativeFloat,
    PositiveInt,
    Seed32,
    Words,
    check_fields,
    checked,
    client_id,
    ids_of,
    reject,
    require,
)
from pflcore.data._feature_shift import FeatureShift, shift_client
from pflcore.data._federation_checks import check_federation, check_index, to_ragged
from pflcore.data._huggingface import read_hugging_face
from pflcore.data._inputs import (
    IGNORED_LABEL,
    Fields,
    mask_labels,
    to_inputs,
    to_tensor,
)
from pflcore.data._labels import (
    Classes,
    ReaderOptions,
    SampleKey,
    SampleKeys,
    read_targets,
)
from pflcore.data._picture import (
    MAX_CLIENTS,
    bin_targets,
    draw_counts,
    draw_sizes,
)
from pflcore.data._pools import Partition
from pflcore.data._ragged import Ragged
from pflcore.data._read import (
    SPLITS,
    interpret_pool,
    names_of_labels,
    read_clients,
)
from pflcore.data._scaling import Scaling, scaling_of
from pflcore.data._splits import (
    SplitRule,
    deal_by_class,
    halve,
    hold_out,
    keep_first,
    random_permutation,
)
from pflcore.data._tables import (
    column_names,
    frame_to_inputs,
    is_frame,
    order_of,
    split_table,
    stack_columns,
    text_names,
)


def _has_clients(value: Any) -> bool:
    """True for an iterable of clients' data, or a dict of them by name.

    A dict of samples by split is the data of one client.
    """
    if not isinstance(value, Mapping):
        return hasattr(value, "__iter__") and not isinstance(value, str)
    are_names = all(isinstance(name, str | int) for name in value)
    return are_names and not ("train" in value and set(value) <= set(SPLITS))


PerClientData = Annotated[
    Any,
    Expectation(
        "each client's data in a list, or in a dict by the client's name", _has_clients
    ),
]
# Samples and their owners, in pieces, for each split.
DealtSamples = dict[str, list[tuple[Tensor, Tensor]]]
Split = Literal["train", "val", "test"]
HeldOut = Momentum  # a share of samples, from 0 to below 1


class ClientGroups(NamedTuple):
    """Ids of three groups of clients, which have no client in common.

    Attributes:
        train: int64, sorted: the clients that train
        val: the same of the clients that choose hyper-parameters
        test: the same of the clients that are reported
    """

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True, repr=False)
class Federation:
    """The data of N clients: lists of indices into one pool.

    A training sample belongs to one client, and no sample belongs to two splits. Two
    clients may share test samples (a common test set). A client without training
    samples is evaluated, and never trains. Raises ValueError or TypeError for values
    that do not fit together, for NaN or Inf, and for a client without any sample.

    `from_clients`, `from_table` and `from_partition` make a federation of other forms
    of data. A federation does not change: its methods return new ones. These share the
    pool, but for those of `standardize` and of `to` another device.

    Attributes:
        x: [n, ...] inputs of the pool, floats or int64 (tokens). A dict of tensors may
            be given; it becomes one tensor [n, D], and `fields` describes it.
        y: [n] or [n, ...] int64 labels in 0..classes-1, or floating targets, for which
            `classes` is None. Labels that count in nothing are -100.
        index: for each split the N lists of positions in the pool, int64 [n_i]. "train"
            is required, "val" and "test" are not.
        classes: C, the number of classes; None for regression
        relabel: [N, C] int64, by which client i sees the label `relabel[i][y]` (concept
            shift), while the pool keeps its own labels; None where clients see these
        name: name of the data, for summaries and records
        facts: numbers that a partition or a reader counted, by name, for the summary
            and the record
        truth: facts that are known of the clients, by name, for instance "group" and
            "optimum"; each is a tensor [N, ...]
        fields: names, shapes and dtypes of the parts of an input that was a dict; None
            where x was a tensor
        names: N names or ids that the clients have in their source; None where they
            have none
        scaling: each client's statistics by which `standardize` shifted and scaled its
            features; None for raw features
        columns: names of the features, where they came from a table with named columns;
            None otherwise
        class_names: names of the classes 0, 1, ...; None where they have none
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
            index[split] = to_ragged(f"index[{split!r}]", lists, x.device)
        self.__dict__.update(y=mask_labels(self.y, x, fields), index=index)
        check_federation(self)

    def _copy_with(self, **changes: Any) -> Self:
        """A copy with other values of some fields, which are not checked.

        It is for values that are right by construction. The copy has the fields alone:
        what else an object keeps may be derived from fields that are others now.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self._field_values() | changes)
        return new

    def _field_values(self) -> dict[str, Any]:
        """The values of all fields by their names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

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
        if split not in self.index:
            reject("split", f"one of {', '.join(self.splits)}", split)
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
    def trainable_clients(self) -> Tensor:
        """The ids [T] of the clients with training samples, ascending."""
        return self.lists("train").nonempty

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
            "targets": None if self.classes else "numbers to predict",
            "classes": self.classes,
            "names of classes": ", ".join(self.class_names or ()),
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

    @property
    def classes_note(self) -> str | None:
        """A line for labels that could be numbers to predict, as counts are.

        None where there are two classes at most, or where the classes have names.
        """
        if (self.classes or 0) < 3 or self.class_names is not None:
            return None
        return (
            f"{self.classes} classes; --loss squared (classes=None) if their labels "
            "are numbers to predict"
        )

    def __repr__(self) -> str:
        size = f"n={self.n}, splits={list(self.splits)}, shape={list(self.shape)}"
        return f"Federation({self.name!r}, {size}, classes={self.classes})"

    def to(self, device: str | torch.device) -> Self:
        """The same federation with its pool and index lists on `device`."""
        if torch.device(device) == self.device:
            return self

        def move_value(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor | Ragged) else value

        return self._copy_with(**tree_map(move_value, self._field_values()))

    # constructors -----------------------------------------------------------

    @classmethod
    @checked
    def from_clients(
        cls,
        clients: PerClientData,
        *,
        x: SampleKey | Sequence[SampleKey] | None = None,
        y: SampleKey | None = None,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
        ignored_label: int | None = None,
    ) -> Self:
        """Makes a federation from one entry for each client.

        The entries are in a list, or in a dict by the clients' names, which `names`
        keeps. An entry is a pair ``(x, y)``, a Dataset of pairs, or a dict of these by
        split,
        ``{"train": (x, y), "test": (x, y), "val": ...}``. x and y are arrays, tensors
        or lists; x may be a dict of them. A list of tuples is read as a list of samples
        (x_j, y_j). Datasets are read once, so a random transform is drawn once. A
        client may have test samples alone: it is evaluated, and never trains. Where
        each x is a data frame, `columns` keeps the names of its columns, and other
        frames are read in the same order.

        With `x` and `y` an entry is a Dataset, a list or a table of samples with
        several parts: dicts, tuples or rows, of which these name the input and the
        target. Then ``x="image", y="label"`` reads dicts, and ``x=0, y=1`` triples. The
        other parts are ignored. Pictures of PIL become floats [C, H, W] from 0 to 1.

        What targets and inputs become is decided for all clients together
        (docs/data.md):

        - Integers and bool are labels from 0. ``classes="infer"`` takes the largest
          label plus one; more classes than labels are refused. Labels [n, 1] become
          [n].
        - Floats are regression targets; they are labels where ``classes`` is a number
          and all of them are whole.
        - With ``classes=None`` all targets are regression targets.
        - Strings are labels where ``classes`` lists the names of the classes. Other
          strings, and complex numbers, are refused.

        Inputs are floats, or integers that become int64 (tokens); uint8 is refused. To
        hold out samples for testing: ``.split(test=0.2)``.

        Args:
            clients: the data of each client, in the order of the clients' numbers
            x: name or position of the input in a sample; of several, the input is a
                dict of them. None where samples are pairs.
            y: name or position of the target in a sample
            classes: number of classes, or the list of their names; "infer" for the
                largest label plus one; None for regression
            dtype: dtype that floats are converted to; None keeps the dtype they have
            name: name of the data, for summaries and records
            ignored_label: label of samples, steps or pixels that count in nothing, such
                as 255; it becomes -100, which losses and accuracies leave out. None for
                no label but -100. `size` counts samples without any other label, too;
                `size(labelled=True)` counts those that a run takes
        """
        names = None
        if isinstance(clients, Mapping):
            names = list(clients)
            clients = clients.values()
        reader = ReaderOptions(
            classes, dtype, ignored_label=ignored_label, keys=_keys_of(x, y)
        )
        return cls(**read_clients(clients, reader, names), name=name)

    @classmethod
    @checked
    def from_hf(
        cls,
        dataset: Any,
        by: str | None = None,
        x: str | Sequence[str] = "image",
        y: str = "label",
        *,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
        ignored_label: int | None = None,
    ) -> Self:
        """A federation of Hugging Face's Datasets, or of flwr-datasets' partitions.

        The data are given in one of these forms:

        - a Dataset, or a DatasetDict of the splits train, validation and test. The
          column `by` says which client holds a row. Clients are in the ascending order
          of their ids, which `names` keeps.
        - one of these for each client, in a list or in a dict by name, as
          ``[partitioner.load_partition(i) for i in range(n)]``.
        - a FederatedDataset or a partitioner of flwr-datasets: every partition is a
          client.
        - the name of a Dataset, which `datasets.load_dataset` loads.

        The names of the classes come from the Dataset's features. Pictures become
        floats [C, H, W] from 0 to 1. A function that the Dataset applies to its rows
        (`with_transform`) is applied once.

        Raises ValueError where a column is missing, and for streams, which have no
        length; ImportError where a name is given and `datasets` is not installed.

        Args:
            dataset: the rows of all clients, or of each client
            by: column with each row's client; None where the data are given by client
            x: column of the inputs; of several, the input is a dict of them, which a
                model's `forward` takes as a dict or by keywords
            y: column of the targets
            classes: number of classes, or their names; "infer" for the names in the
                features, or else for the largest label plus one; None for regression
            dtype: dtype that floats are converted to; None keeps the dtype they have
            name: name of the data, for summaries and records
            ignored_label: label of samples that count in nothing, such as -1 in a test
                split; it becomes -100, which losses and accuracies leave out
        """
        keys = SampleKeys(x, y)
        entries = read_hugging_face(dataset, by, keys)
        reader = ReaderOptions(classes, dtype, ignored_label=ignored_label, keys=keys)
        names = list(entries) if isinstance(entries, Mapping) else None
        clients = entries.values() if isinstance(entries, Mapping) else entries
        return cls(**read_clients(clients, reader, names), name=name)

    @classmethod
    @checked
    def from_table(
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        *,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
        ignored_label: int | None = None,
    ) -> Self:
        """A federation of one table of samples: x [n, ...], y [n, ...], client [n].

        The table is given in one of two forms:

        - three arrays, of the inputs, of the targets, and of the id of each sample's
          client. Memory-mapped arrays are not copied where they have the dtype
          ``dtype``, or where that is None.
        - as ``x`` alone: a data frame (pandas, polars), an Arrow table or a Hugging
          Face Dataset. Then ``y`` and ``client`` are the names of two of its columns.
          The other columns are features (floats), whose names `columns` keeps, or there
          is a single one of arrays.

        Clients are numbered in the ascending order of their ids, which `names` keeps.
        Targets and inputs become what `from_clients` makes of them.

        Args:
            x: the inputs, or the whole table
            y: the targets, or the name of their column; None: the column "y"
            client: ids, whole numbers or strings, or the name of their column; None:
                the column "client"
            classes: number of classes, or the list of their names; "infer" for the
                largest label plus one; None for regression
            dtype: dtype that floats are converted to; None keeps the dtype they have
            name: name of the data, for summaries and records
            ignored_label: label of samples, steps or pixels that count in nothing, such
                as 255; it becomes -100, which losses and accuracies leave out. None for
                no label but -100
        """
        is_path = isinstance(x, str | Path)
        expected = "a table or inputs (read a file first, as pandas.read_csv does)"
        require(not is_path, "x", expected, x)
        reader = ReaderOptions(classes, dtype, ignored_label=ignored_label)
        return cls._from_table(x, y, client, reader, name)

    @classmethod
    def _from_table(
        cls, x: Any, y: Any, client: Any, reader: ReaderOptions, name: str
    ) -> Self:
        """A federation of one table, whose numbers mean what `reader` says.

        The other arguments are those of `from_table`.
        """
        columns = None
        label_names = None
        if column_names(x) is not None:
            label_names = names_of_labels(x, y, "x") if isinstance(y, str) else None
            inputs, y, client = split_table(x, y, client)
            columns = tuple(inputs)
            x = stack_columns(inputs, "x")
        has_both = y is not None and client is not None
        require(has_both, "y and client", "a value per sample", None)
        x, fields = to_inputs(x, "x", reader.dtype)
        targets = read_targets(y, "y", label_names)
        lists, names = _by_client(client, len(x))
        pool = interpret_pool(x.contiguous(), [targets], reader, columns, fields)
        return cls(**pool, index={"train": lists}, names=names, name=name)

    @classmethod
    @checked
    def from_partition(
        cls,
        x: Any,
        y: Any,
        partition: Partition,
        *,
        x_test: Any = None,
        y_test: Any = None,
        classes: Classes = "infer",
        name: str = "data",
        ignored_label: int | None = None,
    ) -> Self:
        """A federation of samples x [n, ...] and y [n], dealt by a partition.

        The partition is one of ``cat(y, y_test)``, as
        :func:`pflcore.data.partition` makes them: with ``test_labels=y_test`` where
        there are test samples. Raises ValueError where it was made of other numbers of
        samples.

        Args:
            x: inputs of the training pool
            y: their labels or targets
            partition: the indices of each client's samples
            x_test: inputs of the test pool [n_test, ...]; None for no test pool
            y_test: their labels or targets [n_test]
            classes: number of classes, or the list of their names; "infer" for the
                largest label plus one; None for regression
            name: name of the data, for summaries and records
            ignored_label: label of samples, steps or pixels that count in nothing, such
                as 255; it becomes -100, which losses and accuracies leave out. None for
                no label but -100
        """
        reader = ReaderOptions(classes, None, ignored_label=ignored_label)
        columns = text_names(x)
        x = _pool_inputs(x, "x")
        targets = [read_targets(y, "y")]
        pool_sizes = {"train": len(targets[0].values)}
        words = f"a value for each of the {len(x):,} samples of x"
        require(len(x) == pool_sizes["train"], "y", words, pool_sizes["train"])
        has_x_test = y_test is None or x_test is not None
        require(has_x_test, "x_test", "the inputs of y_test", x_test)
        if x_test is not None:
            test_columns = text_names(x_test)
            more_x = _pool_inputs(x_test, "x_test")
            if columns is not None and test_columns is not None:
                more_x = more_x[:, order_of(test_columns, columns, "x_test")]
            targets.append(read_targets(y_test, "y_test"))
            expected = f"inputs {list(x.shape[1:])}, as x has"
            require(more_x.shape[1:] == x.shape[1:], "x_test", expected, more_x)
            pool_sizes["test"] = len(targets[1].values)
            words = f"a value for each of the {len(more_x):,} samples of x_test"
            require(
                len(more_x) == pool_sizes["test"], "y_test", words, pool_sizes["test"]
            )
            x = torch.cat([x, more_x])
        fits = partition.pool_sizes == pool_sizes
        if not partition.pool_sizes:  # not made by `partition`
            fits = "test" in partition.index or "test" not in pool_sizes
        expected = (
            f"one of {pool_sizes} samples (a test pool by partition(..., "
            "test_labels=y_test))"
        )
        made_of = dict(partition.pool_sizes) or list(partition.index)
        require(fits, "partition", expected, made_of)
        group = partition.group
        return cls(
            **interpret_pool(x, targets, reader, columns),
            index=partition.index,
            relabel=partition.relabel,
            name=name,
            facts=partition.facts,
            truth={} if group is None else {"group": group},
        )

    # other federations of the same pool ---------------------------------------

    @checked
    def split(
        self,
        *,
        val: HeldOut = 0.0,
        test: HeldOut = 0.0,
        seed: Seed32 = 0,
        of: Sequence[Split] | None = ("train",),
        stratify: bool = False,
    ) -> Self:
        """A federation with shares of each client's samples held out.

        This is Motley's cross-silo setting. Of a client's n samples, ceil(test * n) are
        test samples. Of the `rest`, ceil(val / (1 - test) * rest) are validation
        samples. Both are chosen by a fresh permutation from `seed`. The result equals,
        index for index, two calls of scikit-learn's
        `train_test_split(random_state=seed)`, as in Motley's code. A client that would
        have no sample left to train on keeps all of its samples.

        Raises ValueError where no client has enough samples, or where a split that is
        to be made exists outside `of`.

        Args:
            val: share of a client's samples for validation, from 0 to below 1
            test: share of a client's samples for testing, from 0 to below 1
            seed: seeds the choice of the samples
            of: splits from which samples are taken, "train" among them; None for all
            stratify: True takes the same share of each class, up to one sample, and
                leaves a client a training sample of each of its classes. The targets
                must be one label a sample.
        """
        require(test + val < 1, "val and test", "shares below 1 together", [val, test])
        keeps_training = of is None or "train" in of
        words = "'train' among the splits, to which what is left goes, or None"
        require(keeps_training, "of", words, of)
        shares = {"test": test, "val": val / (1 - test)}
        shares = {split: share for split, share in shares.items() if share > 0}
        existing = [split for split in shares if split in self.index]
        outside = [split for split in existing if of is not None and split not in of]
        for split in outside:
            expected = f"no share for the split {split!r}, which is there"
            remedy = "give of=None, which divides all of a client's samples anew"
            reject(split, expected, {"val": val, "test": test}[split], remedy=remedy)
        if stratify:
            new = self._redistribute_by_class(shares, seed, of)
        else:
            new = self.redistribute(hold_out(shares, seed), of=of)
        missing = [split for split in shares if split not in new.index]
        expected = f"a client with enough samples for {missing}"
        require(not missing, "val and test", expected, shares)
        return new

    @checked
    def split_in_half(
        self,
        clients: Any = None,
        seed: Seed32 = 13,
        of: Sequence[Split] | None = None,
        scored: Literal["val", "test"] = "test",
    ) -> Self:
        """A federation with a half of clients' samples held out for evaluation.

        The n samples of a client are dealt by one permutation from `seed`: the first
        floor(n / 2) to "train", to personalize on, and the others to `scored`. A client
        loses its samples of other splits. Only scoring may look at an evaluation half.
        Raises ValueError for a client with fewer than two samples.

        Args:
            clients: ids or names [S] of the clients whose samples are halved; None for
                all. The other clients keep their samples.
            seed: seeds the permutation
            of: splits whose samples are dealt; None for all
            scored: split of the evaluation half
        """
        ids = self._ids(clients)
        size = self._all_lists(of).size
        too_small = ids[size[ids] < 2][:5].tolist()
        expected = "at least 2 samples each, to be halved; leave out"
        require(not too_small, "clients", expected, too_small)
        return self.redistribute(halve(scored, seed), clients, of)

    @checked
    def keep_fraction(self, fraction: Fraction, clients: Any = None) -> Self:
        """A federation with the first part of clients' training samples alone.

        The samples of a smaller fraction are among those of a larger one. Other splits,
        and other clients, stay.

        Args:
            fraction: fraction of a client's training samples, rounded up
            clients: ids or names [S] of the clients that lose samples; None for all
        """
        return self.redistribute(keep_first(fraction), clients, ("train",))

    def redistribute(
        self, rule: SplitRule, clients: Any = None, of: Sequence[str] | None = None
    ) -> Self:
        """A federation in which clients' samples are dealt to the splits anew.

        A split from which samples are dealt, or to which the rule deals some, is
        replaced. Other splits and other clients stay. A split without any sample is
        removed, but for "train".

        Args:
            rule: for a number of samples n, the positions in 0..n-1 that go to each
                split
            clients: ids or names [S] of the clients whose samples are dealt; None for
                all
            of: splits whose samples are dealt; None for all
        """
        ids = self._ids(clients)
        return self._with_dealt(self._deal_by_rule(rule, ids, of), ids, of)

    def _redistribute_by_class(
        self, shares: Mapping[str, float], seed: int, of: Sequence[str] | None
    ) -> Self:
        """A federation with shares of each client's classes held out."""
        expected = "labels, one for each sample"
        has_labels = self.classes is not None and self.y.dim() == 1
        require(has_labels, "stratify", expected, self.y)
        parts: DealtSamples = {split: [] for split in SPLITS}
        for client, rows in enumerate(self._all_lists(of)):
            dealt = deal_by_class(self.y[rows].cpu(), shares, seed)
            for split, positions in dealt.items():
                owners = torch.full_like(positions, client)
                parts[split].append((rows.cpu()[positions], owners))
        return self._with_dealt(parts, torch.arange(self.n), of)

    def _with_dealt(
        self, parts: DealtSamples, ids: Tensor, of: Sequence[str] | None
    ) -> Self:
        """The federation in which these clients' samples are dealt as `parts` says."""
        is_chosen = torch.zeros(self.n, dtype=torch.bool).index_fill(0, ids, value=True)
        for split in self.splits:
            rows = self.index[split].flat.cpu()
            owner = self.index[split].owners().cpu()
            is_replaced = parts[split] or of is None or split in of
            if is_replaced:
                stays = ~is_chosen[owner]
                rows = rows[stays]
                owner = owner[stays]
            parts[split].append((rows, owner))
        index = {}
        for split in SPLITS:
            if not parts[split]:
                continue
            lists = _group_by_owner(parts[split], self.n)
            if len(lists.flat) or split == "train":
                index[split] = lists.to(self.device)
        new = self._copy_with(index=index)
        # Clients that shared test samples may share training samples now.
        check_index(new)
        return new

    def _deal_by_rule(
        self, rule: SplitRule, ids: Tensor, of: Sequence[str] | None
    ) -> DealtSamples:
        """Samples and their owners, in pieces, for each split."""
        lists = self._all_lists(of).take(ids)
        parts: DealtSamples = {split: [] for split in SPLITS}
        for n in lists.size.unique().tolist():
            same_size = (lists.size == n).nonzero()[:, 0]
            begin = lists.begin[same_size, None]
            for split, positions in rule(n).items():
                rows = lists.flat[begin + positions]  # [clients, positions]
                owners = ids[same_size].repeat_interleave(len(positions))
                parts[split].append((rows.flatten(), owners))
        return parts

    def subset(self, clients: Any) -> Self:
        """A federation of these clients [S] alone, which shares the pool.

        They are renumbered from 0 in the given order.

        Args:
            clients: ids or names of the clients
        """
        ids = self._ids(clients)

        def take(value: Any) -> Any:
            if isinstance(value, Ragged):
                return value.take(ids)
            return value[to_device(ids, value.device)]

        names = self.names and tuple(self.names[i] for i in ids.tolist())
        per_client = {}
        for attribute in ("index", "relabel", "truth", "scaling"):
            value = getattr(self, attribute)
            if value is not None:
                per_client[attribute] = tree_map(take, value)
        return self._copy_with(names=names, **per_client)

    @checked
    def split_clients(
        self,
        train: NonNegativeFloat = 0.8,
        val: NonNegativeFloat = 0.1,
        test: NonNegativeFloat = 0.1,
        seed: Seed32 = 13,
    ) -> ClientGroups:
        """Three groups of clients, drawn at random (Motley's cross-device setting).

        Numbers of clients are given as int, fractions of the clients as float. Of one
        permutation by `seed`, the first ids are validation clients, the next are test
        clients, and then come training clients. Fractions that add up to 1 use every
        client: the training group takes the clients that rounding leaves over.

        Raises ValueError where there are fewer clients, or none to train.

        Args:
            train: number or fraction of the clients that train
            val: number or fraction of the clients that choose hyper-parameters
            test: number or fraction of the clients that are reported
            seed: seeds the permutation
        """
        shares = (val, test, train)
        counts = []
        for share in shares:
            count = share
            if isinstance(share, float):
                count = math.floor(share * self.n + 0.5)
            counts.append(count)
        if isinstance(train, float) and abs(sum(shares) - 1) < 1e-9:
            counts[2] = self.n - counts[0] - counts[1]
        left = self.n - sum(counts)
        expected = f"{self.n} clients in all, one to train at least"
        fits = left >= 0 and counts[2] >= 1
        require(fits, "train, val and test", expected, [train, val, test])
        order = random_permutation(self.n, seed)
        groups = [group.sort().values for group in order.split([*counts, left])]
        return ClientGroups(val=groups[0], test=groups[1], train=groups[2])

    def with_columns(self, columns: Sequence[str]) -> Self:
        """The federation with its features in the order of these columns.

        Raises ValueError where its columns have other names.

        Args:
            columns: names of all features, in the wanted order
        """
        expected = "a federation whose features have names"
        names = self.columns
        if names is None:
            reject("columns", expected, self)
        columns = tuple(columns)
        order = order_of(names, columns, "columns")
        scaling = self.scaling
        if scaling is not None:
            scaling = Scaling(scaling.mean[:, order], scaling.deviation[:, order])
        return self._copy_with(x=self.x[:, order], scaling=scaling, columns=columns)

    def standardize(self) -> Self:
        """A federation of standardized features, in a pool of its own.

        Each client's features are shifted by the mean of its own *training* samples,
        and divided by their deviation (ddof 0). A feature that is constant in them is
        shifted only. Statistics of other clients, or of held-out samples, never enter.
        A client without training samples has no statistics of its own, and takes those
        of all training samples together. `scaling` keeps the statistics.

        The models that a run on these data leaves take raw features. Each model scales
        its inputs by its client's statistics; for a newcomer, `History.adapt` takes
        those of the newcomer's training samples.

        Raises ValueError where x is no tensor of floats, where clients share samples,
        or where no client has training samples.
        """
        lists = self._lists_to_change("standardized")
        all_training = self._all_lists(("train",)).flat
        expected = "training samples, to standardize features by"
        require(len(all_training), "clients", expected, "none of any client")
        x = self.x.clone()
        common = None
        if len(self.trainable_clients) < self.n:
            common = scaling_of(self.x[all_training].double())
        mean = torch.empty(self.n, *self.shape, dtype=torch.float64)
        deviation = torch.empty_like(mean)
        for i, (train, rows) in enumerate(zip(self.index["train"], lists, strict=True)):
            scaling = common
            if len(train) or scaling is None:
                scaling = scaling_of(self.x[train].double())
            x[rows] = scaling.apply(self.x[rows])
            mean[i] = scaling.mean
            deviation[i] = scaling.deviation
        scaling = Scaling(mean, deviation)
        if self.scaling is not None:
            # These statistics are of features that were standardized before.
            scaling = scaling.combine_after(self.scaling)
        return self._copy_with(x=x, scaling=scaling)

    @checked
    def shift_features(
        self,
        shift: FeatureShift,
        strength: NonNegativeFloat | None = None,
        seed: Seed32 = 0,
    ) -> Self:
        """A federation whose clients see their inputs differently (feature shift).

        Every client's samples of all splits are changed by one function, in a pool of
        their own. Labels stay. What a client gets depends on the seed and on its number
        alone, not on how many others there are.

        - "rotation": images turned by a client's angle, from -strength to strength
          degrees (45), with the border repeated
        - "noise": normal noise with a client's deviation, from 0 to strength (0.5)
        - "brightness": a client's constant, from -strength to strength (0.5), is added
        - a function (client, x, generator) -> x of samples [n_i, ...], for anything
          else; `generator` is the client's own, and `strength` has no meaning

        A client's angle, deviation or constant is drawn uniformly, and
        ``truth["shift"]`` [N] holds it. Strength 0 leaves every bit as it is.

        Raises ValueError where x is no tensor of floats, where clients share samples,
        and where a function returns another shape, or NaN.

        Args:
            shift: rotation, noise, brightness, or a function
            strength: largest angle, deviation or constant of a client
            seed: seeds each client's draws
        """
        lists = self._lists_to_change("shifted")
        x = self.x.clone()
        amounts = []
        for i, client_rows in enumerate(lists):
            rows = to_device(client_rows, x.device)
            x[rows], amount = shift_client(i, x[rows], shift, strength, seed)
            amounts.append(amount)
        truth = dict(self.truth)
        if isinstance(shift, str):
            truth["shift"] = torch.tensor(amounts, dtype=torch.float64)
        return self._copy_with(x=x, truth=truth)

    def _lists_to_change(self, how: str) -> Ragged:
        """Lists of each client's samples of all splits, whose features may be changed.

        Raises ValueError where x is no tensor of floats, or where clients share
        samples.

        Args:
            how: what is done to the features, such as "shifted"
        """
        is_plain = self.x.is_floating_point() and self.fields is None
        expected = f"floats in one tensor, to be {how}"
        require(is_plain, "x", expected, self.fields or self.x)
        lists = self._all_lists(None)
        is_shared = int(torch.bincount(lists.flat).max()) > 1
        expected = f"samples of one client each, to be {how}"
        require(not is_shared, "index", expected, "shared ones")
        return lists

    def _ids(self, clients: Any) -> Tensor:
        """Ids of distinct clients [S], in the given order, on the CPU.

        With None for `clients` they are all clients.
        """
        if clients is None:
            return torch.arange(self.n)
        return ids_of("clients", clients, self.n, self.names)

    def _all_lists(self, of: Sequence[str] | None) -> Ragged:
        """Lists of each client's samples of the splits `of`, on the CPU.

        A client's samples of one split come after those of the split before. With None
        for `of` they are of all splits.
        """
        splits = self.splits if of is None else of
        lists = [self.lists(split).to("cpu") for split in splits]
        return _group_by_owner([(v.flat, v.owners()) for v in lists], self.n)


def _group_by_owner(parts: list[tuple[Tensor, Tensor]], n: int) -> Ragged:
    """Lists from pieces of samples [m] and their owners [m]."""
    rows, owner = map(torch.cat, zip(*parts, strict=True))
    return Ragged.from_owners(rows, owner, n)


def _keys_of(x: Any, y: Any) -> SampleKeys | None:
    """The keys that a caller gave, or None without any.

    Raises ValueError where only one of the two was given.
    """
    if x is None and y is None:
        return None
    require(x is not None, "x", "the name of the inputs, as y has one", x)
    require(y is not None, "y", "the name of the targets, as x has one", y)
    return SampleKeys(x, y)


def _pool_inputs(x: Any, name: str) -> Tensor:
    """The inputs of a pool, a data frame or an array, as a tensor."""
    return to_tensor(frame_to_inputs(x, name) if is_frame(x) else x, name)


def _by_client(client: Any, count: int) -> tuple[Ragged, tuple[str | int, ...]]:
    """The samples [n] of each client, and the clients' ids [N] in ascending order.

    Raises ValueError unless there is an id, a whole number or a string, per sample.
    """
    if isinstance(client, Tensor):
        client = client.cpu()
    ids: Any = np.asarray(client)
    if ids.dtype == object and all(isinstance(i, str) for i in ids):
        ids = ids.astype(str)
    # Of a list with strings numpy makes an array of strings alone: None becomes "None".
    is_list = isinstance(client, list | tuple)
    mixed = is_list and len({isinstance(i, str) for i in client}) > 1
    fits = ids.shape == (count,) and ids.dtype.kind in "iuU" and not mixed
    expected = f"a whole number or a string for each of {count:,} samples"
    require(fits, "client", expected, ids)
    if ids.dtype.kind == "U":
        empty = (np.char.strip(ids) == "").nonzero()[0].tolist()
        got = Words(f"none in the rows {', '.join(map(str, empty[:5]))} (from 0)")
        require(not empty, "client", expected, got)
    names, owner = np.unique(ids, return_inverse=True)
    lists = Ragged.from_owners(np.arange(count), owner, len(names))
    return lists, tuple(names.tolist())


def _describe_range(sizes: Tensor) -> str:
    """The smallest and the largest size [N], and the median, in words."""
    low, high = sizes.aminmax()
    return f"{low} to {high}, median {sizes.median()}"


def _by_step(y: Tensor) -> Tensor:
    """Targets [n, T] of samples of T steps each, which is 1 where y is [n]."""
    return y[:, None] if y.dim() == 1 else y.flatten(1)
