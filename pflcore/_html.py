"""Tables that notebooks show."""

from collections.abc import Sequence
from html import escape


def html_table(caption: str, rows: Sequence[Sequence[object]]) -> str:
    """An HTML table with a caption, whose first row is the heading."""
    heading, *body = rows
    lines = [f"<table><caption>{escape(caption)}</caption>"]
    lines.append(_html_row(heading, "th"))
    lines += [_html_row(row, "td") for row in body]
    return "".join([*lines, "</table>"])


def _html_row(cells: Sequence[object], tag: str) -> str:
    """One row of an HTML table.

    Args:
        cells: The contents of the cells, which are escaped.
        tag: The tag of each cell: "th" or "td".
    """
    texts = [f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells]
    return f"<tr>{''.join(texts)}</tr>"
