"""`pflcore run`, `pflcore compare` and `pflcore report`: records, tables and pictures.

Every option is a field of a dataclass (the algorithm, Training, Options, OutputOptions)
or an argument of the partition, of the reader of files, or of the model.

Words: a "job" is one run of a command; "cut" are the options of the partition or of the
reader, and "shape" the options of the model.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.check import (
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitFloat,
    PositiveInt,
    checked,
    require,
)
from pflcore.cli import _experiment as experiment
from pflcore.cli._config import (
    CONFIG_FILE,
    CONFIG_FILES,
    Config,
    ConfigOptions,
    config_text,
    read_choice,
    read_config,
    write_config,
)
from pflcore.cli._experiment import Job, Options
from pflcore.cli._follow import NoProgress, NoRecord
from pflcore.cli._options import (
    Flag,
    allow_own_modules,
    dataclass_of_arguments,
    flags_of,
    option_fields,
    parse,
)
from pflcore.cli._predict import MODELS_FOLDER
from pflcore.cli._track import TrackerName, require_tracker, tracker_of
from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, Federation
from pflcore.metrics import human_bytes
from pflcore.nn.models import MODELS
from pflcore.results import _run_pictures as pictures
from pflcore.results import table
from pflcore.results._columns import column_names, require_columns
from pflcore.results._files import (
    atomic_write,
    move_aside,
    remove_part_files,
    write_text,
)
from pflcore.results._pictures import FORMATS, save
from pflcore.results._progress import Progress
from pflcore.results.record import (
    Facts,
    Line,
    OnRound,
    RecordWriter,
    Runs,
    read,
    to_json,
)
from pflcore.results.table import Format
from pflcore.simulation import History, checkpoint
from pflcore.simulation import _describe as describe
from pflcore.simulation._per_target import target_folder
from pflcore.simulation._ranks import Ranks
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training

ALGORITHM_NAMES = ", ".join(ALGORITHMS)
HELP_NAMES = {
    "Algorithms": ALGORITHMS,
    "Data": [*SOURCES, *FEDERATIONS],
    "Partitions": PARTITIONS,
    "Models": MODELS,
}
Model = Callable[[], Any]
CHECKPOINTS = "checkpoints"  # the folder of the runs' checkpoints
RECORD_FILE = "record.jsonl"
FEDERATION_PICTURE = "federation.png"  # which client holds which samples
# The file of the table in each format, and the start of what `_write_report` writes
# into it.
TABLE_FILES = {
    "md": ("table.md", "### "),
    "latex": ("table.tex", "% pflcore"),
    "csv": ("table.csv", "setting,"),
}
OUTPUT_FILES = (
    RECORD_FILE,
    CONFIG_FILE,
    *(name for name, _ in TABLE_FILES.values()),
    *(FEDERATION_PICTURE.replace(".png", suffix) for suffix in FORMATS),
    *(name + suffix for name in pictures.PICTURE_NAMES for suffix in FORMATS),
)


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


@checked
@dataclass(frozen=True)
class ReportOptions:
    """The folder of the table and the pictures, and what they show.

    Args:
        out: folder; if not said, a new one below runs/, or the first record's
        baseline: an algorithm; adds to the table the percent of clients that are worse
            off than with it
        last: number of rounds in "mean of last"
        format: format of the table: md for table.md, latex for table.tex (package
            booktabs), csv for table.csv (mean and deviation in columns of their own)
        columns: columns of the table in this order; all if not said: best, final,
            last_mean, std, worst_decile, the run's metrics, hurt (with --baseline),
            bytes, note
        privacy_delta: delta of the line below the table that has the epsilon of
            runs with --defence dp; one over the number of clients with training samples
            if not said
        overwrite: begin anew in a folder that is not empty; its record, its checkpoints
            and a table that belongs to no record are moved to names that end in .1,
            .2, ...
    """

    out: Path | None = None
    baseline: str | None = None
    last: PositiveInt = 10
    format: Format = "md"
    columns: tuple[str, ...] = ()
    privacy_delta: OpenUnitFloat | None = None
    overwrite: bool = False

    @property
    def table_file(self) -> str:
        """The name of the table's file."""
        return TABLE_FILES[self.format][0]


