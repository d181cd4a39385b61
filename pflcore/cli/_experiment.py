"""An experiment by names: the federation, the model and the runs that `pflcore run` and
`pflcore compare` play."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from pflcore.algorithms import (
    ALGORITHMS,
    Algorithm,
    algorithm_of,
    class_of,
    import_object,
    name_of,
)
from pflcore.check import (
    Fraction,
    Momentum,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed32,
    checked,
    device_of,
    reject,
    require,
)
from pflcore.data import PARTITIONS, SOURCES, Federation, federation_of
from pflcore.data._natural import READERS
from pflcore.data._partition import options_of
from pflcore.nn.models import MODELS, model_for
from pflcore.results.record import DATA_FIELDS, Facts, Line, OnRound
from pflcore.simulation import (
    Evaluation,
    Hardware,
    History,
    Robustness,
    Simulation,
    run_each_target,
)
from pflcore.simulation._settings import Adversary, Attack
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training
from pflcore.train._net import Net


@checked
@dataclass(frozen=True)
class Options:
    """What is run, on what and how long."""

    # data set by name, or leaf:PATH or folder:PATH
    data: str = "mnist5k"
    partition: str | None = None  # how it is cut among the clients; A if not said
    # clients; 10 if not said, all where the data brings them
    n: PositiveInt | None = None
    # model by name, or package.module:function; auto: lenet5 for images it fits, linear
    # for vectors, else mlp
    model: str = "auto"
    # cross_entropy, squared, half_squared, hinge or binary_cross_entropy; auto: by the
    # labels
    loss: str = "auto"
    rounds: NonNegativeInt = 50  # rounds of each run
    participation: Fraction = 1.0  # fraction of the clients in a round
    # the client to personalize for, whose accuracy is reported; all: each in a run of
    # its own
    target: int | Literal["all"] | None = None
    seed: int = 0  # of the weights, the batches and the cohorts
    # so many runs, with seed, seed + 1, ...; the cut of the data stays that of
    # --data-seed
    seeds: PositiveInt = 1
    data_seed: Seed32 = 0  # of the cut of the data
    train_samples: PositiveInt | None = None  # use so many of the training pool only
    test_samples: PositiveInt | None = None  # use so many of the test pool only
    # data with clients: features by each client's training statistics; school and
    # vehicle if not said
    standardize: bool | None = None
    # fraction of each client's training samples kept for validation
    val: Momentum = 0.0
    # what is evaluated: test, or val to choose hyper-parameters
    eval_split: str = "test"
    eval_every: NonNegativeInt = 1  # rounds between evaluations of all clients
    engine: str = "auto"  # chain, loop, vmap, or auto by the model
    workers: int | None = None  # threads; never changes a result
    device: str = "cpu"  # cpu or cuda
    # clients that train at once under vmap, at most; another number changes last
    # digits; 64 on a CPU, 128 on a GPU
    clients_per_block: PositiveInt | None = None
    graphs: bool = True  # on a GPU: capture local steps as CUDA graphs
    # no client's update is longer than this (Euclidean norm)
    clip: PositiveFloat | None = None
    attack: Attack | None = None  # what the bad clients do; the others are evaluated
    attack_clients: tuple[int, ...] | None = None  # the clients that do it
    attack_strength: float | None = None  # how far it goes; each attack has a default
    # batch norm's running statistics: average, local, or auto, as the method has it
    batch_norm: str = "auto"
    # of each client beside loss and accuracy: auc, f1, balanced_accuracy; for targets
    # mae, rmse, r2
    metrics: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware:
        """Where it runs. ValueError for what is none."""
        device = device_of(self.device)
        more = {"clients_per_block": self.clients_per_block, "graphs": self.graphs}
        return Hardware(self.engine, self.workers, device, **more)  # type: ignore

    @property
    def robustness(self) -> Robustness:
        """The longest update, and the bad clients. ValueError where they are said by
        half."""
        if (self.attack, self.attack_clients, self.attack_strength) == (
            None,
            None,
            None,
        ):
            return Robustness(self.clip)
        if self.attack is None or not self.attack_clients:
            words = "an attack and, with --attack-clients, the clients that do it"
            reject("attack", words, (self.attack, self.attack_clients))
        return Robustness(
            self.clip, Adversary(self.attack, self.attack_clients, self.attack_strength)
        )


class NamedFunction(NamedTuple):
    """A function chosen by name, with the defaults of its own options."""

    name: str
    function: Callable[..., Any]
    defaults: Line


def partition_of(data: str, partition: str | None) -> NamedFunction | None:
    """The partition and what it takes; None for data that come with their clients."""
    if data not in SOURCES:
        return None
    name = partition or "A"
    defaults = options_of(name)
    return NamedFunction(name, PARTITIONS[name].rule, defaults)


def reader_of(data: str) -> NamedFunction | None:
    """The reader of somebody's own files and what it takes; None for data by name."""
    kind, _, path = data.partition(":")
    if kind not in READERS or not path:
        return None
    defaults = {"target": -1, "classes": "infer"}
    own = inspect.signature(READERS[kind]).parameters
    return NamedFunction(
        kind, READERS[kind], {k: v for k, v in defaults.items() if k in own}
    )


