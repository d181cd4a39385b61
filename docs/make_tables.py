"""Writes the lists of options in docs/data.md and docs/data_sets.md, from the code.

`python docs/make_tables.py` replaces what stands between the markers of each table. A
test compares the pages with these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pflcore.data import PARTITIONS
from pflcore.lab.cli._data import reserved_names
from pflcore.lab.cli._experiment import NamedFunction, data_options_of, partition_of
from pflcore.lab.cli._options import dataclass_of_arguments, field_comments
from pflcore.lab.data import FEDERATIONS

PAGES = [Path(__file__).with_name(name) for name in ("data.md", "data_sets.md")]


def partition_options() -> str:
    """The lists of the partitions' options; equal options are listed once."""
    names_of: dict[str, list[str]] = {}
    for name in PARTITIONS:
        for line in _option_lines(partition_of("mnist", name), "partition"):
            names_of.setdefault(line, []).append(f"`{name}`")
    return _lists({line: ", ".join(names) for line, names in names_of.items()})


def data_options(names: Iterable[str]) -> str:
    """The lists of the options of these data, which come with their clients."""
    parts = []
    for name in names:
        lines = _option_lines(data_options_of(name), "data")
        if lines:
            parts.append(_lists(dict.fromkeys(lines, f"`{name}`")))
    return "\n\n".join(parts)


def _lists(titles: Mapping[str, str]) -> str:
    """Lists of lines, each below its title."""
    lines_of: dict[str, list[str]] = {}
    for line, title in titles.items():
        lines_of.setdefault(title, []).append(line)
    lists = ["\n".join([f"{title}:\n", *lines]) for title, lines in lines_of.items()]
    return "\n\n".join(lists)


def _option_lines(choice: NamedFunction | None, group: str) -> list[str]:
    """Name, default and meaning of each option of a function.

    The flag is there where it is not the name with dashes.
    """
    if choice is None or not choice.defaults:
        return []
    comments = field_comments(dataclass_of_arguments(choice.function, choice.defaults))
    lines = []
    for option, default in choice.defaults.items():
        flag = option.replace("_", "-")
        flags = f", `--{group}-{flag}`" if option in reserved_names() else ""
        meaning = " ".join(comments[option].split())
        lines.append(f"- `{option}={_shown(default)}`{flags}: {meaning}")
    return lines


def _shown(default: Any) -> str:
    """A default as Python shows it."""
    return repr(default).replace("'", '"')


TABLES: Mapping[str, Callable[[], str]] = {
    "options of files": partial(
        data_options, ["folder:PATH", "table:FILE", "leaf:PATH"]
    ),
    "options of data sets": partial(data_options, FEDERATIONS),
    "options of partitions": partition_options,
}


def page(text: str) -> str:
    """The text of a page with its tables made anew."""
    for name, make in TABLES.items():
        begin = f"<!-- table: {name} (made by docs/make_tables.py) -->\n"
        end = f"\n<!-- end of table: {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if begin in text:
            new = f"{begin}{make()}{end}"
            text = re.sub(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
