"""A federation: its three constructors, and the federations that it makes of itself.

A split rule says for n samples which of their positions go to which split. Clients with
equally many samples are dealt at once, by one permutation.

Symbols: N clients; client i has n_i samples in a split; C classes; n samples are in a
table or a pool; S clients are chosen of N.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    Seed32,
    checked,
    ids_of,
    require,
)
from pflcore.data._frames import column_names, read_columns
from pflcore.data._inputs import (
    Fields,
    has_single_step,
    to_inputs,
    to_pair,
    to_targets,
    to_tensor,
)
from pflcore.data._meaning import (
    Classes,
    ReaderOptions,
    interpret_targets,
    merge_inputs,
)
from pflcore.data._pools import Partition
from pflcore.data._ragged import Ragged
from pflcore.data._samples import SPLITS, ClientSamples, Scaling

PerClientData = Annotated[
    Any,
    Expectation(
        "each client's data in a list (of a dict give its values)",
        lambda v: hasattr(v, "__iter__") and not isinstance(v, str | Mapping),
    ),
]
# From a number of samples n to the positions in 0..n-1 of each split.
SplitRule = Callable[[int], dict[str, Tensor]]
Split = Literal["train", "val", "test"]
HeldOut = Momentum  # a share of samples, below 1


class ClientGroups(NamedTuple):
    """Clients that train, that choose hyper-parameters, and that are reported.

    The ids are disjoint, int64 and sorted.
    """

    train: Tensor
    val: Tensor
    test: Tensor


class Federation(ClientSamples):
    """The data of N clients, without copies: lists of indices into one pool.

    - x [n_pool, ...]: inputs, floats or int64 (tokens); or a dict of such tensors
    - y [n_pool] or [n_pool, ...]: int64 labels in 0..classes-1, or floating targets
      (then ``classes`` is None)
    - index: split -> N index lists (int64, [n_i]); "train" is required, "val" and
      "test" are not
    - classes: C, or None for regression
    - relabel: [N, C] int64 or None; client i sees ``relabel[i][y]`` (concept shift),
      the pool keeps its own labels
    - facts: what a partition or a reader counted, by name, for the summary and the
      record
    - truth: what is known of the clients beside their samples, each value [N, ...]:
      "group", "optimum", ...
    - names: [N], the clients' own names or ids, or None
    - scaling: what `standardize` shifted and scaled each client's raw features by,
      (mean, deviation), each [N, ...]; or None

    A training sample belongs to one client, and no sample to two splits; two clients
    may share test samples (a common test set). Raises ValueError or TypeError, one
    sentence, for what does not fit, NaN or Inf, and a client without training samples.
    """

    @classmethod
    @checked
    def from_clients(
        cls,
        clients: PerClientData,
        *,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Self:
        """Makes a federation from one entry for each client.

        An entry is a pair ``(x, y)``, a Dataset of pairs, or a dict of these by split,
        ``{"train": (x, y), "test": (x, y), "val": ...}``. x and y are arrays, tensors
        or lists; x may be a dict of them. A list of tuples is read as a list of samples
        (x_j, y_j). Datasets are read once, so a random transform is drawn once.

        What targets and inputs become is decided for all clients together
        (docs/data.md):

        - Integers and bool are labels from 0. ``classes="infer"`` takes the largest
          label plus one; more classes than labels are refused. Labels [n, 1] become
          [n].
        - Floats are regression targets; they are labels where ``classes`` is a number
          and all of them are whole.
        - With ``classes=None`` all targets are regression targets.
        - Strings and complex numbers are refused.

        Inputs are floats, or integers that become int64 (tokens); uint8 is refused.
        Floats are converted to ``dtype``; None keeps theirs. ``name`` stands in records
        and summaries. To hold out samples for testing: ``.split(test=0.2)``.
        """
        return cls._from_reader(clients, ReaderOptions(classes, dtype), name)

    @classmethod
    def _from_reader(
        cls,
        clients: Any,
        reader: ReaderOptions,
        name: str = "data",
        names: Sequence[str | int] | None = None,
    ) -> Self:
        """A federation of clients' samples as a reader has them.

        Args:
            names: the clients' own names
        """
        count = 0
        parts = []
        for i, entry in enumerate(clients):
            count = i + 1
            holder = f"client {i if names is None else names[i]}"
            for split, pair in _by_split(holder, entry).items():
                x, y, of_x = to_pair(pair, f"{holder} ({split})", reader.dtype)
                if len(y):
                    parts.append((i, holder, split, x, y, of_x))
        require(count, "clients", "the data of at least one client", [])
        expected = f"a sample to train on for each; leave out the {count} without"
        require(parts, "clients", expected, "no samples at all")
        owners, holders, splits, xs, ys, fields = zip(*parts, strict=True)
        typed = not reader.from_files and reader.classes == "infer"
        _check_same_form(holders, xs, ys, fields, typed=typed)
        sizes = [len(y) for y in ys]
        owner_of_sample = np.repeat(owners, sizes)
        split_of_sample = np.repeat(splits, sizes)
        index = {}
        for split in SPLITS:
            if split in splits or split == "train":
                is_in = split_of_sample == split
                index[split] = Ragged.from_owners(
                    np.flatnonzero(is_in), owner_of_sample[is_in], count
                )
        float_dtypes = (x.dtype for x in xs if x.is_floating_point())
        float_dtype = next(float_dtypes, torch.float32)
        single_step = has_single_step(xs[0], fields[0])
        y, classes = interpret_targets(
            torch.cat(ys), reader, float_dtype, single_step=single_step
        )
        x = merge_inputs(xs, holders, float_dtype)
        names = None if names is None else tuple(names)
        return cls(x, y, index, classes, name=name, fields=fields[0], names=names)

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
    ) -> Self:
        """One table of samples: x [n, ...], y [n, ...], and client [n], their owners.

        Memory-mapped arrays of that ``dtype`` (or None) stay where they are. Or x is a
        data frame (pandas, polars), an Arrow table or a Hugging Face Dataset, and
        ``y`` and ``client`` name two of its columns (default "y", "client"); the others
        are the features, floats, or a single column of arrays. Ids are whole numbers or
        strings; clients are numbered in their order, and
        ``names`` has them. Other options as in `from_clients`, and targets become what
        they become there.
        """
        columns = column_names(x)
        if columns is not None:
            x, y, client = read_columns(x, columns, y or "y", client or "client")
        require(
            y is not None and client is not None,
            "y and client",
            "a value per sample",
            None,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            x, fields = to_inputs(x, "x", dtype)
            y = to_targets(y, "y")
        lists, names = _by_client(client, len(x))
        x = x.contiguous()
        y, classes = interpret_targets(
            y,
            ReaderOptions(classes, dtype),
            x.dtype if x.is_floating_point() else torch.float32,
            single_step=has_single_step(x, fields),
        )
        index = {"train": lists}
        return cls(x, y, index, classes, name=name, fields=fields, names=names)

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
    ) -> Self:
        """Samples x [n, ...], y [n], perhaps test samples, dealt by a partition.

        The partition is one of ``cat(y, y_test)``, as
        :func:`pflcore.data.partition` makes them: with ``test_labels=y_test`` where
        there are test samples. Raises ValueError where it was made of other numbers of
        samples.
        """
        x = to_tensor(x, "x")
        y = to_targets(y, "y")
        pool_sizes = {"train": len(y)}
        if x_test is not None:
            more_x = to_tensor(x_test, "x_test")
            more_y = to_targets(y_test, "y_test")
            expected = f"inputs {list(x.shape[1:])}, as x has"
            require(more_x.shape[1:] == x.shape[1:], "x_test", expected, more_x)
            x = torch.cat([x, more_x])
            y = torch.cat([y, more_y])
            pool_sizes["test"] = len(more_y)
        fits = partition.pool_sizes == pool_sizes
        if not partition.pool_sizes:  # not made by `partition`
            fits = "test" in partition.index or "test" not in pool_sizes
        expected = (
            f"one of {pool_sizes} samples (a test pool by partition(..., "
            "test_labels=y_test))"
        )
        made_of = dict(partition.pool_sizes) or list(partition.index)
        require(fits, "partition", expected, made_of)
        y, classes = interpret_targets(
            y,
            ReaderOptions(classes, None),
            x.dtype if x.is_floating_point() else torch.float32,
            single_step=has_single_step(x),
        )
        return cls(
            x,
            y,
            partition.index,
            classes,
            partition.relabel,
            name,
            partition.facts,
            truth={} if partition.group is None else {"group": partition.group},
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
    ) -> Self:
        """Holds out shares of each client's samples (Motley's cross-silo setting).

        They are taken from the splits `of` (None: all). Test samples go first,
        ceil(test * n); then validation, ceil(val / (1 - test) * rest); each by a fresh
        permutation from `seed`. That is `train_test_split(random_state=seed)` of
        scikit-learn called twice, as the Motley code does, index for index. A client
        that would have none left to train on keeps them all.

        Raises ValueError where no client has enough, or where a split that is to be
        made exists outside `of`.
        """
        require(test + val < 1, "val and test", "shares below 1 together", [val, test])
        shares = {"test": test, "val": val / (1 - test)}
        shares = {split: share for split, share in shares.items() if share > 0}
        existing = [split for split in shares if split in self.index]
        outside = [split for split in existing if of is not None and split not in of]
        expected = f"{outside} too, which exist, or None for all splits"
        require(not outside, "of", expected, of)

        def rule(n: int) -> dict[str, Tensor]:
            rest = torch.arange(n)
            dealt = {}
            for split, share in shares.items():
                order = random_permutation(len(rest), seed)
                count = math.ceil(share * len(rest))
                if count >= len(rest):  # none would be left to train on
                    count = 0
                dealt[split] = rest[order[:count]]
                rest = rest[order[count:]]
            return {**dealt, "train": rest}

        new = self.redistribute(rule, of=of)
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
        """Halves of these clients' [S] samples: to personalize on, and to evaluate on.

        The samples of the splits `of` (None: all) of `clients` (None: all) are dealt by
        one permutation from `seed`: the first floor(n / 2) to "train", the others to
        `scored`. These clients have no other samples then; the other clients stay. Only
        scoring may look at an evaluation half. Raises ValueError for a client with
        fewer than two samples.
        """
        ids = self._ids(clients)
        size = self._all_lists(of).size
        too_small = ids[size[ids] < 2][:5].tolist()
        expected = "at least 2 samples each, to be halved; leave out"
        require(not too_small, "clients", expected, too_small)

        def rule(n: int) -> dict[str, Tensor]:
            order = random_permutation(n, seed)
            empty = {"val": order[:0], "test": order[:0]}
            return {**empty, "train": order[: n // 2], scored: order[n // 2 :]}

        return self.redistribute(rule, clients, of)

    @checked
    def keep_fraction(self, fraction: Fraction, clients: Any = None) -> Self:
        """The first `fraction` of each training list of `clients` [S], rounded up.

        So a smaller fraction is part of a larger one. Other splits, and other clients,
        stay.
        """

        def rule(n: int) -> dict[str, Tensor]:
            return {"train": torch.arange(max(1, math.ceil(fraction * n - 1e-9)))}

        return self.redistribute(rule, clients, ("train",))

    def redistribute(
        self, rule: SplitRule, clients: Any = None, of: Sequence[str] | None = None
    ) -> Self:
        """The samples of these clients [S] in the splits `of` (None: all), dealt anew.

        What the rule names or deals from is replaced; other splits and other clients
        stay. A split that is left without any sample is removed, but for "train".
        """
        ids = self._ids(clients)
        parts = self._deal_by_rule(rule, ids, of)
        is_chosen = torch.zeros(self.n, dtype=torch.bool).index_fill(0, ids, True)
        for split in self.splits:
            rows = self.index[split].flat.cpu()
            owner = self.index[split].owners().cpu()
            if parts[split] or of is None or split in of:  # else all of it stays
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
        new._check_index()
        return new

    def _deal_by_rule(
        self, rule: SplitRule, ids: Tensor, of: Sequence[str] | None
    ) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Samples and their owners, in pieces, for each split."""
        lists = self._all_lists(of).take(ids)
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {s: [] for s in SPLITS}
        for n in lists.size.unique().tolist():
            same_size = (lists.size == n).nonzero()[:, 0]
            begin = lists.begin[same_size, None]
            for split, positions in rule(n).items():
                rows = lists.flat[begin + positions]  # [clients, positions]
                owners = ids[same_size].repeat_interleave(len(positions))
                parts[split].append((rows.flatten(), owners))
        return parts

    def subset(self, clients: Any) -> Self:
        """Only these clients [S], renumbered 0.. in the given order; the pool is
        shared."""
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
        """Groups of clients, drawn at random (Motley's cross-device setting).

        Arguments are numbers of clients (int) or fractions (float). One permutation by
        `seed`: its first ids are validation clients, the next test clients, then
        training clients. Fractions that add up to 1 use every client: the training
        group takes what rounding leaves.
        """
        shares = (val, test, train)
        counts = []
        for share in shares:
            is_fraction = isinstance(share, float)
            counts.append(math.floor(share * self.n + 0.5) if is_fraction else share)
        if isinstance(train, float) and abs(sum(shares) - 1) < 1e-9:
            counts[2] = self.n - counts[0] - counts[1]
        left = self.n - sum(counts)
        expected = f"{self.n} clients in all, one to train at least"
        fits = left >= 0 and counts[2] >= 1
        require(fits, "train, val and test", expected, [train, val, test])
        order = random_permutation(self.n, seed)
        groups = [group.sort().values for group in order.split([*counts, left])]
        return ClientGroups(val=groups[0], test=groups[1], train=groups[2])

    def standardize(self) -> Self:
        """Each client's features by the mean and deviation (ddof 0) of its own
        *training* samples; a new pool, and `scaling` keeps the statistics.

        A feature that is constant there is shifted only. Statistics of other clients,
        or of held-out samples, never enter. The models that a run on these data leaves
        take raw features: each scales what it is given by its client's statistics, and
        `History.adapt` a newcomer by its own training samples.
        """
        is_plain = self.x.is_floating_point() and self.fields is None
        expected = "floats in one tensor, to be standardized"
        require(is_plain, "x", expected, self.fields or self.x)
        lists = self._all_lists(None)
        is_shared = int(torch.bincount(lists.flat).max()) > 1
        expected = "samples of one client each, to be standardized"
        require(not is_shared, "index", expected, "shared ones")
        x = self.x.clone()
        mean = torch.empty(self.n, *self.shape, dtype=torch.float64)
        deviation = torch.empty_like(mean)
        for i, (train, rows) in enumerate(zip(self.index["train"], lists, strict=True)):
            scaling = _scaling_of(self.x[train].double())
            x[rows] = scaling.apply(self.x[rows])
            mean[i] = scaling.mean
            deviation[i] = scaling.deviation
        scaling = Scaling(mean, deviation)
        if self.scaling is not None:  # of the features as they were once
            scaling = scaling.combine_after(self.scaling)
        return self._copy_with(x=x, scaling=scaling)

    def _ids(self, clients: Any) -> Tensor:
        """Distinct clients [S], in the given order, on the CPU; None: all."""
        if clients is None:
            return torch.arange(self.n)
        return ids_of("clients", clients, self.n)

    def _all_lists(self, of: Sequence[str] | None) -> Ragged:
        """Each client's samples of these splits (None: all), on the CPU.

        A client's samples of one split come after those of the split before.
        """
        splits = self.splits if of is None else of
        lists = [self.lists(split).to("cpu") for split in splits]
        return _group_by_owner([(v.flat, v.owners()) for v in lists], self.n)


