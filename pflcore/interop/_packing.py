"""Clients' models, however other code holds them, as one matrix [N, P]; and back into
the form they came in: a row, a list of arrays, a state dict, a Flower record, a module,
a file.

Nothing is imported for a form that is not there: a Flower array is known by what it
has.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflcore import ops
from pflcore.check import Expectation, Matrix, Names, checked, reject, require
from pflcore.ops.stream import tensor_of

# what batch norm's buffers are called; a state dict does not say what is a buffer
STATISTICS = ("running_mean", "running_var")
# a flat piece of a row -> what came: shape, dtype, device, kind
TensorMaker = Callable[[Tensor], Any]
Shapes = dict[str, torch.Size]
Tensors = dict[str, Tensor]
MODELS_EXPECTATION = Expectation(
    "rows [N, P], a list of models or a dict of them by client id",
    lambda v: hasattr(v, "__iter__") and not isinstance(v, str | bytes | nn.Module),
)
Models = Annotated[Any, MODELS_EXPECTATION]


class ModelTemplate(NamedTuple):
    """One client's model without the numbers that are in the rows."""

    given: Any  # a module itself, of anything else the class
    kept: dict[str, Any]  # all that it has by name; None: it is in the rows
    makes: dict[str, TensorMaker]

    def like(self, pieces: Tensors) -> Any:
        """The same form with new tensors, of pieces of a row; all else is the
        client's own."""
        new = {name: self.makes[name](t) for name, t in pieces.items()}
        if isinstance(self.given, nn.Module):
            module = copy.deepcopy(self.given)
            module.load_state_dict(new, strict=False)
            return module
        every = self.kept | new
        if issubclass(self.given, list | tuple):
            return self.given(every.values())
        if issubclass(self.given, Mapping):
            # a class that is not made of a dict comes back as one
            with suppress(TypeError):
                return self.given(every)
        return every.get("", every)


@dataclass
class ModelForm:
    """What `unpack` needs: whose rows they are, and what of each client's model is
    not in them."""

    ids: list[Any]  # [N]
    outer: str  # "tensor" or "array" [N, P]; "list" or "dict" of models
    columns: Shapes = field(default_factory=dict)  # of a row's tensors, in order
    # of the statistics, with buffers="average"
    averaged: Shapes = field(default_factory=dict)
    statistics: Tensor | None = None  # [N, b]
    models: list[ModelTemplate] = field(default_factory=list, repr=False)

    def wrap(self, models: list[Any]) -> Any:
        """The models [N] as they came: in a list or in a dict."""
        return (
            dict(zip(self.ids, models, strict=True)) if self.outer == "dict" else models
        )


class PackedModels(NamedTuple):
    """What `pack` gives."""

    rows: Tensor  # [N, P]
    form: ModelForm


@checked
def pack(
    uploads: Models,
    include: Names = (),
    exclude: Names = (),
    batch_norm: Literal["local", "average"] = "local",
) -> PackedModels:
    """The rows [N, P] of N clients' models, in their own dtype, and the form that
    `unpack` gives mixed rows back in.

    `uploads` is an [N, P] tensor or array (which is taken as it is), or one model for
    each client, in a list or in a dict by client id: 1-D tensors, lists of arrays (and
    of nothing else), state dicts, Flower ArrayRecords, `nn.Module`s, safetensors files.
    Values with a `materialize()` are asked for it one client at a time. Only tensors
    that match a shell pattern of `include` (default: all) and none of `exclude` are
    packed, as in `net.mask("head.*")`; lists of arrays are called "0", "1", ... The
    others stay each client's own, as integers always do. `batch_norm` says what becomes
    of batch norm's running statistics, which are never in the rows: "local" leaves each
    client its own, "average" has `unpack` mix them. ValueError in a sentence that names
    client and tensor.
    """
    wanted, not_wanted = (
        [p] if isinstance(p, str) else list(p) for p in (include, exclude)
    )
    names: dict[str, None] = {}
    if isinstance(uploads, Tensor | np.ndarray) and uploads.ndim == 2:
        packed = _pack_matrix(uploads)
    else:
        form, given = collect_models(uploads)
        parts: list[tuple[Shapes, Tensor]] = []  # the rows and the statistics
        for i, (client, model) in enumerate(zip(form.ids, given, strict=True)):
            who = f"client {client!r}"
            every = tensors_by_name(model, f"client {client!r}")
            chosen = [
                n
                for n in every
                if _matches(n, wanted or "*") and not _matches(n, not_wanted)
            ]
            mine, *tensors = _read(who, model, every, chosen, batch_norm)
            parts = parts or [_empty(len(given), like) for like in tensors]
            for (columns, matrix), own in zip(parts, tensors, strict=True):
                _fill(matrix[i], columns, own, who)
            form.models.append(mine)
            names |= dict.fromkeys(every)
        (form.columns, rows), (form.averaged, statistics) = parts
        form.statistics = statistics if form.averaged else None
        packed = PackedModels(rows, form)
    for pattern in (*wanted, *not_wanted):
        found = any(fnmatchcase(name, pattern) for name in names)
        require(
            found,
            "include, exclude",
            f"patterns of some of {', '.join(names)}",
            pattern,
        )
    require(
        packed.form.columns,
        "uploads",
        "floating-point tensors to be packed",
        list(names),
    )
    return packed


