"""The search for options: candidates are trained, and scored on validation data.

A grid is a set of values for each option, and a candidate is one value of each. Every
combination is played. Only the best candidate is evaluated on test data, by
`Tuned.report`. The search itself has no access to test data, because it uses
`StudyProtocol.without_test`, a federation without a test split.

Symbols: N clients.
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
from pflcore.check import (
    Expectation,
    Fraction,
    Model,
    NonNegativeInt,
    Seed,
    Words,
    checked,
    expectation_of,
    require,
)
from pflcore.data._protocols import StudyProtocol
from pflcore.lab.results.table import markdown_table
from pflcore.metrics import Metric, is_higher_better, metrics_of
from pflcore.simulation import Simulation
from pflcore.simulation._describe import content_digest, decisive_entries
from pflcore.simulation._evaluate import evaluate
from pflcore.simulation._files import lock_folder
from pflcore.simulation._functions import function_digest, warn_of_names
from pflcore.simulation._ranks import ONE_RANK, Ranks
from pflcore.simulation._sampling import Sampling
from pflcore.simulation._settings import Evaluation, Hardware, Robustness
from pflcore.simulation._state import RunConfig, State, flatten_state
from pflcore.simulation.checkpoint import Checkpoint, load, save
from pflcore.simulation.record import to_json
from pflcore.train import Net, Training
from pflcore.train._losses import default_loss

__all__ = ["tune"]

Grid = Mapping[str, Sequence[Any]]
# A grid as callers write it: for a type checker, a dict of lists of different types is
# a dict[str, object], which is no `Grid`. Its values are checked at run time.
WrittenGrid = Annotated[
    Mapping[str, Any],
    Expectation(
        "a dict of options, each with a list of values", expectation_of(Grid).fits
    ),
]

Protocols = Annotated[
    StudyProtocol | Sequence[StudyProtocol],
    at.doc("cross_silo(data) or cross_device(data), which say what is chosen on what"),
]
# The state after the last round, and the reason for an early end or None.
TrainedState = tuple[State, str | None]


class Selection(NamedTuple):
    """The metric by which the best candidate is selected.

    Attributes:
        name: The name of the metric.
        metrics: The function of the metric, by its name; empty for a metric of every
            evaluation, such as the loss.
        higher_is_better: False for an error, such as the loss.
    """

    name: str
    metrics: dict[str, Metric]
    higher_is_better: bool

    @property
    def facts(self) -> list[Any]:
        """Facts on the metric for the record of the search."""
        facts = [self.name, self.higher_is_better]
        functions = function_digest(self.metrics)
        return [*facts, str(functions)] if functions.says_more else facts


def selection_metric(
    metric: Any, classes: bool, higher_is_better: bool | None = None
) -> Selection:
    """The selection by a metric; by default accuracy, for regression loss.

    Raises ValueError for an unknown metric, and for one without a known direction.
    Raises ImportError where the metric needs a package that is not installed.

    Args:
        metric: The name of a metric, a function, or None for the default.
        classes: True where the targets are classes.
        higher_is_better: The direction of a function: False for an error.
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
    """One candidate of a grid.

    Attributes:
        options: The values of the candidate, by the grid's keys.
        algorithm: The algorithm with these options.
        training: The local training with these options.
    """

    options: dict[str, Any]
    algorithm: Algorithm
    training: Training

    @property
    def trained(self) -> Candidate:
        """The candidate with defaults for the options that only evaluation uses.

        Candidates that differ in nothing but these options share one trained state.
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
    """The validation values of a candidate.

    Attributes:
        candidate: The candidate.
        values: The clients' values [N], one tensor per protocol. A higher value is
            better: an error has its sign changed.
        stopped: The reason why the candidate cannot be chosen, such as divergence; None
            for a candidate that can be chosen.
    """

    candidate: Candidate
    values: list[Tensor] = field(default_factory=list)
    stopped: str | None = None

    @property
    def score(self) -> float:
        """The mean over protocols of the mean over clients.

        It is minus infinity for a candidate that cannot be chosen.
        """
        if self.stopped or not self.values:
            return -math.inf
        score = sum(v.nanmean().item() for v in self.values) / len(self.values)
        return score if math.isfinite(score) else -math.inf


@dataclass(repr=False)
class Tuned:
    """The result of `tune`: the trials of a grid.

    Only `report` uses test data.

    Attributes:
        trials: A trial for each candidate, in the order of the search.
        protocols: The protocols of the search.
        states: A function of a candidate and a protocol's index, which returns the
            run's configuration and its trained state.
    """

    trials: list[Trial]
    protocols: list[StudyProtocol]
    states: Callable[[Candidate, int], tuple[RunConfig, State]]

    def __repr__(self) -> str:
        best = self.best
        words = f"{len(self.trials)} candidates, best: {best.candidate}"
        tie = f", a tie with {len(self.ties)} more" if self.ties else ""
        return f"Tuned({words}, score {best.score:.4g}{tie})"

    @property
    def best(self) -> Trial:
        """The trial with the highest score; among equal scores the first."""
        return max(self.trials, key=lambda trial: trial.score)

    @property
    def ties(self) -> list[Trial]:
        """The other trials that have the score of the best one, in their order."""
        best = self.best
        return [t for t in self.trials if t is not best and t.score == best.score]

    def tie_line(self) -> str:
        """A sentence on the trials that have the score of the best one."""
        count = len(self.ties) + 1
        chosen = self.best.candidate
        return f"A tie: {count} candidates have the best score; {chosen} is the first."

    @property
    def edges(self) -> dict[str, str]:
        """Options whose chosen number lies at an end of its grid, and which end.

        The end is "least" or "largest". Beyond it a better value may lie.
        """
        edges = {}
        for key, value in self.best.candidate.options.items():
            values = [trial.candidate.options[key] for trial in self.trials]
            is_number = all(
                isinstance(v, int | float) and not isinstance(v, bool) for v in values
            )
            if not is_number or len({*values}) < 2:
                continue
            if value in (min(values), max(values)):
                edges[key] = "least" if value == min(values) else "largest"
        return edges

    def edge_line(self) -> str:
        """A sentence on the chosen numbers that lie at an end of the grid."""
        options = self.best.candidate.options
        words = [f"{key} {options[key]:g} ({end})" for key, end in self.edges.items()]
        return f"At the edge of the grid: {', '.join(words)}; widen it there."

    def report(self, protocol: int = 0) -> Tensors:
        """The best candidate's test results on the clients that a protocol reports.

        The results are those of `pflcore.evaluate`: tensors [N] by name.

        Args:
            protocol: The index of the protocol.
        """
        chosen = self.protocols[protocol]
        config, state = self.states(self.best.candidate, protocol)
        data = chosen.data.to(config.data.device)
        config = replace(config, data=data)
        return evaluate(config, state, "test", chosen.report_clients)

    def table(self) -> str:
        """A Markdown table of the candidates, the best first."""
        notes = {id(self.best): "chosen"}
        for trial in self.ties:
            notes[id(trial)] = "a tie with the chosen one"
        rows = [["candidate", "validation", "note"]]
        for trial in sorted(self.trials, key=lambda trial: -trial.score):
            score = f"{trial.score:.5f}" if math.isfinite(trial.score) else "-"
            note = trial.stopped or notes.get(id(trial), "")
            rows.append([str(trial.candidate), score, note])
        below = ["", self.edge_line()] if self.edges else []
        return "\n".join([*markdown_table(rows), *below, ""])


def candidate_of(
    algorithm: Algorithm, training: Training, options: dict[str, Any]
) -> Candidate:
    """The candidate with these options, by the grid's keys.

    Raises ValueError for a value that the option cannot have.
    """
    for_algorithm = {}
    for_training = {}
    for key, value in options.items():
        name = key.removeprefix("training.")
        if name == key:
            for_algorithm[name] = value
        else:
            for_training[name] = value
    return Candidate(
        options,
        replace(algorithm, **for_algorithm),
        replace(training, **for_training),
    )


def ordered_grid(algorithm: Algorithm, training: Training, grid: Grid) -> Grid:
    """The grid, with options that only evaluation uses behind the others.

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
        _check_distinct(key, values)
    evaluation_only = algorithm.traits.evaluation_only
    return {key: grid[key] for key in sorted(grid, key=evaluation_only.__contains__)}


