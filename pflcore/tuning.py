"""Grid search: every candidate is trained, and scored on validation data.

The best candidate is evaluated on test data, once. The search itself works on
`StudyProtocol.without_test`, a federation without a test split, so that it cannot see
test data even by mistake.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import annotated_types as at
import torch
from torch import Tensor, nn

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.check import Fraction, Model, NonNegativeInt, Seed, checked, require
from pflcore.data._protocols import StudyProtocol
from pflcore.metrics import Metric, is_higher_better, metrics_of
from pflcore.results.record import to_json
from pflcore.results.table import markdown_table
from pflcore.simulation import Simulation
from pflcore.simulation._describe import content_digest
from pflcore.simulation._evaluate import evaluate
from pflcore.simulation._settings import Evaluation, Hardware
from pflcore.simulation._state import RunConfig, State, flatten_state
from pflcore.simulation.checkpoint import Checkpoint, load, lock, save
from pflcore.train import Net, Training
from pflcore.train._losses import default_loss

__all__ = ["tune"]

Grid = Mapping[str, Sequence[Any]]
ROLES_TEXT = "cross_silo(data) or cross_device(data), which say what is chosen on what"
# The state after the last round, and why the run ended early, if it did.
TrainedState = tuple[State, str | None]


class Selection(NamedTuple):
    """The metric by which the best candidate is selected."""

    name: str
    # The function of this name; empty for a metric that every evaluation has.
    metrics: dict[str, Metric]
    higher_is_better: bool


def selection_metric(
    metric: Any, classes: bool, higher_is_better: bool | None = None
) -> Selection:
    """The metric that an argument names: by default accuracy, or the loss for targets.

    Raises ValueError for an unknown metric or one whose direction is not known, and
    ImportError where it needs a package that is not installed.
    """
    metric = metric or ("accuracy" if classes else "loss")
    is_always_there = metric == "loss" or (classes and metric == "accuracy")
    metrics = {} if is_always_there else metrics_of([metric], classes)
    name = next(iter(metrics), metric)
    direction = is_higher_better(name, higher_is_better, "metric")
    return Selection(name, metrics, direction)


BY_LOSS = Selection("loss", {}, higher_is_better=False)


@dataclass(frozen=True)
class Candidate:
    """One point of a grid."""

    options: dict[str, Any]  # the values of the grid, by its keys
    algorithm: Algorithm
    training: Training

    @property
    def trained(self) -> Candidate:
        """The candidate with the defaults of its `evaluation_only` options.

        These play no part in training, so candidates that differ in nothing else share
        one trained state.
        """
        evaluation_only = self.algorithm.traits.evaluation_only
        defaults = {}
        for f in fields(self.algorithm):
            if f.name in evaluation_only and f.default is not MISSING:
                defaults[f.name] = f.default
        options = {k: v for k, v in self.options.items() if k not in evaluation_only}
        algorithm = replace(self.algorithm, **defaults)
        return Candidate(options, algorithm, self.training)

    def __str__(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.options.items()) or "as given"


@dataclass
class Trial:
    """The validation values of a candidate."""

    candidate: Candidate
    # Each client's value [N], one tensor per protocol; a higher value is better.
    values: list[Tensor] = field(default_factory=list)
    stopped: str | None = None  # why its training ended early, if it did

    @property
    def score(self) -> float:
        """Mean over protocols of the mean over clients.

        It is minus infinity for a candidate that diverged.
        """
        if self.stopped or not self.values:
            return -math.inf
        score = sum(v.nanmean().item() for v in self.values) / len(self.values)
        return score if math.isfinite(score) else -math.inf


@dataclass
class Tuned:
    """The trials of a grid, of which one is the best.

    Only `report` looks at test data.
    """

    trials: list[Trial]
    protocols: list[StudyProtocol]
    # The trained state of a candidate under a protocol, by the protocol's index.
    states: Callable[[Candidate, int], tuple[RunConfig, State]]

    @property
    def best(self) -> Trial:
        """The trial with the best mean validation value; the first of equals."""
        return max(self.trials, key=lambda trial: trial.score)

    def report(self, protocol: int = 0) -> Tensors:
        """Test results of the best candidate on a protocol's reported clients.

        They are as `pflcore.evaluate` gives them: tensors [N], by name.

        Args:
            protocol: The index of the protocol.
        """
        chosen = self.protocols[protocol]
        config, state = self.states(self.best.candidate, protocol)
        data = chosen.data.to(config.context.data.device)
        config = config._replace(context=config.context._replace(data=data))
        return evaluate(config, state, "test", chosen.report_clients)

    def table(self) -> str:
        """A Markdown table of the candidates, the best first."""
        best = self.best
        rows = [["candidate", "validation", "note"]]
        for trial in sorted(self.trials, key=lambda trial: -trial.score):
            score = f"{trial.score:.5f}" if math.isfinite(trial.score) else "-"
            note = trial.stopped
            if not note:
                note = "chosen" if trial is best else ""
            rows.append([str(trial.candidate), score, note])
        return "\n".join([*markdown_table(rows), ""])


def candidates(algorithm: Algorithm, training: Training, grid: Grid) -> list[Candidate]:
    """Every combination of a grid's values.

    A key of the grid is an option of the algorithm, or "training." and an option of the
    local training. Raises ValueError for another key, and for a key without values.
    """
    algorithm_keys = {f.name for f in fields(algorithm)}
    training_keys = {f"training.{f.name}" for f in fields(training)}
    known = algorithm_keys | training_keys
    names = ", ".join([*sorted(algorithm_keys), *sorted(training_keys)])
    words = f"options of {type(algorithm).__name__} or its training ({names})"
    for key, values in grid.items():
        require(key in known, "grid", words, key, known)
        require(len(values), "grid", f"a list of values for {key!r}", values)
    # Options that act in evaluation only vary fastest, so that candidates which share a
    # trained state follow one another.
    evaluation_only = algorithm.traits.evaluation_only
    keys = sorted(grid, key=lambda key: key in evaluation_only)
    combinations = []
    for values in itertools.product(*(grid[key] for key in keys)):
        options = dict(zip(keys, values, strict=True))
        for_algorithm = {}
        for_training = {}
        for key, value in options.items():
            if key in algorithm_keys:
                for_algorithm[key] = value
            else:
                for_training[key.removeprefix("training.")] = value
        combinations.append(
            Candidate(
                options,
                replace(algorithm, **for_algorithm),
                replace(training, **for_training),
            )
        )
    return combinations


@checked
def tune(  # noqa: PLR0913 (a run's, and a grid's)
    protocol: Annotated[StudyProtocol | Sequence[StudyProtocol], at.doc(ROLES_TEXT)],
    net: Model | Sequence[Net],
    algorithm: Algorithm | type[Algorithm] | str,
    training: Training,
    grid: Grid,
    rounds: NonNegativeInt,
    *,
    states: Sequence[State] | None = None,
    participation: Fraction = 1.0,
    seed: Seed | Sequence[int] = 0,
    hardware: Hardware = Hardware(),  # noqa: B008 (frozen)
    metric: str | Metric | None = None,
    higher_is_better: bool | None = None,
    folder: str | os.PathLike[str] | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Trains every candidate of the grid and picks the best on validation data.

    Candidates are compared after the last round. A candidate whose run was aborted,
    because it diverged for example, is recorded with the reason and never chosen. So is
    one that leaves any client with validation samples without a finite loss or value:
    else its mean would leave out the clients on which it failed.

    Args:
        protocol: One or several protocols (splits), over which scores are averaged.
        net: The model, or one net per protocol to start from.
        grid: The values of each option. A key is an option of the algorithm, or
            "training." and an option of the local training.
        rounds: With 0 the initial state counts as the trained one.
        states: States that are trained already, one per protocol. Then the grid may
            have options that act in evaluation only.
        seed: The run under protocol j has seed `seed + j`, or the j-th of several
            seeds.
        metric: By default the highest accuracy is the best, or for regression the least
            loss. It is "accuracy", "loss", a name that `Evaluation.metrics` takes, or a
            function of one client's (scores, labels).
        higher_is_better: Must be given with a function as the metric; False for an
            error.
        folder: Every result is recorded there as it comes, and a second call with the
            same arguments goes on where the first one stopped. Two functions count
            as the same if they have the same name.
        log: Is called with a line of text for each result.

    Raises ValueError where the grid or another argument is not as described, and where
    every candidate diverged.
    """
    algorithm = algorithm_of(algorithm)
    protocols = [protocol] if isinstance(protocol, StudyProtocol) else [*protocol]
    trials = [Trial(c) for c in candidates(algorithm, training, grid)]
    if states is not None:
        _require_evaluation_only(algorithm, trials, grid)
    count = len(protocols)
    seeds = [seed + j for j in range(count)] if isinstance(seed, int) else list(seed)
    nets = _nets(net, protocols, seeds)
    words = f"one, or one per protocol ({count})"
    fits = len(seeds) == len(nets) == count
    require(fits, "seed and net", words, f"{len(seeds)} and {len(nets)}")
    path = Path(folder) if folder else None
    run = {
        "rounds": max(1, rounds),
        "participation": participation,
        "hardware": hardware,
    }
    start: Sequence[State] | str | None = states or (None if rounds else "fresh")
    search = _Search(protocols, nets, seeds, BY_LOSS, run, start, path)
    base = Candidate({}, algorithm, training)
    # Only after it has seen data does a net know whether its single score is a class's.
    scores_classes = search.simulation(base, 0).context.net.scores_classes
    classes = scores_classes and not protocols[0].data.y.is_floating_point()
    search.selection = selection_metric(metric, classes, higher_is_better)
    with lock(path) if path else contextlib.nullcontext():
        search.play(trials, base, log)
    if all(trial.score == -math.inf for trial in trials):
        reason = trials[0].stopped or "values that are not finite"
        raise ValueError(
            f"grid: every candidate diverged, the first one with: {reason}"
        )

    def trained_state(candidate: Candidate, run: int) -> tuple[RunConfig, State]:
        config, state, _ = search.trained(candidate, run)
        return config, state

    return Tuned(trials, protocols, trained_state)


