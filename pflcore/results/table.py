"""Markdown tables that compare runs.

A group has the runs of one algorithm with one set of options, which differ in the seed
alone. A table has a row for each group and a column for each number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pflcore import metrics
from pflcore.check import PositiveInt, checked, require
from pflcore.metrics import human_bytes
from pflcore.results._labels import TABLE_FIELDS, find_runs, label_runs
from pflcore.results.record import DATA_FIELDS, Run, Runs

__all__ = ["table"]
Groups = Mapping[str, list[Run]]  # the runs of each group, by its label
SHOWN_OUTLIERS = 3  # the most clients that a footnote names


@checked
def table(runs: Runs, last: PositiveInt = 10, baseline: str | None = None) -> str:
    """The runs as Markdown: a table per experiment, a row per algorithm.

    Accuracies are in percent. The cell of several seeds has the mean ± standard
    deviation over the seeds.

    Args:
        runs: The runs, as from `pflcore.results.read`.
        last: The number of rounds in the column "mean of last".
        baseline: The name of an algorithm among the runs. It adds a column with the
            percentage of clients that do worse than with that algorithm.

    Raises ValueError where no run has the baseline's name.
    """
    names = list(label_runs(runs))
    known = {None, *names, *(run.algorithm for run in runs)}
    require(
        baseline in known, "baseline", f"one of {', '.join(names)}", baseline, names
    )
    experiments: dict[str, list[Run]] = {}
    for run in runs:
        experiments.setdefault(experiment_title(run), []).append(run)
    tables = []
    for title, members in experiments.items():
        tables.append(_table(title, members, last, baseline))
    return "\n".join(tables)


def experiment_title(run: Run) -> str:
    """The title of a run's table: data, partition, model and clients."""
    header = run.header
    words = []
    if header.get("data"):
        words.append(str(header["data"]))
    for key in ("partition", "model"):
        if header.get(key):
            words.append(f"{key} {header[key]}")
    if "n" in header:
        words.append(f"{header['n']} clients")
    return ", ".join(words) or "runs"


def split_name(run: Run) -> str:
    """The word for the split that a run was evaluated on."""
    names = {"test": "test", "val": "validation"}
    return names.get(run.header.get("eval_split", "test"), "training")


def _table(title: str, runs: Runs, last: int, baseline: str | None) -> str:
    """The table of one experiment, with its heading and footnotes."""
    metric = next((run.main_metric for run in runs if run.evaluations), "accuracy")
    groups = label_runs(runs)
    distinct_groups = {
        label: _one_run_per_seed(members) for label, members in groups.items()
    }
    split = split_name(runs[0])
    quantity = "accuracy in percent" if metric == "accuracy" else "loss"
    optimistic = " (optimistic, as in the papers)" if split == "test" else ""
    rounds = max(run.rounds_played for run in runs)
    lines = [
        f"### {title}, {rounds} rounds\n",
        f"{split.capitalize()} {quantity}, mean over clients unless a client is "
        f"named{_seeds_note(distinct_groups)}.\n",
        *markdown_table(_rows(runs, distinct_groups, metric, last, baseline)),
        f"\n\\* the best round, selected on {split} data{optimistic}; std and worst "
        "decile: at the last evaluation.",
        *_footnotes(groups, distinct_groups),
        "",
    ]
    return "\n".join(lines)


def _seeds_note(groups: Groups) -> str:
    """A note on the number of seeds; "" for a single seed."""
    seeds = max(map(len, groups.values()))
    if seeds == 1:
        return ""
    fewer = [
        f"{label} {len(runs)}" for label, runs in groups.items() if len(runs) < seeds
    ]
    exceptions = f" ({', '.join(fewer)})" if fewer else ""
    return f"; mean ± std over {seeds} seeds{exceptions}"


def _one_run_per_seed(runs: Runs) -> list[Run]:
    """The first finished run of each seed, or else its first run."""
    by_seed: dict[Any, Run] = {}
    for run in sorted(runs, key=lambda run: run.unfinished):
        seed = run.header.get("seed", id(run))  # every run without a seed counts
        by_seed.setdefault(seed, run)
    return list(by_seed.values())


def _rows(
    runs: Runs, groups: Groups, metric: str, last: int, baseline: str | None
) -> list[list[str]]:
    """The heading of a table, and its rows, one per algorithm."""
    targets = sorted({run.target for run in runs if run.target is not None})
    clients = [None, *targets]  # None stands for the mean over clients
    # No run has a mean of more rounds than the longest run has.
    last = max(1, min(last, max(run.rounds_played for run in runs)))
    columns = list(_run_numbers(runs[0], clients, metric, last))
    extra_metrics = sorted(set().union(*(run.extra_metrics for run in runs)) - {metric})
    baseline_runs = find_runs(groups, baseline) if baseline else None
    hurt_column = [f"% hurt vs {baseline}"] if baseline_runs else []
    heading = ["algorithm", *columns, *extra_metrics, *hurt_column]
    rows = [[*heading, "bytes sent", "note"]]
    for label, members in groups.items():
        row = [label, *_main_cells(members, clients, metric, last)]
        row += [_extra_cell(members, name) for name in extra_metrics]
        if baseline_runs:
            row.append(_hurt_cell(members, baseline_runs, metric))
        rows.append([*row, _bytes_cell(members), _notes_cell(members)])
    return rows


