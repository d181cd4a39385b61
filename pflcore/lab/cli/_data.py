"""`pflcore data`: which data sets there are, and which client holds which samples."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pflcore.algorithms import class_of
from pflcore.check import checked, require
from pflcore.data import PARTITIONS
from pflcore.data._partition import options_of
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli._config import (
    Config,
    ConfigOptions,
    config_path,
    read_config,
)
from pflcore.lab.cli._experiment import Options, options_subset
from pflcore.lab.cli._groups import chosen_groups, chosen_names, passed_over_keys
from pflcore.lab.cli._options import (
    CUT_OPTIONS,
    SHIFT_OPTIONS,
    dataclass_of_arguments,
    flags_of,
    option_fields,
    parse,
)
from pflcore.lab.cli._output import OutputOptions
from pflcore.lab.data import FEDERATIONS, SOURCES
from pflcore.lab.data._files import READERS
from pflcore.lab.results._pictures import FORMATS, write_figure
from pflcore.simulation._files import safe_write
from pflcore.train import Training

ANY_NAME = "NAME"  # stands in the help for the name of the data


@checked
@dataclass(frozen=True)
class DataOptions(options_subset((*CUT_OPTIONS, *SHIFT_OPTIONS))):  # type: ignore[misc]
    """The cut of the data among clients, and the file of the picture.

    Args:
        split: split that the picture shows: train, val or test
        out: file of the picture, which ends in .png, .svg or .pdf; no picture if not
            said
    """

    split: str = "train"
    out: Path | None = None


def data(argv: Sequence[str]) -> int:
    """Shows which client holds which samples; lists the data sets without a name."""
    names = [word for word in argv[:1] if not word.startswith("-")]
    rest = argv[len(names) :]
    config = read_config(config_path(rest))
    named = config.values.pop("data", None)
    names = names or ([str(named)] if named is not None else [])
    is_help = bool({"-h", "--help"} & {*argv})
    if not (names or is_help):
        words = "the name of the data first, or --config with the key data"
        require(not argv, "data", words, argv, SOURCES)
        print(list_of_all())
        return 0
    name = names[0] if names else ANY_NAME
    options, cut = _parse(name, rest, config)
    if options.out is not None:
        fits = options.out.suffix in FORMATS
        words = f"a file that ends in {', '.join(FORMATS)}"
        require(fits, "out", words, str(options.out))
    shared = vars(options).copy()
    del shared["split"], shared["out"]
    # A run whose cut follows the seed has it in its file.
    shared["seed"] = config.values.get("seed", Options.seed)
    federation = experiment.load_federation(Options(data=name, **shared), cut)
    federation.size(options.split)  # raises the error of a split that does not exist
    print(experiment.about_data(name, federation))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with safe_write(options.out) as part:
            write_figure(federation.plot(options.split), part, options.out.suffix)
        print(f"Picture: {options.out}")
    return 0


def _parse(
    name: str, argv: Sequence[str], config: Config
) -> tuple[DataOptions, dict[str, object]]:
    """The options of the command, and those of the partition or of the data."""
    prog = f"pflcore data {name}"
    groups: dict[str, type] = {"cut": DataOptions, "config": ConfigOptions}
    about = f"{inspect.getdoc(data)}\n\n{list_of_partitions()}"
    if name == ANY_NAME:
        about = f"{inspect.getdoc(data)}\n\n{list_of_all()}"
    # The partition decides which other options there are.
    partition = chosen_names(argv, config)["partition"]
    functions = {
        "partition": experiment.partition_of(name, partition),
        "data": experiment.data_options_of(name),
    }
    for title, choice in functions.items():
        if choice and choice.defaults:
            groups[title] = dataclass_of_arguments(choice.function, choice.defaults)
    reserved = reserved_names()
    flags = flags_of(groups, reserved=reserved)
    config.check_keys(flags, keys_of_runs(config), prog)
    values = parse(
        prog, about, groups, argv, reserved=reserved, defaults=config.defaults(flags)
    )
    cut = {**values.get("partition", {})}
    own = functions["data"]
    if own is not None:
        cut = {k: v for k, v in values["data"].items() if v != own.defaults[k]}
    return DataOptions(**values["cut"]), cut


def reserved_names() -> set[str]:
    """Names that an option of a partition or of data does not have by itself.

    They are names of options of `pflcore run`. There `target` is a client, so that the
    target of a reader of files is `--data-target`, and here, too.
    """
    names = set()
    for cls in (Options, Training, OutputOptions):
        names |= {f.name for f in option_fields(cls)}
    return names


def keys_of_runs(config: Config) -> set[str]:
    """Keys of a file of options that say how a run trains, and cut no data."""
    keys = passed_over_keys([], config)
    names = {"data": "", "partition": None, "model": config.values.get("model", "auto")}
    if "algorithm" in config.values:
        keys |= {*flags_of({"run": class_of(str(config.values["algorithm"]))})}
    return keys | {*flags_of(chosen_groups(names))}


def list_of_all() -> str:
    """The data sets and the partitions."""
    return f"{list_of_data()}\n\n{list_of_partitions()}"


def list_of_data() -> str:
    """The data sets by name and the ways to give data of one's own, one a line."""
    lines = ["Data sets, of which `pflcore data NAME` shows the cut among clients:"]
    for name, images in SOURCES.items():
        lines.append(f"  {name:<18} {images.about}; a partition cuts it")
    for name, function in FEDERATIONS.items():
        lines.append(f"  {name:<18} {first_line(function)}")
    for name, function in READERS.items():
        lines.append(f"  {name + ':PATH':<18} {first_line(function)}")
    return "\n".join(lines)


def list_of_partitions() -> str:
    """The partitions by name with their options, one a line."""
    lines = ["Partitions, and their options, which --partition NAME --help explains:"]
    for name, partition in PARTITIONS.items():
        options = ", ".join(options_of(name))
        lines.append(f"  {name:<12}  {first_line(partition.rule)} ({options})")
    return "\n".join(lines)


def first_line(function: object) -> str:
    """The first line of a function's docstring."""
    return (inspect.getdoc(function) or "").splitlines()[0]
