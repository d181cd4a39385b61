"""Models of standard layers, described for JSON and built again.

A description has the class of a layer and the arguments that make it, and for a
container its children. Only classes of `torch.nn` and `pflcore.nn` are built, so a
description from a file runs no code of others.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

import pflcore.nn as pflcore_nn

PACKAGES = {"torch.nn": nn, "pflcore.nn": pflcore_nn}
CONTAINERS = (nn.Sequential, nn.ModuleList)
# Arguments that say where a layer is made, and not what it computes.
PLACE_ARGUMENTS = ("device", "dtype")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Description = dict[str, Any]


def describe_module(module: nn.Module) -> Description | None:
    """The description of a module; None where it cannot be built from one.

    It is None for a class of the user's own, and for a layer that would not come back
    as it is: with a hook, for example.
    """
    description = _describe(module)
    if description is None:
        return None
    try:
        again = build_module(description)
    except (TypeError, ValueError, RuntimeError):
        return None
    return description if computes_alike(again, module) else None


def computes_alike(one: nn.Module, other: nn.Module) -> bool:
    """True where two modules compute the same once one has the other's `state_dict`.

    All that their layers hold is compared: settings, hooks, a `forward` of their own,
    and buffers that no `state_dict` has. Parameters are compared by name and shape, and
    the modes of training and evaluation are not.
    """
    if _has_any_global_hook():  # another program need not have it
        return False
    layers = dict(one.named_modules(remove_duplicate=False))
    others = dict(other.named_modules(remove_duplicate=False))
    if list(layers) != list(others) or _shapes(one) != _shapes(other):
        return False
    return all(_are_alike(layers[name], others[name]) for name in layers)


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """True where two layers hold the same, but for their parameters and children."""
    if type(one) is not type(other):
        return False
    facts = _layer_facts(one)
    other_facts = _layer_facts(other)
    if facts.keys() != other_facts.keys():
        return False
    return all(_is_equal(facts[name], other_facts[name]) for name in facts)


def _layer_facts(layer: nn.Module) -> dict[str, Any]:
    """All that a layer holds by itself and that its `state_dict` does not bring."""
    facts: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name in ("_modules", "_buffers", "_parameters", "training"):
            continue
        # The keys of hooks are numbers of their registration.
        is_hooks = "_hooks" in name and isinstance(value, Mapping)
        facts[name] = list(value.values()) if is_hooks else value
    for name in layer._non_persistent_buffers_set:
        facts[f"buffer {name}"] = layer._buffers[name]
    return facts


def _is_equal(one: Any, other: Any) -> bool:
    """True for two equal values, and False where they cannot be compared."""
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return torch.equal(one.cpu(), other.cpu())
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def build_module(description: Mapping[str, Any]) -> nn.Module:
    """The module of a description, with weights of its own.

    torch's global random state stays as it is. Raises ValueError where a class is none
    of `torch.nn` or `pflcore.nn`.
    """
    with torch.random.fork_rng(devices=[]):
        return _build(description)


def _build(description: Mapping[str, Any]) -> nn.Module:
    """The module of a description, drawn from torch's global generator."""
    cls = _class_of(str(description["class"]))
    if cls is None:
        raise ValueError(f"no layer of torch.nn: {description['class']}")
    children = {}
    for name, child in description.get("children", {}).items():
        children[name] = _build(child)
    if cls is nn.Sequential:
        return nn.Sequential(OrderedDict(children))
    if cls is nn.ModuleList:
        return nn.ModuleList(children.values())
    arguments = {}
    for name, value in description["arguments"].items():
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return cls(**arguments)


def _class_of(name: str) -> type[nn.Module] | None:
    """The class of layers of a name such as "torch.nn.Linear", or None."""
    package, _, class_name = name.rpartition(".")
    cls = getattr(PACKAGES.get(package), class_name, None)
    is_layer = isinstance(cls, type) and issubclass(cls, nn.Module)
    return cls if is_layer else None


def _describe(module: nn.Module) -> Description | None:
    """The class, arguments and children of a module, if it is a standard one."""
    cls = type(module)
    names = [f"{package}.{cls.__name__}" for package in PACKAGES]
    names = [name for name in names if _class_of(name) is cls]
    if not names:
        return None
    parts: Mapping[str, Any] | None
    key = "arguments"
    parts = _arguments(module)
    if cls in CONTAINERS:
        key = "children"
        parts = {name: _describe(child) for name, child in module.named_children()}
        if None in parts.values():
            parts = None
    return None if parts is None else {"class": names[0], key: parts}


def _arguments(module: nn.Module) -> Description | None:
    """The arguments that make a layer; None where one of them is not known.

    Layers keep each argument as an attribute of its name. Where one does not, and the
    argument has a default, the default is taken.
    """
    arguments = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in PLACE_ARGUMENTS or parameter.kind in VARIADIC:
            continue
        if not hasattr(module, name):
            if parameter.default is parameter.empty:
                return None
            continue
        value = getattr(module, name)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None
        if not _is_plain(value):
            return None
        arguments[name] = value
    return arguments


def _is_plain(value: Any) -> bool:
    """True for a value that JSON represents, or a tuple of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """The shapes of a module's tensors, by name."""
    tensors: Mapping[str, Tensor] = module.state_dict()
    return {name: tensor.shape for name, tensor in tensors.items()}
