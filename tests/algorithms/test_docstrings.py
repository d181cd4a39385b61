"""What a docstring says of an algorithm's state is what the state is."""

import itertools
import re
import warnings
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from small import layers

from pflcore import Net
from pflcore.algorithms import ALGORITHMS, Cohort

BATCH_NORM = "Linear 6 5, BatchNorm1d 5, ReLU, Linear 5 3"
# options by which the state has other tensors
TURNED = ("optimizer", "guidance", "order")
# a list of names before a shape, such as "m, v [P]" or "w and old [P]"
NAMED = re.compile(r"((?:\w+(?:, | and ))*\w+) \[")


def docstring(cls):
    """The text of the class, or of the class that it is a preset of."""
    texts = (" ".join((c.__dict__.get("__doc__") or "").split()) for c in cls.__mro__)
    return next(text for text in texts if "server:" in text)


def clause(cls, of):
    """What it says of "server" or "client", and what it says to look up."""
    after = {"server": r"( · client: |\. |$)", "client": " · down: "}[of]
    text = re.search(rf"\b{of}: (.*?)(?:{after}|$)", docstring(cls))[1]
    others = {c.__name__: c for one in ALGORITHMS.values() for c in one.__mro__}
    for name in re.findall(r"see `(\w+)`", text):
        text = f"{text}; {clause(others[name], of)}"
    return text


def variants(cls):
    """Instances with each choice of what turns the state."""
    hints, kinds = get_type_hints(cls), {f.name for f in fields(cls)} & {*TURNED}
    choices = {k: get_args(hints[k]) for k in kinds if get_origin(hints[k]) is Literal}
    yield cls()
    for name, options in choices.items():
        for option in options:
            try:
                yield cls(**{name: option})
            except ValueError:  # it wants others beside it
                continue


def tensors(cls):
    """The names of the tensors of the server, and of a client, of all variants."""
    server, client = set(), set()
    for alg in variants(cls):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = alg.prepare(Net(layers(BATCH_NORM)))
            state = alg.init(**alg.server_init_args(net), n=4)
        two = Cohort(torch.arange(2), torch.ones(2, dtype=torch.int64), 4, 1, 5)
        server |= {*state}
        client |= {*alg.init_client(alg.send(state, two), net, 4)}
    return {"server": server, "client": client}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_state_is_what_the_docstring_says(name):
    cls = ALGORITHMS[name]
    for of, there in tensors(cls).items():
        text = clause(cls, of)
        missing = [k for k in there if not re.search(rf"\b{k}\b", text)]
        assert not missing, f"{of}: {text} names no {missing}"
        said = {
            *itertools.chain(*(re.split(", | and ", m) for m in NAMED.findall(text)))
        }
        if said - there:  # a preset's text is that of its fellows too
            fellows = [c for c in ALGORITHMS.values() if docstring(c) == docstring(cls)]
            there = there.union(*(tensors(c)[of] for c in fellows))
        assert said <= there, f"{of}: {text} names more than {there}"
        assert text.startswith("nothing") or there, f"{of}: {text} for no tensors"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_docstring_speaks_of_options_that_are_there(name):
    cls = ALGORITHMS[name]
    own = " ".join((cls.__doc__ or "").split())
    for option in ("server_lr", "weighting"):
        assert f"`{option}`" not in own or option in {f.name for f in fields(cls)}
