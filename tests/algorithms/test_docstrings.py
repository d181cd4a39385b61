"""The tensors of every algorithm are those that its docstring lists.

Names and shapes are compared: of the server's and the client's state, of downloads and
of uploads.
"""

import inspect
import re
import warnings
from collections import defaultdict
from dataclasses import fields, replace
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from small import held_out, images, layers, make_setting

from pflcore import Net, Training, step
from pflcore.algorithms import ALGORITHMS, SharedRows
from pflcore.simulation.round import RunConfig, initial_state

PARTS = ("server", "client", "down", "up")
BATCH_NORM = "Linear 6 5, BatchNorm1d 5, ReLU, Linear 5 3"
# The clients of two rounds. In the second, two are new and two are absent.
COHORTS = ([0, 1, 2, 3], [0, 1, 4, 5])
SIZES = {"N": 7, "S": 4}
# Options that change the tensors: choices among names, and others.
TURNED = ("optimizer", "guidance", "order", "dictionary")
OPTIONS = {"warmup_rounds": 1, "shared": "0.*"}
# Names before a shape, such as "m, v [P]" or "w and old [P]"; shapes are "[S, P - K]"
# or "[]".
NAMED = re.compile(r"((?:\w+(?:, | and ))*\w+) \[([^\]]*)\]")


def docstring(cls):
    """The text of the class, or of the class that it is a preset of."""
    texts = (" ".join((c.__dict__.get("__doc__") or "").split()) for c in cls.__mro__)
    return next(text for text in texts if "server:" in text)


def clause(cls, part):
    """The docstring's words on one of the `PARTS`, with those that it refers to."""
    text = re.search(rf"\b{part}: (.*?)(?: · |\. |\.$)", docstring(cls))[1]
    classes = {}
    for algorithm in ALGORITHMS.values():
        classes |= {c.__name__: c for c in algorithm.__mro__}
    for name in re.findall(r"see `(\w+)`", text):
        text = f"{text}; {clause(classes[name], part)}"
    return text


def stated(cls, part):
    """The shapes that the docstring gives each name; a shape is a list of words."""
    shapes = defaultdict(list)
    for names, shape in NAMED.findall(clause(cls, part)):
        for name in re.split(", | and ", names):
            shapes[name].append([word for word in shape.split(", ") if word])
    return dict(shapes)


def variants(cls):
    """Instances with each choice of each option that changes the tensors."""
    yield cls()
    own = {f.name for f in fields(cls)}
    hints = get_type_hints(cls)
    turned = own & {*TURNED}
    choices = {k: get_args(hints[k]) for k in turned if get_origin(hints[k]) is Literal}
    choices |= {k: (v,) for k, v in OPTIONS.items() if k in own}
    for name, options in choices.items():
        for option in options:
            try:
                yield cls(**{name: option})
            except ValueError:  # it wants other options, too
                continue


def shape_of(value):
    """The shape of a tensor, or of shared rows."""
    tensor = value.rows if isinstance(value, SharedRows) else value
    return tuple(tensor.shape)


@cache
def context():
    """The federation and the options that all algorithms train with."""
    data = held_out(images([10, 15, 20, 10, 15, 20, 10], classes=3))
    training = Training(lr=0.1, batch_size=4)
    return make_setting(Net(layers(BATCH_NORM)), data, training, rounds=4, workers=1)


def two_rounds(alg):
    """The tensors of two rounds: pairs of a part and the shapes of its names."""
    seen = []

    def note(part, tensors, skip=0):
        seen.append((part, {k: shape_of(v)[skip:] for k, v in tensors.items()}))
        return tensors

    class Watched(type(alg)):
        def init(self, *args, **kwargs):
            return note("server", super().init(*args, **kwargs))

        def init_client(self, *args):
            return note("client", super().init_client(*args), skip=1)

        def send(self, *args):
            return note("down", super().send(*args))

        def train(self, *args):
            own, up, fit = super().train(*args)
            note("client", own, skip=1)
            note("up", up)
            return own, up, fit

    watched = Watched(**{f.name: getattr(alg, f.name) for f in fields(alg)})
    net = alg.prepare(Net(layers(BATCH_NORM)))
    config = RunConfig.of(watched, replace(context(), net=net))
    state = initial_state(watched, net, SIZES["N"])
    seen = [(part, tensors) for part, tensors in seen if part == "server"]
    for ids in COHORTS:
        state, _ = step(config, state, torch.tensor(ids))
        note("server", state.server)
    return seen, net


