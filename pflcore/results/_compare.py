"""The differences of two runs: in their descriptions, and in their numbers.

Two runs with equal numbers have equal bits: a record has every digit of a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pflcore.check import summarize
from pflcore.results._json import to_json

Facts = Mapping[str, Any]
# Fields of a round's record that are no results, or are told by the header.
NOT_RESULTS = ("round", "algorithm", "engine", "seed", "seconds", "replayed")
MISSING = "-"  # in the text, for a field that one description does not have


class Effect(NamedTuple):
    """A line of docs/determinism.md: what differs, and what it does to the results.

    Attributes:
        what: The first words of the line.
        effect: The effect on the results, the first words of the second column.
        fields: The fields of a header that tell it. A name stands for the fields below
            it, too: "training" for "training.lr".
    """

    what: str
    effect: str
    fields: tuple[str, ...]


ARGUMENTS = (
    "algorithm",
    "options",
    "training",
    "data",
    "partition",
    "partition_options",
    "facts",
    "model",
    "model_options",
    "parameters",
    "clients",
    "n",
    "classes",
    "size",
    "participation",
    "sampling",
    "seed",
    "data_seed",
    "train_samples",
    "test_samples",
    "val",
    "clip",
    "adversary",
    "loss",
    "batch_norm",
    "private",
    "stream",
)
EFFECTS = (
    Effect("an argument of the run", "another run", ARGUMENTS),
    Effect("the initial weights", "another run", ("initial_weights",)),
    Effect(
        "the number of rounds",
        "another run for a schedule, and for a method that looks at it; else the same "
        "bits in the rounds that both have",
        ("rounds",),
    ),
    Effect(
        "which clients are evaluated, on which split and by which metrics",
        "the same bits in training",
        ("eval_clients", "eval_split", "metrics", "target", "model_target"),
    ),
    Effect(
        "the engine (a record names it)",
        "close: 1e-9 in float64, 1e-4 in float32 after some steps",
        ("engine", "path.engine", "path.form"),
    ),
    Effect(
        "`Hardware(clients_per_block=)` under vmap",
        "close: 1e-9 in float64",
        ("clients_per_block",),
    ),
    Effect("a GPU instead of the CPU", "close", ("device",)),
    Effect(
        "TF32 on a card",
        "close: 1e-3 of an input's size in each product",
        ("tf32",),
    ),
    Effect("CUDA graphs", "the same bits", ("path.graphs",)),
    Effect("the instruction set, so the processor", "close", ("backend.isa",)),
    Effect("kernels or references", "close", ("backend.kernels",)),
    Effect("another torch or pflcore", "close", ("versions", "backend.torch")),
    Effect("threads inside an op", "the same bits", ("backend.threads",)),
)


@dataclass(frozen=True)
class Difference:
    """A number of a round that differs between two runs.

    Attributes:
        field: The name of the number in the record, such as "train_loss" or
            "eval.loss".
        client: The id of the first client whose number differs; None for a number that
            belongs to no client.
        first: The value of the first run.
        second: The value of the second run.
        largest: The largest absolute difference, over all clients; None for values that
            are no numbers, such as the ids of the cohort.
        clients: The ids of all clients whose number differs.
        client_name: The name of the first of them; None where it has none.
    """

    field: str
    client: int | None
    first: Any
    second: Any
    largest: float | None = None
    clients: tuple[int, ...] = ()
    client_name: str | None = None

    def __str__(self) -> str:
        name = self.field
        if self.client is not None:
            name += f" of client {self.client_name or self.client}"
        text = f"{name}: {summarize(self.first)} / {summarize(self.second)}"
        if self.largest is not None:
            text += f", by {self.largest:.3g}"
        if len(self.clients) > 1:
            text += f" at most, of {len(self.clients)} clients"
        return text


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences of two runs, as `History.compare` returns it.

    Attributes:
        names: The names of the two runs.
        description: The values of the fields of the headers that differ, as (first run,
            second run) by the field's name, such as "training.lr". None stands for a
            field that a header lacks.
        num_rounds: The number of rounds that both runs have.
        extra_rounds: The numbers of the rounds that only the first run has, and of
            those that only the second run has.
        round: The first of the common rounds that differs; None where all are equal.
        differences: What differs in that round, one entry for each kind of number.
        effects: The lines of docs/determinism.md on what differs in the description.
    """

    names: tuple[str, str]
    description: dict[str, tuple[Any, Any]]
    num_rounds: int
    extra_rounds: tuple[list[int], list[int]]
    round: int | None = None
    differences: list[Difference] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

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
            lines.append("The descriptions differ:")
        else:
            lines.append("The descriptions are equal.")
        for name, values in self.description.items():
            first, second = (_shown(value) for value in values)
            lines.append(f"  {name}: {first} / {second}")
        lines += self._round_lines()
        if self.effects:
            lines.append("docs/determinism.md on what differs:")
        for effect in self.effects:
            lines.append(f"  {effect.what}: {effect.effect}")
        if self.round is not None and not self._is_explained:
            lines.append(
                "The descriptions do not explain it. They do not show changes of your "
                "own code or data files, and ops that do not repeat on a GPU "
                "(docs/determinism.md)."
            )
        return "\n".join(lines)

    @property
    def _is_explained(self) -> bool:
        """True where one of the effects is a change of the results."""
        return any(not e.effect.startswith("the same bits") for e in self.effects)

    def _round_lines(self) -> Iterator[str]:
        """Yields lines of text on the rounds."""
        if self.round is not None:
            if self.round > 1:
                yield f"Rounds before {self.round} have equal bits."
            yield f"Round {self.round} is the first that differs:"
            for difference in self.differences:
                yield f"  {difference}"
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
    description = {}
    for name in {**first, **second}:
        values = first.get(name), second.get(name)
        if values[0] != values[1]:
            description[name] = values
    by_number = [{line["round"]: line for line in lines} for lines in rounds]
    common = sorted({*by_number[0]} & {*by_number[1]})
    extra = [sorted({*lines} - {*common}) for lines in by_number]
    first_round = None
    differences: list[Difference] = []
    for number in common:
        lines = [to_json(runs[number]) for runs in by_number]
        differences = [*_round_differences(lines[0], lines[1])]
        if differences:
            first_round = number
            client_names = headers[0].get("names")
            differences = [_with_name(one, client_names) for one in differences]
            break
    return Comparison(
        names,
        description,
        len(common),
        (extra[0], extra[1]),
        first_round,
        differences,
        effects_of([*description]),
    )


