"""Checks arguments by their annotations: one mechanism, one form of sentence.

An annotation says the type, the bounds and the choices; a type checker,
`hypothesis.strategies.from_type` and the command line read the same line:

    @checked
    def keep(fraction: Fraction) -> None: ...

    keep(2)      # ValueError: fraction: expected a number above 0, at most 1, got 2.

Numbers are finite, numpy's scalars become Python's own, and a truth value is no number.
"""

from __future__ import annotations

import collections.abc as abc
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

import annotated_types as at
import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Count",
    "Fraction",
    "Ids",
    "Momentum",
    "NonNegative",
    "Number",
    "Positive",
    "Seed",
    "Shape",
    "Share",
    "Weighting",
    "Whole",
    "checked",
    "refuse",
    "shown",
]
F = TypeVar("F", bound=Callable[..., Any])


class Kind(NamedTuple):
    """What is expected, after the word "expected", and whether a value is that; in an annotation,
    too: Annotated[Any, Kind(...)]."""

    words: str
    fits: Callable[[Any], bool]


class Shape(NamedTuple):
    """A tensor's axes by letters: Annotated[Tensor, Shape("N P")]."""

    axes: str


def refuse(name: str, expected: str, got: Any) -> NoReturn:
    """Raises the one form of sentence; also for what no annotation can say."""
    raise ValueError(f"{name}: expected {expected}, got {shown(got)}.")


def need(fits: Any, name: str, expected: str, got: Any) -> None:
    """Refuses an argument that does not fit."""
    if not fits:
        refuse(name, expected, got)


