"""Tables that compare runs.

A group has the runs of one algorithm with one set of options, which differ in the seed
alone. A table has a row for each group and a column for each number. Runs of different
settings (data, partition, model, clients) have tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pflcore.check import OpenUnitFloat, PositiveInt, checked, require
from pflcore.results._columns import Column, column_names, columns_of, require_columns
from pflcore.results._labels import (
    label_runs,
    one_run_per_seed,
    setting_title,
    settings_of,
    split_name,
)
from pflcore.results._notes import Groups, footnotes_on
from pflcore.results._render import Table, to_csv, to_latex, to_markdown
from pflcore.results.record import Runs

__all__ = ["table"]
Format = Literal["md", "latex", "csv"]
RENDERERS: dict[str, Callable[[Sequence[Table]], str]] = {
    "md": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
}


@checked
def table(
    runs: Runs,
    last: PositiveInt = 10,
    baseline: str | None = None,
    columns: Sequence[str] = (),
    format: Format = "md",  # noqa: A002 (the name of the option)
    privacy_delta: OpenUnitFloat | None = None,
) -> str:
    """The runs as text: a table per setting, a row per algorithm.

    Accuracies are in percent. The cell of several seeds has the mean ± standard
    deviation over the seeds. The best number of a column is bold.

    Args:
        runs: The runs, as from `pflcore.results.read`.
        last: The number of rounds in the column "mean of last".
        baseline: The name of an algorithm among the runs. It adds a column with the
            percentage of clients that do worse than with that algorithm.
        columns: The columns in this order, by their names: "best", "final",
            "last_mean", "std", "worst_decile", the run's metrics, "hurt", "bytes",
            "note". None of them stands for all.
        format: "md" for Markdown, "latex" for tables of the package booktabs, or "csv",
            in which means and deviations have columns of their own.
        privacy_delta: The delta for which a line below the table has the epsilon of
            runs with a private mean; None for one over the number of clients with
            training samples, see `History.privacy`.

    Raises ValueError where no run has the baseline's name, and where no table has a
    column of that name.
    """
    names = list(label_runs(runs))
    known = {None, *names, *(run.algorithm for run in runs)}
    require(
        baseline in known, "baseline", f"one of {', '.join(names)}", baseline, names
    )
    tables = []
    for members in settings_of(runs).values():
        tables.append(_table(members, last, baseline, privacy_delta))
    if columns:
        extra_metrics = set().union(*(run.extra_metrics for run in runs))
        require_columns(columns, column_names(extra_metrics, baseline is not None))
        tables = [_with_columns(one, columns) for one in tables]
    return RENDERERS[format](list(map(_with_star_note, tables)))


def _with_columns(one: Table, names: Sequence[str]) -> Table:
    """The table with the columns of these names alone, in their order."""
    columns: list[Column] = []
    for name in names:
        columns += [column for column in one.columns if column.name == name]
    return one._replace(columns=columns)


def _with_star_note(one: Table) -> Table:
    """The table with its note on the columns that it has."""
    names = {column.name for column in one.columns}
    optimistic = " (optimistic, as in the papers)" if one.split == "test" else ""
    parts = []
    if "best" in names:
        parts.append(f"* the best round, selected on {one.split} data{optimistic}")
    if names & {"std", "worst_decile"}:
        parts.append("std and worst decile: at the last evaluation")
    return one._replace(star=f"{'; '.join(parts)}." if parts else "")


def _table(
    runs: Runs, last: int, baseline: str | None, privacy_delta: float | None
) -> Table:
    """The table of one setting, with all columns."""
    metric = next((run.main_metric for run in runs if run.evaluations), "accuracy")
    groups = label_runs(runs)
    distinct = {label: one_run_per_seed(members) for label, members in groups.items()}
    rounds = max(run.rounds_played for run in runs)
    return Table(
        title=f"{setting_title(runs[0])}, {rounds} rounds",
        split=split_name(runs[0]),
        quantity="accuracy in percent" if metric == "accuracy" else "loss",
        seeds=_seeds_note(distinct),
        labels=list(distinct),
        counts=list(map(len, distinct.values())),
        columns=columns_of(runs, distinct, metric, last, baseline),
        star="",
        footnotes=list(footnotes_on(groups, distinct, privacy_delta)),
    )


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
