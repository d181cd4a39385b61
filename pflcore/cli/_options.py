"""The options of a command, which tyro makes from dataclasses and functions.

The help of an option is the comment at its field, or its entry in "Args:" of the
docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

from pflcore.algorithms import Algorithm, fixed_options
from pflcore.check import import_optional

POSITIONAL = {"positional": True}  # the metadata of a field


def parse(
    prog: str,
    about: str,
    groups: Mapping[str, type],
    argv: Sequence[str],
    prefixed: Collection[str] = (),
    complete: bool = True,
    reserved: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """The values of all options, by group, which are not checked yet.

    `--help` and a malformed option end the program, by SystemExit 0 and 2.

    Args:
        prog: The command, as the help shows it.
        about: The text at the head of the help.
        groups: The dataclass of each group's options.
        prefixed: The groups whose options are written `--GROUP.OPTION`. In the others
            an option is written `--GROUP-OPTION` where an earlier group has its name.
        argv: The words of the command line.
        complete: True where all groups are given. If False, options that no group has
            are ignored: there may be more groups, which depend on the values of these.
        reserved: Names that only the first group may use without the name of the group.
    """
    tyro = import_optional("tyro")
    taken = set[str]()  # options that are written without the name of their group
    types = dict[str, Any]()
    for title, cls in groups.items():
        if title in prefixed:
            types[title] = _group_type(title, cls, taken=())
            continue
        types[title] = tyro.conf.OmitArgPrefixes[_group_type(title, cls, taken)]
        taken |= {f.name for f in option_fields(cls)} | {*reserved}
    parsed = tyro.cli(
        make_dataclass("Options", types.items()),
        prog=prog,
        description=about,
        args=list(argv),
        config=(tyro.conf.SuppressFixed,),
        add_help=complete,
        return_unknown_args=not complete,
    )
    # Incomplete groups give a pair: the options, and the words that are unknown.
    options = parsed if complete else parsed[0]
    return {title: vars(values) for title, values in vars(options).items()}


def _group_type(title: str, cls: type, taken: Collection[str]) -> Any:
    """The annotated dataclass from which tyro makes a group of options.

    Args:
        title: The name of the group.
        cls: The dataclass of its options.
        taken: The names that options of earlier groups have. An option with one of
            these gets the group's name before its own.
    """
    arg = import_optional("tyro").conf.arg
    hints = get_type_hints(cls)
    comments = field_comments(cls)
    options: list[tuple[str, Any, Any]] = []
    for f in option_fields(cls):
        name = f"{title}-{f.name}" if f.name in taken else None
        details = arg(name=name, help=comments.get(f.name))
        hint: Any = Annotated[hints[f.name], details]
        if f.metadata == POSITIONAL:
            hint = import_optional("tyro").conf.Positional[hint]
        options.append((f.name, hint, copy(f)))
    about = (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0]
    return Annotated[make_dataclass(title, options), arg(name=title, help=about)]


def option_fields(cls: type) -> list[Field[Any]]:
    """The fields of a dataclass that are options of the command line.

    An algorithm's target is an option of the run, and a field with a single choice is
    no option. A field with the metadata POSITIONAL is a word without "--".
    """
    excluded = set[str]()
    if issubclass(cls, Algorithm):
        excluded = {"target", *fixed_options(cls)}
    return [f for f in fields(cls) if f.init and f.name not in excluded]


def field_comments(cls: type) -> dict[str, str]:
    """The help of each field of a dataclass, as tyro finds it.

    It is the comment at the field, or the entry in "Args:" of the docstring. Base
    classes are searched, too.
    """
    tyro = import_optional("tyro")
    constructors = tyro.constructors
    comments = dict[str, str]()
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        info = constructors.StructTypeInfo.make(base, tyro.MISSING_NONPROP, False)  # noqa: FBT003 (tyro's)
        spec = constructors.ConstructorRegistry.get_struct_spec(info)
        for f in spec.fields:
            text = f.helptext()
            if text:
                comments[f.name] = text
    return comments


def dataclass_of_arguments(
    function: Callable[..., Any], defaults: Mapping[str, Any]
) -> type:
    """A dataclass whose fields are the arguments `defaults` of a function."""
    function = getattr(function, "func", function)  # of a partial, its function
    hints = get_type_hints(function)
    arguments = []
    for name, default in defaults.items():
        hint = hints.get(name, type(default))
        arguments.append((name, hint, field(default=default)))
    namespace = {"__doc__": function.__doc__}
    return make_dataclass(function.__name__, arguments, namespace=namespace)
