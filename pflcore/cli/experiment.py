"""An experiment by names: the federation, the model and the runs that `pflcore run` and `pflcore
compare` play."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from pflcore.algorithms import ALGORITHMS, Algorithm
from pflcore.algorithms.lookup import algorithm_of, class_of, imported, name_of, narrowed
from pflcore.check import (
    Count,
    Fraction,
    Momentum,
    Positive,
    Seed32,
    Whole,
    check_fields,
    device_of,
)
from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, Federation, federation_of, options_of
from pflcore.nn.models import MODELS, model_for
from pflcore.simulation import (
    Evaluation,
    Hardware,
    History,
    Robustness,
    Simulation,
    for_everyone,
)
from pflcore.simulation.attacks import Adversary, Attack
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training
from pflcore.train.net import Net

FAR = 100  # times as much as another column


@dataclass(frozen=True)
class Options:
    """What is run, on what and how long."""

    data: str = "mnist5k"  # data set by name
    partition: str | None = None  # how it is cut among the clients; A if not said
    n: Count | None = None  # clients; 10 if not said, all where the data brings them
    # model by name; auto: lenet5 for images it fits, linear for vectors, else mlp
    model: str = "auto"
    # cross_entropy, squared, half_squared, hinge or binary_cross_entropy; auto: by the labels
    criterion: str = "auto"
    rounds: Whole = 50  # rounds of each run
    participation: Fraction = 1.0  # fraction of the clients in a round
    # the client to personalize for, whose accuracy is reported; all: each in a run of its own
    target: int | Literal["all"] | None = None
    seed: int = 0  # of the weights, the batches and the cohorts
    # so many runs, with seed, seed + 1, ...; the cut of the data stays that of --data-seed
    seeds: Count = 1
    data_seed: Seed32 = 0  # of the cut of the data
    train_samples: Count | None = None  # use so many of the training pool only
    test_samples: Count | None = None  # use so many of the test pool only
    # data with clients: features by each client's training statistics; school and vehicle if not
    # said
    standardize: bool | None = None
    val: Momentum = 0.0  # fraction of each client's training samples kept for validation
    eval_split: str = "test"  # what is evaluated: test, or val to choose hyper-parameters
    eval_every: Whole = 1  # rounds between evaluations of all clients
    engine: str = "auto"  # chain, loop, vmap, or auto by the model
    workers: int | None = None  # threads; never changes a result
    device: str = "cpu"  # cpu or cuda
    clip: Positive | None = None  # no client's update is longer than this (Euclidean norm)
    poison: Attack | None = None  # what the bad clients do; the others are evaluated
    bad: tuple[int, ...] | None = None  # the clients that do it
    poison_strength: float | None = None  # how far it goes; each attack has a default
    # batch norm's running statistics: average, local, or auto, as the method has it
    buffers: str = "auto"
    # of each client beside loss and accuracy: auc, f1, balanced_accuracy; for targets mae, rmse, r2
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def hardware(self) -> Hardware:
        """Where it runs. ValueError for what is none."""
        return Hardware(self.engine, self.workers, self.device)  # type: ignore


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
    options = options_of(name)
    return Choice(name, PARTITIONS[name].rule, options)


def model_of(name: str) -> Choice | None:
    """The model and what it takes beside shape and classes; None for "auto"."""
    if name == "auto" or ":" in name:
        return None
    if name not in MODELS:
        raise ValueError(
            f"model: expected one of auto, {', '.join(MODELS)}, or 'package.module:function' for "
            f"one of your own, got {name!r}."
        )
    own = inspect.signature(MODELS[name]).parameters.values()
    return Choice(name, MODELS[name], {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY})


def federation(options: Options, cut: Mapping[str, Any] | None = None) -> Federation:
    """The data of an experiment; `cut` holds the partition's own options. ValueError, ImportError
    or OSError in one sentence."""
    more: dict[str, Any] = (
        {} if options.standardize is None else {"standardize": options.standardize}
    ) | dict(cut or {})
    data = federation_of(
        options.data,
        options.partition,
        options.n,
        options.data_seed,
        train_samples=options.train_samples,
        test_samples=options.test_samples,
        **more,
    )
    if (
        options.criterion in ("squared", "half_squared")
        and options.data.startswith("folder:")
        and data.classes is not None
    ):
        data = replace(data, y=data.y.float(), classes=None)
    if options.standardize is None and options.data.startswith("folder:") and len(data.shape) == 1:
        size = data.x.std(0)[data.x.std(0) > 0]
        if len(size) and float(size.max() / size.min()) > FAR:
            warnings.warn(
                f"data: columns of {data.name} vary by 1 and by {size.max() / size.min():.0f}; "
                "scale them by --standardize.",
                stacklevel=2,
            )
    if options.val:
        data = data.split(val=options.val, seed=options.data_seed)
    if isinstance(options.target, int) and not 0 <= options.target < data.n:
        raise ValueError(f"target: expected a client from 0 to {data.n - 1}, got {options.target}.")
    return data


def model(
    options: Options, data: Federation, own: Mapping[str, Any] | None = None
) -> Callable[[], nn.Module]:
    """A function that makes the experiment's model for this data's shape and classes; `own` holds
    the model's own options."""
    check_criterion(options.criterion, data)
    name, classes = (
        model_name(options, data),
        None if options.criterion == "hinge" else data.classes,
    )

    def make() -> nn.Module:
        made = (
            imported(name, "model")()
            if ":" in name
            else model_for(name, data.shape, classes, **(own or {}))
        )
        return made.to(data.x.dtype) if data.x.dtype == torch.float64 else made

    make()  # so that a shape that does not fit is said now
    return make


