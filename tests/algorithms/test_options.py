"""Options are what their annotations say, of every algorithm."""

import sys
import types
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest
from parts.user import Mine, simulation
from torch import nn

from pflcore.algorithms import ALGORITHMS
from pflcore.check import Count

# beside what an annotation's type forbids: values just outside of the bounds, and the last ones
# inside
EDGES = {
    "apfl": [("alpha", (1.5, -0.1), (0, 1)), ("alpha_lr", (-1,), (0,))],
    "clustered_fl": [("eps1", (-1,), (0,)), ("linkage", ("average",), ("single",))],
    "ditto": [("lam", (-0.1,), (0,)), ("personal_epochs", (0,), (1,))],
    "factorized_waffle": [
        ("tau", (0,), (0.1,)),
        ("samples", (0,), (1,)),
        ("eval_mode", ("x",), ("mc",)),
    ],
    "fedala": [("window", (1,), (2,)), ("sample", (0,), (1,)), ("layers", (-1,), (0,))],
    "fedamp": [("sigma", (0,), (0.1,)), ("start", ("x",), ("u",))],
    "fedavg": [
        ("weighting", ("equal",), ("uniform",)),
        ("server_lr", (-1,), (0,)),
        ("defence", ("x",), ("median",)),
    ],
    "feddwa": [
        ("k", (0,), (1,)),
        ("guidance", ("gradient",), ("full_grad",)),
        ("power", (-1,), (0,)),
        ("stride", (0,), (0.1,)),
    ],
    "feddwa_qp": [("theta", (1.5,), (1,)), ("ridge", (-1,), (0,))],
    "fedfomo": [("m", (0,), (1,)), ("epsilon", (1.1,), (1,)), ("norm", ("l3",), ("l1",))],
    "fedadam": [("beta1", (1,), (0.99,)), ("tau", (0,), (0.1,)), ("optimizer", ("x",), ("yogi",))],
    "fedprox": [("mu", (-1,), (0,))],
    "fedrod": [("gamma", (-1,), (0,)), ("head", ("x",), ("copy",))],
    "finetune": [("finetune_epochs", (-1,), (0,)), ("choose", ("x",), ("client",))],
    "hypcluster": [("k", (0,), (1,)), ("warm", (-1,), (0,))],
    "knnper": [("k", (0,), (1,)), ("lam", (1.1,), (1,)), ("kernel", ("x",), ("inverse",))],
    "mocha": [("delta", (0,), (1,)), ("outer", (0,), (1,)), ("relation", ("x",), ("sigma",))],
    "per_fedavg": [("variant", ("x",), ("hf",)), ("delta", (0,), (0.1,)), ("steps", (-1,), (0,))],
    "pfedme": [("inner", (0,), (1,)), ("theta", ("x",), ("restart",))],
    "scaffold": [("option", ("III",), ("I",))],
    "sfl": [("s", (1.1,), (1,)), ("k", (0,), (1,)), ("adjacency", ("x",), ("a.npy",))],
    "fedrep": [("private_epochs", (0,), (1,)), ("private", ((), 3), ("body",))],
    "waffle": [
        ("target", (-1,), (3,)),
        ("tie", ("x",), ("uniform",)),
        ("control_agg", ("x",), ("literal",)),
    ],
    "weight_erosion": [("p_d", (-1,), (0,)), ("size_unit", ("x",), ("epochs",))],
}


def wrong(hint):
    """Values of no use whatever the bounds."""
    if get_origin(hint) is Annotated:
        return [
            "text",
            None,
            [1],
            float("nan"),
            float("inf"),
            True,
            *([2.5] if get_args(hint)[0] is int else []),
        ]
    return (
        ["unknown", None, 3]
        if get_origin(hint) is Literal
        else [value for h in get_args(hint)[:1] for value in wrong(h) if value is not None]
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_option_of_another_kind_is_one_sentence(name):
    cls = ALGORITHMS[name]
    hints = get_type_hints(cls, include_extras=True)
    for f in fields(cls):
        for value in wrong(hints[f.name]):
            with pytest.raises(
                ValueError, match=rf"^{f.name}: (expected .*, got .*|it plays no part .*)\.$"
            ):
                cls(**{f.name: value})


@pytest.mark.parametrize("name", EDGES)
def test_bounds(name):
    for option, outside, inside in EDGES[name]:
        for value in outside:
            with pytest.raises(ValueError, match=rf"^{option}: expected .*, got .*\.$"):
                ALGORITHMS[name](**{option: value})
        for value in inside:
            assert getattr(ALGORITHMS[name](**{option: value}), option) == value


def test_options_of_ones_own_class_are_checked_where_they_can_be_read():
    @dataclass(frozen=True)
    class Mine(ALGORITHMS["ditto"]):
        much: Count = 3

    @dataclass(frozen=True)
    class Unreadable(Mine):
        thing: "Nowhere | None" = None  # type: ignore[name-defined]  # noqa: F821

    for cls in (Mine, Unreadable):
        with pytest.raises(ValueError, match=r"^lam: expected a finite number >= 0, got -1\.$"):
            cls(lam=-1)
    with pytest.raises(ValueError, match=r"^much: expected a whole number, at least 1, got 0\.$"):
        Mine(much=0)


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("mine")
    module.Mine, module.number = Mine, 3
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "fedavgg",
            "expected one of fedavg, .* or 'package.module:Class' for one of your own, got "
            "'fedavgg'",
        ),
        ("no_such_module:Mine", "importing 'no_such_module:Mine' failed with .*No module named"),
        ("mine:Yours", "importing 'mine:Yours' failed with .* has no attribute"),
        (
            "mine:number",
            "expected 'mine:number' to be a class derived from pflcore.Algorithm, got int",
        ),
        (
            3,
            "expected a name, a class derived from pflcore.Algorithm or an instance of one, got "
            "int",
        ),
        (
            nn.Linear,
            "expected a name, a class derived from pflcore.Algorithm or an instance of one, got "
            "Linear",
        ),
    ],
)
def test_what_is_no_algorithm_is_one_sentence(package, given, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^algorithm: {sentence}") as e:
        simulation(given)
    assert str(e.value).count(". ") == 0
