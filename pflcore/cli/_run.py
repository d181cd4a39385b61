"""`pflcore run`, `pflcore compare` and `pflcore report`: records, tables and pictures.

Every option is a field of a dataclass (the algorithm, Training, Options, OutputOptions)
or an argument of the partition or the model.
"""

import contextlib
import inspect
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from pflcore.algorithms import ALGORITHMS, class_of, name_of
from pflcore.check import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    checked,
    require,
)
from pflcore.cli import _experiment as experiment
from pflcore.cli._experiment import Job, Options
from pflcore.cli._options import dataclass_of_arguments, option_fields, parse
from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, Federation
from pflcore.metrics import human_bytes
from pflcore.nn.models import MODELS
from pflcore.results import _pictures as pictures
from pflcore.results import table
from pflcore.results._files import (
    atomic_write,
    move_aside,
    remove_part_files,
    write_text,
)
from pflcore.results._progress import Progress
from pflcore.results.record import (
    Facts,
    Line,
    OnRound,
    RecordWriter,
    Run,
    Runs,
    read,
    to_json,
)
from pflcore.simulation import History, checkpoint
from pflcore.simulation import _describe as describe
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
CHECKPOINTS = "checkpoints"  # of the runs that are not over
RECORD_FILE = "record.jsonl"
TABLE_FILE = "table.md"
TABLE_START = "### "  # how each of our tables begins
OUTPUT_FILES = (
    RECORD_FILE,
    TABLE_FILE,
    *(f"{name}.{kind}" for name in pictures.PICTURE_NAMES for kind in ("png", "svg")),
)


@dataclass(frozen=True)
class CompareOptions:
    """Who is compared; an algorithm's own options are --ALGORITHM.OPTION."""

    algorithms: tuple[str, ...] = ()  # names, or package.module:Class


@checked
@dataclass(frozen=True)
class ReportOptions:
    """Where a table and pictures go, and what is in them."""

    # folder; default: a new one below runs/, or the first record's
    out: Path | None = None
    # an algorithm; adds the percent of clients that are worse off than with it
    baseline: str | None = None
    last: PositiveInt = 10  # rounds in "mean of last"
    # begin anew in a folder that holds something: its record, its checkpoints and a
    # table.md that is no record's are moved to names that end in .1, .2, ...
    overwrite: bool = False


@checked
@dataclass(frozen=True)
class OutputOptions(ReportOptions):
    """Where results go: record.jsonl, table.md, curves.png, weights.png and further
    pictures."""

    # go on with the record that the folder holds, from its last checkpoint; where it
    # holds none, begin
    resume: bool = False
    checkpoint_every: NonNegativeInt = 0  # rounds between checkpoints; 0: by time alone
    # minutes between checkpoints; 0: by rounds alone
    checkpoint_minutes: NonNegativeFloat = 10.0
    quiet: bool = False  # no progress bar
    # say what would run, where the clients' rows would be and what memory it takes;
    # write nothing
    dry_run: bool = False


class RunFailed(Exception):
    """Something broke in the middle of a run."""


def run(argv: Sequence[str]) -> int:
    """Runs one algorithm on a federation: one of those below, or package.module:Class
    for one of your own."""
    names = [word for word in argv[:1] if not word.startswith("-")]
    return _run_command(run, names, argv[len(names) :])


def compare(argv: Sequence[str]) -> int:
    """Runs several algorithms on the same federation, from the same initial weights,
    with the same cohorts and batches."""
    return _run_command(compare, [], argv)


