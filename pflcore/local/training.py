"""How every client trains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pflcore.local.schedules import Schedule, rates


@dataclass(frozen=True)
class Training:
    """How every client trains; the run's, not an algorithm's.

    `lr` is the step size of round 1 (default schedule: of all rounds). `schedule` is a function of (round, rounds), which multiplies it, or
    one of an optimizer that makes a scheduler of torch's: `lambda optimizer: CosineAnnealingLR(optimizer, T_max=20)`, one step a round.
    """

    lr: float = 0.1
    batch_size: int = 32
    epochs: int = 1
    momentum: float = 0.0  # its buffer starts at zero in every round
    weight_decay: float = 0.0
    drop_last: bool = False
    reshuffle: bool = True  # False: one order of the samples for the whole run
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"lr: expected a finite number >= 0, got {self.lr}.")
        if not all(isinstance(v, int) and v >= 1 for v in (self.batch_size, self.epochs)):
            raise ValueError(f"batch_size and epochs: expected whole numbers, at least 1, got {self.batch_size} and {self.epochs}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected 0 <= momentum < 1, got {self.momentum}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: expected a finite number >= 0, got {self.weight_decay}.")

    def lr_at(self, round: int, rounds: int) -> float:
        """The step size of `round` (from 1) of `rounds`."""
        return self.lr if self.schedule is None else rates(self.schedule, self.lr, max(round, rounds))[round - 1]
