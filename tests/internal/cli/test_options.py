"""Tests of command-line options that are made of dataclasses and functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest

from pflcore.algorithms import ALGORITHMS
from pflcore.check import PositiveFloat
from pflcore.data import PARTITIONS
from pflcore.lab.cli._data import DataOptions
from pflcore.lab.cli._experiment import Options, data_options_of, partition_of
from pflcore.lab.cli._options import (
    dataclass_of_arguments,
    field_comments,
    option_fields,
    parse,
)
from pflcore.lab.cli._output import OutputOptions
from pflcore.lab.cli._run import CompareOptions
from pflcore.lab.data import FEDERATIONS, SOURCES
from pflcore.train import Training

pytest.importorskip("tyro")


@dataclass(frozen=True)
class Base:
    lr: PositiveFloat = 1.0  # step size


@dataclass(frozen=True)
class Derived(Base):
    """Something."""

    n: int = 3  # number of them
    kind: Literal["a", "b"] = "a"  # which # of them
    # what takes more
    # than a line
    long: int = 0
    fast: bool = True  # at once
    where: Path | None = None  # a place
    rates: tuple[int, ...] = (1, 2)  # several
    curve: Callable[[int], float] | None = None  # not for a command line
    table: dict[str, Callable[[], int]] = field(default_factory=dict)


def cut(
    labels: object,
    *,
    sizes: Literal["A"] | Sequence[float] | None = None,
    alpha: Annotated[float, "above 0"] = 0.1,
    padding: int | Sequence[int] | str = 0,
) -> None:
    """Cuts."""


def parsed(groups, words, **how):
    return parse("prog", "About.", groups, words.split(), **how)


@pytest.mark.parametrize(
    "cls",
    [
        Options,
        OutputOptions,
        Training,
        CompareOptions,
        DataOptions,
        *ALGORITHMS.values(),
    ],
)
def test_every_option_has_help(cls):
    """The help is the field's comment or its entry in "Args:"."""
    missing = {f.name for f in option_fields(cls)} - {*field_comments(cls)}
    assert missing == set()


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_option_of_a_partition_has_help(name, capsys):
    """The help is the entry in the docstring's "Args:", nothing else."""
    choice = partition_of("digits", name)
    cls = dataclass_of_arguments(choice.function, choice.defaults)
    comments = field_comments(cls)
    assert {*comments} == {*choice.defaults} and all(comments.values())

    with pytest.raises(SystemExit):
        parsed({"partition": cls}, "--help")

    assert "Args:" not in capsys.readouterr().out


@pytest.mark.parametrize("data", ["folder:x", "leaf:x", *SOURCES, *FEDERATIONS])
def test_every_option_of_data_has_help(data):
    """Data without options are those that a partition cuts, and published ones."""
    choice = data_options_of(data)
    if choice is None:
        assert data in SOURCES or not data.startswith("synthetic_l")
        return
    comments = field_comments(dataclass_of_arguments(choice.function, choice.defaults))
    assert {*comments} == {*choice.defaults} and all(comments.values())


def test_help_is_the_comments_of_all_bases(capsys):
    with pytest.raises(SystemExit) as e:
        parsed({"some": Derived}, "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert e.value.code == 0 and "Something." in said
    lines = (
        "--lr FLOAT step size (default: 1.0)",
        "which # of them",
        "what takes more than a line",
    )
    assert all(words in said.replace("│ ", "") for words in (*lines, "--rates"))
    assert "--curve" not in said and "--table" not in said


def test_values_come_by_group_and_names_are_taken_once():
    groups = {"run": Base, "weight_erosion": Derived, "other": Base}
    words = "--lr 4 --weight-erosion-lr 0.25 --no-fast --other.lr -1"
    got = parsed(groups, words, prefixed=["other"])
    # which is not checked here
    assert got["run"] == {"lr": 4.0} and got["other"] == {"lr": -1.0}
    assert got["weight_erosion"] == vars(Derived(lr=0.25, fast=False))
    assert "target" not in {f.name for f in option_fields(ALGORITHMS["waffle"])}


def test_options_of_a_function():
    cls = dataclass_of_arguments(
        partial(cut, alpha=0.1), {"sizes": None, "alpha": 0.1, "padding": 0}
    )
    for words, *want in (
        ("", None, 0.1, 0),
        ("--sizes A --padding same", "A", 0.1, "same"),
        ("--sizes 1 2.5 --alpha 3 --padding 2 3", [1, 2.5], 3.0, [2, 3]),
    ):
        found = parsed({"cut": cls}, words)["cut"]
        assert [found[k] for k in ("sizes", "alpha", "padding")] == want
