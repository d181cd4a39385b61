"""Groups of options that are there because of other options' values.

Words: "cut" are the options of the partition or of the reader of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli._config import Config
from pflcore.lab.cli._experiment import Options
from pflcore.lab.cli._options import (
    dataclass_of_arguments,
    flags_of,
    option_fields,
    words_behind,
)
from pflcore.lab.cli._output import OutputOptions, TuneOptions
from pflcore.simulation.record import Facts, Line
from pflcore.train import Training


def chosen_names(argv: Sequence[str], config: Config) -> dict[str, str | None]:
    """The names of the data, the partition and the model."""
    names = {}
    for name in ("data", "partition", "model"):
        words = words_behind(argv, name)
        value = words[-1] if words else config.values.get(name, getattr(Options, name))
        names[name] = None if value in (None, "None") else str(value)
    return names


def chosen_groups(values: Facts) -> dict[str, type]:
    """The groups of options of the partition, of the reader, and of the model.

    Args:
        values: The values of the options data, partition and model.
    """
    functions = {
        "partition": experiment.partition_of(values["data"], values["partition"]),
        "data": experiment.data_options_of(values["data"]),
        "model": experiment.model_of(values["model"]),
    }
    groups = {}
    for title, choice in functions.items():
        if choice and choice.defaults:
            groups[title] = dataclass_of_arguments(choice.function, choice.defaults)
    return groups


def cut_of(options: Options, values: Mapping[str, Line]) -> Line:
    """The options of the partition, or of the reader of files.

    Of a reader these are the ones that differ from their defaults: a record names no
    others.

    Args:
        options: The options of the runs.
        values: The values of each group of options.
    """
    reader = experiment.data_options_of(options.data)
    if reader is None:
        return values.get("partition", {})
    return {k: v for k, v in values["data"].items() if v != reader.defaults[k]}


def own_training_groups(titles: Sequence[str], keys: Collection[str]) -> list[str]:
    """The groups of algorithms that train in a way of their own, "NAME.training".

    Args:
        titles: The names of the algorithms.
        keys: The keys of all options that are given.
    """
    groups = []
    for title in titles:
        if any(key.startswith(f"{title}.training.") for key in keys):
            groups.append(f"{title}.training")
    return groups


def passed_over_keys(names: Sequence[str], config: Config) -> set[str]:
    """Keys of a file that another command has, or an algorithm that does not run.

    So one file serves all commands.

    Args:
        names: The names of the algorithms that run.
        config: The file of options.
    """
    keys = {"algorithms", "algorithm", "tuned", "split"}
    for cls in (Options, Training, OutputOptions, TuneOptions):
        keys |= {f.name for f in option_fields(cls)}
    known = {name: name for name in ALGORITHMS}
    known |= {name_of(str(name)): str(name) for name in listed_algorithms(config)}
    tables = {key.partition(".")[0] for key in config.values if "." in key}
    for title in tables & {*known} - {*map(name_of, names)}:
        groups = {title: class_of(known[title]), f"{title}.training": Training}
        keys |= {*flags_of(groups, [*groups])}
    return keys


def listed_algorithms(config: Config) -> list[str]:
    """The algorithms that a file for `pflcore compare` names."""
    names = config.values.get("algorithms", [])
    return [str(name) for name in names] if isinstance(names, list) else []
