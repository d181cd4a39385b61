"""An experiment by names: the federation, the model and the runs that `pflcore run` and `pflcore compare` stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from pflcore import models
from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg
from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, Federation, federation_of, options_of
from pflcore.flat import Net
from pflcore.local import Training
from pflcore.simulation import Simulation


@dataclass(frozen=True)
class Options:
    """What is run, on what, how long and how it is recorded."""

    data: str = "mnist5k"  # data set by name
    partition: str | None = None  # how it is cut among the clients; A if not said
    n: int | None = None  # clients; 10 if not said, all where the data brings them
    model: str = "auto"  # model by name; auto: lenet5 for images it fits, linear for vectors, else mlp
    criterion: str = "auto"  # cross_entropy, squared or hinge; auto: by the labels
    rounds: int = 50  # rounds of each run
    participation: float = 1.0  # fraction of the clients in a round
    target: int | None = None  # the client to personalize for, whose own accuracy is reported
    seed: int = 0  # of the weights, the batches and the cohorts
    seeds: int = 1  # so many runs, with seed, seed + 1, ...; the cut of the data stays that of --data-seed
    data_seed: int = 0  # of the cut of the data
    train_samples: int | None = None  # use so many of the training pool only
    test_samples: int | None = None  # use so many of the test pool only
    eval_every: int = 1  # rounds between evaluations of all clients
    engine: str = "auto"  # pool, vmap, or auto by model and sizes
    workers: int | None = None  # threads; never changes a result
    device: str = "cpu"  # cpu or cuda
    buffers: str = "local"  # batch norm's running statistics: local or average


def choices() -> dict[str, str]:
    """The names that an option takes, for its help."""
    return {
        "data": ", ".join([*SOURCES, *FEDERATIONS, "leaf:PATH", "folder:PATH"]),
        "partition": ", ".join(PARTITIONS),
        "model": ", ".join(models.MODELS),
    }


def partition_of(data: str, partition: str | None) -> tuple[str | None, dict[str, Any]]:
    """The partition's name and what it takes, with its defaults (None: an optional word or list); nothing for data with clients."""
    if data not in SOURCES:
        return None, {}
    name = partition or "A"
    return name, options_of(name)


def federation(options: Options, cut: Mapping[str, Any] | None = None) -> Federation:
    """The data of an experiment; `cut` holds the partition's own options. ValueError, ImportError or OSError in one sentence."""
    if options.n is not None and options.n < 1:
        raise ValueError(f"n: expected at least 1 client, got {options.n}.")
    data = federation_of(
        options.data,
        options.partition,
        options.n,
        options.data_seed,
        train_samples=options.train_samples,
        test_samples=options.test_samples,
        **(cut or {}),
    )
    if options.target is not None and not 0 <= options.target < data.n:
        raise ValueError(f"target: expected a client from 0 to {data.n - 1}, got {options.target}.")
    return data


def model(options: Options, data: Federation) -> Callable[[], nn.Module]:
    """A function that makes the experiment's model for this data's shape and classes."""
    return models.build(model_name(options, data), data.shape, None if options.criterion == "hinge" else data.classes)


def model_name(options: Options, data: Federation) -> str:
    return models.default(data.shape) if options.model == "auto" else options.model


def algorithm(name: str, hyper: Mapping[str, Any] | None = None, target: int | None = None) -> FedAvg:
    """An algorithm by name. `target` is given to those that personalize for one client."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r}.")
    cls = ALGORITHMS[name]
    given = dict(hyper or {})
    if target is not None and any(f.name == "target" for f in fields(cls)):
        given["target"] = target
    return cls(**given)


@dataclass(frozen=True)
class Job:
    """One run of an experiment."""

    algorithm: str
    options: Options
    training: Training
    hyper: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.algorithm}, seed {self.options.seed}"

    def simulation(self, data: Federation, model: Callable[[], nn.Module]) -> Simulation:
        o = self.options
        return Simulation(
            algorithm(self.algorithm, self.hyper, o.target),
            model if o.criterion == "auto" else Net(model, o.criterion, seed=o.seed),
            data,
            self.training,
            rounds=o.rounds,
            participation=o.participation,
            seed=o.seed,
            engine=o.engine,
            workers=o.workers,
            device=o.device,
            buffers=o.buffers,
            eval_every=o.eval_every,
        )

    def header(self, simulation: Simulation) -> dict[str, Any]:
        """The simulation's header, with the names that the experiment was asked for by."""
        head, o = simulation.header(), self.options
        names = {"data": o.data, "partition": partition_of(o.data, o.partition)[0], "model": model_name(o, simulation.data)}
        return {**head, **names, "criterion": o.criterion, "target": head["target"] if o.target is None else o.target}


def jobs(algorithms: Sequence[str], options: Options, training: Training, hyper: Mapping[str, Mapping[str, Any]]) -> list[Job]:
    """One job per algorithm and seed, every hyper-parameter checked. ValueError in one sentence."""
    if not algorithms:
        raise ValueError(f"algorithms: expected at least one of {', '.join(ALGORITHMS)}, got none.")
    if options.seeds < 1:
        raise ValueError(f"seeds: expected at least 1 run, got {options.seeds}.")
    for name in algorithms:
        algorithm(name, hyper.get(name), options.target)
    seeds = range(options.seed, options.seed + options.seeds)
    return [Job(name, replace(options, seed=s), training, hyper.get(name, {})) for name in dict.fromkeys(algorithms) for s in seeds]