def _run_numbers(
    run: Run, clients: Sequence[int | None], metric: str, last: int
) -> dict[str, float]:
    """The numbers of a run by column.

    A client None in `clients` is the mean over clients.
    """
    higher_is_better = metrics.is_higher_better(metric)
    numbers = {}
    for client in clients:
        rounds, values = run.curve(client, metric)
        prefix = "" if client is None else f"client {client}: "
        numbers[f"{prefix}best\\*"] = metrics.best(values, higher_is_better).value
        numbers[f"{prefix}final"] = metrics.final(values)
        last_mean = metrics.last_mean(values, rounds, last)
        numbers[f"{prefix}{last_mean_heading(last)}"] = last_mean
    final_values = run.last_values(metric)
    numbers["std over clients"] = metrics.std(final_values)
    numbers["worst decile"] = metrics.worst_decile(
        final_values, higher_is_better=higher_is_better
    )
    return numbers


def last_mean_heading(rounds: int) -> str:
    """The heading of the column with the mean over the last rounds."""
    return f"mean of last {rounds}"


def _main_cells(
    runs: Runs, clients: Sequence[int | None], metric: str, last: int
) -> list[str]:
    """The cells with the numbers of `_run_numbers`, one per column."""
    numbers = [_run_numbers(run, clients, metric, last) for run in runs]
    # The mean of a shorter run is of fewer rounds than the heading tells.
    is_short = any(run.rounds_played < last for run in runs)
    cells = []
    for column in numbers[0]:
        if is_short and column.endswith(last_mean_heading(last)):
            cells.append("-")
            continue
        cells.append(_main_cell([values[column] for values in numbers], metric))
    return cells


def _main_cell(values: Sequence[float], metric: str) -> str:
    """The cell of an accuracy, in percent, or of another metric."""
    if metric == "accuracy":
        return _cell([100 * value for value in values], digits=2)
    return _cell(values, digits=5)


def _extra_cell(runs: Runs, metric: str) -> str:
    """The cell of a metric's mean at the last evaluation."""
    values = []
    for run in runs:
        if metric in run.extra_metrics:
            values.append(metrics.mean(run.last_values(metric)))
    return _cell(values, digits=4)


def _hurt_cell(runs: Runs, baseline_runs: Runs, metric: str) -> str:
    """The cell of the percentage of clients below the baseline."""
    by_seed: dict[Any, Run] = {}
    for run in baseline_runs:
        by_seed.setdefault(run.header.get("seed"), run)
    percents = []
    for run in runs:
        baseline = by_seed.get(run.header.get("seed"))
        percents.append(_percent_hurt(run, baseline, metric))
    return _cell(percents, digits=1)


def _percent_hurt(run: Run, baseline: Run | None, metric: str) -> float:
    """The percentage of clients that do worse than in the baseline run.

    NaN where no baseline run has the same seed, and where the two runs differ in their
    data or their evaluated clients.
    """
    if baseline is None or not run.last_evaluation or not baseline.last_evaluation:
        return math.nan
    for key in (*TABLE_FIELDS, *DATA_FIELDS, "partition_options", "eval_split"):
        if run.header.get(key) != baseline.header.get(key):
            return math.nan
    last = run.last_evaluation
    baseline_last = baseline.last_evaluation
    same_clients = last.get("clients") == baseline_last.get("clients")
    if not same_clients or len(last[metric]) != len(baseline_last[metric]):
        return math.nan
    return metrics.hurt(
        run.last_values(metric),
        baseline.last_values(metric),
        metrics.is_higher_better(metric),
    )


def _bytes_cell(runs: Runs) -> str:
    """The cell of the bytes sent, the mean over seeds."""
    totals = []
    for run in runs:
        by_round = run.cumulative_bytes() or [0]
        totals.append(float(by_round[-1]))
    return human_bytes(metrics.mean(totals))


def _notes_cell(runs: Runs) -> str:
    """The cell of the notes on a group's runs, without repetitions."""
    notes = [", ".join(_notes(run)) for run in runs]
    unique = dict.fromkeys(filter(None, notes))
    return "; ".join(unique)


def _cell(values: Sequence[float], digits: int) -> str:
    """The cell of numbers by seed: mean ± standard deviation.

    The deviation over the seeds is that of a population. The cell is "-" where no seed
    has a value, and where a value is infinite.
    """
    if not metrics.count(values) or any(map(math.isinf, values)):
        return "-"
    text = f"{metrics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {metrics.std(values):.{digits}f}"
    return text


