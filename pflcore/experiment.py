"""An experiment by names: the federation, the model and the runs that `pflcore run` and `pflcore compare` stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import nn

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg
from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, Federation, federation_of, options_of
from pflcore.local import Training
from pflcore.local.net import Net
from pflcore.models import MODELS, model_for
from pflcore.simulation import Simulation


@dataclass(frozen=True)
class Options:
    """What is run, on what and how long."""

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
    val: float = 0.0  # fraction of each client's training samples kept for validation
    eval_split: str = "test"  # what is evaluated: test, or val to choose hyper-parameters
    eval_every: int = 1  # rounds between evaluations of all clients
    engine: str = "auto"  # threads, vmap, or auto by the model
    workers: int | None = None  # threads; never changes a result
    device: str = "cpu"  # cpu or cuda
    buffers: str = "local"  # batch norm's running statistics: local or average


def choices() -> dict[str, str]:
    """The names that an option takes, for its help."""
    return {
        "data": ", ".join([*SOURCES, *FEDERATIONS, "leaf:PATH", "folder:PATH"]),
        "partition": ", ".join(PARTITIONS),
        "model": ", ".join(MODELS),
    }


class Choice(NamedTuple):
    """Something chosen by name, with what it takes."""

    name: str
    function: Callable[..., Any]
    defaults: dict[str, Any]


def partition_of(data: str, partition: str | None) -> Choice | None:
    """The partition and what it takes; None for data that come with their clients."""
    if data not in SOURCES:
        return None
    name = partition or "A"
    return Choice(name, PARTITIONS.get(name, options_of), options_of(name))


def model_of(name: str) -> Choice | None:
    """The model and what it takes beside shape and classes; None for "auto"."""
    if name == "auto":
        return None
    if name not in MODELS:
        raise ValueError(f"model: expected one of auto, {', '.join(MODELS)}, got {name!r}.")
    own = inspect.signature(MODELS[name]).parameters.values()
    return Choice(name, MODELS[name], {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY})


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
    if not 0 <= options.val < 1:
        raise ValueError(f"val: expected a fraction in [0, 1), got {options.val}.")
    if options.val:
        data = data.split_samples({"train": 1 - options.val, "val": options.val}, options.data_seed, pool=("train",))
    if options.target is not None and not 0 <= options.target < data.n:
        raise ValueError(f"target: expected a client from 0 to {data.n - 1}, got {options.target}.")
    return data


def model(options: Options, data: Federation, own: Mapping[str, Any] | None = None) -> Callable[[], nn.Module]:
    """A function that makes the experiment's model for this data's shape and classes; `own` holds the model's own options."""
    name, classes = model_name(options, data), None if options.criterion == "hinge" else data.classes

    def make() -> nn.Module:
        return model_for(name, data.shape, classes, **(own or {}))

    make()  # so that a shape that does not fit is said now
    return make


def model_name(options: Options, data: Federation) -> str:
    """The model that "auto" stands for: lenet5 for 28 x 28 and 32 x 32 images, linear for vectors, else mlp."""
    if options.model != "auto":
        return options.model
    return "lenet5" if tuple(data.shape[1:]) in ((28, 28), (32, 32)) else "linear" if len(data.shape) == 1 else "mlp"


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
            eval_split=o.eval_split,
        )

    def header(self, simulation: Simulation) -> dict[str, Any]:
        """The simulation's header, with the names that the experiment was asked for by."""
        head, o = simulation.header(), self.options
        cut = partition_of(o.data, o.partition)
        names = {"data": o.data, "partition": cut.name if cut else None, "model": model_name(o, simulation.data)}
        made_for = head["target"]  # whom the algorithm makes its one model for, if it does
        return {**head, **names, "criterion": o.criterion, "target": made_for if o.target is None else o.target, "made_for": made_for}


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
