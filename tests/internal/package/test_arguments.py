"""Tests of the errors for wrong arguments.

Each error is one sentence of pflcore that names the argument. The annotations of a
callable give the wrong values; `TABLE` has those that annotations do not give.
"""

import importlib
import inspect
import math
import typing
from dataclasses import fields, is_dataclass
from typing import Literal

import pytest
import torch
from entry_points import sentence
from places import listed
from small import images, make_setting, tiny_model

import pflcore
from pflcore import (
    Adversary,
    Evaluation,
    Federation,
    Hardware,
    Net,
    Robustness,
    Simulation,
    Training,
    interop,
    metrics,
)
from pflcore.algorithms import ALGORITHMS, FedAvg, fixed_options
from pflcore.check import EXPECT_ANYTHING, expectation_of
from pflcore.simulation._state import State
from pflcore.simulation.round import RunConfig, initial_state

WORDS = ["a", "b"]
ROWS = torch.arange(12.0).reshape(4, 3)
LABELS = torch.tensor([0, 1, 1, 0])
TENSOR = ["text", WORDS, 3]
NAME = ["unknown", WORDS, 3]
IDS = [[99], [0, 0], [[0]], []]
DATA = images()
DICTS = [tiny_model()().state_dict() for _ in range(4)]
SETUP = RunConfig.of(
    FedAvg(), make_setting(Net(tiny_model()), DATA, Training(), workers=1)
)
RUN = {"algorithm": "fedavg", "model": tiny_model(), "data": DATA, "rounds": 1}
VECTOR = ["text", None, WORDS, 3, ROWS]
EMPTY = State({}, {}, torch.zeros(3, 0), torch.zeros(3, dtype=torch.bool))
# For each callable: its right arguments, and wrong values by the argument's name.
TABLE = {
    **dict.fromkeys((metrics.best, metrics.last_mean), ({}, {"curve": VECTOR})),
    **dict.fromkeys((metrics.mean, metrics.std), ({}, {"values": VECTOR})),
    **{
        f: ({"scores": torch.rand(4), "y": LABELS}, {"scores": TENSOR, "y": TENSOR})
        for f in (*metrics.METRICS.values(), metrics.is_correct)
    },
    metrics.weighted_mean: (
        {"values": [1.0], "weight": [1.0]},
        {"weight": [[1.0, 2.0], [-1.0]]},
    ),
    metrics.hurt: (
        {"after": [1.0], "before": [1.0]},
        {"after": VECTOR, "before": VECTOR},
    ),
    interop.pack: (
        {"uploads": DICTS},
        {"uploads": [[], [{}], [None], [{"a": "text"}]], "include": ["unknown"]},
    ),
    interop.personalize: ({"uploads": DICTS}, {"uploads": [[], [3]], "method": NAME}),
    pflcore.algorithm_of: ({"algorithm": "fedavg"}, {"algorithm": NAME}),
    interop.Client: (
        {"model": tiny_model(), "algorithm": "fedavg", "data": (ROWS, LABELS)},
        {"data": TENSOR, "algorithm": NAME},
    ),
    Simulation: (
        RUN,
        {
            "algorithm": NAME,
            "clients": [*IDS, 3],
            "hardware": [Hardware(device="cuda:99"), Hardware(device="mps")],
            "evaluation": [
                *(Evaluation(split=name) for name in ("unknown", "val")),
                *(Evaluation(clients=ids) for ids in ([99], [0, 0], [])),
                Evaluation(metrics=["unknown"]),
            ],
            "robustness": [
                Robustness(adversary=Adversary("noise", i)) for i in ([99], range(3))
            ],
        },
    ),
    pflcore.step: (
        {"config": SETUP, "state": initial_state(FedAvg(), SETUP.net, 3)},
        {"ids": IDS},
    ),
    Federation: (
        {"x": DATA.x, "y": DATA.y, "index": DATA.index},
        {"index": [{"train": 3}]},
    ),
}
JUNK = ["?", None, ["a", "b"], (0, -1), 3, -1, 0, 2.5, math.nan, True, object(), ROWS]
JUNK += [10**9, [-1], [0.5], [True, False, True]]
# The required arguments of dataclasses and classes.
GOOD = {
    "Adversary": {"attack": "noise", "clients": [1]},
    "Federation": {"x": DATA.x, "y": DATA.y, "index": DATA.index},
    "Simulation": {"algorithm": "fedavg", "model": tiny_model(), "data": DATA},
    "Case": {"given": FedAvg()},
    "Checkpoint": {"folder": "nowhere"},
    "CenteredClipping": {"clip_norm": 1.0},
    "FLTrust": {"trusted_client": 0},
    "Private": {"clip_norm": 1.0, "noise_multiplier": 1.0},
}


