"""The differences of two runs: in their descriptions, and in their numbers.

Two runs with equal numbers have equal bits: a record has every digit of a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pflcore.check import summarize
from pflcore.simulation._json import to_json

Facts = Mapping[str, Any]
Values = dict[str, tuple[Any, Any]]  # of the first run and of the second, by name
# Fields of a round's record that are no results, or are told by the header.
NOT_RESULTS = ("round", "algorithm", "engine", "seed", "seconds", "replayed")
SHOWN_NUMBERS = 5  # of the first round that differs


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences of two runs, as `History.compare` returns it.

    Attributes:
        names: The names of the two runs.
        description: The values of the fields of the headers that differ, by the field's
            name, such as "training.lr". None stands for a field that a header lacks.
        num_rounds: The number of rounds that both runs have.
        extra_rounds: The numbers of the rounds that only the first run has, and of
            those that only the second run has.
        round: The first of the common rounds that differs; None where all are equal.
        differences: The values of the numbers of that round that differ, by a name such
            as "train_loss" or "eval.loss of client 3".
    """

    names: tuple[str, str]
    description: Values
    num_rounds: int
    extra_rounds: tuple[list[int], list[int]]
    round: int | None = None
    differences: Values = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True where both runs have the same rounds, with equal bits.

        The seconds of the rounds are left out.
        """
        return self.round is None and self.extra_rounds == ([], [])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [" / ".join(self.names)]
        if self.description:
            lines.append(
                "The descriptions differ (docs/determinism.md has the effects):"
            )
        else:
            lines.append("The descriptions are equal.")
        lines += _lines_of(self.description)
        lines += self._round_lines()
        return "\n".join(lines)

    def _round_lines(self) -> Iterator[str]:
        """Yields lines of text on the rounds."""
        if self.round is not None:
            yield f"Round {self.round} is the first that differs:"
            shown = dict(list(self.differences.items())[:SHOWN_NUMBERS])
            yield from _lines_of(shown)
            others = len(self.differences) - len(shown)
            if others:
                yield f"  and {others} more"
        elif self.num_rounds:
            yield (
                f"Equal bits in all {self.num_rounds} rounds that both have "
                "(seconds are left out)."
            )
        else:
            yield "The runs have no round in common."
        for name, rounds in zip(self.names, self.extra_rounds, strict=True):
            if rounds:
                yield f"{len(rounds)} round(s), from {rounds[0]} on, only in {name}."


def _lines_of(values: Values) -> Iterator[str]:
    """Yields a line of text for each pair of values."""
    for name, pair in values.items():
        first, second = ("-" if v is None else summarize(v) for v in pair)
        yield f"  {name}: {first} / {second}"


def compare_runs(
    headers: tuple[Facts, Facts],
    rounds: tuple[Sequence[Facts], Sequence[Facts]],
    names: tuple[str, str],
) -> Comparison:
    """The comparison of two runs.

    Args:
        headers: The headers of the first run and of the second run.
        rounds: The records of their rounds.
        names: The names of the two runs in the text.
    """
    first, second = (flatten(to_json(header)) for header in headers)
    description = _different(first, second, {**first, **second})
    by_number = [{line["round"]: line for line in lines} for lines in rounds]
    common = sorted({*by_number[0]} & {*by_number[1]})
    extra = [sorted({*lines} - {*common}) for lines in by_number]
    first_round = None
    differences: Values = {}
    for number in common:
        pair = [to_json(lines[number]) for lines in by_number]
        differences = _round_differences(pair[0], pair[1], headers[0].get("names"))
        if differences:
            first_round = number
            break
    return Comparison(
        names,
        description,
        len(common),
        (extra[0], extra[1]),
        first_round,
        differences,
    )


def _round_differences(
    first: Facts, second: Facts, client_names: Sequence[Any] | None
) -> Values:
    """The numbers of a round that differ, the cohort first.

    What one run alone evaluated is no difference: it changes no training.
    """
    one, other = ({k: v for k, v in r.items() if k != "eval"} for r in (first, second))
    one = flatten(one)
    other = flatten(other)
    keys = [key for key in {**one, **other} if key not in NOT_RESULTS]
    values = _different(one, other, keys)
    one = _evaluated_values(first.get("eval"), client_names)
    other = _evaluated_values(second.get("eval"), client_names)
    keys = [key for key in one if key in other]
    return {**values, **_different(one, other, keys)}


def _evaluated_values(
    evaluation: Any, client_names: Sequence[Any] | None
) -> dict[str, Any]:
    """The values of the clients that have samples, such as "eval.loss of client 3"."""
    values: dict[str, Any] = {}
    if not evaluation:
        return values
    ids = evaluation.get("clients") or range(len(evaluation["size"]))
    for key, numbers in evaluation.items():
        if key == "clients" or numbers is None:
            continue
        for i, client in enumerate(ids):
            if evaluation["size"][i]:
                name = client_names[client] if client_names else client
                values[f"eval.{key} of client {name}"] = numbers[i]
    return values


def _different(first: Facts, second: Facts, keys: Any) -> Values:
    """The pairs of values at these keys that differ."""
    pairs = {key: (first.get(key), second.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flatten(facts: Facts, prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings, by names such as "training.lr"."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
