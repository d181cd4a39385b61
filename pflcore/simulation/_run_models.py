"""The models of a run that was played, as its `History` holds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pflcore.check import reject, require
from pflcore.simulation._exported import export_models
from pflcore.simulation._models import LazyModels, Personalized


class RunModels(LazyModels):
    """The personalized models of a run's last state."""

    def export(self, header: Mapping[str, Any], folder: str | Path) -> None:
        """Writes all models into files, see `History.export`."""
        export_models(map(self.__getitem__, range(len(self))), header, folder)


class TargetModels(list[Personalized]):
    """The models of targets 0, 1, ..., of which each was made in its own run."""

    def adapt(self, samples: Any, rounds: int) -> Personalized:
        """Raises ValueError: these runs have no model for other clients."""
        reject("adapt", "the history that Simulation.run() returns", self)

    def export(self, header: Mapping[str, Any], folder: str | Path) -> None:
        """Writes all models into files, see `History.export`.

        Raises ValueError where the run of a client did not come to its end.
        """
        n = header["n"]
        wanted = f"a history with the models of {n} clients"
        require(len(self) == n, "export", wanted, f"{len(self)} models")
        export_models(self, header, folder)
