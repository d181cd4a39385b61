"""Checks arguments by their annotations: one mechanism, one form of sentence.

An annotation says the type, the bounds and the choices; a type checker,
`hypothesis.strategies.from_type` and the command line read the same line:

    @checked
    def keep(fraction: Fraction) -> None: ...

    keep(2)      # ValueError: fraction: expected a number above 0, at most 1, got 2.

Numbers are finite, numpy's scalars become Python's own, and a truth value is no number.
"""

import collections.abc as abc
import difflib
import functools
import importlib
import inspect
import math
import operator
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
)

import annotated_types as at
import numpy as np
import torch
from torch import Tensor

__all__ = [
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "UnitFloat",
]
F = TypeVar("F", bound=Callable[..., Any])


class Expectation(NamedTuple):
    """What is expected, after the word "expected", and whether a value is that; in an
    annotation, too: Annotated[Any, Kind(...)]."""

    words: str
    fits: Callable[[Any], bool]
    names: tuple[str, ...] = ()  # what it may be called


def reject(name: str, expected: str, got: Any, names: Iterable[str] = ()) -> NoReturn:
    """Raises the one form of sentence; also for what no annotation can say.

    Where one of `names` is nearly what was given, the sentence begins with it.
    """
    near = closest_name(got, names)
    if near is not None:
        raise ValueError(
            f"{name}: got {summarize(got)}, did you mean {near!r}? Expected {expected}."
        )
    raise ValueError(f"{name}: expected {expected}, got {summarize(got)}.")


def require(
    fits: Any, name: str, expected: str, got: Any, names: Iterable[str] = ()
) -> None:
    """Refuses an argument that does not fit."""
    if not fits:
        reject(name, expected, got, names)


def closest_name(value: Any, names: Iterable[str]) -> str | None:
    """The one of `names` that a misspelt word, or the first of several, is nearest
    to."""
    word = next(iter(value), None) if isinstance(value, list | tuple) else value
    if not isinstance(word, str):
        return None
    plain = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), plain, 1)
    return plain[near[0]] if near else None


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of whoever called pflcore, however far away that is."""
    frame = sys._getframe(1)
    level = 2
    while (
        frame.f_back
        and frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL_PACKAGES
    ):
        frame = frame.f_back
        level = level + 1
    warnings.warn(text, category, stacklevel=level)


def with_article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[:1].lower() in set('aeiou') else 'a'} {noun}"


def checked(thing: F) -> F:
    """A function, or a class's `__init__`, that checks what it is given by its
    annotations; a default is not checked.

    ValueError in one sentence where an argument is not what its annotation says."""
    call: Any = thing.__init__ if inspect.isclass(thing) else thing  # type: ignore[misc]
    signature = inspect.signature(call)

    @functools.cache
    def kinds() -> dict[
        str, Expectation
    ]:  # at the first call, when all names of the module are there
        hints = typing.get_type_hints(call, include_extras=True)
        return {
            k: expectation_of(hint)
            for k, hint in hints.items()
            if k in signature.parameters
        }

    @functools.wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        for name, value in given.arguments.items():
            if name in kinds() and value is not signature.parameters[name].default:
                given.arguments[name] = validated(name, kinds()[name], value)
        return call(*given.args, **given.kwargs)

    if not inspect.isclass(thing):
        return checking  # type: ignore[return-value]
    setattr(thing, "__init__", checking)  # noqa: B010
    return thing


def check_fields(thing: Any) -> None:
    """ValueError in one sentence where a field of a dataclass is not what its
    annotation says; for its `__post_init__`."""
    for name, kind in _of_fields(type(thing)).items():  # type: ignore[arg-type]
        value = getattr(thing, name)
        plain = validated(name, kind, value)
        if plain is not value:
            object.__setattr__(thing, name, plain)


def validated(name: str, kind: Expectation, value: Any) -> Any:
    """The value, a scalar of numpy's as Python's; ValueError where it is not of the
    kind."""
    value = value.item() if isinstance(value, np.generic) else value
    if not kind.fits(value):
        reject(name, kind.words, value, kind.names)
    return value


@functools.cache
def _of_fields(cls: type) -> dict[str, Expectation]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # a class in a function: what it inherits is checked
        return _of_fields(cls.__base__) if is_dataclass(cls.__base__) else {}  # type: ignore
    return {f.name: expectation_of(hints[f.name]) for f in fields(cls)}  # type: ignore[arg-type]


def expectation_of(hint: Any) -> Expectation:  # noqa: PLR0911 (a kind of hint each)
    """The kind of values that an annotation allows; anything where it says nothing
    of one value."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return functools.reduce(_narrow, args[1:], expectation_of(args[0]))
    if origin is Literal:
        words = " or ".join(map(repr, args))
        names = tuple(a for a in args if isinstance(a, str))
        return Expectation(
            words, lambda v: any(type(v) is type(a) and v == a for a in args), names
        )
    if origin in (typing.Union, types.UnionType):
        each = [expectation_of(a) for a in args]
        # without None, which is its default
        words = " or ".join(dict.fromkeys(k.words for k in each if k.words != "None"))
        names = sum((k.names for k in each), ())
        some = Expectation(words, lambda v: any(k.fits(v) for k in each), names)
        return EXPECT_ANYTHING if EXPECT_ANYTHING in each else some
    if origin in CONTAINER_WORDS and args:
        return _all(expectation_of(args[-1]), CONTAINER_WORDS[origin])
    cls = origin or hint
    ours = isinstance(cls, type) and cls.__module__.startswith("pflcore.")
    if ours and not getattr(cls, "_is_protocol", False):
        return _instance(cls, with_article(cls.__name__))
    # of other classes the one who uses them says more
    return EXPECT_BY_TYPE.get(cls, EXPECT_ANYTHING)


