"""`pflcore run` and `pflcore compare`: the jobs that the words of a command make.

Every option is a field of a dataclass (the algorithm, Training, Options, OutputOptions)
or an argument of the partition, of the reader of files, or of the model.

Words: a "job" is one run of a command; "cut" are the options of the partition or of the
reader, and "shape" the options of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.check import require
from pflcore.cli import _experiment as experiment
from pflcore.cli._config import (
    Config,
    ConfigOptions,
    config_text,
    read_choice,
    read_config,
)
from pflcore.cli._experiment import Job, Options
from pflcore.cli._groups import (
    chosen_groups,
    cut_of,
    idle_flags,
    own_training_groups,
)
from pflcore.cli._jobs import run_jobs
from pflcore.cli._options import allow_own_modules, flags_of, option_fields, parse
from pflcore.cli._output import OutputOptions
from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES
from pflcore.nn.models import MODELS
from pflcore.results.record import Line
from pflcore.train import Training

ALGORITHM_NAMES = ", ".join(ALGORITHMS)
HELP_NAMES = {
    "Algorithms": ALGORITHMS,
    "Data": [*SOURCES, *FEDERATIONS],
    "Partitions": PARTITIONS,
    "Models": MODELS,
}


@dataclass(frozen=True)
class CompareOptions:
    """The algorithms to compare; an algorithm's own options are --ALGORITHM.OPTION.

    Local training of one algorithm alone is --ALGORITHM.training.OPTION.

    Args:
        algorithms: names of algorithms, or package.module:Class
        tuned: folders of `pflcore tune`, the chosen options of which their algorithms
            take; without names, these algorithms are compared
    """

    algorithms: tuple[str, ...] = ()
    tuned: tuple[Path, ...] = ()


def run(argv: Sequence[str]) -> int:
    """Runs one of the algorithms below, or your own as package.module:Class."""
    names = [word for word in argv[:1] if not word.startswith("-")]
    return _run_command(run, names, argv[len(names) :])


def compare(argv: Sequence[str]) -> int:
    """Runs several algorithms with equal data, initial weights, cohorts and batches."""
    names = [*takewhile(lambda word: not word.startswith("-"), argv)]
    rest = argv[len(names) :]
    if names:
        is_given_twice = any(word.startswith("--algorithms") for word in rest)
        words = "the names once, at the front or behind --algorithms"
        require(not is_given_twice, "algorithms", words, names)
        rest = ["--algorithms", *names, *rest]
    return _run_command(compare, [], rest)


def _run_command(
    command: Callable[..., int], names: Sequence[str], argv: Sequence[str]
) -> int:
    """Plays the runs of `run` or `compare`, and returns the exit code.

    Args:
        command: `run` or `compare`.
        names: The algorithm that `run` is called for, if there is one.
        argv: The other words of the command line.
    """
    is_run = command is run
    about = _about(command)
    groups: dict[str, type] = {} if is_run else {"compare": CompareOptions}
    groups |= {"config": ConfigOptions, "run": Options, "training": Training}
    groups |= {"output": OutputOptions}
    # The values of these options decide which other options there are. So these are
    # parsed alone first, and then all options together.
    prog = f"pflcore {command.__name__}"
    first = parse(prog, about, groups, argv, complete=False)
    config = read_config(first["config"]["config"])
    if is_run:
        named = config.values.pop("algorithm", None)
        if named is not None and not names:
            names = [str(named)]
        prog = f"{prog} {names[0] if names else 'ALGORITHM'}"
    # The words of the command line come last, so they override those of the file.
    words = [*config.words(flags_of(groups)), *argv]
    first = parse(prog, about, groups, words, complete=False)
    configs = [config]
    if not is_run:
        names, choices = _tuned_names(**first["compare"])
        configs += choices
    allow_own_modules([*names, *words])
    is_help = bool({"-h", "--help"} & {*argv})
    if not is_help:
        _require_names(command, names)
    groups |= chosen_groups(first["run"])
    algorithms = {name_of(name): name for name in names}  # by the group of its options
    groups |= {title: class_of(name) for title, name in algorithms.items()}
    classes = {class_of(name) for name in names}
    differ = len(classes) == len(algorithms)
    require(differ, "algorithms", "different names", ", ".join(names))
    about = _about(command, [class_of(name) for name in names])
    prefixed = [] if is_run else [*algorithms]
    keys = {key for config in configs for key in config.values}
    own_training = own_training_groups(prefixed, keys, argv)
    groups |= dict.fromkeys(own_training, Training)
    prefixed += own_training
    defaults = dict.fromkeys(own_training, first["training"])
    flags = flags_of(groups, prefixed)
    words = []
    for config in configs:
        known_flags = flags if is_run else flags | idle_flags(config, [*algorithms])
        config.check_keys(known_flags, prog)
        words += config.words(flags)
    words += argv
    values = parse(prog, about, groups, words, prefixed, defaults=defaults)
    if not is_run:
        values["compare"]["algorithms"] = tuple(names)
    return _run_values(values, algorithms)


def _require_names(command: Callable[..., int], names: Sequence[str]) -> None:
    """Raises ValueError where the command line names no algorithm."""
    if command is run:
        words = f"the name of an algorithm first ({ALGORITHM_NAMES})"
        require(names, command.__name__, words, names)
    else:
        require(names, "algorithms", f"at least one ({ALGORITHM_NAMES})", names)


def _tuned_names(
    algorithms: Sequence[str], tuned: Sequence[Path]
) -> tuple[list[str], list[Config]]:
    """The algorithms to compare, and the options that `pflcore tune` chose for them.

    Without names they are the tuned algorithms. Raises ValueError for a tuned algorithm
    that is not among the names.

    Args:
        algorithms: The names of the command.
        tuned: The folders of `pflcore tune`.
    """
    choices = [read_choice(folder) for folder in tuned]
    names = [*algorithms] or [*dict.fromkeys(name for name, _ in choices)]
    titles = {name_of(name) for name in names}
    for name, _ in choices:
        words = f"folders of the algorithms that run ({', '.join(names)})"
        require(name_of(name) in titles, "tuned", words, name)
    return names, [choice for _, choice in choices]


def _about(command: Callable[..., int], classes: Sequence[type] = ()) -> str:
    """The text at the head of a command's help.

    Args:
        command: `run` or `compare`.
        classes: The classes of the algorithms that are named. A class with options is
            described at the group of its options instead.
    """
    paragraphs = [inspect.getdoc(command) or ""]
    for kind, names in HELP_NAMES.items():
        paragraphs.append(f"{kind}: {', '.join(names)}.")
    for cls in classes:
        if not option_fields(cls):
            paragraphs.append(inspect.getdoc(cls) or "")
    return "\n\n".join(paragraphs)


def _run_values(
    values: Mapping[str, Line],
    algorithms: Mapping[str, str],
) -> int:
    """Plays the runs with these options, and returns the exit code.

    Args:
        values: The values of each group of options.
        algorithms: The name of each algorithm, by the group of its options.
    """
    options = Options(**values["run"])
    training = Training(**values["training"])
    hyper = {name: values[title] for title, name in algorithms.items()}
    own_training = {}
    for title, name in algorithms.items():
        own_values = values.get(f"{title}.training")
        if own_values is not None:
            own_training[name] = Training(**own_values)
    names = [*algorithms.values()]
    jobs = experiment.make_jobs(names, options, training, hyper, own_training)
    cut = cut_of(options, values)
    output = OutputOptions(**values["output"])
    configs = {job.name: _config_of(job, values) for job in jobs}
    return run_jobs(jobs, cut, values.get("model", {}), output, configs)


def _config_of(job: Job, values: Mapping[str, Line]) -> str:
    """The options of one run as TOML, by which `pflcore run` repeats it."""
    title = name_of(job.algorithm)
    groups: dict[str, type] = {"run": Options, "training": Training}
    groups |= {"output": OutputOptions, **chosen_groups(values["run"])}
    groups |= {title: class_of(job.algorithm)}
    own_values = {
        **values,
        "run": {**vars(job.options), "seeds": 1},
        "training": vars(job.training),
    }
    return config_text(
        own_values, flags_of(groups), "pflcore run", algorithm=job.algorithm
    )
