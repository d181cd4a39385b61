"""The columns of a table that compares runs.

A group has the runs of one algorithm with one set of options, which differ in the seed
alone. A column has a number for each group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pflcore import metrics
from pflcore.check import require
from pflcore.metrics import human_bytes
from pflcore.results._history import History
from pflcore.results._labels import TABLE_FIELDS, find_runs
from pflcore.results._notes import Groups, notes_on
from pflcore.results.record import DATA_FIELDS, Runs


def column_names(extra_metrics: Iterable[str], has_baseline: bool) -> list[str]:
    """The names of a table's columns, in their order."""
    names = ["best", "final", "last_mean", "std", "worst_decile"]
    names += sorted(extra_metrics)
    if has_baseline:
        names.append("hurt")
    return [*names, "bytes", "note"]


def require_columns(chosen: Iterable[str], names: Sequence[str]) -> None:
    """Raises ValueError for a chosen column that is none of these names."""
    words = f"some of {', '.join(names)}"
    if "hurt" not in names:
        words += ", and hurt with a baseline"
    for name in chosen:
        require(name in names, "columns", words, name, names)


class Cell(NamedTuple):
    """A number of a group of runs.

    Attributes:
        text: The number in words: mean and deviation over the seeds.
        mean: The mean over the seeds; NaN where the cell has no number.
        std: The standard deviation over the seeds; NaN for a single seed.
    """

    text: str
    mean: float = math.nan
    std: float = math.nan


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: The name by which a user chooses it.
        heading: The words above it.
        cells: A cell for each group.
        higher_is_better: The direction of its numbers; None where no number is better
            than another.
    """

    name: str
    heading: str
    cells: list[Cell]
    higher_is_better: bool | None = None

    def best(self) -> list[bool]:
        """True for each cell with the best number, as far as its text shows it.

        It is false for all cells where only one of them has a number.
        """
        means = [cell.mean for cell in self.cells if not math.isnan(cell.mean)]
        if self.higher_is_better is None or len(means) < 2:
            return [False] * len(self.cells)
        best = max(means) if self.higher_is_better else min(means)
        shown = {_shown(cell) for cell in self.cells if cell.mean == best}
        return [_shown(cell) in shown for cell in self.cells]


def _shown(cell: Cell) -> str:
    """The mean of a cell as it is shown."""
    return cell.text.partition(" ")[0]


def columns_of(
    runs: Runs, groups: Groups, metric: str, last: int, baseline: str | None
) -> list[Column]:
    """All columns of a table.

    Args:
        runs: The runs of the table.
        groups: The runs of each row, one for each seed.
        metric: The main metric.
        last: The number of rounds in the column "mean of last".
        baseline: The name of a group; None for no column of clients that are hurt.
    """
    targets = sorted({run.target for run in runs if run.target is not None})
    # No run has a mean of more rounds than the longest run has.
    last = max(1, min(last, max(run.rounds_played for run in runs)))
    columns = []
    for client in (None, *targets):  # None stands for the mean over clients
        columns += _client_columns(groups, client, metric, last)
    columns += _spread_columns(groups, metric)
    extra_metrics = set().union(*(run.extra_metrics for run in runs)) - {metric}
    for name in sorted(extra_metrics):
        columns.append(_extra_column(groups, name))
    baseline_runs = find_runs(groups, baseline) if baseline else None
    if baseline_runs:
        columns.append(_hurt_column(groups, baseline_runs, metric, str(baseline)))
    columns.append(_column("bytes", "bytes sent", groups, _bytes_cell))
    columns.append(_column("note", "note", groups, _notes_cell))
    return columns


def _column(
    name: str,
    heading: str,
    groups: Groups,
    cell_of: Callable[[Runs], Cell],
    higher_is_better: bool | None = None,
) -> Column:
    """The column with `cell_of` each group."""
    cells = [cell_of(runs) for runs in groups.values()]
    return Column(name, heading, cells, higher_is_better)


def _client_columns(
    groups: Groups, client: int | None, metric: str, last: int
) -> list[Column]:
    """The columns of one client, or of the mean over clients."""
    higher_is_better = metrics.is_higher_better(metric)
    prefix = ""
    if client is not None:
        runs = itertools.chain.from_iterable(groups.values())
        run = next(run for run in runs if run.target == client)
        prefix = f"client {run.client_name(client)}: "

    def best(run: History) -> float:
        return metrics.best(_curve(run, client, metric)[1], higher_is_better).value

    def final(run: History) -> float:
        return metrics.final(_curve(run, client, metric)[1])

    def last_mean(run: History) -> float:
        rounds, values = _curve(run, client, metric)
        return metrics.last_mean(values, rounds, last)

    def best_cell(runs: Runs) -> Cell:
        return _main_cell(runs, best, metric)

    def final_cell(runs: Runs) -> Cell:
        return _main_cell(runs, final, metric)

    def last_cell(runs: Runs) -> Cell:
        # The mean of a shorter run is of fewer rounds than the heading tells.
        is_short = any(run.rounds_played < last for run in runs)
        return Cell("-") if is_short else _main_cell(runs, last_mean, metric)

    columns = []
    for name, heading, cell_of in (
        ("best", "best*", best_cell),
        ("final", "final", final_cell),
        ("last_mean", f"mean of last {last}", last_cell),
    ):
        columns.append(
            _column(name, prefix + heading, groups, cell_of, higher_is_better)
        )
    return columns


def _spread_columns(groups: Groups, metric: str) -> list[Column]:
    """The columns of the spread over clients at the last evaluation."""
    higher_is_better = metrics.is_higher_better(metric)

    def std(run: History) -> float:
        return metrics.std(_last_values(run, metric))

    def worst_decile(run: History) -> float:
        values = _last_values(run, metric)
        return metrics.worst_decile(values, higher_is_better=higher_is_better)

    def std_cell(runs: Runs) -> Cell:
        return _main_cell(runs, std, metric)

    def worst_cell(runs: Runs) -> Cell:
        return _main_cell(runs, worst_decile, metric)

    return [
        _column("std", "std over clients", groups, std_cell),
        _column("worst_decile", "worst decile", groups, worst_cell, higher_is_better),
    ]


def _curve(
    run: History, client: int | None, metric: str
) -> tuple[list[int], list[float]]:
    """The curve of a run; empty where it has no such metric."""
    return run.curve(client, metric) if metric in run.keys else ([], [])


def _last_values(run: History, metric: str) -> Any:
    """The clients' last values; empty where the run has no such metric."""
    return run.last_values(metric) if metric in run.keys else []


