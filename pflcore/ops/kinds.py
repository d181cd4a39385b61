"""The kinds of arguments of what is public: what is expected of one, in words and as a test."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

__all__ = ["Count", "Fraction", "Momentum", "NonNegative", "Positive", "Share", "Weighting", "Whole"]
F = TypeVar("F", bound=Callable[..., Any])


class Kind(NamedTuple):
    """What is expected, after the word "expected", and whether a value is that."""

    words: str
    fits: Callable[[Any], bool]


def takes(**kinds: Kind) -> Callable[[F], F]:
    """A function, or a class's `__init__`, whose arguments are of these kinds, their defaults, or None where that is annotated; numpy's
    scalars come as Python's numbers.

    ValueError in one sentence where one is not."""

    def decorate(thing: F) -> F:
        call: Any = thing.__init__ if inspect.isclass(thing) else thing  # type: ignore[misc]
        signature = inspect.signature(call)
        free = {n: [p.default, *([None] if "None" in str(p.annotation) else [])] for n, p in signature.parameters.items()}

        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # which the call itself says better
                return call(*args, **kwargs)
            given = bound.arguments
            given.update({k: v.item() for k, v in given.items() if isinstance(v, np.generic)})
            for name, kind in kinds.items():
                if name in given and not any(given[name] is v for v in free[name]) and not kind.fits(given[name]):
                    raise ValueError(f"{name}: expected {kind.words}, got {shown(given[name])}.")
            return call(*bound.args, **bound.kwargs)

        if not inspect.isclass(thing):
            return checked  # type: ignore[return-value]
        setattr(thing, "__init__", checked)  # noqa: B010
        return thing

    return decorate


def pythonic(thing: Any) -> None:
    """Numpy's scalars among a dataclass's fields become Python's numbers."""
    for k, v in vars(thing).items():
        if isinstance(v, np.generic):
            object.__setattr__(thing, k, v.item())


def check(thing: Any) -> None:
    """ValueError in one sentence where a field of a dataclass is not what its annotation says."""
    for name, kind in _of_fields(type(thing)).items():  # type: ignore[arg-type]
        if not kind.fits(getattr(thing, name)):
            raise ValueError(f"{name}: expected {kind.words}, got {shown(getattr(thing, name))}.")


@functools.cache
def _of_fields(cls: Any) -> dict[str, Kind]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # of somebody's own class, in a function for instance: what it inherits is checked
        if cls.__module__.startswith("pflcore."):
            raise
        return _of_fields(cls.__base__) if is_dataclass(cls.__base__) else {}  # type: ignore[arg-type]
    return {f.name: of_hint(hints[f.name]) for f in fields(cls)}


def of_hint(hint: Any) -> Kind:
    """The kind of values that an annotation allows; anything where it says nothing of one value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((a for a in args if isinstance(a, Kind)), of_hint(args[0]))
    if origin is Literal:
        return Kind(" or ".join(map(repr, args)), lambda v: isinstance(v, str) and v in args)
    if origin in (Union, UnionType):
        each = [of_hint(a) for a in args]
        return Kind(" or ".join(k.words for k in each), lambda v: any(k.fits(v) for k in each))
    return PLAIN.get(hint, Kind("anything", lambda v: True))


def shown(value: Any) -> str:
    """A value in a few words on one line; of a tensor the shape and dtype."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def number(least: float = float("-inf"), most: float = float("inf"), words: str = "a number") -> Kind:
    """A real number from `least` to `most`, no truth value and no NaN."""
    return Kind(words, lambda v: _is(Real, v) and bool(least <= v <= most))


def whole(least: int) -> Kind:
    return Kind(f"a whole number, at least {least}", lambda v: _is(Integral, v) and v >= least)


def a(*types: type, words: str = "") -> Kind:
    """An instance of one of the types."""
    return Kind(words or " or ".join(f"a {t.__name__}" for t in types), lambda v: isinstance(v, types))


def many(kind: Kind, words: str) -> Kind:
    """Things of a kind, in a list or another sequence, or as the values of a dict; that there are some is for the function to say."""

    def fits(v: Any) -> bool:
        if isinstance(v, str) or not isinstance(v, Mapping | Sequence):
            return False
        return all(kind.fits(x) for x in (v.values() if isinstance(v, Mapping) else v))

    return Kind(words, fits)


IDS = Kind(
    "a list of clients' numbers",
    lambda v: (
        isinstance(v, Iterable)
        and not isinstance(v, str | Mapping)
        and all(_is(Integral, i) and i >= 0 for i in getattr(v, "tolist", v.__iter__)())
    ),
)


def of_dim(dim: int, words: str) -> Kind:
    """A dense floating-point tensor of so many dimensions."""
    return Kind(words, lambda v: isinstance(v, Tensor) and v.is_floating_point() and not v.is_sparse and v.dim() == dim)


def some(words: str) -> Kind:
    """A collection of anything, but no string; it may be empty, as far as its kind goes."""
    return Kind(words, lambda v: hasattr(v, "__len__") and not isinstance(v, str))


FINITE = number(-sys.float_info.max, sys.float_info.max, "a finite number")
PLAIN = {
    bool: a(bool, words="True or False"),
    float: FINITE,
    int: Kind("a whole number", lambda v: _is(Integral, v)),
    str: a(str, words="a string"),
    type(None): Kind("None", lambda v: v is None),
}
Count = Annotated[int, whole(1)]
Whole = Annotated[int, whole(0)]
NonNegative = Annotated[float, number(0, sys.float_info.max, "a finite number >= 0")]
Positive = Annotated[float, Kind("a finite number above 0", lambda v: _is(Real, v) and 0 < v < float("inf"))]
Share = Annotated[float, number(0, 1, "a number from 0 to 1")]
Fraction = Annotated[float, Kind("a number above 0, at most 1", lambda v: _is(Real, v) and 0 < v <= 1)]
Momentum = Annotated[float, number(0, math.nextafter(1, 0), "a number from 0 to below 1")]
Weighting = Literal["samples", "uniform"]
SEED = Kind("a whole number of 64 bits", lambda v: _is(Integral, v) and -(2**63) <= v < 2**63)
SEED32 = Kind("a whole number from 0 to 2**32 - 1", lambda v: _is(Integral, v) and 0 <= v < 2**32)  # what numpy's RandomState takes
TENSOR = a(Tensor, words="a tensor")
MATRIX = of_dim(2, "a matrix of floating-point numbers")
FUNCTION = Kind("a function", callable)
PLACE = a(str, os.PathLike, words="a path")
MODEL = Kind("an nn.Module, a function that makes one or a Net", lambda v: callable(v) or hasattr(v, "module"))
BUFFERS = Kind("'auto', 'average' or 'local'", lambda v: v in ("auto", "average", "local"))
MAPPING = a(Mapping, words="a dict")
TEXT = a(str, words="a string")
NAMES = Kind("a name or a list of names", lambda v: isinstance(v, str) or (isinstance(v, Sequence) and all(isinstance(x, str) for x in v)))
DENSE = Kind("a dense tensor or rows to read", lambda v: not (isinstance(v, Tensor) and v.layout is not torch.strided))
POSITIVE = Kind("a finite number above 0", lambda v: _is(Real, v) and 0 < v < float("inf"))
