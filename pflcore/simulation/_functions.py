"""Digests of functions and objects, by which runs of other functions are told apart.

A function has the digest of its code with constants and names, of its defaults, of its
closure, and of the globals that it reads. A class has that of its members, and an
object that of its class and its values. So the digest is the same in every process, and
another one where a number in a closure, an argument of a `partial`, or an attribute
differs.

What an installed package or Python itself defines counts by its name, together with the
values that it was given. A value that no digest can take, such as an open file, counts
by the name of its class.
"""

from __future__ import annotations

import dis
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
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
        by_name: The names of the classes of which no digest could be taken.
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
        by_name: The names of the classes of which no digest could be taken.
    """

    def __init__(self, without_state: bool) -> None:
        # Pairs (types, method that reads a value of them); the first one counts.
        self._kinds: list[tuple[Any, Callable[[Any], Iterator[str | bytes]]]] = [
            (CodeType, self._code),
            (FunctionType, self._function),
            (MethodType, self._method),
            (BuiltinFunctionType, self._builtin),
            (type, self._class),
            (ModuleType, self._module),
            (CellType, self._cell),
            (property, self._property),
            ((staticmethod, classmethod), self._wrapper),
            (Tensor, self._tensor),
            (np.ndarray, self._array),
            (torch.device, self._device),
            (nn.Module, self._layer),
            (Mapping, self._mapping),
            ((set, frozenset), self._set),
            ((list, tuple), self._sequence),
        ]
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
            result = _hash(*self._parts(value))
        except Exception:
            # A user's object may raise anything where it is read.
            name = _qualified_name(type(value))
            self.by_name.add(name)
            self.says_more = True
            result = _hash("by name", name)
        self._known[id(value)] = (result, value)
        return result

    def _parts(self, value: Any) -> Iterator[str | bytes]:
        """The parts of a value that its digest takes, in a fixed order."""
        for kind, read in self._kinds:
            if isinstance(value, kind):
                yield from read(value)
                return
        if _is_frozen_dataclass(value):
            yield from self._options(value)
        else:
            yield from self._object(value)

    # code ---------------------------------------------------------------------
    def _code(self, code: CodeType) -> Iterator[str | bytes]:
        yield "code"
        yield code.co_code
        yield getattr(code, "co_exceptiontable", b"")
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        yield repr((counts, code.co_flags, arguments))
        yield repr((code.co_names, code.co_freevars, code.co_cellvars))
        for constant in code.co_consts:
            yield self.digest(constant)

    def _function(self, function: Any) -> Iterator[str | bytes]:
        yield "function"
        code = function.__code__
        if _is_installed(function.__globals__.get("__name__", ""), code.co_filename):
            yield f"{function.__module__}.{function.__qualname__}"
        else:
            self.says_more = True
            yield self.digest(code)
            yield self.digest(_globals_of(function))
        values = (function.__defaults__, function.__kwdefaults__, vars(function))
        cells = function.__closure__ or ()
        self.says_more |= bool(cells)
        yield self.digest(values)
        yield self.digest(cells)

    def _method(self, method: MethodType) -> Iterator[str | bytes]:
        yield "method"
        self.says_more = True
        yield self.digest(method.__func__)
        yield self.digest(method.__self__)

    def _builtin(self, function: Any) -> Iterator[str | bytes]:
        yield "builtin"
        yield f"{function.__module__}.{function.__qualname__}"
        owner = function.__self__
        if owner is not None and not isinstance(owner, ModuleType):
            self.says_more = True
            yield self.digest(owner)

    def _class(self, cls: type) -> Iterator[str | bytes]:
        yield "class"
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if _is_installed(cls.__module__, file):
            yield _qualified_name(cls)
            return
        self.says_more = True
        for base in cls.__bases__:
            yield self.digest(base)
        for name, member in sorted(vars(cls).items()):
            is_slot = isinstance(member, MemberDescriptorType | GetSetDescriptorType)
            if name not in DERIVED_MEMBERS and not is_slot:
                yield name
                yield self.digest(member)

    def _property(self, member: property) -> Iterator[str | bytes]:
        yield "property"
        yield self.digest((member.fget, member.fset, member.fdel))

    def _wrapper(self, member: Any) -> Iterator[str | bytes]:
        yield type(member).__name__
        yield self.digest(member.__func__)

    def _cell(self, cell: CellType) -> Iterator[str | bytes]:
        yield "cell"
        try:
            content = cell.cell_contents
        except ValueError:  # nothing was assigned yet
            return
        yield self.digest(content)

    def _module(self, module: ModuleType) -> Iterator[str | bytes]:
        yield "module"
        yield module.__name__

    # values -------------------------------------------------------------------
    def _tensor(self, tensor: Tensor) -> Iterator[str | bytes]:
        numbers = tensor.detach().cpu().contiguous().reshape(-1)
        yield f"tensor {tensor.dtype} {list(tensor.shape)}"
        yield numbers.view(torch.uint8).numpy().tobytes()

    def _array(self, array: Any) -> Iterator[str | bytes]:
        yield f"array {array.dtype} {array.shape}"
        yield self.digest(array.tolist()) if array.dtype.hasobject else array.tobytes()

    def _device(self, _: torch.device) -> Iterator[str | bytes]:
        yield "device"  # where something is computed is not what

    def _mapping(self, mapping: Mapping[Any, Any]) -> Iterator[str | bytes]:
        yield "mapping"
        items = [
            (self.digest(key), self.digest(value)) for key, value in mapping.items()
        ]
        for key, value in sorted(items):
            yield key
            yield value

    def _set(self, values: Any) -> Iterator[str | bytes]:
        yield "set"
        yield from sorted(self.digest(value) for value in values)

    def _sequence(self, values: Any) -> Iterator[str | bytes]:
        yield "sequence"
        yield self.digest(type(values))
        for value in values:
            yield self.digest(value)

    # objects ------------------------------------------------------------------
    def _options(self, value: Any) -> Iterator[str | bytes]:
        """The fields alone: other attributes are what it remembers."""
        yield "options"
        yield self.digest(type(value))
        for field in fields(value):
            yield field.name
            yield self.digest(getattr(value, field.name, None))

    def _layer(self, layer: nn.Module) -> Iterator[str | bytes]:
        yield "layer"
        # The layers of a model are in its description.
        self.says_more |= not self.without_state
        yield self.digest(type(layer))
        for name, value in sorted(vars(layer).items()):
            is_state = self.without_state and name in STATE_OF_MODULES
            # Whoever used a module last has set its mode.
            if is_state or name == "training":
                continue
            if isinstance(value, dict) and name.endswith("_hooks"):
                value = list(value.values())  # the keys count the hooks of a process
            if not isinstance(value, dict | list) or value:
                yield name
                yield self.digest(value)

    def _object(self, value: Any) -> Iterator[str | bytes]:
        """The parts of which a copy of an object is made, as `copy` does it."""
        self.says_more |= callable(value)
        yield "object"
        yield self.digest(type(value))
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:  # `functools.lru_cache` would tell its name alone
            yield self.digest(wrapped)
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):
            yield parts
            return
        if isinstance(value, partial):
            yield self.digest((value.func, value.args, value.keywords))
        for part in parts:
            is_items = isinstance(part, Iterator)
            yield self.digest(list(part) if is_items else part)


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


def _globals_of(function: Any) -> dict[str, Any]:
    """The globals that a function reads, and what it reads of a user's modules."""
    names = set[str]()
    attributes = set[str]()
    for code in _codes_in(function.__code__):
        attributes |= {*code.co_names}
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(instruction.argval)
    found = {}
    # In a fixed order: what is read first may change the digest of what holds itself.
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        found[name] = value
        if isinstance(value, ModuleType):
            found |= _attributes_of(value, attributes)
    return found


def _attributes_of(module: ModuleType, names: set[str]) -> dict[str, Any]:
    """The values of these names in a user's module; {} for an installed one."""
    if _is_installed(module.__name__, getattr(module, "__file__", None)):
        return {}
    members = vars(module)
    known = sorted(names & members.keys())
    return {f"{module.__name__}.{name}": members[name] for name in known}


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