@cache
def played(cls):
    """The tensors of every variant's rounds, and the sizes that letters stand for."""
    rounds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for alg in variants(cls):
            seen, net = two_rounds(alg)
            sizes = {**SIZES, "P": net.size, "b": len(net.b0)}
            if hasattr(alg, "k"):
                sizes["k"] = alg.k
            if hasattr(alg, "hidden_size"):
                sizes["H"] = alg.hidden_size
            rounds.append((alg, seen, sizes))
    return rounds


def names(cls, part):
    """The names of a part's tensors over all variants."""
    found = set()
    for _, seen, _ in played(cls):
        found.update(*(shapes for where, shapes in seen if where == part))
    return found


def fits(words, shape, sizes):
    """True where a shape is the one that the words describe.

    A letter that stands alone for the first time takes the size, and keeps it.
    """
    if len(words) != len(shape):
        return False
    sizes_of_shape = dict(sizes)
    for word, size in zip(words, shape, strict=True):
        factor, letter = re.fullmatch(r"(?:(\d+) )?(.*)", word).groups()
        if letter.isidentifier() and letter not in sizes_of_shape:
            sizes_of_shape[letter] = size / int(factor or 1)
        expected = eval(letter, {}, sizes_of_shape) * int(factor or 1)
        if expected != size:
            return False
    sizes |= {k: v for k, v in sizes_of_shape.items() if k not in VARYING}
    return True


# Letters for sizes that change from round to round.
VARYING = {"M", "R", "U", "nodes"}


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_names_and_shapes_are_those_that_the_docstring_says(name):
    cls = ALGORITHMS[name]
    for part in PARTS:
        there = names(cls, part)
        said = {*stated(cls, part)}
        text = clause(cls, part)
        assert there <= said, f"{part}: {text!r} gives no {there - said}"
        if said - there:  # a preset's text is that of its fellows too
            fellows = [c for c in ALGORITHMS.values() if docstring(c) == docstring(cls)]
            there = there.union(*(names(c, part) for c in fellows))
        assert said <= there, f"{part}: {text!r} gives {said - there} too many"
        assert text.startswith("nothing") or there, f"{part}: {text} for no tensors"
    for alg, seen, sizes in played(cls):
        sizes = dict(sizes)
        for part, shapes in sorted(seen, key=lambda pair: PARTS.index(pair[0])):
            said = stated(cls, part)
            for key, shape in shapes.items():
                told = any(fits(words, shape, sizes) for words in said.get(key, []))
                assert told, f"{part} of {alg}: {key} is {shape}, not {said.get(key)}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_docstring_speaks_of_options_that_are_there(name):
    cls = ALGORITHMS[name]
    own = " ".join((cls.__doc__ or "").split())
    for option in ("server_lr", "weighting"):
        assert f"`{option}`" not in own or option in {f.name for f in fields(cls)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_docstring_describes_each_option_of_its_class(name):
    cls = ALGORITHMS[name]
    bases = [c for c in cls.__mro__ if c.__module__.startswith("pflcore.")]
    for base in bases:
        entries = inspect.cleandoc(base.__doc__).partition("\nArgs:\n")[2]

        got = re.findall(r"^    (\w+): ", entries, re.MULTILINE)
        want = [name for name in inspect.get_annotations(base) if name != "traits"]

        assert got == want, base


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_signature_names_its_types(name):
    assert "Annotated[" not in str(inspect.signature(ALGORITHMS[name]))
