"""The options of a run that belong together, each group one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
from torch import Tensor

from pflcore.check import Count, Ids, Positive, Whole, check
from pflcore.metrics import Metric
from pflcore.simulation.attacks import Adversary

# beyond that a number is a slip
Threads = Annotated[int, at.Interval(ge=1, le=1024), at.doc("a whole number, from 1 to 1024")]


@dataclass(frozen=True)
class Evaluation:
    """When, on what and for whom the personalized models are evaluated."""

    every: Whole = 1  # rounds; the last one in any case; 0: never
    split: str = "test"
    clients: Tensor | Ids | Count | None = None  # ids, or so many, drawn once; None: all
    train_loss: bool = False  # the loss on every client's training data, too
    metrics: Sequence[str | Metric] | Mapping[str, Metric] = ()  # "auc", "f1", "mae", "r2", ...,
    # or functions of one client's (scores, labels)

    def __post_init__(self) -> None:
        check(self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether `round`, from 1, of so many is evaluated."""
        return self.every > 0 and (round % self.every == 0 or round == rounds)


@dataclass(frozen=True)
class Robustness:
    """What a run does about updates that are too long, and who attacks it."""

    clip: Positive | None = None  # no update is longer (Euclidean norm), before the server sees it
    adversary: Adversary | None = None  # clients that attack; the others are evaluated

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Hardware:
    """Where a run is computed; never changes a result beyond rounding."""

    engine: Literal["auto", "chain", "loop", "vmap"] = "auto"  # see `pflcore.train.choose`
    workers: Threads | None = None  # never changes a result; None: one for each core
    device: str = "cpu"
    rows: str | Path = "auto"  # the clients' rows: "memory", a folder, or by what fits

    def __post_init__(self) -> None:
        check(self)
