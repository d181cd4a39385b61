"""Clients' models as one matrix [N, P], and back.

A model may be a row, a list of arrays, a state dict, a Flower record or a module. No
framework is imported to recognise its models: a Flower array, for instance, is
recognised by its attributes.

Symbols: N clients; P numbers of a model; b numbers of batch norm's running statistics;
M rows and K neighbours of a mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pflcore import ops
from pflcore.check import (
    Expectation,
    Matrix,
    Names,
    checked,
    is_dense,
    reject,
    require,
)

# The names of batch norm's buffers, because a state dict does not tell which tensors
# are buffers.
STATISTICS = ("running_mean", "running_var")
# Makes a tensor or array of a client's shape, dtype, device and class from a flat piece
# of a row. Where the second argument is False it is a view of the piece, if it can be.
TensorMaker = Callable[[Tensor, bool], Any]
Shapes = dict[str, torch.Size]
Tensors = dict[str, Tensor]
Kind = tuple[torch.Size, torch.dtype, torch.device]


def _may_be_models(value: Any) -> bool:
    """True for a collection; its models are checked one by one later."""
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | nn.Module)


MODELS_EXPECTATION = Expectation(
    "rows [N, P], a list of models or a dict of them by client id", _may_be_models
)
Models = Annotated[Any, MODELS_EXPECTATION]


class ModelTemplate(NamedTuple):
    """One client's model without the numbers that are in the rows.

    Attributes:
        given: The client's module, or the class of a model that is no module.
        kept: The values of the model by name. None stands for one that is in the rows.
        makes: For each value in the rows, the function that makes its like.
    """

    given: Any
    kept: dict[str, Any]
    makes: dict[str, TensorMaker]

    def like(self, pieces: Tensors, copies: bool) -> Any:
        """A model of the same form, with tensors from a row's pieces.

        Values that are not in the pieces are the client's own.

        Args:
            copies: False for tensors that are views of the pieces, where they can be.
        """
        new = {name: self.makes[name](piece, copies) for name, piece in pieces.items()}
        if isinstance(self.given, nn.Module):
            return _module_with(self.given, new)
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
    """The form of the clients' models, for `unpack`.

    Attributes:
        ids: The clients' ids [N].
        outer: The container: "tensor" or "array" for one [N, P], else "list" or "dict"
            of models.
        columns: The shapes of the tensors in a row, in their order.
        averaged: With batch_norm="average", the shapes of the tensors in a row of
            `statistics`, in their order.
        statistics: With batch_norm="average", the running statistics [N, b].
        models: The template of each model [N]; empty for a tensor or an array.
    """

    ids: list[Any]
    outer: str
    columns: Shapes = field(default_factory=dict)
    averaged: Shapes = field(default_factory=dict)
    statistics: Tensor | None = None  # [N, b]
    models: list[ModelTemplate] = field(default_factory=list, repr=False)

    def wrap(self, models: list[Any]) -> Any:
        """The models [N] in a list or in a dict by id."""
        if self.outer == "dict":
            return dict(zip(self.ids, models, strict=True))
        return models


class PackedModels(NamedTuple):
    """The result of `pack`.

    Attributes:
        rows: The models as rows [N, P].
        form: The form in which the models came, for `unpack`.
    """

    rows: Tensor  # [N, P]
    form: ModelForm


@checked
def pack(
    uploads: Models,
    include: Names = (),
    exclude: Names = (),
    batch_norm: Literal["local", "average"] = "local",
) -> PackedModels:
    """The rows [N, P] of N clients' models, and the models' form.

    `unpack` returns mixed rows in that form. Only floating-point tensors are packed;
    other tensors stay each client's own. Batch norm's running statistics are never in
    the rows. Raises ValueError, with the client and the tensor, for models that do not
    fit together.

    Args:
        uploads: An [N, P] tensor or array, which is not copied. Or one model for each
            client, in a list or in a dict by client id: 1-D tensors, lists of arrays
            only, state dicts, Flower ArrayRecords or `nn.Module`s. Where a value has a
            method `materialize()`, the method is called for one client at a time.
        include: Shell patterns of the tensors to pack, as in `net.mask("head.*")`; by
            default all. The arrays of a list have the names "0", "1", ...
        exclude: Shell patterns of the tensors that stay each client's own.
        batch_norm: "local" leaves each client its own statistics. "average" makes
            `unpack` mix them.
    """
    included = [include] if isinstance(include, str) else list(include)
    excluded = [exclude] if isinstance(exclude, str) else list(exclude)
    names: dict[str, None] = {}  # the names of all tensors, in order
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
    copy: bool = True,
) -> Any:
    """One model for each client from rows [N, P], in `pack`'s form.

    The form has the containers, dtypes, devices and client ids of that input. A model's
    other tensors are the client's own. A module comes back as a new module.

    Args:
        rows: The rows [N, P], mixed or not.
        form: The form that `pack` returned.
        weight: With `batch_norm="average"` the weights [N, N] that mix the running
            statistics; by default 1 / N each, which gives their mean.
        index: With weights [N, K], the clients [N, K] that they belong to, as in
            `aggregate`.
        copy: False for models whose tensors are views of `rows`, where dtype, device
            and class allow it: a write into one is a write into the other. Save such a
            tensor as a `clone()`, because `torch.save` writes all rows with it.
    """
    n = len(form.ids)
    width = sum(shape.numel() for shape in form.columns.values())
    wanted = f"[{n}, {width}], a row for each client that was packed"
    require(rows.shape == (n, width), "rows", wanted, rows)
    if not form.models:
        return rows.detach().cpu().numpy() if form.outer == "array" else rows
    statistics = mix_statistics(form, weight, index)
    models = []
    for i, template in enumerate(form.models):
        pieces = split_row(form.columns, rows[i])
        if statistics is not None:
            pieces |= split_row(form.averaged, statistics[i])
        models.append(template.like(pieces, copies=copy))
    return form.wrap(models)


def mix_statistics(
    form: ModelForm, weight: Tensor | None, index: Tensor | None = None
) -> Tensor | None:
    """The mixed running statistics [N, b], or None where none are averaged.

    The arguments are those of `unpack`.
    """
    if form.statistics is None:
        return None
    n = len(form.ids)
    if weight is None:
        weight = torch.full((n, n), 1 / n, dtype=torch.float64)
    require(len(weight) == n, "weight", f"a row for each of {n} clients", weight)
    device = form.statistics.device
    index = None if index is None else index.to(device)
    return ops.aggregate(form.statistics, weight.to(device), index)


def collect_models(uploads: Any) -> tuple[ModelForm, list[Any]]:
    """The form of a container of models, and its models [N]."""
    if isinstance(uploads, Mapping):
        models = list(uploads.values())
        form = ModelForm(list(uploads), "dict")
    else:
        models = list(uploads)
        form = ModelForm(list(range(len(models))), "list")
    require(models, "uploads", "the models of at least one client", uploads)
    return form, models


def tensors_by_name(model: Any, where: str) -> dict[str, Any]:
    """The tensors of a model by name.

    Raises ValueError, which begins with `where`, for a value that is no model.
    """
    if isinstance(model, nn.Module):
        return dict(model.named_parameters()) | dict(model.named_buffers())
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
        "ArrayRecord or an nn.Module"
    )
    reject(where, wanted, model)


def is_array(value: Any) -> bool:
    """True for a value from which `read_tensor` may read a tensor."""
    is_known = isinstance(value, Tensor | np.ndarray | np.generic)
    return is_known or hasattr(value, "materialize") or hasattr(value, "stype")


def tensor_of_array(array: np.ndarray) -> Tensor:
    """The array as a tensor, copied only where torch cannot use its memory."""
    # Torch takes neither negative strides nor the byte order of another machine.
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    if array.flags.writeable:
        return torch.from_numpy(array)
    # `from_numpy` warns of memory that is not writeable, so this is a copy.
    return torch.tensor(array)


def read_tensor(value: Any, where: str) -> tuple[Tensor, TensorMaker] | None:
    """The tensor in a value, and a function that makes its like.

    The tensor shares the memory of `value` where it can. Returns None for a value that
    has no tensor.
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
        tensor = tensor_of_array(array)
    except Exception:  # a damaged array or an unknown dtype raises errors of many kinds
        raise ValueError(
            f"{where}: expected a whole array in a dtype that torch has, got "
            f"{value.dtype} {list(value.shape)}; send bfloat16 as float32 or as a "
            "torch tensor."
        ) from None
    shape = array.shape
    dtype = array.dtype
    torch_dtype = tensor.dtype
    container: Any = np.asarray if isinstance(value, np.ndarray) else type(value)

    def make(piece: Tensor, copies: bool) -> Any:
        numbers = piece.detach().to("cpu", torch_dtype).numpy()
        return container(numbers.astype(dtype, copy=copies).reshape(shape))

    return tensor, make