def check_criterion(criterion: str, data: Federation) -> None:
    """Whether the data's targets are what the criterion takes: labels or numbers."""
    labels = not data.y.is_floating_point()
    if labels and criterion in ("squared", "half_squared"):
        raise ValueError(
            f"criterion: {data.name} has labels, and {criterion} compares numbers; use "
            "cross_entropy."
        )
    if not labels and criterion in ("cross_entropy", "hinge"):
        raise ValueError(
            f"criterion: the targets of {data.name} are numbers, and {criterion} takes labels; use "
            "squared."
        )
    if data.y.dim() > 1 and data.y[0].numel() > 1:
        shape = list(data.y.shape[1:])
        raise ValueError(
            f"data: {data.name} has targets of shape {shape}, and the models here have one output "
            "for each; use Simulation."
        )


def adversary(options: Options) -> Adversary | None:
    """The bad clients of an experiment."""
    if options.poison is None and options.bad is None and options.poison_strength is None:
        return None
    if options.poison is None or not options.bad:
        raise ValueError(
            "poison: expected an attack and, with --bad, the clients that do it, got "
            f"{options.poison} by {options.bad}."
        )
    return Adversary(options.poison, options.bad, options.poison_strength)


def net(options: Options, data: Federation, make: Callable[[], nn.Module]) -> Net:
    """The model as rows, with its loss, drawn by the run's seed."""
    by_labels = "squared" if data.y.is_floating_point() else "cross_entropy"
    return Net(
        make, by_labels if options.criterion == "auto" else options.criterion, seed=options.seed
    )


def model_name(options: Options, data: Federation) -> str:
    """The model of "auto": lenet5 for 28 x 28 and 32 x 32 images, linear for vectors,
    else mlp."""
    if options.model != "auto":
        return options.model
    return (
        "lenet5"
        if tuple(data.shape[1:]) in ((28, 28), (32, 32))
        else "linear"
        if len(data.shape) == 1
        else "mlp"
    )


def algorithm(
    name: str, hyper: Mapping[str, Any] | None = None, target: int | Literal["all"] | None = None
) -> Algorithm:
    """An algorithm by name or "package.module:Class". `target` is given to those that personalize
    for one client ("all": the first)."""
    cls = class_of(name)
    given = dict(hyper or {})
    unknown = sorted(set(given) - {f.name for f in fields(cls)})
    if unknown:
        known = ", ".join(f.name for f in fields(cls) if f.name not in narrowed(cls))
        raise ValueError(
            f"{name}: expected options among {known or 'none'}, got {', '.join(unknown)}."
        )
    if target is not None and any(f.name == "target" for f in fields(cls)):
        given["target"] = 0 if target == "all" else target
    return algorithm_of(cls, **given)


