"""Checks of arguments by their annotations, with one form of error.

An annotation says the type, the bounds and the choices. A type checker,
`hypothesis.strategies.from_type` and the command line read the same line:

    @checked
    def keep(fraction: Fraction) -> None: ...

    keep(2)      # ValueError: fraction: expected a number above 0, at most 1, got 2.

`expectation_of` turns an annotation into an `Expectation`: the words for the values,
and a function that tells whether a value fits. `checked` does so once for a function,
and `check_fields` once for a dataclass. An annotation that does not tell one value from
another checks nothing: the function then looks at its argument itself, by `require`.

Numbers are finite, numpy's scalars become Python's own, and True and False are no
numbers. A default is taken as it is.
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
# The package that pip installs for a module, where it is not the module's name.
PIP_NAMES = {
    "sklearn": "scikit-learn",
    "flwr": "'flwr[simulation]>=1.41,<2'",
    "material": "mkdocs-material",
    "mkdocstrings": "'mkdocstrings[python]'",
    "xdist": "pytest-xdist",
    "pytest": "'pytest<9.2'",
    "twine": "'twine<7'",
    # Without torch's version it would bring another torch.
    "torchvision": f"torchvision torch=={torch.__version__.partition('+')[0]}",
}


class Expectation(NamedTuple):
    """A kind of values, with the words for it.

    It can stand in an annotation: Annotated[Any, Expectation(...)].

    Args:
        words: The words that follow "expected" in an error.
        fits: A function that is true for values of the kind.
        names: The values of the kind, where they are names that can be misspelt.
    """

    words: str
    fits: Callable[[Any], bool]
    names: tuple[str, ...] = ()


class OnCommandLine(NamedTuple):
    """The type of an option on the command line, where it differs from Python's.

    It stands in an annotation: Annotated[Any, OnCommandLine(tuple[str, ...])].

    Attributes:
        hint: The type of the words there.
    """

    hint: Any


class Words(str):
    """Text that an error shows whole and without quotation marks.

    It takes the place of a value that the words say better, such as "a part of w's
    memory".
    """


def reject(
    name: str,
    expected: str,
    got: Any,
    names: Iterable[str] = (),
    *,
    remedy: str = "",
    error: type[Exception] = ValueError,
) -> NoReturn:
    """Raises the error of an argument: "NAME: expected X, got Y; remedy.".

    Args:
        name: The argument's name. An op's argument is written as the call, such as
            "aggregate(out)".
        expected: The words for the values that the argument may have.
        got: The wrong value, which `summarize` puts into words, or `Words`.
        names: The values that the argument may have. Where one of them is nearly what
            was given, the sentence suggests it.
        remedy: What the caller can do, without the full stop.
        error: The class of the error.
    """
    end = f"; {remedy}." if remedy else "."
    near = closest_name(got, names)
    if near is not None:
        question = f"{name}: got {summarize(got)}, did you mean {near!r}?"
        raise error(f"{question} Expected {expected}{end}")
    raise error(f"{name}: expected {expected}, got {summarize(got)}{end}")


def require(
    fits: Any,
    name: str,
    expected: str,
    got: Any,
    names: Iterable[str] = (),
    *,
    remedy: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raises an error, as `reject` does, unless the argument fits.

    Where the words are built from values and the call is frequent, test first and then
    call `reject`: building them takes time.
    """
    if not fits:
        reject(name, expected, got, names, remedy=remedy, error=error)


def closest_name(value: Any, names: Iterable[str]) -> str | None:
    """The name that a misspelt word is nearest to, or None.

    Where the value is a list or tuple of words, its first one counts.
    """
    word = next(iter(value), None) if isinstance(value, list | tuple) else value
    if not isinstance(word, str):
        return None
    by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_lower_case, 1)
    return by_lower_case[near[0]] if near else None


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's own code that called pflcore.

    Calls within pflcore, and through torch, are passed over.
    """
    frame = sys._getframe(1)
    level = 2  # level 1 is this function, and level 2 the function that calls it
    while frame.f_back and _is_internal(frame):
        frame = frame.f_back
        level = level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_internal(frame: types.FrameType) -> bool:
    """True where the line of a frame is not the caller's own."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in INTERNAL_PACKAGES