def _read_torch_tensor(value: Tensor, where: str) -> tuple[Tensor, TensorMaker]:
    """The result of `read_tensor` for a tensor of torch.

    Raises ValueError for a tensor that is not dense, or has no values.
    """
    has_values = not value.is_meta and not is_lazy(value)
    fits = is_dense(value) and has_values
    layout = "nested" if value.is_nested else value.layout
    got = f"{layout} on {value.device}"
    require(fits, where, "a dense tensor with values", got)
    device = value.device
    dtype = value.dtype
    shape = value.shape

    def make(piece: Tensor, copies: bool) -> Tensor:
        return piece.detach().to(device, dtype, copy=copies).reshape(shape)

    return value.detach(), make


def _module_with(given: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of a module that has these parameters and buffers for its own."""
    replaced: dict[int, Any] = {}  # what `deepcopy` takes for an object, by its id
    for name, parameter in given.named_parameters():
        if name in tensors:
            new = nn.Parameter(tensors[name], parameter.requires_grad)
            replaced[id(parameter)] = new
    for name, buffer in given.named_buffers():
        if name in tensors:
            replaced[id(buffer)] = tensors[name]
    return deepcopy(given, replaced)


def _pack_matrix(uploads: Any) -> PackedModels:
    """The packed models of an [N, P] tensor or array."""
    # A tensor or an array is never read as None.
    rows = read_tensor(uploads, "uploads")[0]  # type: ignore[index]
    wanted = "floating-point rows [N, P] of at least one client"
    require(rows.is_floating_point() and len(rows), "uploads", wanted, rows)
    outer = "tensor" if isinstance(uploads, Tensor) else "array"
    ids = list(range(len(rows)))
    return PackedModels(rows, ModelForm(ids, outer, {"": rows.shape[1:]}))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """True where a name matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _chosen_names(
    names: Iterable[str], included: list[str], excluded: list[str]
) -> list[str]:
    """The names that match a pattern of `included`, and none of `excluded`.

    Every name matches an empty `included`.
    """
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
    """A client's template, its tensors for the rows, and its statistics."""
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
            continue  # whole numbers are never averaged
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
    """The shapes of a client's tensors, and an empty matrix for n clients."""
    first = next(iter(like.values()), torch.empty(0))
    width = sum(tensor.numel() for tensor in like.values())
    shapes = {name: tensor.shape for name, tensor in like.items()}
    return shapes, first.new_empty(n, width)


def _fill(row: Tensor, columns: Shapes, tensors: Tensors, where: str) -> None:
    """Copies one client's tensors into its row.

    Raises ValueError where their names and shapes are not those of the first client,
    which are in `columns`.
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
    """Shape, dtype and device in words; "none" for an absent tensor."""
    if kind is None:
        return "none"
    shape, dtype, device = kind
    return f"{list(shape)} {dtype} on {device}"


def split_row(columns: Shapes, row: Tensor) -> Tensors:
    """The flat pieces of a row by the names of their tensors."""
    pieces = row.split([shape.numel() for shape in columns.values()])
    return dict(zip(columns, pieces, strict=True))