@checked
@dataclass(frozen=True)
class OutputOptions(ReportOptions):
    """The folder of record.jsonl, table and the pictures, and its checkpoints.

    Args:
        resume: go on with the record in the folder, from its last checkpoint; begin
            where the folder has no record; with more --rounds a run that is over goes
            on, too
        checkpoint_every: rounds between checkpoints; 0: by time alone
        checkpoint_minutes: minutes between checkpoints; 0: by rounds alone
        keep_checkpoint: keep the last checkpoint of a run that is over, from which it
            can go on to more rounds; it has the rows of all clients that took part
        track: service that gets each round's numbers, too: tensorboard (into
            tensorboard/ of the folder), wandb (WANDB_PROJECT, WANDB_MODE) or mlflow
            (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)
        export: write every client's personalized model into models/ of the folder, for
            `pflcore predict`; not those of runs that --resume finds complete
        quiet: show no progress bar
        dry_run: print what would run, where the clients' rows would be and the memory
            that it takes; write nothing
    """

    resume: bool = False
    checkpoint_every: NonNegativeInt = 0
    checkpoint_minutes: NonNegativeFloat = 10.0
    keep_checkpoint: bool = True
    track: TrackerName | None = None
    export: bool = False
    quiet: bool = False
    dry_run: bool = False


class RunFailed(Exception):
    """An error in the middle of a run."""


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
    own_training = _own_training(prefixed, keys, argv)
    groups |= dict.fromkeys(own_training, Training)
    prefixed += own_training
    defaults = dict.fromkeys(own_training, first["training"])
    flags = flags_of(groups, prefixed)
    words = []
    for config in configs:
        idle_flags = {} if is_run else _idle_flags(config, [*algorithms])
        config.check_keys(flags | idle_flags, prog)
        words += config.words(flags)
    words += argv
    values = parse(prog, about, groups, words, prefixed, defaults=defaults)
    if not is_run:
        values["compare"]["algorithms"] = tuple(names)
    named = {"algorithm": names[0]} if is_run else {}
    text = config_text(values, flags, f"pflcore {command.__name__}", **named)
    return _run_values(values, algorithms, text)


def _idle_flags(config: Config, titles: Sequence[str]) -> dict[str, Flag]:
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


