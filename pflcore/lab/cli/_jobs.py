"""The runs of a command: checked before anything is written, played, and reported."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pflcore.algorithms import name_of
from pflcore.check import require
from pflcore.data import Federation
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli._config import write_config
from pflcore.lab.cli._experiment import Job
from pflcore.lab.cli._failure import RunFailed, first_line
from pflcore.lab.cli._folder import (
    RunFolder,
    make_folder,
    new_folder,
    read_runs,
    run_folder,
)
from pflcore.lab.cli._output import OutputOptions
from pflcore.lab.cli._predict import MODELS_FOLDER
from pflcore.lab.cli._report import write_report
from pflcore.lab.cli._track import require_tracker, tracker_of
from pflcore.lab.results._progress import Progress
from pflcore.lab.results.table import column_names, require_columns
from pflcore.simulation import History, Simulation
from pflcore.simulation._evaluate import correct_samples
from pflcore.simulation._files import lock_folder
from pflcore.simulation._per_target import target_folder
from pflcore.simulation._ranks import Ranks
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.record import Facts, Line, OnRound, RecordWriter


def run_jobs(
    jobs: Sequence[Job],
    cut: Facts,
    shape: Facts,
    output: OutputOptions,
    configs: Mapping[str, str],
) -> int:
    """Plays each job into a folder of its own; returns the exit code.

    All options are checked before anything is written. A run that its folder holds
    whole is skipped, and one that was broken off goes on. Table and pictures are made
    at the end.

    Args:
        jobs: The runs of the command.
        cut: The options of the partition or of the reader.
        shape: The options of the model.
        output: The options of the folder.
        configs: The options of each job as TOML, by the job's name.
    """
    options = jobs[0].options
    ranks = options.started_ranks
    with ranks.together("the check of the command's options"):
        if ranks.is_first:
            _check_output(jobs, output)
        federations = {}
        for job in jobs:
            seed = job.options.cut_seed
            if seed not in federations:
                federations[seed] = experiment.load_federation(job.options, cut)
        data = federations[options.cut_seed]
        jobs = [job.with_ids(federations[job.options.cut_seed]) for job in jobs]
        # A cut of its own may have other classes, or words of a text.
        models = {
            seed: experiment.make_model(options, federation, shape)
            for seed, federation in federations.items()
        }
        fields = {"partition_options": cut, "model_options": shape}
        player = JobPlayer(federations, models, fields, output, ranks)
        whole: set[str] = set()
        if ranks.is_first:
            whole = player.check(jobs)
    if output.dry_run:
        return 0
    whole = ranks.from_first("the runs that are whole", lambda: whole)
    with ranks.together("the folder of the command"):
        folder = Path()
        if ranks.is_first and output.out is not None:
            folder = make_folder(output.out)
        elif ranks.is_first:
            names = [name_of(job.algorithm) for job in jobs]
            folder = new_folder(names, options.data, options.partition or "")
    num_rounds = sum(job.num_rounds(player.data_of(job)) for job in jobs)
    is_silent = not ranks.is_first
    with Progress(num_rounds, output.quiet or is_silent, is_silent) as progress:
        about = experiment.about_data(options.data, data)
        progress.say(f"{about}\nFolder: {folder}")
        try:
            status = player.play(jobs, folder, whole, progress, configs)
        except RunFailed:
            # There may be rounds for a table nevertheless, and space on the disk.
            if ranks.is_first:
                with contextlib.suppress(Exception):
                    _report(jobs, folder, output, data)
            raise
    if ranks.is_first:
        _report(jobs, folder, output, data)
    return status


def _check_output(jobs: Sequence[Job], output: OutputOptions) -> None:
    """Raises ValueError where the command cannot write what its options say."""
    names = {name_of(job.algorithm) for job in jobs}
    if output.out is not None and output.out.is_dir():
        with contextlib.suppress(ValueError):  # the folder has no record yet
            names |= {run.algorithm for run in read_runs(output.out)}
    known = output.baseline is None or output.baseline in names
    require(known, "baseline", "one of the algorithms that run", output.baseline)
    require_tracker(output.track)
    has_baseline = output.baseline is not None
    metrics = jobs[0].options.metrics
    require_columns(output.columns, column_names(metrics, has_baseline))


def _report(
    jobs: Sequence[Job], folder: Path, output: OutputOptions, data: Federation
) -> None:
    """Writes the table and the pictures of all runs in the command's folder."""
    runs = read_runs(folder, [job.name for job in jobs])
    write_report(runs, folder, output, data)


