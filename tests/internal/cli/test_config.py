"""The TOML text of options has the same values when it is read again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import swept

from pflcore.algorithms import class_of
from pflcore.lab.cli._config import config_text, read_config
from pflcore.lab.cli._experiment import Options
from pflcore.lab.cli._options import flags_of, parse
from pflcore.lab.cli._output import OutputOptions
from pflcore.train import Training

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")


@dataclass
class Some:
    """Options of every kind."""

    text: str = "auto"
    number: float = 0.5
    maybe: int | None = 3
    fast: bool = True
    either: bool | None = None
    names: tuple[str, ...] = ("a",)
    choice: int | Literal["all"] = "all"
    place: Path | None = None


def read_again(values, groups, prefixed, folder):
    """The values, written into a file, read again and parsed."""
    flags = flags_of(groups, prefixed)
    path = folder / "o.toml"
    path.write_text(config_text(values, flags, "c"), encoding="utf-8")
    defaults = read_config(path).defaults(flags)
    return parse("prog", "About.", groups, [], prefixed, defaults=defaults)


# A word may be anything but the word for None, and may look like an option.
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1
)
WORDS = st.one_of(TEXTS, st.sampled_from(["-x", "--lr", "3", 'a "b" \\n', "#"]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    text=WORDS,
    number=st.floats(allow_nan=False),
    maybe=st.none() | st.integers(),
    fast=st.booleans(),
    either=st.none() | st.booleans(),
    names=st.lists(st.from_regex(r"[a-z][a-z:._]*", fullmatch=True)).map(tuple),
    choice=st.integers() | st.just("all"),
    place=st.none() | st.from_regex(r"[a-z/]+", fullmatch=True).map(Path),
)
def test_options_of_every_kind_are_read_as_they_were_written(tmp_path, **some):
    groups = {"some": Some, "other": Some}
    values = {"some": some, "other": vars(Some())}
    assert read_again(values, groups, ["other"], tmp_path) == values


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept(one_in=1))
def test_the_defaults_of_every_algorithm_are_read_as_they_were_written(name, tmp_path):
    groups = {"run": Options, "training": Training, "output": OutputOptions}
    groups[name] = class_of(name)
    values = parse("prog", "About.", groups, [])
    assert read_again(values, groups, [], tmp_path) == values