def model_of(name: str) -> NamedFunction | None:
    """The model and what it takes beside shape and classes; None for "auto" and for
    one's own."""
    if name == "auto" or ":" in name:
        return None
    own = "or 'package.module:function' for one of your own"
    words = f"one of auto, {', '.join(MODELS)}, {own}"
    require(name in MODELS, "model", words, name, ["auto", *MODELS])
    keywords = inspect.signature(MODELS[name]).parameters.values()
    defaults = {p.name: p.default for p in keywords if p.kind is p.KEYWORD_ONLY}
    return NamedFunction(name, MODELS[name], defaults)


def load_federation(options: Options, cut: Facts | None = None) -> Federation:
    """The data of an experiment; `cut` holds the partition's or the reader's own
    options. ValueError, ImportError or OSError in one sentence."""
    o = options
    more = dict(cut or {})
    if o.standardize is not None:
        more = {"standardize": o.standardize, **more}
    more |= {"train_samples": o.train_samples, "test_samples": o.test_samples}
    if reader_of(o.data) and o.loss in ("squared", "half_squared"):
        more.setdefault("classes", None)  # whole numbers may be targets
    data = federation_of(o.data, o.partition, o.n, o.data_seed, **more)
    if ":" not in o.model and not data.x.is_floating_point():
        # models by name have no embedding: to them whole numbers are features
        data = replace(data, x=data.x.float())
    if o.val:
        data = data.split(val=o.val, seed=o.data_seed)
    there = not isinstance(o.target, int) or 0 <= o.target < data.n
    require(there, "target", f"a client from 0 to {data.n - 1}", o.target)
    return data


def make_model(
    options: Options, data: Federation, own: Facts | None = None
) -> Callable[[], nn.Module]:
    """A function that makes the experiment's model for this data's shape and classes;
    `own` holds the model's own options. ValueError where the shape does not fit."""
    name = model_name(options, data)
    classes = None if options.loss == "hinge" else data.classes

    def make() -> nn.Module:
        if ":" in name:
            made: nn.Module = import_object(name, "model")()
        else:
            made = model_for(name, data.shape, classes, **(own or {}))
        return made.to(data.x.dtype) if data.x.dtype == torch.float64 else made

    make()
    return make


def model_name(options: Options, data: Federation) -> str:
    """The model of "auto": lenet5 for 28 x 28 and 32 x 32 images, linear for vectors,
    else mlp."""
    if options.model != "auto":
        return options.model
    if tuple(data.shape[1:]) in ((28, 28), (32, 32)):
        return "lenet5"
    return "linear" if len(data.shape) == 1 else "mlp"


def make_net(options: Options, data: Federation, make: Callable[[], nn.Module]) -> Net:
    """The model as rows, with its loss, drawn by the run's seed."""
    criterion = options.loss
    if criterion == "auto":
        criterion = "squared" if data.y.is_floating_point() else "cross_entropy"
    return Net(make, criterion, seed=options.seed)


def has_target(name: str) -> bool:
    """Whether the algorithm makes its model for one client."""
    return any(f.name == "target" for f in fields(class_of(name)))


def make_algorithm(
    name: str, hyper: Facts | None = None, target: int | Literal["all"] | None = None
) -> Algorithm:
    """An algorithm by name or "package.module:Class". `target` is given to those that
    personalize for one client ("all": the first)."""
    cls = class_of(name)
    given = dict(hyper or {})
    if target is not None and has_target(name):
        given["target"] = 0 if target == "all" else target
    return algorithm_of(cls, **given)


