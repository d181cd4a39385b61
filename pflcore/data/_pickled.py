"""Arrays of numbers in a pickled dict, which is read without being unpickled.

PFLlib writes each client's samples as such a dict, {"x": ..., "y": ...}, in an npz
file. Unpickling calls whatever function a file names. Here the opcodes of the pickle
are walked through by a machine of our own, which knows dicts, lists, tuples, texts,
numbers, and arrays of numbers as numpy writes them. It calls nothing, and it stops at
everything else.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

NUMPY_MODULES = ("numpy", "numpy.core", "numpy._core")
# The functions and classes that numpy names in the pickle of an array.
NUMPY_NAMES = {
    f"{module}.{name}": name.rpartition(".")[2]
    for module in NUMPY_MODULES
    for name in ("ndarray", "dtype", "multiarray._reconstruct", "numeric._frombuffer")
}
NUMBER_KINDS = "fiub"
PUSHED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
MADE: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
LITERALS = (
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
)
MARK = object()


class _Name(str):
    """A function or class of numpy that a pickle names; it is never looked up."""


class _Type:
    """A dtype in the making: its code, and the byte order that follows."""

    def __init__(self, code: Any) -> None:
        self.code = str(code)
        self.order = "="

    def set_state(self, state: Any) -> None:
        self.order = {"<": "<", ">": ">"}.get(str(state[1]), "=")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of numbers; raises ValueError for another one."""
        dtype = np.dtype(self.order + self.code)
        if dtype.kind not in NUMBER_KINDS:
            raise ValueError(f"arrays of numbers, got one of {dtype}")
        return dtype


class _Array:
    """An array in the making: values are None before its state is read."""

    def __init__(self) -> None:
        self.values: Any = None

    def set_state(self, state: Any) -> None:
        _, shape, dtype, by_columns, raw = state
        if dtype.code == "O8":  # a list of Python's objects
            self.values = list(raw)
            return
        order = "F" if by_columns else "C"
        self.values = _from_bytes(raw, dtype, shape, order)


def _from_bytes(raw: bytes, dtype: _Type, shape: Sequence[int], order: str) -> Any:
    """An array of numbers [shape] from its bytes."""
    if len(raw) != prod(shape) * dtype.numpy_dtype.itemsize:
        raise ValueError(f"the bytes of an array of shape {list(shape)}")
    flat = np.frombuffer(raw, dtype.numpy_dtype)
    return flat.reshape(shape, order="F" if order == "F" else "C")


def read_pickled_arrays(path: Path, member: str) -> dict[str, Any]:
    """The arrays of a pickled dict by name, from a member of an npz file.

    Raises ValueError where the member is no pickled dict of arrays of numbers.
    """
    with zipfile.ZipFile(path) as archive, archive.open(f"{member}.npy") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        read_header(file)
        raw = file.read()
    content = _walk(raw)
    if isinstance(content, _Array) and isinstance(content.values, list):
        content = content.values[0] if len(content.values) == 1 else None
    if not isinstance(content, dict):
        raise ValueError("one pickled dict")
    arrays = {}
    for name, value in content.items():
        arrays[str(name)] = value.values if isinstance(value, _Array) else value
    return arrays


def _walk(raw: bytes) -> Any:
    """The object that a pickle describes.

    Raises ValueError for an opcode or a name that arrays do not need.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(raw):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name in LITERALS:
            stack.append(argument)
        elif name in PUSHED:
            stack.append(PUSHED[name])
        elif name in MADE:
            stack.append(MADE[name]())
        else:
            _apply(name, argument, stack)
    raise ValueError("a whole pickle")


def _apply(name: str, argument: Any, stack: list[Any]) -> None:
    """Runs one opcode that puts parts of the stack together."""
    if name == "MARK":
        stack.append(MARK)
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "TUPLE":
        stack.append(tuple(_pop_to_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else _pop_to_mark(stack)
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop_to_mark(stack) if name == "SETITEMS" else _pop_two(stack)
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name == "GLOBAL":
        stack.append(_numpy_name(str(argument).replace(" ", ".")))
    elif name == "STACK_GLOBAL":
        stack.append(_numpy_name(".".join(map(str, _pop_two(stack)))))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_make(stack.pop(), arguments))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].set_state(state)
    else:
        raise ValueError(f"arrays of numbers, got the opcode {name}")


def _pop_two(stack: list[Any]) -> list[Any]:
    """Removes the last two values of the stack, and returns them in their order."""
    last = stack.pop()
    return [stack.pop(), last]


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    """Removes the values behind the last mark, and the mark, and returns the values."""
    items = []
    while stack[-1] is not MARK:
        items.append(stack.pop())
    stack.pop()
    return items[::-1]


def _numpy_name(name: str) -> _Name:
    """A name of numpy; raises ValueError for anything else, which a file could call."""
    if name not in NUMPY_NAMES:
        raise ValueError(f"arrays of numbers, got {name}")
    return _Name(NUMPY_NAMES[name])


def _make(function: Any, arguments: Sequence[Any]) -> Any:
    """The array or dtype for which a pickle names a function of numpy.

    Raises ValueError where it names another one.
    """
    if function == "_reconstruct":
        return _Array()
    if function == "dtype":
        return _Type(arguments[0])
    if function != "_frombuffer":
        raise ValueError(f"arrays of numbers, got a call of {function}")
    array = _Array()
    array.values = _from_bytes(*arguments)
    return array