def _narrow(kind: Expectation, said: Any) -> Expectation:
    """`kind` with what one more piece of its annotation says."""
    if isinstance(said, at.GroupedMetadata):
        return functools.reduce(_narrow, said, kind)
    if isinstance(said, at.DocInfo):
        return kind._replace(words=said.documentation)
    if type(said) not in BOUNDS:
        return said if isinstance(said, Expectation) else kind
    words, test = BOUNDS[type(said)]
    bound = getattr(said, type(said).__name__.lower())
    return Expectation(
        f"{kind.words}, {words} {bound}", lambda v: kind.fits(v) and test(v, bound)
    )


def _all(each: Expectation, words: str) -> Expectation:
    """Several values of a kind: in a list (of another iterable only that it is one), or
    in a dict."""

    def fits(v: Any) -> bool:
        mapped = isinstance(v, Mapping)
        if (
            isinstance(v, str)
            or not hasattr(v, "__iter__")
            or (words == "a dict") is not mapped
        ):
            return False
        values = v.values() if mapped else v if isinstance(v, list | tuple) else ()
        return all(map(each.fits, values))

    return Expectation(
        words if each is EXPECT_ANYTHING else f"{words}, each {each.words}", fits
    )


def summarize(value: Any) -> str:
    """A value in a few words on one line; of a tensor the shape and dtype."""
    if isinstance(value, Tensor):
        return (
            f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
        )
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _instance(cls: type, words: str) -> Expectation:
    return Expectation(words, lambda v: isinstance(v, cls))