def _notes(run: Run) -> Iterator[str]:
    """Yields the notes for the last column of a run's row."""
    planned = run.header.get("rounds")
    if isinstance(planned, int) and run.rounds_played < planned:
        yield f"{run.rounds_played} of {planned} rounds"
    elif run.stopped:
        yield f"stopped after round {run.rounds_played}"
    yield from describe_incidents(run)
    yield from _missing_values(run)
    if run.held_out:
        yield run.held_out
    clipped: set[int] = set()
    for record in run.rounds:
        clipped.update(record.get("clipped") or [])
    if clipped:
        yield f"the updates of {_plural(len(clipped), 'client')} were clipped"
    adversary = run.header.get("adversary")
    if adversary:
        ids = adversary["clients"]
        clients = "clients" if len(ids) > 1 else "client"
        yield f"{adversary['attack']} by {clients} {', '.join(map(str, ids))}"


def _missing_values(run: Run) -> Iterator[str]:
    """Yields the numbers of clients without finite loss or a metric."""
    missing: dict[str, Tensor] = {}  # the mask [N] of the clients, by their lack
    if "loss" in run.last_evaluation:
        missing["no finite loss"] = run.last_values("loss").isinf()
    for name in run.extra_metrics:
        has_samples = run.last_values("size") > 0
        missing[f"no {name}"] = run.last_values(name).isnan() & has_samples
    for lack, clients in missing.items():
        count = int(clients.sum())
        if count:
            verb = "have" if count > 1 else "has"
            yield f"{_plural(count, 'client')} {verb} {lack}"


def _plural(count: int, noun: str) -> str:
    """The count and the noun, in the plural above 1."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


def describe_incidents(run: Run) -> list[str]:
    """The numbers of void rounds and of dropped clients, in words."""
    void = sum(bool(record.get("void")) for record in run.rounds)
    dropped = sum(len(record.get("dropped") or []) for record in run.rounds)
    incidents = []
    if void:
        incidents.append(f"{void} void rounds")
    if dropped:
        incidents.append(f"{dropped} times a client was dropped")
    return incidents


def describe_outliers(run: Run) -> str:
    """The text on clients with far longer updates, longest first.

    It is "" where there is no outlier.
    """
    outliers = sorted(run.outliers().items(), key=lambda item: -item[1][0])
    descriptions = []
    for client, (ratio, rounds) in outliers[:SHOWN_OUTLIERS]:
        times = _plural(rounds, "round")
        descriptions.append(
            f"client {client} by up to {ratio:.3g} times the median ({times})"
        )
    text = ", ".join(descriptions)
    if len(outliers) > SHOWN_OUTLIERS:
        text += f" and {len(outliers) - SHOWN_OUTLIERS} more"
    return text


def _footnotes(groups: Groups, distinct_groups: Groups) -> Iterator[str]:
    """Yields the lines below the table."""
    yield from _target_footnotes(groups)
    for algorithm, runs in distinct_groups.items():
        seeds = [run.header.get("seed") for run in groups[algorithm]]
        for run in runs:
            yield from _run_footnotes(algorithm, run, seeds)


def _target_footnotes(groups: Groups) -> Iterator[str]:
    """Yields the algorithms that made models for one client or each."""
    one_target = []
    each_target = []
    for label, runs in groups.items():
        target = runs[0].header.get("model_target")
        if isinstance(target, int):
            one_target.append(f"{label} for client {target}")
        elif target == "each client":
            each_target.append(label)
    if one_target:
        yield f"\nMade for one client, whose columns count: {', '.join(one_target)}."
    if each_target:
        yield f"\nMade for each client in a run of its own: {', '.join(each_target)}."


def _run_footnotes(algorithm: str, run: Run, seeds: list[Any]) -> Iterator[str]:
    """Yields the footnotes on one run.

    Args:
        algorithm: The label of the run's group.
        seeds: The seeds of all runs in the group. A seed that occurs twice means that a
            run was recorded twice.
    """
    seed = run.header.get("seed")
    name = f"\n{algorithm}, seed {run.header.get('seed', '?')}"
    outliers = describe_outliers(run)
    if outliers:
        yield f"{name}, moved far: {outliers}; look at the data or set clip."
    times = seeds.count(seed)
    if seed is not None and times > 1:
        yield f"{name}: the same run is here {times} times, and counts once."
    if run.stopped:
        yield f"{name}, stopped: {run.stopped}"


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, padded for terminals.

    The first and the last column are aligned left, the others right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    is_left = [column in (0, last) for column in range(len(widths))]
    lines = []
    for row in rows:
        cells = []
        for cell, width, left in zip(row, widths, is_left, strict=True):
            padded = cell.ljust(width) if left else cell.rjust(width)
            cells.append(padded)
        lines.append(f"| {' | '.join(cells)} |")
    rule = []
    for width, left in zip(widths, is_left, strict=True):
        dashes = "-" * (width + 1)
        mark = f":{dashes}" if left else f"{dashes}:"
        rule.append(mark)
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]
