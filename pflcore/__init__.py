"""pflcore: a compact algorithm core for personalized federated learning.

A name is imported when it is first used, so that `import pflcore.ops` imports nothing
but the ops. The names, and the module of each, are listed once, in `__init__.pyi`,
which type checkers and editors read, too.
"""

import ast
import importlib
from pathlib import Path
from typing import Any


def _read_stub() -> dict[str, str]:
    """The module of each name that `__init__.pyi` imports, by name."""
    stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                modules[alias.name] = str(node.module)
    return modules


_modules = _read_stub()
__all__ = sorted(_modules.keys() - {"__version__"})


def __getattr__(name: str) -> Any:
    """A public name or a submodule of pflcore, which is imported by this call.

    Raises AttributeError where there is neither.
    """
    submodule = f"{__name__}.{name}"
    try:
        if name in _modules:
            value = getattr(importlib.import_module(_modules[name]), name)
        elif name.startswith("_"):
            raise ModuleNotFoundError(name=submodule)
        else:
            value = importlib.import_module(submodule)
    except ModuleNotFoundError as error:
        if error.name != submodule:
            raise  # the submodule is there, but imports a module that is missing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value  # Python finds it without this function the next time
    return value


def __dir__() -> list[str]:
    """The names of the package, with those that are not imported yet."""
    return sorted({*globals(), *_modules})
