"""Tables that compare runs; they need pandas.

A group has the runs of one algorithm with one set of options, which differ in the seed
alone. A table has a row for each group and a column for each number. Runs of different
settings (data, partition, model, clients) have tables of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pflcore import metrics
from pflcore.check import (
    OpenUnitFloat,
    PositiveInt,
    checked,
    import_optional,
    require,
)
from pflcore.lab.results._labels import (
    TABLE_FIELDS,
    baseline_label,
    cut_words,
    label_runs,
    one_run_per_seed,
    setting_words,
    settings_of,
    split_name,
)
from pflcore.lab.results._notes import Groups, footnotes_on, notes_on
from pflcore.lab.results._verdicts import verdict_lines
from pflcore.metrics import human_bytes
from pflcore.simulation._history import History
from pflcore.simulation.record import DATA_FIELDS, Runs

__all__ = ["table"]
Format = Literal["md", "latex", "csv"]
# How LaTeX writes the letters that mean something else there.
LATEX_LETTERS: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
}


class Column(NamedTuple):
    """A column of numbers.

    Attributes:
        name: The name by which a user chooses it.
        heading: The words above it.
        digits: The number of digits behind the point.
        number_of: The number of one run; NaN where it has none.
        higher_is_better: The direction of its numbers; None where no number is better
            than another.
    """

    name: str
    heading: str
    digits: int
    number_of: Callable[[History], float]
    higher_is_better: bool | None = None


# Columns that compare each run with the baseline's run of the same seed.
BASELINE_COLUMNS = ("difference", "hurt")
# The column of the notes on a group's runs, which has texts in place of numbers.
NOTE = Column("note", "note", 0, lambda _: math.nan)


@dataclass(frozen=True)
class Table:
    """The runs of one setting.

    Attributes:
        title: The setting and the number of rounds.
        split: The split that was evaluated.
        quantity: The words for the main metric.
        seeds: A note on the number of seeds; "" for one seed.
        groups: The runs of each row, one for each seed, by the row's label.
        columns: The columns in their order, the last of them `NOTE`.
        footnotes: Sentences on single rows.
    """

    title: str
    split: str
    quantity: str
    seeds: str
    groups: Groups
    columns: list[Column]
    footnotes: list[str]

    @property
    def about(self) -> str:
        """The sentence on the numbers of the table."""
        return (
            f"{self.split.capitalize()} {self.quantity}, mean over clients unless a "
            f"client is named{self.seeds}."
        )

    @property
    def star(self) -> str:
        """The note on the columns with a star; "" where there is none."""
        names = {column.name for column in self.columns}
        optimistic = " (optimistic, as in the papers)" if self.split == "test" else ""
        parts = []
        if "best" in names:
            parts.append(f"* the best round, selected on {self.split} data{optimistic}")
        if names & {"std", "worst_decile"}:
            parts.append("std and worst decile: at the last evaluation")
        if "difference" in names:
            parts.append("differences: of runs with the same seed")
        if "hurt" in names:
            parts.append("% hurt: any worse number counts, however small")
        return f"{'; '.join(parts)}." if parts else ""

    def numbers(self) -> tuple[Any, Any]:
        """The mean and the deviation over seeds: two frames, a row for each group.

        A number that is missing or infinite is NaN, and so is the deviation of one
        seed.
        """
        rows = []
        for label, runs in self.groups.items():
            for run in runs:
                numbers = {}
                for column in self.columns:
                    if column is not NOTE:
                        numbers[column.heading] = column.number_of(run)
                rows.append({"algorithm": label, **numbers})
        pandas = import_optional("pandas")
        groups = pandas.DataFrame(rows).groupby("algorithm", sort=False)
        mean = groups.mean()
        for column in self.columns:
            if column.name == "last_mean":
                # The mean of a shorter run is of fewer rounds than the heading tells.
                is_short = groups[column.heading].count() < groups.size()
                mean.loc[is_short, column.heading] = math.nan
        mean = mean.where(mean.abs() < math.inf)
        std = groups.std(ddof=1).where(mean.notna())
        std.loc[groups.size() < 2] = math.nan
        return mean, std

    def texts(self, bold: str, escape: Callable[[str], str] = str) -> Any:
        """The cells as a frame of texts, with a row for each group.

        Args:
            bold: The form of the best number of a column, such as "**{}**".
            escape: Makes the text of a cell, before it is bold.
        """
        mean, std = self.numbers()
        frame = import_optional("pandas").DataFrame()
        frame["algorithm"] = [escape(label) for label in mean.index]
        for column in self.columns:
            heading = column.heading
            if column is NOTE:
                frame[heading] = [escape(note) for note in self.notes()]
            else:
                cells = _cells(column, mean[heading], std[heading], bold, escape)
                frame[heading] = cells
        return frame

    def notes(self) -> list[str]:
        """The notes on each group's runs, without repetitions."""
        texts = []
        for runs in self.groups.values():
            notes = [", ".join(notes_on(run)) for run in runs]
            texts.append("; ".join(dict.fromkeys(filter(None, notes))))
        return texts


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
    deviation over the seeds, of a sample (ddof 1). The best number of a column is bold.

    Args:
        runs: The runs, as from `pflcore.lab.results.read`.
        last: The number of rounds in the column "mean of last".
        baseline: The name of an algorithm among the runs. It adds a column with the
            difference to it, one with the percentage of clients that do worse than with
            it, and, of three seeds and more, a line that says which methods differ.
        columns: The columns in this order, by their names: "best", "final",
            "last_mean", "std", "worst_decile", the run's metrics, "hurt", "bytes",
            "note". None of them stands for all.
        format: "md" for Markdown, "latex" for tables of the package booktabs, or "csv",
            in which means and deviations have columns of their own.
        privacy_delta: The delta for which a line below the table has the epsilon of
            runs with a private mean; None for one over the number of clients with
            training samples, see `History.privacy`.

    Raises ValueError where no run has the baseline's name, and where no table has a
    column of that name; ImportError without pandas, and without scipy where seeds are
    compared.
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
    if format == "csv":
        frames = [_csv_frame(one) for one in tables]
        text: str = (
            import_optional("pandas")
            .concat(frames)
            .to_csv(index=False, float_format="%.10g")
        )
        return text
    return _to_latex(tables) if format == "latex" else _to_markdown(tables)


