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
    choices = {
        o: (peek(argv, f"--{o}") or [getattr(experiment.Options, o)])[0]
        for o in ("data", "partition", "model")
    }
    chosen = {
        "partition": experiment.partition_of(choices["data"], choices["partition"]),
        "model": experiment.model_of(choices["model"]),
    }
    groups = [
        Group("run", *options_of(experiment.Options, choices=experiment.choices())),
        Group("training", *options_of(Training)),
        Group("output", *options_of(Output)),
    ]
    if not one:
        groups.insert(
            0,
            Group(
                "compare",
                "",
                [Option("algorithms", tuple[str, ...], tuple(names), f"any of {KNOWN}")],
            ),
        )
    for what, choice in chosen.items():
        if choice and choice.defaults:
            groups.append(
                Group(f"{what} {choice.name}", "", of_function(choice.function, choice.defaults))
            )
    taken = {o.name for g in groups for o in g.options}
    hypers: dict[str, dict[str, str]] = {}  # algorithm -> option -> hyper-parameter
    for name in names:
        cls, title = class_of(name), name_of(name)
        if title in {g.title for g in groups}:
            raise ValueError(
                f"algorithms: expected different names, got {title!r} twice; rename one of the "
                "classes."
            )
        new = {
            f.name: f"{title}_{f.name}"
            for f in fields(cls)
            if f.name in (taken if one else ("target",))
        }
        about, options = options_of(cls, new)
        groups.append(
            Group(
                title,
                about,
                [o for o in options if o.name not in (*narrowed(cls), new.get("target"))],
                prefix=not one,
            )
        )  # the run has --target
        hypers[name] = {
            o.name: next((k for k, v in new.items() if v == o.name), o.name)
            for o in groups[-1].options
        }

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
    todo = experiment.jobs(
        names, experiment.Options(**got["run"]), Training(**got["training"]), hyper
    )
    own = {
        w: of_words(got.get(f"{w} {c.name}", {}), c.defaults) if c else {}
        for w, c in chosen.items()
    }
    return _record(todo, own["partition"], own["model"], Output(**got["output"]))


def _record(
    todo: Sequence[Job], cut: Mapping[str, Any], shape: Mapping[str, Any], output: Output
) -> int:
    options = todo[0].options
    _check_output(output)
    if output.baseline is not None and output.baseline not in {name_of(j.algorithm) for j in todo}:
        raise ValueError(
            f"baseline: expected one of the algorithms that run, got {output.baseline!r}."
        )
    if output.out is not None:
        _check_folder(output.out, output)
    data = experiment.federation(options, cut)
    model = experiment.model(options, data, shape)
    resume = output.resume and _checkpoint(output.out or Path(), output).exists
    first: Simulation | None = None
    plans = [data.summary()]
    # what is wrong is said before a record is opened
    for job in (j for j in todo[::-1] if j.options.seed == options.seed and not resume):
        try:
            first = None  # the next one needs the memory
            first = job.simulation(data, model)
            plans.insert(1, f"{_plan(job, job.header(first))}\n{first.where()}")
        except MemoryError as e:
            plans.insert(1, f"{job.name}: {e}")
            if len({j.algorithm for j in todo}) == 1:  # there is no other that may fit
                raise
    if output.dry_run:
        print("\n".join(plans))
        return 0
    interrupted = failed = broken = False
    total = sum(j.length(data.n) for j in todo)
    folder = output.out or _new_folder(
        [name_of(j.algorithm) for j in todo], options.data, options.partition or ""
    )
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
        progress = held.enter_context(Progress(total, output.quiet))
        progress.say(f"{data.summary()}\nRecord: {record.path}")
        targets = folder / "checkpoint-targets"  # of a run for each client

        def stands(job: int) -> dict[str, Any]:
            return {"command": command, "job": job, "record": record.mark()}

        for i, job in enumerate(todo):
            if i < start:
                progress.skip(job.length(data.n))
                continue
            try:
                if not (resume and i == start):
                    _between(folder, stands(i))
                    _remove(targets)
                try:
                    simulation, first = first or job.simulation(data, model), None
                except MemoryError as e:  # the next one may fit
                    progress.say(f"{job.name}: {e}")
                    progress.skip(job.length(data.n))
                    failed = True
                    continue
                head = job.header(simulation) | {"partition_options": cut, "model_options": shape}
                if i in (0, start) or job.algorithm != todo[i - 1].algorithm:
                    progress.say(_plan(job, head))
                keeper = _checkpoint(targets if job.for_each else folder, output)
                keeper.note = None if job.for_each else functools.partial(stands, i)
                history = _one(
                    job, simulation, model, None if begun else head, record, progress, keeper
                )
                interrupted, failed, broken = (
                    history.interrupted,
                    failed or history.stopped is not None,
                    history.failed,
                )
                begun = False
                del simulation, history  # the next one needs the memory
            except KeyboardInterrupt:
                interrupted = True
            except RunFailed:
                # a table of what there is, where that can be written
                with contextlib.suppress(Exception):
                    _write_report(read(record.path), folder, output)
                raise
            if interrupted:
                progress.say(
                    "Interrupted; the record is whole up to here, and --resume goes on from the "
                    "last checkpoint."
                )
                break
        if not (interrupted or broken):
            _between(folder, stands(len(todo)))
            _remove(targets)
    _write_report(read(record.path), folder, output)
    return 130 if interrupted else 1 if failed else 0


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


