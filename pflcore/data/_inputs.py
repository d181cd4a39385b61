"""What people bring as samples: arrays, Datasets, dicts of tensors, sequences of
several lengths.

A pool is one tensor [n, ...]. Samples with several fields lie in it side by side, one
row each, and `Fields` takes them apart before the model.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, TensorDataset

from pflcore.check import Number, PositiveInt, checked, reject, require

IGNORED_LABEL = -100  # the label of a masked step, as in torch's cross entropy
INPUT_HINT = (
    "numbers in one array (pad sequences to one length, turn images and words into "
    "numbers, give fields as one dict of arrays)"
)
DENSE_TEXT = "dense floats or int64 (tokens to int64, images to float, then normalized)"
PAIR_TEXT = "a pair (x, y), or a Dataset of pairs (or a list of them)"
# what people call them
TARGET_KEYS = ("y", "label", "labels", "target", "targets", "class")


class Field(NamedTuple):
    """One tensor of a sample: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.shape)} ({str(self.dtype).removeprefix('torch.')})"
        )


class Fields(tuple[Field, ...]):
    """The fields of every sample, in the order of the pool's columns; also a
    module's pre-hook."""

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    def split_fields(self, x: Tensor) -> dict[str, Tensor]:
        """The fields [B, *shape] by name of rows [B, D]."""
        parts = zip(self, x.split([prod(f.shape) for f in self], -1), strict=True)
        return {
            f.name: p.reshape(*x.shape[:-1], *f.shape).to(f.dtype) for f, p in parts
        }

    def __call__(self, module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (
            self.split_fields(given[0]) if isinstance(given[0], Tensor) else given[0],
        )


def to_inputs(
    value: Any, name: str, dtype: torch.dtype | None
) -> tuple[Tensor, Fields | None]:
    """An array as a tensor [n, ...]; a dict of arrays as rows [n, D] of `dtype` (None:
    float32), in which whole numbers must be exact, and their fields."""
    if not isinstance(value, Mapping):
        x = to_tensor(value, name, dtype)
        require(x.is_floating_point() or x.dtype == torch.int64, name, DENSE_TEXT, x)
        return x, None
    parts = {k: to_tensor_or_bool(v, f"{name}[{k!r}]", dtype) for k, v in value.items()}
    dtype = dtype or torch.float32
    rows = {len(v) if v.dim() else None for v in parts.values()}
    require(
        len(rows - {None}) == len(rows) == 1,
        name,
        "tensors by name, a row per sample",
        parts,
    )
    most = 2 ** (24 if dtype == torch.float32 else 53)
    right = f"a tensor of floats, int64 or bool, within +-{most:,}, exact in {dtype}"
    for key, v in parts.items():
        exact = v.dtype == torch.int64 and not bool((v.abs() > most).any())
        known = exact or v.is_floating_point() or v.dtype == torch.bool
        require(known, f"{name}[{key!r}]", right, v)
    kinds = {k: dtype if v.is_floating_point() else v.dtype for k, v in parts.items()}
    fields = Fields(Field(k, tuple(v.shape[1:]), kinds[k]) for k, v in parts.items())
    return torch.cat(
        [v.reshape(len(v), -1).to(dtype) for v in parts.values()], 1
    ), fields


def to_tensor(value: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """An array without a copy where torch can read it; floats become `dtype`, tokens
    int64, and true and false 1 and 0 of it."""
    t = to_tensor_or_bool(value, name, dtype)
    return t.to(dtype or torch.float32) if t.dtype == torch.bool else t


def to_tensor_or_bool(
    value: Any, name: str, dtype: torch.dtype | None = None
) -> Tensor:
    """The same, true and false as they are."""
    try:
        t = value.detach() if isinstance(value, Tensor) else _read(value)
    except (TypeError, ValueError, RuntimeError):
        reject(name, INPUT_HINT, value)
    # tokens; bytes are left to be refused, they may be images
    if t.dtype in (torch.int16, torch.int32):
        return t.long()
    return t.to(dtype) if dtype is not None and t.is_floating_point() else t


def _read(value: Any) -> Tensor:
    """What numpy reads; torch knows the machine's byte order alone, and no steps
    back."""
    a = np.asarray(value, order="C")
    return torch.as_tensor(a.astype(a.dtype.newbyteorder("="), copy=False))


def to_targets(value: Any, name: str) -> Tensor:
    """Targets [n, ...] as they come: floats, or int64 for whole numbers and for true
    and false."""
    t = to_tensor_or_bool(value, name)
    require(not t.is_complex(), name, "real numbers", t)
    if t.is_floating_point():
        return t
    whole = t.long()
    wraps = t.dtype == torch.uint64 and bool((whole < 0).any())
    require(not wraps, name, "whole numbers below 2**63", t)
    return whole


def to_pair(
    value: Any, name: str, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Fields | None]:
    """The tuple (x, y), or a list or Dataset of such, read once, as tensors [n, ...],
    [n, ...] and x's fields. No samples at all are tensors [0]."""
    x, y = value if _is_pair(value, name) else _samples(value, name)
    x, fields = to_inputs(x, f"x of {name}", dtype)
    y = to_targets(y, f"y of {name}")
    one_each = x.dim() and y.dim() and len(x) == len(y)
    require(one_each, name, "one target for each input", [list(x.shape), list(y.shape)])
    return x, y, fields


def _is_pair(value: Any, name: str) -> bool:
    """Whether a value is the pair (x, y) and not samples.

    A list of two samples has the length of a pair, so its members decide. ValueError
    where both may be meant.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if isinstance(value, list) and all(isinstance(m, tuple | Mapping) for m in value):
        return False
    tuples = all(isinstance(m, tuple) and len(m) == 2 for m in value)
    lists = all(isinstance(m, list) and len(m) == 2 for m in value)
    both = tuples or (lists and isinstance(value, list))
    require(
        not both,
        name,
        "(x, y) as a tuple of two arrays, or samples as a list of tuples",
        value,
    )
    return True


def _samples(dataset: Any, name: str) -> Any:
    """All samples of a Dataset: x [n, ...], perhaps a dict, and y [n, ...]."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors
    _check_dataset(dataset, name)
    items = [dataset[k] for k in range(len(dataset))]
    if not items:
        return torch.empty(0), torch.empty(0)
    _check_item(items[0], name)
    try:
        return tuple(_stack_values([item[i] for item in items]) for i in (0, 1))
    except (RuntimeError, TypeError, ValueError, KeyError):
        reject(name, INPUT_HINT, items[0])


def _stack_values(values: list[Any]) -> Any:
    """Samples' values as one tensor [n, ...], or as a dict of such. A list of numbers
    is a row: torch's `default_collate` would make it a column."""
    if isinstance(values[0], Mapping):
        return {k: _stack_values([v[k] for v in values]) for k in values[0]}
    if all(isinstance(v, Tensor) for v in values):
        return torch.stack(values)
    return _read(values)


def _check_dataset(dataset: Any, name: str) -> None:
    """ValueError where a value has no samples by number; it says how they are got."""
    numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, str | Mapping):
        reject(name, PAIR_TEXT, dataset)
    if isinstance(dataset, tuple) and not all(
        isinstance(m, tuple | list) for m in dataset
    ):
        reject(name, f"{PAIR_TEXT}; this is a tuple of {len(dataset)}", dataset)
    if hasattr(dataset, "columns"):
        frame = (
            "of a data frame give (frame[inputs].to_numpy(), frame[target].to_numpy())"
        )
        reject(
            name,
            f"{PAIR_TEXT}; {frame}, or all clients' rows to from_table",
            type(dataset),
        )
    if numbered and not isinstance(dataset, IterableDataset):
        return
    if hasattr(dataset, "dataset"):
        reject(
            name,
            f"{PAIR_TEXT}; of a {type(dataset).__name__} give its .dataset",
            dataset,
        )
    if hasattr(dataset, "__iter__"):
        reject(
            name, f"{PAIR_TEXT}; of a {type(dataset).__name__} give list(it)", dataset
        )
    reject(name, PAIR_TEXT, dataset)


def _check_item(item: Any, name: str) -> None:
    """ValueError where a Dataset's item is no pair; it says how pairs are made of
    them."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return
    if isinstance(item, Mapping):
        # the one that is named as a target last
        keys = sorted(map(str, item), key=lambda k: k.lower() in TARGET_KEYS)[-2:]
        x, y = keys if len(keys) == 2 else ("x", "y")
        pairs = f"of dicts make [(d[{x!r}], d[{y!r}]) for d in dataset]"
    elif isinstance(item, tuple | list):
        pairs = f"of samples of {len(item)} make [(d[0], d[1]) for d in dataset]"
    else:
        pairs = f"these samples are of type {type(item).__name__}"
    reject(name, f"{PAIR_TEXT}; {pairs}", item)


def has_single_step(x: Tensor, fields: Fields | None = None) -> bool:
    """Whether inputs are sequences of one step, whose labels are [n, 1]: [n, 1, F],
    tokens [n, 1], or with a mask of one step."""
    if fields:
        return any(f.name == "mask" and f.shape == (1,) for f in fields)
    tokens = x.dtype == torch.int64 and x.dim() == 2
    return x.shape[1:2] == (1,) and (tokens or x.dim() == 3)


def mask_labels(y: Tensor, x: Tensor, fields: Fields | None) -> Tensor:
    """Labels [n, T] with `IGNORED_LABEL` where the field "mask" [T] is false; other
    targets unchanged."""
    mask = fields.split_fields(x).get("mask") if fields else None
    if mask is None or mask.dtype != torch.bool or mask.shape != y.shape or y.dim() < 2:
        return y
    require(
        not y.is_floating_point(), "y", "labels of the steps of which x has a mask", y
    )
    return y.masked_fill(~mask, IGNORED_LABEL)


@checked
def pad_sequences(
    sequences: Sequence[Any], value: Number = 0, length: PositiveInt | None = None
) -> tuple[Tensor, Tensor]:
    """Sequences [t_i, ...] padded with `value` to [n, T, ...], and their mask, bool
    [n, T].

    T is the longest's length, or `length`, which cuts longer ones off. Give both to a
    federation as fields of one input, `{"tokens": tokens, "mask": mask}`: the model
    gets them as such a dict, and labels [n, T] of masked steps are left out of losses
    and accuracies. ValueError where a sequence has other features or another dtype than
    the first, or there is none.

    >>> padded([[5, 6, 7], [8]])[0].tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    # lists have none
    own = [None if hasattr(s, "dtype") else torch.float32 for s in sequences]
    rows = [
        to_tensor_or_bool(s, f"sequences[{i}]", own[i]) for i, s in enumerate(sequences)
    ]
    alike = (
        len({(r.dtype, r.shape[1:], r.dim() > 0) for r in rows}) == 1 and rows[0].dim()
    )
    require(
        alike,
        "sequences",
        "at least one, of one dtype and the same features",
        sequences,
    )
    size = torch.tensor([len(r) for r in rows])
    length = length or int(size.max())
    wide = rows[0].new_empty(length, *rows[0].shape[1:])  # so that all are as long
    out = pad_sequence([*(r[:length] for r in rows), wide], True, value)[:-1]
    return out, torch.arange(length) < size[:, None]