def _run_command(
    command: Callable[..., int], names: Sequence[str], argv: Sequence[str]
) -> int:
    one = command is run
    prog = (
        f"pflcore run {names[0] if names else 'ALGORITHM'}"
        if one
        else "pflcore compare"
    )
    known = [f"{k}: {', '.join(v)}." for k, v in HELP_NAMES.items()]
    about = "\n\n".join([inspect.getdoc(command) or "", *known])
    groups: dict[str, type] = {} if one else {"compare": CompareOptions}
    groups |= {"run": Options, "training": Training, "output": OutputOptions}
    first = parse(prog, about, groups, argv, complete=False)
    names = names if one else first["compare"]["algorithms"]
    if not {"-h", "--help"} & {*argv}:
        words = "the name of an algorithm first" if one else "at least one"
        require(
            names,
            command.__name__ if one else "algorithms",
            f"{words} ({ALGORITHM_NAMES})",
            names,
        )
    asked = first["run"]
    chosen = {
        "partition": experiment.partition_of(asked["data"], asked["partition"]),
        "data": experiment.reader_of(asked["data"]),
        "model": experiment.model_of(asked["model"]),
    }
    for what, choice in chosen.items():
        if choice and choice.defaults:
            groups[what] = dataclass_of_arguments(choice.function, choice.defaults)
    algorithms = {name_of(name): name for name in names}
    groups |= {title: class_of(name) for title, name in algorithms.items()}
    classes = {class_of(name) for name in names}
    # who has no options has no group that would say what it is
    about = "\n\n".join(
        [about, *(inspect.getdoc(c) or "" for c in classes if not option_fields(c))]
    )
    require(
        len(classes) == len(algorithms),
        "algorithms",
        "different names",
        ", ".join(names),
    )
    got = parse(prog, about, groups, argv, () if one else algorithms)
    hyper = {name: got[title] for title, name in algorithms.items()}
    options = Options(**got["run"])
    training = Training(**got["training"])
    todo = experiment.make_jobs([*algorithms.values()], options, training, hyper)
    reader = chosen["data"]
    cut = got.get("partition", {})
    if reader:  # what is as it would be anyhow is not said in the record
        cut = {k: v for k, v in got["data"].items() if v != reader.defaults[k]}
    return _run_jobs(todo, cut, got.get("model", {}), OutputOptions(**got["output"]))


def _run_jobs(
    todo: Sequence[Job], cut: Facts, shape: Facts, output: OutputOptions
) -> int:
    options = todo[0].options
    names = [name_of(j.algorithm) for j in todo]
    known = output.baseline in (None, *names)
    require(known, "baseline", "one of the algorithms that run", output.baseline)
    if output.out is not None:
        _check_folder(output.out, output)
    require(
        not output.resume or output.out,
        "resume",
        "the folder of the run with --out",
        None,
    )
    data = experiment.load_federation(options, cut)
    model = experiment.make_model(options, data, shape)
    begun = output.resume and Checkpoint(output.out or "").exists
    # what is wrong is said before a record is opened
    plans = [] if begun else _try_jobs(todo, data, model)
    if output.dry_run:
        print("\n".join([data.summary(), *plans]))
        return 0
    with contextlib.ExitStack() as held:
        progress = held.enter_context(
            Progress(sum(j.num_rounds(data.n) for j in todo), output.quiet)
        )
        folder = output.out or _new_folder(names, options.data, options.partition or "")
        held.enter_context(checkpoint.lock(folder))
        # another command may have ended there in the meantime
        _check_folder(folder, output)
        for name in OUTPUT_FILES:
            remove_part_files(folder / name)
        what = experiment.describe_jobs(todo, cut, shape) | {
            "federation": describe.describe_data(data)
        }
        path, whole = folder / RECORD_FILE, list[Run]()
        if begun:
            whole = _complete_runs(folder, to_json(what))
            with atomic_write(path) as part, RecordWriter(part) as record:
                for line in (line for run in whole for line in run.lines()):
                    record.write(line)
        moved = _move_outputs_aside(folder, complete_record=not begun)
        if moved:
            progress.say(moved)
        record = held.enter_context(RecordWriter(path, goes_on=begun))
        if not begun:
            checkpoint.save(folder, {}, {"command": to_json(what)})
        progress.say(f"{data.summary()}\nRecord: {path}")
        own = {"partition_options": cut, "model_options": shape}
        runs = _JobRunner(data, model, own, output, folder, record, progress)
        try:
            status = runs.play(
                todo, {f"{r.algorithm}, seed {r.header.get('seed')}" for r in whole}
            )
        except RunFailed:  # a table of what there is, where that can be written
            progress.close()
            with contextlib.suppress(Exception):
                _write_report(read(path), folder, output)
            raise
        progress.close()
        _write_report(read(path), folder, output)
    return status


def _try_jobs(todo: Sequence[Job], data: Federation, model: Model) -> list[str]:
    """Each algorithm's plan in words."""
    plans = []
    for job in [j for j in todo if j.options.seed == todo[0].options.seed]:
        made = job.simulation(data, model)
        where = describe.memory_line(made.config, made.peak_bytes())
        plans.append(f"{_plan_line(job.header(made))}\n{where}")
        del made  # the next one needs the memory
    return plans


