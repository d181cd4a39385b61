"""pflcore: a compact algorithm core for personalized federated learning.

A name is loaded when it is first asked for, so that `import pflcore.ops` is the ops
alone. Which names there are, and where each comes from, is written once, in
`__init__.pyi`, which type checkers and editors read, too.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

_stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_homes = {
    alias.name: str(node.module)
    for node in _stub.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_homes.keys() - {"__version__"})


def __getattr__(name: str) -> Any:
    room = f"{__name__}.{name}"
    try:
        if name in _homes:
            value = getattr(importlib.import_module(_homes[name]), name)
        elif name.startswith("_"):
            raise ModuleNotFoundError(name=room)
        else:
            value = importlib.import_module(room)
    except ModuleNotFoundError as error:
        if error.name != room:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes})
