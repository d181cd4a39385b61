"""docs/api.md lists the names of the public modules, and all have docstrings."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import runpy

import pytest
from places import ROOT, listed

import pflcore
from pflcore import Algorithm
from pflcore.algorithms import ALGORITHMS

# Modules that the tests read only where their framework is installed.
EXTRAS = {"pflcore.interop.flower": "flwr"}
LISTED = {}
for module, name in listed():
    if module not in EXTRAS or importlib.util.find_spec(EXTRAS[module]):
        LISTED.setdefault(module, []).extend([name] if name else [])


def is_ours(thing):
    return str(getattr(thing, "__module__", "")).startswith("pflcore")


def functions(name, thing):
    """A function, or a class's public methods and properties, inherited ones too."""
    if inspect.isfunction(thing):
        yield name, thing
        return
    for key in dir(thing):
        member = inspect.getattr_static(thing, key)
        for wrapped in ("fget", "func", "__func__"):
            member = getattr(member, wrapped, member)
        public = not key.startswith("_") or key in ("__call__", "__getitem__")
        if public and inspect.isfunction(member) and is_ours(member):
            yield f"{name}.{key}", member


PUBLIC = {
    (module, name): getattr(importlib.import_module(module), name)
    for module, names in LISTED.items()
    for name in names
}
PUBLIC |= {("pflcore.algorithms", cls.__name__): cls for cls in ALGORITHMS.values()}


def test_the_lists_are_made_from_the_code():
    page = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]
    text = (ROOT / "docs" / "api.md").read_text()
    assert text == page(text), "run: python docs/make_api.py"


@pytest.mark.parametrize("module", LISTED)
def test_the_list_is_what_a_module_gives(module):
    assert sorted(LISTED[module]) == sorted(importlib.import_module(module).__all__)


def test_every_algorithms_class_is_public_and_listed():
    classes = {cls.__name__ for cls in ALGORITHMS.values()}
    assert sorted(classes - set(pflcore.algorithms.__all__)) == []
    assert sorted(classes - set(LISTED["pflcore.algorithms"])) == []


def test_what_has_no_underscore_is_listed():
    modules = {m.name for m in pkgutil.walk_packages(pflcore.__path__, "pflcore.")}
    public = {m for m in modules if not re.search(r"\._|\.lib", m)} | {"pflcore"}
    assert {module for module, _ in listed()} == public


def silent(thing, full, function):
    """True where a docstring is missing.

    An algorithm's hooks are described by the protocol, inherited functions by their
    own class.
    """
    inherited = getattr(inspect.getmodule(function), "__name__", "") != thing.__module__
    hook = (
        inspect.isclass(thing)
        and issubclass(thing, Algorithm)
        and thing is not Algorithm
    )
    return not (inherited or hook or inspect.getdoc(function))


def shapeless(function):
    """True for a tensor whose shape no docstring or comment states.

    A shape has the form "[N, P]".
    """
    head = inspect.getsource(inspect.unwrap(function)).split('"""')[0]
    if not re.search(r"\bTensor\b", head):
        return False
    texts = [inspect.getdoc(function) or "", *re.findall(r"#.*", head)]
    return not re.search(r"\[[\w .,:+*-]*\]", " ".join(texts))


@pytest.mark.parametrize("module", LISTED)
def test_what_is_public_is_annotated(module):
    """Everything public has a docstring, annotations and the shapes of its tensors."""
    missing = []
    for (owner, name), thing in PUBLIC.items():
        if owner != module or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        doc = thing.__doc__ or ""
        # Python itself writes "Name(field, ...)" for a dataclass without a docstring.
        generated = inspect.isclass(thing) and doc.startswith(f"{name}(")
        if generated or not doc:
            missing.append(f"{name}: docstring")
        for full, function in functions(name, thing):
            signature = inspect.signature(function)
            hints = {k: p.annotation for k, p in signature.parameters.items()}
            hints |= {"->": signature.return_annotation}
            bare = [k for k, v in hints.items() if v is signature.empty]
            missing += [f"{full}: {k}" for k in bare if k not in ("self", "cls")]
            if silent(thing, full, function):
                missing.append(f"{full}: docstring")
            if shapeless(function):
                missing.append(f"{full}: shape")
    assert missing == []