def _own_training(
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
    config: str,
) -> int:
    """Plays the runs with these options, and returns the exit code.

    Args:
        values: The values of each group of options.
        algorithms: The name of each algorithm, by the group of its options.
        config: The options as TOML.
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
    if "compare" in values and _adds_runs(jobs, output):
        output = replace(output, resume=True)
    return _run_jobs(jobs, cut, values.get("model", {}), output, config)


def _adds_runs(jobs: Sequence[Job], output: OutputOptions) -> bool:
    """True where the folder holds other runs of a comparison than these alone.

    Then the command adds the runs that the folder lacks.
    """
    if output.overwrite:
        return False
    runs = _recorded_command(output.out).get("runs", {})
    return bool(runs) and any(job.name not in runs for job in jobs)


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


def _require_names(command: Callable[..., int], names: Sequence[str]) -> None:
    """Raises ValueError where the command line names no algorithm."""
    if command is run:
        words = f"the name of an algorithm first ({ALGORITHM_NAMES})"
        require(names, command.__name__, words, names)
    else:
        require(names, "algorithms", f"at least one ({ALGORITHM_NAMES})", names)


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


def _run_jobs(
    jobs: Sequence[Job], cut: Facts, shape: Facts, output: OutputOptions, config: str
) -> int:
    """Plays all jobs into one record; returns the exit code.

    It checks all options before it writes anything, and makes the table and the
    pictures at the end.

    Args:
        jobs: The runs of the command.
        cut: The options of the partition or of the reader.
        shape: The options of the model.
        output: The options of the folder.
        config: All options as TOML, which are written into the folder.
    """
    options = jobs[0].options
    if options.debug:
        logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    ranks = options.started_ranks
    with ranks.together("the check of the command's options"):
        if ranks.is_first:
            _check_output(jobs, output)
        data = experiment.load_federation(options, cut)
        jobs = [job.with_ids(data) for job in jobs]
        model = experiment.make_model(options, data, shape)
        begun = output.resume and Checkpoint(output.out or "").exists
        if ranks.is_first:
            recorded = _recorded_command(output.out) if begun else {}
            new = [job for job in jobs if job.name not in recorded.get("runs", {})]
            plans = _try_jobs(new, data, model)
            if output.dry_run:
                print("\n".join([data.summary(), *plans]))
    if output.dry_run:
        return 0
    command = experiment.describe_command(jobs, cut, shape)
    command["common"]["federation"] = describe.describe_data(data)
    own_fields = {"partition_options": cut, "model_options": shape}
    with contextlib.ExitStack() as stack:
        with ranks.together("the folder of the command"):
            done: set[str] = set()
            runner = _JobRunner(
                data, model, own_fields, output, Path(), NoRecord(), NoProgress(), ranks
            )
            if ranks.is_first:
                done = _open_folder(stack, runner, jobs, to_json(command), begun)
                write_config(runner.folder, config)
        done = ranks.from_first("the jobs that are done", lambda: done)
        return _play_and_report(runner, jobs, done)


def _check_output(jobs: Sequence[Job], output: OutputOptions) -> None:
    """Raises ValueError where the command cannot write what its options say."""
    options = jobs[0].options
    names = {name_of(job.algorithm) for job in jobs}
    if output.resume:
        # The table has the runs that the folder holds, too.
        for run_name in _recorded_command(output.out).get("runs", {}):
            names.add(run_name.rpartition(", seed ")[0])
    known = output.baseline is None or output.baseline in names
    require(known, "baseline", "one of the algorithms that run", output.baseline)
    has_baseline = output.baseline is not None
    require_tracker(output.track)
    require_columns(output.columns, column_names(options.metrics, has_baseline))
    if output.out is not None:
        _check_folder(output.out, output)
    has_folder = not output.resume or output.out is not None
    require(has_folder, "resume", "the folder of the run with --out", None)


def _open_folder(
    stack: contextlib.ExitStack,
    runner: _JobRunner,
    jobs: Sequence[Job],
    command: Facts,
    begun: bool,
) -> set[str]:
    """Gives the runner its folder, record and bar; returns the jobs that are done.

    Args:
        stack: closes them at its end
        runner: what plays the jobs
        jobs: the runs of the command
        command: the facts of the command
        begun: True where the command goes on with the record that is in the folder
    """
    options = jobs[0].options
    output = runner.output
    num_rounds = sum(job.num_rounds(runner.data.n) for job in jobs)
    progress = stack.enter_context(Progress(num_rounds, output.quiet))
    folder = output.out
    if folder is None:
        names = [name_of(job.algorithm) for job in jobs]
        folder = new_folder(names, options.data, options.partition or "")
    stack.enter_context(checkpoint.lock(folder))
    if begun:
        _merge_commands(folder, command)
        for job in jobs:
            _check_goes_on(folder, job, runner)
    done = _prepare_folder(folder, output, command, begun, progress)
    path = folder / RECORD_FILE
    record = stack.enter_context(RecordWriter(path, goes_on=begun))
    if begun:
        command = _merge_commands(folder, command)
    if command != _recorded_command(folder):
        checkpoint.save(folder, {}, {"command": command})
    progress.say(f"{runner.data.summary()}\nRecord: {path}")
    runner.folder = folder
    runner.record = record
    runner.progress = progress
    return done


def _check_goes_on(folder: Path, job: Job, runner: _JobRunner) -> None:
    """Raises ValueError for a run that is over and cannot go on to the job's rounds."""
    lengths = {}
    for recorded in read(folder / RECORD_FILE):
        if recorded.complete:
            lengths[recorded.name] = recorded.header.get("rounds")
    length = lengths.get(job.name, job.options.rounds)
    if length == job.options.rounds:
        return
    reason = job.make_algorithm().traits.rounds_reason
    if reason:
        raise ValueError(
            f"rounds: {job.name} is over in {folder} after {length} rounds, and "
            f"{name_of(job.algorithm)} {reason}; give --rounds {length}, or another "
            "folder."
        )
    path = _checkpoint_folder(folder, job)
    simulation = job.simulation(runner.data, runner.model)
    if job.for_each:
        path = target_folder(path, getattr(simulation.algorithm, "target"))  # noqa: B009
    if not Checkpoint(path).exists:
        raise ValueError(
            f"rounds: {job.name} is over in {folder} after {length} rounds, and has no "
            "checkpoint there to go on from (--no-keep-checkpoint removes it); give "
            f"--rounds {length}, or another folder."
        )
    simulation.check_checkpoint(path)


