"""Groups of a run's options, each of them one frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import annotated_types as at
from torch import Tensor

from pflcore.check import Ids, NonNegativeInt, PositiveFloat, PositiveInt, checked
from pflcore.metrics import Metric
from pflcore.simulation._attacks import Adversary

# A larger number of threads is a mistake.
ThreadCount = Annotated[
    int, at.Interval(ge=1, le=1024), at.doc("a whole number, from 1 to 1024")
]


@checked
@dataclass(frozen=True)
class Evaluation:
    """The times, the data and the clients of a run's evaluations.

    Args:
        every: The number of rounds from one evaluation to the next. The last round is
            evaluated in any case. 0 means never; then the data need not have the split.
        split: The split on which the personalized models are evaluated: "train", "val"
            or "test".
        clients: The ids of the clients that are evaluated, each a whole number from 0
            to N - 1, or their names. Or a number of clients, which are drawn once,
            before round 1, by the run's seed, among the clients with samples. None for
            all.
        train_loss: Also compute the loss on the training data of every client.
        metrics: More metrics, beside the loss and, for labels, the accuracy. Names for
            labels are "auc", "f1", "balanced_accuracy", "brier" and "ece", for numbers
            "mae", "rmse" and "r2". A function takes one client's (scores, labels).
    """

    every: NonNegativeInt = 1
    split: str = "test"
    clients: Tensor | Ids | PositiveInt | None = None
    train_loss: bool = False
    metrics: Sequence[str | Metric] | Mapping[str, Metric] = ()

    def due(self, round: int, rounds: int) -> bool:
        """True where `round`, from 1, of `rounds` is evaluated."""
        return self.every > 0 and (round % self.every == 0 or round == rounds)


@checked
@dataclass(frozen=True)
class Robustness:
    """The treatment of long updates, and the clients that attack a run.

    Args:
        clip: The largest length (Euclidean norm) of an update. A longer update is
            shortened to it before the server uses it; None for no limit.
        adversary: Clients that attack; the others are evaluated.
    """

    clip: PositiveFloat | None = None
    adversary: Adversary | None = None


@checked
@dataclass(frozen=True)
class Hardware:
    """The place of a run, which never changes a result beyond the last digits.

    There are three engines: "chain" (by the kernels, where they know every layer of the
    model and the loss is the run's own), "vmap" (all clients at once, in blocks) and
    "loop" (one after another on each thread). A record has the engine's name as
    `engine`, and these words with the reason as `path`.

    Under "vmap" clients train in blocks of at most `clients_per_block` neighbours by
    size. Blocks are made of the whole cohort, so a run's bits are the same for any
    number of workers, and others for another `clients_per_block`. Larger blocks are
    faster, smaller ones take less memory. With 100 clients of an MLP on a
    CPU, blocks of 64 take about 1.1 times as long as a single block. Blocks of 32 take
    1.4 times as long, of 16 twice, of 8 three times. A GPU computes one block after
    another.

    On a GPU the gradients of local steps are captured as CUDA graphs, which changes no
    bit. A model whose steps cannot be captured is trained without graphs, and the
    record gives the reason. A captured step repeats what Python decided when it was
    captured: choose graphs=False where attributes of the model change between rounds.

    Args:
        engine: The engine that computes the gradients. "auto" chooses by the model, and
            takes the kernels where they know it. "chain" does the same, and is an error
            for a model with a layer that the kernels do not know.
        workers: The number of threads, which never changes a result; None for one per
            core. A GPU has one.
        device: The device, as torch names it, for example "cpu" or "cuda:0".
        clients_per_block: The most clients of a block under vmap. It changes last
            digits; None for 64 on a CPU and 128 on a GPU.
        graphs: On a GPU, capture local steps as CUDA graphs.
        ranks: "auto" shares the clients among the processes that torchrun started; 1
            lets each process play alone.
        rank_timeout: Minutes for which processes wait for each other. The first run of
            a process decides.
    """

    engine: Literal["auto", "chain", "loop", "vmap"] = "auto"
    workers: ThreadCount | None = None
    device: str = "cpu"
    clients_per_block: PositiveInt | None = None
    graphs: bool = True
    ranks: Literal["auto", 1] = "auto"
    rank_timeout: PositiveFloat = 30.0
