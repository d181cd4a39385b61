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
from typing import Any

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.check import require
from pflcore.data import PARTITIONS
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli._config import (
    Config,
    ConfigOptions,
    config_path,
    config_text,
    read_choice,
    read_config,
)
from pflcore.lab.cli._experiment import Job, Options
from pflcore.lab.cli._groups import (
    chosen_groups,
    chosen_names,
    cut_of,
    own_training_groups,
    passed_over_keys,
)
from pflcore.lab.cli._jobs import run_jobs
from pflcore.lab.cli._options import (
    allow_own_modules,
    flags_of,
    given_keys,
    option_fields,
    parse,
    words_behind,
)
from pflcore.lab.cli._output import OutputOptions
from pflcore.lab.data import FEDERATIONS, SOURCES
from pflcore.nn.models import MODELS
from pflcore.simulation.record import Line
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
    """Runs an algorithm by its name, or your own as package.module:Class."""
    names = [word for word in argv[:1] if not word.startswith("-")]
    return _run_values(*command_values(run, names, argv[len(names) :]))


def compare(argv: Sequence[str]) -> int:
    """Runs several algorithms with equal data, initial weights, cohorts and batches."""
    names = [*takewhile(lambda word: not word.startswith("-"), argv)]
    rest = argv[len(names) :]
    if names:
        is_given_twice = any(word.startswith("--algorithms") for word in rest)
        words = "the names once, at the front or behind --algorithms"
        require(not is_given_twice, "algorithms", words, names)
        rest = ["--algorithms", *names, *rest]
    return _run_values(*command_values(compare, [], rest))


def command_values(
    command: Callable[..., int], names: Sequence[str], argv: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The values of each group of options of `run` or `compare`, and the algorithms.

    The algorithms are names by the groups of their options.

    Args:
        command: `run` or `compare`.
        names: The algorithm that `run` is called for, if there is one.
        argv: The other words of the command line.
    """
    # Names decide which options there are, so they are read by hand. Then all options
    # are parsed once, with the values of the files as defaults.
    is_run = command is run
    config = read_config(config_path(argv))
    configs = [config]
    if is_run:
        named = config.values.pop("algorithm", None)
        names = names or ([str(named)] if named is not None else [])
    else:
        names, choices = _tuned_names(argv, config)
        configs += choices
    allow_own_modules([*names, *argv, *map(str, config.values.values())])
    prog = f"pflcore {command.__name__}"
    if is_run:
        prog = f"{prog} {names[0] if names else 'ALGORITHM'}"
    if not {"-h", "--help"} & {*argv}:
        _require_names(command, names)
    algorithms = {name_of(name): name for name in names}  # by the group of its options
    classes = {title: class_of(name) for title, name in algorithms.items()}
    differ = len({*classes.values()}) == len(algorithms)
    require(differ, "algorithms", "different names", ", ".join(names))
    groups: dict[str, type] = {} if is_run else {"compare": CompareOptions}
    groups |= {"config": ConfigOptions, "run": Options, "training": Training}
    groups |= {"output": OutputOptions, **chosen_groups(chosen_names(argv, config))}
    groups |= classes
    given_flags = given_keys(argv)
    given = [*given_flags, *(key for one in configs for key in one.values)]
    prefixed = [] if is_run else [*algorithms]
    own_training = own_training_groups(prefixed, given)
    groups |= dict.fromkeys(own_training, Training)
    prefixed += own_training
    flags = flags_of(groups, prefixed)
    if is_run:
        configs = [config.without_table([*algorithms], flags)]
    defaults: dict[str, Line] = {}
    for config in configs:
        config.check_keys(flags, passed_over_keys(names, config), prog)
        for title, group in config.defaults(flags).items():
            defaults[title] = defaults.get(title, {}) | group
    about = _about(command, [*classes.values()])
    values = parse(prog, about, groups, argv, prefixed, defaults=defaults)
    for title in own_training:
        # What the method does not set by itself is that of all. A flag for all
        # overrides what a file says of a method, also one of `pflcore tune`.
        for name, value in values["training"].items():
            own_flag = f"{title}.{name}"
            is_overridden = name in given_flags and own_flag not in given_flags
            if is_overridden or own_flag not in given:
                values[title][name] = value
    return values, algorithms


def _require_names(command: Callable[..., int], names: Sequence[str]) -> None:
    """Raises ValueError where the command line names no algorithm."""
    if command is run:
        words = f"the name of an algorithm first ({ALGORITHM_NAMES})"
        require(names, command.__name__, words, names)
    else:
        require(names, "algorithms", f"at least one ({ALGORITHM_NAMES})", names)


def _tuned_names(argv: Sequence[str], config: Config) -> tuple[list[str], list[Config]]:
    """The algorithms to compare, and the options that `pflcore tune` chose for them.

    Without names they are the tuned algorithms. Raises ValueError for a tuned algorithm
    that is not among the names.
    """
    for key in ("tuned", "algorithms"):
        value = config.values.get(key, [])
        require(isinstance(value, list), key, f"a list in {config.path}", value)
    folders = words_behind(argv, "tuned") or config.values.get("tuned", [])
    choices = [read_choice(Path(folder)) for folder in folders]
    words = words_behind(argv, "algorithms") or config.values.get("algorithms", [])
    names = [str(word) for word in words]
    names = names or [*dict.fromkeys(name for name, _ in choices)]
    titles = {name_of(name) for name in names}
    for name, _ in choices:
        expected = f"folders of the algorithms that run ({', '.join(names)})"
        require(name_of(name) in titles, "tuned", expected, name)
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
        if kind == "Algorithms" and classes:
            continue  # They were chosen.
        paragraphs.append(f"{kind}: {', '.join(names)}.")
    for cls in classes:
        if not option_fields(cls):
            paragraphs.append(inspect.getdoc(cls) or "")
    return "\n\n".join(paragraphs)


def _run_values(values: Mapping[str, Line], algorithms: Mapping[str, str]) -> int:
    """Plays the runs with the options of `command_values`; returns the exit code."""
    jobs, cut = jobs_of(values, algorithms)
    output = OutputOptions(**values["output"])
    configs = {job.name: _config_of(job, values) for job in jobs}
    return run_jobs(jobs, cut, values.get("model", {}), output, configs)


def jobs_of(
    values: Mapping[str, Line], algorithms: Mapping[str, str]
) -> tuple[list[Job], Line]:
    """The jobs with these options, and the options of the partition or of the reader.

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
    return jobs, cut_of(options, values)


def _config_of(job: Job, values: Mapping[str, Line]) -> str:
    """The options of one run as TOML, by which `pflcore run` repeats it."""
    title = name_of(job.algorithm)
    groups: dict[str, type] = {"run": Options, "training": Training}
    groups |= {"output": OutputOptions, **chosen_groups(values["run"])}
    groups |= {title: class_of(job.algorithm)}
    own_values = {
        **values,
        "run": {**vars(job.options), "seeds": 1},
        "training": values.get(f"{title}.training", values["training"]),
    }
    return config_text(
        own_values, flags_of(groups), "pflcore run", algorithm=job.algorithm
    )
