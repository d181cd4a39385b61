"""Clients' models, however other code holds them, as one matrix [N, P]; and back into the form they
came in: a row, a list of arrays, a state dict, a Flower record, a module, a file.

Nothing is imported for a form that is not there: a Flower record is known by what its values have,
safetensors by the file's name.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflcore import ops
from pflcore.check import Matrix, Names, checked
from pflcore.ops import stream

# what batch norm's buffers are called; a state dict does not say what is a buffer
STATISTICS = ("running_mean", "running_var")
Make = Callable[[Tensor], Any]  # a flat piece of a row -> what came: shape, dtype, device, kind


def own(value: Any, who: str) -> tuple[Any, Make] | None:
    """A tensor or an array that `value` is, holds or makes, without a copy, and how to make its
    like; None where it is no such thing."""
    if hasattr(value, "materialize") and not isinstance(value, Tensor):
        value = value.materialize()
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or is_lazy(value):
            raise ValueError(
                f"{who}: expected a dense tensor with values, got {value.layout} on "
                f"{value.device}; make it dense first."
            )
        shape, like = value.shape, {"dtype": value.dtype, "device": value.device}
        return value.detach(), lambda t: t.detach().to(**like, copy=True).view(shape)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        extent, dtype, scalar = array.shape, array.dtype, isinstance(value, np.generic)
        return array, lambda t: _array(t, extent, dtype)[()] if scalar else _array(t, extent, dtype)
    if _is_flower(value):
        array = _from_bytes(value, who)
        extent, dtype, cls, stype = array.shape, array.dtype, type(value), value.stype
        return array, lambda t: _to_bytes(_array(t, extent, dtype), cls, stype)
    return None


def put(value: Any, into: Tensor) -> None:
    """Writes a tensor or an array into a contiguous piece of a row."""
    if isinstance(value, Tensor):
        into.view(value.shape).copy_(value)
    else:
        into.numpy().reshape(value.shape)[...] = value


def dtype_of(value: Any, who: str) -> torch.dtype:
    """The torch dtype of a tensor or an array. ValueError where torch has none for it."""
    if isinstance(value, Tensor):
        return value.dtype
    try:
        return torch.from_numpy(np.empty(0, value.dtype.newbyteorder("="))).dtype
    except TypeError:
        raise ValueError(
            f"{who}: numpy carries no {value.dtype} to torch; send bfloat16 as float32 or as a "
            "torch tensor."
        ) from None


def _array(t: Tensor, shape: tuple[int, ...], dtype: Any) -> Any:
    return (
        t.detach()
        .cpu()
        .to(torch.float64 if t.dtype == torch.bfloat16 else t.dtype)
        .numpy()
        .astype(dtype)
        .reshape(shape)
    )


def _is_flower(value: Any) -> bool:
    return isinstance(getattr(value, "data", None), bytes | bytearray | memoryview) and hasattr(
        value, "stype"
    )


def _from_bytes(value: Any, who: str) -> Any:
    """The numbers of a Flower Array, which holds the bytes of a .npy file, where they lie."""
    data = io.BytesIO(value.data)  # shares a bytes object's memory
    try:
        header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[
            np.lib.format.read_magic(data)[0]
        ]
        shape, fortran, dtype = header(data)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
        flat = np.frombuffer(value.data, dtype, int(np.prod(shape)), data.tell())
    except Exception as error:  # numpy's reader raises many kinds
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{who}: expected the bytes of a whole .npy file ({why}); fetch it again."
        ) from None
    return flat.reshape(shape, order="F" if fortran else "C")


def _to_bytes(array: Any, cls: type, stype: str) -> Any:
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    return cls(dtype=str(array.dtype), shape=tuple(array.shape), stype=stype, data=data.getvalue())


class Upload:
    """One client's model: its tensors by name, which of them are running statistics, and how to
    make its like."""

    def __init__(self, given: Any, who: str) -> None:
        self.given, self.who = given, who
        if isinstance(given, nn.Module):
            self.statistics = {n for n, b in given.named_buffers() if b.is_floating_point()}
        elif isinstance(given, str | Path):
            self.given = Path(given)
        elif not isinstance(given, Mapping | list | tuple | Tensor | np.ndarray) or (
            isinstance(given, Tensor | np.ndarray) and given.ndim != 1
        ):
            what = (
                f"shape {tuple(given.shape)}"
                if isinstance(given, Tensor | np.ndarray)
                else type(given).__name__
            )
            raise TypeError(
                f"{who}: expected a 1-D tensor, a list of arrays, a state dict, a Flower "
                "ArrayRecord, an nn.Module or the path of a "
                f"safetensors file, got {what}."
            )

        elif isinstance(given, Mapping) and not all(isinstance(k, str) for k in given):
            raise TypeError(
                f"{who}: expected a dict with names as its keys, got the key "
                f"{next(k for k in given if not isinstance(k, str))!r}."
            )

    def label(self, name: str) -> str:
        """How a sentence calls one of its tensors."""
        return f"{self.who}: {name!r}" if name else f"{self.who}: its row"

    def named(self) -> Iterator[tuple[str, Any]]:
        """The tensors by name, read one after another."""
        g = self.given
        if isinstance(g, nn.Module):
            yield from g.named_parameters()
            yield from g.named_buffers()
        elif isinstance(g, Mapping):
            yield from g.items()
        elif isinstance(g, list | tuple):
            yield from ((str(i), v) for i, v in enumerate(g))
        elif isinstance(g, Path):
            yield from _in_file(g, self.who)
        else:
            yield "", g

    def is_statistic(self, name: str) -> bool:
        """Whether a float tensor is batch norm's: a module says so, elsewhere the name does."""
        return (
            name in self.statistics
            if isinstance(self.given, nn.Module)
            else name.rpartition(".")[2] in STATISTICS
        )

    def like(self, new: dict[str, Any], kept: dict[str, Any], names: list[str]) -> Any:
        """The same form with `new` tensors; those that are `kept` are the client's own."""
        g, every = self.given, {n: new[n] if n in new else kept[n] for n in names}
        if isinstance(g, nn.Module):
            module = copy.deepcopy(g)
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            with torch.no_grad():
                for n, t in new.items():
                    tensors[n].copy_(t)
            return module
        if issubclass(g, Mapping):
            return _mapping(g, every)
        if issubclass(g, Path):
            return every
        return g(every.values()) if g in (list, tuple) else every[""]

    def forget(self) -> None:
        """Drops the numbers: of the client's model only its form is needed from here on (a module
        is copied later)."""
        if not isinstance(self.given, nn.Module):
            self.given = type(self.given)


