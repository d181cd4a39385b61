"""Plays the jobs of a command in turn, each from its checkpoint, into one record."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflcore.algorithms import name_of
from pflcore.cli._experiment import Job
from pflcore.cli._failure import RunFailed, first_line
from pflcore.cli._folder import checkpoint_folder, file_name
from pflcore.cli._follow import NoProgress, NoRecord
from pflcore.cli._output import CHECKPOINTS, OutputOptions
from pflcore.cli._predict import MODELS_FOLDER
from pflcore.cli._track import tracker_of
from pflcore.data import Federation
from pflcore.results._progress import Progress
from pflcore.results.record import Facts, Line, OnRound, RecordWriter
from pflcore.simulation import History
from pflcore.simulation._ranks import Ranks
from pflcore.simulation.checkpoint import Checkpoint

Model = Callable[[], Any]


@dataclass
class JobRunner:
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
        return checkpoint_folder(self.folder, job)

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
        self.progress.say(plan_line(header))
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
                return job.play(simulation, on_round, place)
            # A round's record needs all the clients' runs, so it is written at the end.
            history = job.play(simulation, count_round, place)
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
                tracker.take_end(history.end)
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
        folder = self.folder / MODELS_FOLDER / file_name(name)
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


def plan_line(header: Facts) -> str:
    """Text on a run: its parameters, rounds and engine, with the reason."""
    path = header["path"]
    return (
        f"{header['algorithm']}: {header['parameters']:,} parameters, "
        f"{header['rounds']} rounds, {path['how']} ({path['why']})"
    )
