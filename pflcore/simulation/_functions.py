"""Digests of functions and objects, by which runs of other functions are told apart.

A function has the digest of its code with constants and names, of its defaults, of its
closure, and of the globals that it reads. A class has that of its members, and an
object that of its class and its values. So the digest is the same in every process, and
another one where a number in a closure, an argument of a `partial`, or an attribute
differs.

What an installed package or Python itself defines counts by its name, together with the
values that it was given. A value that no digest can take, such as an open file, counts
by the name of its class, and a module of one's own by its own; that is told.
"""

from __future__ import annotations

import dis
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pflcore.check import warn_caller

SCALARS = (type(None), bool, int, float, complex, str, bytes, type(...))
# Packages that count by name wherever they are installed.
KNOWN_PACKAGES = ("pflcore", "torch", "numpy")
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Members of a class that its other members, or its place in a file, decide.
DERIVED_MEMBERS = {
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__qualname__",
    "__slotnames__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}
# Tensors of a model that its run trains, or brings in its checkpoint.
STATE_OF_MODULES = ("_parameters", "_buffers")


class FunctionDigest(NamedTuple):
    """The digest of a value that may hold functions.

    Attributes:
        text: The digest.
        says_more: True where the value has code or values that its name does not tell.
        by_name: The names of the classes, and of modules of one's own, of which no
            digest could be taken.
    """

    text: str
    says_more: bool
    by_name: tuple[str, ...]

    def __str__(self) -> str:
        """The digest for a record, with what it could not take."""
        if not self.by_name:
            return self.text
        return f"{self.text}, {BY_NAME} {', '.join(self.by_name)}"


# Stands in a record's text where a part of a function counts by name alone.
BY_NAME = "by name:"


def function_digest(value: Any, *, without_state: bool = False) -> FunctionDigest:
    """The digest of a function, of an object, or of values that hold some.

    Args:
        value: The value.
        without_state: True leaves the parameters and buffers of modules out.
    """
    reader = _Reader(without_state)
    text = reader.digest(value).hex()[:12]
    return FunctionDigest(text, reader.says_more, tuple(sorted(reader.by_name)))


def describe_functions(
    module: nn.Module, loss_fn: Any, **options: Any
) -> dict[str, str]:
    """The digests of a run's functions and classes, by the names of their options.

    An option that its name or its numbers tell has none. Beside digests stands the
    version of Python, on which the code of a function depends.

    Args:
        module: The model, whose class counts, and not its weights.
        loss_fn: The loss.
        options: The options of the run. Those in a dataclass count one by one.
    """
    values = {}
    for name, value in options.items():
        # Its class is what an algorithm does, so it counts as a whole.
        if is_dataclass(value) and name != "algorithm":
            for field in fields(value):
                values[f"{name}.{field.name}"] = getattr(value, field.name)
        else:
            values[name] = value
    digests = {name: function_digest(value) for name, value in values.items()}
    digests["loss"] = function_digest(loss_fn)
    digests["model"] = function_digest(module, without_state=True)
    texts = {
        name: f"code {digest}" for name, digest in digests.items() if digest.says_more
    }
    if texts:
        major, minor = sys.version_info[:2]
        texts["python"] = f"{major}.{minor}"
    return texts


def warn_of_names(place: str, functions: Mapping[str, str]) -> None:
    """Warns where functions are compared by name alone, in whole or in part.

    Args:
        place: What compares them, for the sentence.
        functions: The result of `describe_functions`.
    """
    for name, text in functions.items():
        if BY_NAME in text:
            names = text.partition(BY_NAME)[2].strip()
            warn_caller(
                f"{place}: of {name}, what {names} hold was compared by name alone."
            )


class _Reader:
    """Takes the digest of one value, and notes what it meets.

    Attributes:
        without_state: True leaves the parameters and buffers of modules out.
        says_more: True where there is more than names.
        by_name: The names of what counts by its name alone.
    """

    def __init__(self, without_state: bool) -> None:
        self.without_state = without_state
        self.says_more = False
        self.by_name: set[str] = set()
        # The digest of each object by its id, None while it is taken. The object is
        # kept beside it, because a new one might else have its id.
        self._known: dict[int, tuple[bytes | None, Any]] = {}

    def digest(self, value: Any) -> bytes:
        """The digest of any value, with that of all that it holds."""
        if type(value) in SCALARS:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._known:
            return self._known[id(value)][0] or _hash("a part of itself")
        self._known[id(value)] = (None, value)
        try:
            digests = [self.digest(part) for part in self._parts(value)]
            if isinstance(value, set | frozenset):
                digests.sort()
            result = _hash(*digests)
        except Exception:
            # A user's object may raise anything where it is read.
            name = _qualified_name(type(value))
            self.by_name.add(name)
            self.says_more = True
            result = _hash("by name", name)
        self._known[id(value)] = (result, value)
        return result

    def _parts(self, value: Any) -> Iterable[Any]:
        """The values that decide a value."""
        parts: Iterable[Any]
        match value:
            case FunctionType():
                parts = self._function(value)
            case CodeType():
                count = value.co_argcount + value.co_kwonlyargcount
                names = (value.co_names, value.co_freevars, value.co_cellvars)
                arguments = (value.co_flags, value.co_varnames[:count])
                # Where errors are caught; before Python 3.11 it is in the code.
                handlers = getattr(value, "co_exceptiontable", b"")
                parts = (value.co_code, handlers, arguments, names, value.co_consts)
            case type():
                parts = self._class(value)
            case property():
                parts = (value.fget, value.fset, value.fdel)
            case staticmethod() | classmethod():
                parts = (type(value).__name__, value.__func__)
            case BuiltinFunctionType() if isinstance(value.__self__, ModuleType | None):
                parts = (f"{value.__module__}.{value.__qualname__}",)
            case BuiltinFunctionType() | MethodType():
                self.says_more = True
                function = getattr(value, "__func__", value.__name__)
                parts = (function, value.__self__)
            case Tensor():
                numbers = value.detach().cpu().contiguous().reshape(-1)
                content = numbers.view(torch.uint8).numpy().tobytes()
                parts = (str(value.dtype), [*value.shape], content)
            case np.ndarray():
                is_plain = not value.dtype.hasobject
                content = value.tobytes() if is_plain else value.tolist()
                parts = (str(value.dtype), [*value.shape], content)
            case torch.device():
                parts = ("device",)  # where something is computed is not what
            case Mapping():
                # By the keys' digests: another order may be that of this process alone.
                items = [(self.digest(k), self.digest(v)) for k, v in value.items()]
                parts = sorted(items)
            case list() | tuple() | set() | frozenset():
                parts = (type(value), *value)
            case ModuleType():
                parts = (value.__name__,)
                if not _is_installed(value.__name__, getattr(value, "__file__", None)):
                    self.by_name.add(value.__name__)
            case _:
                parts = self._object(value)
        return parts

    def _function(self, function: FunctionType) -> Iterator[Any]:
        """Of an installed function the name and the values that it was given."""
        code = function.__code__
        if _is_installed(function.__globals__.get("__name__", ""), code.co_filename):
            yield f"{function.__module__}.{function.__qualname__}"
        else:
            self.says_more = True
            yield code
            yield _globals_of(function)
        cells = function.__closure__ or ()
        self.says_more |= bool(cells)
        yield function.__defaults__, function.__kwdefaults__, vars(function)
        yield [cell.cell_contents for cell in cells]

    def _class(self, cls: type) -> Iterator[Any]:
        """Of an installed class the name, of another one the members."""
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if _is_installed(cls.__module__, file):
            yield _qualified_name(cls)
            return
        self.says_more = True
        yield cls.__bases__
        for name, member in vars(cls).items():
            is_slot = isinstance(member, MemberDescriptorType | GetSetDescriptorType)
            if name not in DERIVED_MEMBERS and not is_slot:
                yield name, member

    def _object(self, value: Any) -> Iterator[Any]:
        """The class, and the parts of which a copy is made, as `copy` does it."""
        yield type(value)
        if _is_frozen_dataclass(value):
            # The fields alone: other attributes are what it remembers.
            yield {
                field.name: getattr(value, field.name, None) for field in fields(value)
            }
            return
        if isinstance(value, nn.Module):
            yield self._of_module(value)
            return
        self.says_more |= callable(value)
        # `functools.lru_cache` would tell its name alone.
        yield getattr(value, "__wrapped__", None)
        reduced = value.__reduce_ex__(4)
        for part in [reduced] if isinstance(reduced, str) else reduced:
            yield [*part] if isinstance(part, Iterator) else part

    def _of_module(self, module: nn.Module) -> dict[str, Any]:
        """The attributes of a module, without its mode, which its last user has set."""
        # The layers of a model are in its description.
        self.says_more |= not self.without_state
        found = {}
        for name, value in vars(module).items():
            is_state = self.without_state and name in STATE_OF_MODULES
            if name.endswith("_hooks"):
                value = [*value.values()]  # the keys count the hooks of a process
            is_empty = isinstance(value, dict | list) and not value
            if name != "training" and not is_state and not is_empty:
                found[name] = value
        return found


def _is_frozen_dataclass(value: Any) -> bool:
    """True for an object like an algorithm, which its fields tell."""
    parameters = getattr(value, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _hash(*parts: str | bytes) -> bytes:
    """The digest of texts and bytes, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.digest()


def _qualified_name(cls: type) -> str:
    """The name of a class with that of its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_installed(module: str, file: str | None) -> bool:
    """True for what is defined by Python, or by an installed package.

    Args:
        module: The name of the module.
        file: The file of the code; None for a module without one.
    """
    package = module.partition(".")[0]
    if package in KNOWN_PACKAGES:
        return True
    if file is None or file.startswith("<frozen"):
        return package in sys.stdlib_module_names
    path = Path(file)
    return bool(PACKAGE_FOLDERS & {*path.parts}) or STANDARD_LIBRARY in path.parents


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a function, or one in it, reads."""
    codes = [function.__code__]
    names = set[str]()
    while codes:
        code = codes.pop()
        for instruction in dis.get_instructions(code):
            # `co_names` has the names of attributes, too.
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(instruction.argval)
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    # In a fixed order: what is read first may change the digest of what holds itself.
    known = sorted(names & function.__globals__.keys())
    return {name: function.__globals__[name] for name in known}