@dataclass(frozen=True)
class Job:
    """One run of an experiment."""

    algorithm: str
    options: Options
    training: Training
    hyper: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{name_of(self.algorithm)}, seed {self.options.seed}"

    @property
    def for_each(self) -> bool:
        """Whether it is a run for each client: `target` is "all", and the algorithm makes its model
        for one."""
        return self.options.target == "all" and any(
            f.name == "target" for f in fields(class_of(self.algorithm))
        )

    def length(self, n: int) -> int:
        """The rounds that it plays on n clients, those of all runs."""
        return self.options.rounds * (n if self.for_each else 1)

    def simulation(
        self,
        data: Federation,
        model: Callable[[], nn.Module],
        reported: torch.Tensor | None = None,
        **more: Any,
    ) -> Simulation:
        """Its simulation, with `for_each` that of the first client;
        `reported` are evaluated, `more` are options that only Python can set: who may take part."""
        o, common = self.options, self._common
        if reported is not None:
            common["evaluation"] = replace(common["evaluation"], clients=reported)
        made, start = algorithm(self.algorithm, self.hyper, o.target), net(o, data, model)
        return Simulation(made, start, data, self.training, **common, **more)

    def play(
        self,
        simulation: Simulation,
        model: Callable[[], nn.Module],
        on_round: Callable[[int, dict[str, Any]], None],
        checkpoint: Checkpoint | None = None,
    ) -> History:
        """Runs it, each client's run after the other where it is `for_each`; `on_round` sees every
        round played."""
        if not self.for_each:
            return simulation.run(on_round, checkpoint)
        assert isinstance(simulation.algorithm, Algorithm)
        return for_everyone(
            simulation.algorithm,
            net(self.options, simulation.data, model),
            simulation.data,
            self.training,
            on_round=lambda _, r, record: on_round(r, record),
            checkpoint=checkpoint,
            **self._common,
        )

    @property
    def _common(self) -> dict[str, Any]:
        """The options that are the simulation's own."""
        o = self.options
        return {
            "rounds": o.rounds,
            "participation": o.participation,
            "seed": o.seed,
            "evaluation": Evaluation(o.eval_every, o.eval_split, metrics=o.metrics),
            "robustness": Robustness(o.clip, adversary(o)),
            "hardware": o.hardware,
            "batch_norm": o.buffers,
        }

    def header(self, simulation: Simulation) -> dict[str, Any]:
        """The simulation's header, with the names that the experiment was asked for by."""
        head, o = simulation.header(), self.options
        cut = partition_of(o.data, o.partition)
        names = {
            "data": o.data,
            "partition": cut.name if cut else None,
            "model": model_name(o, simulation.data),
        }
        names |= {k: getattr(o, k) for k in ("data_seed", "train_samples", "test_samples", "val")}
        made_for = head["target"]  # whom the algorithm makes its one model for, if it does
        if self.for_each:
            head["options"] |= {"target": "each client"}
            target, made_for = None, "each client"
        else:
            target = o.target if isinstance(o.target, int) else made_for
        return {**head, **names, "criterion": o.criterion, "target": target, "made_for": made_for}


def described(
    todo: Sequence[Job], cut: Mapping[str, Any], shape: Mapping[str, Any]
) -> dict[str, Any]:
    """What some jobs compute, but for where: two descriptions that are equal give the same
    numbers."""
    options = {
        k: v for k, v in asdict(todo[0].options).items() if k not in ("device", "engine", "workers")
    }
    hyper = {job.name: dict(job.hyper) for job in todo}
    own = {"partition_options": dict(cut), "model_options": dict(shape), "options": hyper}
    return {"runs": list(hyper), **options, "training": asdict(todo[0].training), **own}


def jobs(
    algorithms: Sequence[str],
    options: Options,
    training: Training,
    hyper: Mapping[str, Mapping[str, Any]],
) -> list[Job]:
    """One job per algorithm and seed, every hyper-parameter checked. ValueError in one sentence."""
    if not algorithms:
        raise ValueError(f"algorithms: expected at least one of {', '.join(ALGORITHMS)}, got none.")
    options.hardware  # noqa: B018  (what is wrong is said now)
    adversary(options)
    device_of(options.device)
    for name in algorithms:
        algorithm(name, hyper.get(name), options.target)
    seeds = range(options.seed, options.seed + options.seeds)
    return [
        Job(name, replace(options, seed=s), training, hyper.get(name, {}))
        for name in dict.fromkeys(algorithms)
        for s in seeds
    ]
