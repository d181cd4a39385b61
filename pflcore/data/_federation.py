"""A federation: its three constructors, and the federations that it makes of itself.

A rule says for n samples which of their positions go to which split. Clients with as
many samples are dealt at once, by one permutation.
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
from pflcore.data._partition import Partition
from pflcore.data._ragged import Ragged, to_device
from pflcore.data._samples import SPLITS, ClientSamples, Scaling

PerClientData = Annotated[
    Any,
    Expectation(
        "each client's data in a list (of a dict give its values)",
        lambda v: hasattr(v, "__iter__") and not isinstance(v, str | Mapping),
    ),
]
# of n samples: the positions of each split
SplitRule = Callable[[int], dict[str, Tensor]]
Split = Literal["train", "val", "test"]
HeldOut = Momentum  # a share of samples, below 1


class ClientGroups(NamedTuple):
    """Who trains, who chooses hyper-parameters, who is reported: disjoint client ids,
    each int64 and sorted."""

    train: Tensor
    val: Tensor
    test: Tensor


class Federation(ClientSamples):
    """The data of N clients, without copies: every client is a list of indices into one
    pool.

    x         [n_pool, ...]    inputs: floats, or int64 (tokens); or a dict of such tensors
    y         [n_pool] or [n_pool, ...]   int64 labels in 0..classes-1, or floating targets (then
              ``classes`` is None)
    index     split -> N index lists (int64, [n_i]); "train" is required, "val" and "test" are not
    classes   C, or None for regression
    relabel   [N, C] int64 or None: client i sees ``relabel[i][y]`` (concept shift); the pool keeps
              its own labels
    facts     what a partition or a reader counted, by name: for the summary and the record
    truth     what is known of the clients beside their samples, each value [N, ...]: "group",
              "optimum", ...
    names     [N], the clients' own names or ids, or None
    scaling   what `standardize` shifted and scaled each client's raw features by: (mean,
              deviation), each [N, ...], or None

    A training sample belongs to one client, and no sample to two splits; two clients
    may share test samples (a common test set). ValueError or TypeError, one sentence:
    what does not fit, NaN or Inf, a client without training samples.
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
        """One pair ``(x, y)`` or Dataset of pairs per client, or a dict of them by
        split, ``{"train": (x, y), "test": (x, y), "val": ...}``.

        Arrays, tensors, lists; x may be a dict of them. A list of tuples is samples,
        one pair each. Datasets are read once (so a random transform is drawn once).

        What targets and inputs become is decided for all clients together
        (docs/data.md):

        integers, bool   labels from 0; ``classes="infer"`` takes the largest plus one, at most as
                         many as there are samples. Labels [n, 1] become [n]
        floats           numbers to predict; labels where ``classes`` is given and all are whole
        ``classes=None`` all targets are numbers to predict
        words, complex   refused

        Inputs are floats or int64 (tokens), and never bytes. ``dtype``: floats are
        converted to it; None keeps what came. To hold out samples for testing:
        ``.split(test=0.2)``.
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
        """Clients' samples as a reader has them; `names` are the clients' own."""
        count = 0
        parts = []
        for i, entry in enumerate(clients):
            count = i + 1
            who = f"client {i if names is None else names[i]}"
            for split, given in _by_split(who, entry).items():
                x, y, of_x = to_pair(given, f"{who} ({split})", reader.dtype)
                if len(y):
                    parts.append((i, who, split, x, y, of_x))
        require(count, "clients", "the data of at least one client", [])
        none = f"a sample to train on for each; leave out the {count} without"
        require(parts, "clients", none, "no samples at all")
        owner, whose, splits, xs, ys, fields = zip(*parts, strict=True)
        _check_same_form(
            whose,
            xs,
            ys,
            fields,
            typed=not reader.from_files and reader.classes == "infer",
        )
        floats = next((x.dtype for x in xs if x.is_floating_point()), torch.float32)
        size = [len(y) for y in ys]
        rows = np.repeat(owner, size)
        where = np.repeat(splits, size)
        index = {
            s: Ragged.from_owners(np.flatnonzero(where == s), rows[where == s], count)
            for s in SPLITS
            if s in splits or s == "train"
        }
        steps = has_single_step(xs[0], fields[0])
        y, classes = interpret_targets(torch.cat(ys), reader, floats, single_step=steps)
        x = merge_inputs(xs, whose, floats)
        made = None if names is None else tuple(names)
        return cls(x, y, index, classes, name=name, fields=fields[0], names=made)

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
        """One table of samples: x [n, ...], y [n, ...] and whose each is, client [n].

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
        how = ReaderOptions(classes, dtype)
        floats = x.dtype if x.is_floating_point() else torch.float32
        y, known = interpret_targets(
            y, how, floats, single_step=has_single_step(x, fields)
        )
        index = {"train": lists}
        return cls(
            x.contiguous(), y, index, known, name=name, fields=fields, names=names
        )

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
        """A training pool x [n, ...], y [n], an optional test pool, and a partition of
        ``cat(y, y_test)`` as :func:`pflcore.data.partition` makes them: with ``test_labels=y_test``
        where there is a test pool. ValueError where it was made of other numbers of
        samples."""
        x = to_tensor(x, "x")
        y = to_targets(y, "y")
        pools = {"train": len(y)}
        if x_test is not None:
            xt = to_tensor(x_test, "x_test")
            yt = to_targets(y_test, "y_test")
            require(
                xt.shape[1:] == x.shape[1:],
                "x_test",
                f"inputs {list(x.shape[1:])}, as x has",
                xt,
            )
            x, y, pools["test"] = torch.cat([x, xt]), torch.cat([y, yt]), len(yt)
        p = partition
        fits = (
            p.pool_sizes == pools
            if p.pool_sizes
            else "test" in p.index or "test" not in pools
        )
        wanted = (
            f"one of {pools} samples (a test pool by partition(..., "
            "test_labels=y_test))"
        )
        require(fits, "partition", wanted, dict(p.pool_sizes) or list(p.index))
        truth = {} if p.group is None else {"group": p.group}
        floats = x.dtype if x.is_floating_point() else torch.float32
        y, c = interpret_targets(
            y, ReaderOptions(classes, None), floats, single_step=has_single_step(x)
        )
        return cls(x, y, p.index, c, p.relabel, name, p.facts, truth)

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
        """Holds out these shares of each client's samples of the splits `of` (None:
        all): Motley's cross-silo setting.

        Test samples go first, ceil(test * n); then validation, ceil(val / (1 - test) *
        rest); each by a fresh permutation from `seed`. That is
        `train_test_split(random_state=seed)` of scikit-learn called twice, as the
        Motley code does, index for index. A client who would have none left to train on
        keeps them all. ValueError where no client has enough, or where a split that is
        to be made exists outside `of`.
        """
        require(test + val < 1, "val and test", "shares below 1 together", [val, test])
        wanted = {"test": test, "val": val / (1 - test)}
        wanted = {s: share for s, share in wanted.items() if share > 0}
        outside = [
            s for s in wanted if s in self.index and of is not None and s not in of
        ]
        require(
            not outside, "of", f"{outside} too, which exist, or None for all splits", of
        )

        def rule(n: int) -> dict[str, Tensor]:
            rest = torch.arange(n)
            dealt = {}
            for split, share in wanted.items():
                order = random_permutation(len(rest), seed)
                cut = math.ceil(share * len(rest))
                cut = cut if cut < len(rest) else 0
                dealt[split], rest = rest[order[:cut]], rest[order[cut:]]
            return {**dealt, "train": rest}

        new = self.redistribute(rule, of=of)
        missing = [s for s in wanted if s not in new.index]
        require(
            not missing,
            "val and test",
            f"a client with enough samples for {missing}",
            wanted,
        )
        return new

    @checked
    def split_in_half(
        self,
        clients: Any = None,
        seed: Seed32 = 13,
        of: Sequence[Split] | None = None,
        scored: Literal["val", "test"] = "test",
    ) -> Self:
        """Personalization halves ("train", floor(n / 2)) and evaluation halves
        (`scored`) of these clients' [S] (None: all clients') samples of the splits `of`
        (None: all).

        By one permutation from `seed`; they have nothing else then, and the other
        clients stay. Nothing but scoring may look at an evaluation half. ValueError for
        a client with fewer than two samples.
        """
        ids = self._ids(clients)
        size = self._all_lists(of).size
        few = ids[size[ids] < 2][:5].tolist()
        require(
            not few, "clients", "at least 2 samples each, to be halved; leave out", few
        )

        def rule(n: int) -> dict[str, Tensor]:
            order = random_permutation(n, seed)
            none = dict.fromkeys(("val", "test"), order[:0])
            return {**none, "train": order[: n // 2], scored: order[n // 2 :]}

        return self.redistribute(rule, clients, of)

    @checked
    def keep_fraction(self, fraction: Fraction, clients: Any = None) -> Self:
        """The first `fraction` of each training list, rounded up: keep(.25) is part of
        keep(.5). Other splits, and those of clients other than `clients` [S], stay."""

        def rule(n: int) -> dict[str, Tensor]:
            return {"train": torch.arange(max(1, math.ceil(fraction * n - 1e-9)))}

        return self.redistribute(rule, clients, ("train",))

    def redistribute(
        self, rule: SplitRule, clients: Any = None, of: Sequence[str] | None = None
    ) -> Self:
        """These clients' [S] samples of the splits `of` (None: all) dealt anew by a
        rule, a function of their number n -> {split: positions [k] in 0..n-1}.

        What the rule names or deals from is replaced; other splits and other clients
        stay. A split that is left with no sample at all is none.
        """
        ids = self._ids(clients)
        lists = self._all_lists(of).take(self._ids(clients))
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {s: [] for s in SPLITS}
        for n in lists.size.unique().tolist():
            same = (lists.size == n).nonzero()[:, 0]
            for split, positions in rule(n).items():
                rows = lists.flat[lists.begin[same, None] + positions]  # [m, k]
                parts[split].append(
                    (rows.flatten(), ids[same].repeat_interleave(len(positions)))
                )
        chosen = torch.zeros(self.n, dtype=torch.bool).index_fill(0, ids, True)
        for s in self.splits:
            rows = self.index[s].flat.cpu()
            owner = self.index[s].owners().cpu()
            if parts[s] or of is None or s in of:  # what is not dealt anew stays
                stay = ~chosen[owner]
                rows = rows[stay]
                owner = owner[stay]
            parts[s].append((rows, owner))
        index = {s: _group_by_owner(parts[s], self.n) for s in SPLITS if parts[s]}
        index = {
            s: v.to(self.device)
            for s, v in index.items()
            if len(v.flat) or s == "train"
        }
        new = self._copy_with(index=index)
        # clients who shared test samples may share training samples now
        new._check_index()
        return new

    def subset(self, clients: Any) -> Self:
        """Only these clients [S], renumbered 0.. in the given order; the pool is
        shared."""
        ids = self._ids(clients)

        def mine(v: Any) -> Any:
            return v.take(ids) if isinstance(v, Ragged) else v[to_device(ids, v.device)]

        names = self.names and tuple(self.names[i] for i in ids.tolist())
        rows = {k: getattr(self, k) for k in ("index", "relabel", "truth", "scaling")}
        rows = {k: v for k, v in rows.items() if v is not None}
        return self._copy_with(names=names, **tree_map(mine, rows))

    @checked
    def split_clients(
        self,
        train: NonNegativeFloat = 0.8,
        val: NonNegativeFloat = 0.1,
        test: NonNegativeFloat = 0.1,
        seed: Seed32 = 13,
    ) -> ClientGroups:
        """Split the clients at random (Motley's cross-device setting): numbers of them
        (int) or fractions (float).

        One permutation by `seed`: its first ids are validation clients, the next test
        clients, then training clients. Fractions that add up to 1 use every client: the
        training group takes what rounding leaves.
        """
        given = (val, test, train)
        k = [math.floor(v * self.n + 0.5) if isinstance(v, float) else v for v in given]
        if isinstance(train, float) and abs(sum(given) - 1) < 1e-9:
            k[2] = self.n - k[0] - k[1]
        left = self.n - sum(k)
        right = f"{self.n} clients in all, one to train at least"
        require(
            left >= 0 and k[2] >= 1, "train, val and test", right, [train, val, test]
        )
        groups = [
            g.sort().values for g in random_permutation(self.n, seed).split([*k, left])
        ]
        return ClientGroups(groups[2], groups[0], groups[1])

    def standardize(self) -> Self:
        """Each client's features by the mean and deviation (ddof 0) of its own
        *training* samples; a new pool, and `scaling` keeps the statistics.

        A feature that is constant there is shifted only. Statistics of other clients,
        or of held-out samples, never enter. The models that a run on these data leaves
        take raw features: each scales what it is given by its client's statistics, and
        `History.adapt` a newcomer by its own training samples.
        """
        plain = self.x.is_floating_point() and self.fields is None
        require(
            plain,
            "x",
            "floats in one tensor, to be standardized",
            self.fields or self.x,
        )
        lists = self._all_lists(None)
        x = self.x.clone()
        shared = int(torch.bincount(lists.flat).max()) > 1
        require(
            not shared,
            "index",
            "samples of one client each, to be standardized",
            "shared ones",
        )
        mean, scale = (
            torch.empty(self.n, *self.shape, dtype=torch.float64) for _ in range(2)
        )
        for i, (train, rows) in enumerate(zip(self.index["train"], lists, strict=True)):
            known = self.x[train].double()
            m = known.mean(0)
            std = known.std(0, correction=0)
            s = torch.where((known == known[0]).all(0), 1.0, std)
            x[rows] = Scaling(m, s).apply(self.x[rows])
            mean[i], scale[i] = m, s
        scaling = Scaling(mean, scale)
        if self.scaling is not None:  # of the features as they were once
            scaling = scaling.combine_after(self.scaling)
        return self._copy_with(x=x, scaling=scaling)

    def _ids(self, clients: Any) -> Tensor:
        """Distinct clients [S], in the given order, on the CPU; None: all."""
        return (
            torch.arange(self.n)
            if clients is None
            else ids_of("clients", clients, self.n)
        )

    def _all_lists(self, of: Sequence[str] | None) -> Ragged:
        """Each client's samples of these splits (None: all) one after the other, on
        the CPU."""
        lists = [self.lists(s).to("cpu") for s in (self.splits if of is None else of)]
        return _group_by_owner([(v.flat, v.owners()) for v in lists], self.n)


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
    """ValueError where clients' samples differ in form; `typed`: or one has labels and
    another numbers."""
    first = ""
    for who, x, y, parts in zip(holders, xs, ys, fields, strict=True):
        kind = f"{parts or list(x.shape[1:])} and {list(y.shape[1:])}"
        if typed:
            kind += " (floats)" if y.is_floating_point() else " (int64)"
        first = first or kind
        require(
            kind == first, who, f"inputs and targets {first}, as {holders[0]} has", kind
        )


def _by_client(client: Any, count: int) -> tuple[Ragged, tuple[str | int, ...]]:
    """The samples [n] by client, and the ids [N] in ascending order."""
    ids: Any = np.asarray(client.cpu() if isinstance(client, Tensor) else client)
    if ids.dtype == object and all(isinstance(i, str) for i in ids):
        ids = ids.astype(str)
    # of what a list mixes with words numpy makes words, also of what is missing
    mixed = (
        isinstance(client, list | tuple)
        and len({isinstance(i, str) for i in client}) > 1
    )
    fits = ids.shape == (count,) and ids.dtype.kind in "iuU" and not mixed
    require(
        fits, "client", f"a whole number or a string for each of {count:,} samples", ids
    )
    names, owner = np.unique(ids, return_inverse=True)
    return Ragged.from_owners(np.arange(count), owner, len(names)), tuple(
        names.tolist()
    )