@dataclass(frozen=True)
class JobPlayer:
    """Plays the jobs of a command in turn.

    Attributes:
        federations: The federation of each seed of a cut.
        models: The function that makes the model of each seed of a cut.
        header_fields: Fields of each header in addition to those of a job.
        output: The options of the folder.
        ranks: The processes that play the jobs together; the first one alone writes.
        checked: The simulation of a command's only job, between `check` and `play`.
    """

    federations: Mapping[int, Federation]
    models: Mapping[int, Callable[[], Any]]
    header_fields: Line
    output: OutputOptions
    ranks: Ranks
    checked: dict[str, Simulation] = field(default_factory=dict)

    def header(self, job: Job, simulation: Simulation) -> Line:
        """The header of a job's record."""
        return job.header(simulation) | self.header_fields

    def data_of(self, job: Job) -> Federation:
        """The federation of a job."""
        return self.federations[job.options.cut_seed]

    def simulation(self, job: Job) -> Simulation:
        """The simulation of a job."""
        if job.name in self.checked:
            return self.checked.pop(job.name)
        return job.simulation(self.data_of(job), self.models[job.options.cut_seed])

    def check(self, jobs: Sequence[Job]) -> set[str]:
        """The names of the jobs whose folders hold them whole.

        With `dry_run` it prints what would run. Raises ValueError for an option that
        does not fit, and for a folder that holds another run.
        """
        out = self.output.out
        whole = set()
        plans: dict[str, str] = {}
        for job in jobs:
            is_begun = out is not None and run_folder(out, job).record.exists()
            if job.algorithm in plans and not is_begun:
                continue  # another seed changes nothing in the plan
            simulation = self.simulation(job)
            header = self.header(job, simulation)
            plans.setdefault(job.algorithm, plan_line(header))
            if out is not None and is_begun and not self.output.overwrite:
                folder = run_folder(out, job)
                if folder.is_whole(header) and not _lacks_outcomes(folder, job):
                    whole.add(job.name)
                else:
                    _check_goes_on(folder, job, simulation)
            if len(jobs) == 1 and not whole:
                self.checked[job.name] = simulation
            del simulation  # the next one needs the memory
        if self.output.dry_run:
            data = self.data_of(jobs[0])
            about = experiment.about_data(jobs[0].options.data, data)
            print("\n".join([about, *plans.values()]))
            for name in sorted(whole):
                print(f"{name}: whole in {out}")
        return whole

    def play(
        self,
        jobs: Sequence[Job],
        out: Path,
        whole: Collection[str],
        progress: Progress,
        configs: Mapping[str, str],
    ) -> int:
        """Plays the jobs that are not whole; returns the exit code."""
        has_stopped = False
        try:
            for job in jobs:
                folder = run_folder(out, job)
                if job.name in whole:
                    self.drop_checkpoint(job, folder)
                    progress.skip(job.num_rounds(self.data_of(job)))
                    progress.say(f"{job.name}: whole, it is not played again")
                    continue
                history = self.run_job(job, folder, progress, configs[job.name])
                if history.interrupted:
                    return _end_after_interrupt(progress)
                if self.output.export:
                    is_written = self.export_models(job, history, folder, progress)
                    has_stopped |= not is_written
                has_stopped |= history.end is not None and history.end.broke_off
                del history  # the next one needs the memory
        except KeyboardInterrupt:
            return _end_after_interrupt(progress)
        return 1 if has_stopped else 0

    def run_job(
        self, job: Job, folder: RunFolder, progress: Progress, config: str
    ) -> History:
        """The history of a job, played from its checkpoint.

        It begins with round 1 where there is no checkpoint. At its end the record holds
        every round that was played; if rounds are missing, it says why. Raises
        RunFailed for an error in the middle.
        """
        simulation = self.simulation(job)
        with contextlib.ExitStack() as stack:
            with self.ranks.together("the folder of the run"):
                path = Path(os.devnull)  # other ranks write nothing
                if self.ranks.is_first:
                    path = folder.record
                    stack.enter_context(lock_folder(folder.path))
                    if self.output.overwrite:
                        folder.clear()
                    write_config(folder.path, config)
                self._restore(job, simulation, folder)
                header = self.header(job, simulation)
                record = stack.enter_context(RecordWriter(path, overwrite=True))
            progress.say(plan_line(header))
            progress.name(job.name)
            history = self._play_job(job, simulation, folder, record, progress, header)
        if history.stopped:
            progress.say(f"{job.name}: {history.stopped}")
        is_over = not (history.interrupted or history.failed)
        if is_over:
            self.drop_checkpoint(job, folder)
        return history

    def _restore(self, job: Job, simulation: Simulation, folder: RunFolder) -> None:
        """Takes up the checkpoint of the run, where there is one."""
        place = Checkpoint(folder.path)
        # Only the first rank may see the folder.
        exists = self.ranks.from_first("the run's checkpoint", lambda: place.exists)
        if exists and not job.for_each:
            simulation.restore(folder.path)

    def _play_job(
        self,
        job: Job,
        simulation: Simulation,
        folder: RunFolder,
        record: RecordWriter,
        progress: Progress,
        header: Line,
    ) -> History:
        """The history of a job, played from the state of its simulation."""
        every, minutes = self.output.checkpoint_every, self.output.checkpoint_minutes
        place = Checkpoint(folder.path, every, minutes)
        played = 0
        track = self.output.track if self.ranks.is_first else None

        def count_round(round: int, line: Line) -> None:
            nonlocal played
            played += 1
            progress.step(line)

        def play(on_round: OnRound) -> History:
            if not job.for_each:
                return job.play(simulation, on_round, place)
            # A round's record needs all the clients' runs, so it is written at the end.
            history = job.play(simulation, count_round, place)
            for line in history.rounds:
                on_round(line["round"], line)
            return history

        def on_round(round: int, line: Line) -> None:
            tracker(round, line)
            if not job.for_each:
                count_round(round, line)

        try:
            with (
                tracker_of(track, job.name, header, folder.path) as tracker,
                warnings.catch_warnings(),
            ):
                # The caller prints the text of this warning.
                warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
                history = record.run(header, play, on_round)
                tracker.take_end(history.end)
                if self.ranks.is_first and _has_outcomes(job, history):
                    record.write({"samples": _outcomes(simulation, history)})
        except Exception as e:
            raise RunFailed(_failure(job, folder, e)) from e
        progress.skip(job.num_rounds(self.data_of(job)) - played)
        return history

    def drop_checkpoint(self, job: Job, folder: RunFolder) -> None:
        """Removes the checkpoint of a run that is over and cannot go on from it."""
        depends_on_rounds = bool(job.make_algorithm().traits.rounds_reason)
        is_kept = self.output.keep_checkpoint and not depends_on_rounds
        if self.ranks.is_first and not is_kept:
            folder.clear_checkpoints()

    def export_models(
        self, job: Job, history: History, folder: RunFolder, progress: Progress
    ) -> bool:
        """Writes the models of a job's clients; returns False where it cannot.

        The record is complete by then, so a full disk loses nothing but the models.
        """
        count = 0 if history.models is None else len(history.models)
        if count < self.data_of(job).n:
            progress.say(f"{job.name}: the run left no models to export")
            return False
        try:
            history.export(folder.path / MODELS_FOLDER)
        except OSError as e:
            progress.say(str(e))
            return False
        progress.say(f"{job.name}: models in {folder.path / MODELS_FOLDER}")
        return True