def _prepare_folder(
    folder: Path, output: OutputOptions, command: Facts, begun: bool, progress: Progress
) -> set[str]:
    """Makes the folder ready, and returns the jobs that are done.

    The jobs are given by their names.

    Args:
        folder: The folder of the record.
        output: The options of the folder.
        command: The facts of the command. A folder whose facts differ is another
            command's.
        begun: True where the command goes on with the record that is in the folder.
        progress: The progress bar, which prints messages.
    """
    # Another command may have ended there since the first check.
    _check_folder(folder, output)
    for name in OUTPUT_FILES:
        remove_part_files(folder / name)
    done = set()
    if begun:
        kept_runs = _kept_runs(folder, command)
        with (
            atomic_write(folder / RECORD_FILE) as part,
            RecordWriter(part) as record,
        ):
            for recorded in kept_runs:
                if recorded.complete:
                    done.add(recorded.name)
                for line in recorded.lines():
                    record.write(line)
    moved = _move_outputs_aside(folder, output, complete_record=not begun)
    if moved:
        progress.say(moved)
    return done


def _play_and_report(
    runner: _JobRunner, jobs: Sequence[Job], done: Collection[str]
) -> int:
    """Plays the jobs and makes table and pictures; returns the exit code."""
    if not runner.ranks.is_first:
        return runner.play(jobs, done)
    path = runner.record.path
    try:
        status = runner.play(jobs, done)
    except RunFailed:
        # There may be rounds for a table nevertheless, and space on the disk for it.
        runner.progress.close()
        with contextlib.suppress(Exception):
            _write_report(read(path), runner.folder, runner.output, runner.data)
        raise
    runner.progress.close()
    _write_report(read(path), runner.folder, runner.output, runner.data)
    return status


def _try_jobs(jobs: Sequence[Job], data: Federation, model: Model) -> list[str]:
    """Lines of text on each algorithm's run: size, engine and memory.

    Every simulation is made, so that an error is reported before a record is opened.
    """
    plans = []
    seen = set()
    for job in jobs:
        if job.algorithm in seen:
            continue  # another seed changes nothing in the plan
        seen.add(job.algorithm)
        simulation = job.simulation(data, model)
        memory = describe.memory_line(simulation.config, simulation.peak_bytes())
        plans.append(f"{_plan_line(job.header(simulation))}\n{memory}")
        del simulation  # the next one needs the memory
    return plans


def _recorded_command(folder: Path | None) -> Line:
    """The facts of the command that a folder belongs to; {} where it has none."""
    if folder is None or not Checkpoint(folder).exists:
        return {}
    command: Line = checkpoint.load(folder)[1].get("command", {})
    return command


def _merge_commands(folder: Path, command: Facts) -> Line:
    """The facts of all runs of a folder, with those of a command that goes on there.

    Raises ValueError where the folder has runs of other options.
    """
    recorded = _recorded_command(folder)
    if recorded and "common" not in recorded:
        raise ValueError(
            f"resume: {folder} holds a run that another version of pflcore began; "
            "finish it with that version, or name another folder."
        )
    common = {**recorded.get("common", {})}
    rounds = command["common"]["rounds"]
    runs = recorded.get("runs", {})
    if recorded and not runs.keys() - command["runs"].keys():
        # All runs of the folder go on together, so they stay comparable.
        common["rounds"] = rounds
    difference = describe.first_difference(common, command["common"])
    for name, facts in command["runs"].items():
        if name in runs and not difference:
            difference = describe.first_difference(runs[name], facts)
    if difference:
        raise ValueError(
            f"resume: {folder} holds another run: {difference}; give the options it "
            "was begun with, or another folder."
        )
    return {"common": command["common"], "runs": {**runs, **command["runs"]}}


