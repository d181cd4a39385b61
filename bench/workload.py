"""Workloads of whole rounds: models, data and local training, for any runtime.

Among them are workloads that others have published times of.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bench.players import player
from pflcore import Clients, Evaluation, Federation, Simulation, Training
from pflcore.lab.data import _sources as sources
from pflcore.nn.models import model_for
from pflcore.train._context import TrainContext
from pflcore.train._workers import single_threaded

BATCH = 20
LR = 0.005
FOLDERS = {"mnist": "mnist", "cifar10": "cifar-10-batches-py"}
# Other data have MNIST's shape.
SHAPES = {"cifar10": (3, 32, 32), "made-up photos": (3, 32, 32), "rows": (28,)}
# Models with options of their own, by their names in the tables.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tutorial": ("cnn", {"channels": (6, 16), "hidden": (120, 84)}),
    "resnet18, 8 wide": ("resnet18", {"width": 8}),
    "resnet18, 8 wide, group norm": ("resnet18", {"width": 8, "norm": "group"}),
    "resnet18, 16 wide": ("resnet18", {"width": 16}),
}


@dataclass(frozen=True)
class Workload:
    """Rounds of FedAvg with clients, data and options.

    Workloads of equal values are the same work.

    Args:
        name: its name in the table
        model: a model of pflcore.nn.models, or a name of `MODELS`
        data: "mnist", "cifar10", "made up" for numbers of MNIST's shape, "made-up
            photos" for those of CIFAR-10's, or "rows" for 28 numbers a sample
        n: clients
        cohort: clients of a round
        samples: training samples of all clients together
        tests: test samples of all clients together
        batch: samples of a minibatch
        lr: step size
        epochs: epochs of local training
        rounds: timed rounds, after a first one
        power: a client's size is in proportion to its rank to the power of -power; 0:
            all have one size
        published: a round's time as the authors of other programs say, by program
        evaluate: evaluates all clients' test samples after each round
        steps: further options of `Training`, as pairs: local_optimizer, clip_grad
    """

    name: str
    model: str
    data: str
    n: int
    cohort: int
    samples: int
    tests: int
    batch: int = BATCH
    lr: float = LR
    epochs: int = 1
    rounds: int = 4
    power: float = 0.0
    published: Mapping[str, str] = field(default_factory=dict, hash=False)
    evaluate: bool = False
    steps: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        """A new model."""
        shape = SHAPES.get(self.data, (1, 28, 28))
        name, options = MODELS.get(self.model, (self.model, {}))
        return model_for(name, shape, 10, **options)

    @property
    def training(self) -> Training:
        """Options of local training."""
        return Training(self.lr, self.batch, self.epochs, **dict(self.steps))

    @property
    def sizes(self) -> list[int]:
        """Training samples of each client, at least one."""
        weight = torch.arange(1, self.n + 1, dtype=torch.float64) ** -self.power
        spare = self.samples - self.n  # Each client has one sample at least.
        ends = (weight.cumsum(0) / weight.sum() * spare).round().long()
        start = torch.zeros(1, dtype=torch.int64)
        return (ends.diff(prepend=start) + 1).tolist()


PUBLISHED = json.loads(Path(__file__).with_name("workloads.json").read_text())
WORKLOADS = {name: Workload(name, **options) for name, options in PUBLISHED.items()}


def is_real(data: str) -> bool:
    """True where the data set is in the folder PFLCORE_DATA.

    Its form is that which `load` reads.

    A benchmark downloads nothing.
    """
    folder = Path(os.environ.get("PFLCORE_DATA", "/nowhere"))
    return data in FOLDERS and (folder / FOLDERS[data]).is_dir()


@functools.lru_cache(2)
def pool(data: str, samples: int, tests: int) -> tuple[Tensor, Tensor]:
    """Images x [n, ...] and labels y [n], training samples first.

    The test samples follow.
    """
    gen = torch.Generator().manual_seed(0)
    if not is_real(data):
        n = samples + tests
        shape = SHAPES.get(data, (1, 28, 28))
        x = torch.randn(n, *shape, generator=gen)
        y = torch.randint(10, (n,), generator=gen)
        return x, y
    source = sources.load(data)
    order = torch.randperm(len(source.x_train), generator=gen)[:samples]
    x = torch.cat([source.x_train[order], source.x_test[:tests]])
    y = torch.cat([source.y_train[order], source.y_test[:tests]])
    return x, y


def splits(w: Workload) -> dict[str, list[Tensor]]:
    """The indices of each client's training and test samples in the pool."""
    train = list(torch.arange(w.samples).split(w.sizes))
    test = list((w.samples + torch.arange(w.tests)).tensor_split(w.n))
    return {"train": train, "test": test}


@functools.lru_cache(4)
def federation(w: Workload) -> Federation:
    """The workload's clients and their samples."""
    x, y = pool(w.data, w.samples, w.tests)
    return Federation(x, y, splits(w), 10)


def cohort(setting: TrainContext) -> tuple[Clients, Tensor]:
    """All clients, and the model that each starts from."""
    n = setting.data.n
    net = setting.net
    buffers = net.b0.expand(n, -1).clone()
    return Clients(setting, torch.arange(n), 1, buffers), net.w0.repeat(n, 1)


def simulation(algorithm: str, w: Workload, **more: Any) -> Simulation:
    """A run of the workload that does not end.

    Its last round would be evaluated, even without `evaluate`.
    """
    return Simulation(
        algorithm,
        w.build,
        federation(w),
        w.training,
        rounds=10**6,
        participation=w.cohort / w.n,
        evaluation=Evaluation(every=int(w.evaluate)),
        **more,
    )


@torch.enable_grad()
def train(
    model: nn.Module, w: Workload, client: int, data: Federation | None = None
) -> int:
    """Trains the model on a client's samples; returns their number."""
    samples = (data or federation(w)).client(client, "train")
    return player.train(model, samples, w, **dict(w.steps))


def plain_loop(
    model: nn.Module, w: Workload
) -> Callable[[Sequence[int], Sequence[float]], None]:
    """The function of a plain round, see `player.plain_loop`, on one thread."""
    round = player.plain_loop(model, lambda i: train(model, w, i))
    return single_threaded()(round)