def with_article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    article = "an" if noun[:1].lower() in set("aeiou") else "a"
    return f"{article} {noun}"


def checked(thing: F) -> F:
    """The function or class with checks of its arguments by their annotations.

    In a class it is the arguments of `__init__` that are checked. The call raises
    ValueError where an argument is not what its annotation says.
    """
    return _with_checks(thing, "{}")


def checked_op(thing: F) -> F:
    """The op with the checks of `checked`, whose errors name the call.

    That is the form of all ops: "nearest(k): expected a whole number, ...".
    """
    return _with_checks(thing, f"{thing.__name__}({{}})")


def _with_checks(thing: F, name_format: str) -> F:
    """The function or class with checks, whose errors use `name_format`.

    Args:
        name_format: The form of an argument's name in an error, such as "nearest({})".
    """
    call: Any = thing.__init__ if inspect.isclass(thing) else thing  # type: ignore[misc]
    signature = inspect.signature(call)

    @functools.cache
    def expectations() -> dict[str, Expectation]:
        # This is left to the first call: then the module has all names that the
        # annotations use.
        hints = typing.get_type_hints(call, include_extras=True)
        return {
            name: expectation_of(hint)
            for name, hint in hints.items()
            if name in signature.parameters
        }

    @functools.wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        expected = expectations()
        for name, value in bound.arguments.items():
            is_default = value is signature.parameters[name].default
            if name in expected and not is_default:
                shown = name_format.format(name)
                bound.arguments[name] = validated(shown, expected[name], value)
        return call(*bound.args, **bound.kwargs)

    if not inspect.isclass(thing):
        return checking  # type: ignore[return-value]
    setattr(thing, "__init__", checking)  # noqa: B010
    return thing


def check_fields(thing: Any) -> None:
    """Raises ValueError where a dataclass's field is not as its annotation says.

    A dataclass calls it in its `__post_init__`. Numpy's scalars in its fields become
    Python's own, also where the dataclass is frozen.
    """
    for name, expectation in _field_expectations(type(thing)).items():  # type: ignore[arg-type]
        value = getattr(thing, name)
        plain = validated(name, expectation, value)
        if plain is not value:
            # A frozen dataclass refuses `setattr`.
            object.__setattr__(thing, name, plain)


def validated(name: str, expectation: Expectation, value: Any) -> Any:
    """The value of the argument `name`, with numpy's scalars as Python's own.

    Raises ValueError where the value is not as expected.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if not expectation.fits(value):
        reject(name, expectation.words, value, expectation.names)
    return value


@functools.cache
def _field_expectations(cls: type) -> dict[str, Expectation]:
    """The kind of values of each field of a dataclass."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):
        # The annotations of a class that stands in a function can use names that are
        # not found from outside of it. Then only the inherited fields are checked.
        base = cls.__base__
        return _field_expectations(base) if is_dataclass(base) else {}  # type: ignore
    return {f.name: expectation_of(hints[f.name]) for f in fields(cls)}  # type: ignore[arg-type]


