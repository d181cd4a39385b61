"""The parts of an experiment, made from the names that the command line has for them.

They are the federation, the model and the jobs: the runs of `pflcore run` and
`pflcore compare`. "Cut" is the options of the partition, or of the reader of files, and
"shape" those of the model.
"""

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
from pflcore.simulation._attacks import Adversary, Attack
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training
from pflcore.train._net import Net


@checked
@dataclass(frozen=True)
class Options:
    """The data, the model and the length of the runs, and how they are computed."""

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
        """The hardware that a run uses; raises ValueError where it is not there."""
        return Hardware(
            self.engine,  # type: ignore[arg-type]
            self.workers,
            device_of(self.device),
            clients_per_block=self.clients_per_block,
            graphs=self.graphs,
        )

    @property
    def robustness(self) -> Robustness:
        """The longest update, and the bad clients.

        Raises ValueError where only a part of the attack's options is given.
        """
        options = (self.attack, self.attack_clients, self.attack_strength)
        if options == (None, None, None):
            return Robustness(self.clip)
        if self.attack is None or not self.attack_clients:
            words = "an attack and, with --attack-clients, the clients that do it"
            reject("attack", words, (self.attack, self.attack_clients))
        adversary = Adversary(self.attack, self.attack_clients, self.attack_strength)
        return Robustness(self.clip, adversary)


class NamedFunction(NamedTuple):
    """A function that an option names, with the defaults of its own options."""

    name: str
    function: Callable[..., Any]
    defaults: Line


def partition_of(data: str, partition: str | None) -> NamedFunction | None:
    """The partition of this name; None for data that come with their clients."""
    if data not in SOURCES:
        return None
    name = partition or "A"
    defaults = options_of(name)
    return NamedFunction(name, PARTITIONS[name].rule, defaults)


def reader_of(data: str) -> NamedFunction | None:
    """The reader of a user's files, as in "leaf:PATH"; None for data by name."""
    kind, _, path = data.partition(":")
    if kind not in READERS or not path:
        return None
    parameters = inspect.signature(READERS[kind]).parameters
    defaults = {"target": -1, "classes": "infer"}
    defaults = {k: v for k, v in defaults.items() if k in parameters}
    return NamedFunction(kind, READERS[kind], defaults)