def _main_cell(runs: Runs, number: Callable[[History], float], metric: str) -> Cell:
    """The cell of an accuracy, in percent, or of another metric."""
    numbers = [number(run) for run in runs]
    if metric == "accuracy":
        return _cell([100 * value for value in numbers], digits=2)
    return _cell(numbers, digits=5)


def _extra_column(groups: Groups, metric: str) -> Column:
    """The column of a metric's mean at the last evaluation."""

    def cell(runs: Runs) -> Cell:
        values = []
        for run in runs:
            if metric in run.extra_metrics:
                values.append(metrics.mean(run.last_values(metric)))
        return _cell(values, digits=4)

    direction = metrics.HIGHER_IS_BETTER.get(metric)
    return _column(metric, metric, groups, cell, direction)


def _hurt_column(
    groups: Groups, baseline_runs: Runs, metric: str, baseline: str
) -> Column:
    """The column of the percentage of clients below the baseline."""
    by_seed: dict[Any, History] = {}
    for run in baseline_runs:
        by_seed.setdefault(run.header.get("seed"), run)

    def cell(runs: Runs) -> Cell:
        percents = []
        for run in runs:
            same_seed = by_seed.get(run.header.get("seed"))
            percents.append(_percent_hurt(run, same_seed, metric))
        return _cell(percents, digits=1)

    return _column("hurt", f"% hurt vs {baseline}", groups, cell)


def _percent_hurt(run: History, baseline: History | None, metric: str) -> float:
    """The percentage of clients that do worse than in the baseline run.

    NaN where no baseline run has the same seed, and where the two runs cannot be
    compared.
    """
    if baseline is None or not _are_comparable(run, baseline, metric):
        return math.nan
    return metrics.hurt(
        run.last_values(metric),
        baseline.last_values(metric),
        metrics.is_higher_better(metric),
    )


def _are_comparable(run: History, baseline: History, metric: str) -> bool:
    """True where two runs have the same data and the same evaluated clients."""
    for key in (*TABLE_FIELDS, *DATA_FIELDS, "partition_options", "eval_split"):
        if run.header.get(key) != baseline.header.get(key):
            return False
    last = run.last_evaluation
    baseline_last = baseline.last_evaluation
    if metric not in last or metric not in baseline_last:
        return False
    same_clients = last.get("clients") == baseline_last.get("clients")
    return same_clients and len(last[metric]) == len(baseline_last[metric])


def _bytes_cell(runs: Runs) -> Cell:
    """The cell of the bytes sent, the mean over seeds."""
    totals = []
    for run in runs:
        by_round = run.cumulative_bytes() or [0]
        totals.append(float(by_round[-1]))
    mean = metrics.mean(totals)
    return Cell(human_bytes(mean), mean)


def _notes_cell(runs: Runs) -> Cell:
    """The cell of the notes on a group's runs, without repetitions."""
    notes = [", ".join(notes_on(run)) for run in runs]
    unique = dict.fromkeys(filter(None, notes))
    return Cell("; ".join(unique))


def _cell(values: Sequence[float], digits: int) -> Cell:
    """The cell of numbers by seed: mean ± standard deviation.

    The deviation over the seeds is that of a population. The cell is "-" where no seed
    has a value, and where a value is infinite.
    """
    if not metrics.count(values) or any(map(math.isinf, values)):
        return Cell("-")
    mean = metrics.mean(values)
    text = f"{mean:.{digits}f}"
    if len(values) == 1:
        return Cell(text, mean)
    std = metrics.std(values)
    return Cell(f"{text} ± {std:.{digits}f}", mean, std)