def _with_name(difference: Difference, names: Sequence[Any] | None) -> Difference:
    """The difference with the name of its first client, where clients have names."""
    client = difference.client
    if client is None or client >= len(names or ()):
        return difference
    return replace(difference, client_name=str((names or ())[client]))


def effects_of(names: Sequence[str]) -> list[Effect]:
    """The lines of docs/determinism.md on fields of a header that differ."""
    effects = []
    for effect in EFFECTS:
        prefixes = tuple(f"{name}." for name in effect.fields)
        if any(n in effect.fields or n.startswith(prefixes) for n in names):
            effects.append(effect)
    return effects


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


def _shown(value: Any) -> str:
    """A value of a description in a few words."""
    return MISSING if value is None else summarize(value)


def _round_differences(first: Facts, second: Facts) -> Iterator[Difference]:
    """Yields the differences of two records of one round.

    The cohort comes first: where it differs, all numbers of clients do.
    """
    for key in {**first, **second}:
        values = first.get(key), second.get(key)
        if key in NOT_RESULTS or key in ("eval", "report") or values[0] == values[1]:
            continue
        if key == "relative_update_norm":
            ids = first.get("cohort"), second.get("cohort")
            difference = _client_difference(key, _by_id(values, ids))
        else:
            difference = Difference(key, None, *values, _distance(*values))
        if difference is not None:
            yield difference
    yield from _evaluation_differences(first.get("eval"), second.get("eval"))
    yield from _report_differences(first.get("report"), second.get("report"))


def _evaluation_differences(first: Any, second: Any) -> Iterator[Difference]:
    """Yields the differences of two evaluations, over what both have.

    What one run did not evaluate is no difference: it changes no training.
    """
    if not first or not second:
        return
    evaluations = (first, second)
    ids = [evaluation.get("clients") for evaluation in evaluations]
    sizes = _by_id([evaluation.get("size") for evaluation in evaluations], ids)
    for key in first:
        values = [evaluation.get(key) for evaluation in evaluations]
        if key == "clients" or None in values:
            continue
        by_id = _by_id(values, ids)
        for i, run_sizes in enumerate(sizes):
            # A client with 0 samples was not evaluated.
            by_id[i] = {c: v for c, v in by_id[i].items() if run_sizes.get(c) != 0}
        difference = _client_difference(f"eval.{key}", by_id)
        if difference is not None:
            yield difference


def _report_differences(first: Any, second: Any) -> Iterator[Difference]:
    """Yields the differences of what the algorithm reports."""
    reports = [flatten(report or {}) for report in (first, second)]
    for key in {**reports[0], **reports[1]}:
        values = reports[0].get(key), reports[1].get(key)
        if values[0] != values[1]:
            yield Difference(f"report.{key}", None, *values, _distance(*values))


def _by_id(values: Sequence[Any], ids: Sequence[Any]) -> list[dict[int, Any]]:
    """The clients' values of each run, by the clients' ids.

    Args:
        values: The values of each run, a list for each.
        ids: The ids of each run; None for the clients 0, 1, ...
    """
    by_id = []
    for numbers, clients in zip(values, ids, strict=True):
        numbers = numbers or []
        clients = range(len(numbers)) if clients is None else clients
        by_id.append(dict(zip(clients, numbers, strict=False)))
    return by_id


def _client_difference(name: str, by_id: Sequence[dict[int, Any]]) -> Difference | None:
    """The difference over the clients that both runs have; None where there is none."""
    first, second = by_id
    common = sorted({*first} & {*second})
    clients = [client for client in common if first[client] != second[client]]
    if not clients:
        return None
    values = (
        [first[client] for client in clients],
        [second[client] for client in clients],
    )
    return Difference(
        name,
        clients[0],
        values[0][0],
        values[1][0],
        _distance(*values),
        tuple(clients),
    )


def _distance(first: Any, second: Any) -> float | None:
    """The largest absolute difference of numbers, in lists of any depth.

    It is None where one value is no number, and where the lists' shapes differ. A
    number that was not finite is None in a record, and infinitely far from any other.
    """
    if isinstance(first, list) and isinstance(second, list):
        return _list_distance(first, second)
    if first == second:
        return 0.0
    pair = [math.inf if value is None else value for value in (first, second)]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in pair):
        return None
    return float(abs(pair[0] - pair[1]))


def _list_distance(first: list[Any], second: list[Any]) -> float | None:
    """The largest absolute difference of the numbers of two lists, see `_distance`."""
    if len(first) != len(second):
        return None
    largest = 0.0
    for pair in zip(first, second, strict=True):
        distance = _distance(*pair)
        if distance is None:
            return None
        largest = max(largest, distance)
    return largest