def _kept_runs(folder: Path, command: Facts) -> list[History]:
    """The runs of a folder's record that stay in it when a command goes on.

    These are the complete ones of the command's number of rounds, and all runs that the
    command does not play. Raises ValueError where the folder is another command's, or a
    checkpoint is damaged.
    """
    others = {*_merge_commands(folder, command)["runs"]} - {*command["runs"]}
    rounds = command["common"]["rounds"]
    for path in (folder / CHECKPOINTS).rglob(checkpoint.FILE_NAME):
        # It is checked here already, because the record is rewritten next.
        checkpoint.load(path.parent)
    runs = read(folder / RECORD_FILE)
    return [
        run
        for run in runs
        if run.name in others or (run.complete and run.header["rounds"] == rounds)
    ]


@dataclass
class _JobRunner:
    """Plays the jobs of a command in turn, into one record.

    Attributes:
        data: the federation of all jobs
        model: the function that makes the model
        header_fields: fields of each header in addition to those of a job
        output: options of the folder
        folder: the folder of the record
        record: the record, open for writing
        progress: the progress bar, which prints messages
        ranks: the processes that play the jobs together; the first one alone writes
    """

    data: Federation
    model: Model
    header_fields: Line
    output: OutputOptions
    folder: Path
    record: RecordWriter | NoRecord
    progress: Progress | NoProgress
    ranks: Ranks

    def play(self, jobs: Sequence[Job], done: Collection[str]) -> int:
        """Plays the jobs whose names are not in `done`.

        Returns the exit code.
        """
        has_stopped = False
        has_failed = False
        try:
            for job in jobs:
                if job.name in done:
                    self.progress.skip(job.num_rounds(self.data.n))
                    continue
                history = self.run_job(job, self.checkpoint_folder(job))
                if history.interrupted:
                    is_whole = job is jobs[-1] and history.stopped is None
                    return self._end_after_interrupt(is_whole)
                if self.output.export:
                    has_stopped |= not self.export_models(job, history)
                has_stopped = has_stopped or bool(history.stopped)
                has_failed = has_failed or history.failed
                del history  # the next one needs the memory
        except KeyboardInterrupt:
            return self._end_after_interrupt(is_whole=False)
        if self.ranks.is_first and not has_failed:
            for job in jobs:
                if not self.keeps_checkpoint(job):
                    shutil.rmtree(self.checkpoint_folder(job), ignore_errors=True)
            with contextlib.suppress(OSError):  # another command's run goes on there
                (self.folder / CHECKPOINTS).rmdir()
        return 1 if has_stopped else 0

    def keeps_checkpoint(self, job: Job) -> bool:
        """True where the checkpoint of a job that is over stays, for more rounds."""
        depends_on_rounds = bool(job.make_algorithm().traits.rounds_reason)
        return self.output.keep_checkpoint and not depends_on_rounds

    def checkpoint_folder(self, job: Job) -> Path:
        """The folder of a job's checkpoint, whatever other jobs the command has."""
        return _checkpoint_folder(self.folder, job)

    def _end_after_interrupt(self, is_whole: bool) -> int:
        """Says what the record holds after Ctrl-C or SIGTERM; returns the exit code.

        Args:
            is_whole: True where the signal came after the last round of all jobs.
        """
        text = (
            "Interrupted; the record is whole up to here, and --resume goes on from "
            "the last checkpoint."
        )
        if is_whole:
            text = "Interrupted after the last round; the record is whole."
        self.progress.say(text)
        return 130

    def run_job(self, job: Job, folder: Path) -> History:
        """The history of a job, played from its checkpoint in `folder`.

        It begins with round 1 where there is no checkpoint. At its end the record holds
        every round that was played; if rounds are missing, it says why. Raises
        RunFailed for an error in the middle.
        """
        simulation = job.simulation(self.data, self.model)
        every = self.output.checkpoint_every
        place = Checkpoint(folder, every, self.output.checkpoint_minutes)
        # Only the first rank may see the folder.
        exists = self.ranks.from_first("the job's checkpoint", lambda: place.exists)
        if exists and not job.for_each:
            simulation.restore(folder)
        header = job.header(simulation) | self.header_fields
        self.progress.say(_plan_line(header))
        self.progress.name(job.name)
        played = 0
        track_name = self.output.track if self.ranks.is_first else None
        tracking = tracker_of(track_name, job.name, header, self.folder)

        def count_round(_: int, line: Line) -> None:
            nonlocal played
            played += 1
            self.progress.step(line)

        def play(on_round: OnRound) -> History:
            if not job.for_each:
                return job.play(simulation, self.data, on_round, place)
            # A round's record needs all the clients' runs, so it is written at the end.
            history = job.play(simulation, self.data, count_round, place)
            for line in history.rounds:
                self.record.write(line)
                tracker(line["round"], line)
            return history

        def track_and_count(round: int, line: Line) -> None:
            tracker(round, line)
            count_round(round, line)

        try:
            with tracking as tracker, warnings.catch_warnings():
                # The text of this warning is printed below.
                warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
                history: History = self.record.run(header, play, track_and_count)
        except Exception as e:
            raise RunFailed(self._failure(job, e)) from e
        if history.stopped:
            self.progress.say(f"{job.name}: {history.stopped}")
        self.progress.skip(job.num_rounds(self.data.n) - played)
        is_over = not (history.interrupted or history.failed)
        if self.ranks.is_first and is_over and not self.keeps_checkpoint(job):
            shutil.rmtree(folder, ignore_errors=True)
        return history

    def export_models(self, job: Job, history: History) -> bool:
        """Writes the models of a job's clients; returns False where it cannot.

        The record is complete by then, so a full disk loses nothing but the models.
        """
        name = f"{name_of(job.algorithm)}-{job.options.seed}"
        folder = self.folder / MODELS_FOLDER / _file_name(name)
        count = 0 if history.models is None else len(history.models)
        if count < self.data.n:
            self.progress.say(f"{job.name}: the run left no models to export")
            return False
        try:
            history.export(folder)
        except OSError as e:
            self.progress.say(str(e))
            return False
        self.progress.say(f"{job.name}: models in {folder}")
        return True

    def _failure(self, job: Job, error: Exception) -> str:
        """The message on a job that an error has ended."""
        reason = f"{type(error).__name__}: {first_line(error)}"
        remedy = ""
        if isinstance(error, OSError):  # in most cases the disk is full
            reason = str(error.strerror or error)
            remedy = ", and --resume goes on from the last checkpoint"
        path = self.record.path
        return f"{job.name} failed: {reason}; the record up to there is {path}{remedy}."


