"""What runs leave: records, tables, pictures."""

import importlib
from typing import Any


def optional(module: str, package: str) -> Any:
    """A module that only this needs. ImportError in one sentence where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ImportError(
            f"This needs {name}, which is not installed; get it with: pip install {package}."
        ) from None