def _mapping(cls: type, items: dict[str, Any]) -> Any:
    """A mapping of the class that came, where it can be made of a dict."""
    try:
        return cls(items)
    except TypeError:
        return items


def _in_file(path: Path, who: str) -> Iterator[tuple[str, Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(
            f"{who}: {path} needs the package safetensors; pip install 'pflcore[lora]'."
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{who}: {path} is no whole safetensors file ({str(error).rstrip('.')}); fetch it "
            "again."
        ) from None


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass
class Form:
    """What `unpack` needs: whose rows they are, and what of each client's model is not in them."""

    ids: list[Any]  # [N]
    outer: str  # "matrix", "list", "dict" or "pairs"
    # the shapes of a row's tensors, in order
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict)
    width: int = 0  # P
    statistics: Tensor | None = None  # [N, b] with buffers="average"
    clients: list[Client] = field(default_factory=list, repr=False)
    array: bool = False  # a matrix that came as an ndarray
    averaged: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the statistics


class Client(NamedTuple):
    """One client's model without what is in the rows."""

    upload: Upload
    names: list[str]
    makes: dict[str, Make]
    kept: dict[str, Any]


class Packed(NamedTuple):
    """What `pack` gives."""

    rows: Tensor  # [N, P]
    form: Form


@checked
def pack(
    uploads: Any,
    include: Names = (),
    exclude: Names = (),
    buffers: str = "local",
) -> Packed:
    """The rows [N, P] of N clients' models, in their own dtype, and the form that `unpack` gives
    mixed rows back in.

    `uploads` is an [N, P] tensor or array (which is taken as it is), or one model for each client,
    in a list, in (client id, model) pairs, or in a dict by client id: 1-D tensors, lists of arrays,
    state dicts, Flower ArrayRecords, `nn.Module`s, safetensors files. Values with a `materialize()`
    are asked for it one client at a time. Only tensors that match a shell pattern of `include`
    (default: all) and none of `exclude` are packed, as in `net.mask("head.*")`; lists of arrays are
    called "0", "1", ... The others stay each client's own, as integers always do. `buffers` says
    what becomes of batch norm's running statistics, which are never in the rows:
    "local" leaves each client its own, "average" has `unpack` mix them. ValueError or TypeError in
    a sentence that names client and tensor.
    """
    if buffers not in ("local", "average"):
        raise ValueError(f"buffers: expected 'local' or 'average', got {buffers!r}.")
    choose = _Chosen(include, exclude)
    if isinstance(uploads, Tensor | np.ndarray) and uploads.ndim == 2:
        return _matrix(uploads, choose)
    form, models = _outer(uploads)
    rows: list[Tensor] = []  # [N, P], [N, b]
    kinds = (form.columns, form.averaged)
    for i, (who, given) in enumerate(zip(form.ids, models, strict=True)):
        client, values = _opened(Upload(given, f"client {who!r}"), choose, buffers, first=i == 0)
        if not i:
            for kind, mine in zip(kinds, values, strict=True):
                kind.update((n, tuple(v.shape)) for n, v in mine.items())
            rows = _empty(len(models), values, client)
        for kind, mine, into in zip(kinds, values, rows, strict=True):
            _fill(kind, mine, into[i], client.upload, form.ids[0])
        client.upload.forget()
        form.clients.append(client)
    choose.finish()
    form.width = rows[0].shape[1]
    form.statistics = rows[1] if form.averaged else None
    return Packed(rows[0], form)


@checked
def unpack(
    rows: Matrix, form: Form, weight: Matrix | None = None, index: Tensor | None = None
) -> Any:
    """One model for each client from rows [N, P], in the form that `pack` was given: containers,
    dtypes, devices, client ids.

    What was not packed is the client's own. With `buffers="average"` running statistics are mixed
    by `weight` [N, N] (with `index` [N, K] as `aggregate` has it), by default to their mean. A file
    comes back as the state dict that it holds, a module as a new one.
    """
    n = len(form.ids)
    if rows.shape != (n, form.width):
        raise ValueError(
            f"rows: expected [{n}, {form.width}], a row for each client that was packed, got "
            f"{list(rows.shape)}."
        )
    if form.outer == "matrix":
        return rows.detach().cpu().numpy() if form.array else rows
    mixed = form.statistics
    if mixed is not None:
        weight = torch.full((n, n), 1 / n, dtype=torch.float64) if weight is None else weight
        if len(weight) != n:
            raise ValueError(
                f"weight: expected a row for each of {n} clients, got {list(weight.shape)}."
            )
        mixed = ops.aggregate(
            mixed, weight.to(mixed.device), None if index is None else index.to(mixed.device)
        )
    models = []
    for i, client in enumerate(form.clients):
        pieces = _cut(form.columns, rows[i]) | (
            {} if mixed is None else _cut(form.averaged, mixed[i])
        )
        new = {n: client.makes[n](t) for n, t in pieces.items()}
        models.append(client.upload.like(new, client.kept, client.names))
    if form.outer == "dict":
        return dict(zip(form.ids, models, strict=True))
    return list(zip(form.ids, models, strict=True)) if form.outer == "pairs" else models


class _Chosen:
    """The names that patterns choose; each pattern must match something."""

    def __init__(self, include: str | Sequence[str], exclude: str | Sequence[str]) -> None:
        self.include, self.exclude = (
            (p,) if isinstance(p, str) else tuple(p) for p in (include, exclude)
        )
        self.idle: set[str] = {*self.include, *self.exclude}
        self.names: list[str] = []

    def __call__(self, name: str) -> bool:
        hits = {p for p in (*self.include, *self.exclude) if fnmatchcase(name, p)}
        self.idle -= hits
        self.names.append(name)
        return (not self.include or bool(hits & {*self.include})) and not hits & {*self.exclude}

    def finish(self) -> None:
        if self.idle:
            raise ValueError(
                f"include, exclude: {min(self.idle)!r} matches no tensor; the names are "
                f"{', '.join(dict.fromkeys(self.names)) or 'none'}."
            )


def _matrix(given: Any, choose: _Chosen) -> Packed:
    choose.finish()
    rows = (
        given
        if isinstance(given, Tensor)
        else stream.tensor_of(given)
        if dtype_of(given, "uploads")
        else given
    )
    if rows.dtype not in FLOATS or not len(rows):
        raise ValueError(
            "uploads: expected floating-point rows [N, P] of at least one client, got "
            f"{rows.dtype} {list(rows.shape)}."
        )
    return Packed(
        rows,
        Form(
            list(range(len(rows))),
            "matrix",
            width=rows.shape[1],
            array=not isinstance(given, Tensor),
        ),
    )


def _outer(uploads: Any) -> tuple[Form, list[Any]]:
    """Whose models they are, and the models."""
    if isinstance(uploads, Mapping):
        form, models = Form(list(uploads), "dict"), list(uploads.values())
        tensors = [v for v in models if isinstance(v, Tensor | np.ndarray)]
        if tensors and (
            len(tensors) < len(models)
            or len({tuple(t.shape) for t in tensors}) > 1
            or tensors[0].ndim != 1
        ):
            raise ValueError(
                "uploads: expected a dict of models by client id, got what looks like one state "
                "dict; give [model, model, ...]."
            )
    elif isinstance(uploads, str | bytes | Tensor | np.ndarray | nn.Module) or not hasattr(
        uploads, "__iter__"
    ):
        what = (
            f"shape {tuple(uploads.shape)}"
            if isinstance(uploads, Tensor | np.ndarray)
            else type(uploads).__name__
        )
        raise TypeError(
            "uploads: expected rows [N, P], a list of models or a dict of them by client id, got "
            f"{what}."
        )
    else:
        models = list(uploads)
        if models and all(
            isinstance(m, tuple) and len(m) == 2 and isinstance(m[0], Hashable) and _is_id(m[0])
            for m in models
        ):
            form, models = Form([i for i, _ in models], "pairs"), [m for _, m in models]
            seen: set[Any] = set()
            for i in form.ids:
                if i in seen:
                    raise ValueError(
                        f"uploads: expected each client once, got {i!r} more than once."
                    )
                seen.add(i)
        else:
            form = Form(list(range(len(models))), "list")
    if not models:
        raise ValueError("uploads: expected the models of at least one client, got none.")
    return form, models


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int | np.integer) and not isinstance(value, bool)


