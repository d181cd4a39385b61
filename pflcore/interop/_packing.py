"""The models of clients as one matrix [N, P], and back into their own form.

A model may be a row, a list of arrays, a state dict, a Flower record, a module or a
file. Nothing is imported for a form that is not there: a Flower array is known by the
attributes that it has.

Shapes: N clients, P numbers of a model, b numbers of batch norm's running statistics.
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

# Names of batch norm's buffers: a state dict does not tell which tensors are buffers.
STATISTICS = ("running_mean", "running_var")
# Makes of a flat piece of a row what came, with its shape, dtype, device and class.
TensorMaker = Callable[[Tensor], Any]
Shapes = dict[str, torch.Size]
Tensors = dict[str, Tensor]
Kind = tuple[torch.Size, torch.dtype, torch.device]


def _may_be_models(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | nn.Module)


MODELS_EXPECTATION = Expectation(
    "rows [N, P], a list of models or a dict of them by client id", _may_be_models
)
Models = Annotated[Any, MODELS_EXPECTATION]


class ModelTemplate(NamedTuple):
    """One client's model without the numbers that are in the rows."""

    given: Any  # a module itself; of anything else the class
    kept: dict[str, Any]  # all that it has by name; None: it is in the rows
    makes: dict[str, TensorMaker]

    def like(self, pieces: Tensors) -> Any:
        """A model of the same form with new tensors, made of pieces of a row.

        What is not in the pieces is the client's own.
        """
        new = {name: self.makes[name](piece) for name, piece in pieces.items()}
        if isinstance(self.given, nn.Module):
            module = copy.deepcopy(self.given)
            module.load_state_dict(new, strict=False)
            return module
        values = self.kept | new
        if issubclass(self.given, list | tuple):
            return self.given(values.values())
        if issubclass(self.given, Mapping):
            # A class that cannot be made of a dict comes back as a dict.
            with suppress(TypeError):
                return self.given(values)
        return values.get("", values)


@dataclass
class ModelForm:
    """The clients, and what the rows of their models do not hold: for `unpack`."""

    ids: list[Any]  # [N]
    outer: str  # "tensor" or "array" [N, P]; "list" or "dict" of models
    columns: Shapes = field(default_factory=dict)  # of a row's tensors, in order
    # of the statistics, with batch_norm="average"
    averaged: Shapes = field(default_factory=dict)
    statistics: Tensor | None = None  # [N, b]
    models: list[ModelTemplate] = field(default_factory=list, repr=False)

    def wrap(self, models: list[Any]) -> Any:
        """The models [N] as they came: in a list or in a dict."""
        if self.outer == "dict":
            return dict(zip(self.ids, models, strict=True))
        return models


class PackedModels(NamedTuple):
    """The result of `pack`."""

    rows: Tensor  # [N, P]
    form: ModelForm


@checked
def pack(
    uploads: Models,
    include: Names = (),
    exclude: Names = (),
    batch_norm: Literal["local", "average"] = "local",
) -> PackedModels:
    """The rows [N, P] of N clients' models, of their dtype, and their form.

    `unpack` returns mixed rows in that form. Only floating-point tensors are packed;
    others stay each client's own. Batch norm's running statistics are never in the
    rows. Raises ValueError, with the client and the tensor, for models that do not fit
    together.

    Args:
        uploads: an [N, P] tensor or array (which is taken as it is), or one model for
            each client, in a list or in a dict by client id: 1-D tensors, lists of
            arrays (and of nothing else), state dicts, Flower ArrayRecords,
            `nn.Module`s, safetensors files. Values with a `materialize()` are asked for
            it one client at a time.
        include: shell patterns of the tensors to pack, as in `net.mask("head.*")`;
            default: all. Lists of arrays are called "0", "1", ...
        exclude: shell patterns of tensors that stay each client's own.
        batch_norm: "local" leaves each client its own statistics; with "average"
            `unpack` mixes them.
    """
    included = [include] if isinstance(include, str) else list(include)
    excluded = [exclude] if isinstance(exclude, str) else list(exclude)
    names: dict[str, None] = {}  # of all tensors, in order
    if isinstance(uploads, Tensor | np.ndarray) and uploads.ndim == 2:
        packed = _pack_matrix(uploads)
    else:
        form, models = collect_models(uploads)
        parts: list[tuple[Shapes, Tensor]] = []  # the rows and the statistics
        for i, (client, model) in enumerate(zip(form.ids, models, strict=True)):
            where = f"client {client!r}"
            values = tensors_by_name(model, where)
            chosen = _chosen_names(values, included, excluded)
            template, *tensors = _read(where, model, values, chosen, batch_norm)
            if not parts:
                parts = [_empty(len(models), like) for like in tensors]
            for (columns, matrix), new in zip(parts, tensors, strict=True):
                _fill(matrix[i], columns, new, where)
            form.models.append(template)
            names |= dict.fromkeys(values)
        (form.columns, rows), (form.averaged, statistics) = parts
        form.statistics = statistics if form.averaged else None
        packed = PackedModels(rows, form)
    for pattern in (*included, *excluded):
        is_found = any(fnmatchcase(name, pattern) for name in names)
        wanted = f"patterns of some of {', '.join(names)}"
        require(is_found, "include, exclude", wanted, pattern)
    wanted = "floating-point tensors to be packed"
    require(packed.form.columns, "uploads", wanted, list(names))
    return packed


