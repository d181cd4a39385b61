"""Inputs as tensors: arrays, dicts of them, and sequences.

A pool is one tensor [n, ...]. The fields of a sample lie side by side in its row [D] of
the pool. `Fields` takes them apart before the model.

Symbols: n samples, B of them in a batch; D numbers in a row of fields; F features; a
sequence has T steps, or t_i before it is padded.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pflcore.check import Number, PositiveInt, checked, reject, require

IGNORED_LABEL = -100  # the label of a masked step, as in torch's cross entropy
INPUT_HINT = (
    "numbers in one array (pad sequences to one length, turn images and words into "
    "numbers, give fields as one dict of arrays)"
)
DENSE_TEXT = "dense floats or int64 (tokens to int64, images to float, then normalized)"


class Field(NamedTuple):
    """One tensor of a sample: its name, shape and dtype.

    Attributes:
        name: key of the tensor in a sample's dict
        shape: shape of the tensor of one sample
        dtype: dtype of the tensor that the model receives
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {list(self.shape)} ({dtype})"


class Fields(tuple[Field, ...]):
    """The fields of every sample, in the order of the pool's columns.

    It is also a module's pre-hook: the module receives the fields in place of rows.
    They are one dict, or keyword arguments where there are several and its `forward`
    has parameters of all their names, as models of transformers have.
    """

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    def split_fields(self, x: Tensor) -> dict[str, Tensor]:
        """The fields [B, *shape] of the rows x [B, D], by name."""
        widths = [prod(field.shape) for field in self]
        columns = x.split(widths, -1)
        values = {}
        for field, column in zip(self, columns, strict=True):
            value = column.reshape(*x.shape[:-1], *field.shape)
            values[field.name] = value.to(field.dtype)
        return values

    def join_fields(self, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The rows [B, D] of which `split_fields` makes these fields."""
        columns = []
        for field in self:
            value = values[field.name]
            columns.append(value.reshape(len(value), -1).to(dtype))
        return torch.cat(columns, 1)

    def __call__(
        self, module: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not args:  # called by a user, with the fields as keywords
            return args, options
        x = args[0]
        if isinstance(x, Tensor):
            x = self.split_fields(x)
        names = {field.name for field in self}
        takes_names = len(names) > 1 and names <= _parameter_names(type(module).forward)
        if takes_names and isinstance(x, Mapping):
            return (), {**options, **x}
        return (x,), options


@functools.cache
def _parameter_names(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(forward).parameters)


def to_inputs(
    value: Any, name: str, dtype: torch.dtype | None
) -> tuple[Tensor, Fields | None]:
    """Inputs as a tensor [n, ...]; of a dict, rows [n, D] and their fields.

    Rows have the dtype `dtype`, or float32 where it is None. Raises ValueError where a
    whole number of a dict is not exact in it.
    """
    if not isinstance(value, Mapping):
        x = to_tensor(value, name, dtype)
        is_number = x.is_floating_point() or x.dtype == torch.int64
        require(is_number, name, DENSE_TEXT, x)
        return x, None
    parts = {k: to_tensor_or_bool(v, f"{name}[{k!r}]", dtype) for k, v in value.items()}
    dtype = dtype or torch.float32
    _check_rows(parts, name)
    _check_exact(parts, name, dtype)
    fields = []
    columns = []
    for key, part in parts.items():
        field_dtype = dtype if part.is_floating_point() else part.dtype
        fields.append(Field(key, tuple(part.shape[1:]), field_dtype))
        columns.append(part.reshape(len(part), -1).to(dtype))
    return torch.cat(columns, 1), Fields(fields)


def _check_rows(parts: dict[str, Tensor], name: str) -> None:
    """Raises ValueError unless all fields have rows, and equally many."""
    have_rows = all(part.dim() for part in parts.values())
    lengths = {len(part) for part in parts.values() if part.dim()}
    fits = have_rows and len(lengths) == 1
    require(fits, name, "tensors by name, a row per sample", parts)


def _check_exact(parts: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    """Raises ValueError where a field has other numbers than `dtype` represents."""
    largest = 2 ** (24 if dtype == torch.float32 else 53)
    expected = f"a tensor of floats, int64 or bool, within +-{largest:,}, exact in "
    for key, part in parts.items():
        fits = part.is_floating_point() or part.dtype == torch.bool
        if part.dtype == torch.int64:
            fits = not bool((part.abs() > largest).any())
        require(fits, f"{name}[{key!r}]", f"{expected}{dtype}", part)


def to_tensor(value: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor, without a copy where torch reads it.

    Floats become `dtype`, where it is given. Bool becomes 1 and 0 of `dtype`, or of
    float32. Integers of 16 and 32 bits become int64 (tokens).
    """
    tensor = to_tensor_or_bool(value, name, dtype)
    if tensor.dtype == torch.bool:
        return tensor.to(dtype or torch.float32)
    return tensor


def to_tensor_or_bool(
    value: Any, name: str, dtype: torch.dtype | None = None
) -> Tensor:
    """An array as `to_tensor` returns it, but bool stays bool.

    Raises ValueError for a value that is no array of numbers.
    """
    try:
        tensor = value.detach() if isinstance(value, Tensor) else read_array(value)
    except (TypeError, ValueError, RuntimeError):
        reject(name, INPUT_HINT, value)
    # Bytes are not tokens: they may be images, which a caller refuses.
    if tensor.dtype in (torch.int16, torch.int32):
        return tensor.long()
    if dtype is not None and tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor


def read_array(value: Any) -> Tensor:
    """The tensor of a value that numpy reads as an array."""
    # torch accepts no negative strides, and only the byte order of the machine.
    array = np.asarray(value, order="C")
    native_dtype = array.dtype.newbyteorder("=")
    with warnings.catch_warnings():
        # Columns of data frames and mapped files are read, and never written to.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.as_tensor(array.astype(native_dtype, copy=False))


def has_single_step(x: Tensor, fields: Fields | None = None) -> bool:
    """True for sequences of one step, whose labels are [n, 1].

    These sequences are [n, 1, F], tokens [n, 1], or fields with a mask of one step.
    """
    if fields:
        return any(field.name == "mask" and field.shape == (1,) for field in fields)
    are_tokens = x.dtype == torch.int64 and x.dim() == 2
    return x.shape[1:2] == (1,) and (are_tokens or x.dim() == 3)


def mask_labels(y: Tensor, x: Tensor, fields: Fields | None) -> Tensor:
    """Labels [n, T], `IGNORED_LABEL` where the field "mask" [T] is false.

    Targets stay as they are where there is no bool mask of their shape.
    """
    mask = fields.split_fields(x).get("mask") if fields else None
    if mask is None or mask.dtype != torch.bool:
        return y
    if mask.shape != y.shape or y.dim() < 2:
        return y
    expected = "labels of the steps of which x has a mask"
    require(not y.is_floating_point(), "y", expected, y)
    return y.masked_fill(~mask, IGNORED_LABEL)


@checked
def pad_sequences(
    sequences: Sequence[Any], value: Number = 0, length: PositiveInt | None = None
) -> tuple[Tensor, Tensor]:
    """Sequences [t_i, ...] padded to one tensor [n, T, ...], and their mask.

    The mask is bool [n, T], False for padded steps. Give both to a federation as fields
    of one input, `{"tokens": tokens, "mask": mask}`. The model then receives a dict
    with these keys, and losses and accuracies leave out the labels [n, T] of padded
    steps.

    Raises ValueError where there is no sequence, or where one has other features or
    another dtype than the first.

    >>> pad_sequences([[5, 6, 7], [8]])[0].tolist()
    [[5, 6, 7], [8, 0, 0]]

    Args:
        sequences: arrays of one dtype, or lists of numbers
        value: number that is put in padded steps
        length: T; longer sequences are cut off after T steps. None for the length of
            the longest sequence.
    """
    rows = []
    for i, sequence in enumerate(sequences):
        # A list has no dtype to keep.
        float_dtype = None if hasattr(sequence, "dtype") else torch.float32
        rows.append(to_tensor_or_bool(sequence, f"sequences[{i}]", float_dtype))
    forms = {(row.dtype, row.shape[1:], row.dim() > 0) for row in rows}
    fits = len(forms) == 1 and rows[0].dim()
    expected = "at least one, of one dtype and the same features"
    require(fits, "sequences", expected, sequences)
    sizes = torch.tensor([len(row) for row in rows])
    length = length or int(sizes.max())
    # torch pads to the longest sequence: one of T steps is appended, and then removed.
    longest = rows[0].new_empty(length, *rows[0].shape[1:])
    cut_rows = [row[:length] for row in rows]
    padded = pad_sequence([*cut_rows, longest], batch_first=True, padding_value=value)[
        :-1
    ]
    return padded, torch.arange(length) < sizes[:, None]