def expectation_of(hint: Any) -> Expectation:
    """The kind of values that an annotation allows.

    It is `EXPECT_ANYTHING` where the annotation does not tell one value from another.
    An Annotated type is narrowed by each part of its metadata in turn.
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return functools.reduce(_narrow, args[1:], expectation_of(args[0]))
    if origin is Literal:
        return _expect_literal(args)
    if origin in (typing.Union, types.UnionType):
        return _expect_one_of([expectation_of(arg) for arg in args])
    if origin in CONTAINER_WORDS and args:
        return _expect_each(expectation_of(args[-1]), CONTAINER_WORDS[origin])
    return _expect_class(origin or hint)


def _expect_literal(values: Sequence[Any]) -> Expectation:
    """One of these values, of the same type: True is not 1."""
    words = " or ".join(map(repr, values))
    names = tuple(value for value in values if isinstance(value, str))

    def fits(v: Any) -> bool:
        return any(type(v) is type(value) and v == value for value in values)

    return Expectation(words, fits, names)


def _expect_one_of(expectations: Sequence[Expectation]) -> Expectation:
    """A value of one of several kinds."""
    if EXPECT_ANYTHING in expectations:
        return EXPECT_ANYTHING
    # None is not named, because an argument that may be None has it as its default.
    kinds = dict.fromkeys(e.words for e in expectations if e.words != "None")
    names: tuple[str, ...] = ()
    for expectation in expectations:
        names += expectation.names

    def fits(v: Any) -> bool:
        return any(expectation.fits(v) for expectation in expectations)

    return Expectation(" or ".join(kinds), fits, names)


def _expect_class(cls: Any) -> Expectation:
    """An instance of one of pflcore's classes, or what `EXPECT_BY_TYPE` says."""
    is_ours = isinstance(cls, type) and cls.__module__.startswith("pflcore.")
    if is_ours and not getattr(cls, "_is_protocol", False):
        return _instance(cls, with_article(cls.__name__))
    # An argument of another class is checked by the function that takes it.
    return EXPECT_BY_TYPE.get(cls, EXPECT_ANYTHING)


def _narrow(expectation: Expectation, metadata: Any) -> Expectation:
    """`expectation` with what one more part of an Annotated type says."""
    if isinstance(metadata, at.GroupedMetadata):
        return functools.reduce(_narrow, metadata, expectation)
    if isinstance(metadata, at.DocInfo):
        return expectation._replace(words=metadata.documentation)
    if type(metadata) in BOUNDS:
        return _bounded(expectation, metadata)
    return metadata if isinstance(metadata, Expectation) else expectation


def _bounded(expectation: Expectation, metadata: Any) -> Expectation:
    """`expectation` with one of `BOUNDS`, such as `annotated_types.Ge(ge=1)`."""
    words, compare = BOUNDS[type(metadata)]
    bound = getattr(metadata, type(metadata).__name__.lower())

    def fits(v: Any) -> bool:
        return expectation.fits(v) and compare(v, bound)

    return Expectation(f"{expectation.words}, {words} {bound}", fits)


def _expect_each(expectation: Expectation, words: str) -> Expectation:
    """A list or a dict whose values are each as expected.

    The values of an iterable that is neither a list nor a tuple are not looked at:
    reading them could use them up.

    Args:
        words: "a list" or "a dict".
    """

    def fits(v: Any) -> bool:
        if isinstance(v, str) or not hasattr(v, "__iter__"):
            return False
        if isinstance(v, Mapping):
            return words == "a dict" and all(map(expectation.fits, v.values()))
        if words == "a dict":
            return False
        return not isinstance(v, list | tuple) or all(map(expectation.fits, v))

    if expectation is EXPECT_ANYTHING:
        return Expectation(words, fits)
    return Expectation(f"{words}, each {expectation.words}", fits)


def summarize(value: Any) -> str:
    """A value in a few words on one line.

    A tensor is described by its shape, dtype and device, and by its layout where it is
    not dense; a nested one has no shape. `Words` stay as they are.
    """
    if isinstance(value, Tensor):
        return f"{summarize_kind(value)} on {value.device}"
    if isinstance(value, Words):
        return value
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        # Python writes no number of more than some thousand digits.
        text = with_article(f"{type(value).__name__} that is too long to write")
    return text if len(text) <= 80 else f"{text[:77]}..."


def name_few(names: Sequence[Any], count: int = 5) -> str:
    """The first names as a list, and the number of the others."""
    others = len(names) - count
    return f"{[*names[:count]]}" + (f" and {others} more" if others > 0 else "")


def summarize_kind(t: Tensor) -> str:
    """The shape and dtype of a tensor in words.

    It is for what is expected of a tensor on any device.
    """
    dtype = str(t.dtype).removeprefix("torch.")
    if t.is_nested:
        return f"a nested tensor of {dtype}"
    kind = "tensor"
    if t.layout is not torch.strided:
        kind = f"{str(t.layout).removeprefix('torch.')} tensor"
    return f"a {kind} {list(t.shape)} of {dtype}"


