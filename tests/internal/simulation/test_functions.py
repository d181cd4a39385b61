"""Digests of functions tell functions apart, also by their values."""

import functools
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pflcore.simulation._functions import function_digest

FACTOR = 2.0


def times(factor):
    def augment(batch, generator):
        return batch * factor

    return augment


def doubled(batch, generator):
    return batch * FACTOR


def helped(batch, generator):
    return doubled(batch, generator)


def with_global(function, value):
    """A copy of `function` that reads another FACTOR."""
    names = {**globals(), "FACTOR": value}
    names["doubled"] = type(function)(doubled.__code__, names)
    return type(function)(function.__code__, names)


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, batch, generator):
        return batch * self.factor

    def augment(self, batch, generator):
        return batch * self.factor


@dataclass
class TimesOption:
    factor: float

    def __call__(self, batch, generator):
        return batch * self.factor


def class_of_factor(factor):
    class Fixed:
        def __call__(self, batch, generator):
            return batch * factor

    return Fixed()


def with_default(factor):
    def augment(batch, generator, factor=factor):
        return batch * factor

    return augment


def with_attribute(factor):
    def augment(batch, generator):
        return batch * augment.factor

    augment.factor = factor
    return augment


def hooked(factor):
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, x, y: y * factor)
    return layer


# Each makes one function of a number; the name of the function is always the same.
MAKERS = {
    "a closure": times,
    "a list in a closure": lambda k: times([k, 1]),
    "a tensor in a closure": lambda k: times(torch.tensor([k, 1.0])),
    "an array in a closure": lambda k: times(torch.tensor([k]).numpy()),
    "a set in a closure": lambda k: times({str(k), "other"}),
    "a generator in a closure": lambda k: times(torch.Generator().manual_seed(int(k))),
    "a function in a closure": lambda k: times((times(k), {"other": times(1)})),
    "a function in a lambda": lambda k: lambda b, g: (lambda c: c * k)(b),
    "a default": with_default,
    "an attribute": with_attribute,
    "a global": lambda k: with_global(doubled, k),
    "a global of a global": lambda k: with_global(helped, k),
    "a partial": lambda k: functools.partial(nn.functional.leaky_relu, None, k),
    "a partial of a closure": lambda k: functools.partial(times(k)),
    "a decorator of torch": lambda k: torch.no_grad()(times(k)),
    "a cached function": lambda k: functools.lru_cache(times(k)),
    "a callable object": Times,
    "a callable dataclass": TimesOption,
    "a class": class_of_factor,
    "a bound method": lambda k: Times(k).augment,
    "a built-in method": lambda k: torch.tensor(k).mul,
    "a layer": nn.LeakyReLU,
    "a hook of a layer": hooked,
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_digest_tells_functions_apart_by_values(maker):
    first, other = function_digest(maker(1.0)), function_digest(maker(3.0))

    assert first != other
    assert first == function_digest(maker(1.0))
    assert first.says_more and not first.by_name


def test_a_digest_tells_functions_apart_by_code():
    functions = [
        lambda b, g: b + 1,
        lambda b, g: b + 2,
        lambda b, g: b - 1,
        lambda b, g: b.sin(),
        lambda b, g: b.cos(),
        lambda b, g: [c + 1 for c in b],
        lambda b, g: [c + 2 for c in b],
    ]

    assert len({function_digest(f).text for f in functions}) == len(functions)


@pytest.mark.parametrize("value", [nn.functional.relu, torch.relu, "flip", 3, [0.1]])
def test_a_name_that_tells_all_needs_no_digest(value):
    assert not function_digest(value).says_more


def test_a_global_with_the_name_of_an_attribute_plays_no_part(monkeypatch):
    def augment(batch, generator):
        return batch.mean()

    want = function_digest(augment)
    monkeypatch.setitem(globals(), "mean", torch.randn(3))

    assert function_digest(augment) == want


def test_a_function_that_calls_itself_has_a_digest():
    def odd(n):
        return n and even(n - 1)

    def even(n):
        return not n or odd(n - 1)

    assert function_digest(odd) == function_digest(odd)
    assert function_digest(odd) != function_digest(even)


SCRIPT = """
import torch
from pflcore.simulation._functions import function_digest

names = {"one", "two", "three", "four"}

class Rule:
    kinds = frozenset({"a", "b", "c"})

    def __call__(self, batch, generator):
        return batch if str(batch) in {"x", "y", "z"} else self.kinds & names

print(function_digest(Rule()).text, function_digest(lambda b: Rule()(b, names)).text)
"""


@pytest.mark.deep("other processes")
def test_digests_are_those_of_every_process():
    digests = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, check=True
        )
        digests.add(done.stdout)

    assert len(digests) == 1
