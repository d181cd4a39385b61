"""`pflcore run`, `pflcore compare` and `pflcore report`: records, tables and pictures.

Every option comes from a frozen dataclass (the algorithm, Training, Options, Output) or from a
partition's own defaults.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.lookup import class_of, name_of, narrowed
from pflcore.cli import experiment
from pflcore.cli.experiment import Job
from pflcore.cli.options import Group, Option, of_function, of_words, options_of, parse, peek
from pflcore.data import Federation
from pflcore.metrics import human
from pflcore.results import pictures, table
from pflcore.results.progress import Progress
from pflcore.results.record import Record, Run, read
from pflcore.simulation import History, Simulation, checkpoint, describe
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training

KNOWN = ", ".join(ALGORITHMS)


@dataclass(frozen=True)
class Output:
    """Where results go: record.jsonl, table.md, curves.png, weights.png and further pictures."""

    out: Path | None = None  # folder; default: a new one below runs/
    overwrite: bool = False  # replace the record that the folder holds
    # go on with the record that the folder holds, from its last checkpoint; where it holds none,
    # begin
    resume: bool = False
    checkpoint_every: int = 0  # rounds between checkpoints; 0: by time alone
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; 0: by rounds alone
    # an algorithm; adds the percent of clients that are worse off than with it
    baseline: str | None = None
    last: int = 10  # rounds in "mean of last"
    quiet: bool = False  # no progress bar
    # say what would run, where the clients' rows would be and what memory it takes; write nothing
    dry_run: bool = False


class RunFailed(Exception):
    """Something broke in the middle of a run."""


def run(argv: Sequence[str]) -> int:
    """Runs one algorithm on a federation: one of those below, or package.module:Class for one of
    your own."""
    named = bool(argv) and not argv[0].startswith("-")
    if not named and not {"-h", "--help"} & set(argv):
        raise ValueError(
            f"run: expected the name of an algorithm first ({KNOWN}), got "
            f"{argv[0] if argv else 'none'}."
        )
    return _play("run", list(argv[:1]) if named else [], argv[1:] if named else argv)


def compare(argv: Sequence[str]) -> int:
    """Runs several algorithms on the same federation, from the same initial weights, with the same
    cohorts and batches."""
    names = peek(argv, "--algorithms")
    if not names and not {"-h", "--help"} & set(argv):
        raise ValueError(
            f"algorithms: expected at least one of {KNOWN}, got none; for example --algorithms "
            "local fedavg."
        )
    return _play("compare", list(dict.fromkeys(names)), argv)


def _play(command: str, names: list[str], argv: Sequence[str]) -> int:
    one = command == "run"
    said = {
        o: (peek(argv, f"--{o}") or [getattr(experiment.Options, o)])[0]
        for o in ("data", "partition", "model")
    }
    chosen = {
        "partition": experiment.partition_of(said["data"], said["partition"]),
        "model": experiment.model_of(said["model"]),
    }
    groups = [
        Group("run", *options_of(experiment.Options, choices=experiment.choices())),
        Group("training", *options_of(Training)),
        Group("output", *options_of(Output)),
    ]
    if not one:
        asked = Option("algorithms", tuple[str, ...], tuple(names), f"any of {KNOWN}")
        groups.insert(0, Group("compare", "", [asked]))
    for what, choice in chosen.items():
        if choice and choice.defaults:
            own = of_function(choice.function, choice.defaults)
            groups.append(Group(f"{what} {choice.name}", "", own))
    hypers = _add_algorithms(groups, names, one)
    about = f"{inspect.getdoc(run if one else compare)}\n\nAlgorithms: {KNOWN}."
    if not one:
        about += (
            " Their own options are --ALGORITHM.OPTION; --algorithms A B --help shows those of A "
            "and B."
        )
    elif not names:
        about += " pflcore run ALGORITHM --help shows its own options, too."
    prog = f"pflcore run {names[0] if names else 'ALGORITHM'}" if one else "pflcore compare"
    got = parse(prog, about, groups, argv)
    hyper = {
        name: {to: got[name_of(name)][option] for option, to in options.items()}
        for name, options in hypers.items()
    }
    options, training = experiment.Options(**got["run"]), Training(**got["training"])
    todo = experiment.jobs(names, options, training, hyper)
    cut, shape = (
        of_words(got.get(f"{w} {c.name}", {}), c.defaults) if c else {} for w, c in chosen.items()
    )
    return _record(todo, cut, shape, Output(**got["output"]))


def _add_algorithms(groups: list[Group], names: list[str], one: bool) -> dict[str, dict[str, str]]:
    """Adds the algorithms' own options to the groups, under other names where theirs are taken;
    algorithm -> option -> hyper-parameter."""
    taken = {o.name for g in groups for o in g.options} if one else {"target"}
    hypers: dict[str, dict[str, str]] = {}
    for name in names:
        cls, title = class_of(name), name_of(name)
        if title in {g.title for g in groups}:
            raise ValueError(
                f"algorithms: expected different names, got {title!r} twice; rename one of the "
                "classes."
            )
        new = {f.name: f"{title}_{f.name}" for f in fields(cls) if f.name in taken}
        about, options = options_of(cls, new)
        aside = {*narrowed(cls), new.get("target")}  # the run has --target
        own = [o for o in options if o.name not in aside]
        groups.append(Group(title, about, own, prefix=not one))
        back = {v: k for k, v in new.items()}
        hypers[name] = {o.name: back.get(o.name, o.name) for o in own}
    return hypers


def _record(
    todo: Sequence[Job], cut: Mapping[str, Any], shape: Mapping[str, Any], output: Output
) -> int:
    options, names = todo[0].options, [name_of(j.algorithm) for j in todo]
    _check_output(output)
    if output.baseline is not None and output.baseline not in names:
        raise ValueError(
            f"baseline: expected one of the algorithms that run, got {output.baseline!r}."
        )
    if output.out is not None:
        _check_folder(output.out, output)
    data = experiment.federation(options, cut)
    model = experiment.model(options, data, shape)
    resume = output.resume and _checkpoint(output.out or Path(), output).exists
    # what is wrong is said before a record is opened
    first, plans = (None, []) if resume else _tried(todo, data, model)
    if output.dry_run:
        print("\n".join([data.summary(), *plans]))
        return 0
    folder = output.out or _new_folder(names, options.data, options.partition or "")
    with contextlib.ExitStack() as held:
        held.enter_context(checkpoint.lock(folder))
        command = describe.facts_of(
            experiment.described(todo, cut, shape) | {"federation": describe.of_data(data)}
        )
        start, mark, begun = _standing(folder, command) if resume else (0, None, False)
        if begun:
            first = todo[start].simulation(data, model)
            first.restore(folder)
        record = held.enter_context(Record(folder / "record.jsonl", output.overwrite, mark))
        progress = held.enter_context(Progress(sum(j.length(data.n) for j in todo), output.quiet))
        progress.say(f"{data.summary()}\nRecord: {record.path}")
        own = {"partition_options": cut, "model_options": shape}
        runs = _Runs(todo, data, model, own, command, output, folder, record, progress)
        try:
            status = runs.play(start, first, begun, resume)
        except RunFailed:  # a table of what there is, where that can be written
            with contextlib.suppress(Exception):
                _write_report(read(record.path), folder, output)
            raise
    _write_report(read(record.path), folder, output)
    return status


def _tried(
    todo: Sequence[Job], data: Federation, model: Callable[[], Any]
) -> tuple[Simulation | None, list[str]]:
    """The first job's simulation, and each algorithm's plan in words."""
    first, plans = None, list[str]()
    for job in [j for j in todo if j.options.seed == todo[0].options.seed][::-1]:
        first = None  # the next one needs the memory
        try:
            first = job.simulation(data, model)
            where = describe.memory_line(first.setup, first.peak_bytes())
            plans.insert(0, f"{_plan(job.header(first))}\n{where}")
        except MemoryError as e:
            plans.insert(0, f"{job.name}: {e}")
            if len({j.algorithm for j in todo}) == 1:  # there is no other that may fit
                raise
    return first, plans


@dataclass
class _Runs:
    """The jobs of a command, played one after the other into one record."""

    todo: Sequence[Job]
    data: Federation
    model: Callable[[], Any]
    own: dict[str, Any]  # of the header, beside what a job says
    command: Mapping[str, Any]  # what is played, for who goes on
    output: Output
    folder: Path
    record: Record
    progress: Progress

    def play(self, start: int, first: Simulation | None, begun: bool, resume: bool) -> int:
        """The jobs from `start` on; `first`, where it is there already, is the simulation of that
        one, which may have `begun`. Gives the command's exit code."""
        failed = interrupted = broken = False
        for job in self.todo[:start]:
            self.progress.skip(job.length(self.data.n))
        for i in range(start, len(self.todo)):
            try:
                if i > start or not resume:
                    self.stand(i)
                history = self.one(i, first, begun, i == start)
                failed = failed or history is None or history.stopped is not None
                interrupted = history is not None and history.interrupted
                broken = history.failed if history is not None else broken
                if history is not None:
                    begun = False
                first = history = None  # the next one needs the memory
            except KeyboardInterrupt:
                interrupted = True
            if interrupted:
                self.progress.say(
                    "Interrupted; the record is whole up to here, and --resume goes on from the "
                    "last checkpoint."
                )
                return 130
        if not broken:
            self.stand(len(self.todo))
        return 1 if failed else 0

    @property
    def targets(self) -> Path:
        """The folder of a run for each client."""
        return self.folder / "checkpoint-targets"

    def note(self, job: int) -> dict[str, Any]:
        """Where the command stands."""
        return {"command": self.command, "job": job, "record": self.record.mark()}

    def stand(self, job: int) -> None:
        """Says in the folder that the command stands before a job. Where it cannot be written that
        is a warning: the checkpoint before it stands."""
        try:
            checkpoint.save(self.folder, {}, {"run": None, "note": self.note(job)})
        except OSError as e:
            warnings.warn(str(e), RuntimeWarning, stacklevel=2)
        if self.targets.exists():  # renamed first, so that it is never there in part
            gone = self.targets.with_name(f".{self.targets.name}-{os.getpid()}")
            shutil.rmtree(self.targets.replace(gone), ignore_errors=True)

    def one(self, i: int, made: Simulation | None, begun: bool, plan: bool) -> History | None:
        """Plays a job; None where it does not fit into memory, as the next one may. Whatever ends
        it, the record holds every round that was played and says why it is not whole."""
        job = self.todo[i]
        try:
            simulation = made or job.simulation(self.data, self.model)
        except MemoryError as e:
            self.progress.say(f"{job.name}: {e}")
            self.progress.skip(job.length(self.data.n))
            return None
        head = job.header(simulation) | self.own
        if plan or job.algorithm != self.todo[i - 1].algorithm:
            self.progress.say(_plan(head))
        keeper = _checkpoint(self.targets if job.for_each else self.folder, self.output)
        keeper.note = None if job.for_each else functools.partial(self.note, i)
        self.progress.name(job.name)
        played = 0

        def step(_: int, line: dict[str, Any]) -> None:
            nonlocal played
            played += 1
            self.progress.step(line)

        def play(on_round: Callable[[int, dict[str, Any]], None]) -> History:
            if not job.for_each:
                return simulation.run(on_round, keeper)
            # a round's record needs all the clients' runs
            history = job.play(simulation, self.model, step, keeper)
            for line in history.rounds:
                self.record.write(line)
            return history

        try:
            with warnings.catch_warnings():  # it is said below
                warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
                history: History = self.record.run(None if begun else head, play, step)
        except Exception as e:
            why = f"{type(e).__name__}: {first_line(e)}; the record up to there is"
            rest = ""
            if isinstance(e, OSError):  # a full disk, most of all
                why = f"{e.strerror or e}; the record up to there is"
                rest = ", and --resume goes on from the last checkpoint"
            raise RunFailed(f"{job.name} failed: {why} {self.record.path}{rest}.") from e
        if history.stopped:
            self.progress.say(f"{job.name}: {history.stopped}")
        self.progress.skip(job.length(self.data.n) - played)
        return history