def _has_outcomes(job: Job, history: History) -> bool:
    """True where a record gets the outcome of each sample.

    The run is over, its clients have accuracies, and one state serves all of them.
    """
    has_accuracies = history.last_evaluation.get("accuracy") is not None
    return history.complete and has_accuracies and not job.for_each


def _lacks_outcomes(folder: RunFolder, job: Job) -> bool:
    """True where a run was killed before its last line, which can still be written."""
    run = folder.recorded()
    if run is None or run.samples or not _has_outcomes(job, run):
        return False
    return Checkpoint(folder.path).exists


def _outcomes(simulation: Simulation, history: History) -> Line:
    """The outcome of each sample after the last round, for the record."""
    split = simulation.evaluation.split
    config = simulation.config.in_process
    ids = simulation.eval_clients
    ids = ids[config.data.size(split)[ids] > 0]
    correct = correct_samples(config, history.state, split, ids)
    return {"round": history.state.round, "split": split, "correct": correct}


def _check_goes_on(folder: RunFolder, job: Job, simulation: Simulation) -> None:
    """Raises ValueError for a recorded run that cannot go on to the job's rounds."""
    run = folder.recorded()
    path = folder.path
    if job.for_each:
        target = getattr(simulation.algorithm, "target")  # noqa: B009
        path = target_folder(path, target)
    if Checkpoint(path).exists:
        simulation.check_checkpoint(path)
        return
    if run is None or not run.complete:
        return  # it begins anew
    length = run.header["rounds"]
    reason = job.make_algorithm().traits.rounds_reason
    cause = (
        f"{name_of(job.algorithm)} {reason}"
        if reason
        else "there is no checkpoint to go on from (--no-keep-checkpoint removes it)"
    )
    raise ValueError(
        f"rounds: {job.name} is over in {folder.path} after {length} rounds, and "
        f"{cause}; give --rounds {length}, or another folder."
    )


def _end_after_interrupt(progress: Progress) -> int:
    """Says what the records hold after Ctrl-C or SIGTERM; returns the exit code."""
    progress.say("Interrupted; the same command goes on from the last checkpoint.")
    return 130


def _failure(job: Job, folder: RunFolder, error: Exception) -> str:
    """The message on a job that an error has ended."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    remedy = ""
    if isinstance(error, OSError):  # in most cases the disk is full
        reason = str(error.strerror or error)
        remedy = ", and the same command goes on from the last checkpoint"
    return (
        f"{job.name} failed: {reason}; the record up to there is {folder.record}"
        f"{remedy}."
    )


def plan_line(header: Facts) -> str:
    """Text on a run: its parameters, rounds and engine, with the reason."""
    path = header["path"]
    return (
        f"{header['algorithm']}: {header['parameters']:,} parameters, "
        f"{header['rounds']} rounds, {path['how']} ({path['why']})"
    )
