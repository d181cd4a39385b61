"""The options of a command as a file: defaults of the command line, and written.

A key of the file is a flag without its dashes, with "_" or "-" between words. A flag
with a dot is a key in a table: `--ditto.lam 0.1` is `lam = 0.1` in `[ditto]`. The
values of a file are the defaults of the one parse, so flags override them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pflcore.check import (
    Words,
    expectation_of,
    import_optional,
    reject,
    require,
    validated,
)
from pflcore.lab.cli._options import Flag, words_behind
from pflcore.ops import __version__
from pflcore.simulation._files import atomic_write

CONFIG_FILE = "run.toml"
CHOICE_FILE = "tuned.toml"  # what `pflcore tune` has chosen
# Options that say how a folder is treated or what is shown, and not what is played.
NOT_REPEATED = (
    *("config", "out", "overwrite", "dry_run", "quiet", "tuned"),
    *("baseline", "per", "last", "format", "columns", "privacy_delta"),
)
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

    def defaults(self, flags: Mapping[str, Flag]) -> dict[str, dict[str, Any]]:
        """The values of each group of options, by the names of its fields.

        Keys that are no flags are left out. Raises ValueError for a value that its
        option cannot have.

        Args:
            flags: The flags of the command by their keys.
        """
        defaults: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            if key in flags:
                flag = flags[key]
                group = defaults.setdefault(flag.group, {})
                group[flag.field] = _typed_value(key, value, flag.hint)
        return defaults

    def without_table(self, titles: Sequence[str], flags: Mapping[str, Flag]) -> Config:
        """The file with the options of the only algorithm outside of its table.

        So a file for `pflcore compare` serves `pflcore run` and `pflcore tune`, too.

        Args:
            titles: The group of the algorithm's options, if one is named.
            flags: The flags of the command by their keys.
        """
        # An option that has the name of one of training is another flag.
        keys = {(flag.group, flag.field): key for key, flag in flags.items()}
        values = {}
        for key, value in self.values.items():
            for title in titles:
                option = key.removeprefix(f"{title}.")
                if option.startswith("training.") and option != key:
                    key = option.removeprefix("training.")
                elif option != key:
                    key = keys.get((title, option), option)
            values[key] = value
        return replace(self, values=values)

    def check_keys(
        self, flags: Mapping[str, Flag], others: Collection[str], command: str
    ) -> None:
        """Raises ValueError for a key that is no option of this or another command.

        Args:
            flags: The flags of the command by their keys.
            others: Keys that are passed over.
            command: The command, for the error.
        """
        for key in self.values:
            if key not in flags and key not in others:
                words = f"an option of `{command}` in {self.path}"
                reject(self.name, words, key, [*flags, *others])


def config_path(argv: Sequence[str]) -> Path | None:
    """The file of options that a command line names, if there is one."""
    words = words_behind(argv, "config")
    return Path(words[0]) if words else None


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
        # Editors of Windows put a byte order mark in front, which utf-8-sig takes away.
        tables = parser.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        reject(name, words, Words(f"{path} ({e.strerror or e})"))
    except ValueError as e:  # not TOML, or not UTF-8
        reject(name, words, Words(f"{path} ({' '.join(str(e).split())})"))
    values: dict[str, Any] = {}
    for key, value in _flatten(tables):
        require(key not in values, name, f"each option once in {path}", key)
        values[key] = value
    return Config(name, path, values)


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


def _typed_value(key: str, value: Any, hint: Any) -> Any:
    """A value of a file as its option has it; the word "None" stands for None.

    Raises ValueError for a value of another type.
    """
    kinds = {hint, *get_args(hint)}
    if isinstance(value, float) and float in kinds:
        return value  # also one that is not finite; the option itself has its limits
    if value == "None" and NoneType in kinds:
        return None
    if isinstance(value, str) and Path in kinds:
        return Path(value)
    if isinstance(value, list):
        is_flat = not any(isinstance(item, list | Mapping) for item in value)
        require(is_flat, key, "single values in a list", value)
        is_path = any(Path in get_args(kind) for kind in kinds)
        value = tuple(Path(item) if is_path else item for item in value)
    return validated(key, expectation_of(hint), value)


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
