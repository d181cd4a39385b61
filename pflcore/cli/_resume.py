"""The command that a folder belongs to, and what is done when another goes on there.

The facts of the command lie in the folder's own checkpoint file, beside the record.
"""

from __future__ import annotations

from pathlib import Path

from pflcore.algorithms import name_of
from pflcore.cli._experiment import Job
from pflcore.cli._folder import checkpoint_folder
from pflcore.cli._job_runner import JobRunner
from pflcore.cli._output import CHECKPOINTS, RECORD_FILE
from pflcore.results.record import Facts, Line, read
from pflcore.simulation import History, checkpoint
from pflcore.simulation import _describe as describe
from pflcore.simulation._per_target import target_folder
from pflcore.simulation.checkpoint import Checkpoint


def recorded_command(folder: Path | None) -> Line:
    """The facts of the command that a folder belongs to; {} where it has none."""
    if folder is None or not Checkpoint(folder).exists:
        return {}
    command: Line = checkpoint.load(folder)[1].get("command", {})
    return command


def merge_commands(folder: Path, command: Facts) -> Line:
    """The facts of all runs of a folder, with those of a command that goes on there.

    Raises ValueError where the folder has runs of other options.
    """
    recorded = recorded_command(folder)
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
            f"was begun with, or another folder (`pflcore report {folder} OTHER` makes "
            "one table of both)."
        )
    return {"common": command["common"], "runs": {**runs, **command["runs"]}}


def kept_runs(folder: Path, command: Facts) -> list[History]:
    """The runs of a folder's record that stay in it when a command goes on.

    These are the complete ones of the command's number of rounds, and all runs that the
    command does not play. Raises ValueError where the folder is another command's, or a
    checkpoint is damaged.
    """
    others = {*merge_commands(folder, command)["runs"]} - {*command["runs"]}
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


def check_goes_on(folder: Path, job: Job, runner: JobRunner) -> None:
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
    path = checkpoint_folder(folder, job)
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