def _complete_runs(folder: Path, command: Facts) -> list[Run]:
    """The runs of a command that are over, by the record in its folder. ValueError
    where it is another command's."""
    there = checkpoint.load(folder)[1].get("command", {})
    if differs := describe.first_difference(there, command):
        raise ValueError(
            f"resume: {folder} holds another run: {differs}; give the options it was "
            "begun with, "
            "or another folder."
        )
    for path in (folder / CHECKPOINTS).rglob(checkpoint.FILE_NAME):
        # a damaged one is said before the record is written
        checkpoint.load(path.parent)
    return [run for run in read(folder / RECORD_FILE) if run.complete]


@dataclass
class _JobRunner:
    """What the jobs of a command share, which are played one after the other into
    one record."""

    data: Federation
    model: Model
    header_fields: Line  # of the header, beside what a job says
    output: OutputOptions
    folder: Path
    record: RecordWriter
    progress: Progress

    def play(self, todo: Sequence[Job], done: Collection[str]) -> int:
        """All jobs but those that are `done`. Gives the command's exit code."""
        failed = broken = False
        kept = self.folder / CHECKPOINTS
        try:
            for i, job in enumerate(todo):
                if job.name in done:
                    self.progress.skip(job.num_rounds(self.data.n))
                    continue
                history = self.run_job(job, kept / str(i))
                if history.interrupted:
                    raise KeyboardInterrupt
                failed = failed or bool(history.stopped)
                broken = broken or history.failed
                del history  # the next one needs the memory
        except KeyboardInterrupt:
            self.progress.say(
                "Interrupted; the record is whole up to here, and --resume goes on "
                "from the last "
                "checkpoint."
            )
            return 130
        if not broken:
            shutil.rmtree(kept, ignore_errors=True)
        return 1 if failed else 0

    def run_job(self, job: Job, kept: Path) -> History:
        """Plays a job, from its checkpoint in the folder `kept` where it is there.
        Whatever ends it, the record holds every round that was played and says why it
        is not whole."""
        played, out, simulation = (
            count(),
            self.output,
            job.simulation(self.data, self.model),
        )
        keeper = Checkpoint(kept, out.checkpoint_every, out.checkpoint_minutes)
        if keeper.exists and not job.for_each:
            simulation.restore(kept)
        head = job.header(simulation) | self.header_fields
        self.progress.say(_plan_line(head))
        self.progress.name(job.name)

        def step(_: int, line: Line) -> None:
            next(played)
            self.progress.step(line)

        def play(on_round: OnRound) -> History:
            # a round's record needs all the clients' runs
            history = job.play(
                simulation, self.data, step if job.for_each else on_round, keeper
            )
            for line in history.rounds if job.for_each else ():
                self.record.write(line)
            return history

        try:
            with warnings.catch_warnings():  # it is said below
                warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
                history: History = self.record.run(head, play, step)
        except Exception as e:
            why, rest = f"{type(e).__name__}: {first_line(e)}", ""
            if isinstance(e, OSError):  # a full disk, most of all
                why, rest = (
                    str(e.strerror or e),
                    ", and --resume goes on from the last checkpoint",
                )
            there = f"the record up to there is {self.record.path}{rest}."
            raise RunFailed(f"{job.name} failed: {why}; {there}") from e
        if history.stopped:
            self.progress.say(f"{job.name}: {history.stopped}")
        self.progress.skip(job.num_rounds(self.data.n) - next(played))
        if not (history.interrupted or history.failed):
            shutil.rmtree(kept, ignore_errors=True)
        return history


def _write_report(runs: Runs, folder: Path, output: ReportOptions) -> None:
    """Table to stdout and table.md; pictures, where matplotlib is there. RunFailed
    where they cannot be written."""
    text = table.table(runs, output.last, output.baseline)
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TABLE_FILE, text)
        made = pictures.draw(runs, folder)
    except ImportError as e:
        print(f"{e} Then: pflcore report {folder}", file=sys.stderr)
    except OSError as e:
        print(text)
        raise RunFailed(
            f"out: table and pictures cannot be written into {folder} "
            f"({e.strerror or e}); make "
            f"room there, then: pflcore report {folder}."
        ) from e
    print(text)  # when all is written: a reader may have gone
    names = ", ".join(p.name for p in [folder / TABLE_FILE, *made])
    print(f"In {folder}: {names}", file=sys.stderr)


