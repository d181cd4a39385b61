"""The options of a command as a file: read as words of the command line, and written.

A key of the file is a flag without its dashes, with "_" or "-" between words. A flag
with a dot is a key in a table: `--ditto.lam 0.1` is `lam = 0.1` in `[ditto]`. So one
parser checks options, wherever they come from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflcore.check import Words, import_optional, reject, require
from pflcore.cli._options import Flag
from pflcore.ops import __version__
from pflcore.results._files import atomic_write

CONFIG_FILE = "run.toml"
CHOICE_FILE = "tuned.toml"  # what `pflcore tune` has chosen
# Options that say how a folder is treated or what is shown, and not what is played.
NOT_REPEATED = ("config", "out", "overwrite", "dry_run", "quiet", "tuned")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigOptions:
    """A file of options.

    Args:
        config: TOML file of options, which flags override: rounds = 50 is --rounds 50;
            every run writes one, run.toml
    """

    config: Path | None = None


@dataclass(frozen=True)
class Config:
    """The options of a TOML file.

    Attributes:
        name: The name of the option that named the file, for errors.
        path: The file.
        values: The values by their keys. A key in a table has the table's name and a
            dot before it, and "_" between words.
    """

    name: str
    path: Path
    values: dict[str, Any]

    def words(self, flags: Mapping[str, Flag]) -> list[str]:
        """The options as words of the command line.

        Keys that are no flags are left out. Raises ValueError for a value that no flag
        can have.

        Args:
            flags: The flags of the command by their keys.
        """
        words: list[str] = []
        for key, value in self.values.items():
            if key in flags:
                words += self._words_of(key, value, flags[key])
        return words

    def _words_of(self, key: str, value: Any, flag: Flag) -> list[str]:
        """The words of one option."""
        if flag.is_switch:
            require(isinstance(value, bool), key, "true or false", value)
            return [flag.name if value else flag.negative_name]
        if not isinstance(value, list):
            return [f"{flag.name}={_word(key, value)}"]
        return [flag.name, *(_word(key, item) for item in value)]

    def check_keys(self, flags: Mapping[str, Flag], command: str) -> None:
        """Raises ValueError for a key that is no flag of the command."""
        for key in self.values:
            if key not in flags:
                words = f"an option of `{command}` in {self.path}"
                reject(self.name, words, key, flags)


def read_config(path: Path | None, name: str = "config") -> Config:
    """The options of a TOML file.

    Raises ValueError where it cannot be read.

    Args:
        path: The file; None for no options.
        name: The name of the option that named the file.
    """
    if path is None:
        return Config(name, Path(), {})
    module = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    parser = import_optional(module, what=f"--{name}")
    words = "a file of options in TOML"
    try:
        with open(path, "rb") as file:
            tables = parser.load(file)
    except OSError as e:
        reject(name, words, Words(f"{path} ({e.strerror or e})"))
    except ValueError as e:  # not TOML, or not UTF-8
        reject(name, words, Words(f"{path} ({' '.join(str(e).split())})"))
    return Config(name, path, dict(_flatten(tables)))


def read_choice(folder: Path) -> tuple[str, Config]:
    """The algorithm that `pflcore tune` tuned, and its chosen options.

    Raises ValueError where the folder holds no choice.
    """
    choice = read_config(folder / CHOICE_FILE, "tuned")
    name = choice.values.pop("algorithm", None)
    words = f"a folder that `pflcore tune` wrote a {CHOICE_FILE} into"
    require(isinstance(name, str), "tuned", words, folder)
    return str(name), choice


def _flatten(table: Facts, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys and values of a table and of the tables in it."""
    for key, value in table.items():
        name = f"{prefix}{key}".replace("-", "_")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _word(key: str, value: Any) -> str:
    """The word for one value.

    Raises ValueError for a list or a table within a list.
    """
    is_single = not isinstance(value, list | Mapping)
    require(is_single, key, "single values in a list", value)
    return str(value)


def config_text(
    values: Mapping[str, Facts],
    flags: Mapping[str, Flag],
    command: str,
    **more: Any,
) -> str:
    """The options of a command as TOML, by which --config repeats it.

    Options of the folder are left out, see `NOT_REPEATED`.

    Args:
        values: The values of each group of options.
        flags: The flags of the command by their keys.
        command: The command, for the comment on the first line.
        more: Other keys and their values, which come first.
    """
    repeated = dict(more)
    for key, flag in flags.items():
        value = values[flag.group][flag.field]
        is_default_none = value is None and flag.default is None
        if key not in NOT_REPEATED and not is_default_none:
            repeated[key] = value
    about = f"`{command} --config FILE` repeats it (pflcore {__version__})."
    return tables_text(repeated, about)


def tables_text(values: Facts, about: str) -> str:
    """Options as TOML.

    Args:
        values: The values by their keys, see `Config`.
        about: A comment on the first line.
    """
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[name] = _toml_value(value)
    text: str = import_optional("tomli_w", what=CONFIG_FILE).dumps(tables)
    return f"# {about}\n{text}"


def _toml_value(value: Any) -> Any:
    """The value as TOML has it; None is the word of the command line for it."""
    if isinstance(value, list | tuple):
        return [_toml_value(item) for item in value]
    if isinstance(value, bool | int | float):
        return value
    return str(value)


def write_config(folder: Path, text: str) -> None:
    """Writes the options of a run beside its record.

    Raises ValueError where the file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / CONFIG_FILE) as part:
            part.write_bytes(text.encode())
    except OSError as e:
        words = Words(f"{folder} ({e.strerror or e})")
        reject("out", f"a folder with room for {CONFIG_FILE}", words)
