"""Groups of a run's options, each of them one frozen value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
from torch import Tensor

from pflcore.check import Ids, NonNegativeInt, PositiveFloat, PositiveInt, checked
from pflcore.metrics import Metric
from pflcore.simulation._attacks import Adversary
from pflcore.simulation.executor import Executor

# A larger number of threads is a slip.
ThreadCount = Annotated[
    int, at.Interval(ge=1, le=1024), at.doc("a whole number, from 1 to 1024")
]


@checked
@dataclass(frozen=True)
class Evaluation:
    """When, on what and for whom the personalized models are evaluated."""

    # rounds; the last one in any case; 0: never, and of no split
    every: NonNegativeInt = 1
    split: str = "test"
    # ids, or so many, drawn once; None: all
    clients: Tensor | Ids | PositiveInt | None = None
    train_loss: bool = False  # the loss on every client's training data, too
    # "auc", "f1", "mae", "r2", ..., or functions of one client's (scores, labels)
    metrics: Sequence[str | Metric] | Mapping[str, Metric] = ()

    def due(self, round: int, rounds: int) -> bool:
        """True where `round`, from 1, is evaluated in a run of `rounds` rounds."""
        return self.every > 0 and (round % self.every == 0 or round == rounds)


@checked
@dataclass(frozen=True)
class Robustness:
    """What a run does about long updates, and the clients that attack it."""

    # no update is longer (Euclidean norm), before the server sees it
    clip: PositiveFloat | None = None
    adversary: Adversary | None = None  # clients that attack; the others are evaluated


@checked
@dataclass(frozen=True)
class Hardware:
    """Where a run is computed; never changes a result beyond rounding.

    Under engine "vmap" clients train in blocks of at most `clients_per_block`,
    neighbours by size. Blocks are made of the whole cohort, so a run's bits are the
    same for any number of workers, and others for another `clients_per_block`. Larger
    blocks are faster, smaller ones take less memory: on a CPU, with 100 clients of an
    MLP, blocks of 64 take about 1.1 times as long as one of all, of 32 1.4 times, of 16
    twice, of 8 three times. A GPU computes one block after another.

    On a GPU the gradients of local steps are captured as CUDA graphs, which changes no
    bit. A model whose steps cannot be captured is trained without; the record says why.
    A captured step repeats what Python decided when it was captured: take graphs=False
    where attributes of the model change between rounds.
    """

    # auto: the fastest that fits
    engine: Literal["auto", "chain", "loop", "vmap"] = "auto"
    # never changes a result; None: one for each core; a GPU has one
    workers: ThreadCount | None = None
    device: str = "cpu"
    # the clients' rows: "memory", a folder, or by what fits
    storage: str | Path = "auto"
    # clients of a block under vmap: it changes last digits; None: 64 on a CPU, 128 on a
    # GPU
    clients_per_block: PositiveInt | None = None
    graphs: bool = True  # on a GPU: capture local steps as CUDA graphs
    # auto: the processes that torchrun started share the clients; 1: each plays alone
    ranks: Literal["auto", 1] = "auto"
    # minutes that processes wait for each other; the first run of a process decides
    rank_timeout: PositiveFloat = 30.0
    # what computes the clients of a cohort; None: this process, or all ranks
    executor: Executor | None = None