def _checkpoint(folder: Path, output: Output) -> Checkpoint:
    try:
        return Checkpoint(folder, output.checkpoint_every, output.checkpoint_minutes)
    except ValueError as e:
        raise ValueError(f"checkpoint_{e}") from None  # the option's name


def _standing(folder: Path, command: Mapping[str, Any]) -> tuple[int, Mapping[str, Any], bool]:
    """Where a command stands by the checkpoint in its folder: which job, how far the record goes,
    whether the job has begun."""
    _, facts = checkpoint.load(folder)
    note = facts["note"]
    if note is None:
        raise ValueError(
            f"resume: {folder} holds a checkpoint made by Simulation.run or save; go on with "
            "Simulation.load."
        )
    differs = describe.difference(note["command"], command)
    if differs:
        raise ValueError(
            f"resume: {folder} holds another run: {differs}; give the options it was begun with, "
            "or another folder."
        )
    return note["job"], note["record"], facts["run"] is not None


def _write_report(runs: Sequence[Run], folder: Path, output: Output) -> None:
    """Table to stdout and table.md; pictures, where matplotlib is there."""
    text = table.table(runs, output.last, output.baseline)
    _check_table(folder, output.overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.md").write_text(text, encoding="utf-8")
    except OSError as e:
        raise ValueError(
            f"out: expected a folder that can be written, got {folder} ({e.strerror})."
        ) from None
    try:
        made = pictures.draw(runs, folder, output.baseline)
    except ImportError as e:
        print(f"{e} Then: pflcore report {folder}", file=sys.stderr)
        made = []
    print(text)  # when all is written: a reader may have gone
    print(
        f"In {folder}: {', '.join(p.name for p in [folder / 'table.md', *made])}", file=sys.stderr
    )


def report(argv: Sequence[str]) -> int:
    """Makes the table and the pictures again, from the records in some folders."""
    places = list(argv[: next((i for i, a in enumerate(argv) if a.startswith("-")), len(argv))])
    options = [o for o in options_of(Output)[1] if o.name in ("out", "baseline", "last")]
    groups = [Group("output", "", options)]
    got = parse(
        "pflcore report FOLDER ...", inspect.getdoc(report) or "", groups, argv[len(places) :]
    )["output"]
    if not places:
        raise ValueError(
            "report: expected at least one folder or .jsonl file that holds a record, got none."
        )
    _check_output(Output(last=got["last"]))
    runs = [r for place in places for r in read(place)]
    if not runs:
        raise ValueError(
            "report: expected a folder or .jsonl file that holds a record, got "
            f"{', '.join(places)}, which holds none."
        )
    first = Path(places[0])
    _write_report(
        runs,
        got["out"] or (first if first.is_dir() else first.parent),
        Output(baseline=got["baseline"], last=got["last"]),
    )
    return 0


def _new_folder(algorithms: Sequence[str], data: str, partition: str) -> Path:
    """A new folder below runs/, made now, with a name that any file system takes."""
    what = algorithms[0] if len(set(algorithms)) == 1 else "compare"
    stem = re.sub(r"[^\w.-]", "_", f"{what}-{data}-{partition.replace('*', 'star')}".rstrip("-"))
    number = 1
    while True:
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)  # of two runs that start at once, only one makes it
            return folder
        except FileExistsError:
            number += 1
        except OSError as e:
            raise ValueError(
                f"out: expected a folder that can be written, got {folder} ({e.strerror}); name "
                "another."
            ) from None


