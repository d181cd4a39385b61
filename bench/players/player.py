"""Rounds of FedAvg by one program, in a process that has nothing else in it.

    python -c "import player; player.main()" PROGRAM FOLDER [CHECKOUT]

FOLDER has `task.pt`. It becomes the working directory, and gets `result.json`. Neither
pflcore nor the bench is imported for another program, so start and memory are its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pickle
import re
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
FILE = "task.pt"


@dataclass(frozen=True)
class Task:
    """Rounds of FedAvg on given samples, from a given model.

    Attributes:
        x: samples of all clients
        y: their labels
        train: the indices of each client's training samples
        test: the indices of each client's test samples
        model: the model before round 1
        lr: step size of SGD
        batch: samples of a minibatch
        epochs: epochs of local training
        rounds: number of rounds
        cohort: clients of a round, which only Flower reads; the others take all
        evaluate: evaluate all clients after each round
    """

    x: Tensor
    y: Tensor
    train: list[Tensor]
    test: list[Tensor]
    model: nn.Module
    lr: float
    batch: int
    epochs: int
    rounds: int
    cohort: int
    evaluate: bool

    def client(self, i: int, split: str) -> tuple[Tensor, Tensor]:
        """Samples and labels of client i."""
        index = getattr(self, split)[i]
        return self.x[index], self.y[index]

    @property
    def clients(self) -> range:
        """The clients' numbers."""
        return range(len(self.train))


@functools.lru_cache(1)
def task_of(file: str) -> Task:
    """The task in a file, which a process reads once."""
    layers = [kind for kind in vars(nn).values() if isinstance(kind, type)]
    with torch.serialization.safe_globals([*layers, set]):
        return Task(**torch.load(file, weights_only=True))


class Clock:
    """Measures at the ends of rounds.

    Attributes:
        rounds: number of rounds; further ticks do not count
        ends: the time of each round's end
        cpu: CPU seconds until the end of the first round and of the last
        megabytes: peak of the memory until the end of the last round
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self.megabytes = 0.0

    def tick(self, *_: Any) -> None:
        """Ends a round."""
        if len(self.ends) == self.rounds:
            return
        self.ends.append(time.time())
        if len(self.ends) in (1, self.rounds):
            self.megabytes, cpu = measure_processes()
            self.cpu.append(cpu)


def measure_processes() -> tuple[float, float]:
    """Peak megabytes and CPU seconds of this process and its descendants.

    Both are sums. Pages that several processes share count for each. They are 0 on a
    system without /proc.
    """
    parents = {}
    numbers = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process has ended.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            peak = re.search(r"VmHWM:\s+(\d+)", (folder / "status").read_text())
            megabytes = int(peak[1]) / 1024 if peak else 0.0
            ticks = int(fields[11]) + int(fields[12])
            parents[int(folder.name)] = int(fields[1])
            numbers[int(folder.name)] = megabytes, ticks / os.sysconf("SC_CLK_TCK")
    total = [0.0, 0.0]
    for pid, pair in numbers.items():
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            total = [a + b for a, b in zip(total, pair, strict=True)]
    return total[0], total[1]


def train(
    model: nn.Module, samples: tuple[Tensor, Tensor], task: Any, **options: Any
) -> int:
    """Trains the model on a client's samples; returns their number.

    `task` has lr, batch and epochs. Options are those of `Training`: local_optimizer
    and clip_grad.
    """
    x, y = samples
    is_adamw = options.get("local_optimizer") == "adamw"
    kind: Any = torch.optim.AdamW if is_adamw else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=task.lr, weight_decay=0.0)
    for _ in range(task.epochs):
        for at in torch.randperm(len(x)).split(task.batch):
            loss = F.cross_entropy(model(x[at]), y[at])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if "clip_grad" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad"])
            optimizer.step()
    return len(x)


@torch.no_grad()
def scored(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    accuracy = (scores.argmax(1) == y).double().mean()
    return float(loss), float(accuracy)


def plain_loop(
    model: nn.Module, train_client: Callable[[int], object]
) -> Callable[[Sequence[int], Sequence[float]], None]:
    """A function that plays a round as programs without frameworks do.

    It trains one client after another with one nn.Module and torch.optim.SGD. It takes
    the clients of the round and their shares in the mean.
    """
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def round(cohort: Sequence[int], share: Sequence[float]) -> None:
        # Batch norm's counts of batches, which are integers, have no mean.
        names = [k for k, v in state.items() if v.is_floating_point()]
        total = {k: torch.zeros_like(state[k]) for k in names}
        for i, s in zip(cohort, share, strict=True):
            model.load_state_dict(state)
            train_client(i)
            trained = model.state_dict()
            for k in names:
                total[k].add_(trained[k], alpha=s)
        state.update(total)
        model.load_state_dict(state)

    return round


def play_pflcore(task: Task, clock: Clock, checkout: str | None) -> nn.Module:
    """The model after pflcore's rounds."""
    import pflcore

    splits = {"train": task.train, "test": task.test}
    run = pflcore.Simulation(
        "fedavg",
        lambda: task.model,
        pflcore.Federation(task.x, task.y, splits, CLASSES),
        pflcore.Training(task.lr, task.batch, task.epochs),
        rounds=task.rounds,
        evaluation=pflcore.Evaluation(every=int(task.evaluate)),
    )
    model: nn.Module = run.run(on_round=clock.tick).model(0).module()
    return model