def _scaling_of(samples: Tensor) -> Scaling:
    """Mean and deviation of samples [n, ...]; 1 where all are equal."""
    is_constant = (samples == samples[0]).all(0)
    deviation = samples.std(0, correction=0)
    return Scaling(samples.mean(0), torch.where(is_constant, 1.0, deviation))


def _group_by_owner(parts: list[tuple[Tensor, Tensor]], n: int) -> Ragged:
    """Lists from pieces of samples [m] and their owners [m]."""
    rows, owner = map(torch.cat, zip(*parts, strict=True))
    return Ragged.from_owners(rows, owner, n)


def random_permutation(n: int, seed: int) -> Tensor:
    """numpy's frozen stream: the same on every machine."""
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))


def _by_split(holder: str, entry: Any) -> dict[str, Any]:
    """A client's pairs by split."""
    parts = dict(entry) if isinstance(entry, Mapping) else {"train": entry}
    known = set(parts) <= set(SPLITS) and "train" in parts
    require(known, holder, "'train' samples, and perhaps 'val' and 'test'", list(parts))
    return parts


def _check_same_form(
    holders: Sequence[str],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    fields: Sequence[Fields | None],
    *,
    typed: bool,
) -> None:
    """Raises ValueError where clients' samples differ in form.

    Args:
        typed: also where one client has labels and another numbers
    """
    first = ""
    for holder, x, y, parts in zip(holders, xs, ys, fields, strict=True):
        form = f"{parts or list(x.shape[1:])} and {list(y.shape[1:])}"
        if typed:
            form += " (floats)" if y.is_floating_point() else " (int64)"
        first = first or form
        expected = f"inputs and targets {first}, as {holders[0]} has"
        require(form == first, holder, expected, form)


def _by_client(client: Any, count: int) -> tuple[Ragged, tuple[str | int, ...]]:
    """The samples [n] by client, and the ids [N] in ascending order."""
    ids: Any = np.asarray(client.cpu() if isinstance(client, Tensor) else client)
    if ids.dtype == object and all(isinstance(i, str) for i in ids):
        ids = ids.astype(str)
    # In a list with strings numpy turns everything into strings, also None.
    is_list = isinstance(client, list | tuple)
    mixed = is_list and len({isinstance(i, str) for i in client}) > 1
    fits = ids.shape == (count,) and ids.dtype.kind in "iuU" and not mixed
    expected = f"a whole number or a string for each of {count:,} samples"
    require(fits, "client", expected, ids)
    names, owner = np.unique(ids, return_inverse=True)
    lists = Ragged.from_owners(np.arange(count), owner, len(names))
    return lists, tuple(names.tolist())
