"""What clients train in the benchmarks of whole rounds, in any runtime; and the
workloads that others have published times of."""

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore import Clients, Evaluation, Federation, Simulation, Training
from pflcore.data import _sources as sources
from pflcore.nn.models import model_for
from pflcore.train._context import TrainContext
from pflcore.train._workers import single_threaded

BATCH, LR = 20, 0.005
FOLDERS = {"mnist": "mnist", "cifar10": "cifar-10-batches-py"}
SHAPES = {"cifar10": (3, 32, 32), "rows": (28,)}  # others: MNIST's
TUTORIAL = {"channels": (6, 16), "hidden": (120, 84)}


@dataclass(frozen=True)
class Workload:
    """FedAvg on `n` clients, `cohort` of them a round. Two of the same values are
    the same work."""

    name: str
    model: str  # of pflcore.nn.models, or "tutorial"
    # "mnist", "cifar10", "made up": numbers of MNIST's shape, or "rows": 28 of them
    data: str
    n: int
    cohort: int
    samples: int  # of all clients together
    tests: int  # test samples of all clients together
    batch: int = BATCH
    lr: float = LR
    epochs: int = 1
    rounds: int = 4  # timed ones, after the first
    power: float = 0.0  # sizes go by rank^-power; 0: all alike
    # who needs how long for a round, as they say
    published: Mapping[str, str] = field(default_factory=dict, hash=False)
    evaluate: bool = False  # everybody's test samples, after each round

    def build(self) -> nn.Module:
        shape = SHAPES.get(self.data, (1, 28, 28))
        if self.model == "tutorial":
            return model_for("cnn", shape, 10, **TUTORIAL)
        return model_for(self.model, shape, 10)

    @property
    def training(self) -> Training:
        return Training(self.lr, self.batch, self.epochs)

    @property
    def sizes(self) -> list[int]:
        """Training samples of each client, at least one."""
        weight = torch.arange(1, self.n + 1, dtype=torch.float64) ** -self.power
        ends = (
            (weight.cumsum(0) / weight.sum() * (self.samples - self.n)).round().long()
        )
        return (ends.diff(prepend=torch.zeros(1, dtype=torch.int64)) + 1).tolist()


WORKLOADS = {
    name: Workload(name, **said)
    for name, said in json.loads(
        Path(__file__).with_name("workloads.json").read_text()
    ).items()
}


def is_real(data: str) -> bool:
    """Whether the data set itself lies in the folder PFLCORE_DATA, as `load` reads it:
    nothing is downloaded for a benchmark."""
    if data == "cifar10" and importlib.util.find_spec("torchvision") is None:
        return False
    folder = Path(os.environ.get("PFLCORE_DATA", "/nowhere"))
    return data in FOLDERS and (folder / FOLDERS[data]).is_dir()


@functools.lru_cache(2)
def pool(data: str, samples: int, tests: int) -> tuple[Tensor, Tensor]:
    """`samples` training and then `tests` test images x [n, ...], and their labels y
    [n]."""
    gen = torch.Generator().manual_seed(0)
    if not is_real(data):
        n, shape = samples + tests, SHAPES.get(data, (1, 28, 28))
        return torch.randn(n, *shape, generator=gen), torch.randint(
            10, (n,), generator=gen
        )
    source = sources.load(data)
    order = torch.randperm(len(source.x_train), generator=gen)[:samples]
    x = torch.cat([source.x_train[order], source.x_test[:tests]])
    return x, torch.cat([source.y_train[order], source.y_test[:tests]])


@functools.lru_cache(4)
def federation(w: Workload) -> Federation:
    x, y = pool(w.data, w.samples, w.tests)
    train = list(torch.arange(w.samples).split(w.sizes))
    test = list((w.samples + torch.arange(w.tests)).tensor_split(w.n))
    return Federation(x, y, {"train": train, "test": test}, 10)


def cohort(setting: TrainContext) -> tuple[Clients, Tensor]:
    """All clients, and the model that each starts from."""
    n, net = setting.data.n, setting.net
    buffers = net.b0.expand(n, -1).clone()
    return Clients(setting, torch.arange(n), 1, buffers), net.w0.repeat(n, 1)


def simulation(algorithm: str, w: Workload, **more: Any) -> Simulation:
    """A run of the workload that does not end, and so has no last round, which is
    evaluated."""
    more |= {
        "participation": w.cohort / w.n,
        "evaluation": Evaluation(every=int(w.evaluate)),
    }
    return Simulation(
        algorithm, w.build, federation(w), w.training, rounds=10**6, **more
    )


@torch.enable_grad()
def train(
    model: nn.Module, w: Workload, client: int, data: Federation | None = None
) -> int:
    """A client's part of a round; gives its number of samples."""
    x, y = (data or federation(w)).client(client, "train")
    optimizer = torch.optim.SGD(model.parameters(), lr=w.lr)
    for _ in range(w.epochs):
        for at in torch.randperm(len(x)).split(w.batch):
            loss = F.cross_entropy(model(x[at]), y[at])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return len(x)


def plain_loop(
    model: nn.Module, w: Workload
) -> Callable[[Sequence[int], Sequence[float]], None]:
    """What one writes without a framework: one nn.Module, torch.optim.SGD, one client
    after another, on one thread. A round of these clients with these shares in the
    mean."""
    state = {k: v.clone() for k, v in model.state_dict().items()}

    @single_threaded()
    def round(cohort: Sequence[int], share: Sequence[float]) -> None:
        total = {k: torch.zeros_like(v) for k, v in state.items()}
        for i, s in zip(cohort, share, strict=True):
            model.load_state_dict(state)
            train(model, w, i)
            for k, v in model.state_dict().items():
                total[k].add_(v, alpha=s)
        state.update(total)
        model.load_state_dict(state)

    return round


@torch.no_grad()
def scored(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    scores = model(x)
    return float(F.cross_entropy(scores, y)), float(
        (scores.argmax(1) == y).double().mean()
    )