def report(argv: Sequence[str]) -> int:
    """Makes the table and the pictures again, from the records in some folders."""
    places = [*takewhile(lambda word: not word.startswith("-"), argv)]
    about = inspect.getdoc(report) or ""
    rest = argv[len(places) :]
    asked = ReportOptions(
        **parse("pflcore report FOLDER ...", about, {"report": ReportOptions}, rest)[
            "report"
        ]
    )
    runs = [r for place in places for r in read(place)]
    words = "folders or .jsonl files that hold a record"
    require(
        runs,
        "report",
        words,
        f"{', '.join(places)}, which holds none" if places else None,
    )
    first = Path(places[0])
    folder = asked.out or (first if first.is_dir() else first.parent)
    _check_folder(folder, asked)
    moved = _move_outputs_aside(folder, complete_record=False)
    if moved:
        print(moved, file=sys.stderr)
    _write_report(runs, folder, asked)
    return 0


def _new_folder(algorithms: Sequence[str], data: str, partition: str) -> Path:
    """A new folder below runs/, made now, with a name that any file system takes."""
    what = algorithms[0] if len(set(algorithms)) == 1 else "compare"
    stem = re.sub(
        r"[^\w.-]", "_", f"{what}-{data}-{partition.replace('*', 'star')}".rstrip("-")
    )
    for number in count(1):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            # of two runs that start at once, only one makes it
            folder.mkdir(parents=True)
            break
    return folder


def _check_folder(folder: Path, output: ReportOptions) -> None:
    """ValueError where there is what must not be lost."""
    goes_on = isinstance(output, OutputOptions) and output.resume
    if goes_on and output.overwrite:
        raise ValueError(
            "resume: expected no --overwrite beside it; leave one of them out."
        )
    if output.overwrite:
        return
    begun = Checkpoint(folder).exists
    there = _resumable_paths(folder) if isinstance(output, OutputOptions) else []
    if there and not (goes_on and begun):
        what = " and ".join(path.name for path in there)
        ways = "name another folder, or add --overwrite, which moves it aside"
        if goes_on:
            what += " without a checkpoint"
            ways = (
                "name another folder, or put --overwrite for --resume, which moves "
                "it aside"
            )
        elif begun:
            ways = f"go on by --resume, {ways}"
        raise ValueError(f"out: {folder} holds {what}; {ways}.")
    if _is_foreign_table(folder / TABLE_FILE) and not goes_on:
        raise ValueError(
            f"out: {folder} has a table.md that this command did not write "
            "(reproduce's, perhaps); "
            "name another with --out, or add --overwrite, which moves it aside."
        )


def _resumable_paths(folder: Path) -> list[Path]:
    """What a command has left in a folder that it can go on from: its record and
    checkpoints."""
    record = folder / RECORD_FILE
    written = record.is_file() and record.stat().st_size
    others = [folder / checkpoint.FILE_NAME, folder / CHECKPOINTS]
    return [record] * bool(written) + [path for path in others if path.exists()]


def _is_foreign_table(path: Path) -> bool:
    """Whether a table is not one that `_write_report` wrote; one that was cut off
    is."""
    if not path.is_file():
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        start = file.read(len(TABLE_START))
    return not TABLE_START.startswith(start)


def _move_outputs_aside(folder: Path, complete_record: bool) -> str:
    """Moves what is not to be lost out of a command's way; says what it moved and
    where to."""
    paths = _resumable_paths(folder) if complete_record else []
    if _is_foreign_table(folder / TABLE_FILE):
        paths.append(folder / TABLE_FILE)
    if not paths:
        return ""
    moved = zip(paths, move_aside(paths), strict=True)
    said = ", ".join(f"{path.name} to {name.name}" for path, name in moved)
    return f"Moved aside in {folder}: {said}."


def _plan_line(head: Facts) -> str:
    return (
        f"{head['algorithm']}: {head['parameters']:,} parameters, {head['rounds']} "
        "rounds, engine "
        f"{head['engine']}, "
        f"about {human_bytes(head['peak_bytes'])} of memory at the peak beside its data"
    )


def first_line(e: BaseException) -> str:
    return next(iter(str(e).strip().splitlines()), type(e).__name__)
