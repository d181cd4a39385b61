"""All jobs of a command: checked before anything is written, played, and reported."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from pflcore.algorithms import name_of
from pflcore.check import require
from pflcore.cli import _experiment as experiment
from pflcore.cli._config import write_config
from pflcore.cli._experiment import Job
from pflcore.cli._failure import RunFailed
from pflcore.cli._folder import check_folder, move_outputs_aside, new_folder
from pflcore.cli._follow import NoProgress, NoRecord
from pflcore.cli._job_runner import JobRunner, Model, plan_line
from pflcore.cli._output import OUTPUT_FILES, RECORD_FILE, OutputOptions
from pflcore.cli._report import write_report
from pflcore.cli._resume import (
    check_goes_on,
    kept_runs,
    merge_commands,
    recorded_command,
)
from pflcore.cli._track import require_tracker
from pflcore.data import Federation
from pflcore.results._columns import column_names, require_columns
from pflcore.results._files import atomic_write, lock_folder, remove_part_files
from pflcore.results._progress import Progress
from pflcore.results.record import Facts, RecordWriter, read, to_json
from pflcore.simulation import _describe as describe
from pflcore.simulation import checkpoint
from pflcore.simulation.checkpoint import Checkpoint


def run_jobs(
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
    ranks = options.started_ranks
    with ranks.together("the check of the command's options"):
        if ranks.is_first:
            _check_output(jobs, output)
        data = experiment.load_federation(options, cut)
        jobs = [job.with_ids(data) for job in jobs]
        model = experiment.make_model(options, data, shape)
        begun = output.resume and Checkpoint(output.out or "").exists
        if ranks.is_first:
            recorded = recorded_command(output.out) if begun else {}
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
            runner = JobRunner(
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
    # A folder that is not to be touched is the first fact to tell: what else is wrong
    # may be so because the command does not go on there.
    if output.out is not None:
        check_folder(output.out, output)
    names = {name_of(job.algorithm) for job in jobs}
    if output.resume:
        # The table has the runs that the folder holds, too.
        for run_name in recorded_command(output.out).get("runs", {}):
            names.add(run_name.rpartition(", seed ")[0])
    known = output.baseline is None or output.baseline in names
    require(known, "baseline", "one of the algorithms that run", output.baseline)
    has_baseline = output.baseline is not None
    require_tracker(output.track)
    require_columns(output.columns, column_names(options.metrics, has_baseline))
    has_folder = not output.resume or output.out is not None
    require(has_folder, "resume", "the folder of the run with --out", None)


def _try_jobs(jobs: Sequence[Job], data: Federation, model: Model) -> list[str]:
    """Lines of text on each algorithm's run: size and engine.

    Every simulation is made, so that an error is reported before a record is opened.
    """
    plans = []
    seen = set()
    for job in jobs:
        if job.algorithm in seen:
            continue  # another seed changes nothing in the plan
        seen.add(job.algorithm)
        simulation = job.simulation(data, model)
        plans.append(plan_line(job.header(simulation)))
        del simulation  # the next one needs the memory
    return plans


def _open_folder(
    stack: contextlib.ExitStack,
    runner: JobRunner,
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
    stack.enter_context(lock_folder(folder))
    if begun:
        merge_commands(folder, command)
        for job in jobs:
            check_goes_on(folder, job, runner)
    done = _prepare_folder(folder, output, command, begun, progress)
    path = folder / RECORD_FILE
    record = stack.enter_context(RecordWriter(path, goes_on=begun))
    if begun:
        command = merge_commands(folder, command)
    if command != recorded_command(folder):
        checkpoint.save(folder, {}, {"command": command})
    progress.say(f"{runner.data.summary()}\nRecord: {path}")
    runner.folder = folder
    runner.record = record
    runner.progress = progress
    return done


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
    check_folder(folder, output)
    for name in OUTPUT_FILES:
        remove_part_files(folder / name)
    done = set()
    if begun:
        runs = kept_runs(folder, command)
        with (
            atomic_write(folder / RECORD_FILE) as part,
            RecordWriter(part) as record,
        ):
            for recorded in runs:
                if recorded.complete:
                    done.add(recorded.name)
                for line in recorded.lines():
                    record.write(line)
    moved = move_outputs_aside(folder, output, complete_record=not begun)
    if moved:
        progress.say(moved)
    return done


def _play_and_report(
    runner: JobRunner, jobs: Sequence[Job], done: Collection[str]
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
            write_report(read(path), runner.folder, runner.output, runner.data)
        raise
    runner.progress.close()
    write_report(read(path), runner.folder, runner.output, runner.data)
    return status
