"""Command-line options from dataclasses and functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from pflcore.algorithms import ALGORITHMS
from pflcore.cli.experiment import Options
from pflcore.cli.options import (
    Group,
    Option,
    comments,
    of_dataclass,
    of_function,
    of_words,
    options_of,
    parse,
    peek,
    simple,
)
from pflcore.cli.play import Output
from pflcore.train import Training


@dataclass(frozen=True)
class Base:
    lr: float = 1.0  # step size
    untold: int = 3


@dataclass(frozen=True)
class Derived(Base):
    """Something."""

    kind: Literal["a", "b"] = "a"  # which # of them
    # what takes more
    # than a line
    long: int = 0
    where: Path | None = None
    rates: tuple[int, ...] = (
        1,
        2,
    )  # several
    curve: Callable[[int], float] | None = None  # not for a command line
    table: dict[str, int] = field(default_factory=dict)


def cut(
    labels: object,
    *,
    sizes: str | Sequence[float] | None = None,
    alpha: float = 0.1,
    hidden: Sequence[int] = (200,),
) -> None:
    """A function with options."""


def test_the_comments_beside_fields_are_their_help():
    assert comments(Derived) == {
        "kind": "which # of them",
        "long": "what takes more than a line",
        "rates": "several",
        "curve": "not for a command line",
    }
    assert comments(int) == {}


@pytest.mark.parametrize("cls", [Options, Output, Training, *ALGORITHMS.values()])
def test_every_option_has_help(cls):
    assert [option.name for option in options_of(cls)[1] if not option.help] == []


def test_fields_of_all_bases_become_options_and_functions_do_not():
    options, rest = of_dataclass(Derived, {"lr": "server_lr"})
    assert [(o.name, o.default, o.help) for o in options] == [
        ("server_lr", 1.0, "step size"),
        ("untold", 3, ""),
        ("kind", "a", "which # of them"),
        ("long", 0, "what takes more than a line"),
        ("where", None, ""),
        ("rates", (1, 2), "several"),
    ]
    assert rest == ["curve", "table"]


@pytest.mark.parametrize(
    ("kind", "is_simple"),
    [
        (int, True),
        (float | None, True),
        (Literal["a"], True),
        (tuple[int, ...], True),
        (Callable[[], int], False),
        (list[int], False),
    ],
)
def test_what_can_be_typed_on_a_command_line(kind, is_simple):
    assert simple(kind) is is_simple


def test_options_of_a_function_take_words_where_its_types_are_mixed():
    defaults = {"sizes": None, "alpha": 0.1, "hidden": (200,)}
    options = of_function(partial(cut, alpha=0.1), defaults)
    assert [(o.name, o.default) for o in options] == [
        ("sizes", None),
        ("alpha", 0.1),
        ("hidden", None),
    ]
    assert of_words({"sizes": ("A",), "alpha": 0.5, "hidden": ("300",)}, defaults) == {
        "sizes": "A",
        "alpha": 0.5,
        "hidden": [300],
    }
    assert of_words({"sizes": ("1", "2.5"), "hidden": None}, defaults) == {"sizes": [1, 2.5]}


def test_parsing_gives_values_by_group():
    pytest.importorskip("tyro")
    groups = [
        Group("run", "", [Option("n", int, 3), Option("out", Path | None, None)]),
        Group(
            "weight-erosion",
            "About.",
            [Option("n", float, 0.5), Option("fast", bool, True)],
            prefix=True,
        ),
        Group("empty", "", []),
    ]
    got = parse(
        "prog",
        "About.",
        groups,
        ["--n", "4", "--weight-erosion.n", "0.25", "--weight-erosion.no-fast"],
    )
    assert got == {
        "run": {"n": 4, "out": None},
        "weight-erosion": {"n": 0.25, "fast": False},
        "empty": {},
    }


def test_looking_ahead_at_an_option():
    argv = ["--algorithms", "a", "b", "--n", "3", "--partition=A*", "--x", "-1"]
    assert peek(argv, "--algorithms") == ["a", "b"]
    assert peek(argv, "--partition") == ["A*"]
    assert peek(argv, "--nothing") == []
    assert peek(["--data", "a", "--data", "b"], "--data") == ["b"]