def model_of(name: str) -> NamedFunction | None:
    """The model of this name; None for "auto" and for a user's own model.

    Its options are those beside the data's shape and classes.
    """
    if name == "auto" or ":" in name:
        return None
    own_model = "or 'package.module:function' for one of your own"
    words = f"one of auto, {', '.join(MODELS)}, {own_model}"
    require(name in MODELS, "model", words, name, ["auto", *MODELS])
    parameters = inspect.signature(MODELS[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return NamedFunction(name, MODELS[name], defaults)


def load_federation(options: Options, cut: Facts | None = None) -> Federation:
    """The data of an experiment.

    Raises ValueError, ImportError or OSError where they cannot be made.

    Args:
        cut: The options of the partition, or of the reader of files.
    """
    o = options
    more = dict(cut or {})
    if o.standardize is not None:
        more.setdefault("standardize", o.standardize)
    more["train_samples"] = o.train_samples
    more["test_samples"] = o.test_samples
    if reader_of(o.data) and o.loss in ("squared", "half_squared"):
        # These losses take targets, which may be whole numbers, and not labels.
        more.setdefault("classes", None)
    data = federation_of(o.data, o.partition, o.n, o.data_seed, **more)
    if ":" not in o.model and not data.x.is_floating_point():
        # No model by name has an embedding, so whole numbers are features.
        data = replace(data, x=data.x.float())
    if o.val:
        data = data.split(val=o.val, seed=o.data_seed)
    is_there = not isinstance(o.target, int) or 0 <= o.target < data.n
    require(is_there, "target", f"a client from 0 to {data.n - 1}", o.target)
    return data


def make_model(
    options: Options, data: Federation, own: Facts | None = None
) -> Callable[[], nn.Module]:
    """A function that makes the model for the shape and classes of these data.

    Raises ValueError where no such model fits the shape.

    Args:
        own: The options of the model itself.
    """
    name = model_name(options, data)
    classes = None if options.loss == "hinge" else data.classes

    def make() -> nn.Module:
        if ":" in name:
            model: nn.Module = import_object(name, "model")()
        else:
            model = model_for(name, data.shape, classes, **(own or {}))
        return model.to(data.x.dtype) if data.x.dtype == torch.float64 else model

    make()  # raises the error of a shape that does not fit
    return make


def model_name(options: Options, data: Federation) -> str:
    """The name of the model that `options` choose, which "auto" chooses by the data.

    It is lenet5 for images of 28 x 28 and 32 x 32, linear for vectors, and mlp for
    all others.
    """
    if options.model != "auto":
        return options.model
    if tuple(data.shape[1:]) in ((28, 28), (32, 32)):
        return "lenet5"
    return "linear" if len(data.shape) == 1 else "mlp"


def make_net(options: Options, data: Federation, make: Callable[[], nn.Module]) -> Net:
    """The net of the model and its loss, whose weights the run's seed draws."""
    loss = options.loss
    if loss == "auto":
        loss = "squared" if data.y.is_floating_point() else "cross_entropy"
    return Net(make, loss, seed=options.seed)


def has_target(name: str) -> bool:
    """Whether the algorithm makes its model for a single client."""
    return any(f.name == "target" for f in fields(class_of(name)))


def make_algorithm(
    name: str, hyper: Facts | None = None, target: int | Literal["all"] | None = None
) -> Algorithm:
    """An algorithm by its name or "package.module:Class".

    Args:
        hyper: The algorithm's options.
        target: The client to personalize for, where the algorithm does so for a single
            one. With "all" it is the first, as `Job` plays the others itself.
    """
    options = dict(hyper or {})
    if target is not None and has_target(name):
        options["target"] = 0 if target == "all" else target
    return algorithm_of(class_of(name), **options)


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
        """Whether the job is one run for each client as the target.

        It is so where `target` is "all" and the algorithm has a target.
        """
        return self.options.target == "all" and has_target(self.algorithm)

    def num_rounds(self, n: int) -> int:
        """The rounds of all runs of the job, on a federation of n clients."""
        num_runs = n if self.for_each else 1
        return self.options.rounds * num_runs

    def simulation(
        self,
        data: Federation,
        model: Callable[[], nn.Module],
        reported: torch.Tensor | None = None,
        **more: Any,
    ) -> Simulation:
        """The job's simulation; with `for_each` that of the first client.

        Args:
            reported: The ids of the clients that are evaluated; None for all.
            more: Options that only Python can set, such as who may take part.
        """
        target = self.options.target
        algorithm = make_algorithm(self.algorithm, self.algorithm_options, target)
        net = make_net(self.options, data, model)
        common = self._common(reported)
        return Simulation(algorithm, net, data, self.training, **common, **more)

    def play(
        self,
        simulation: Simulation,
        data: Federation,
        on_round: OnRound,
        checkpoint: Checkpoint | None = None,
    ) -> History:
        """Runs the simulation; with `for_each` one run for each client.

        Args:
            simulation: What `Job.simulation` made for these data.
            on_round: Is called after every round of every run.
        """
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
        """The options that a simulation and `run_each_target` have in common."""
        o = self.options
        evaluation = Evaluation(o.eval_every, o.eval_split, reported, metrics=o.metrics)
        return {
            "rounds": o.rounds,
            "participation": o.participation,
            "seed": o.seed,
            "evaluation": evaluation,
            "robustness": o.robustness,
            "hardware": o.hardware,
            "batch_norm": o.batch_norm,
        }

    def header(self, simulation: Simulation) -> Line:
        """The simulation's header, with the names that options have for its parts."""
        header = simulation.header()
        o = self.options
        for key in ("data", "loss", *DATA_FIELDS):
            header[key] = getattr(o, key)
        partition = partition_of(o.data, o.partition)
        header["partition"] = partition and partition.name
        header["model"] = model_name(o, simulation.data)
        # The client that an algorithm makes its single model for, if it makes one.
        model_target = header["target"]
        target = o.target if isinstance(o.target, int) else model_target
        if self.for_each:
            header["options"] |= {"target": "each client"}
            target = None
            model_target = "each client"
        header["target"] = target
        header["model_target"] = model_target
        return header


def describe_jobs(todo: Sequence[Job], cut: Facts, shape: Facts) -> Line:
    """The facts on which the results of jobs depend.

    Jobs with equal facts give the same numbers, wherever they run.
    """
    options = asdict(todo[0].options)
    for key in ("device", "engine", "workers", "clients_per_block", "graphs"):
        del options[key]
    hyper = {job.name: dict(job.algorithm_options) for job in todo}
    return {
        "runs": [*hyper],
        **options,
        "training": asdict(todo[0].training),
        "partition_options": dict(cut),
        "model_options": dict(shape),
        "options": hyper,
    }


def make_jobs(
    algorithms: Sequence[str],
    options: Options,
    training: Training,
    hyper: Mapping[str, Facts],
) -> list[Job]:
    """One job per algorithm and seed.

    It checks all options, and raises ValueError for the first that is wrong.

    Args:
        hyper: The options of each algorithm, by its name.
    """
    require(algorithms, "algorithms", f"at least one of {', '.join(ALGORITHMS)}", None)
    options.hardware, options.robustness  # noqa: B018  (both raise what is wrong)
    for name in algorithms:
        make_algorithm(name, hyper.get(name), options.target)
    jobs = []
    for name in dict.fromkeys(algorithms):
        for seed in range(options.seed, options.seed + options.seeds):
            of_seed = replace(options, seed=seed)
            jobs.append(Job(name, of_seed, training, hyper.get(name, {})))
    return jobs
