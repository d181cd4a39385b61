"""Values of any kind as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any


def to_json(value: Any) -> Any:  # noqa: PLR0911 (a kind of value each)
    """A copy of `value` that JSON can represent.

    Dataclasses become dicts, tensors and tuples become lists, and numbers that are not
    finite become None. Functions and classes become their names, and any other value
    becomes its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [to_json(v) for v in value]
    # The address of an object differs between two programs that play one run.
    text = re.sub(" at 0x[0-9a-f]+", "", str(value))
    return getattr(value, "__name__", None) or text