def _is_number(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    values = value.tolist() if hasattr(value, "tolist") else value
    listed = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
    return listed and all(_is_number(Integral, i) and i >= 0 for i in values)


def are_names(value: Any) -> bool:
    """A name, or several."""
    several = isinstance(value, Sequence) and all(isinstance(v, str) for v in value)
    return isinstance(value, str) or several


def device_of(name: Any) -> str:
    """The name of a device that is there."""
    kind, _, number = str(name).partition(":")
    require(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", name)
    if kind == "cpu":
        return str(name)
    seen = torch.cuda.is_available()
    require(
        seen, "device", f"'cpu', as torch {torch.__version__} sees no GPU here", name
    )
    count = torch.cuda.device_count()
    named = "'cuda:0'" if count == 1 else f"'cuda:0' to 'cuda:{count - 1}'"
    cards = "1 GPU" if count == 1 else f"{count} GPUs"
    there = not number or (number.isdecimal() and int(number) < count)
    require(there, "device", f"'cuda' or {named}, as torch sees {cards} here", name)
    return str(name)


# where a package is called otherwise than its module, or needs more words
PIP_NAMES = {
    "sklearn": "scikit-learn",
    "flwr": "'flwr[simulation]>=1.41,<2'",
    # which stays
    "torchvision": f"torchvision torch=={torch.__version__.partition('+')[0]}",
}


def install_command(*modules: str) -> str:
    """The command that installs what these modules are in."""
    return f"pip install {' '.join(PIP_NAMES.get(name, name) for name in modules)}"


def import_optional(module: str, what: str = "This", alternative: str = "") -> Any:
    """A module that only `what` needs. ImportError in one sentence where it is not
    installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        way = install_command(name) + alternative
        raise ImportError(
            f"{what} needs {name}, which is not installed; get it with: {way}."
        ) from None


def ids_of(name: str, given: Any, n: int) -> Tensor:
    """Ids of distinct clients [S], at least one, in the order given, as int64 on the
    CPU."""
    listed = list(given) if isinstance(given, set) else given
    ids = np.asarray(given.cpu() if isinstance(given, Tensor) else listed)
    whole = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids)
    fits = (
        whole and ids.min() >= 0 and ids.max() < n and len(np.unique(ids)) == len(ids)
    )
    require(fits, name, f"ids of clients from 0 to {n - 1}, each once", given)
    return torch.from_numpy(ids.astype(np.int64))


def expect_dim(dim: int, words: str) -> Expectation:
    """A dense floating-point tensor of so many dimensions."""

    def fits(v: Any) -> bool:
        dense = isinstance(v, Tensor) and v.is_floating_point() and not v.is_sparse
        return dense and v.dim() == dim

    return Expectation(words, fits)


# whose lines are not the caller's own
INTERNAL_PACKAGES = ("pflcore", "torch", "contextlib", "functools")
EXPECT_ANYTHING = Expectation("anything", lambda v: True)
CONTAINER_WORDS = dict.fromkeys(
    (abc.Sequence, abc.Collection, abc.Iterable), "a list"
) | {abc.Mapping: "a dict"}
INSTANCE_WORDS: dict[type, str] = {
    bool: "True or False",
    str: "a string",
    type(None): "None",
    Tensor: "a tensor",
    torch.dtype: "a torch.dtype",
    os.PathLike: "a path",
    abc.Mapping: "a dict",
}
EXPECT_BY_TYPE: dict[Any, Expectation] = {
    **{cls: _instance(cls, words) for cls, words in INSTANCE_WORDS.items()},
    float: Expectation(
        "a finite number", lambda v: _is_number(Real, v) and math.isfinite(v)
    ),
    int: Expectation("a whole number", lambda v: _is_number(Integral, v)),
    Path: _instance(os.PathLike, "a path"),
    abc.Callable: Expectation("a function", callable),
}
BOUNDS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    at.Ge: ("at least", operator.ge),
    at.Gt: ("above", operator.gt),
    at.Le: ("at most", operator.le),
    at.Lt: ("below", operator.lt),
}
FINITE = at.Predicate(math.isfinite)  # for other readers: here every number is
PositiveInt = Annotated[int, at.Ge(1)]
NonNegativeInt = Annotated[int, at.Ge(0)]
Seed = Annotated[
    int, at.Interval(ge=-(2**63), lt=2**63), at.doc("a whole number of 64 bits")
]
# what numpy's RandomState takes
Seed32 = Annotated[
    int, at.Interval(ge=0, lt=2**32), at.doc("a whole number from 0 to 2**32 - 1")
]
Number = Annotated[float, FINITE]
NonNegativeFloat = Annotated[float, at.Ge(0), FINITE, at.doc("a finite number >= 0")]
PositiveFloat = Annotated[float, at.Gt(0), FINITE, at.doc("a finite number above 0")]
UnitFloat = Annotated[float, at.Interval(ge=0, le=1), at.doc("a number from 0 to 1")]
Fraction = Annotated[
    float, at.Interval(gt=0, le=1), at.doc("a number above 0, at most 1")
]
OpenUnitFloat = Annotated[
    float, at.Interval(gt=0, lt=1), FINITE, at.doc("a number above 0 and below 1")
]
Momentum = Annotated[
    float, at.Interval(ge=0, lt=1), at.doc("a number from 0 to below 1")
]
Weighting = Literal["samples", "uniform"]
Ids = Annotated[Sequence[int], Expectation("a list of clients' numbers", _are_ids)]
Names = Annotated[
    str | Sequence[str], Expectation("a name or a list of names", are_names)
]
Matrix = Annotated[Tensor, expect_dim(2, "a matrix of floating-point numbers")]
Row = Annotated[Tensor, expect_dim(1, "a row of floating-point numbers")]
EXPECT_MODEL = Expectation(
    "an nn.Module, a function that makes one or a Net",
    lambda v: callable(v) or hasattr(v, "module"),
)
Model = Annotated[Any, EXPECT_MODEL]
BatchNormPolicy = Literal["auto", "average", "local"]
