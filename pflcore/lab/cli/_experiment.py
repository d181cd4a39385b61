"""The parts of an experiment, made from the names that the command line has for them.

The parts are the federation, the model and the jobs. A job is a run of `pflcore run` or
`pflcore compare`.

Words: "cut" are the options of the partition, or of the reader of files; "shape" are
the options of the model. In shapes, N is the number of clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import nn

from pflcore.algorithms import (
    ALGORITHMS,
    Algorithm,
    algorithm_of,
    class_of,
    name_of,
)
from pflcore.check import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed32,
    checked,
    client_id,
    device_of,
    import_object,
    reject,
    require,
    warn_caller,
)
from pflcore.data import PARTITIONS, Federation
from pflcore.data._feature_shift import ShiftName
from pflcore.data._federation import HeldOut
from pflcore.data._partition import options_of
from pflcore.lab.data import FEDERATIONS, SOURCES, federation_of
from pflcore.lab.data._files import READERS
from pflcore.nn.models import MODELS, TEXT_MODELS, model_for
from pflcore.robust import Mean
from pflcore.simulation import (
    Evaluation,
    Hardware,
    History,
    Robustness,
    Simulation,
    run_each_target,
)
from pflcore.simulation._attacks import Adversary, Attack
from pflcore.simulation._per_target import possible_targets
from pflcore.simulation._ranks import ONE_RANK, Ranks, find_ranks
from pflcore.simulation.callbacks import EarlyStopping
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.record import DATA_FIELDS, Facts, Line, OnRound
from pflcore.train import Training
from pflcore.train._losses import default_loss
from pflcore.train._net import Net


@checked
@dataclass(frozen=True)
class Options:
    """The data, the model, the length and the hardware of the runs.

    Args:
        data: data set by name, or folder:PATH, table:FILE or leaf:PATH
        partition: name of the rule that cuts the data among the clients; A if not said
        n: number of clients; 10 if not said, or all clients of data that come with
            their clients
        model: model by name, or package.module:function; auto: lenet5 for images that
            it fits, linear for vectors, else mlp
        loss: cross_entropy, squared, half_squared, hinge or binary_cross_entropy; auto:
            by the labels
        rounds: rounds of each run
        participation: fraction of the clients that take part in a round
        sampling: rule by which the clients of a round are drawn: uniform, poisson
            (each by itself, with the chance participation), size (by their training
            samples), or package.module:function of (round, generator, sizes) that
            returns their ids
        target: the client to personalize for, by number or name, whose accuracy is
            reported; all: each client in a run of its own
        seed: seed of the weights, the batches and the cohorts
        seeds: number of runs, with seed, seed + 1, ...; the cut of the data stays that
            of --data-seed
        data_seed: seed of the cut of the data; each: every run has a cut of its own, by
            its seed, so that a mean over seeds is one over cuts, too
        train_samples: use only this number of samples of the training pool
        test_samples: use only this number of samples of the test pool
        standardize: for data that come with their clients: standardize features by each
            client's training statistics; for school and vehicle only if not said
        feature_shift: rotation, noise or brightness: each client sees its inputs
            turned, noisy or brighter by an amount of its own
        feature_shift_strength: largest angle in degrees, deviation or constant of a
            client; 45, 0.5 and 0.5 if not said
        val: fraction of each client's training samples that is kept for validation
        eval_split: split that is evaluated: test, or val to choose hyper-parameters
        eval_every: rounds between evaluations of all clients
        patience: end a run after this number of evaluations whose mean loss is no
            better than one before; needs --eval-split val
        engine: chain (by the kernels), vmap (all clients at once), loop (one after
            another), or auto by the model
        workers: number of threads; never changes a result
        device: cpu or cuda
        clients_per_block: clients that train at once under vmap, at most; another
            number changes last digits; 64 on a CPU, 128 on a GPU if not said
        graphs: on a GPU: capture local steps as CUDA graphs
        ranks: auto: the processes that torchrun started share the clients; 1: each of
            them plays the whole command alone
        rank_timeout: minutes that these processes wait for each other
        clip: longest update of a client (Euclidean norm); a longer one is shortened
            to it
        attack: attack of the bad clients; only the others are evaluated
        attack_clients: the bad clients, by number or name
        attack_strength: strength of the attack; each attack has a default
        batch_norm: batch norm's running statistics: average, local, or auto for the
            policy of the method
        metrics: metrics of each client in addition to loss and accuracy: auc, f1,
            balanced_accuracy, brier, ece; for targets mae, rmse, r2
    """

    data: str = "mnist5k"
    partition: str | None = None
    n: PositiveInt | None = None
    model: str = "auto"
    loss: str = "auto"
    rounds: NonNegativeInt = 50
    participation: Fraction = 1.0
    sampling: str = "uniform"
    target: int | Literal["all"] | str | None = None
    seed: int = 0
    seeds: PositiveInt = 1
    data_seed: Seed32 | Literal["each"] = 0
    train_samples: PositiveInt | None = None
    test_samples: PositiveInt | None = None
    standardize: bool | None = None
    feature_shift: ShiftName | None = None
    feature_shift_strength: NonNegativeFloat | None = None
    val: HeldOut = 0.0
    eval_split: str = "test"
    eval_every: NonNegativeInt = 1
    patience: PositiveInt | None = None
    engine: str = "auto"
    workers: int | None = None
    device: str = "cpu"
    clients_per_block: PositiveInt | None = None
    graphs: bool = True
    ranks: Literal["auto", 1] = "auto"
    rank_timeout: PositiveFloat = 30.0
    clip: PositiveFloat | None = None
    attack: Attack | None = None
    attack_clients: tuple[int | str, ...] | None = None
    attack_strength: float | None = None
    batch_norm: str = "auto"
    metrics: tuple[str, ...] = ()

    @property
    def cut_seed(self) -> int:
        """The seed of the cut of the data."""
        return self.seed if self.data_seed == "each" else self.data_seed

    @property
    def hardware(self) -> Hardware:
        """The hardware that a run uses.

        Raises ValueError where the machine does not have it.
        """
        return Hardware(
            self.engine,  # type: ignore[arg-type]
            self.workers,
            device_of(self.device),
            clients_per_block=self.clients_per_block,
            graphs=self.graphs,
            ranks=self.ranks,
            rank_timeout=self.rank_timeout,
        )

    @property
    def started_ranks(self) -> Ranks:
        """The processes that play the command together."""
        return find_ranks(self.rank_timeout) if self.ranks == "auto" else ONE_RANK

    @property
    def robustness(self) -> Robustness:
        """The longest update, and the bad clients.

        Raises ValueError where only a part of the attack's options is given.
        """
        options = (self.attack, self.attack_clients, self.attack_strength)
        if all(option is None for option in options):
            return Robustness(self.clip)
        if self.attack is None:
            words = f"an attack ({', '.join(get_args(Attack))}) beside its options"
            reject("attack", words, None)
        if not self.attack_clients:
            reject(
                "attack_clients",
                f"the clients that do the attack {self.attack!r}",
                self.attack_clients,
                remedy="give their numbers or names, such as --attack-clients 0 3",
            )
        adversary = Adversary(self.attack, self.attack_clients, self.attack_strength)
        return Robustness(self.clip, adversary)


def options_subset(names: Collection[str]) -> Any:
    """The dataclass of some options of a run, for commands that do not have all.

    Args:
        names: The names of the options.
    """
    hints = get_type_hints(Options, include_extras=True)
    options = []
    for f in fields(Options):
        if f.name in names:
            options.append((f.name, hints[f.name], field(default=f.default)))
    namespace = {"__doc__": Options.__doc__}
    return make_dataclass("RunOptions", options, namespace=namespace, frozen=True)


class NamedFunction(NamedTuple):
    """A function that an option names, and the function's own options.

    Attributes:
        name: the name of the function on the command line
        function: the function itself
        defaults: the default of each of its options, by name
    """

    name: str
    function: Callable[..., Any]
    defaults: Line


def partition_of(data: str, partition: str | None) -> NamedFunction | None:
    """The partition of this name, or None for data with clients."""
    if data not in SOURCES:
        return None
    name = partition or "A"
    defaults = options_of(name)
    return NamedFunction(name, PARTITIONS[name].rule, defaults)


def reader_of(data: str) -> NamedFunction | None:
    """The reader of a user's files "leaf:PATH", or None for other data."""
    kind, _, path = data.partition(":")
    if kind not in READERS or not path:
        return None
    parameters = inspect.signature(READERS[kind]).parameters
    hidden = ("path", "name")
    defaults = {k: p.default for k, p in parameters.items() if k not in hidden}
    return NamedFunction(kind, READERS[kind], defaults)


