"""The options of a command's output, and the files that its folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pflcore.check import (
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitFloat,
    PositiveInt,
    checked,
)
from pflcore.lab.cli._track import TrackerName
from pflcore.lab.results.table import Format

FEDERATION_PICTURE = "federation.png"  # which client holds which samples
CLIENT_FILES = {"md": "clients.md", "csv": "clients.csv"}
TABLE_FILES = {"md": "table.md", "latex": "table.tex", "csv": "table.csv"}


@checked
@dataclass(frozen=True)
class ReportOptions:
    """The folder of the table and the pictures, and what they show.

    Args:
        out: folder; if not said, a new one below runs/, or the first record's
        baseline: an algorithm; adds to the table the difference to it, of runs with the
            same seed, and the percent of clients that are worse off than with it
        per: "client" makes the table of clients: for each of them the difference to the
            baseline with its interval, and whether it is helped or hurt
        last: number of rounds in "mean of last"
        format: format of the table: md for table.md, latex for table.tex (package
            booktabs), csv for table.csv (mean and deviation in columns of their own)
        columns: columns of the table in this order; all if not said: best, final,
            last_mean, std, worst_decile, the run's metrics, difference and hurt (with
            --baseline), bytes, note
        privacy_delta: delta of the line below the table that has the epsilon of
            runs with --mean private; one over the number of clients with training
            samples if not said
    """

    out: Path | None = None
    baseline: str | None = None
    per: Literal["method", "client"] = "method"
    last: PositiveInt = 10
    format: Format = "md"
    columns: tuple[str, ...] = ()
    privacy_delta: OpenUnitFloat | None = None

    @property
    def table_file(self) -> str:
        """The name of the table's file."""
        return TABLE_FILES[self.format]


@checked
@dataclass(frozen=True)
class OutputOptions(ReportOptions):
    """The folder of the runs, the table and the pictures.

    Each run has a folder of its own in it, such as ditto-seed0. The same command again
    skips whole runs and goes on with those that were broken off. With more --rounds a
    run that is over goes on, too.

    Args:
        overwrite: remove the records and checkpoints of the runs, and begin them anew
        checkpoint_every: rounds between checkpoints; 0: by time alone
        checkpoint_minutes: minutes between checkpoints; 0: by rounds alone
        keep_checkpoint: keep the last checkpoint of a run that is over, from which it
            can go on to more rounds; it has the rows of all clients that took part
        track: service that gets each round's numbers, too: tensorboard (into
            tensorboard/ of the run's folder), wandb (WANDB_PROJECT, WANDB_MODE) or
            mlflow (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)
        export: write every client's personalized model into models/ of the run's
            folder, for `pflcore predict`; not those of runs that are whole already
        quiet: show no progress bar
        dry_run: print what would run, where the clients' rows would be and the memory
            that it takes; write nothing
    """

    overwrite: bool = False
    checkpoint_every: NonNegativeInt = 0
    checkpoint_minutes: NonNegativeFloat = 10.0
    keep_checkpoint: bool = True
    track: TrackerName | None = None
    export: bool = False
    quiet: bool = False
    dry_run: bool = False


@checked
@dataclass(frozen=True)
class TuneOptions:
    """The grid, and the folder of its results.

    Args:
        grid: values of options, such as lam=.01,.1,1 training.lr=.05,.2; a key is an
            option of the algorithm, or "training." and one of local training; every
            combination is a candidate
        seeds: number of runs of each candidate, with seed, seed + 1, ...; each has its
            own validation samples, unless the data bring a split "val"
        metric: metric by which candidates are compared: accuracy, loss or one of
            --metrics of `pflcore run`; if not said, accuracy, for targets loss
        out: folder; if not said, a new one below runs/; a second call with it plays
            what is missing
        quiet: print no line for each candidate
    """

    grid: tuple[str, ...] = ()
    seeds: PositiveInt = 1
    metric: str | None = None
    out: Path | None = None
    quiet: bool = False
