"""A copy of a module is what `copy.deepcopy` makes of it."""

import copy
from types import NoneType

import pytest
import torch
from small import layers
from torch import nn

from pflcore.nn._copy import CONTAINERS, copy_module


class Shared(nn.Module):
    """Two names of one layer and of an empty dict of torch's, and a list of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.hooks = self._forward_hooks
        self.seen = [self.first.weight]


class Own(nn.Linear):
    """A module that says how it is copied."""

    def __deepcopy__(self, memo):
        other = Own(self.in_features, self.out_features)
        other.load_state_dict(self.state_dict())
        other.copied = True
        return other


class Untouched(nn.Module):
    """A module that is its own copy."""

    def __deepcopy__(self, memo):
        return self


def hooked():
    module = layers("Linear 3 4, Tanh, BatchNorm1d 4")
    module[0].register_forward_hook(lambda module, x, y: y + 1)
    module[1].register_buffer("kept", torch.ones(2), persistent=False)
    return module


def weight_normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))


MODULES = {
    "layers": lambda: layers("Linear 3 4, ReLU, BatchNorm1d 4, Linear 4 2"),
    "hooks": hooked,
    "shared": Shared,
    "its own copy": lambda: nn.Sequential(Own(3, 2), nn.ReLU()),
    "itself": lambda: nn.Sequential(Untouched(), nn.Linear(3, 2)),
    "parametrized": weight_normed,
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2),
    "empty": nn.Module,
}
PLAIN = (bool, float, int, str, NoneType)
same = pytest.mark.parametrize("name", MODULES)


def described(value, names):
    """A value as lists of plain ones; an object is a number by its first appearance."""
    kind = type(value).__qualname__  # a parametrized module has a class of its own
    if isinstance(value, torch.Tensor):
        return [kind, value.requires_grad, value.tolist(), number(value, names)]
    if isinstance(value, nn.Module | dict | set | list | tuple):
        is_known = id(value) in names
        facts = [kind, number(value, names)]
        if not is_known:
            inner = vars(value) if isinstance(value, nn.Module) else value
            pairs = inner.items() if isinstance(inner, dict) else enumerate(inner)
            facts += [(key, described(part, names)) for key, part in pairs]
        return facts
    return value if isinstance(value, PLAIN) else kind


def number(value, names):
    return names.setdefault(id(value), len(names))


@same
def test_it_is_the_deep_copy(name):
    module = MODULES[name]()
    got, want = copy_module(module), copy.deepcopy(module)

    assert described(got, {}) == described(want, {})


@same
def test_no_container_is_shared(name):
    module = MODULES[name]()
    copied = copy_module(module)
    for mine, its in zip(module.modules(), copied.modules(), strict=True):
        if mine is its:
            continue
        for container in CONTAINERS:
            assert vars(mine)[container] is not vars(its)[container]
    own = [id(vars(part)[c]) for part in copied.modules() for c in CONTAINERS]
    assert len({*own}) == len(own)


def test_a_hook_of_the_copy_is_not_one_of_the_module():
    module = layers("Linear 3 4, Tanh")
    copied = copy_module(module)
    copied[0].register_forward_hook(lambda module, x, y: y + 1)

    assert not module[0]._forward_hooks and not copied[1]._forward_hooks