def about_data(name: str, data: Federation) -> str:
    """The summary of data, and whether labels of a user's files may be counts."""
    note = data.classes_note if reader_of(name) else None
    return "\n".join([data.summary(), *([note] if note else [])])


def maker_of(data: str) -> NamedFunction | None:
    """The function of data that are made up, or None for other data.

    Its options that are numbers are the command line's, but for `n` and `seed`, which
    the run has.
    """
    function = FEDERATIONS.get(data)
    if function is None:
        return None
    defaults = {}
    for option in inspect.signature(function).parameters.values():
        is_number = isinstance(option.default, int | float)
        if is_number and option.name not in ("n", "seed"):
            defaults[option.name] = option.default
    return NamedFunction(data, function, defaults) if defaults else None


def data_options_of(data: str) -> NamedFunction | None:
    """The function of these data that has options; None for other data."""
    return reader_of(data) or maker_of(data)


def model_of(name: str) -> NamedFunction | None:
    """The model of this name; None for "auto" and own models.

    The options are the keyword arguments of the model's function. Its other arguments
    are the shape and the classes of the data. Raises ValueError for an unknown name.
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
    """The federation of an experiment.

    Raises ValueError, ImportError or OSError where it cannot be made.

    Args:
        cut: The options of the partition, or of the reader of files.
    """
    o = options
    more = dict(cut or {})
    if o.standardize is not None:
        more.setdefault("standardize", o.standardize)
    more["feature_shift"] = o.feature_shift
    more["feature_shift_strength"] = o.feature_shift_strength
    more["train_samples"] = o.train_samples
    more["test_samples"] = o.test_samples
    if reader_of(o.data) and o.loss in ("squared", "half_squared"):
        # These losses take targets, which may be whole numbers, and not labels.
        more.setdefault("classes", None)
    data = federation_of(o.data, o.partition, o.n, o.cut_seed, **more)
    takes_numbers = ":" not in o.model and MODELS.get(o.model) not in TEXT_MODELS
    if takes_numbers and not data.x.is_floating_point():
        # Only models for text have an embedding; else whole numbers are features.
        data = replace(data, x=data.x.float())
    if o.val:
        expected = "no share for data that have validation samples"
        remedy = (
            "leave --val out (of data without test samples, 15 % are held out for "
            "validation and 15 % for testing)"
        )
        require("val" not in data.index, "val", expected, o.val, remedy=remedy)
        data = data.split(val=o.val, seed=o.cut_seed)
    is_there = not isinstance(o.target, int) or 0 <= o.target < data.n
    require(is_there, "target", f"a client from 0 to {data.n - 1}", o.target)
    return data


def make_model(
    options: Options, data: Federation, own: Facts | None = None
) -> Callable[[], nn.Module]:
    """A function that makes the model for these data.

    Raises ValueError where the model does not fit the shape of the data.

    Args:
        own: The options of the model itself.
    """
    name = model_name(options, data)
    classes = None if options.loss == "hinge" else data.classes
    own = dict(own or {})
    if MODELS.get(name) in TEXT_MODELS and own.get("vocabulary") is None:
        own["vocabulary"] = int(data.x.max()) + 1

    def make() -> nn.Module:
        if ":" in name:
            model: nn.Module = import_object(name, "model")()
        else:
            model = model_for(name, data.shape, classes, **own)
        if data.x.dtype == torch.float64:
            return model.to(data.x.dtype)
        return model

    make()  # raises the error of a shape that does not fit
    return make


def model_name(options: Options, data: Federation) -> str:
    """The name of the model; of "auto", the model for these data.

    "auto" is lenet5 for images of 28 x 28 and 32 x 32, linear for vectors, and mlp for
    other inputs.
    """
    if options.model != "auto":
        return options.model
    if tuple(data.shape[1:]) in ((28, 28), (32, 32)):
        return "lenet5"
    return "linear" if len(data.shape) == 1 else "mlp"


def make_net(options: Options, data: Federation, make: Callable[[], nn.Module]) -> Net:
    """The net of a model and a loss, with seeded weights."""
    loss = options.loss
    if loss == "auto":
        loss = default_loss(data.y)
    return Net(make, loss, seed=options.seed)


def has_target(name: str) -> bool:
    """True for an algorithm that makes its model for a single client."""
    return any(f.name == "target" for f in fields(class_of(name)))


def make_algorithm(
    name: str, hyper: Facts | None = None, target: int | str | None = None
) -> Algorithm:
    """An algorithm by its name or "package.module:Class".

    Args:
        hyper: The algorithm's options.
        target: The client to personalize for, by id or name, if the algorithm has a
            target. With "all" it is the first client, and `Job` plays the runs of the
            others.
    """
    cls = class_of(name)
    options = dict(hyper or {})
    for f in fields(cls):
        # Here a mean is a text. A default of one's own has no name that makes it again.
        if isinstance(f.default, Mean) and options.get(f.name) == str(f.default):
            del options[f.name]
    if target is not None and has_target(name):
        options["target"] = 0 if target == "all" else target
    return algorithm_of(cls, **options)


@dataclass(frozen=True)
class Job:
    """One run of an experiment.

    Attributes:
        algorithm: name of the algorithm, or package.module:Class
        options: options of the experiment, with the seed of this run
        training: options of local training
        algorithm_options: the algorithm's own options, by name
    """

    algorithm: str
    options: Options
    training: Training
    algorithm_options: Facts

    @property
    def name(self) -> str:
        """The name of the job in messages and in its experiment."""
        return f"{name_of(self.algorithm)}, seed {self.options.seed}"

    @property
    def for_each(self) -> bool:
        """True where the job has a run for each client.

        Each client is the target of one run. This is so where the option `target` is
        "all" and the algorithm has a target.
        """
        return self.options.target == "all" and has_target(self.algorithm)

    def with_ids(self, data: Federation) -> Job:
        """The job with the ids of clients that its options name.

        Raises ValueError where an option names no client of the federation.
        """
        o = self.options
        target = o.target
        if isinstance(target, str) and target != "all":
            target = client_id("target", target, data.n, data.names)
        return replace(self, options=replace(o, target=target))

    def num_rounds(self, data: Federation) -> int:
        """The number of rounds of the job, over all its runs."""
        if not self.for_each:
            return self.options.rounds
        targets = possible_targets(data, self.options.robustness.adversary)
        # One more run serves the clients that cannot be a target.
        num_runs = len(targets) + (len(targets) < data.n)
        return self.options.rounds * num_runs

    def make_algorithm(self) -> Algorithm:
        """The job's algorithm; with `for_each`, that of the first client."""
        target = self.options.target
        return make_algorithm(self.algorithm, self.algorithm_options, target)

    def simulation(
        self,
        data: Federation,
        model: Callable[[], nn.Module],
        reported: torch.Tensor | None = None,
        **more: Any,
    ) -> Simulation:
        """The job's simulation; with `for_each`, that of the first possible target.

        Args:
            data: The federation.
            model: The function that makes the model.
            reported: The ids of the clients that are evaluated; None for all.
            more: Options of `Simulation` that the command line does not have.
        """
        net = make_net(self.options, data, model)
        common = self._common(reported)
        algorithm = self.make_algorithm()
        if self.for_each:
            targets = possible_targets(data, self.options.robustness.adversary)
            algorithm = replace(algorithm, target=targets[0])  # type: ignore[call-arg]
        return Simulation(algorithm, net, data, self.training, **common, **more)

    def play(
        self,
        simulation: Simulation,
        on_round: OnRound,
        checkpoint: Checkpoint | None = None,
    ) -> History:
        """Runs the simulation and returns its history.

        With `for_each` there is one run for each client that can be a target, and one
        more for the others.

        Args:
            simulation: The simulation that `Job.simulation` made.
            on_round: Is called with the round and its record after every round.
            checkpoint: The place and the intervals of checkpoints; None for no
                checkpoints.
        """
        if not self.for_each:
            callbacks = [on_round]
            if self.options.patience is not None:
                callbacks.append(self._early_stopping(simulation.config.algorithm))
            return simulation.run(callbacks, checkpoint)
        return run_each_target(
            simulation.algorithm,
            simulation.model,
            simulation.data,
            self.training,
            on_round=lambda _, r, record: on_round(r, record),
            checkpoint=checkpoint,
            **self._common(),
        )

    def _early_stopping(self, algorithm: Algorithm) -> EarlyStopping:
        """The callback that ends the run; of a method with a target by it alone."""
        target = getattr(algorithm, "target", None)
        reason = algorithm.traits.rounds_reason
        if reason:
            name = type(algorithm).__name__
            warn_caller(
                f"patience: {name} {reason}, so a run that ends early is not the same "
                "method with fewer rounds; give it fewer rounds in place of patience."
            )
        patience = self.options.patience or 1
        return EarlyStopping(patience, clients=None if target is None else [target])

    def _common(self, reported: torch.Tensor | None = None) -> Line:
        """Options that `Simulation` and `run_each_target` have in common."""
        o = self.options
        evaluation = Evaluation(o.eval_every, o.eval_split, reported, metrics=o.metrics)
        return {
            "rounds": o.rounds,
            "participation": o.participation,
            "sampling": o.sampling,
            "seed": o.seed,
            "evaluation": evaluation,
            "robustness": o.robustness,
            "hardware": o.hardware,
            "batch_norm": o.batch_norm,
        }

    def header(self, simulation: Simulation) -> Line:
        """The simulation's header, with the names of its parts from the options."""
        header = simulation.header()
        o = self.options
        for key in ("data", "loss", *DATA_FIELDS):
            header[key] = getattr(o, key)
        partition = partition_of(o.data, o.partition)
        header["partition"] = partition and partition.name
        header["model"] = model_name(o, simulation.data)
        if o.patience is not None:
            header["patience"] = o.patience
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


