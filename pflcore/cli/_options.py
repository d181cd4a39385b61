"""The options of a command, from dataclasses and functions, by tyro: a field's comment
is its help."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

from pflcore.algorithms import Algorithm, fixed_options
from pflcore.check import import_optional


def parse(
    prog: str,
    about: str,
    groups: Mapping[str, type],
    argv: Sequence[str],
    prefixed: Collection[str] = (),
    complete: bool = True,
) -> dict[str, dict[str, Any]]:
    """The values of all options, by group, unchecked. `--help` and a malformed option
    end the program (SystemExit 0 and 2).

    A group in `prefixed` writes its options `--GROUP.OPTION`; in the others an option
    whose name an earlier group has is `--GROUP-OPTION`. What is no field of these
    groups is passed over where they are not `complete`: which groups there are may
    depend on the values of some.
    """
    tyro = import_optional("tyro")
    arg = tyro.conf.arg
    taken = set[str]()
    kinds = dict[str, Any]()
    for title, cls in groups.items():
        hints = get_type_hints(cls)
        helps = field_comments(cls)
        own = list[tuple[str, Any, Any]]()
        for f in option_fields(cls):
            name = (
                f"{title}-{f.name}"
                if f.name in taken and title not in prefixed
                else None
            )
            how = arg(name=name, help=helps.get(f.name))
            own.append((f.name, Annotated[hints[f.name], how], copy(f)))
        about_group = (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0]
        kinds[title] = Annotated[
            make_dataclass(title, own), arg(name=title, help=about_group)
        ]
        if title not in prefixed:
            taken |= {f.name for f in option_fields(cls)}
            kinds[title] = tyro.conf.OmitArgPrefixes[kinds[title]]
    got = tyro.cli(
        make_dataclass("Options", kinds.items()),
        prog=prog,
        description=about,
        args=list(argv),
        config=(tyro.conf.SuppressFixed,),
        add_help=complete,
        return_unknown_args=not complete,
    )
    return {
        title: vars(values)
        for title, values in vars(got if complete else got[0]).items()
    }


def option_fields(cls: type) -> list[Field[Any]]:
    """The fields of a dataclass that are options. An algorithm's target is the run's,
    and a choice of one is none."""
    aside = (
        {"target", *fixed_options(cls)} if issubclass(cls, Algorithm) else set[str]()
    )
    return [f for f in fields(cls) if f.init and f.name not in aside]


def field_comments(cls: type) -> dict[str, str]:
    """The comment at each field of a dataclass, or at its base's field, or what its
    docstring says below "Args:", as tyro finds it."""
    tyro = import_optional("tyro")
    found = dict[str, str]()
    of = tyro.constructors
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        info = of.StructTypeInfo.make(base, tyro.MISSING_NONPROP, False)
        each = {
            f.name: f.helptext()
            for f in of.ConstructorRegistry.get_struct_spec(info).fields
        }
        found |= {name: text for name, text in each.items() if text}
    return found


def dataclass_of_arguments(
    function: Callable[..., Any], defaults: Mapping[str, Any]
) -> type:
    """These arguments of a function as the fields of a dataclass."""
    function = getattr(function, "func", function)  # a partial's own
    hints = get_type_hints(function)
    about = {"__doc__": function.__doc__}
    own = [(k, hints.get(k, type(v)), field(default=v)) for k, v in defaults.items()]
    return make_dataclass(function.__name__, own, namespace=about)