def _opened(
    upload: Upload, choose: _Chosen, buffers: str, first: bool
) -> tuple[Client, tuple[dict[str, Any], dict[str, Any]]]:
    """The client, and its tensors that are packed and its running statistics that are mixed."""
    packed: dict[str, Any] = {}
    averaged: dict[str, Any] = {}
    client = Client(upload, [], {}, {})
    for name, value in upload.named():
        client.names.append(name)
        client.kept[name] = value
        who = upload.label(name)
        opened = own(value, who) if choose(name) else None
        if opened is None:
            continue
        array, make = opened
        dtype = dtype_of(array, who)
        if not (dtype.is_floating_point or dtype.is_complex):
            continue  # integers are never averaged
        statistic = upload.is_statistic(name)
        if statistic and buffers == "local":
            continue
        if dtype not in FLOATS:
            raise ValueError(
                f"{who}: expected float32, float64, float16 or bfloat16, got {dtype}; convert or "
                "exclude it."
            )
        (averaged if statistic else packed)[name] = array
        client.makes[name] = make
        del client.kept[name]
    if first and not packed:
        choose.finish()
        raise ValueError(
            f"{upload.who}: found no floating-point tensor to pack among "
            f"{', '.join(client.names) or 'none'}."
        )
    return client, (packed, averaged)