@checked
def unpack(
    rows: Matrix,
    form: ModelForm,
    weight: Matrix | None = None,
    index: Tensor | None = None,
) -> Any:
    """One model for each client from rows [N, P], in the form of `pack`'s input.

    That form has containers, dtypes, devices and client ids. What was not packed is the
    client's own. With `batch_norm="average"` running statistics are mixed by `weight`
    [N, N] (with `index` [N, K] as in `aggregate`), by default to their mean. A file
    comes back as the state dict that it holds, a module as a new one.
    """
    n = len(form.ids)
    width = sum(shape.numel() for shape in form.columns.values())
    wanted = f"[{n}, {width}], a row for each client that was packed"
    require(rows.shape == (n, width), "rows", wanted, rows)
    if not form.models:
        return rows.detach().cpu().numpy() if form.outer == "array" else rows
    parts = [(form.columns, rows)]
    if form.statistics is not None:
        if weight is None:
            weight = torch.full((n, n), 1 / n, dtype=torch.float64)
        require(len(weight) == n, "weight", f"a row for each of {n} clients", weight)
        device = form.statistics.device
        index = None if index is None else index.to(device)
        mixed = ops.aggregate(form.statistics, weight.to(device), index)
        parts.append((form.averaged, mixed))
    models = []
    for i, template in enumerate(form.models):
        pieces: Tensors = {}
        for shapes, matrix in parts:
            pieces |= split_row(shapes, matrix[i])
        models.append(template.like(pieces))
    return form.wrap(models)


def collect_models(uploads: Any) -> tuple[ModelForm, list[Any]]:
    """The form of a container of models with the clients' ids, and the models [N]."""
    by_name = isinstance(uploads, Mapping)
    models = list(uploads.values() if by_name else uploads)
    require(models, "uploads", "the models of at least one client", uploads)
    ids = list(uploads) if by_name else list(range(len(models)))
    return ModelForm(ids, "dict" if by_name else "list"), models


def tensors_by_name(model: Any, where: str) -> dict[str, Any]:
    """A model's tensors by name. Raises ValueError, with `where`, for no model."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters()) | dict(model.named_buffers())
    if isinstance(model, str | Path):
        return _read_file(model, where)
    if isinstance(model, list | tuple):
        wanted = "a tensor or an array; models by client id come in a dict {id: model}"
        for i, value in enumerate(model):
            require(is_array(value), f"{where}, element {i}", wanted, value)
        model = {str(i): value for i, value in enumerate(model)}
    if isinstance(model, Mapping) and all(isinstance(key, str) for key in model):
        return dict(model)
    if getattr(model, "ndim", 0) == 1:
        return {"": model}
    wanted = (
        "a 1-D tensor, a list of arrays, a dict of tensors by name, a Flower "
        "ArrayRecord, an nn.Module or the path of a safetensors file"
    )
    reject(where, wanted, model)


def _read_file(path: str | Path, where: str) -> dict[str, Any]:
    """The tensors of a safetensors file. Raises ValueError where it is not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"{where}: {path} is no whole safetensors file ({reason})."
        ) from None


def is_array(value: Any) -> bool:
    """True for a value that is, holds or makes a tensor or an array."""
    is_known = isinstance(value, Tensor | np.ndarray | np.generic)
    return is_known or hasattr(value, "materialize") or hasattr(value, "stype")


def read_tensor(value: Any, where: str) -> tuple[Tensor, TensorMaker] | None:
    """The tensor that `value` is, holds or makes, and how to make its like.

    It is no copy where that can be. None for a value that is no such thing.
    """
    if hasattr(value, "materialize") and not isinstance(value, Tensor):
        value = value.materialize()
    if isinstance(value, Tensor):
        return _read_torch_tensor(value, where)
    is_of_flower = hasattr(value, "stype")
    if not is_of_flower and not isinstance(value, np.ndarray | np.generic):
        return None
    try:
        array = value.numpy() if is_of_flower else np.asarray(value)
        tensor = tensor_of(array)
    except Exception:  # what is no whole array, or of another dtype, raises many kinds
        raise ValueError(
            f"{where}: expected a whole array in a dtype that torch has, got "
            f"{value.dtype} {list(value.shape)}; send bfloat16 as float32 or as a "
            "torch tensor."
        ) from None
    shape = array.shape
    dtype = array.dtype
    torch_dtype = tensor.dtype
    container: Any = np.asarray if isinstance(value, np.ndarray) else type(value)

    def make(piece: Tensor) -> Any:
        numbers = piece.detach().to("cpu", torch_dtype).numpy()
        return container(numbers.astype(dtype).reshape(shape))

    return tensor, make


