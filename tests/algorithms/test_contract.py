"""The contract of every algorithm of the registry.

It passes the checks of `pflcore.testing`, its options are what their annotations say,
and it sends as many models as its docstring says.
"""

import json
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from entry_points import sentence
from parts.user import Mine, simulation
from small import swept
from torch import nn

from pflcore import testing
from pflcore.algorithms import ALGORITHMS, FedDWA, algorithm_of
from pflcore.check import PositiveInt
from pflcore.testing import check

# Options for algorithms whose defaults do not fit a federation of four small clients.
OPTIONS: dict[str, dict[str, Any]] = {
    "knnper": {"k": 3},
    # With a smaller sample, it draws, and its clients' numbers are not checked.
    "fedala": {"sample": 1.0},
}
WEIGHTINGS = ("samples", "uniform")
MODELS_SENT = {  # down, up
    "fedavg": (1, 1),
    "fedprox": (1, 1),
    "scaffold": (2, 2),
    "waffle": (2, 2),
    "apfl": (1, 1),
    "fedala": (1, 1),
    "fedrod": (1, 1),
    "moon": (1, 1),
    "feddyn": (1, 1),
    "fedntd": (1, 1),
    "local": (0, 0),
}


@pytest.mark.parametrize("name", swept(one_in=1))
def test_the_contract(name):
    check(ALGORITHMS[name](**OPTIONS.get(name, {})))


@pytest.mark.parametrize("name", sorted(MODELS_SENT))
def test_as_many_models_are_sent_as_the_docstring_says(name):
    case = testing.Case(ALGORITHMS[name](**OPTIONS.get(name, {})))
    (done,) = case.play(case.config(), [(0, 1, 3)]).done
    one = 3 * case.net.size * 8
    assert (done.bytes_down, done.bytes_up) == tuple(one * m for m in MODELS_SENT[name])


# options ----------------------------------------------------------------------


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("name", swept(one_in=1))
@pytest.mark.parametrize(
    "option, others", [("server_lr", (0.5,)), ("weighting", WEIGHTINGS)]
)
def test_an_option_that_is_offered_plays_a_part(name, option, others):
    case = testing.Case(ALGORITHMS[name](**OPTIONS.get(name, {})))
    for other in others:
        try:
            setup = case.config(replace(case.given, **{option: other}))
        except (TypeError, ValueError):  # it has no such option, or one choice
            continue
        last = {
            k: v
            for k, v in case.play(setup).states[-1].items()
            if v.is_floating_point()
        }
        same = all(torch.equal(v, case.recorded.states[-1][k]) for k, v in last.items())
        assert same is (getattr(case.given, option) == other)


# An option, a value just outside of its bounds, and the last one inside.
EDGES = """\
apfl | alpha | 1.5 | 1
apfl | alpha | -0.1 | 0
ditto | personal_epochs | 0 | 1
factorized_waffle | tau | 0 | 0.1
fedala | layers | 0 | 1
fedala | window | 1 | 2
fedala | sample | 0 | 1
fedavg | server_lr | -1 | 0
fedadam | beta1 | 1 | 0.99
finetune | finetune_epochs | -1 | 0
heurfedamp | xi_self | 0 | 1
fedrep | private | [] | "body"
fedrep | private | 3 | "body"
"""


@pytest.mark.parametrize("line", EDGES.splitlines())
def test_bounds(line):
    name, option, *values = line.split(" | ")
    outside, inside = map(json.loads, values)
    with pytest.raises(ValueError, match=rf"^{option}: expected .*, got .*\.$"):
        ALGORITHMS[name](**{option: outside})
    assert getattr(ALGORITHMS[name](**{option: inside}), option) == inside


def test_options_of_ones_own_class_are_checked_where_they_can_be_read():
    @dataclass(frozen=True)
    class Own(ALGORITHMS["ditto"]):
        much: PositiveInt = 3

    @dataclass(frozen=True)
    class Unreadable(Own):
        thing: "Nowhere | None" = None  # type: ignore[name-defined]  # noqa: F821

    for cls in (Own, Unreadable):
        with pytest.raises(
            ValueError, match=r"^lam: expected a finite number >= 0, got -1\.$"
        ):
            cls(lam=-1)
    with pytest.raises(
        ValueError, match=r"^much: expected a whole number, at least 1, got 0\.$"
    ):
        Own(much=0)


DERIVED = "a class derived from pflcore.Algorithm"
NO_ALGORITHMS = {
    "fedavgg": "got 'fedavgg', did you mean 'fedavg'. Expected one of fedavg, .* or "
    "'package.module:Class' for one of your own",
    "no_such_module:Mine": "importing 'no_such_module",
    "mine:Yours": "importing 'mine:Yours'",
    "mine:number": f"expected a name, {DERIVED} or an instance of one, got int",
    3: f"expected a name, {DERIVED} or an instance of one, got int",
    nn.Linear: f"expected a name, {DERIVED} or an instance of one, got Linear",
}


@pytest.fixture
def mine(monkeypatch):
    """Makes a user's module of the name "mine"."""
    module = types.ModuleType("mine")
    module.Mine = Mine
    module.number = 3
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("given", [Mine, Mine(), "mine:Mine"], ids=str)
def test_an_algorithm_of_ones_own_has_its_classs_name(given):
    assert simulation(given, rounds=1).run().header["algorithm"] == "Mine"


def test_algorithm_of_a_name_has_the_options():
    assert algorithm_of("FedDWA", k=3) == FedDWA(k=3) == algorithm_of(FedDWA, k=3)
    one = FedDWA(k=3)
    assert algorithm_of(one) is one


@pytest.mark.parametrize(
    "given, options, words",
    [
        ("feddwa", {"near": 3}, r"FedDWA: .*\['near'\]"),
        ("feddwa", {"k": 0}, "k: expected a whole number, at least 1"),
        (FedDWA(), {"k": 3}, "options: expected none beside an instance"),
    ],
)
def test_an_option_that_algorithm_of_cannot_use_is_one_sentence(given, options, words):
    with sentence(words):
        algorithm_of(given, **options)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("given", NO_ALGORITHMS)
def test_what_is_no_algorithm_is_one_sentence(given):
    with pytest.raises(
        (ValueError, TypeError), match=f"^algorithm: {NO_ALGORITHMS[given]}"
    ) as e:
        simulation(given)
    assert str(e.value).count(". ") == 0
