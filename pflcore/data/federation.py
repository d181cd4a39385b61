"""A federation, and its constructors from other people's containers: arrays, torch Datasets,
partitioned pools, and one table of samples with a column that says whose each is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from pflcore.check import Kind, Seed32, checked
from pflcore.data import splits
from pflcore.data.cuts import Partition
from pflcore.data.fields import Fields, joined
from pflcore.data.pool import SPLITS, Pool
from pflcore.data.ragged import Ragged, starts
from pflcore.data.splits import split_samples

Classes = int | Literal["infer"] | None
Clients = Annotated[
    Sequence[Any],
    Kind(
        "each client's data in a list", lambda v: hasattr(v, "__iter__") and not isinstance(v, str)
    ),
]


class Collected(Pool):
    """A federation with its constructors from containers."""

    @classmethod
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
        """A training pool, an optional test pool, and a partition of ``cat(y, y_test)`` as
        :mod:`pflcore.data.partition` makes them."""
        if isinstance(x, Mapping):
            raise TypeError(
                "x must be one tensor where a partition cuts it; give the clients' dicts to "
                "Federation.from_arrays"
            )
        x, y = tensor(x, "x", None), target(y, "y", None)
        if (x_test is None) != (y_test is None):
            raise ValueError(
                "x_test and y_test must come together, got only "
                f"{'y_test' if x_test is None else 'x_test'}"
            )
        if x_test is not None:
            xt, yt = tensor(x_test, "x_test", None), target(y_test, "y_test", None)
            if xt.shape[1:] != x.shape[1:]:
                raise ValueError(
                    f"x_test must have inputs of shape {list(x.shape[1:])} as x has, got "
                    f"{list(xt.shape[1:])}"
                )
            x, y = torch.cat([x, xt]), torch.cat([y, yt])
        index = {s: list(lists) for s, lists in partition.index.items()}
        truth = {} if partition.group is None else {"group": partition.group}
        empty = sum(not len(rows) for rows in index.get("test", []))
        notes = [
            *partition.notes,
            *(
                [f"{empty} of {len(index['test'])} clients have no test samples, and so no result"]
                if empty
                else []
            ),
        ]
        return cls(x, y, index, infer(classes, y), partition.relabel, name, notes, truth)

    @classmethod
    @checked
    def from_arrays(
        cls,
        clients: Clients,
        *,
        test: Clients | None = None,
        test_fraction: float = 0.0,
        seed: Seed32 = 0,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Self:
        """One ``(x, y)`` per client, or one ``{"train": (x, y), "test": (x, y), "val": ...}`` per
        client. Arrays, tensors or lists.

        ``test``: one ``(x, y)`` per client. ``test_fraction``: cut that part of each client's
        samples off instead, shuffled by ``seed``. Integer targets are labels (``classes="infer"``:
        the largest label plus one), floating ones regression targets. ``dtype``:
        floating inputs and targets are converted to it; None keeps what came.
        """
        if isinstance(clients, Mapping):
            raise TypeError(
                "clients must be a list with one entry per client, got a dict: give "
                "list(clients.values())"
            )
        clients = list(clients)
        if not clients:
            raise ValueError("clients must hold the data of at least one client, got an empty list")
        if test is not None and len(test) != len(clients):
            raise ValueError(
                f"test must hold one entry per client ({len(clients)}), got {len(test)}"
            )
        if test is not None and test_fraction:
            raise ValueError("give test or test_fraction, not both")
        if not 0 <= test_fraction < 1:
            raise ValueError(f"test_fraction must be at least 0 and below 1, got {test_fraction}")
        parts = [
            (i, split, *_pair(pair, f"client {i} ({split})", dtype))
            for i, entry in enumerate(clients)
            for split, pair in _splits(i, entry, test, test_fraction).items()
        ]
        size = {s: torch.zeros(len(clients), dtype=torch.int64) for s in ("train", *SPLITS)}
        lists: dict[str, list[Tensor]] = {s: [] for s in size}
        start = 0
        for i, split, x, y, fields in parts:
            _check_alike(f"client {i} ({split})", (x, y, fields), parts[0][2:])
            size[split][i] = len(x)
            lists[split].append(torch.arange(start, start + len(x)))
            start += len(x)
        none = torch.empty(0, dtype=torch.int64)
        index = {
            s: Ragged(torch.cat(rows or [none]), starts(size[s]))
            for s, rows in lists.items()
            if rows or s == "train"
        }
        x, y = torch.cat([p[2] for p in parts]), torch.cat([p[3] for p in parts])
        fed = cls(x, y, index, infer(classes, y), None, name, fields=parts[0][4])
        fractions = {"train": 1 - test_fraction, "test": test_fraction}
        return split_samples(fed, fractions, seed) if test_fraction else fed

    @classmethod
    @checked
    def from_datasets(
        cls, clients: Clients, *, test: Clients | None = None, **options: Any
    ) -> Self:
        """One torch ``Dataset`` of ``(x, y)`` pairs per client, read once into memory (so a random
        transform is drawn once).

        ``test`` is a list of Datasets; other options are those of :meth:`from_arrays`.
        """
        if isinstance(clients, Mapping):
            return cls.from_arrays(clients, **options)  # says that a list is wanted
        pairs = [
            {s: _read(part, f"client {i} ({s})") for s, part in d.items()}
            if isinstance(d, Mapping)
            else _read(d, f"client {i}")
            for i, d in enumerate(clients)
        ]
        tests = (
            None
            if test is None
            else [_read(d, f"client {i} (test)") if len(d) else {} for i, d in enumerate(test)]
        )
        return cls.from_arrays(pairs, test=tests, **options)


def _splits(i: int, entry: Any, test: Any, test_fraction: float) -> dict[str, Any]:
    """A client's pairs by split."""
    parts = dict(entry) if isinstance(entry, Mapping) else {"train": entry}
    brought = sorted(set(parts) - {"train"})
    if (test_fraction and brought) or (test is not None and "test" in brought):
        option = "test_fraction" if test_fraction else "test"
        raise ValueError(
            f"client {i} brings {' and '.join(brought)} samples of its own: leave {option} out"
        )
    if test is not None and test[i] != {}:
        parts["test"] = test[i]
    if not set(parts) <= set(SPLITS):
        raise ValueError(f"client {i} must have splits among {list(SPLITS)}, got {list(parts)}")
    return parts