def play_plain_loop(task: Task, clock: Clock, checkout: str | None) -> nn.Module:
    """The model after the rounds of a loop in plain torch, on one thread."""
    torch.set_num_threads(1)
    model = task.model
    round = plain_loop(model, lambda i: train(model, task.client(i, "train"), task))
    total = sum(map(len, task.train))
    shares = [len(index) / total for index in task.train]
    for _ in range(task.rounds):
        round(task.clients, shares)
        for i in task.clients if task.evaluate else ():
            scored(model, *task.client(i, "test"))
        clock.tick()
    return model


def play_flower(task: Task, clock: Clock, checkout: str | None) -> nn.Module:
    """The model after rounds of Flower's `run_simulation`, one CPU for a client."""
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_worker_niceness": "0",  # that of the other programs; Ray's own is 15
    }
    os.environ.update({"FLWR_HOME": str(Path.cwd() / "flwr"), **quiet, **os.environ})
    import ray  # noqa: F401
    from flwr import app
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    file = str(Path(FILE).resolve())
    client = ClientApp()

    def received(message: Any, context: Any) -> tuple[nn.Module, Task, int]:
        torch.set_num_threads(1)
        task = task_of(file)
        task.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return task.model, task, int(context.node_config["partition-id"])

    @client.train()  # type: ignore[untyped-decorator]
    def answer(message: Any, context: Any) -> Any:
        net, task, i = received(message, context)
        count = train(net.train(), task.client(i, "train"), task)
        metrics = app.MetricRecord({"num-examples": count})
        reply = {"arrays": app.ArrayRecord(net.state_dict()), "metrics": metrics}
        return app.Message(content=app.RecordDict(reply), reply_to=message)

    @client.evaluate()  # type: ignore[untyped-decorator]
    def score(message: Any, context: Any) -> Any:
        net, task, i = received(message, context)
        x, y = task.client(i, "test")
        loss, accuracy = scored(net.eval(), x, y)
        numbers = {"num-examples": len(x), "loss": loss, "accuracy": accuracy}
        reply = app.RecordDict({"metrics": app.MetricRecord(numbers)})
        return app.Message(content=reply, reply_to=message)

    class Clocked(FedAvg):  # type: ignore[misc]
        def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
            metrics = super().aggregate_evaluate(server_round, replies)
            clock.tick()
            return metrics

    def serve(grid: Any, context: Any) -> None:
        n = len(task.train)
        strategy = Clocked(
            min_train_nodes=task.cohort,
            min_available_nodes=n,
            fraction_train=task.cohort / n,
            fraction_evaluate=float(task.evaluate),
        )
        start = app.ArrayRecord(task.model.state_dict())
        arrays = strategy.start(grid, start, num_rounds=task.rounds).arrays
        task.model.load_state_dict(arrays.to_torch_state_dict())

    server = ServerApp()
    server.main()(serve)
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {
            "num_cpus": os.cpu_count(),
            "num_gpus": 0,
            "include_dashboard": False,
        },
    }
    nodes = len(task.train)
    run_simulation(server, client, num_supernodes=nodes, backend_config=backend)
    return task.model


def play_pfllib(task: Task, clock: Clock, checkout: str | None) -> nn.Module:
    """The model after the rounds of PFLlib's main.py, in its own form of files.

    It evaluates before a round, in any case before the first.
    """
    import numpy as np

    torch.set_num_threads(1)
    for split in ("train", "test"):
        folder = Path("dataset/MNIST", split)
        folder.mkdir(parents=True)
        for i in task.clients:
            x, y = task.client(i, split)
            samples: Any = {"x": x.numpy(), "y": y.numpy()}
            np.savez_compressed(folder / f"{i}.npz", data=samples)
    Path("system").mkdir()
    os.chdir("system")  # It reads ../dataset.
    sys.path.insert(0, str(Path(checkout or "", "system")))
    module = importlib.import_module("flcore.servers.serveravg")
    servers = []

    class Server(module.FedAvg):  # type: ignore[misc, name-defined]
        def __init__(self, args: Any, times: int) -> None:
            args.model = task.model
            super().__init__(args, times)
            servers.append(self)

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            clock.tick()

    module.FedAvg = Server  # type: ignore[attr-defined]
    gap = 1 if task.evaluate else 10**6
    options = f"-data MNIST -m DNN -algo FedAvg -gr {task.rounds - 1} -eg {gap} -t 1"
    options += f" -nc {len(task.train)} -lbs {task.batch} -lr {task.lr} -dev cpu"
    sys.argv = ["main.py", *options.split(), "-ls", str(task.epochs)]
    runpy.run_path(str(Path(sys.path[0], "main.py")), run_name="__main__")
    model: nn.Module = servers[0].global_model
    return model


