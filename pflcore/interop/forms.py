"""One client's model in the forms that other code holds it: a row, a list of arrays, a state dict,
a Flower record, a module, a file.

Nothing is imported for a form that is not there: a Flower record is known by what its values have,
safetensors by the file's name.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
