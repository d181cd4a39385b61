"""Values of any kind as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_json(value: Any) -> Any:  # noqa: PLR0911 (a kind of value each)
    """A copy of `value` that JSON can represent.

    Dataclasses become dicts, or their texts where they have one. Tensors and tuples
    become lists, and numbers that are not finite become None. Functions and classes
    become their names, and any other value becomes its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        if type(value).__str__ is not object.__str__:
            return str(value)
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [to_json(v) for v in value]
    return getattr(value, "__name__", None) or text_without_address(value)


def text_without_address(value: Any) -> str:
    """The text of a value without an address, which another process would not have."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
