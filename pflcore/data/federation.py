"""A federation and its three constructors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from pflcore.check import Count, Kind, checked, need
from pflcore.data.cuts import Partition
from pflcore.data.inputs import inputs, pair, target, tensor
from pflcore.data.ragged import Ints, Ragged, stable_order
from pflcore.data.samples import SPLITS
from pflcore.data.splits import Splits

Classes = Count | Literal["infer"] | None
Each = Annotated[
    Any,
    Kind(
        "each client's data in a list (of a dict give its values)",
        lambda v: hasattr(v, "__iter__") and not isinstance(v, str | Mapping),
    ),
]


class Federation(Splits):
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
    scaling   what `standardize` shifted and scaled each client's features by: (mean, deviation),
              each [N, ...], or None

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
            (f or list(x.shape[1:]), y.dtype, list(y.shape[1:]))
            for x, y, f in zip(xs, ys, fields, strict=True)
        ]
        for i, kind in zip(owner, kinds, strict=True):
            same = f"inputs and targets {_said(kinds[0])}, as client {owner[0]} has"
            need(kind == kinds[0], f"client {i}", same, _said(kind))
        size = [len(y) for y in ys]
        where = np.repeat(np.array([SPLITS.index(s) for s in splits], np.int8), size)
        who = np.repeat(owner, size)
        rows = {s: np.flatnonzero(where == i) for i, s in enumerate(SPLITS)}
        rows = {s: r for s, r in rows.items() if s == "train" or s in splits}
        index = {s: Ragged.grouped(r, who[r], owner[-1] + 1) for s, r in rows.items()}
        y = torch.cat(ys)
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
        known = infer(classes, y)
        x = x.contiguous()
        return cls(x, y, {"train": lists}, known, name=name, fields=fields, names=names)

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
        y_test)`` as :mod:`pflcore.data.partition` makes them."""
        x, y = tensor(x, "x"), target(y, "y")
        if x_test is not None or y_test is not None:
            need(x_test is not None and y_test is not None, "x_test", "y_test beside it", None)
            xt, yt = tensor(x_test, "x_test"), target(y_test, "y_test")
            need(xt.shape[1:] == x.shape[1:], "x_test", f"inputs {list(x.shape[1:])}, as x has", xt)
            x, y = torch.cat([x, xt]), torch.cat([y, yt])
        truth = {} if partition.group is None else {"group": partition.group}
        c, p = infer(classes, y), partition
        return cls(x, y, p.index, c, p.relabel, name, p.facts, truth)


def _by_split(i: int, entry: Any) -> dict[str, Any]:
    """A client's pairs by split."""
    parts = dict(entry) if isinstance(entry, Mapping) else {"train": entry}
    known = set(parts) <= set(SPLITS) and "train" in parts
    need(known, f"client {i}", "'train' samples, and perhaps 'val' and 'test'", list(parts))
    return {s: given for s, given in parts.items() if s == "train" or len(given)}


def _said(kind: tuple[Any, Any, Any]) -> str:
    return f"{kind[0]} and {kind[2]} ({str(kind[1]).removeprefix('torch.')})"


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
    if ids.dtype.kind == "u" and not (ids >= 2**63).any():
        ids = ids.astype(np.int64)
    fits = ids.shape == (count,) and ids.dtype.kind in "iU"
    need(fits, "client", f"a whole number or a string for each of {count:,} samples", ids)
    order: Ints = stable_order(ids)
    ids = ids[order]
    first = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])[:count])
    size = torch.from_numpy(np.diff(np.append(first, count)))
    return Ragged(torch.from_numpy(order), size), tuple(ids[first].tolist())


def _columns(frame: Any, y: str, client: str) -> tuple[Any, Any, Any]:
    """Two columns of a frame by name, and all others as x [n, D]."""
    names = list(frame.columns)
    need({y, client} < set(names), "y and client", f"two of the columns {names}", [y, client])
    x = frame.drop(columns=[y, client])
    numbers = all(getattr(t, "kind", "O") in "fiub" for t in x.dtypes)
    kinds = dict(zip(x.columns, map(str, x.dtypes), strict=True))
    need(numbers, "x", f"columns of numbers beside {y} and {client}", kinds)
    half = all(t == np.float32 for t in x.dtypes)
    return x.to_numpy(np.float32 if half else np.float64), frame[y].to_numpy(), frame[client]