@checked
def unpack(
    rows: Matrix,
    form: ModelForm,
    weight: Matrix | None = None,
    index: Tensor | None = None,
) -> Any:
    """One model for each client from rows [N, P], in the form that `pack` was given:
    containers, dtypes, devices, client ids.

    What was not packed is the client's own. With `batch_norm="average"` running
    statistics are mixed by `weight` [N, N] (with `index` [N, K] as `aggregate` has it),
    by default to their mean. A file comes back as the state dict that it holds, a
    module as a new one.
    """
    n = len(form.ids)
    width = sum(s.numel() for s in form.columns.values())
    wanted = f"[{n}, {width}], a row for each client that was packed"
    require(rows.shape == (n, width), "rows", wanted, rows)
    if not form.models:
        return rows.detach().cpu().numpy() if form.outer == "array" else rows
    parts = [(form.columns, rows)]
    if form.statistics is not None:
        weight = (
            torch.full((n, n), 1 / n, dtype=torch.float64) if weight is None else weight
        )
        require(len(weight) == n, "weight", f"a row for each of {n} clients", weight)
        device = form.statistics.device
        index = None if index is None else index.to(device)
        parts.append(
            (form.averaged, ops.aggregate(form.statistics, weight.to(device), index))
        )
    models = []
    for i, model in enumerate(form.models):
        pieces: Tensors = {}
        for shapes, matrix in parts:
            pieces |= split_row(shapes, matrix[i])
        models.append(model.like(pieces))
    return form.wrap(models)


def collect_models(uploads: Any) -> tuple[ModelForm, list[Any]]:
    """Whose models they are, and the models [N]."""
    by_name = isinstance(uploads, Mapping)
    models = list(uploads.values() if by_name else uploads)
    require(models, "uploads", "the models of at least one client", uploads)
    ids = list(uploads) if by_name else list(range(len(models)))
    return ModelForm(ids, "dict" if by_name else "list"), models


def tensors_by_name(given: Any, who: str) -> dict[str, Any]:
    """A model's tensors by name. ValueError where it is no model."""
    if isinstance(given, nn.Module):
        return dict(given.named_parameters()) | dict(given.named_buffers())
    if isinstance(given, str | Path):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(given))
        except (SafetensorError, OSError) as error:
            why = str(error).rstrip(".")
            raise ValueError(
                f"{who}: {given} is no whole safetensors file ({why})."
            ) from None
    if isinstance(given, list | tuple):
        for i, value in enumerate(given):
            if not is_array(value):
                kinds = (
                    "a tensor or an array; models by client id come in a dict "
                    "{id: "
                    "model}"
                )
                reject(f"{who}, element {i}", kinds, value)
        given = {str(i): v for i, v in enumerate(given)}
    if isinstance(given, Mapping) and all(isinstance(k, str) for k in given):
        return dict(given)
    if getattr(given, "ndim", 0) == 1:
        return {"": given}
    kinds = (
        "a 1-D tensor, a list of arrays, a dict of tensors by name, a Flower "
        "ArrayRecord"
    )
    reject(who, f"{kinds}, an nn.Module or the path of a safetensors file", given)


def is_array(value: Any) -> bool:
    """Whether a value is, holds or makes a tensor or an array."""
    known = isinstance(value, Tensor | np.ndarray | np.generic)
    return known or hasattr(value, "materialize") or hasattr(value, "stype")