def _check_output(output: Output) -> None:
    if output.last < 1:
        raise ValueError(f"last: expected at least 1 round, got {output.last}.")
    if output.resume and (output.out is None or output.overwrite):
        raise ValueError(
            "resume: expected the folder of the run with --out, and no --overwrite, got "
            f"{output.out}."
        )


def _check_table(folder: Path, overwrite: bool) -> None:
    path = folder / "table.md"
    if (
        path.is_file()
        and not overwrite
        and not path.read_text(encoding="utf-8", errors="replace").startswith("### ")
    ):
        raise ValueError(
            f"out: {folder} has a table.md that this command did not write (reproduce's, perhaps); "
            "name another with --out."
        )


def _check_folder(folder: Path, output: Output) -> None:
    """Says now, before data are loaded, what would go wrong when the record is opened. Writes
    nothing."""
    if (
        output.resume
        and (folder / "record.jsonl").exists()
        and not (folder / "checkpoint.json").exists()
    ):
        raise ValueError(
            f"resume: {folder} holds a record without a checkpoint; name another folder, or begin "
            "anew with --overwrite."
        )
    if (folder / "record.jsonl").exists() and not (output.overwrite or output.resume):
        raise ValueError(
            f"out: expected a folder without a record, got {folder}, which has one; go on by "
            "--resume, name another, or add --overwrite."
        )
    _check_table(folder, output.overwrite)
    nearest = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(
            f"out: expected a folder that can be written, got {folder}, and {nearest} cannot; name "
            "another."
        )


def _plan(head: Mapping[str, Any]) -> str:
    return (
        f"{head['algorithm']}: {head['parameters']:,} parameters, {head['rounds']} rounds, engine "
        f"{head['engine']}, "
        f"about {human(head['peak_bytes'])} of memory at the peak beside data and activations"
    )


def first_line(e: BaseException) -> str:
    return next(iter(str(e).strip().splitlines()), type(e).__name__)
