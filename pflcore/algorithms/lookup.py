"""An algorithm as users name it: an instance, a class, a name of `ALGORITHMS`, or "package.module:Class" for one of their own."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg


def class_of(algorithm: str | type[FedAvg]) -> type[FedAvg]:
    """The class that a name, or "package.module:Class", stands for. ValueError or TypeError in one sentence.

    >>> class_of("ditto").__name__
    'Ditto'
    """
    if isinstance(algorithm, str):
        if algorithm in ALGORITHMS:
            return ALGORITHMS[algorithm]
        if ":" not in algorithm:
            raise ValueError(
                f"algorithm: expected one of {', '.join(ALGORITHMS)}, or 'package.module:Class' for one of your own, got {algorithm!r}."
            )
        return _imported(algorithm)
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
    if isinstance(algorithm, str):
        return algorithm.rpartition(":")[2]
    cls = algorithm if inspect.isclass(algorithm) else type(algorithm)
    return next((k for k, v in ALGORITHMS.items() if v is cls), cls.__name__)


def _imported(place: str) -> type[FedAvg]:
    """The class at "package.module:Class"."""
    module, _, name = place.partition(":")
    try:
        thing = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"algorithm: the module {module!r} has no {name!r}; check the name after the colon.") from None
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise ValueError(f"algorithm: there is no module {missing!r} to import from here; check {place!r}, or change folder.") from None
        raise ImportError(f"algorithm: {module!r} needs {missing!r}, which is not installed.") from None
    except Exception as error:
        raise ValueError(f"algorithm: importing {module!r} failed with {type(error).__name__}: {error}") from error
    if not (inspect.isclass(thing) and issubclass(thing, FedAvg)):
        raise TypeError(f"algorithm: expected {place!r} to be a class derived from pflcore.FedAvg, got {type(thing).__name__}.")
    return thing
