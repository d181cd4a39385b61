"""Callbacks for `Simulation.run(on_round=...)`: functions of (round, record).

A run that continues from a checkpoint first calls them with the records of the rounds
up to there. One that raises `Stop` ends the run with its sentence. One that raises
anything else ends it too, and nothing is lost: the rounds up to there are in
`simulation.history` (and in the exception's attribute `history`), and
`simulation.run()` continues from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pflcore import metrics
from pflcore.algorithms._protocol import Stop
from pflcore.check import NonNegativeFloat, PositiveInt, checked, reject, require
from pflcore.simulation._trackers import MLflow, TensorBoard, Tracker, Wandb

__all__ = ["EarlyStopping", "MLflow", "Stop", "TensorBoard", "Tracker", "Wandb"]
Record = dict[str, Any]
Callback = Callable[[int, Record], None]


class CallbackStop(Stop):
    """The `Stop` of a callback: the end of the run is wanted."""


def call_back(callback: Callback, record: Record) -> None:
    """Calls a callback with the record of a round.

    Raises CallbackStop where the callback stops the run, and ValueError where it
    removes a field of the record.
    """
    names = [*record]
    try:
        callback(record["round"], record)
    except Stop as stop:
        raise CallbackStop(str(stop)) from stop
    lost = [name for name in names if name not in record]
    if lost:
        callback_name = getattr(callback, "__name__", type(callback).__name__)
        wanted = f"a function that leaves {lost[0]!r} in a round's record"
        reject(f"on_round, {callback_name}", wanted, [*record])


@checked
class EarlyStopping:
    """Ends a run whose mean over clients has stopped improving.

    It looks at the values of the run's evaluations. Values on "test" data would select
    on test data, so give the simulation `evaluation=Evaluation(split="val")`. For a
    method that makes the model of one client, give `clients=[target]`.

    Args:
        patience: The number of evaluations without improvement after which the run
            ends.
        key: The value to look at: "accuracy", "loss" or one of the run's metrics.
        min_delta: An improvement is a difference larger than this. A mean that is NaN
            is no improvement.
        higher_is_better: The direction of the values. None is enough for pflcore's own
            names: higher is better, except for losses and errors.
            Give it for a metric of your own, False for an error.
        clients: The numbers of the clients whose mean it is; None for all that are
            evaluated.

    Attributes:
        best: The best mean so far; NaN before the first finite one.
        round: The round of the best mean.
    """

    def __init__(
        self,
        patience: PositiveInt = 5,
        key: str = "loss",
        min_delta: NonNegativeFloat = 0.0,
        higher_is_better: bool | None = None,
        clients: Sequence[int] | None = None,
    ) -> None:
        self.clients = clients
        self.patience = patience
        self.key = key
        self.min_delta = min_delta
        self.sign = 1.0 if metrics.is_higher_better(key, higher_is_better) else -1.0
        self.best = math.nan
        self.round = 0
        self._misses = 0
        self._last = 0

    def __call__(self, round: int, record: Record) -> None:
        """Looks at one round's record.

        Raises Stop after `patience` evaluations without improvement, ValueError for an
        unknown key.
        """
        if round <= self._last:  # another run
            self.best = math.nan
            self.round = 0
            self._misses = 0
        self._last = round
        values = record["eval"]
        if not values:
            return
        known = [name for name in values if name not in ("size", "clients")]
        require(self.key in known, "key", f"one of {', '.join(known)}", self.key, known)
        value = metrics.mean(self._counted(values))
        # With the sign a higher mean is better. Before the first finite mean `least` is
        # NaN, and every mean is better.
        least = self.sign * self.best + self.min_delta
        is_worse = self.sign * value <= least
        if not math.isnan(value) and not is_worse:
            self.best = value
            self.round = round
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= self.patience:
            best = f"{self.key} {self.best:.4g} of round {self.round} stood"
            if math.isnan(self.best):
                best = f"no mean {self.key} was finite"
            raise Stop(
                f"Stopped early after round {round}: {best} for {self.patience} "
                "evaluations."
            )

    def _counted(self, values: Record) -> list[float]:
        """The values of the clients that count.

        Raises ValueError where one of them was not evaluated.
        """
        of_key: list[float] = values[self.key]
        if self.clients is None:
            return of_key
        ids = [*values.get("clients", range(len(of_key)))]
        for client in self.clients:
            require(client in ids, "clients", f"some of {ids}, the evaluated", client)
        return [of_key[ids.index(client)] for client in self.clients]