def _empty(n: int, values: Sequence[dict[str, Any]], client: Client) -> list[Tensor]:
    """The matrices for models like the first client's."""
    matrices = []
    for mine in values:
        first = next(iter(mine.items()), None)
        like: dict[str, Any] = (
            {"dtype": dtype_of(first[1], ""), "device": getattr(first[1], "device", "cpu")}
            if first
            else {}
        )
        matrices.append(torch.empty(n, sum(int(np.prod(v.shape)) for v in mine.values()), **like))
    return matrices


def _fill(
    columns: dict[str, tuple[int, ...]],
    mine: dict[str, Any],
    row: Tensor,
    upload: Upload,
    first: Any,
) -> None:
    """One client's tensors into its row, when they are those that the columns are for."""
    missing, extra = [n for n in columns if n not in mine], [n for n in mine if n not in columns]
    if missing or extra:
        said = [
            f"{word} {', '.join(map(repr, names[:5]))}"
            for word, names in (("without", missing), ("with", extra))
            if names
        ]
        raise ValueError(
            f"{upload.who}: expected the tensors of client {first!r}, got a model "
            f"{' and '.join(said)}; exclude what is private."
        )
    for name, piece in _cut(columns, row).items():
        value, shape, who = mine[name], columns[name], upload.label(name)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{who} has shape {list(value.shape)}, client {first!r}'s has {list(shape)}; "
                "exclude it or mend it."
            )
        dtype, device = dtype_of(value, who), str(getattr(value, "device", "cpu"))
        if dtype != row.dtype or device != str(row.device):
            got, want = (
                f"{str(t).removeprefix('torch.')} on {d}"
                for t, d in ((dtype, device), (row.dtype, row.device))
            )
            raise ValueError(f"{who} is {got} where the row is {want}; convert it, or exclude it.")
        put(value, piece)


def _cut(columns: dict[str, tuple[int, ...]], row: Tensor) -> dict[str, Tensor]:
    return dict(zip(columns, row.split([int(np.prod(s)) for s in columns.values()]), strict=True))
