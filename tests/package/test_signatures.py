"""Signatures and docstrings as help() and an editor show them."""

import ast
import importlib
import inspect

import pytest
from places import ROOT, listed

QUESTION_WORDS = {
    "What",
    "Who",
    "Which",
    "Whose",
    "Why",
    "Where",
    "How",
    "As",
    "Whether",
}
PACKAGE = ROOT / "pflcore"
FILES = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}


def public_callables():
    """The classes and functions that docs/api.md lists, and methods of the classes."""
    for module, name in filter(all, listed()):
        try:
            thing = getattr(importlib.import_module(module), name)
        except ImportError:  # of a framework that is not installed
            continue
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield f"{module}.{name}", thing
        if inspect.isclass(thing):
            methods = inspect.getmembers(thing, inspect.isroutine)
            yield from ((f"{name}.{k}", m) for k, m in methods if k[0] != "_")


def has_plain_signature(thing):
    try:
        return "Annotated[" not in str(inspect.signature(thing))
    except (TypeError, ValueError):  # a class or a function of C
        return True


def is_good_first_line(docstring):
    first, *others = docstring.splitlines()
    is_alone = not others or not others[0].strip()
    is_question = first.split()[0].strip(",") in QUESTION_WORDS
    return is_alone and not is_question and len(first) <= 88


def test_public_signatures_have_no_annotated_types():
    long = {
        f"{thing.__module__}: {name}"
        for name, thing in public_callables()
        if not has_plain_signature(thing)
    }

    assert not long


@pytest.mark.parametrize("name", sorted(FILES))
def test_docstrings_begin_with_one_plain_line(name):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    docstrings = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)]

    others = [text for text in docstrings if text and not is_good_first_line(text)]

    assert others == []