def _between(folder: Path, note: Mapping[str, Any]) -> None:
    """Says in the folder that a command stands between two runs. One that cannot be written is a
    warning: the one before it stands."""
    try:
        checkpoint.save(folder, {}, {"run": None, "note": note})
    except OSError as e:
        warnings.warn(str(e), RuntimeWarning, stacklevel=2)


def _remove(folder: Path) -> None:
    """Removes a folder of ours, so that it is never there in part."""
    if folder.exists():
        shutil.rmtree(
            folder.replace(folder.with_name(f".{folder.name}-{os.getpid()}")), ignore_errors=True
        )


def _one(
    job: Job,
    simulation: Simulation,
    model: Callable[[], Any],
    head: Mapping[str, Any] | None,
    record: Record,
    progress: Progress,
    keeper: Checkpoint,
) -> History:
    """Plays one job; whatever ends it, the record holds every round that was played and says why it
    is not whole. `head`: None where the record has it, because the run goes on."""
    progress.name(job.name)
    played = 0

    def step(_: int, line: dict[str, Any]) -> None:
        nonlocal played
        played += 1
        progress.step(line)

    def play(on_round: Callable[[int, dict[str, Any]], None]) -> History:
        if not job.for_each:
            return simulation.run(on_round, keeper)
        # a round's record needs all the clients' runs
        history = job.play(simulation, model, step, keeper)
        for line in history.rounds:
            record.write(line)
        return history

    try:
        with warnings.catch_warnings():
            # it is said below
            warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
            history: History = record.run(head, play, step)
    except Exception as e:
        why = f"{type(e).__name__}: {first_line(e)}; the record up to there is {record.path}"
        if isinstance(e, OSError):  # a full disk, most of all
            why = (
                f"{e.strerror or e}; the record up to there is {record.path}, and --resume goes "
                "on from the last checkpoint"
            )
        raise RunFailed(f"{job.name} failed: {why}.") from e
    if history.stopped:
        progress.say(f"{job.name}: {history.stopped}")
    progress.skip(job.length(simulation.data.n) - played)
    return history


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


def _plan(job: Job, head: Mapping[str, Any]) -> str:
    return (
        f"{head['algorithm']}: {head['parameters']:,} parameters, {head['rounds']} rounds, engine "
        f"{head['engine']}, "
        f"about {human(head['peak_bytes'])} of memory at the peak beside data and activations"
    )


def first_line(e: BaseException) -> str:
    return next(iter(str(e).strip().splitlines()), type(e).__name__)