@dataclass(frozen=True)
class Job:
    """One run of an experiment."""

    algorithm: str
    options: Options
    training: Training
    algorithm_options: Facts

    @property
    def name(self) -> str:
        return f"{name_of(self.algorithm)}, seed {self.options.seed}"

    @property
    def for_each(self) -> bool:
        """Whether it is a run for each client: `target` is "all", and the algorithm
        has one."""
        return self.options.target == "all" and has_target(self.algorithm)

    def num_rounds(self, n: int) -> int:
        """The rounds that it plays on n clients, those of all runs."""
        return self.options.rounds * (n if self.for_each else 1)

    def simulation(
        self,
        data: Federation,
        model: Callable[[], nn.Module],
        reported: torch.Tensor | None = None,
        **more: Any,
    ) -> Simulation:
        """Its simulation, with `for_each` that of the first client; `reported` are
        evaluated, `more` are options that only Python can set: who may take part."""
        made = make_algorithm(
            self.algorithm, self.algorithm_options, self.options.target
        )
        start = make_net(self.options, data, model)
        common = self._common(reported)
        return Simulation(made, start, data, self.training, **common, **more)

    def play(
        self,
        simulation: Simulation,
        data: Federation,
        on_round: OnRound,
        checkpoint: Checkpoint | None = None,
    ) -> History:
        """Runs it, each client's run after the other where it is `for_each`, on `data`
        as they were given to `simulation`; `on_round` sees every round played."""
        if not self.for_each:
            return simulation.run(on_round, checkpoint)
        return run_each_target(
            simulation.algorithm,
            simulation.model,
            data,
            self.training,
            on_round=lambda _, r, record: on_round(r, record),
            checkpoint=checkpoint,
            **self._common(),
        )

    def _common(self, reported: torch.Tensor | None = None) -> Line:
        """The options that are the simulation's own."""
        o = self.options
        return {
            "rounds": o.rounds,
            "participation": o.participation,
            "seed": o.seed,
            "evaluation": Evaluation(
                o.eval_every, o.eval_split, reported, metrics=o.metrics
            ),
            "robustness": o.robustness,
            "hardware": o.hardware,
            "batch_norm": o.batch_norm,
        }

    def header(self, simulation: Simulation) -> Line:
        """The simulation's header, with the names that the experiment was asked for
        by."""
        head = simulation.header()
        o = self.options
        cut = partition_of(o.data, o.partition)
        asked = {k: getattr(o, k) for k in ("data", "loss", *DATA_FIELDS)}
        names = {"partition": cut and cut.name, "model": model_name(o, simulation.data)}
        # whom the algorithm makes its one model for, if it does
        made_for = head["target"]
        target = o.target if isinstance(o.target, int) else made_for
        if self.for_each:
            head["options"] |= {"target": "each client"}
            target = None
            made_for = "each client"
        return {**head, **asked, **names, "target": target, "model_target": made_for}


def describe_jobs(todo: Sequence[Job], cut: Facts, shape: Facts) -> Line:
    """What some jobs compute, but for where: two descriptions that are equal give the
    same numbers."""
    options = asdict(todo[0].options)
    for where in ("device", "engine", "workers", "clients_per_block", "graphs"):
        del options[where]
    hyper = {job.name: dict(job.algorithm_options) for job in todo}
    own = {
        "partition_options": dict(cut),
        "model_options": dict(shape),
        "options": hyper,
    }
    return {"runs": [*hyper], **options, "training": asdict(todo[0].training), **own}


def make_jobs(
    algorithms: Sequence[str],
    options: Options,
    training: Training,
    hyper: Mapping[str, Facts],
) -> list[Job]:
    """One job per algorithm and seed, every hyper-parameter checked. ValueError in
    one sentence."""
    require(algorithms, "algorithms", f"at least one of {', '.join(ALGORITHMS)}", None)
    options.hardware, options.robustness  # noqa: B018  (what is wrong is said now)
    for name in algorithms:
        make_algorithm(name, hyper.get(name), options.target)
    seeds = range(options.seed, options.seed + options.seeds)
    return [
        Job(name, replace(options, seed=s), training, hyper.get(name, {}))
        for name in dict.fromkeys(algorithms)
        for s in seeds
    ]
