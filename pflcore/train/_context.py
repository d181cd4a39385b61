"""Everything that a cohort's training needs, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import Self

from pflcore.data._federation import Federation
from pflcore.train._engines import Engine
from pflcore.train._graphs import GradientGraphs
from pflcore.train._net import Net
from pflcore.train._training import Training
from pflcore.train._workers import Workers

# Default numbers of clients in a block under vmap.
CPU_BLOCK_CLIENTS = 64
GPU_BLOCK_CLIENTS = 128


@dataclass(frozen=True, eq=False)
class TrainContext:
    """Everything that training needs and that stays the same over a run.

    A context knows the clients' data and how they train. It knows neither an algorithm
    nor a server. `RunConfig` adds what the rounds around the training need.

    Attributes:
        net: The model as a function of a row.
        data: The federation that holds the clients' samples.
        training: The options of local training.
        engine: The engine that computes the gradients, with the reason for it.
        workers: The threads that share the clients of a cohort.
        seed: The seed of the run. It is a part of the key of every random stream.
        rounds: The number of rounds, on which a schedule of the step size may depend.
        clients_per_block: The largest number of clients of a block under vmap.
        graphs: The CUDA graphs of training steps, or None on a CPU.
    """

    net: Net
    data: Federation
    training: Training
    engine: Engine
    workers: Workers
    seed: int = 0
    rounds: int = 1
    clients_per_block: int = CPU_BLOCK_CLIENTS
    graphs: GradientGraphs | None = None

    def without_augmentation(self) -> Self:
        """The same options for what trains outside of a run's rounds."""
        if not self.training.transforms:
            return self
        return replace(self, training=replace(self.training, augment=None))