def _check_alike(who: str, sample: Sequence[Any], first: Sequence[Any]) -> None:
    """Whether x, y and fields are of the first client's kind."""
    (x, y, fields), (x0, y0, fields0) = sample, first
    if fields != fields0:
        mine, theirs = fields or "of one tensor", fields0 or "one tensor"
        raise ValueError(f"{who} has inputs {mine}, client 0 has {theirs}")
    if x.shape[1:] != x0.shape[1:]:
        mine, theirs = list(x.shape[1:]), list(x0.shape[1:])
        raise ValueError(f"{who} has inputs of shape {mine}, client 0 has {theirs}")
    if y.shape[1:] != y0.shape[1:] or y.dtype != y0.dtype:
        raise ValueError(f"{who} has targets {_kind(y)}, client 0 has {_kind(y0)}")


def _read(dataset: Any, who: str) -> tuple[Any, Tensor]:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"{who} must be a torch Dataset with a length, got {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise ValueError(
            f"{who} has an empty Dataset: leave the client out, or give it at least one sample"
        )
    if type(dataset) is torch.utils.data.TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    samples = [dataset[k] for k in range(len(dataset))]
    if not (isinstance(samples[0], (tuple, list)) and len(samples[0]) == 2):
        raise TypeError(
            f"{who} must give pairs (x, y), got {type(samples[0]).__name__}: take them out of it, "
            "(sample['x'], sample['y'])"
        )
    try:
        first = samples[0][0]
        rows: Any = (
            {k: [s[0][k] for s in samples] for k in first}
            if isinstance(first, Mapping)
            else {"": [s[0] for s in samples]}
        )
        x = {k: torch.stack([torch.as_tensor(v) for v in column]) for k, column in rows.items()}
        y = torch.stack([torch.as_tensor(s[1]) for s in samples])
    except (RuntimeError, TypeError, ValueError) as e:
        raise ValueError(
            f"{who} has samples that do not stack into one tensor "
            f"({_unlike([s[0] for s in samples])})"
        ) from e
    return x if isinstance(first, Mapping) else x[""], y