def play_flbench(task: Task, clock: Clock, checkout: str | None) -> nn.Module:
    """The model after the rounds of FL-bench's main.py."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("src.server.fedavg")
    datasets = importlib.import_module("data.utils.datasets")
    decoupled = importlib.import_module("src.utils.models").DecoupledModel
    folder = Path("data/mnist")
    folder.mkdir(parents=True)
    (folder / "args.json").write_text('{"split": "sample"}')
    ids = [*task.clients]
    indices = []
    for i in ids:
        index = {"train": task.train[i].tolist(), "test": task.test[i].tolist()}
        indices.append({**index, "val": []})
    separation = {"train": ids, "val": ids, "test": ids, "total": len(ids)}
    partition = {"separation": separation, "data_indices": indices}
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    module.FLBENCH_ROOT = Path.cwd()  # type: ignore[attr-defined]
    servers = []

    class Samples(datasets.BaseDataset):  # type: ignore[misc, name-defined]
        def _rescale_data(self) -> None:
            """Leaves the numbers: it divides those above 1 by 255, in place."""

    class PlayerServer(module.FedAvgServer):  # type: ignore[misc, name-defined]
        def get_dataset(self) -> Any:
            servers.append(self)
            return Samples(task.x, task.y, [*range(CLASSES)])

        def init_model(self, *_: Any) -> None:
            model = decoupled()
            model.base = task.model
            model.classifier = nn.Identity()
            super().init_model(model)

        def display_metrics(self) -> None:
            super().display_metrics()
            clock.tick()

    place = sys.modules["src.server.player"] = ModuleType("src.server.player")
    place.PlayerServer = PlayerServer  # type: ignore[attr-defined]
    every = 1 if task.evaluate else -1
    options = f"common.test.client.interval={every} common.batch_size={task.batch}"
    options += f" common.global_epoch={task.rounds} common.local_epoch={task.epochs}"
    options += " common.join_ratio=1.0 common.client_side_evaluation=false"
    options += f" common.use_cuda=false optimizer.lr={task.lr} dataset.name=mnist"
    sys.argv = ["main.py", "method=player", *options.split()]
    runpy.run_path(str(Path(checkout or "", "main.py")), run_name="__main__")
    model: nn.Module = servers[0].model.base
    return model


def play_fluke(task: Task, clock: Clock, checkout: str | None) -> nn.Module:
    """The model after fluke's rounds, each client's test set at its server."""
    torch.set_num_threads(1)
    if checkout:
        sys.path.insert(0, checkout)
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import FastDataLoader
    from fluke.evaluation import ClassificationEval
    from fluke.utils import FederationObserver

    class Splitter:
        def assign(self, *_: Any) -> Any:
            return (loaders("train"), [None] * len(task.test)), loaders("test")

    class Ends(FederationObserver):  # type: ignore[misc]
        def end_round(self, round: int) -> None:
            clock.tick()

    def loaders(split: str) -> list[Any]:
        options = {"num_labels": CLASSES, "batch_size": task.batch, "shuffle": True}
        pairs = [task.client(i, split) for i in task.clients]
        return [FastDataLoader(*pair, **options) for pair in pairs]

    FlukeENV().set_evaluator(ClassificationEval(eval_every=1, n_classes=CLASSES))
    FlukeENV().set_eval_cfg(server=task.evaluate)
    client = {
        "batch_size": task.batch,
        "local_epochs": task.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"lr": task.lr, "momentum": 0.0, "weight_decay": 0.0},
        "scheduler": {"gamma": 1, "step_size": 1},
    }
    options = {"client": client, "server": {"weighted": True}, "model": task.model}
    algorithm = FedAVG(len(task.train), Splitter(), DDict(options))
    algorithm.set_callbacks([Ends()])
    algorithm.run(task.rounds, 1.0)
    model: nn.Module = algorithm.server.model
    return model


PLAYERS = {
    "pflcore": play_pflcore,
    "plain loop": play_plain_loop,
    "flwr": play_flower,
    "PFLlib": play_pfllib,
    "FL-bench": play_flbench,
    "fluke": play_fluke,
}


def main() -> None:
    """Plays the rounds of the program that the words of this process name."""
    program, folder, *checkouts = sys.argv[1:]
    os.chdir(folder)
    task = task_of(FILE)
    clock = Clock(task.rounds)
    result = Path("result.json").resolve()
    checkout = checkouts[0] if checkouts else None
    try:
        model = PLAYERS[program](task, clock, checkout).eval()
    except ImportError as error:
        result.write_text(json.dumps({"absent": str(error)}))
        return
    accuracies = [scored(model, *task.client(i, "test"))[1] for i in task.clients]
    facts = {
        "ends": clock.ends,
        "cpu": clock.cpu,
        "megabytes": clock.megabytes,
        "accuracy": sum(accuracies) / len(accuracies),
    }
    result.write_text(json.dumps(facts))
