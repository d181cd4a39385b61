"""An algorithm as users name it: an instance, a class, a name of `ALGORITHMS`, or "package.module:Class" for one of their own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg


def class_of(algorithm: str | type[FedAvg]) -> type[FedAvg]:
    """The class that a name, in any case, or "package.module:Class" stands for. ValueError or TypeError in one sentence.

    >>> class_of("ditto").__name__
    'Ditto'
    """
    if isinstance(algorithm, str):
        if ":" in algorithm:
            thing = imported(algorithm, "algorithm")
            if not (inspect.isclass(thing) and issubclass(thing, FedAvg)):
                kind = type(thing).__name__
                raise TypeError(f"algorithm: expected {algorithm!r} to be a class derived from pflcore.FedAvg, got {kind}.")
            return thing
        names = {_plain(k): k for k in ALGORITHMS}
        if _plain(algorithm) in names:
            return ALGORITHMS[names[_plain(algorithm)]]
        near = difflib.get_close_matches(_plain(algorithm), names, 1)
        raise ValueError(
            f"algorithm: expected one of {', '.join(ALGORITHMS)}, or 'package.module:Class' for one of your own, got {algorithm!r}"
            f"{f'; did you mean {names[near[0]]!r}?' if near else '.'}"
        )
    if inspect.isclass(algorithm) and issubclass(algorithm, FedAvg):
        return algorithm
    got = algorithm.__name__ if inspect.isclass(algorithm) else type(algorithm).__name__
    raise TypeError(f"algorithm: expected a name, a class derived from pflcore.FedAvg or an instance of one, got {got}.")


def algorithm_of(algorithm: FedAvg | type[FedAvg] | str, **options: Any) -> FedAvg:
    """The algorithm itself: an instance as it is, anything else with `options`. ValueError or TypeError in one sentence."""
    if isinstance(algorithm, FedAvg) and not options:
        return algorithm
    cls = class_of(algorithm if isinstance(algorithm, str) else type(algorithm) if isinstance(algorithm, FedAvg) else algorithm)
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise TypeError(
            f"algorithm: {cls.__name__} cannot be made from {', '.join(options) or 'its defaults alone'} ({error}); give an instance."
        ) from None
    return cls(**options)


def name_of(algorithm: FedAvg | type[FedAvg] | str) -> str:
    """What an algorithm is called in records and tables: its name in `ALGORITHMS`, else that of its class."""
    if isinstance(algorithm, str) and ":" in algorithm:
        return algorithm.rpartition(":")[2]
    if isinstance(algorithm, str):
        return next((k for k in ALGORITHMS if _plain(k) == _plain(algorithm)), algorithm)
    cls = algorithm if inspect.isclass(algorithm) else type(algorithm)
    return next((k for k, v in ALGORITHMS.items() if v is cls), cls.__name__)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def imported(place: str, what: str) -> Any:
    """The thing at "package.module:name". ValueError or ImportError in one sentence that names the argument `what`."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"{what}: the module {module!r} has no {name!r}; check the name after the colon.") from None
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise ValueError(f"{what}: there is no module {missing!r} to import from here; check {place!r}, or change folder.") from None
        raise ImportError(f"{what}: {module!r} needs {missing!r}, which is not installed.") from None
    except Exception as error:
        raise ValueError(f"{what}: importing {module!r} failed with {type(error).__name__}: {error}") from error