def _check_distinct(key: str, values: Sequence[Any]) -> None:
    """Raises ValueError where two values of an option would count as one.

    Results are kept by the texts of values, and two functions may have one name.
    """
    first: dict[str, Any] = {}
    for value in values:
        text = _key(value)
        known = first.setdefault(text, value)
        is_same = known is value or not callable(value)
        remedy = "give the functions names of their own"
        words = f"different values for {key!r}"
        require(is_same, "grid", words, Words(f"two of the text {text}"), remedy=remedy)


def candidates(algorithm: Algorithm, training: Training, grid: Grid) -> list[Candidate]:
    """The candidates of an ordered grid, one for every combination of its values.

    Options that only evaluation uses vary fastest. So candidates that share a trained
    state follow one another, and the state is trained once.
    """
    combinations = []
    for combination in itertools.product(*grid.values()):
        options = dict(zip(grid, combination, strict=True))
        combinations.append(candidate_of(algorithm, training, options))
    return combinations


def check_grid(algorithm: Algorithm, training: Training, grid: Grid) -> None:
    """Raises ValueError where the algorithm or its training cannot have the grid."""
    candidates(algorithm, training, ordered_grid(algorithm, training, grid))


@checked
def tune(  # noqa: PLR0913 (a run's, and a grid's)
    protocol: Protocols,
    net: Model | Sequence[Net],
    algorithm: Algorithm | type[Algorithm] | str,
    training: Training,
    grid: WrittenGrid,
    rounds: NonNegativeInt,
    *,
    states: Sequence[State] | None = None,
    participation: Fraction = 1.0,
    sampling: Sampling = "uniform",
    seed: Seed | Sequence[int] = 0,
    robustness: Robustness = Robustness(),  # noqa: B008 (frozen)
    batch_norm: str = "auto",
    hardware: Hardware = Hardware(),  # noqa: B008 (frozen)
    metric: str | Metric | None = None,
    higher_is_better: bool | None = None,
    folder: str | os.PathLike[str] | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Trains the candidates of the grid, and selects the best one.

    Every combination of the grid's values is a candidate:

        grid = {"lam": [0.01, 0.1, 1], "training.lr": [0.05, 0.2]}
        tune(protocol, net, "ditto", training, grid, rounds=50)

    Candidates are compared on validation data, after the last round. Some candidates
    are recorded with a reason and never selected:

    - those whose run ended early, for example because it diverged;
    - those with a client that has validation samples, but no finite loss or value. The
      mean over the other clients would hide the failure.

    Args:
        protocol: One or several protocols (splits of the data). A candidate's score is
            the mean over protocols.
        net: The model to start from, or one net per protocol.
        algorithm: The algorithm: a name, a class, or an instance with its options. The
            grid varies some of them.
        training: The options of the local training, some of which the grid may vary.
        grid: The values of each option, in a list. A key is an option of the algorithm,
            or "training." and an option of the local training.
        rounds: The number of rounds. With 0 the initial state counts as trained.
        states: Trained states, one per protocol; None trains them. With these, the grid
            may vary only options that evaluation alone uses.
        participation: The fraction of clients that train in a round.
        sampling: The rule by which they are drawn, as in `Simulation`.
        seed: The seed. The run with protocol j has the seed `seed + j`, or the j-th of
            several seeds.
        robustness: The bound of updates, and clients that attack, as in `Simulation`.
            Clients that attack judge no candidate.
        batch_norm: The policy for running statistics, as in `Simulation`.
        hardware: The engine, the threads and the device of all runs.
        metric: "accuracy", "loss", a name for `Evaluation.metrics`, or a function of
            one client's (scores, labels). The default is the accuracy, or the loss for
            regression.
        higher_is_better: The direction of a function as the metric, which must be
            given; False for an error.
        folder: The folder for results and trained states. A second call with the same
            arguments continues where the first one stopped. Functions of one name
            count as the same function. None keeps all in memory.
        log: A function that is called with a line of text for each result.

    Raises ValueError where the grid or another argument is not as described, and where
    every candidate diverged.
    """
    algorithm = algorithm_of(algorithm)
    protocols = [protocol] if isinstance(protocol, StudyProtocol) else [*protocol]
    grid = ordered_grid(algorithm, training, grid)
    if states is not None:
        _require_evaluation_only(algorithm, grid)
    count = len(protocols)
    seeds = [seed + j for j in range(count)] if isinstance(seed, int) else list(seed)
    nets = _nets(net, protocols, seeds)
    words = f"one, or one per protocol ({count})"
    fits = len(seeds) == len(nets) == count
    require(fits, "seed and net", words, f"{len(seeds)} and {len(nets)}")
    played = [Trial(c) for c in candidates(algorithm, training, grid)]
    path = Path(folder) if folder else None
    run = {
        "rounds": max(1, rounds),
        "participation": participation,
        "sampling": sampling,
        "robustness": robustness,
        "batch_norm": batch_norm,
        "hardware": hardware,
    }
    player = _Player(protocols, nets, seeds, BY_LOSS, run, states or None, path)
    player.use_initial = player.states is None and rounds == 0
    base = Candidate({}, algorithm, training)
    # A net with a single score needs data to know whether that is the score of a class.
    config = player.simulation(base, 0).config
    scores_classes = config.net.scores_classes
    player.ranks = config.ranks
    classes = scores_classes and not protocols[0].data.y.is_floating_point()
    player.selection = selection_metric(metric, classes, higher_is_better)
    with contextlib.ExitStack() as stack:
        with player.ranks.together("the folder of the search"):
            if path and player.ranks.is_first:
                stack.enter_context(lock_folder(path))
        player.open_record(base)
        player.play(played, log)
    if all(trial.score == -math.inf for trial in played):
        reason = played[0].stopped or "values that are not finite"
        raise ValueError(
            f"grid: every candidate diverged, the first one with: {reason}"
        )

    def trained_state(candidate: Candidate, run: int) -> tuple[RunConfig, State]:
        config, state, _ = player.trained(candidate, run)
        return config, state

    return Tuned(played, protocols, trained_state)


def _require_evaluation_only(algorithm: Algorithm, grid: Grid) -> None:
    """Raises ValueError where candidates differ in options that training depends on."""
    varied = set()
    for key, values in grid.items():
        if len({_key(value) for value in values}) > 1:
            varied.add(key)
    if varied - {*algorithm.traits.evaluation_only}:
        names = ", ".join(algorithm.traits.evaluation_only) or "nothing"
        raise ValueError(
            f"grid: with trained states it may hold {names}, got {', '.join(grid)}."
        )


def _nets(
    net: Any, protocols: Sequence[StudyProtocol], seeds: Sequence[int]
) -> list[Net]:
    """One net per protocol, also where the user gave one model."""
    # A torch.nn.Sequential has items, but it is a model.
    is_model = isinstance(net, nn.Module) or not isinstance(net, Net | Sequence)
    if is_model:
        first_seed = seeds[0] if seeds else 0
        net = Net(net, default_loss(protocols[0].data.y), seed=first_seed)
    return [net] * len(protocols) if isinstance(net, Net) else list(net)


@dataclass
class _Player:
    """Plays candidates: trains and scores them, and keeps their trained states.

    With a folder all states are on disk; otherwise the last one is in memory.

    Args:
        protocols: The protocols of the search.
        nets: The net to start from, one per protocol.
        seeds: The seed of the run, one per protocol.
        selection: The metric that scores candidates.
        run: The options that all simulations share.
        states: Trained states, one per protocol; None trains them.
        folder: The folder for results and states; None for none.
        use_initial: True takes the initial states as trained.
        memory: The last trained state, by its name.
        key: The header as text, from which the names of states on disk are made.
        lines: The results so far, by candidate and protocol.
        record: What the folder holds: the header and the lines.
        ranks: The processes that search together; the first one alone writes.
    """

    protocols: list[StudyProtocol]
    nets: list[Net]
    seeds: list[int]
    selection: Selection
    run: dict[str, Any]
    states: Sequence[State] | None
    folder: Path | None
    use_initial: bool = False
    memory: dict[str, TrainedState] = field(default_factory=dict)
    key: str = ""
    lines: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    ranks: Ranks = ONE_RANK

    def simulation(self, candidate: Candidate, run: int) -> Simulation:
        """The simulation that trains a candidate with protocol number `run`."""
        protocol = self.protocols[run]
        clients = self.judges(candidate, run)
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

    def judges(self, candidate: Candidate, run: int) -> Tensor:
        """The clients whose validation samples score a candidate.

        A method that makes the model of one client is scored on this client alone.
        Clients that attack score nothing.
        """
        protocol = self.protocols[run]
        clients = protocol.tuning_clients
        target = getattr(candidate.algorithm, "target", None)
        if target is not None:
            return torch.tensor([target])
        adversary = self.run["robustness"].adversary
        if adversary is None:
            return clients
        data = protocol.data
        honest = adversary.with_ids(data).honest_clients(data.n)
        return clients[torch.isin(clients, honest)]

    def header(self, base: Candidate) -> dict[str, Any]:
        """The facts that recorded results and this search must share."""
        runs = []
        for run in range(len(self.protocols)):
            header = self.simulation(base, run).header()
            runs.append(decisive_entries(header))
        states = [content_digest(flatten_state(s)) for s in self.states or []]
        if self.use_initial:
            states = list("fresh")  # the format of records: a list of letters
        return {
            "runs": runs,
            "start": [content_digest(net.w0) for net in self.nets],
            "states": states,
            "metric": self.selection.facts,
        }

    def open_record(self, base: Candidate) -> None:
        """Reads the folder's results, where there are some.

        Raises ValueError where the record is of another search.
        """
        header = self.header(base)
        self.key = _key(header)
        self.record = {"header": header, "lines": self.lines}
        if self.folder:
            # Only the first rank may see the folder.
            self.lines |= self.ranks.from_first(
                "the results of the search", lambda: self._recorded_lines(header)
            )

    def play(self, trials: list[Trial], say: Callable[[str], None]) -> None:
        """Fills the trials, one protocol after the other."""
        for run in range(len(self.protocols)):
            for number, trial in enumerate(trials, 1):
                self._add_values(trial, run)
                self._say_result(f"{number}/{len(trials)}", trial, say)

    def _add_values(self, trial: Trial, run: int) -> None:
        """Adds the values with one protocol, which are played where they are missing.

        Args:
            trial: The trial to add to.
            run: The index of the protocol.
        """
        key = _key([trial.candidate.options, run])
        if key not in self.lines:
            self.lines[key] = self.score(trial.candidate, run)
            self._save()
        line = self.lines[key]
        trial.stopped = trial.stopped or line["stopped"]
        trial.values.append(torch.tensor(line["values"], dtype=torch.float64))

    def _say_result(
        self, number: str, trial: Trial, say: Callable[[str], None]
    ) -> None:
        """Says a trial's result so far, on the first rank."""
        result = trial.stopped or f"{trial.score:.5f}"
        if self.ranks.is_first:
            say(f"{number} {trial.candidate}: {result}")

    def _recorded_lines(self, header: dict[str, Any]) -> dict[str, Any]:
        """The results in the folder.

        Raises ValueError where they are those of another search.
        """
        if not self.folder or not Checkpoint(self.folder).exists:
            return {}
        earlier = load(self.folder)[1]
        if earlier.get("header") != to_json(header):
            raise ValueError(
                f"folder: {self.folder} holds the results of another grid or other "
                "data; name another folder."
            )
        for run in header["runs"]:
            warn_of_names("folder", run.get("functions", {}))
        lines: dict[str, Any] = earlier["lines"]
        return lines

    def _save(self) -> None:
        """Writes the results so far, where there is a folder for them."""
        with self.ranks.together("the record of the search"):
            if self.folder and self.ranks.is_first:
                save(self.folder, {}, self.record)

    def trained(
        self, candidate: Candidate, run: int
    ) -> tuple[RunConfig, State, str | None]:
        """The configuration and the state of a candidate after the last round.

        The candidate is trained unless its state is kept. The third result is the
        reason for an early end, or None.
        """
        trained = candidate.trained
        simulation = self.simulation(trained, run)
        config = replace(simulation.config, algorithm=candidate.algorithm)
        if self.use_initial:
            return config, simulation.state, None
        if self.states is not None:
            return config, self.states[run], None
        name = f"{_key(trained.options)}-{run}"
        if name not in self.memory:
            self.memory = {name: self._run(simulation, name)}
        return config, *self.memory[name]

    def _run(self, simulation: Simulation, name: str) -> TrainedState:
        """Runs a simulation, from its checkpoint if there is one.

        Raises MemoryError where the machine lacks memory, and KeyboardInterrupt where
        the run was interrupted.
        """
        keeper = None
        if self.folder is not None:
            digest = content_digest([name, self.key])
            keeper = Checkpoint(self.folder / f"state-{digest}")
        # The trial has the text of this warning.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
            history = simulation.run(checkpoint=keeper, resume=keeper is not None)
        if history.interrupted:  # It is no result of the candidate.
            raise KeyboardInterrupt
        return simulation.state, history.stopped

    def score(self, candidate: Candidate, run: int) -> dict[str, Any]:
        """The record of a candidate: the clients' values, and "stopped".

        A higher value is better. "stopped" is the reason why the candidate cannot be
        chosen, or None. One reason is a client with validation samples, but without a
        finite value or loss.
        """
        config, state, stopped = self.trained(candidate, run)
        if stopped:
            return {"values": [], "stopped": stopped}
        protocol = self.protocols[run]
        clients = self.judges(candidate, run)
        name, metrics, higher_is_better = self.selection
        results = evaluate(config, state, "val", clients, metrics)
        values = results[name] if higher_is_better else -results[name]
        has_samples = protocol.without_test.size("val")[clients] > 0
        counted = clients[has_samples]
        diverged = ~values[counted].isfinite()
        if metrics:
            # NaN is no fault: AUC, for instance, has no value for a single class.
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
    """The options as text, equal for equal options."""
    text = json.dumps(to_json(options), sort_keys=True)
    functions = function_digest(options)
    return f"{text} {functions}" if functions.says_more else text