def _read_torch_tensor(value: Tensor, where: str) -> tuple[Tensor, TensorMaker]:
    """The result of `read_tensor` for a tensor of torch.

    Raises ValueError for a tensor that is not dense, or has no values.
    """
    has_values = not value.is_meta and not is_lazy(value)
    fits = value.layout == torch.strided and has_values
    got = f"{value.layout} on {value.device}"
    require(fits, where, "a dense tensor with values", got)
    device = value.device
    dtype = value.dtype
    shape = value.shape

    def make(piece: Tensor) -> Tensor:
        return piece.detach().to(device, dtype, copy=True).view(shape)

    return value.detach(), make


def _pack_matrix(uploads: Any) -> PackedModels:
    """An [N, P] tensor or array as rows."""
    rows = read_tensor(uploads, "uploads")[0]  # type: ignore[index]
    wanted = "floating-point rows [N, P] of at least one client"
    require(rows.is_floating_point() and len(rows), "uploads", wanted, rows)
    outer = "tensor" if isinstance(uploads, Tensor) else "array"
    ids = list(range(len(rows)))
    return PackedModels(rows, ModelForm(ids, outer, {"": rows.shape[1:]}))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """True where a name matches one of some shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _chosen_names(
    names: Iterable[str], included: list[str], excluded: list[str]
) -> list[str]:
    """The names that match `included` (empty: all do), and not `excluded`."""
    return [
        name
        for name in names
        if _matches(name, included or "*") and not _matches(name, excluded)
    ]


def _read(
    where: str,
    model: Any,
    values: dict[str, Any],
    chosen: list[str],
    batch_norm: str,
) -> tuple[ModelTemplate, Tensors, Tensors]:
    """A client's template, its tensors to be packed, and its statistics to be mixed."""
    given: Any = type(model)
    statistics = {name for name in values if name.rpartition(".")[2] in STATISTICS}
    if isinstance(model, nn.Module):
        given = model
        statistics = {name for name, _ in model.named_buffers()}
    template = ModelTemplate(given, dict(values), {})
    packed = Tensors()
    averaged = Tensors()
    for name in chosen:
        parsed = read_tensor(values[name], f"{where}: {name!r}")
        if parsed is None:
            continue
        tensor, make = parsed
        if not tensor.is_floating_point():
            continue  # integers are never averaged
        is_statistic = name in statistics
        if is_statistic and batch_norm == "local":
            continue
        template.kept[name] = None
        template.makes[name] = make
        if is_statistic:
            averaged[name] = tensor
        else:
            packed[name] = tensor
    return template, packed, averaged


def _empty(n: int, like: Tensors) -> tuple[Shapes, Tensor]:
    """The shapes of one client's tensors, and a matrix for n such clients."""
    first = next(iter(like.values()), torch.empty(0))
    width = sum(tensor.numel() for tensor in like.values())
    shapes = {name: tensor.shape for name, tensor in like.items()}
    return shapes, first.new_empty(n, width)


def _fill(row: Tensor, columns: Shapes, tensors: Tensors, where: str) -> None:
    """Copies one client's tensors into its row.

    Raises ValueError where they are not those of the first client, by `columns`.
    """
    for name in columns | tensors:
        expected: Kind | None = None
        got: Kind | None = None
        if name in columns:
            expected = (columns[name], row.dtype, row.device)
        if name in tensors:
            tensor = tensors[name]
            got = (tensor.shape, tensor.dtype, tensor.device)
        if expected != got:
            raise ValueError(
                f"{where}: {name or 'row'!r}: expected {_describe_kind(expected)}, as "
                f"of the first client, got {_describe_kind(got)}; convert it, or "
                "exclude what is private."
            )
    for name, piece in split_row(columns, row).items():
        piece.view(columns[name]).copy_(tensors[name])


def _describe_kind(kind: Kind | None) -> str:
    """Shape, dtype and device in words; "none" for a tensor that is not there."""
    if kind is None:
        return "none"
    shape, dtype, device = kind
    return f"{list(shape)} {dtype} on {device}"


def split_row(columns: Shapes, row: Tensor) -> Tensors:
    """The flat pieces of a row by name."""
    pieces = row.split([shape.numel() for shape in columns.values()])
    return dict(zip(columns, pieces, strict=True))
