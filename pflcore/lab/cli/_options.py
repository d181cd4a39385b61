"""The options of a command, which tyro makes from dataclasses and functions.

The help of an option is the comment at its field, or its entry in "Args:" of the
docstring.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from itertools import takewhile
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pflcore.algorithms import Algorithm, class_of, fixed_options
from pflcore.check import (
    OnCommandLine,
    Words,
    expectation_of,
    import_optional,
    reject,
    validated,
)
from pflcore.robust import Mean

Facts = Mapping[str, Any]
POSITIONAL = {"positional": True}  # the metadata of a field


class HelpGroup(NamedTuple):
    """Options of one dataclass that stand together in the help.

    Attributes:
        title: The name of the group; "" for that of the dataclass.
        about: The text at the head of the group; "" for that of the dataclass.
        options: The names of its options.
        place: The place of the group among all groups of the help.
    """

    title: str
    about: str
    options: tuple[str, ...]
    place: int


# The places in the help. The algorithm's own options are first, and what few runs need
# is last.
METHOD_PLACE = 0
DATA_PLACE = 2
MODEL_PLACE = 4
RARE_PLACE = 9
PLACES = {
    "compare": 1,
    "tune": 1,
    "config": 1,
    "partition": DATA_PLACE + 1,
    "data": DATA_PLACE + 1,
    "model": MODEL_PLACE + 1,
    "run": 6,
    "training": 7,
}
OTHER_PLACE = 8
# Options of a run that cut the data among clients, and that change what clients see.
CUT_OPTIONS = (
    "partition",
    "n",
    "data_seed",
    "train_samples",
    "test_samples",
    "standardize",
    "val",
)
SHIFT_OPTIONS = ("feature_shift", "feature_shift_strength")
SPLIT_TITLES = ("run", "output")  # the groups of which these are parts
HELP_GROUPS: tuple[HelpGroup, ...] = (
    HelpGroup(
        "data and cut",
        "The data, and who holds which samples.",
        ("data", *CUT_OPTIONS),
        DATA_PLACE,
    ),
    HelpGroup(
        "model and loss",
        "The model that clients train.",
        ("model", "loss", "batch_norm"),
        MODEL_PLACE,
    ),
    HelpGroup(
        "feature shift",
        "Clients that see the same things differently.",
        SHIFT_OPTIONS,
        RARE_PLACE,
    ),
    HelpGroup(
        "defence and attack",
        "A bound on updates, and clients that attack.",
        ("clip", "attack", "attack_clients", "attack_strength"),
        RARE_PLACE,
    ),
    HelpGroup(
        "rank and graph",
        "Several processes, and how a card computes.",
        ("clients_per_block", "graphs", "ranks", "rank_timeout"),
        RARE_PLACE,
    ),
    HelpGroup(
        "privacy",
        "The line on privacy below the table.",
        ("privacy_delta",),
        RARE_PLACE,
    ),
)


@dataclass(frozen=True)
class Flag:
    """An option of a command as the command line writes it.

    Attributes:
        group: The group of the option.
        field: The field of the group's dataclass.
        key: The name with "_" between words, and the name of a prefixed group before a
            dot.
        hint: The type of the option on the command line.
        default: The value where the option is not given.
    """

    group: str
    field: str
    key: str
    hint: Any
    default: Any


def flags_of(
    groups: Mapping[str, type],
    prefixed: Collection[str] = (),
    reserved: Collection[str] = (),
) -> dict[str, Flag]:
    """The flags of all options by their keys, in the order of the groups.

    Args:
        groups: The dataclass of each group's options.
        prefixed: The groups whose options are written `--GROUP.OPTION`.
        reserved: Names that only the first group may use without the name of the group.
    """
    flags: dict[str, Flag] = {}
    for title, cls in groups.items():
        hints = command_line_hints(cls)
        taken = {*flags}
        if flags:
            taken |= {*reserved}
        for f in option_fields(cls):
            key = f.name
            if title in prefixed:
                key = f"{title}.{f.name}"
            elif f.name in taken:
                key = f"{title}_{f.name}"
            flags[key] = Flag(title, f.name, key, hints[f.name], f.default)
    return flags


def words_behind(argv: Sequence[str], name: str) -> list[str]:
    """The values of the option --NAME on the command line; [] where it is not there.

    Of an option that is there twice they are the last ones, as for tyro.
    """
    values: list[str] = []
    for place, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") != f"--{name.replace('_', '-')}":
            continue
        rest = takewhile(lambda word: not word.startswith("--"), argv[place + 1 :])
        values = [value] if value else [*rest]
    return values


def given_keys(argv: Sequence[str]) -> list[str]:
    """The keys of all options on the command line, as a file of options has them."""
    keys = []
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            prefix, dot, last = name.rpartition(".")
            keys.append(f"{prefix}{dot}{last.removeprefix('no_')}")
    return keys


def parse(
    prog: str,
    about: str,
    groups: Mapping[str, type],
    argv: Sequence[str],
    prefixed: Collection[str] = (),
    reserved: Collection[str] = (),
    defaults: Mapping[str, Facts] | None = None,
) -> dict[str, dict[str, Any]]:
    """The values of all options, by group, which are not checked yet.

    `--help` and a malformed option end the program, by SystemExit 0 and 2. Raises
    ValueError for a name that is none of an option's choices, and for several numbers
    behind an option of one.

    The help begins with the algorithm's own options, then data, model and training.
    Options that few runs need stand at its end, in groups of their own.

    Args:
        prog: The command, as the help shows it.
        about: The text at the head of the help.
        groups: The dataclass of each group's options.
        prefixed: The groups whose options are written `--GROUP.OPTION`. In the others
            an option is written `--GROUP-OPTION` where an earlier group has its name.
        argv: The words of the command line.
        reserved: Names that only the first group may use without the name of the group.
        defaults: The defaults of each group that a file of options gives.
    """
    tyro = import_optional("tyro")
    flags = flags_of(groups, prefixed, reserved).values()
    _require_single_numbers(argv, groups, flags)
    keys = {(flag.group, flag.field): flag.key for flag in flags}
    types: list[tuple[int, str, Any]] = []
    attributes: dict[str, list[str]] = {}
    for title, cls in groups.items():
        group_defaults = (defaults or {}).get(title, {})
        renamed = {}
        is_prefixed = title in prefixed
        for f in option_fields(cls):
            if keys[title, f.name] != f.name and not is_prefixed:
                renamed[f.name] = keys[title, f.name]
        attributes[title] = []
        for number, part in enumerate(help_groups(title, cls, whole=is_prefixed)):
            attribute = (
                f"{_identifier(title)}__{number}" if number else _identifier(title)
            )
            group = _group_type(part, title, cls, renamed, group_defaults)
            if not is_prefixed:
                group = tyro.conf.OmitArgPrefixes[group]
            types.append((part.place, attribute, group))
            attributes[title].append(attribute)
    in_order = sorted(types, key=lambda entry: entry[0])
    options = tyro.cli(
        make_dataclass("Options", [(name, group) for _, name, group in in_order]),
        prog=prog,
        description=about,
        args=list(argv),
        config=(tyro.conf.SuppressFixed,),
    )
    values: dict[str, dict[str, Any]] = {}
    for title, names in attributes.items():
        values[title] = {}
        for name in names:
            values[title] |= vars(getattr(options, name))
    for title, cls in groups.items():
        for name, choice in _choices(cls).items():
            key = keys[title, name]
            validated(key, expectation_of(choice), values[title][name])
    return values


def _require_single_numbers(
    argv: Sequence[str], groups: Mapping[str, type], flags: Iterable[Flag]
) -> None:
    """Raises ValueError where several words follow an option that is one number.

    In a command with words of its own places, they may be those.
    """
    every_field = [f for cls in groups.values() for f in option_fields(cls)]
    if any(f.metadata == POSITIONAL for f in every_field):
        return
    for flag in flags:
        kinds = {*(get_args(flag.hint) or (flag.hint,))}
        words = words_behind(argv, flag.key)
        if len(words) > 1 and kinds <= {int, float, NoneType}:
            comment = field_comments(groups[flag.group]).get(flag.field, "")
            # The first clause of its help, also where that ends with "...".
            meaning = re.split(r"; |(?<!\.)\.(?=\s|$)", comment)[0]
            meaning = " ".join(f"{meaning[:1].lower()}{meaning[1:]}".split())
            expected = f"one number ({meaning})" if meaning else "one number"
            reject(flag.key, expected, Words(" ".join(words)))


def _distance(cls: type, name: str) -> int:
    """The distance from an algorithm to the base class that brings an option."""
    if issubclass(cls, Algorithm):
        for distance, base in enumerate(cls.__mro__):
            if name in inspect.get_annotations(base):
                return distance
    return 0


def help_groups(title: str, cls: type, *, whole: bool = False) -> list[HelpGroup]:
    """The groups of a dataclass's options in the help; the first has its name.

    Of an algorithm, the options that it has from FedAvg, the mean and the weights,
    stand apart where it has others, too.

    Args:
        title: The name of the dataclass's group.
        cls: The dataclass.
        whole: True leaves all options in one group.
    """
    names = [f.name for f in option_fields(cls)]
    place = PLACES.get(title, OTHER_PLACE)
    candidates = HELP_GROUPS if title in SPLIT_TITLES else ()
    if issubclass(cls, Algorithm):
        place = METHOD_PLACE
        shared = {f.name for f in fields(class_of("fedavg"))} - {*cls.__annotations__}
        about = "The server's step, as in FedAvg: its size, weights and defences."
        server = HelpGroup(f"{title}, server", about, tuple(shared), RARE_PLACE)
        candidates = () if cls is class_of("fedavg") else (server,)
    groups = []
    for group in () if whole else candidates:
        options = tuple(name for name in names if name in group.options)
        if options and len(options) < len(names):
            groups.append(group._replace(options=options))
    apart = {name for group in groups for name in group.options}
    common = tuple(name for name in names if name not in apart)
    if not common:
        return groups
    return [HelpGroup("", "", common, place), *groups]


def _identifier(title: str) -> str:
    """The name of a group as an attribute, without a dot."""
    return title.replace(".", "__")


def _group_type(
    part: HelpGroup,
    title: str,
    cls: type,
    renamed: Mapping[str, str],
    defaults: Facts,
) -> Any:
    """The annotated dataclass from which tyro makes a group of options.

    Args:
        part: The options of the group, its title and its text.
        title: The name of the dataclass's group.
        cls: The dataclass of its options.
        renamed: The names of options that are not those of their fields, because an
            earlier group has an option of that name.
        defaults: Defaults of options that are not those of their fields.
    """
    arg = import_optional("tyro").conf.arg
    hints = command_line_hints(cls)
    comments = field_comments(cls)
    choices = _choices(cls)
    options: list[tuple[str, Any, Any]] = []
    for f in sorted(option_fields(cls), key=lambda f: _distance(cls, f.name)):
        if f.name not in part.options:
            continue
        name = renamed.get(f.name)
        details = arg(name=name, help=comments.get(f.name))
        option = copy(f)
        if f.name in defaults:
            option = field(default=defaults[f.name])
        elif isinstance(f.default, Mean):
            option.default = str(f.default)
        hint: Any = _without_functions(hints[f.name])
        if f.name in choices:
            # `parse` checks the name itself, and suggests the nearest one.
            choice_names = expectation_of(choices[f.name]).names
            hint = str
            if NoneType in get_args(choices[f.name]):
                choice_names = ("None", *choice_names)
                hint = None | str
            metavar = "{" + ",".join(choice_names) + "}"
            details = arg(name=name, help=comments.get(f.name), metavar=metavar)
        hint = Annotated[hint, details]
        if f.metadata == POSITIONAL:
            hint = import_optional("tyro").conf.Positional[hint]
        options.append((f.name, hint, option))
    about = part.about or (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0]
    group = make_dataclass(_identifier(title), options)
    return Annotated[group, arg(name=part.title or title, help=about)]


@cache
def _choices(cls: type) -> dict[str, Any]:
    """The annotation of each option of a group that is one of several names, or None.

    Args:
        cls: The dataclass of the group's options.
    """
    hints = command_line_hints(cls)
    choices = {}
    for f in option_fields(cls):
        hint = _without_functions(hints[f.name])
        is_union = get_origin(hint) in (Union, UnionType)
        kinds = {*get_args(hint)} - {NoneType} if is_union else {hint}
        names = [name for kind in kinds for name in get_args(kind)]
        are_literals = all(get_origin(kind) is Literal for kind in kinds)
        if are_literals and all(isinstance(name, str) for name in names):
            choices[f.name] = hint
    return choices


def _without_functions(hint: Any) -> Any:
    """The type of an option without functions, which a command line cannot write.

    A function that has a place, "package.module:function", is a string there. An option
    that has no other value than functions and None is left as it is, and is not shown.
    """
    kinds = get_args(hint)
    others = [kind for kind in kinds if get_origin(kind) is not abc.Callable]
    is_union = get_origin(hint) in (Union, UnionType)
    if not is_union or len(others) == len(kinds) or {*others} <= {NoneType}:
        return hint
    return Union[tuple(others)]  # noqa: UP007 (made of a list)


@cache
def command_line_hints(cls: type) -> dict[str, Any]:
    """The type of each field of a dataclass, as the command line has it."""
    hints = get_type_hints(cls)
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for part in (hint, *get_args(hint)):  # the parts of X | None
            for metadata in getattr(part, "__metadata__", ()):
                if isinstance(metadata, OnCommandLine):
                    hints[name] = metadata.hint
    return hints


def allow_own_modules(words: Iterable[str]) -> None:
    """Lets package.module:Class be in the working folder, where a word is of that form.

    Installed packages take precedence.
    """
    has_object_name = any(":" in word for word in words)
    if has_object_name and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def option_fields(cls: type) -> list[Field[Any]]:
    """The fields of a dataclass that are options of the command line.

    An algorithm's target is an option of the run, and a field with a single choice is
    no option. A field with the metadata POSITIONAL is a word without "--".
    """
    excluded = set[str]()
    if issubclass(cls, Algorithm):
        excluded = {"target", *fixed_options(cls)}
    return [f for f in fields(cls) if f.init and f.name not in excluded]


@cache
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
