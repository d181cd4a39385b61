"""Writes the lists of docs/api.md: each public module's names, with their first lines.

`python docs/make_api.py` replaces the lists, and leaves the text before them. A test
compares the page with the code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pflcore
from pflcore.algorithms import ALGORITHMS

PAGE = Path(__file__).with_name("api.md")
SECTION = re.compile(r"^## `(pflcore[\w.]*)`$", re.MULTILINE)
# A module whose names are read only where its framework is installed.
FRAMEWORKS = {"pflcore.interop.flower": "flwr"}
REFERENCES = "pflcore.ops.reference"
# docs/algorithms.md says of each method what it is.
METHODS = {cls: name for name, cls in ALGORITHMS.items()}
# Types and tables have no docstring.
TEXTS = {
    "ALGORITHMS": "The class of each algorithm, by its name.",
    "CHECKS": "The checks by name, each a function of a `Case`.",
    "Changes": "Changes of the server's state: a new tensor or a `RowUpdate` by name.",
    "GradientFn": "The function from rows [S, P] to gradients in `Clients.each_batch`.",
    "NonNegativeFloat": "A finite number, at least 0.",
    "NonNegativeInt": "A whole number, at least 0.",
    "Payload": "The downloads of a cohort: a tensor [S, ...] or `SharedRows` by name.",
    "PositiveFloat": "A finite number above 0.",
    "PositiveInt": "A whole number, at least 1.",
    "Tensors": "Tensors by name: a state, or uploads [S, ...].",
    "TrainResult": "What `train` returns: client state, uploads and a `Fit`.",
    "UnitFloat": "A number from 0 to 1.",
    "Uploads": "What a server expects of one client: a tensor or a `Claim` by name.",
    "UpdateResult": "What `update` returns: `Changes`, and `MixingWeights` or None.",
}


def page(text: str) -> str:
    """The text of the page with its lists made anew."""
    head, *parts = SECTION.split(text)
    sections = [head]
    for module, body in zip(parts[::2], parts[1::2], strict=True):
        introduction = re.split(r"^- `", body, maxsplit=1, flags=re.MULTILINE)[0]
        if can_import(module):
            body = f"{introduction.rstrip()}\n\n{names_of(module)}\n\n"
        sections.append(f"## `{module}`{body}")
    return "".join(sections).rstrip() + "\n"


def can_import(module: str) -> bool:
    """True where the framework that a module needs is installed."""
    framework = FRAMEWORKS.get(module)
    return framework is None or importlib.util.find_spec(framework) is not None


def names_of(module: str) -> str:
    """A list of a module's public names."""
    names = importlib.import_module(module).__all__
    return "\n".join(f"- `{n}`: {first_line(module, n)}" for n in sorted(names))


def first_line(module: str, name: str) -> str:
    """The first line of the docstring of a public name."""
    if name in TEXTS:
        return TEXTS[name]
    thing = getattr(importlib.import_module(module), name)
    if module != "pflcore" and getattr(pflcore, name, None) is thing:
        return "as in `pflcore`."
    if thing in METHODS:
        return f"`{METHODS[thing]}`"
    if module == REFERENCES:
        return "by torch."
    return (inspect.getdoc(thing) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