def _require_evaluation_only(
    algorithm: Algorithm, trials: Sequence[Trial], grid: Grid
) -> None:
    """Raises ValueError where candidates differ in options that training depends on."""
    trained = {_key(trial.candidate.trained.options) for trial in trials}
    if len(trained) > 1:
        names = ", ".join(algorithm.traits.evaluation_only) or "nothing"
        raise ValueError(
            f"grid: with trained states it may hold {names}, got {', '.join(grid)}."
        )


def _nets(
    net: Any, protocols: Sequence[StudyProtocol], seeds: Sequence[int]
) -> list[Net]:
    """One net per protocol, where a single model or net is that of all."""
    # A torch.nn.Sequential has items, but it is a model.
    is_model = isinstance(net, nn.Module) or not isinstance(net, Net | Sequence)
    if is_model:
        first_seed = seeds[0] if seeds else 0
        net = Net(net, default_loss(protocols[0].data.y), seed=first_seed)
    return [net] * len(protocols) if isinstance(net, Net) else list(net)


@dataclass
class _Search:
    """Trains candidates, and keeps the states that they end in.

    All states are kept on disk where there is a folder, else the last one in memory.
    """

    protocols: list[StudyProtocol]
    nets: list[Net]
    seeds: list[int]
    selection: Selection
    run: dict[str, Any]  # options of every simulation
    # States that are trained already, or "fresh" for the initial ones.
    states: Sequence[State] | str | None
    folder: Path | None
    memory: dict[str, TrainedState] = field(default_factory=dict)
    key: str = ""  # the header as text, which is hashed into the names of states

    def simulation(self, candidate: Candidate, run: int) -> Simulation:
        """The simulation that trains a candidate under protocol number `run`."""
        protocol = self.protocols[run]
        clients = protocol.tuning_clients
        return Simulation(
            candidate.algorithm,
            self.nets[run],
            protocol.without_test,
            candidate.training,
            clients=protocol.train_clients,
            seed=self.seeds[run],
            evaluation=Evaluation(every=0, split="val", clients=clients),
            **self.run,
        )

    def header(self, base: Candidate) -> dict[str, Any]:
        """The facts that must be equal for recorded results to be used again."""
        runs = []
        for run in range(len(self.protocols)):
            facts = self.simulation(base, run).identity()
            runs.append({k: v for k, v in facts.items() if k != "made_with"})
        if isinstance(self.states, str):
            states = list(self.states)  # a record has the letters of the word
        else:
            states = [content_digest(flatten_state(s)) for s in self.states or []]
        return {
            "runs": runs,
            "start": [content_digest(net.w0) for net in self.nets],
            "states": states,
            "metric": [self.selection.name, self.selection.higher_is_better],
        }

    def play(
        self, trials: list[Trial], base: Candidate, say: Callable[[str], None]
    ) -> None:
        """Fills the trials, from the record in the folder where it has them."""
        header = self.header(base)
        self.key = _key(header)
        lines: dict[str, Any] = {}  # the results, by candidate and protocol
        record = {"header": header, "lines": lines}
        if self.folder and Checkpoint(self.folder).exists:
            earlier = load(self.folder)[1]
            if earlier.get("header") != to_json(header):
                raise ValueError(
                    f"folder: {self.folder} holds the results of another grid or other "
                    "data; name another folder."
                )
            lines |= earlier["lines"]
        for run in range(len(self.protocols)):
            for number, trial in enumerate(trials, 1):
                candidate = trial.candidate
                key = _key([candidate.options, run])
                if key not in lines:
                    lines[key] = self.score(candidate, run)
                    if self.folder:
                        save(self.folder, {}, record)
                stopped = lines[key]["stopped"]
                values = torch.tensor(lines[key]["values"], dtype=torch.float64)
                trial.stopped = trial.stopped or stopped
                trial.values.append(values)
                result = stopped or f"{trial.score:.5f}"
                say(f"{number}/{len(trials)} {candidate}: {result}")

    def trained(
        self, candidate: Candidate, run: int
    ) -> tuple[RunConfig, State, str | None]:
        """The configuration and state of a candidate after the last round.

        The state is trained now unless it is kept somewhere. The last value says why
        the training ended early, if it did.
        """
        trained = candidate.trained
        simulation = self.simulation(trained, run)
        config = simulation.config._replace(algorithm=candidate.algorithm)
        if self.states == "fresh":
            return config, simulation.state, None
        if self.states is not None:
            return config, self.states[run], None  # type: ignore[return-value]
        name = f"{_key(trained.options)}-{run}"
        if name not in self.memory:
            self.memory = {name: self._run(simulation, name)}
        return config, *self.memory[name]

    def _run(self, simulation: Simulation, name: str) -> TrainedState:
        """Runs a simulation, from its checkpoint if there is one."""
        keeper = None
        if self.folder is not None:
            digest = content_digest([name, self.key])
            keeper = Checkpoint(self.folder / f"state-{digest}")
            if keeper.exists:
                simulation.restore(keeper.folder)
        with warnings.catch_warnings():  # the trial has the text of this warning
            warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
            history = simulation.run(checkpoint=keeper)
        if history.failed:  # the machine failed, and not the candidate
            raise MemoryError(history.stopped)
        return simulation.state, history.stopped

    def score(self, candidate: Candidate, run: int) -> dict[str, Any]:
        """The record of a candidate: its clients' values, and why it cannot be chosen.

        A higher value is better. A candidate cannot be chosen where a client with
        validation samples has no finite value or loss.
        """
        config, state, stopped = self.trained(candidate, run)
        if stopped:
            return {"values": [], "stopped": stopped}
        protocol = self.protocols[run]
        clients = protocol.tuning_clients
        name, metrics, higher_is_better = self.selection
        results = evaluate(config, state, "val", clients, metrics)
        values = results[name] if higher_is_better else -results[name]
        has_samples = protocol.without_test.size("val")[clients] > 0
        counted = clients[has_samples]
        diverged = ~values[counted].isfinite()
        if metrics:
            # NaN is no fault: AUC, for instance, has no value where there is one class.
            diverged = values[counted].isinf()
        diverged |= ~results["loss"][counted].isfinite()
        count = int(diverged.sum())
        if count or not len(counted):
            stopped = (
                f"The validation values of {count} of {len(counted)} clients are not "
                "finite."
            )
        values = values.where(values.isfinite(), math.nan)
        return {"values": values.tolist(), "stopped": stopped}


def _key(options: Any) -> str:
    return json.dumps(to_json(options), sort_keys=True)