def read_tensor(value: Any, who: str) -> tuple[Tensor, TensorMaker] | None:
    """The tensor that `value` is, holds or makes, without a copy where that can be, and
    how to make its like; None where it is no such thing."""
    if hasattr(value, "materialize") and not isinstance(value, Tensor):
        value = value.materialize()
    if isinstance(value, Tensor):
        dense = (
            value.layout == torch.strided and not value.is_meta and not is_lazy(value)
        )
        require(
            dense,
            who,
            "a dense tensor with values",
            f"{value.layout} on {value.device}",
        )
        place = (value.device, value.dtype)
        extent = value.shape
        return value.detach(), lambda t: t.detach().to(*place, copy=True).view(extent)
    of_flower = hasattr(value, "stype")
    if not of_flower and not isinstance(value, np.ndarray | np.generic):
        return None
    try:
        array = value.numpy() if of_flower else np.asarray(value)
        tensor = tensor_of(array)
    except Exception:  # what is no whole array, or of another dtype, raises many kinds
        raise ValueError(
            f"{who}: expected a whole array in a dtype that torch has, got "
            f"{value.dtype} "
            f"{list(value.shape)}; send bfloat16 as float32 or as a torch tensor."
        ) from None
    shape = array.shape
    dtype = array.dtype
    plain = tensor.dtype
    kind: Any = np.asarray if isinstance(value, np.ndarray) else type(value)

    def make(t: Tensor) -> Any:
        return kind(t.detach().to("cpu", plain).numpy().astype(dtype).reshape(shape))

    return tensor, make


def _pack_matrix(given: Any) -> PackedModels:
    rows = read_tensor(given, "uploads")[0]  # type: ignore[index]
    wanted = "floating-point rows [N, P] of at least one client"
    require(rows.is_floating_point() and len(rows), "uploads", wanted, rows)
    outer = "tensor" if isinstance(given, Tensor) else "array"
    return PackedModels(
        rows, ModelForm(list(range(len(rows))), outer, {"": rows.shape[1:]})
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def _read(
    who: str, given: Any, every: dict[str, Any], chosen: list[str], buffers: str
) -> tuple[ModelTemplate, Tensors, Tensors]:
    """The client's model, its tensors that are packed, and its statistics that are
    mixed."""
    kind: Any = type(given)
    statistics = {name for name in every if name.rpartition(".")[2] in STATISTICS}
    if isinstance(given, nn.Module):
        kind = given
        statistics = {name for name, _ in given.named_buffers()}
    model = ModelTemplate(kind, dict(every), {})
    packed = Tensors()
    averaged = Tensors()
    for name in chosen:
        found = read_tensor(every[name], f"{who}: {name!r}")
        if found is None or not found[0].is_floating_point():
            continue  # integers are never averaged
        if name in statistics and buffers == "local":
            continue
        model.kept[name] = None
        (averaged if name in statistics else packed)[name], model.makes[name] = found
    return model, packed, averaged


def _empty(n: int, like: Tensors) -> tuple[Shapes, Tensor]:
    """The shapes of one client's tensors, and the matrix for n such clients."""
    first = next(iter(like.values()), torch.empty(0))
    width = sum(t.numel() for t in like.values())
    return {name: t.shape for name, t in like.items()}, first.new_empty(n, width)


def _fill(row: Tensor, columns: Shapes, mine: Tensors, who: str) -> None:
    """One client's tensors into its row, when they are those that the columns are
    for."""
    for name in columns | mine:
        want = (columns[name], row.dtype, row.device) if name in columns else None
        got = (
            (mine[name].shape, mine[name].dtype, mine[name].device)
            if name in mine
            else None
        )
        if want != got:
            first, other = (
                "none" if kind is None else f"{list(kind[0])} {kind[1]} on {kind[2]}"
                for kind in (want, got)
            )
            raise ValueError(
                f"{who}: {name or 'row'!r}: expected {first}, as of the first client, "
                f"got {other}; "
                "convert it, or exclude what is private."
            )
    for name, piece in split_row(columns, row).items():
        piece.view(columns[name]).copy_(mine[name])


def split_row(columns: Shapes, row: Tensor) -> Tensors:
    """The flat pieces of a row by name."""
    pieces = row.split([shape.numel() for shape in columns.values()])
    return dict(zip(columns, pieces, strict=True))