def checked(thing: F) -> F:
    """A function, or a class's `__init__`, that checks what it is given by its annotations; a
    default is not checked.

    ValueError in one sentence where an argument is not what its annotation says."""
    call: Any = thing.__init__ if inspect.isclass(thing) else thing  # type: ignore[misc]
    parameters = inspect.signature(call).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    defaults = {
        p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }

    @functools.cache
    def kinds() -> dict[str, Kind]:  # at the first call, when all names of the module are there
        hints = typing.get_type_hints(call, include_extras=True)
        each = {name: of_hint(hints[name]) for name in defaults if name in hints}
        return {name: kind for name, kind in each.items() if kind is not ANYTHING}

    def taken(name: str, value: Any) -> Any:
        kind = kinds().get(name)
        return value if kind is None or value is defaults[name] else expect(name, kind, value)

    @functools.wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        first = [taken(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: taken(name, value) for name, value in kwargs.items()}
        return call(*first, *args[len(first) :], **named)

    if not inspect.isclass(thing):
        return checking  # type: ignore[return-value]
    setattr(thing, "__init__", checking)  # noqa: B010
    return thing


def check_fields(thing: Any) -> None:
    """ValueError in one sentence where a field of a dataclass is not what its annotation says; for
    its `__post_init__`."""
    for name, kind in _of_fields(type(thing)).items():  # type: ignore[arg-type]
        value = getattr(thing, name)
        plain = expect(name, kind, value)
        if plain is not value:
            object.__setattr__(thing, name, plain)


check = check_fields  # what a `__post_init__` calls


def expect(name: str, kind: Kind, value: Any) -> Any:
    """The value, a scalar of numpy's as Python's; ValueError where it is not of the kind."""
    value = value.item() if isinstance(value, np.generic) else value
    if not kind.fits(value):
        refuse(name, kind.words, value)
    return value


@functools.cache
def _of_fields(cls: type) -> dict[str, Kind]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (
        NameError,
        TypeError,
    ):  # of somebody's own class, in a function for instance: what it inherits is checked
        if cls.__module__.startswith("pflcore."):
            raise
        return _of_fields(cls.__base__) if is_dataclass(cls.__base__) else {}  # type: ignore
    return {f.name: of_hint(hints[f.name]) for f in fields(cls)}  # type: ignore[arg-type]


@functools.cache
def of_hint(hint: Any) -> Kind:  # noqa: PLR0911 (a kind of hint each)
    """The kind of values that an annotation allows; anything where it says nothing of one value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return functools.reduce(_within, args[1:], of_hint(args[0]))
    if origin is Literal:
        return Kind(
            " or ".join(map(repr, args)), lambda v: any(type(v) is type(a) and v == a for a in args)
        )
    if origin in SEVERAL and args:
        return _all(of_hint(args[-1]), SEVERAL[origin])
    if origin in (typing.Union, types.UnionType):
        each = [of_hint(a) for a in args]
        # which is its default
        words = " or ".join(dict.fromkeys(k.words for k in each if k.words != "None"))
        return ANYTHING if ANYTHING in each else Kind(words, lambda v: any(k.fits(v) for k in each))
    return PLAIN.get(origin or hint) or _instance(origin or hint)


def _within(kind: Kind, said: Any) -> Kind:  # noqa: PLR0911 (a kind of hint each)
    """`kind` with what one more piece of its annotation says."""
    if isinstance(said, Kind):
        return said
    if isinstance(said, at.DocInfo):
        return kind._replace(words=said.documentation)
    if isinstance(said, Shape):
        axes = said.axes.split()
        return Kind(
            f"a tensor [{', '.join(axes)}]", lambda v: kind.fits(v) and v.dim() == len(axes)
        )
    if isinstance(said, at.GroupedMetadata):
        return functools.reduce(_within, said, kind)
    if type(said) not in BOUNDS:
        return kind
    words, test = BOUNDS[type(said)]
    bound = getattr(said, type(said).__name__.lower())
    return Kind(f"{kind.words}, {words} {bound}", lambda v: kind.fits(v) and test(v, bound))


def _all(each: Kind, words: str) -> Kind:
    """Several values of a kind: in a list (of another iterable only that it is one), or in a
    dict."""
    words = words if each is ANYTHING else f"{words}, each {each.words}"

    def fits(v: Any) -> bool:
        if (
            words.startswith("a dict") is not isinstance(v, Mapping)
            or isinstance(v, str)
            or not hasattr(v, "__iter__")
        ):
            return False
        values = v.values() if isinstance(v, Mapping) else v if isinstance(v, list | tuple) else ()
        return all(map(each.fits, values))

    return Kind(words, fits)


def _instance(cls: Any) -> Kind:
    """An instance of one of our own classes; of others the one who uses them says more."""
    ours = (
        isinstance(cls, type)
        and cls.__module__.startswith("pflcore.")
        and not getattr(cls, "_is_protocol", False)
    )
    return Kind(f"a {cls.__name__}", lambda v: isinstance(v, cls)) if ours else ANYTHING


def shown(value: Any) -> str:
    """A value in a few words on one line; of a tensor the shape and dtype."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        return False
    return all(_is(Integral, i) and i >= 0 for i in getattr(value, "tolist", value.__iter__)())


def are_names(value: Any) -> bool:
    """A name, or several."""
    return isinstance(value, str) or (
        isinstance(value, Sequence) and all(isinstance(v, str) for v in value)
    )


def device_of(name: Any) -> str:
    """The name of a device that is there."""
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {name!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: got {name!r}, but torch {torch.__version__} sees no GPU here; use "
            "device='cpu'."
        )
    return str(name)


def ids_of(name: str, given: Tensor | Sequence[int] | None, n: int) -> Tensor | None:
    """Ids of distinct clients, ascending, as int64; None as it is."""
    if given is None:
        return None
    try:
        ids = torch.as_tensor(sorted(given) if isinstance(given, Set) else given)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if (
        ids.dtype == torch.bool
        or ids.is_floating_point()
        or ids.is_complex()
        or ids.dim() != 1
        or not len(ids)
    ):
        raise ValueError(
            f"{name}: expected ids of clients from 0 to {n - 1}, at least one, got {given!r}."
        )
    ids = ids.long().cpu().sort().values
    if int(ids[0]) < 0 or int(ids[-1]) >= n:
        odd = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ValueError(f"{name}: expected ids of clients from 0 to {n - 1}, got {odd}.")
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise ValueError(f"{name}: expected each client once, got {int(twice[0])} more than once.")
    return ids


def many(kind: Kind, words: str) -> Kind:
    """Things of a kind, in a list or another sequence, or as the values of a dict; that there are
    some is for the function to say."""

    def fits(v: Any) -> bool:
        if isinstance(v, str) or not isinstance(v, Mapping | Sequence):
            return False
        return all(kind.fits(x) for x in (v.values() if isinstance(v, Mapping) else v))

    return Kind(words, fits)


def of_dim(dim: int, words: str) -> Kind:
    """A dense floating-point tensor of so many dimensions."""
    return Kind(
        words,
        lambda v: (
            isinstance(v, Tensor) and v.is_floating_point() and not v.is_sparse and v.dim() == dim
        ),
    )


def some(words: str) -> Kind:
    """A collection of anything, but no string; it may be empty, as far as its kind goes."""
    return Kind(words, lambda v: hasattr(v, "__len__") and not isinstance(v, str))


ANYTHING = Kind("anything", lambda v: True)
SEVERAL = dict.fromkeys((abc.Sequence, abc.Collection, abc.Iterable), "a list") | {
    abc.Mapping: "a dict"
}
PLAIN: dict[Any, Kind] = {
    bool: Kind("True or False", lambda v: isinstance(v, bool)),
    float: Kind("a finite number", lambda v: _is(Real, v) and math.isfinite(v)),
    int: Kind("a whole number", lambda v: _is(Integral, v)),
    str: Kind("a string", lambda v: isinstance(v, str)),
    type(None): Kind("None", lambda v: v is None),
    Tensor: Kind("a tensor", lambda v: isinstance(v, Tensor)),
    torch.dtype: Kind("a torch.dtype", lambda v: isinstance(v, torch.dtype)),
    Path: Kind("a path", lambda v: isinstance(v, os.PathLike)),
    os.PathLike: Kind("a path", lambda v: isinstance(v, os.PathLike)),
    abc.Mapping: Kind("a dict", lambda v: isinstance(v, Mapping)),
    abc.Callable: Kind("a function", callable),
}
BOUNDS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    at.Ge: ("at least", lambda v, b: bool(v >= b)),
    at.Gt: ("above", lambda v, b: bool(v > b)),
    at.Le: ("at most", lambda v, b: bool(v <= b)),
    at.Lt: ("below", lambda v, b: bool(v < b)),
}
FINITE = at.Predicate(math.isfinite)  # for other readers: here every number is
Count = Annotated[int, at.Ge(1)]
Whole = Annotated[int, at.Ge(0)]
Seed = Annotated[int, at.Interval(ge=-(2**63), lt=2**63), at.doc("a whole number of 64 bits")]
# what numpy's RandomState takes
Seed32 = Annotated[int, at.Interval(ge=0, lt=2**32), at.doc("a whole number from 0 to 2**32 - 1")]
Number = Annotated[float, FINITE]
NonNegative = Annotated[float, at.Ge(0), FINITE, at.doc("a finite number >= 0")]
Positive = Annotated[float, at.Gt(0), FINITE, at.doc("a finite number above 0")]
Share = Annotated[float, at.Interval(ge=0, le=1), at.doc("a number from 0 to 1")]
Fraction = Annotated[float, at.Interval(gt=0, le=1), at.doc("a number above 0, at most 1")]
Part = Annotated[float, at.Interval(gt=0, lt=1), FINITE, at.doc("a number above 0 and below 1")]
Momentum = Annotated[float, at.Interval(ge=0, lt=1), at.doc("a number from 0 to below 1")]
Weighting = Literal["samples", "uniform"]
Ids = Annotated[Sequence[int], Kind("a list of clients' numbers", _are_ids)]
Names = Annotated[str | Sequence[str], Kind("a name or a list of names", are_names)]
Place = Annotated[
    str | os.PathLike[str], Kind("a path", lambda v: isinstance(v, str | os.PathLike))
]
Matrix = Annotated[Tensor, of_dim(2, "a matrix of floating-point numbers")]
Row = Annotated[Tensor, of_dim(1, "a row of floating-point numbers")]
A_MODEL = Kind(
    "an nn.Module, a function that makes one or a Net",
    lambda v: callable(v) or hasattr(v, "module"),
)
Model = Annotated[Any, A_MODEL]
Buffers = Literal["auto", "average", "local"]
