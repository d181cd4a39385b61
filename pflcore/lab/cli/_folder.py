"""The folder of a command's runs, and the folder of each run in it.

OUT/ditto-seed0 holds one run: record.jsonl, checkpoint.safetensors and run.toml. The
table and the pictures of all runs below OUT are in OUT itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pflcore.algorithms import name_of
from pflcore.check import require
from pflcore.lab.cli._experiment import Job
from pflcore.simulation import History, checkpoint
from pflcore.simulation import _describe as describe
from pflcore.simulation.checkpoint import comparable_header
from pflcore.simulation.record import DATA_FIELDS, Line, read, to_json

RECORD_FILE = "record.jsonl"


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


def make_folder(folder: Path) -> Path:
    """The folder, which is made. Raises ValueError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        can_write = os.access(folder, os.W_OK)
    except OSError:
        can_write = False
    require(can_write, "out", "a folder that can be written", str(folder))
    return folder


def file_name(words: str) -> str:
    """The words as a name that every file system accepts."""
    return re.sub(r"[^\w.-]", "_", words)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def record(self) -> Path:
        """The file of the run's record."""
        return self.path / RECORD_FILE

    def recorded(self) -> History | None:
        """The run in the record, as far as it was played; None without a record."""
        if not self.record.is_file():
            return None
        runs = [run for run in read(self.record) if run.header]
        return runs[-1] if runs else None

    def is_whole(self, header: Line) -> bool:
        """True where the record holds the whole run of this header.

        Raises ValueError where it holds another run.
        """
        run = self.recorded()
        if run is None:
            return False
        here = to_json(header)
        there = comparable_header(run.header, here)
        difference = describe.first_difference(_identity(there), _identity(here))
        if difference:
            other = f"another folder (`pflcore report {self.path.parent} OTHER`"
            raise ValueError(
                f"out: {self.path} holds another run: {difference}; give the options "
                f"it was begun with, {other} makes one table of both), or --overwrite, "
                "which removes it."
            )
        return run.complete and run.header["rounds"] == header["rounds"]

    def clear(self) -> None:
        """Removes the record and the checkpoints."""
        self.record.unlink(missing_ok=True)
        self.clear_checkpoints()

    def clear_checkpoints(self) -> None:
        """Removes the checkpoint, and those of the runs for single targets."""
        (self.path / checkpoint.FILE_NAME).unlink(missing_ok=True)
        for folder in self.path.glob("target-*"):
            shutil.rmtree(folder, ignore_errors=True)


def run_folder(out: Path, job: Job) -> RunFolder:
    """The folder of a job's run."""
    name = f"{name_of(job.algorithm)}-seed{job.options.seed}"
    return RunFolder(out / file_name(name))


def read_runs(out: Path, first: Collection[str] = ()) -> list[History]:
    """The runs in the folders below `out`.

    Args:
        out: The folder of a command.
        first: Names of runs. These stand in front, in this order.
    """
    places = {name: place for place, name in enumerate(first)}
    return sorted(read(out), key=lambda run: places.get(run.name, len(places)))


def _identity(header: Line) -> Line:
    """The entries of a header that all parts of one run share.

    The options of the data are first: a difference of them is the cause of others.
    """
    options = {name: header.get(name) for name in DATA_FIELDS}
    return {**options, **describe.entries_of_any_length(header)}