def _with_columns(one: Table, names: Sequence[str]) -> Table:
    """The table with the columns of these names alone, in their order."""
    chosen: list[Column] = []
    for name in names:
        chosen += [column for column in one.columns if column.name == name]
    return replace(one, columns=chosen)


def column_names(extra_metrics: Iterable[str], has_baseline: bool) -> list[str]:
    """The names of a table's columns, in their order."""
    names = ["best", "final", "last_mean", "std", "worst_decile"]
    names += sorted(extra_metrics)
    if has_baseline:
        names += BASELINE_COLUMNS
    return [*names, "bytes", "note"]


def require_columns(chosen: Iterable[str], names: Sequence[str]) -> None:
    """Raises ValueError for a chosen column that is none of these names."""
    words = f"some of {', '.join(names)}"
    if not {*BASELINE_COLUMNS} & {*names}:
        words += f", and {' and '.join(BASELINE_COLUMNS)} with a baseline"
    for name in chosen:
        require(name in names, "columns", words, name, names)


# the numbers ------------------------------------------------------------------
def _table(
    runs: Runs, last: int, baseline: str | None, privacy_delta: float | None
) -> Table:
    """The table of one setting, with all columns."""
    metric = next((run.main_metric for run in runs if run.evaluations), "accuracy")
    all_groups = label_runs(runs)
    groups = {label: one_run_per_seed(members) for label, members in all_groups.items()}
    rounds = max(run.rounds_played for run in runs)
    last = max(1, min(last, rounds))  # no run has a mean of more rounds
    targets = sorted({run.target for run in runs if run.target is not None})
    columns: list[Column] = []
    for client in (None, *targets):  # None stands for the mean over clients
        prefix = ""
        if client is not None:
            run = next(run for run in runs if run.target == client)
            prefix = f"client {run.client_name(client)}: "
        columns += _client_columns(client, prefix, metric, last)
    columns += _spread_columns(metric)
    extra = set().union(*(run.extra_metrics for run in runs)) - {metric}
    columns += [_extra_column(name) for name in sorted(extra)]
    footnotes = list(footnotes_on(all_groups, groups, privacy_delta))
    row = baseline_label(groups, baseline) if baseline else None
    if row is not None:
        difference, hurt = _baseline_columns(groups[row], metric, str(baseline))
        columns += [difference, hurt]
        differences = {
            label: [difference.number_of(run) for run in members]
            for label, members in groups.items()
        }
        better = metrics.is_higher_better(metric)
        footnotes[:0] = verdict_lines(differences, str(baseline), better)
    columns += [Column("bytes", "bytes sent", 0, _total_bytes), NOTE]
    words = setting_words(runs[0], cut_words(runs)) or ["runs"]
    return Table(
        title=", ".join([*words, f"{rounds} rounds"]),
        split=split_name(runs[0]),
        quantity="accuracy in percent" if metric == "accuracy" else "loss",
        seeds=_seeds_note(groups),
        groups=groups,
        columns=columns,
        footnotes=footnotes,
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
    cuts = ""
    if any(run.header.get("data_seed") == "each" for run in groups[next(iter(groups))]):
        cuts = ", each with a cut of its own"
    return f"; mean ± std over {seeds} seeds{exceptions}{cuts}"


def _client_columns(
    client: int | None, prefix: str, metric: str, last: int
) -> list[Column]:
    """The columns of one client's curve, or of the mean over clients."""
    higher_is_better = metrics.is_higher_better(metric)
    scale, digits = _scale_and_digits(metric)

    def curve(run: History) -> tuple[list[int], list[float]]:
        return run.curve(client, metric) if metric in run.keys else ([], [])

    def best(run: History) -> float:
        return scale * metrics.best(curve(run)[1], higher_is_better).value

    def final(run: History) -> float:
        return scale * metrics.final(curve(run)[1])

    def last_mean(run: History) -> float:
        rounds, values = curve(run)
        if run.rounds_played < last:
            return math.nan
        return scale * metrics.last_mean(values, rounds, last)

    headings = {
        "best": ("best*", best),
        "final": ("final", final),
        "last_mean": (f"mean of last {last}", last_mean),
    }
    columns = []
    for name, (heading, number_of) in headings.items():
        heading = prefix + heading
        columns.append(Column(name, heading, digits, number_of, higher_is_better))
    return columns


def _spread_columns(metric: str) -> list[Column]:
    """The columns of the spread over clients at the last evaluation."""
    higher_is_better = metrics.is_higher_better(metric)
    scale, digits = _scale_and_digits(metric)

    def values(run: History) -> Any:
        return run.last_values(metric) if metric in run.keys else []

    def std(run: History) -> float:
        return scale * metrics.std(values(run))

    def worst_decile(run: History) -> float:
        of_run = values(run)
        return scale * metrics.worst_decile(of_run, higher_is_better=higher_is_better)

    name = "worst_decile"
    return [
        Column("std", "std over clients", digits, std),
        Column(name, "worst decile", digits, worst_decile, higher_is_better),
    ]


def _scale_and_digits(metric: str) -> tuple[float, int]:
    """The factor and the digits of a metric: accuracies are in percent."""
    return (100.0, 2) if metric == "accuracy" else (1.0, 5)


def _extra_column(metric: str) -> Column:
    """The column of a metric's mean at the last evaluation."""

    def number_of(run: History) -> float:
        if metric not in run.extra_metrics:
            return math.nan
        return metrics.mean(run.last_values(metric))

    direction = metrics.HIGHER_IS_BETTER.get(metric)
    return Column(metric, metric, 4, number_of, direction)


def _baseline_columns(baseline_runs: Runs, metric: str, baseline: str) -> list[Column]:
    """The difference to the baseline's run of the same seed, and who is worse off.

    Runs of one seed have the same data, cohorts and batches, so the spread of their
    differences is smaller than that of two methods.
    """
    higher_is_better = metrics.is_higher_better(metric)
    scale, digits = _scale_and_digits(metric)
    by_seed: dict[Any, History] = {}
    for run in baseline_runs:
        by_seed.setdefault(run.header.get("seed"), run)

    def values_of(run: History) -> tuple[Any, Any] | None:
        other = by_seed.get(run.header.get("seed"))
        if other is None or not are_comparable(run, other, metric):
            return None
        values = run.last_values(metric), other.last_values(metric)
        if run.target is None:
            return values
        # Its model is made for this client; the others have it, too, and do not count.
        ids = [*run.last_evaluation.get("clients", range(len(values[0])))]
        if run.target not in ids:
            return None
        place = [ids.index(run.target)]
        return values[0][place], values[1][place]

    def difference(run: History) -> float:
        pair = values_of(run)
        is_baseline = any(run is other for other in baseline_runs)
        if pair is None or is_baseline:
            return math.nan
        own, its = (metrics.mean(values) for values in pair)
        # Where both diverged there is a pair, and no finite difference.
        both_diverged = math.isinf(own) and math.isinf(its)
        return math.inf if both_diverged else scale * (own - its)

    def hurt(run: History) -> float:
        pair = values_of(run)
        if pair is None:
            return math.nan
        return metrics.hurt(*pair, higher_is_better)

    return [
        Column("difference", f"final - {baseline}", digits, difference),
        Column("hurt", f"% hurt vs {baseline}", 1, hurt),
    ]


def are_comparable(run: History, baseline: History, metric: str) -> bool:
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


def _total_bytes(run: History) -> float:
    """The bytes that a run has sent."""
    by_round = run.cumulative_bytes() or [0]
    return float(by_round[-1])


# the texts --------------------------------------------------------------------
def _cells(
    column: Column, means: Any, stds: Any, bold: str, escape: Callable[[str], str]
) -> list[str]:
    """The texts of a column's cells, the best ones in bold."""
    texts = []
    for mean, std in zip(means, stds, strict=True):
        texts.append(_text(column, mean, std))
    cells = []
    for text, is_best in zip(texts, _best(column, means, texts), strict=True):
        cell = escape(text)
        cells.append(bold.format(cell) if is_best else cell)
    return cells


def _text(column: Column, mean: float, std: float) -> str:
    """The text of a cell: the mean, and the deviation over several seeds."""
    if math.isnan(mean):
        return "-"
    if column.name == "bytes":
        return human_bytes(mean)
    text = f"{mean:.{column.digits}f}"
    return text if math.isnan(std) else f"{text} ± {std:.{column.digits}f}"


def _best(column: Column, means: Any, cells: Sequence[str]) -> list[bool]:
    """True for each cell with the best number, as far as its text shows it.

    It is false for all cells where only one of them has a number.
    """
    present = [mean for mean in means if not math.isnan(mean)]
    if column.higher_is_better is None or len(present) < 2:
        return [False] * len(cells)
    best = max(present) if column.higher_is_better else min(present)
    shown = [cell.partition(" ")[0] for cell in cells]
    best_texts = {text for text, mean in zip(shown, means, strict=True) if mean == best}
    return [text in best_texts for text in shown]


def _to_markdown(tables: Sequence[Table]) -> str:
    """The tables as Markdown, with the best of each column in bold."""
    texts = []
    for one in tables:
        frame = one.texts(bold="**{}**", escape=escape_stars)
        notes = [escape_stars(note) for note in (one.star, *one.footnotes) if note]
        rows = [[escape_stars(name) for name in frame], *frame.values.tolist()]
        lines = [f"### {_one_line(one.title)}\n", f"{_one_line(one.about)}\n"]
        lines += markdown_table(rows, ends_with_text=one.columns[-1] is NOTE)
        lines += [f"\n{_one_line(note)}" for note in notes]
        texts.append("\n".join([*lines, ""]))
    return "\n".join(texts)


def escape_stars(text: str) -> str:
    """The text in which Markdown shows each star, and takes no two for emphasis."""
    return re.sub(r"(\\*)\*", r"\1\1\\*", text)


def escape_cell(text: str) -> str:
    """The text on one line, in which nothing ends a cell of a Markdown table.

    A bar ends a cell, and a bar between two backticks does not. Backslashes before
    either are doubled, so that each stands for itself.
    """
    return re.sub(r"(\\*)([|`])", r"\1\1\\\2", _one_line(text))


def _one_line(text: str) -> str:
    """The text with a space in the place of each line's end."""
    return " ".join(text.splitlines())


def markdown_table(
    rows: Sequence[Sequence[str]], ends_with_text: bool = True
) -> list[str]:
    """The lines of a Markdown table, padded for terminals.

    The first column is aligned left, the others right. A cell may hold any text.

    Args:
        rows: The cells, first those of the heading.
        ends_with_text: True aligns the last column left, too.
    """
    rows = [[escape_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_left = [True, *[False] * (len(widths) - 2), ends_with_text][: len(widths)]
    lines = []
    for row in rows:
        cells = []
        for cell, width, left in zip(row, widths, is_left, strict=True):
            cells.append(cell.ljust(width) if left else cell.rjust(width))
        lines.append(f"| {' | '.join(cells)} |")
    rule = []
    for width, left in zip(widths, is_left, strict=True):
        dashes = "-" * (width + 1)
        rule.append(f":{dashes}" if left else f"{dashes}:")
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def _to_latex(tables: Sequence[Table]) -> str:
    r"""The tables as LaTeX, for `\usepackage{booktabs}`.

    The caption has the title and the notes on the columns; notes on single rows are
    comments. An empty column is left out.
    """
    parts = ["% pflcore; needs \\usepackage{booktabs}\n"]
    for one in tables:
        frame = one.texts(bold=r"\textbf{{{}}}", escape=escape_latex)
        frame = frame.loc[:, (frame != "").any()]
        caption = f"{one.title}. {one.about} {one.star}".strip()
        is_text = [name in ("algorithm", "note") for name in frame]
        text = frame.rename(columns=escape_latex).to_latex(
            index=False,
            escape=False,
            column_format="".join("l" if text else "r" for text in is_text),
            caption=escape_latex(caption),
            label=f"tab:{re.sub('[^a-z0-9]+', '-', one.title.lower())}",
        )
        text = text.replace("\\begin{tabular}", "\\centering\n\\begin{tabular}", 1)
        parts.append(text + "".join(f"% {_one_line(note)}\n" for note in one.footnotes))
    return "".join(parts)


def escape_latex(text: str) -> str:
    """The text as LaTeX writes it, on one line."""
    return " ".join(text.split()).translate(str.maketrans(LATEX_LETTERS))


def _csv_frame(one: Table) -> Any:
    """The frame of a table, with a mean and a deviation for each column."""
    mean, std = one.numbers()
    frame = import_optional("pandas").DataFrame(index=mean.index)
    frame.insert(0, "setting", one.title)
    frame.insert(1, "split", one.split)
    frame.insert(2, "metric", one.quantity)
    frame["algorithm"] = mean.index
    frame["seeds"] = [len(runs) for runs in one.groups.values()]
    for column in one.columns:
        heading = column.heading.removesuffix("*")
        if column is NOTE:
            frame[heading] = one.notes()
            continue
        frame[heading] = mean[column.heading]
        if column.name != "bytes":
            frame[f"{heading} std"] = std[column.heading]
    return frame
