"""The folder of a command: a new one, or one whose files must not be lost."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from pflcore.cli._config import CONFIG_FILES
from pflcore.cli._experiment import Job
from pflcore.cli._output import (
    CHECKPOINTS,
    RECORD_FILE,
    TABLE_FILES,
    OutputOptions,
    ReportOptions,
)
from pflcore.results._files import move_aside
from pflcore.simulation import checkpoint
from pflcore.simulation.checkpoint import Checkpoint


def new_folder(algorithms: Sequence[str], data: str, partition: str) -> Path:
    """A folder below runs/ that is made by this call.

    Its name is made of the command's words.
    """
    command = algorithms[0] if len(set(algorithms)) == 1 else "compare"
    partition = partition.replace("*", "star")
    words = f"{command}-{data}-{partition}".rstrip("-")
    stem = file_name(words)
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        folder = Path("runs") / name
        # Of two runs that start at the same time, only one can make the folder.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def file_name(words: str) -> str:
    """The words as a name that every file system accepts."""
    return re.sub(r"[^\w.-]", "_", words)


def checkpoint_folder(folder: Path, job: Job) -> Path:
    """The folder of a job's checkpoint, in the folder of its record."""
    return folder / CHECKPOINTS / re.sub(r"[^\w.-]+", "-", job.name)


def check_folder(folder: Path, output: ReportOptions) -> None:
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
        another = (
            f"name another folder (`pflcore report {folder} OTHER` makes one table of "
            "both)"
        )
        remedy = f"{another}, or add --overwrite, which moves it aside"
        if goes_on:
            names += " without a checkpoint"
            remedy = f"{another}, or put --overwrite for --resume, which moves it aside"
        elif begun:
            remedy = f"go on by --resume, {remedy}"
        raise ValueError(f"out: {folder} holds {names}; {remedy}.")
    if _is_foreign_table(folder, output) and not goes_on:
        raise ValueError(
            f"out: {folder} has a {output.table_file} that this command did not write "
            "(reproduce's, perhaps); name another with --out, or add --overwrite, "
            "which moves it aside."
        )


def move_outputs_aside(
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
    """True where the folder has a table that `write_report` did not write.

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
