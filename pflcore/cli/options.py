"""Command-line options from frozen dataclasses: names, types and defaults from the fields, help
from the comments beside them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union


@dataclass(frozen=True)
class Option:
    name: str  # as a Python identifier; `eval_every` is `--eval-every`
    type: Any
    default: Any
    help: str = ""


@dataclass(frozen=True)
class Group:
    """Options that stand under one heading of `--help`. `prefix` writes them `--TITLE.NAME`."""

    title: str
    about: str
    options: Sequence[Option]
    prefix: bool = False


def simple(kind: Any) -> bool:
    """Whether a value of this type can be typed on a command line."""
    if kind in (int, float, bool, str, Path, type(None)):
        return True
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return True
    if origin in (Union, types.UnionType):
        return all(map(simple, inner))
    return origin is tuple and all(i is Ellipsis or simple(i) for i in inner)


def comments(cls: type) -> dict[str, str]:
    """The comment beside each field of a class, or on the lines above it, by field name; nothing
    where the source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        body = ast.parse(source).body[0]
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError):
        return {}
    said = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end, first = node.end_lineno or node.lineno, node.lineno
            while first - 1 in said:
                first -= 1
            above = " ".join(said.pop(line) for line in range(first, node.lineno))
            found[node.target.id] = said.pop(end, above)
    return {name: text for name, text in found.items() if text}


def of_dataclass(
    cls: type, rename: Mapping[str, str] | None = None
) -> tuple[list[Option], list[str]]:
    """The fields of a dataclass as options, and the names of those that a command line cannot
    express (functions, for instance)."""
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            helps |= comments(base)
    hints, options, rest = typing.get_type_hints(cls), [], []
    for f in dataclasses.fields(cls):
        if not f.init:
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if not simple(hints[f.name]) or default is dataclasses.MISSING:
            rest.append(f.name)
        else:
            options.append(
                Option(
                    (rename or {}).get(f.name, f.name),
                    hints[f.name],
                    default,
                    helps.get(f.name, ""),
                )
            )
    return options, rest


def options_of(
    cls: type, rename: Mapping[str, str] | None = None, choices: Mapping[str, str] | None = None
) -> tuple[str, list[Option]]:
    """A dataclass's docstring, with the fields that only Python can set, and its options; `choices`
    adds to their help."""
    options, rest = of_dataclass(cls, rename)
    options = [
        dataclasses.replace(o, help=f"{o.help}: {choices[o.name]}")
        if choices and o.name in choices
        else o
        for o in options
    ]
    return (inspect.getdoc(cls) or "") + (
        f"\nFrom Python only: {', '.join(rest)}." if rest else ""
    ), options


def of_function(function: Callable[..., Any], defaults: Mapping[str, Any]) -> list[Option]:
    """Options for these arguments of a function. What one word cannot say (a list, a word or a
    number) is None or several words."""
    try:
        # a partial's own function
        hints = typing.get_type_hints(getattr(function, "func", function))
    except (TypeError, NameError):
        hints = {}
    options = []
    for name, default in defaults.items():
        kind = hints.get(name, type(default))
        if simple(kind) and kind is not type(None):
            options.append(Option(name, kind, default))
        else:
            options.append(
                Option(
                    name,
                    tuple[str, ...] | None,
                    None,
                    "" if default is None else f"default: {words_of(default)}",
                )
            )
    return options


def words_of(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def of_words(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What was said for the options of `of_function`: words as numbers where they are, several as a
    list; what was not said is left out."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, tuple):
            said = [_number(v) for v in value]
            out[name] = (
                said if len(said) != 1 or isinstance(defaults[name], list | tuple) else said[0]
            )
        elif value is not None:
            out[name] = value
    return out


def _number(word: str) -> int | float | str:
    try:
        return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
    except ValueError:
        return word


def identifier(title: str) -> str:
    return re.sub(r"\W", "_", title)


def parse(
    prog: str, about: str, groups: Sequence[Group], argv: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The values of all options by group title. `--help` and a malformed option end the program
    (SystemExit 0 and 2)."""
    try:
        import tyro
    except ImportError:
        raise ImportError(
            f"{prog} needs tyro, which is not installed; get it with: pip install 'pflcore[cli]'."
        ) from None
    fields: list[tuple[str, Any, Any]] = []
    for group in groups:
        inner = [
            (
                o.name,
                Annotated[o.type, tyro.conf.arg(help=o.help or None)],
                field(default=o.default),
            )
            for o in group.options
        ]
        cls: Callable[[], Any] = dataclasses.make_dataclass(
            identifier(group.title), inner, frozen=True
        )
        kind: Any = Annotated[cls, tyro.conf.arg(name=group.title, help=group.about)]
        if not group.prefix:
            kind = Annotated[kind, tyro.conf.OmitArgPrefixes]
        fields.append((identifier(group.title), kind, field(default_factory=cls)))
    whole = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    values: Any = tyro.cli(whole, prog=prog, description=about, args=list(argv))
    return {
        g.title: {o.name: getattr(getattr(values, identifier(g.title)), o.name) for o in g.options}
        for g in groups
    }


def peek(argv: Sequence[str], name: str) -> list[str]:
    """The words given to option `name` in `argv`, before anything is parsed: what other options
    exist depends on some of them."""
    words: list[str] = []
    taking = False
    for word in argv:
        if word == name:
            taking, words = True, []
        elif word.startswith(name + "="):
            taking, words = False, [word[len(name) + 1 :]]
        elif word.startswith("--"):
            taking = False
        elif taking:
            words.append(word)
    return words