def make_jobs(
    algorithms: Sequence[str],
    options: Options,
    training: Training,
    hyper: Mapping[str, Facts],
    own_training: Mapping[str, Training] | None = None,
) -> list[Job]:
    """One job for each algorithm and seed.

    Raises ValueError for the first option that is wrong.

    Args:
        algorithms: The names of the algorithms.
        options: The options of the experiment.
        training: The options of local training.
        hyper: The options of each algorithm, by its name.
        own_training: The options of local training of algorithms that have their own,
            by the algorithm's name.
    """
    require(algorithms, "algorithms", f"at least one of {', '.join(ALGORITHMS)}", None)
    # Both properties raise ValueError for options that are wrong.
    options.hardware  # noqa: B018
    options.robustness  # noqa: B018
    uses_test = options.patience is not None and options.eval_split == "test"
    words = "an evaluation on other data than those of the test: --eval-split val"
    require(not uses_test, "patience", words, options.patience)
    is_each = options.patience is not None and options.target == "all"
    require(not is_each, "target", "one client with --patience", options.target)
    for name in algorithms:
        make_algorithm(name, hyper.get(name), options.target)
    jobs = []
    for name in dict.fromkeys(algorithms):
        trains = (own_training or {}).get(name, training)
        for seed in range(options.seed, options.seed + options.seeds):
            seed_options = replace(options, seed=seed)
            jobs.append(Job(name, seed_options, trains, hyper.get(name, {})))
    return jobs