def _checkpoint_folder(folder: Path, job: Job) -> Path:
    """The folder of a job's checkpoint, in the folder of its record."""
    return folder / CHECKPOINTS / re.sub(r"[^\w.-]+", "-", job.name)


def _write_report(
    runs: Runs, folder: Path, output: ReportOptions, data: Federation | None = None
) -> None:
    """Prints the table, and writes it and the pictures.

    Without matplotlib there are no pictures. Raises RunFailed where the files cannot be
    written.

    Args:
        runs: The runs of the table.
        folder: The folder of the files.
        output: The options of the table.
        data: The federation of the runs, which gets a picture; None for none.
    """
    text = table.table(
        runs,
        output.last,
        output.baseline,
        output.columns,
        output.format,
        output.privacy_delta,
    )
    paths = [folder / output.table_file]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(paths[0], text)
        paths += pictures.draw(runs, folder)
        if data is not None:
            paths.append(_draw_federation(data, folder))
    except ImportError as e:
        print(f"{e} Then: pflcore report {folder}", file=sys.stderr)
    except OSError as e:
        print(text)
        raise RunFailed(
            f"out: table and pictures cannot be written into {folder} "
            f"({e.strerror or e}); make room there, then: pflcore report {folder}."
        ) from e
    # It is printed last, because the reader of a pipe may have gone.
    print(text)
    names = ", ".join(path.name for path in paths)
    print(f"In {folder}: {names}", file=sys.stderr)


def _draw_federation(data: Federation, folder: Path) -> Path:
    """Draws which client holds which training samples; the path of the PNG."""
    return save(data.plot(), folder / FEDERATION_PICTURE)


def report(argv: Sequence[str]) -> int:
    """Makes the table and the pictures again, from records in folders."""
    places = [*takewhile(lambda word: not word.startswith("-"), argv)]
    about = inspect.getdoc(report) or ""
    groups = {"report": ReportOptions}
    rest = argv[len(places) :]
    values = parse("pflcore report FOLDER ...", about, groups, rest)
    options = ReportOptions(**values["report"])
    runs: list[History] = []
    for place in places:
        runs += read(place)
    words = "folders or .jsonl files that hold a record"
    got = f"{', '.join(places)}, which holds none" if places else None
    require(runs, "report", words, got)
    folder = options.out
    if folder is None:
        first = Path(places[0])
        folder = first if first.is_dir() else first.parent
    _check_folder(folder, options)
    moved = _move_outputs_aside(folder, options, complete_record=False)
    if moved:
        print(moved, file=sys.stderr)
    _write_report(runs, folder, options)
    return 0