# Patterns of errors that name a part of the argument.
ALIAS = {
    **dict.fromkeys(("uploads", "states", "data", "clients"), r"client \d"),
    "method": "algorithm",
    "hardware": "device",
    "evaluation": "metrics|split",
    "robustness": "adversary",
    "name": "data|partition|model",
}


@pytest.mark.parametrize("f", TABLE, ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_a_wrong_argument_is_named_in_one_sentence(f, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, wrong = TABLE[f]
    for name, values in wrong.items():
        for value in values:
            with sentence(
                rf".*\b({name}|{ALIAS.get(name, name)})\b", (ValueError, TypeError)
            ):
                f(**{**good, name: value})


def public():
    """The callables in docs/api.md, and the algorithms."""
    for module, name in listed():
        if name and not module.endswith(
            ("flower", "distributed", "check", "reference", "cli")
        ):
            yield getattr(importlib.import_module(module), name)
    yield from ALGORITHMS.values()


def kinds(f):
    """The checked arguments of a callable, by name."""
    call = f.__init__ if inspect.isclass(f) else f
    if hasattr(call, "__wrapped__"):
        hints = typing.get_type_hints(call, include_extras=True)
    elif is_dataclass(f) and hasattr(f, "__post_init__"):
        hints = typing.get_type_hints(f, include_extras=True)
        hints = {
            x.name: hints[x.name]
            for x in fields(f)
            if x.init and x.name not in fixed_options(f)
        }
    else:
        return {}
    # Federation checks its arguments in its own code.
    if f is Federation:
        return {}
    given = {name: expectation_of(h) for name, h in hints.items() if name != "return"}
    return {name: kind for name, kind in given.items() if kind is not EXPECT_ANYTHING}


FOUND = {f: kinds(f) for f in public() if inspect.isclass(f) or inspect.isfunction(f)}
CASES = [
    pytest.param(f, k, id=f"{f.__module__}.{f.__qualname__}")
    for f, k in FOUND.items()
    if k
]


@pytest.mark.parametrize("f, given", CASES)
def test_what_an_annotation_does_not_allow_is_refused(f, given):
    is_op = f.__module__.startswith("pflcore.ops")
    for name, kind in given.items():
        shown = rf"{f.__name__}\({name}\)" if is_op else name
        for value in [v for v in JUNK if not kind.fits(v)]:
            with sentence(f"{shown}: expected .*, got "):
                f(**{**GOOD.get(f.__name__, {}), name: value})


# These are made by pflcore, and not by its users.
GIVEN = """Backend Basis Claim Clients ClientGroups Cohort Comparison Fit ModelForm History Layout MixingWeights Nearest Objective
RoundOutcome PackedModels Partition Personalized SharedRows RowUpdate Run RunConfig RunEnd Source
State TopK Traits
apply"""  # noqa: E501
# Hooks call these at each step or round with values of pflcore. Checks would take time.
IN_HOOKS = (
    "lazy_zeros map_rows normalize_rows project_to_simplex squared_norms to_device"
)
# A class is derived from the first, and decorated by the second.
OF_CLASSES = "ServerStep algorithm_options"
# Functions that check their arguments as fields of a value.
BY_VALUES = """bulyan centered_clipping clip_to_median geometric_median krum
mean_around_median mean_of median multi_krum nearest_neighbor_mixing
trimmed_mean MeanInput"""
UNCHECKED = f"{GIVEN} {IN_HOOKS} {OF_CLASSES} {BY_VALUES}".split()


def test_every_public_callable_is_checked():
    """tests/ops/test_laws.py tests the arguments of the ops."""
    unchecked = [f for f, found in FOUND.items() if not found and f not in TABLE]
    for f in [f for f in unchecked if not f.__module__.startswith("pflcore.ops")]:
        simple = inspect.isclass(f) and issubclass(f, (Exception, FedAvg.__base__))
        assert (
            f.__name__ in UNCHECKED or simple or not inspect.signature(f).parameters
        ), f


# The two annotations are equal in Python.
def test_choices_are_named_as_their_annotation_orders_them():
    for choices in (Literal["max", "avg"], Literal["avg", "max"]):
        assert expectation_of(choices).words == " or ".join(
            map(repr, typing.get_args(choices))
        )
