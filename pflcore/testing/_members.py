"""The check that an algorithm's class has no misspelt names.

A misspelt hook is a method like any other, which no run calls.
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from inspect import get_annotations
from types import FunctionType, MemberDescriptorType
from typing import Any

from pflcore.algorithms._protocol import Algorithm, Traits
from pflcore.testing._case import Case
from pflcore.testing._faults import Fault

HOOK_NAMES = [
    name
    for name, member in vars(Algorithm).items()
    if isinstance(member, FunctionType) and not name.startswith("_")
]
# Algorithms call this method of the base class, so it is no hook.
HOOK_NAMES.remove("require_default")


def names_are_known(case: Case) -> None:
    """Options have annotations, and no name is nearly that of a hook or trait."""
    _require_annotated_options(case.given)
    for name, member in _added_members(case.given).items():
        if name in Traits._fields:
            raise Fault(
                f"{name}: no run reads this attribute of {type(case.given).__name__}; "
                f"write traits = Traits({name}=...)."
            )
        nearest = get_close_matches(name, HOOK_NAMES, 1, 0.8)
        if nearest and callable(member):
            raise Fault(
                f"{name}: no hook has this name, did you mean {nearest[0]!r}; the name "
                "of a helper begins with an underscore."
            )


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
