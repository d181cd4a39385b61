"""`pflcore tune`: a search over the options of an algorithm.

The candidates are compared on validation data, which are a part of each client's
training samples. Test data take no part.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.check import reject, require
from pflcore.data._protocols import StudyProtocol, cross_silo
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli._config import (
    CHOICE_FILE,
    ConfigOptions,
    config_path,
    config_text,
    read_config,
    tables_text,
    write_config,
)
from pflcore.lab.cli._experiment import Job, Options, options_subset
from pflcore.lab.cli._folder import new_folder
from pflcore.lab.cli._groups import (
    chosen_groups,
    chosen_names,
    cut_of,
    passed_over_keys,
)
from pflcore.lab.cli._options import allow_own_modules, flags_of, parse
from pflcore.lab.cli._output import TuneOptions
from pflcore.lab.data import SOURCES, TABULAR
from pflcore.lab.tuning import Tuned, check_grid, tune
from pflcore.simulation._files import write_text
from pflcore.train import Training

TABLE_FILE = "tuned.md"
# Options of a run that a grid search has, too.
RUN_OPTIONS = (
    "data",
    "partition",
    "n",
    "model",
    "loss",
    "rounds",
    "participation",
    "sampling",
    "clip",
    "attack",
    "attack_clients",
    "attack_strength",
    "batch_norm",
    "target",
    "seed",
    "data_seed",
    "train_samples",
    "test_samples",
    "standardize",
    "feature_shift",
    "feature_shift_strength",
    "engine",
    "workers",
    "device",
    "clients_per_block",
    "graphs",
    "ranks",
    "rank_timeout",
)


def tune_command(argv: Sequence[str]) -> int:
    """Searches for options on validation data, and writes the best ones."""
    names = [word for word in argv[:1] if not word.startswith("-")]
    rest = argv[len(names) :]
    about = inspect.getdoc(tune_command) or ""
    groups: dict[str, type] = {"config": ConfigOptions, "tune": TuneOptions}
    groups |= {"run": options_subset(RUN_OPTIONS), "training": Training}
    config = read_config(config_path(rest))
    named = config.values.pop("algorithm", None)
    if named is not None and not names:
        names = [str(named)]
    allow_own_modules([*names, *rest, *map(str, config.values.values())])
    if not {"-h", "--help"} & {*rest}:
        expected = f"the name of an algorithm first ({', '.join(ALGORITHMS)})"
        require(names, "tune", expected, names)
    groups |= chosen_groups(chosen_names(rest, config))
    groups |= {name_of(name): class_of(name) for name in names}
    prog = f"pflcore tune {names[0] if names else 'ALGORITHM'}"
    flags = flags_of(groups)
    config = config.without_table([*map(name_of, names)], flags)
    config.check_keys(flags, passed_over_keys(names, config), prog)
    values = parse(prog, about, groups, rest, defaults=config.defaults(flags))
    text = config_text(values, flags, "pflcore tune", algorithm=names[0])
    return _tune_values(names[0], values, text)


def _tune_values(name: str, values: Mapping[str, dict[str, Any]], config: str) -> int:
    """Searches the grid with these options, and returns the exit code.

    Args:
        name: The name of the algorithm.
        values: The values of each group of options.
        config: All options as TOML, which are written into the folder.
    """
    tuning = TuneOptions(**values["tune"])
    options = Options(**values["run"])
    grid = parse_grid(tuning.grid)
    is_client = options.target != "all"
    require(is_client, "target", "a client; a search has one run", options.target)
    protocols = _protocols(options, values, tuning.seeds)
    data = protocols[0].data
    training = Training(**values["training"])
    job = Job(name, options, training, values[name_of(name)]).with_ids(data)
    algorithm = job.make_algorithm()
    check_grid(algorithm, training, grid)
    seeds = [options.seed + j for j in range(tuning.seeds)]
    nets = []
    for seed, protocol in zip(seeds, protocols, strict=True):
        # A cut of its own may have other classes, or words of a text.
        make = experiment.make_model(options, protocol.data, values.get("model", {}))
        nets.append(
            experiment.make_net(replace(options, seed=seed), protocol.data, make)
        )
    folder = tuning.out
    if folder is None:
        folder = new_folder(
            [f"tune-{name_of(name)}"], options.data, options.partition or ""
        )

    def say(text: str) -> None:
        if not tuning.quiet:
            print(text, file=sys.stderr)

    try:
        tuned = tune(
            protocols,
            nets,
            algorithm,
            training,
            grid,
            options.rounds,
            participation=options.participation,
            sampling=options.sampling,
            seed=seeds,
            robustness=options.robustness,
            batch_norm=options.batch_norm,
            hardware=options.hardware,
            metric=tuning.metric,
            folder=folder,
            log=say,
        )
    except ValueError:
        if tuning.out is None:
            # Nothing was played in the new folder where an option is wrong.
            for path in (folder, folder.parent):
                with contextlib.suppress(OSError):
                    path.rmdir()
        raise
    if options.started_ranks.is_first:
        write_config(folder, config)
        write_text(folder / TABLE_FILE, tuned.table())
        write_text(folder / CHOICE_FILE, choice_text(name, tuned))
        print(tuned.table())
        if tuned.ties:
            print(tuned.tie_line())
        print(f"In {folder}: {TABLE_FILE}, {CHOICE_FILE}", file=sys.stderr)
        print(f"Compare: pflcore compare --tuned {folder} ...", file=sys.stderr)
    return 0


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each option, from words such as lam=.01,.1,1.

    Raises ValueError for a word of another form.
    """
    expected = "options and their values, such as lam=.01,.1,1 training.lr=.05,.2"
    require(words, "grid", expected, None)
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, _, texts = word.partition("=")
        if not key or not texts:
            reject("grid", expected, word)
        require(key not in grid, "grid", "each option once", word)
        grid[key] = [_value(text) for text in texts.split(",")]
    return grid


def _value(text: str) -> Any:
    """The value of a word: a number, true, false, none, or else the word itself."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _protocols(
    options: Options, values: Mapping[str, dict[str, Any]], count: int
) -> list[StudyProtocol]:
    """The splits of the data, one for each run of a candidate.

    Features are standardized after the split, so that the validation samples have no
    part in it.
    """
    has_clients = options.data not in SOURCES
    standardize = bool(options.standardize)
    if has_clients and options.standardize is None:
        standardize = options.data in TABULAR
    if has_clients:
        options = replace(options, standardize=False)
    data = experiment.load_federation(options, cut_of(options, values))
    protocols = []
    for j in range(count):
        seed = options.cut_seed + j
        protocols.append(cross_silo(data, seed=seed, standardize=standardize))
    return protocols


def choice_text(name: str, tuned: Tuned) -> str:
    """The options of the best candidate as TOML, for `pflcore compare --tuned`.

    These are all options of the algorithm, and the options of local training that the
    grid varies.

    Args:
        name: The name of the algorithm, or package.module:Class.
        tuned: The result of the search.
    """
    best = tuned.best.candidate
    title = name_of(name)
    values: dict[str, Any] = {"algorithm": name}
    for flag in flags_of({title: type(best.algorithm)}, [title]).values():
        value = getattr(best.algorithm, flag.field)
        if value is not None or flag.default is not None:
            values[flag.key] = value
    for key, value in best.options.items():
        if key.startswith("training."):
            values[f"{title}.{key}"] = value
    score = f"{tuned.best.score:.5f} on validation data"
    return tables_text(values, f"Chosen by `pflcore tune {name}`: {score}.")