def _pair(pair: Any, who: str, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Fields | None]:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise TypeError(f"{who} must be a pair (x, y), got {type(pair).__name__}")
    x, fields = inputs(pair[0], f"x of {who}", dtype)
    y = target(pair[1], f"y of {who}", dtype)
    if x.dim() < 1 or y.dim() < 1 or len(x) != len(y):
        raise ValueError(
            f"{who} must have one target per input, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    return x, y, fields


def inputs(value: Any, what: str, dtype: torch.dtype | None) -> tuple[Tensor, Fields | None]:
    """As :func:`tensor`; a dict's entries side by side in one row, and which they are."""
    if not isinstance(value, Mapping):
        return tensor(value, what, dtype), None
    return joined(
        {k: tensor(v, f"{what}[{k!r}]", dtype) for k, v in value.items()},
        dtype or torch.float32,
        what,
    )


def tensor(value: Any, what: str, dtype: torch.dtype | None) -> Tensor:
    """A detached CPU-or-device tensor; floating values go to ``dtype``, tokens of 16 or 32 bits to
    int64."""
    try:
        t = (
            value.detach()
            if isinstance(value, Tensor)
            else torch.as_tensor(_native(np.asarray(value)))
        )
    except (TypeError, ValueError, RuntimeError) as e:
        raise TypeError(
            f"{what} must be numbers in one array, got {type(value).__name__} ({_unlike(value)})"
        ) from e
    # tokens; bytes are left to be refused, they may be images
    if t.dtype in (torch.int16, torch.int32):
        return t.long()
    return t.to(dtype) if dtype is not None and t.is_floating_point() else t


def _native(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in this machine's byte order and with steps forward, a copy where torch would not
    read it."""
    native = a.dtype.newbyteorder("=")
    return (
        a
        if a.dtype == native and min(a.strides, default=0) >= 0
        else np.array(a, native, order="C")
    )


def _unlike(samples: Any) -> str:
    """What keeps samples from being one array, and what to do."""
    values = (
        [samples]
        if isinstance(samples, Mapping | str) or not hasattr(samples, "__iter__")
        else list(samples)
    )
    other = next(
        (
            v
            for v in values
            if isinstance(v, Mapping | str)
            or not (hasattr(v, "__len__") or isinstance(v, int | float))
        ),
        None,
    )
    if isinstance(other, Mapping):
        return "a sample is a dict: give one dict of tensors, a row for each sample in every one"
    if other is not None:
        return (
            f"a sample is a {type(other).__name__}: turn it into numbers first, images with a "
            "transform such as ToTensor"
        )
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "USO":
        return "it holds text: turn it into numbers first"
    return "their lengths or shapes differ: pad them to one"


def target(value: Any, what: str, dtype: torch.dtype | None) -> Tensor:
    """As :func:`tensor`; every integer type becomes int64, the type of labels."""
    t = tensor(value, what, dtype)
    return t if t.is_floating_point() else t.to(torch.int64)


def infer(classes: Classes, y: Tensor) -> int | None:
    if classes != "infer":
        return classes
    return None if y.is_floating_point() or y.numel() == 0 else max(int(y.max()) + 1, 1)


def _kind(y: Tensor) -> str:
    return f"{y.dtype} {list(y.shape[1:])}"


class Tabled(Collected):
    """A federation with its constructors from tables."""

    @classmethod
    @checked
    def from_table(  # noqa: PLR0913 (as from_arrays)
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        *,
        test_fraction: float = 0.0,
        seed: Seed32 = 0,
        classes: Classes = "infer",
        dtype: torch.dtype | None = torch.float32,
        name: str = "data",
    ) -> Self:
        """All samples in one table: ``x [n, ...]``, ``y [n]``, and whose each is, ``client [n]``:
        whole numbers or strings.

        Arrays or tensors, memory-mapped ones too (with ``dtype=None``, or of that dtype, they stay
        where they are). Or ``x`` is a data frame, as ``pandas.read_parquet`` gives it, ``y`` and
        ``client`` name two of its columns (default "y", "client"), and the others are the inputs.
        Clients are numbered in the order of their ids, which are in ``truth["client"]`` where they
        are numbers. Other options as in :meth:`from_arrays`. A million clients of 20 samples take
        seconds.
        """
        if hasattr(x, "columns"):
            x, y, client = _columns(x, y or "y", client or "client")
        if y is None or client is None:
            raise TypeError(
                "from_table needs y and client, one value per sample, or a data frame with columns "
                "of these names"
            )
        with warnings.catch_warnings():
            # a pool is never written to
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            (xs, fields), ys = inputs(x, "x", dtype), target(y, "y", dtype)
        xs = xs.contiguous()  # a table's columns lie apart in memory, and the kernels read rows
        order, size, ids = _by_client(client, len(xs))
        truth = {"client": torch.from_numpy(ids)} if ids.dtype == np.int64 else {}
        fed = cls(
            xs,
            ys,
            {"train": Ragged(torch.from_numpy(order), starts(torch.from_numpy(size)))},
            infer(classes, ys),
            None,
            name,
            [],
            truth,
            fields,
            tuple(ids.tolist()) if ids.dtype.kind == "U" else None,
        )
        return (
            split_samples(fed, {"train": 1 - test_fraction, "test": test_fraction}, seed)
            if test_fraction
            else fed
        )


def _by_client(client: Any, count: int) -> tuple[Any, Any, Any]:
    """The samples [n] by client, how many each has [N], and the ids [N] in ascending order."""
    ids = np.asarray(client.cpu() if isinstance(client, torch.Tensor) else client)
    if ids.shape != (count,):
        raise ValueError(
            f"client must hold one id per sample ({count:,}), got shape {list(ids.shape)}"
        )
    if ids.dtype == object and all(isinstance(i, str) for i in ids):
        ids = ids.astype(str)
    if ids.dtype.kind == "f":
        odd = ids[~((ids == np.floor(ids)) & (np.abs(ids) < 2**53))]
        if len(odd):
            raise ValueError(
                f"client must hold whole numbers or strings, got {odd[0]}: round the ids, or turn "
                "them into strings"
            )
    elif ids.dtype.kind not in "iuU":
        raise TypeError(
            f"client must hold whole numbers or strings, got {ids.dtype}: turn the ids into strings"
        )
    if ids.dtype.kind == "u" and count and ids.max() >= 2**63:
        raise ValueError(
            f"client must hold whole numbers below 2**63 or strings, got {ids.max()}: turn the ids "
            "into strings"
        )
    ids = ids if ids.dtype.kind == "U" else ids.astype(np.int64)
    order = np.arange(count)
    if (ids[1:] < ids[:-1]).any():
        lowest = ids.min() if ids.dtype.kind == "i" else None
        # one word for both: sorted many times faster
        if lowest is not None and (int(ids.max()) - int(lowest) + 1) * count < 2**63:
            key = (ids - lowest) * count + order
            key.sort()
            order = key % count
        else:
            order = np.argsort(ids, kind="stable")
        ids = ids[order]
    first = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])[:count])
    return order, np.diff(np.append(first, count)), ids[first]


def _columns(frame: Any, y: str, client: str) -> tuple[Any, Any, Any]:
    """A data frame's columns: two by name, and all others as x [n, D]."""
    names = list(frame.columns)
    for what, column in (("y", y), ("client", client)):
        if column not in names:
            raise ValueError(
                f"{what} must name one of the columns {', '.join(map(str, names))}, got {column!r}"
            )
    others = {c: np.asarray(frame[c]) for c in names if c not in (y, client)}
    if not others:
        raise ValueError(
            f"x must have columns beside {y!r} and {client!r}, got none: what are the inputs?"
        )
    for c, v in others.items():
        if v.dtype.kind not in "fiub":
            raise ValueError(
                f"x must hold numbers beside {client!r}, got {v.dtype} in the column {c!r}: encode "
                "it, or leave it out"
            )
    half = all(v.dtype == np.float32 for v in others.values())
    x = np.stack([*others.values()], 1, dtype=np.float32 if half else np.float64)
    return x, np.asarray(frame[y]), np.asarray(frame[client])


@dataclass(frozen=True, repr=False)
class Federation(Tabled):
    """The data of N clients, without copies: every client is a list of indices into one pool.

    x         [n_pool, ...]        inputs: floating point, or int64 (tokens)
    y         [n_pool] or [n_pool, ...]   int64 labels in 0..classes-1, or floating targets (then
    ``classes`` is None)
    index     split -> N index lists (int64, [n_i]); "train" is required, "val" and "test" are not;
    kept as :class:`Ragged`
    classes   C, or None for regression
    relabel   [N, C] int64 or None: client i sees ``relabel[i][y]`` (concept shift); the pool keeps
    its own labels
    truth     what is known of the clients beside their samples, each value [N, ...]: "group",
    "optimum", ...
    names     the clients' own names, or None
    scaling   what `standardized` shifted and scaled each client's features by: (mean, deviation),
    each [N, ...], or None

    A training sample belongs to one client, and no sample to two splits; two clients may share test
    samples (a common test set).

    Raises ValueError or TypeError, one sentence: no client, a client without training samples, an
    index out of range or used twice, shapes or dtypes that do not fit, labels outside 0..C-1,
    inputs or targets that are NaN or infinite.
    """

    # other federations made from it
    subset = splits.subset
    split_clients = splits.split_clients
    halves = splits.halves
    keep = splits.keep
    split_samples = splits.split_samples
    standardized = splits.standardized