def is_dense(t: Tensor) -> bool:
    """True for a tensor that is neither sparse nor nested, nor in another layout."""
    return t.layout is torch.strided and not t.is_nested


def _instance(cls: type, words: str) -> Expectation:
    """An instance of a class."""
    return Expectation(words, lambda v: isinstance(v, cls))


def _is_number(kind: type, value: Any) -> bool:
    """True for a number of this kind that is not a truth value."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    """True for a list, set, array or tensor of whole numbers >= 0, or of names."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        return False
    return all(
        isinstance(i, str) or (_is_number(Integral, i) and i >= 0) for i in values
    )


def are_names(value: Any) -> bool:
    """True where the value is a name or a sequence of names."""
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and all(isinstance(v, str) for v in value)


def device_of(name: Any) -> str:
    """The name of a device, such as "cpu" or "cuda:1".

    Raises ValueError where torch does not see the device.
    """
    kind, _, number = str(name).partition(":")
    require(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", name)
    if kind == "cpu":
        return str(name)
    words = f"'cpu', as torch {torch.__version__} sees no GPU here"
    require(torch.cuda.is_available(), "device", words, name)
    count = torch.cuda.device_count()
    names = "'cuda:0'" if count == 1 else f"'cuda:0' to 'cuda:{count - 1}'"
    cards = "1 GPU" if count == 1 else f"{count} GPUs"
    is_there = not number or (number.isdecimal() and int(number) < count)
    require(is_there, "device", f"'cuda' or {names}, as torch sees {cards} here", name)
    return str(name)


def import_optional(module: str, what: str = "This", alternative: str = "") -> Any:
    """A module of a package that not every user has.

    Raises ImportError, with the command that installs the package, where it is missing.

    Args:
        module: The module's name.
        what: The words for the feature that needs the module.
        alternative: More words behind the command.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ImportError(
            f"{what} needs {name}, which is not installed; get it with: "
            f"{pip_install(name)}{alternative}."
        ) from None


def pip_install(*modules: str) -> str:
    """The command that installs the packages of these modules."""
    return " ".join(["pip install", *(PIP_NAMES.get(name, name) for name in modules)])


def import_object(place: str, what: str) -> Any:
    """The object at "package.module:name".

    Raises ValueError, with the name of the argument `what`, where the import fails.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        fault = f"importing {place!r} failed with {type(error).__name__}: {error}"
        raise ValueError(
            f"{what}: {fault}; check the name, or change folder."
        ) from error


def require_arguments(
    name: str, function: Callable[..., Any], expected: str, count: int
) -> None:
    """Raises ValueError where a function cannot be called with `count` arguments.

    Args:
        name: The name of the argument that holds the function.
        function: The function; one that does not tell its arguments passes.
        expected: The words for what the function must take and return.
        count: The number of arguments that it is called with, by their places.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        called = getattr(function, "__name__", type(function).__name__)
        reject(name, expected, Words(f"{called}{signature}"))


SHOWN_NAMES = 5  # the most clients that an error names


def client_id(name: str, value: Any, n: int, names: Sequence[Any] | None = None) -> int:
    """The id of a client that is given by its id or by its name.

    A number is an id, from 0 to n - 1; text is a name. Raises ValueError where there is
    no such client, or where several have the name.

    Args:
        name: The argument's name.
        value: The id or the name.
        n: The number of clients.
        names: The names of all clients; None where they have none.
    """
    if isinstance(value, str) and names is not None:
        words = [str(known) for known in names]
        if words.count(value) > 1:
            reject(name, "a name that one client has alone", value)
        if value not in words:
            shown = ", ".join(map(repr, words[:SHOWN_NAMES]))
            more = ", ..." if len(words) > SHOWN_NAMES else ""
            reject(name, f"the name of a client ({shown}{more})", value, words)
        return words.index(value)
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    is_id = _is_number(Integral, value) and 0 <= value < n
    or_name = "" if names is None else f", or a name such as {str(names[0])!r}"
    require(is_id, name, f"a number from 0 to {n - 1}{or_name}", value)
    return int(value)


def known_id(name: str, client: int | str) -> int:
    """The id of a client that an option gives by its id.

    A simulation puts the id in the place of a name beforehand. Raises ValueError for a
    name, which only a federation can tell.
    """
    if isinstance(client, str):
        expected = "a client's number, where no federation gives its name"
        reject(name, expected, client)
    return client


def ids_of(name: str, value: Any, n: int, names: Sequence[Any] | None = None) -> Tensor:
    """Ids of clients as an int64 tensor [S] on the CPU.

    They have the order of `value`. Raises ValueError unless there is at least one id,
    all are from 0 to n - 1, and no id stands there twice.

    Args:
        name: The argument's name.
        value: The ids or names in a list, set, array or tensor.
        n: The number of clients.
        names: The names of all clients; None where they have none.
    """
    has_names = names is not None and not isinstance(value, str | Tensor)
    if has_names and isinstance(value, Iterable):
        value = _names_as_ids(name, list(value), n, names)
    if isinstance(value, Tensor):
        ids = np.asarray(value.cpu())
    elif isinstance(value, set):
        ids = np.asarray(list(value))
    else:
        ids = np.asarray(value)
    fits = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
    if fits:
        in_range = ids.min() >= 0 and ids.max() < n
        fits = in_range and len(np.unique(ids)) == len(ids)
    require(fits, name, f"ids of clients from 0 to {n - 1}, each once", value)
    return torch.from_numpy(ids.astype(np.int64))


def _names_as_ids(name: str, values: list[Any], n: int, names: Any) -> list[Any]:
    """The values with the ids of clients in place of their names."""
    if not any(isinstance(value, str) for value in values):
        return values
    first_ids: dict[str, int] = {}
    for i, known in enumerate(names):
        first_ids.setdefault(str(known), i)
    is_unique = len(first_ids) == n
    ids = []
    for value in values:
        if isinstance(value, str) and is_unique and value in first_ids:
            ids.append(first_ids[value])
        else:
            # The sentence on a name that no client has, or several, is here.
            ids.append(client_id(name, value, n, names))
    return ids


def expect_dim(dim: int, words: str) -> Expectation:
    """A dense floating-point tensor with this number of dimensions."""

    def fits(v: Any) -> bool:
        if not isinstance(v, Tensor) or not v.is_floating_point():
            return False
        return is_dense(v) and v.dim() == dim

    return Expectation(words, fits)


# The constants stand below the functions that they use.

# Packages whose lines are not the caller's own: `warn_caller` passes over them.
INTERNAL_PACKAGES = ("pflcore", "torch", "contextlib", "functools")
EXPECT_ANYTHING = Expectation("anything", lambda v: True)
CONTAINER_WORDS = {
    abc.Sequence: "a list",
    abc.Collection: "a list",
    abc.Iterable: "a list",
    abc.Mapping: "a dict",
}
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
# `expectation_of` takes every number as finite. This part of an annotation tells it to
# other readers.
FINITE = at.Predicate(math.isfinite)
PositiveInt = Annotated[int, at.Ge(1)]
NonNegativeInt = Annotated[int, at.Ge(0)]
Seed = Annotated[
    int, at.Interval(ge=-(2**63), lt=2**63), at.doc("a whole number of 64 bits")
]
# The seeds that numpy's RandomState takes.
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
# A client by its id, or by its name where a federation has names.
ClientName = NonNegativeInt | str
Ids = Annotated[
    Sequence[int | str], Expectation("a list of clients' numbers or names", _are_ids)
]
Names = Annotated[
    str | Sequence[str], Expectation("a name or a list of names", are_names)
]
Matrix = Annotated[Tensor, expect_dim(2, "a matrix of floating-point numbers")]
Row = Annotated[Tensor, expect_dim(1, "a row of floating-point numbers")]
EXPECT_MODEL = Expectation(
    "an nn.Module, a function that makes one or a Net",
    # Several models in a list or a dict are refused where the reason can be given.
    lambda v: callable(v) or hasattr(v, "module") or isinstance(v, list | tuple | dict),
)
Model = Annotated[Any, EXPECT_MODEL]
BatchNormPolicy = Literal["auto", "average", "local"]
