"""The check that an algorithm's class has no unused names.

A misspelt hook is a method like any other, which no run calls. So the check looks for
public members that no run uses. First it reads the code of the hooks: a member that
they name is used. Then it plays runs, and records the attributes that they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import fields
from difflib import get_close_matches
from inspect import get_annotations, unwrap
from types import CodeType, FunctionType, MemberDescriptorType
from typing import Any

from pflcore.algorithms._protocol import Algorithm, Cohort, SharedRows, Traits
from pflcore.simulation._models import adapt
from pflcore.testing._case import PART, Case
from pflcore.testing._faults import Fault
from pflcore.train import Clients, Fit, Net

HOOK_NAMES = [
    name
    for name, member in vars(Algorithm).items()
    if isinstance(member, FunctionType) and not name.startswith("_")
]
# Algorithms call this method of the base class, so it is no hook.
HOOK_NAMES.remove("require_default")
# The names of the attributes of hooks' arguments.
OTHER_ATTRIBUTES = {*Traits._fields}.union(
    *map(dir, (Clients, Cohort, Fit, Net, SharedRows))
)


def _names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals in a function's code."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _code_of_member(member: Any) -> CodeType | None:
    """The code of a method or a property; None for a value."""
    # The attributes with the function of a class method, a property and a cached
    # property.
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    return getattr(unwrap(member), "__code__", None)


def _foreign_classes(alg: Algorithm) -> list[type]:
    """The classes of the algorithm outside pflcore, its own class first."""
    foreign = []
    for cls in type(alg).__mro__:
        package = cls.__module__.partition(".")[0]
        if package != "pflcore" and cls is not object:
            foreign.append(cls)
    return foreign


def _added_members(alg: Algorithm) -> dict[str, Any]:
    """The public members that are neither options nor members of pflcore's classes."""
    foreign = _foreign_classes(alg)
    known = {f.name for f in fields(alg)}
    for cls in type(alg).__mro__:
        if cls not in foreign:
            known |= vars(cls).keys()
    members: dict[str, Any] = {}
    for cls in reversed(foreign):  # a class overrides its base classes
        members |= vars(cls)
    added = {}
    for name, member in members.items():
        if name not in known and not name.startswith("_"):
            added[name] = member
    return added


def _reachable_members(alg: Algorithm, members: Mapping[str, Any]) -> set[str]:
    """The names of the members that the code of hooks uses.

    A hook may use a member through other members. All code counts, also code that no
    run with these options calls. A value does not count where an argument of hooks has
    an attribute of its name: `fit.buffers` in a hook does not show that the class's
    `buffers` are read.
    """
    # The code of the hooks at first, then that of the members that it names.
    to_read = []
    for cls in type(alg).__mro__:
        for name, member in vars(cls).items():
            if name not in members:
                to_read.append(_code_of_member(member))
    reached = set[str]()
    while to_read:
        code = to_read.pop()
        if code is None:
            continue
        for name in (_names_in(code) & members.keys()) - reached:
            if _has_code(members[name]) or name not in OTHER_ATTRIBUTES:
                reached.add(name)
                to_read.append(_code_of_member(members[name]))
    return reached


def _has_code(member: Any) -> bool:
    """True for a class, method or property; False for a value."""
    return isinstance(member, type) or _code_of_member(member) is not None


def _attributes_read(case: Case) -> set[str]:
    """The names of the algorithm's attributes that runs read.

    The runs have new clients, absent clients, evaluations after one round and after
    all, a report, and a client that is adapted after the run.
    """
    read = set[str]()
    cls = type(case.watched)

    def record_read(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    recording = type(cls.__name__, (cls,), {"__getattribute__": record_read})
    alg = copy(case.watched)
    object.__setattr__(alg, "__class__", recording)
    config = case.config(alg)
    with suppress(Exception):  # other checks report an error
        alg.__post_init__()
        play = case.play(config, [PART])
        case.evaluate(play.last, config)
        play = case.play(config)
        case.evaluate(play.last, config)
        outcome = play.done[-1]
        if outcome.cohort is not None:
            alg.report(play.last.server, outcome.mix, outcome.cohort)
        adapt(config, play.last, case.data.subset([0]), rounds=1)
    return read


# the checks -------------------------------------------------------------------


def names_are_known(case: Case) -> None:
    """Every public name is an option, a hook, or used by hooks."""
    _require_annotated_options(case.given)
    added = _added_members(case.given)
    unknown = added.keys() - _reachable_members(case.given, added)
    if unknown:
        unknown -= _attributes_read(case)
    for name, member in added.items():
        if name in unknown:
            raise Fault(_unknown_member_text(type(case.given), name, member))


def _require_annotated_options(alg: Algorithm) -> None:
    """Raises Fault where a user's class has an option that Python ignores."""
    cls = type(alg)
    options = {f.name for f in fields(alg)}
    for name, annotation in get_annotations(cls).items():
        is_dataclass = "__dataclass_fields__" in vars(cls)
        if not is_dataclass and "ClassVar" not in str(annotation):
            raise Fault(
                f"{name}: it is no option, because {cls.__name__} has no "
                "@dataclass(frozen=True) above it."
            )
    for foreign in _foreign_classes(alg):
        annotated = get_annotations(foreign).keys()
        for name in (options & vars(foreign).keys()) - annotated:
            value = vars(foreign)[name]
            is_slot = isinstance(value, MemberDescriptorType)
            if not is_slot:
                raise Fault(
                    f"{name}: {foreign.__name__}'s default {value!r} is not taken, "
                    f"because it has no annotation; write {name}: "
                    f"{type(value).__name__} = {value!r}."
                )


def _unknown_member_text(cls: type, name: str, member: Any) -> str:
    """The sentence about a member that no run uses."""
    if _has_code(member):
        nearest = get_close_matches(name, HOOK_NAMES, 1, 0.8)
        hint = f"the hooks are {', '.join(HOOK_NAMES)}"
        if nearest:
            hint = f"did you mean {nearest[0]!r}"
        return (
            f"{name}: no hook has this name, and no run calls it; {hint}, and the name "
            "of a helper begins with an underscore."
        )
    return (
        f"{name}: no run reads this attribute of {cls.__name__}; an option has an "
        "annotation, facts that a run has to know stand in traits = "
        f"Traits({', '.join(Traits._fields)}), and the name of a constant begins with "
        "an underscore."
    )