def new_folder(algorithms: Sequence[str], data: str, partition: str) -> Path:
    """A folder below runs/ that is made by this call.

    Its name is made of the command's words.
    """
    command = algorithms[0] if len(set(algorithms)) == 1 else "compare"
    partition = partition.replace("*", "star")
    words = f"{command}-{data}-{partition}".rstrip("-")
    stem = _file_name(words)
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        folder = Path("runs") / name
        # Of two runs that start at the same time, only one can make the folder.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def _file_name(words: str) -> str:
    """The words as a name that every file system accepts."""
    return re.sub(r"[^\w.-]", "_", words)


def _check_folder(folder: Path, output: ReportOptions) -> None:
    """Raises ValueError where the folder holds files that must not be lost."""
    goes_on = isinstance(output, OutputOptions) and output.resume
    if goes_on and output.overwrite:
        raise ValueError(
            "resume: expected no --overwrite beside it; leave one of them out."
        )
    if output.overwrite:
        return
    begun = Checkpoint(folder).exists
    # `pflcore report` leaves a record as it is.
    paths = _resumable_paths(folder) if isinstance(output, OutputOptions) else []
    if paths and not (goes_on and begun):
        names = " and ".join(path.name for path in paths)
        remedy = "name another folder, or add --overwrite, which moves it aside"
        if goes_on:
            names += " without a checkpoint"
            remedy = (
                "name another folder, or put --overwrite for --resume, which moves "
                "it aside"
            )
        elif begun:
            remedy = f"go on by --resume, {remedy}"
        raise ValueError(f"out: {folder} holds {names}; {remedy}.")
    if _is_foreign_table(folder, output) and not goes_on:
        raise ValueError(
            f"out: {folder} has a {output.table_file} that this command did not write "
            "(reproduce's, perhaps); name another with --out, or add --overwrite, "
            "which moves it aside."
        )


def _resumable_paths(folder: Path) -> list[Path]:
    """Paths of the record and the checkpoints to resume from."""
    paths = []
    record = folder / RECORD_FILE
    if record.is_file() and record.stat().st_size:
        paths.append(record)
    for path in (folder / checkpoint.FILE_NAME, folder / CHECKPOINTS):
        if path.exists():
            paths.append(path)
    return paths


def _is_foreign_table(folder: Path, output: ReportOptions) -> bool:
    """True where the folder has a table that `_write_report` did not write.

    A file that ends within the first letters of a table counts as written by it: the
    writing was interrupted.
    """
    name, table_start = TABLE_FILES[output.format]
    path = folder / name
    if not path.is_file():
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        start = file.read(len(table_start))
    return not table_start.startswith(start)


def _move_outputs_aside(
    folder: Path, output: ReportOptions, complete_record: bool
) -> str:
    """Renames files that must not be lost; returns a message.

    The message is "" where there is no file to rename.

    Args:
        folder: The folder of the files.
        output: The options of the folder.
        complete_record: True to rename a record, its checkpoints and its options, too.
    """
    paths = _resumable_paths(folder) if complete_record else []
    if paths:
        paths += sorted(folder.glob(CONFIG_FILES))
    if _is_foreign_table(folder, output):
        paths.append(folder / output.table_file)
    if not paths:
        return ""
    moves = []
    for path, new_path in zip(paths, move_aside(paths), strict=True):
        moves.append(f"{path.name} to {new_path.name}")
    return f"Moved aside in {folder}: {', '.join(moves)}."


def _plan_line(header: Facts) -> str:
    """Text on a run: its parameters, rounds, engine and memory."""
    size = human_bytes(header["peak_bytes"])
    return (
        f"{header['algorithm']}: {header['parameters']:,} parameters, "
        f"{header['rounds']} rounds, engine {header['engine']}, about {size} of memory "
        "at the peak beside its data"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or else its class's name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
