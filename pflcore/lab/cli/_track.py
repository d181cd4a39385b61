"""The tracker of a command's runs, by its name on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pflcore.check import import_optional
from pflcore.simulation.callbacks import MLflow, TensorBoard, Tracker, Wandb
from pflcore.simulation.record import Facts

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
TENSORBOARD_FOLDER = "tensorboard"  # of the events in the folder of a record


def require_tracker(name: TrackerName | None) -> None:
    """Raises ImportError where the tracker's package is missing."""
    if name is not None:
        import_optional(name, what=f"--track {name}")


class NoTracker(Tracker):
    """A tracker that sends nothing."""

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Sends nothing."""


def tracker_of(
    name: TrackerName | None, job: str, header: Facts, folder: Path
) -> Tracker:
    """The tracker of one run.

    Args:
        name: The name of the tracker; None for no tracker.
        job: The name of the run.
        header: The header of the run.
        folder: The folder of the run.
    """
    if name is None:
        return NoTracker()
    if name == "tensorboard":
        return TensorBoard(folder / TENSORBOARD_FOLDER, config=header)
    options: dict[str, Any] = {"name": job, "config": header}
    return Wandb(**options) if name == "wandb" else MLflow(**options)
