"""An algorithm as users name it: an instance, a class, a name of `ALGORITHMS`, or
"package.module:Class" for one of their own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.protocol import Algorithm

BASE = "a class derived from pflcore.Algorithm"


def class_of(algorithm: str | type[Algorithm]) -> type[Algorithm]:
    """The class of a name, in any case, or of "package.module:Class". ValueError or
    TypeError in one sentence.

    >>> class_of("ditto").__name__
    'Ditto'
    """
    thing: Any = algorithm
    if isinstance(algorithm, str):
        thing = imported(algorithm, "algorithm") if ":" in algorithm else _named(algorithm)
    if inspect.isclass(thing) and issubclass(thing, Algorithm):
        return thing
    if isinstance(algorithm, str):
        kind = type(thing).__name__
        raise TypeError(f"algorithm: expected {algorithm!r} to be {BASE}, got {kind}.")
    got = thing.__name__ if inspect.isclass(thing) else type(thing).__name__
    raise TypeError(f"algorithm: expected a name, {BASE} or an instance of one, got {got}.")


def _named(name: str) -> type[Algorithm]:
    names = {_plain(k): cls for k, cls in ALGORITHMS.items()}
    if _plain(name) in names:
        return names[_plain(name)]
    near = difflib.get_close_matches(_plain(name), names, 1)
    raise ValueError(
        f"algorithm: expected one of {', '.join(ALGORITHMS)}, or 'package.module:Class' for one of "
        f"your own, got {name!r}{f'; did you mean {_listed(near[0])!r}?' if near else '.'}"
    )


def algorithm_of(algorithm: Algorithm | type[Algorithm] | str, **options: Any) -> Algorithm:
    """The algorithm itself: an instance as it is, anything else with `options`. ValueError or
    TypeError in one sentence."""
    if isinstance(algorithm, Algorithm):
        if not options:
            return algorithm
        algorithm = type(algorithm)
    cls = class_of(algorithm)
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise TypeError(
            f"algorithm: {cls.__name__} cannot be made from "
            f"{', '.join(options) or 'its defaults alone'} ({error}); give an instance."
        ) from None
    return cls(**options)


def name_of(algorithm: Algorithm | type[Algorithm] | str) -> str:
    """What an algorithm is called in records and tables: its name in `ALGORITHMS`, else that of its
    class."""
    if isinstance(algorithm, str):
        return algorithm.rpartition(":")[2] if ":" in algorithm else _listed(algorithm)
    cls = algorithm if inspect.isclass(algorithm) else type(algorithm)
    return next((k for k, v in ALGORITHMS.items() if v is cls), cls.__name__)


def _listed(name: str) -> str:
    """A name as `ALGORITHMS` writes it."""
    return next((k for k in ALGORITHMS if _plain(k) == _plain(name)), name)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def imported(place: str, what: str) -> Any:
    """The thing at "package.module:name". ValueError or ImportError in one sentence that names the
    argument `what`."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        fault = f"the module {module!r} has no {name!r}; check the name after the colon."
        raise ValueError(f"{what}: {fault}") from None
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            fault = f"there is no module {missing!r} to import from here; check {place!r}, or"
            raise ValueError(f"{what}: {fault} change folder.") from None
        fault = f"{module!r} needs {missing!r}, which is not installed."
        raise ImportError(f"{what}: {fault}") from None
    except Exception as error:
        fault = f"importing {module!r} failed with {type(error).__name__}: {error}"
        raise ValueError(f"{what}: {fault}") from error


def narrowed(cls: type[Algorithm]) -> list[str]:
    """The options of which a preset leaves one choice."""
    hints = get_type_hints(cls)
    return [
        f.name
        for f in fields(cls)
        if hints[f.name] is type(None) or len(_choices(hints[f.name])) == 1
    ]


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()
