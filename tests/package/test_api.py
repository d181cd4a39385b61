"""docs/api.md is the border: what it lists is what the public modules give, and all of it says what
it takes and gives."""

import importlib
import importlib.util
import inspect
import re

import pytest
import torch
from places import ROOT

from pflcore import Algorithm
from pflcore.algorithms import ALGORITHMS

LIST = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = {
    m[1]: m[2] for m in re.finditer(r"^## `(pflcore[\w.]*)`\n(.*?)(?=^## |\Z)", LIST, re.M | re.S)
}
EXTRAS = {"pflcore.interop.flower": "flwr"}  # what is looked at only where its framework is
LISTED = {
    module: re.findall(r"^- `(\w+)`: \S.*", text, re.M)
    for module, text in SECTIONS.items()
    if module not in EXTRAS or importlib.util.find_spec(EXTRAS[module])
}


def is_ours(thing):
    return str(getattr(thing, "__module__", "")).startswith("pflcore")


def functions(name, thing):
    """A function, or a class's public methods and properties, wherever in pflcore they were
    written."""
    if inspect.isfunction(thing):
        yield name, thing
    elif inspect.isclass(thing):
        for key in dir(thing):
            member = inspect.getattr_static(thing, key)
            member = (
                member.fget
                if isinstance(member, property)
                else getattr(member, "func", getattr(member, "__func__", member))
            )
            if (
                (not key.startswith("_") or key in ("__call__", "__getitem__"))
                and inspect.isfunction(member)
                and is_ours(member)
            ):
                yield f"{name}.{key}", member


PUBLIC = {
    (module, name): getattr(importlib.import_module(module), name)
    for module, names in LISTED.items()
    for name in names
}
PUBLIC |= {("pflcore.algorithms", cls.__name__): cls for cls in ALGORITHMS.values()}


@pytest.mark.parametrize("module", LISTED)
def test_the_list_is_what_a_module_gives(module):
    assert sorted(LISTED[module]) == sorted(importlib.import_module(module).__all__), (
        f"docs/api.md, section {module}"
    )
    assert len(LISTED[module]) == len(set(LISTED[module]))


def test_the_list_is_long_enough_to_be_one():
    assert len(LISTED) >= 9 and len(LISTED["pflcore"]) > 20


@pytest.mark.parametrize("module", LISTED)
def test_what_is_public_says_what_it_is(module):
    silent = []
    for (where, name), thing in PUBLIC.items():
        if where != module or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        # by dataclass or NamedTuple
        generated = inspect.isclass(thing) and (thing.__doc__ or "").startswith(
            f"{thing.__name__}("
        )
        silent += [name] if not thing.__doc__ or generated else []
        for full, function in functions(name, thing):
            inherited = getattr(inspect.getmodule(function), "__name__", "") != getattr(
                thing, "__module__", ""
            )
            # once, by the protocol
            told = (
                inspect.isclass(thing) and issubclass(thing, Algorithm) and thing is not Algorithm
            )
            if not inherited and not told and not inspect.getdoc(function):
                silent.append(full)
    assert silent == [], "without a docstring"


@pytest.mark.parametrize("module", LISTED)
def test_what_is_public_is_annotated(module):
    bare = []
    for (where, name), thing in PUBLIC.items():
        if where == module:
            for full, function in functions(name, thing):
                signature = inspect.signature(function)
                bare += [
                    f"{full}({p})"
                    for p, v in signature.parameters.items()
                    if p not in ("self", "cls") and v.annotation is v.empty
                ]
                bare += [f"{full} ->"] if signature.return_annotation is signature.empty else []
    assert bare == [], "without an annotation"


def test_constants_are_tables():
    tables = [thing for thing in PUBLIC.values() if not (inspect.isclass(thing) or callable(thing))]
    assert tables and all(isinstance(t, dict) and not isinstance(t, torch.Tensor) for t in tables)


@pytest.mark.parametrize("module", LISTED)
def test_what_takes_or_gives_a_tensor_says_its_shape(module):
    """In the docstring, or in a comment beside the argument: "[N, P]"."""
    silent = []
    for (where, name), thing in PUBLIC.items():
        for full, function in functions(name, thing) if where == module else ():
            signature = inspect.signature(function)
            hints = [p.annotation for p in signature.parameters.values()]
            if re.search(r"\bTensor\b", str([*hints, signature.return_annotation])):
                head = inspect.getsource(inspect.unwrap(function)).split('"""')[0]
                said = [inspect.getdoc(function) or "", *re.findall(r"#.*", head)]
                if not re.search(r"\[[\w .,:+*-]*\]", " ".join(said)):
                    silent.append(full)
    assert silent == [], "without a shape"
