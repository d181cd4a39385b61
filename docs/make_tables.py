"""Writes the tables of docs/data.md, from the tables of the code.

`python docs/make_tables.py` replaces what stands between the markers of each table. A
test compares the page with these tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pflcore.data import PARTITIONS
from pflcore.lab.cli._data import reserved_names
from pflcore.lab.cli._experiment import NamedFunction, data_options_of, partition_of
from pflcore.lab.cli._options import dataclass_of_arguments, field_comments
from pflcore.lab.data import FEDERATIONS

PAGE = Path(__file__).with_name("data.md")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(v) for v in row)} |" for row in lines)


def _cell(value: object) -> str:
    """The text of a value, in which a bar does not end the cell."""
    return str(value).replace("|", "\\|")


def partition_options() -> str:
    """The table of the partitions' options; equal options have one row."""
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name in PARTITIONS:
        choice = partition_of("mnist", name)
        for row in _option_rows(choice, "partition"):
            names_of.setdefault(row, []).append(f"`{name}`")
    rows = [(", ".join(names), *row) for row, names in names_of.items()]
    return table(("partition", "option", "flag", "default", "meaning"), rows)


def data_options() -> str:
    """The table of the options of data that come with their clients."""
    rows = []
    for name in ("folder:PATH", "leaf:PATH", *FEDERATIONS):
        for row in _option_rows(data_options_of(name), "data"):
            rows.append((f"`{name}`", *row))
    return table(("data", "option", "flag", "default", "meaning"), rows)


def _option_rows(choice: NamedFunction | None, group: str) -> list[tuple[str, ...]]:
    """Name, flag, default and meaning of each option of a function."""
    if choice is None or not choice.defaults:
        return []
    comments = field_comments(dataclass_of_arguments(choice.function, choice.defaults))
    rows = []
    for option, default in choice.defaults.items():
        flag = option.replace("_", "-")
        if option in reserved_names():
            flag = f"{group}-{flag}"
        flags = f"`--{flag}`"
        if isinstance(default, bool):
            flags += f", `--no-{flag}`"
        meaning = " ".join(comments[option].split())
        rows.append((f"`{option}`", flags, f"`{_shown(default)}`", meaning))
    return rows


def _shown(default: Any) -> str:
    """A default as Python shows it."""
    return repr(default).replace("'", '"')


TABLES: Mapping[str, Any] = {
    "options of data": data_options,
    "options of partitions": partition_options,
}


def page(text: str) -> str:
    """The text of the page with its tables made anew."""
    for name, make in TABLES.items():
        begin = f"<!-- table: {name} (made by docs/make_tables.py) -->\n"
        end = f"\n<!-- end of table: {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        assert re.search(pattern, text, re.DOTALL), f"{PAGE}: no markers of {name}"
        new = f"{begin}{make()}{end}"
        text = re.sub(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
