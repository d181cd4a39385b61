"""Inputs of several tensors: a sample's fields side by side in one row of the pool, and apart again
before the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from pflcore.check import Count, checked, shown, some

IGNORED = -100  # the label of a step that a mask leaves out, as torch's cross entropy has it


class Field(NamedTuple):
    """One tensor of a sample: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} ({str(self.dtype).removeprefix('torch.')})"


class Fields(tuple[Field, ...]):
    """The fields of every sample of a pool, in the order of its columns. Calling it takes rows
    apart; as a module's pre-hook, too."""

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    def apart(self, x: Tensor) -> dict[str, Tensor]:
        """The fields [B, *shape] by name of rows [B, D]."""
        parts = x.split([prod(f.shape) for f in self], -1)
        return {
            f.name: part.reshape(*x.shape[:-1], *f.shape).to(f.dtype)
            for f, part in zip(self, parts, strict=True)
        }

    def __call__(self, module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.apart(given[0]) if isinstance(given[0], Tensor) else given[0],)


def joined(x: Mapping[str, Tensor], dtype: torch.dtype, what: str = "x") -> tuple[Tensor, Fields]:
    """Fields [n, ...] as one matrix [n, D] of `dtype`, and which they are. Whole numbers must be
    exact in it, floats become `dtype`."""
    if not x or not all(
        isinstance(k, str) and isinstance(v, Tensor) and v.dim() for k, v in x.items()
    ):
        raise TypeError(
            f"{what} must hold tensors by name, one row for each sample, got {shown(dict(x))}"
        )
    counts = {k: len(v) for k, v in x.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{what} must hold one row per sample in every field, got {counts}")
    most = 2 ** (24 if dtype == torch.float32 else 53)
    for name, v in x.items():
        if not (v.is_floating_point() or v.dtype in (torch.int64, torch.bool)):
            raise TypeError(
                f"{what}[{name!r}] must be floating point, int64 or bool, got {v.dtype}: convert it"
            )
        if v.dtype == torch.int64 and v.numel() and int(v.abs().max()) > most:
            raise ValueError(
                f"{what}[{name!r}] must lie within +-{most:,}, which {dtype} holds exactly, got "
                f"{int(v.abs().max()):,}"
            )
    fields = Fields(
        Field(k, tuple(v.shape[1:]), dtype if v.is_floating_point() else v.dtype)
        for k, v in x.items()
    )
    return torch.cat([v.reshape(len(v), -1).to(dtype) for v in x.values()], 1), fields


def masked(y: Tensor, x: Tensor, fields: Fields | None) -> Tensor:
    """Labels [n, T] that say `IGNORED` where the field "mask" is false; other targets as they
    are."""
    mask = next((f for f in fields or () if f.name == "mask" and f.dtype == torch.bool), None)
    if fields is None or mask is None or y.shape[1:] != mask.shape or y.dim() < 2:
        return y
    if y.is_floating_point():
        raise ValueError(
            "y must hold labels, or one target a sample, where x has a mask of its steps: numbers "
            "cannot be left out of a loss"
        )
    return y.masked_fill(~fields.apart(x)["mask"], IGNORED)


LISTS = some("one-dimensional tensors or arrays in a list")


@checked
def padded(
    sequences: Annotated[Sequence[Any], LISTS], value: float = 0, length: Count | None = None
) -> tuple[Tensor, Tensor]:
    """Sequences of any lengths [t_i, ...] as one tensor [n, T, ...], filled up with `value`, and
    where they are: bool [n, T].

    T is the longest's length, or `length`, which cuts longer ones off. Give both to a federation as
    fields of one input, `{"tokens": tokens, "mask": mask}`: the model gets them as such a dict, and
    labels [n, T] are left out of losses and accuracies where the mask is false. ValueError where a
    sequence has other features or another dtype than the first, or there is none.

    >>> padded([[5, 6, 7], [8]])[0].tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    try:
        rows = [torch.as_tensor(s) for s in sequences]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            "sequences: expected a list of arrays of numbers; encode words as whole numbers first."
        ) from None
    if not rows or any(
        r.dim() < 1 or r.shape[1:] != rows[0].shape[1:] or r.dtype != rows[0].dtype for r in rows
    ):
        raise ValueError(
            "sequences: expected at least one, of one dtype and the same features, got "
            f"{sorted({shown(r) for r in rows})}."
        )
    size = torch.tensor([len(r) for r in rows])
    length = int(size.max()) if length is None else length
    if not (rows[0].is_floating_point() or float(value).is_integer()):
        raise ValueError(f"value: expected a whole number to fill up whole numbers, got {value}.")
    out = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), value)
    for place, r in zip(out, rows, strict=True):
        place[: len(r)] = r[:length]
    return out, torch.arange(length) < size[:, None]
