"""A federation: its three constructors, and the federations that it makes of itself.

A rule says for n samples which of their positions go to which split. Clients with as many samples
are dealt at once, by one permutation.
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
    Count,
    Fraction,
    Kind,
    Momentum,
    NonNegative,
    Seed32,
    checked,
    ids_of,
    need,
)
from pflcore.data._inputs import inputs, pair, target, tensor
from pflcore.data._partition import Partition
from pflcore.data._ragged import Ragged, onto
from pflcore.data._samples import SPLITS, Samples, Scaling

Classes = Count | Literal["infer"] | None
Each = Annotated[
    Any,
    Kind(
        "each client's data in a list (of a dict give its values)",
        lambda v: hasattr(v, "__iter__") and not isinstance(v, str | Mapping),
    ),
]
Rule = Callable[[int], dict[str, Tensor]]  # of n samples: the positions of each split
Split = Literal["train", "val", "test"]
HeldOut = Momentum  # a share of samples, below 1


class ClientGroups(NamedTuple):
    """Who trains, who chooses hyper-parameters, who is reported: disjoint client ids, each int64
    and sorted."""

    train: Tensor
    val: Tensor
    test: Tensor


class Federation(Samples):
    """The data of N clients, without copies: every client is a list of indices into one pool.

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

    A training sample belongs to one client, and no sample to two splits; two clients may share test
    samples (a common test set). ValueError or TypeError, one sentence: what does not fit, NaN or
    Inf, a client without training samples.
    """

    @classmethod
    @checked
    def from_clients(
        cls,
        clients: Each,
        *,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Self:
        """One ``(x, y)`` or Dataset of pairs per client, or a dict of them by split, ``{"train":
        (x, y), "test": (x, y), "val": ...}``.

        Arrays, tensors, lists; x may be a dict of them; Datasets are read once (so a random
        transform is drawn once). Integer targets are labels (``classes="infer"``: the largest label
        plus one), floating ones regression targets. ``dtype``: floating inputs and targets are
        converted to it; None keeps what came. To hold out samples for testing:
        ``.split(test=0.2)``.
        """
        parts = [
            (i, split, *pair(given, f"client {i} ({split})", dtype))
            for i, entry in enumerate(clients)
            for split, given in _by_split(i, entry).items()
        ]
        need(parts, "clients", "the data of at least one client", [])
        owner, splits, xs, ys, fields = zip(*parts, strict=True)
        kinds = [
            f"{f or list(x.shape[1:])} and {list(y.shape[1:])} ({str(y.dtype)[6:]})"
            for x, y, f in zip(xs, ys, fields, strict=True)
        ]
        for i, kind in zip(owner, kinds, strict=True):
            same = f"inputs and targets {kinds[0]}, as client {owner[0]} has"
            need(kind == kinds[0], f"client {i}", same, kind)
        y, size = torch.cat(ys), [len(y) for y in ys]
        whose, where = np.repeat(owner, size), np.repeat(splits, size)
        index = {
            s: Ragged.grouped(np.flatnonzero(where == s), whose[where == s], owner[-1] + 1)
            for s in SPLITS
            if s in splits
        }
        return cls(torch.cat(xs), y, index, infer(classes, y), name=name, fields=fields[0])

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

        Memory-mapped arrays of that ``dtype`` (or None) stay where they are. Or x is a data frame,
        as `pandas.read_parquet` gives it, and ``y`` and ``client`` name two of its columns (default
        "y", "client"). Ids are whole numbers or strings; clients are numbered in their order, and
        ``names`` has them. Other options as in `from_clients`.
        """
        if hasattr(x, "columns"):
            x, y, client = _columns(x, y or "y", client or "client")
        need(y is not None and client is not None, "y and client", "a value per sample", None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            (x, fields), y = inputs(x, "x", dtype), target(y, "y", dtype)
        lists, names = _by_client(client, len(x))
        index, known = {"train": lists}, infer(classes, y)
        return cls(x.contiguous(), y, index, known, name=name, fields=fields, names=names)

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
        """A training pool x [n, ...], y [n], an optional test pool, and a partition of ``cat(y,
        y_test)`` as :func:`pflcore.data.partition` makes them."""
        x, y = tensor(x, "x"), target(y, "y")
        if x_test is not None:
            xt, yt = tensor(x_test, "x_test"), target(y_test, "y_test")
            need(xt.shape[1:] == x.shape[1:], "x_test", f"inputs {list(x.shape[1:])}, as x has", xt)
            x, y = torch.cat([x, xt]), torch.cat([y, yt])
        truth = {} if partition.group is None else {"group": partition.group}
        c, p = infer(classes, y), partition
        return cls(x, y, p.index, c, p.relabel, name, p.facts, truth)

    # other federations of the same pool ---------------------------------------------------------

    @checked
    def split(
        self,
        *,
        val: HeldOut = 0.0,
        test: HeldOut = 0.0,
        seed: Seed32 = 0,
        of: Sequence[Split] | None = ("train",),
    ) -> Self:
        """Holds out these shares of each client's samples of the splits `of` (None: all): Motley's
        cross-silo setting.

        Test samples go first, ceil(test * n); then validation, ceil(val / (1 - test) * rest); each
        by a fresh permutation from `seed`. That is `train_test_split(random_state=seed)` of
        scikit-learn called twice, as the Motley code does, index for index. A client who would have
        none left to train on keeps them all. ValueError where no client has enough, or where a
        split that is to be made exists outside `of`.
        """
        need(test + val < 1, "val and test", "shares below 1 together", [val, test])
        wanted = {"test": test, "val": val / (1 - test)}
        wanted = {s: share for s, share in wanted.items() if share > 0}
        outside = [s for s in wanted if s in self.index and of is not None and s not in of]
        need(not outside, "of", f"{outside} too, which exist, or None for all splits", of)

        def rule(n: int) -> dict[str, Tensor]:
            rest, dealt = torch.arange(n), {}
            for split, share in wanted.items():
                order, cut = permutation(len(rest), seed), math.ceil(share * len(rest))
                cut = cut if cut < len(rest) else 0
                dealt[split], rest = rest[order[:cut]], rest[order[cut:]]
            return {**dealt, "train": rest}

        new = self.dealt(rule, of=of)
        missing = [s for s in wanted if s not in new.index]
        need(not missing, "val and test", f"a client with enough samples for {missing}", wanted)
        return new

    @checked
    def halves(
        self,
        clients: Any = None,
        seed: Seed32 = 13,
        of: Sequence[Split] | None = None,
        scored: Literal["val", "test"] = "test",
    ) -> Self:
        """Personalization halves ("train", floor(n / 2)) and evaluation halves (`scored`) of these
        clients' [S] (None: all clients') samples of the splits `of` (None: all).

        By one permutation from `seed`; they have nothing else then, and the other clients stay.
        Nothing but scoring may look at an evaluation half. ValueError for a client with fewer than
        two samples.
        """
        ids, size = self._ids(clients), self._joined(of).size
        few = ids[size[ids] < 2][:5].tolist()
        need(not few, "clients", "at least 2 samples each, to be halved; leave out", few)

        def rule(n: int) -> dict[str, Tensor]:
            order = permutation(n, seed)
            none = dict.fromkeys(("val", "test"), order[:0])
            return {**none, "train": order[: n // 2], scored: order[n // 2 :]}

        return self.dealt(rule, clients, of)

    @checked
    def keep(self, fraction: Fraction, clients: Any = None) -> Self:
        """The first `fraction` of each training list, rounded up: keep(.25) is part of keep(.5).
        Other splits, and those of clients other than `clients` [S], stay."""

        def rule(n: int) -> dict[str, Tensor]:
            return {"train": torch.arange(max(1, math.ceil(fraction * n - 1e-9)))}

        return self.dealt(rule, clients, ("train",))

    def dealt(self, rule: Rule, clients: Any = None, of: Sequence[str] | None = None) -> Self:
        """These clients' [S] samples of the splits `of` (None: all) dealt anew by a rule, a
        function of their number n -> {split: positions [k] in 0..n-1}.

        What the rule names or deals from is replaced; other splits and other clients stay. A split
        that is left with no sample at all is none.
        """
        ids, lists = self._ids(clients), self._joined(of).take(self._ids(clients))
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {s: [] for s in SPLITS}
        for n in lists.size.unique().tolist():
            same = (lists.size == n).nonzero()[:, 0]
            for split, positions in rule(n).items():
                rows = lists.flat[lists.begin[same, None] + positions]  # [m, k]
                parts[split].append((rows.flatten(), ids[same].repeat_interleave(len(positions))))
        chosen = torch.zeros(self.n, dtype=torch.bool).index_fill(0, ids, True)
        for s in self.splits:
            rows, owner = self.index[s].flat.cpu(), self.index[s].owner().cpu()
            if parts[s] or of is None or s in of:  # what is not dealt anew stays
                stay = ~chosen[owner]
                rows, owner = rows[stay], owner[stay]
            parts[s].append((rows, owner))
        index = {s: _grouped(parts[s], self.n) for s in SPLITS if parts[s]}
        index = {s: v.to(self.device) for s, v in index.items() if len(v.flat) or s == "train"}
        new = self._with(index=index)
        new._check_index()  # clients who shared test samples may share training samples now
        return new

    def subset(self, clients: Any) -> Self:
        """Only these clients [S], renumbered 0.. in the given order; the pool is shared."""
        ids = self._ids(clients)

        def mine(v: Any) -> Any:
            return v.take(ids) if isinstance(v, Ragged) else v[onto(ids, v.device)]

        names = self.names and tuple(self.names[i] for i in ids.tolist())
        rows = {k: getattr(self, k) for k in ("index", "relabel", "truth", "scaling")}
        rows = {k: v for k, v in rows.items() if v is not None}
        return self._with(names=names, **tree_map(mine, rows))

    @checked
    def split_clients(
        self,
        train: NonNegative = 0.8,
        val: NonNegative = 0.1,
        test: NonNegative = 0.1,
        seed: Seed32 = 13,
    ) -> ClientGroups:
        """Split the clients at random (Motley's cross-device setting): numbers of them (int) or
        fractions (float).

        One permutation by `seed`: its first ids are validation clients, the next test clients, then
        training clients. Fractions that add up to 1 use every client: the training group takes what
        rounding leaves.
        """
        given = (val, test, train)
        k = [math.floor(v * self.n + 0.5) if isinstance(v, float) else v for v in given]
        if isinstance(train, float) and abs(sum(given) - 1) < 1e-9:
            k[2] = self.n - k[0] - k[1]
        left = self.n - sum(k)
        right = f"{self.n} clients in all, one to train at least"
        need(left >= 0 and k[2] >= 1, "train, val and test", right, [train, val, test])
        groups = [g.sort().values for g in permutation(self.n, seed).split([*k, left])]
        return ClientGroups(groups[2], groups[0], groups[1])

    def standardize(self) -> Self:
        """Each client's features by the mean and deviation (ddof 0) of its own *training* samples;
        a new pool, and `scaling` keeps the statistics.

        A feature that is constant there is shifted only. Statistics of other clients, or of
        held-out samples, never enter. The models that a run on these data leaves take raw features:
        each scales what it is given by its client's statistics, and `History.adapt` a newcomer by
        its own training samples.
        """
        plain = self.x.is_floating_point() and self.fields is None
        need(plain, "x", "floats in one tensor, to be standardized", self.fields or self.x)
        lists, x = self._joined(None), self.x.clone()
        shared = int(torch.bincount(lists.flat).max()) > 1
        need(not shared, "index", "samples of one client each, to be standardized", "shared ones")
        mean, scale = (torch.empty(self.n, *self.shape, dtype=torch.float64) for _ in range(2))
        for i, (train, rows) in enumerate(zip(self.index["train"], lists, strict=True)):
            known = self.x[train].double()
            m, std = known.mean(0), known.std(0, correction=0)
            s = torch.where((known == known[0]).all(0), 1.0, std)
            x[rows] = Scaling(m, s).apply(self.x[rows])
            mean[i], scale[i] = m, s
        scaling = Scaling(mean, scale)
        if self.scaling is not None:  # of the features as they were once
            scaling = scaling.after(self.scaling)
        return self._with(x=x, scaling=scaling)

    def _ids(self, clients: Any) -> Tensor:
        """Distinct clients [S], in the given order, on the CPU; None: all."""
        return torch.arange(self.n) if clients is None else ids_of("clients", clients, self.n)

    def _joined(self, of: Sequence[str] | None) -> Ragged:
        """Each client's samples of these splits (None: all) one after the other, on the CPU."""
        lists = [self.lists(s).to("cpu") for s in (self.splits if of is None else of)]
        return _grouped([(v.flat, v.owner()) for v in lists], self.n)


def _grouped(parts: list[tuple[Tensor, Tensor]], n: int) -> Ragged:
    """Lists from pieces of samples [m] and their owners [m]."""
    rows, owner = map(torch.cat, zip(*parts, strict=True))
    return Ragged.grouped(rows, owner, n)


def permutation(n: int, seed: int) -> Tensor:
    """numpy's frozen stream: the same on every machine."""
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))


def _by_split(i: int, entry: Any) -> dict[str, Any]:
    """A client's pairs by split."""
    parts = dict(entry) if isinstance(entry, Mapping) else {"train": entry}
    known = set(parts) <= set(SPLITS) and "train" in parts
    need(known, f"client {i}", "'train' samples, and perhaps 'val' and 'test'", list(parts))
    return {s: given for s, given in parts.items() if s == "train" or len(given)}


def infer(classes: Classes, y: Tensor) -> int | None:
    """C, by the largest label where `classes` is "infer"; None for numbers."""
    if classes != "infer":
        return classes
    return None if y.is_floating_point() or y.numel() == 0 else max(int(y.max()) + 1, 1)


def _by_client(client: Any, count: int) -> tuple[Ragged, tuple[str | int, ...]]:
    """The samples [n] by client, and the ids [N] in ascending order."""
    ids: Any = np.asarray(client.cpu() if isinstance(client, Tensor) else client)
    if ids.dtype == object and all(isinstance(i, str) for i in ids):
        ids = ids.astype(str)
    fits = ids.shape == (count,) and ids.dtype.kind in "iuU"
    need(fits, "client", f"a whole number or a string for each of {count:,} samples", ids)
    names, owner = np.unique(ids, return_inverse=True)
    return Ragged.grouped(np.arange(count), owner, len(names)), tuple(names.tolist())


def _columns(frame: Any, y: str, client: str) -> tuple[Any, Any, Any]:
    """Two columns of a frame by name, and all others as x [n, D]."""
    names = list(frame.columns)
    need({y, client} < set(names), "y and client", f"two of the columns {names}", [y, client])
    x = frame.drop(columns=[y, client])
    kinds = dict(zip(x.columns, map(str, x.dtypes), strict=True))
    numbers = x.select_dtypes(["number", "bool"]).shape == x.shape
    need(numbers, "x", f"columns of numbers beside {y} and {client}", kinds)
    wide = np.float32 if set(kinds.values()) == {"float32"} else np.float64
    return x.to_numpy(wide), frame[y].to_numpy(), frame[client]
