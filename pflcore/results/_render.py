"""Tables of runs as Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pflcore.results._columns import Cell, Column

# How LaTeX writes the letters that mean something else there.
LATEX_LETTERS = {
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


class Table(NamedTuple):
    """The runs of one setting.

    Attributes:
        title: The setting and the number of rounds.
        split: The split that was evaluated.
        quantity: The words for the main metric.
        seeds: A note on the number of seeds; "" for one seed.
        labels: The name of each row.
        counts: The number of seeds of each row.
        columns: The columns with a cell for each row.
        star: The note on columns with a star; "" where the table has none.
        footnotes: Sentences on single rows.
    """

    title: str
    split: str
    quantity: str
    seeds: str
    labels: list[str]
    counts: list[int]
    columns: list[Column]
    star: str
    footnotes: list[str]

    @property
    def about(self) -> str:
        """The sentence on the numbers of the table."""
        return (
            f"{self.split.capitalize()} {self.quantity}, mean over clients unless a "
            f"client is named{self.seeds}."
        )


def to_markdown(tables: Sequence[Table]) -> str:
    """The tables as Markdown, with the best of each column in bold."""
    texts = []
    for table in tables:
        rows = [["algorithm", *(_escape_star(c.heading) for c in table.columns)]]
        rows += _rows(table, bold="**{}**".format)
        notes = [_escape_star(note) for note in (table.star, *table.footnotes) if note]
        ends_with_text = table.columns[-1].name == "note"
        lines = [f"### {_one_line(table.title)}\n", f"{_one_line(table.about)}\n"]
        lines += markdown_table(rows, ends_with_text)
        lines += [f"\n{_one_line(note)}" for note in notes]
        texts.append("\n".join([*lines, ""]))
    return "\n".join(texts)


def _escape_star(text: str) -> str:
    """The text with a star at its end or its beginning as Markdown writes it."""
    if text.endswith("*"):
        return text[:-1] + r"\*"
    return rf"\{text}" if text.startswith("*") else text


def _rows(table: Table, bold: Callable[[str], str]) -> list[list[str]]:
    """The label and the cells of each row.

    Args:
        bold: A function that makes a text bold.
    """
    rows = [[label] for label in table.labels]
    for column in table.columns:
        for row, cell, is_best in zip(rows, column.cells, column.best(), strict=True):
            row.append(bold(cell.text) if is_best else cell.text)
    return rows


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
            padded = cell.ljust(width) if left else cell.rjust(width)
            cells.append(padded)
        lines.append(f"| {' | '.join(cells)} |")
    rule = []
    for width, left in zip(widths, is_left, strict=True):
        dashes = "-" * (width + 1)
        mark = f":{dashes}" if left else f"{dashes}:"
        rule.append(mark)
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def to_latex(tables: Sequence[Table]) -> str:
    r"""The tables as LaTeX, for `\usepackage{booktabs}`.

    The best of each column is bold. The caption has the title and the notes on the
    columns; notes on single rows are comments. An empty column is left out.
    """
    lines = [r"% pflcore; needs \usepackage{booktabs}"]
    for table in tables:
        lines += _latex_lines(table)
    return "\n".join([*lines, ""])


def _latex_lines(table: Table) -> list[str]:
    """The lines of one LaTeX table."""
    columns = [column for column in table.columns if any(c.text for c in column.cells)]
    columns = [_latex_column(column) for column in columns]
    table = table._replace(columns=columns)
    alignment = ["l"]
    for column in columns:
        alignment.append("l" if column.name == "note" else "r")
    heading = ["algorithm", *(column.heading for column in columns)]
    rows = []
    for label, *cells in _rows(table, bold=r"\textbf{{{}}}".format):
        rows.append([escape_latex(label), *cells])
    caption = [f"{table.title}. {table.about}", table.star]
    return [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(' '.join(filter(None, caption)))}}}",
        rf"\begin{{tabular}}{{{''.join(alignment)}}}",
        r"\toprule",
        _latex_row(heading),
        r"\midrule",
        *map(_latex_row, rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        *(f"% {_one_line(note)}" for note in table.footnotes),
    ]


def _latex_column(column: Column) -> Column:
    """The column with its texts as LaTeX writes them."""
    cells = [cell._replace(text=escape_latex(cell.text)) for cell in column.cells]
    return column._replace(heading=escape_latex(column.heading), cells=cells)


def _latex_row(cells: Sequence[str]) -> str:
    """A row of a LaTeX table."""
    return rf"{' & '.join(cells)} \\"


def escape_latex(text: str) -> str:
    """The text as LaTeX writes it, on one line."""
    letters = [LATEX_LETTERS.get(letter, letter) for letter in " ".join(text.split())]
    return "".join(letters)


def to_csv(tables: Sequence[Table]) -> str:
    """The tables as one CSV file, a row for each row of a table.

    A number has two columns: its mean over the seeds, and "NAME std", the standard
    deviation. A number that is missing is an empty field.
    """
    rows = []
    names: dict[str, None] = {}  # in the order of their appearance
    for table in tables:
        for index, label in enumerate(table.labels):
            row = {
                "setting": table.title,
                "split": table.split,
                "metric": table.quantity,
                "algorithm": label,
                "seeds": str(table.counts[index]),
            }
            for column in table.columns:
                row |= _csv_fields(column, column.cells[index])
            rows.append(row)
            names |= dict.fromkeys(row)
    file = io.StringIO()
    writer = csv.DictWriter(file, [*names], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _csv_fields(column: Column, cell: Cell) -> dict[str, str]:
    """The fields of a cell by the names of their columns."""
    if column.name == "note":
        return {"note": cell.text}
    heading = column.heading.removesuffix("*")
    if column.name == "bytes":
        return {heading: _csv_number(cell.mean)}
    fields = {heading: _csv_number(cell.mean)}
    fields[f"{heading} std"] = _csv_number(cell.std)
    return fields


def _csv_number(value: float) -> str:
    """A number with ten digits; "" for NaN."""
    return "" if math.isnan(value) else f"{value:.10g}"
