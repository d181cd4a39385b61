"""Candidates that a study proposes one by one, from ranges and lists of values.

A study is Optuna's, or any object with its `ask` and `tell`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pflcore.check import (
    Expectation,
    Number,
    checked,
    expectation_of,
    import_optional,
    require,
)

Options = dict[str, Any]


@checked
@dataclass(frozen=True)
class Range:
    """A range of an option's values, from which `tune(trials=)` draws.

    Whole numbers are drawn where both ends are whole numbers. Raises ValueError where
    the ends are not in order, and with `log` for a range that does not begin above 0.

    Args:
        low: The smallest value.
        high: The largest value.
        log: True draws the logarithm evenly, for an option whose order of magnitude is
            unknown, such as a step size.
    """

    low: Number
    high: Number
    log: bool = False

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        require(self.low < self.high, "Range", "low below high", ends)
        fits = self.low > 0 or not self.log
        require(fits, "Range", "low above 0, for its logarithm", ends)

    def __str__(self) -> str:
        scale = ", evenly in its logarithm" if self.log else ""
        return f"the range from {self.low:g} to {self.high:g}{scale}"

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        return self.low, self.high


Grid = Mapping[str, Sequence[Any] | Range]
# A grid as callers write it: for a type checker, a dict of lists and ranges is a
# dict[str, object], which is no `Grid`. Its values are checked at run time.
WrittenGrid = Annotated[
    Mapping[str, Any],
    Expectation(
        "a dict of options, each with a list of values or a Range",
        expectation_of(Grid).fits,
    ),
]


class Study(Protocol):
    """The part of Optuna's `Study` that a search uses.

    `ask()` returns a trial, whose methods `suggest_float(key, low, high, log=)`,
    `suggest_int`, likewise, and `suggest_categorical(key, values)` propose a value.
    `tell(trial, value)` takes its result. The one entry of `directions` has the name
    "MAXIMIZE" or "MINIMIZE".
    """

    def ask(self) -> Any:
        """A new trial."""

    def tell(self, trial: Any, values: float) -> Any:
        """Takes the result of a trial."""


def seeded_study(seed: int) -> Study:
    """A study that proposes the same candidates for the same seed and results.

    Its sampler is Optuna's TPE. Raises ImportError where Optuna is not installed.
    """
    optuna = import_optional("optuna", what="trials")
    sampler = optuna.samplers.TPESampler(seed=seed % 2**32)
    # The search says each result itself, so Optuna reports nothing but problems.
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study: Study = optuna.create_study(direction="maximize", sampler=sampler)
    finally:
        optuna.logging.set_verbosity(level)
    return study


@dataclass
class Proposals:
    """A study's proposals for the values of a grid.

    Raises ValueError for what is no study, or one of several directions.

    Attributes:
        study: The study.
        grid: The values of each option: a range, or a list.
        count: The number of proposals.
        trial: The study's trial of the last proposal.
        sign: The factor by which the study is told a score: -1 where it minimizes.
    """

    study: Study
    grid: Grid
    count: int
    trial: Any = None
    sign: int = field(init=False)

    def __post_init__(self) -> None:
        is_study = all(hasattr(self.study, name) for name in ("ask", "tell"))
        words = "a study of Optuna, as optuna.create_study() makes it"
        require(is_study, "search", words, self.study)
        directions = [d.name for d in getattr(self.study, "directions", ())]
        is_single = len(directions) <= 1
        require(is_single, "search", "a study of one direction", directions)
        self.sign = -1 if directions == ["MINIMIZE"] else 1

    def ask(self) -> Options:
        """The values of the next candidate, by the grid's keys."""
        self.trial = self.study.ask()
        options = {}
        for key, values in self.grid.items():
            options[key] = self._suggest(key, values)
        return options

    def _suggest(self, key: str, values: Sequence[Any] | Range) -> Any:
        """The value that the study suggests for one option."""
        if not isinstance(values, Range):
            return self.trial.suggest_categorical(key, [*values])
        is_whole = all(isinstance(end, int) for end in values.ends)
        suggest = self.trial.suggest_int if is_whole else self.trial.suggest_float
        value: float = suggest(key, *values.ends, log=values.log)
        return value

    def tell(self, score: float) -> None:
        """Tells the study the score of the last candidate.

        Args:
            score: A higher score is better. It is minus infinity for a candidate that
                cannot be chosen.
        """
        self.study.tell(self.trial, self.sign * score)
