"""Groups of options that are there because of other options' values.

Words: "cut" are the options of the partition or of the reader of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.cli import _experiment as experiment
from pflcore.cli._config import Config
from pflcore.cli._experiment import Options
from pflcore.cli._options import Flag, dataclass_of_arguments, flags_of
from pflcore.results.record import Facts, Line
from pflcore.train import Training


def chosen_groups(values: Facts) -> dict[str, type]:
    """The groups of options that depend on the values of other options.

    They are those of the partition, of the reader of files, and of the model.
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


def own_training_groups(
    titles: Sequence[str], keys: Collection[str], argv: Sequence[str]
) -> list[str]:
    """The groups of algorithms that train in a way of their own, "NAME.training".

    Args:
        titles: The names of the algorithms.
        keys: The keys of files of options.
        argv: The words of the command line.
    """
    options = [*keys, *(word.removeprefix("--").replace("-", "_") for word in argv)]
    groups = []
    for title in titles:
        start = f"{title}.training."
        if any(option.startswith(start) for option in options):
            groups.append(f"{title}.training")
    return groups


def idle_flags(config: Config, titles: Sequence[str]) -> dict[str, Flag]:
    """The flags of algorithms that have a table in a file, but do not run this time.

    Args:
        config: The file of options.
        titles: The names of the algorithms that run.
    """
    names = {name: name for name in ALGORITHMS}
    for name in config.values.get("algorithms", []):
        names[name_of(str(name))] = str(name)
    groups: dict[str, type] = {}
    for key in config.values:
        title = key.partition(".")[0]
        if title in names and title not in titles:
            groups |= {title: class_of(names[title]), f"{title}.training": Training}
    return flags_of(groups, [*groups])
