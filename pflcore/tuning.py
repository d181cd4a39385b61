"""Grids: every candidate is trained, scored on validation data, recorded; the best one
is reported on test data, once.

Selection works on `StudyProtocol.without_test`, a federation without a test split, so
it cannot see test data even by mistake.
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
from typing import Annotated, Any

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
from pflcore.simulation._describe import content_digest, identity
from pflcore.simulation._evaluate import evaluate
from pflcore.simulation._settings import Evaluation, Hardware
from pflcore.simulation.checkpoint import Checkpoint, load, lock, save
from pflcore.simulation.round import RunConfig, State, flatten_state
from pflcore.train import Net, Training
from pflcore.train._losses import default_loss

__all__ = ["tune"]

Grid = Mapping[str, Sequence[Any]]
ROLES_TEXT = "cross_silo(data) or cross_device(data), which say what is chosen on what"
# a state after the last round, and why it ended early
TrainedState = tuple[State, str | None]


def selection_metric(
    metric: Any, classes: bool, higher_is_better: bool | None = None
) -> tuple[str, dict[str, Metric], bool]:
    """What the best is best in: its name, the function where an evaluation does not
    give it by itself, and whether more is better. ValueError or ImportError in one
    sentence."""
    metric = metric or ("accuracy" if classes else "loss")
    given = metric == "loss" or (classes and metric == "accuracy")
    metrics = {} if given else metrics_of([metric], classes)
    name = next(iter(metrics), metric)
    return name, metrics, is_higher_better(name, higher_is_better, "metric")


@dataclass(frozen=True)
class Candidate:
    """One point of a grid."""

    options: dict[str, Any]  # what the grid sets, by its names
    algorithm: Algorithm
    training: Training

    @property
    def trained(self) -> Candidate:
        """What is trained: candidates that differ in `evaluation_only` options only
        share a trained state."""
        late = self.algorithm.traits.evaluation_only
        own = [
            f
            for f in fields(self.algorithm)
            if f.name in late and f.default is not MISSING
        ]
        options = {k: v for k, v in self.options.items() if k not in late}
        algorithm = replace(self.algorithm, **{f.name: f.default for f in own})
        return Candidate(options, algorithm, self.training)

    def __str__(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.options.items()) or "as given"


@dataclass
class Trial:
    """What became of a candidate."""

    candidate: Candidate
    # one per protocol: each client's [N]
    values: list[Tensor] = field(default_factory=list)
    stopped: str | None = None  # why its training ended early, if it did

    @property
    def score(self) -> float:
        """Mean over protocols of the mean over clients; minus infinity for a candidate
        that diverged."""
        if self.stopped or not self.values:
            return -math.inf
        score = sum(v.nanmean().item() for v in self.values) / len(self.values)
        return score if math.isfinite(score) else -math.inf


@dataclass
class Tuned:
    """A grid's trials and the choice. `report` is the only thing here that looks at
    test data."""

    trials: list[Trial]
    protocols: list[StudyProtocol]
    states: Callable[[Candidate, int], tuple[RunConfig, State]]

    @property
    def best(self) -> Trial:
        """The trial with the best mean validation value; the first of equals."""
        return max(self.trials, key=lambda t: t.score)

    def report(self, protocol: int = 0) -> Tensors:
        """Test results of the best candidate on a protocol's reported clients: see
        `pflcore.evaluate`."""
        p = self.protocols[protocol]
        config, state = self.states(self.best.candidate, protocol)
        data = p.data.to(config.context.data.device)
        config = config._replace(context=config.context._replace(data=data))
        return evaluate(config, state, "test", p.report_clients)

    def table(self) -> str:
        """Markdown: the candidates, best first."""
        rows = [["candidate", "validation", "note"]]
        for t in sorted(self.trials, key=lambda t: -t.score):
            score = f"{t.score:.5f}" if math.isfinite(t.score) else "-"
            rows.append(
                [str(t.candidate), score, t.stopped or "chosen" * (t is self.best)]
            )
        return "\n".join([*markdown_table(rows), ""])


def candidates(algorithm: Algorithm, training: Training, grid: Grid) -> list[Candidate]:
    """Every combination of a grid. A key is an option of the algorithm, or "training."
    and one of the local training."""
    own = {f.name for f in fields(algorithm)}
    its = {f"training.{f.name}" for f in fields(training)}
    known = ", ".join([*sorted(own), *sorted(its)])
    for key, choices in grid.items():
        words = f"options of {type(algorithm).__name__} or its training ({known})"
        require(key in own | its, "grid", words, key, own | its)
        require(len(choices), "grid", f"a list of values for {key!r}", choices)
    late = algorithm.traits.evaluation_only
    # late ones vary fastest: states in blocks
    names = sorted(grid, key=lambda k: k in late)
    out = []
    for combination in itertools.product(*(grid[k] for k in names)):
        options = dict(zip(names, combination, strict=True))
        ours = {k: v for k, v in options.items() if k in own}
        theirs = {
            k.removeprefix("training."): v for k, v in options.items() if k in its
        }
        out.append(
            Candidate(options, replace(algorithm, **ours), replace(training, **theirs))
        )
    return out


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
    """Trains every candidate of the grid and picks the best on validation data, after
    the last round.

    Several protocols (splits) are averaged; run j has seed `seed + j`, or the j-th of
    several seeds, and starts at the j-th net where several are given. With `rounds=0`
    the fresh state is the trained one. `states`, one per protocol: trained already, so
    the grid may hold `evaluation_only` options only. The best has the highest accuracy,
    or for targets the least loss; else the best `metric`: "accuracy", "loss", a name
    that `Evaluation.metrics` takes, whose direction is known, or a function of one
    client's (scores, labels), of which you say `higher_is_better`, False for an error.
    With `folder` every result is recorded as it comes, and a second call with the same
    arguments goes on where the first one stopped (functions go by their names). A
    candidate whose run stopped early, or that leaves a single client with validation
    samples without a finite loss or value, is recorded with the reason and never
    chosen: its mean would be that of the clients who survived it.
    """
    algorithm = algorithm_of(algorithm)
    protocols = [protocol] if isinstance(protocol, StudyProtocol) else [*protocol]
    trials = [Trial(c) for c in candidates(algorithm, training, grid)]
    count = len(protocols)
    if (
        states is not None
        and len({_key(t.candidate.trained.options) for t in trials}) > 1
    ):
        late = ", ".join(algorithm.traits.evaluation_only) or "nothing"
        raise ValueError(
            f"grid: with trained states it may hold {late}, got {', '.join(grid)}."
        )
    seeds = [seed + j for j in range(count)] if isinstance(seed, int) else list(seed)
    # Sequential is a model
    if isinstance(net, nn.Module) or not isinstance(net, Net | Sequence):
        net = Net(net, default_loss(protocols[0].data.y), seed=[*seeds, 0][0])
    nets = [net] * count if isinstance(net, Net) else list(net)
    each = f"one, or one per protocol ({count})"
    fit = len(seeds) == len(nets) == count
    require(fit, "seed and net", each, f"{len(seeds)} and {len(nets)}")
    where = Path(folder) if folder else None
    run = {
        "rounds": max(1, rounds),
        "participation": participation,
        "hardware": hardware,
    }
    fresh = None if rounds else "fresh"
    search = _Search(
        protocols, nets, seeds, ("loss", {}, False), run, states or fresh, where
    )
    base = Candidate({}, algorithm, training)
    # whether one score is a class's, a net knows once it has met the data
    scores_classes = search.simulation(base, 0).context.net.scores_classes
    classes = scores_classes and not protocols[0].data.y.is_floating_point()
    search.selection = selection_metric(metric, classes, higher_is_better)
    with lock(where) if where else contextlib.nullcontext():
        search.play(trials, base, log)
    if all(t.score == -math.inf for t in trials):
        why = trials[0].stopped or "values that are not finite"
        raise ValueError(f"grid: every candidate diverged, the first one with: {why}")
    return Tuned(
        trials, protocols, lambda candidate, run: search.trained(candidate, run)[:2]
    )


@dataclass
class _Search:
    """Trains candidates, and remembers the states they end in: on disk where there is a
    folder, else the one that is needed."""

    protocols: list[StudyProtocol]
    nets: list[Net]
    seeds: list[int]
    selection: tuple[str, dict[str, Metric], bool]
    run: dict[str, Any]
    states: Sequence[State] | str | None  # trained already, or "fresh" ones
    folder: Path | None
    memory: dict[str, TrainedState] = field(default_factory=dict)
    key: str = ""  # what the search is, in the names of what it keeps

    def simulation(self, what: Candidate, run: int) -> Simulation:
        """What trains a candidate."""
        p = self.protocols[run]
        return Simulation(
            what.algorithm,
            self.nets[run],
            p.without_test,
            what.training,
            clients=p.train_clients,
            seed=self.seeds[run],
            evaluation=Evaluation(every=0, split="val", clients=p.tuning_clients),
            **self.run,
        )

    def header(self, base: Candidate) -> dict[str, Any]:
        """What must agree for results to be used again."""
        runs = [identity(self.simulation(base, j)) for j in range(len(self.protocols))]
        states = self.states or []
        return {
            "runs": [
                {k: v for k, v in run.items() if k != "made_with"} for run in runs
            ],
            "start": [content_digest(net.w0) for net in self.nets],
            "states": [
                s if isinstance(s, str) else content_digest(flatten_state(s))
                for s in states
            ],
            "metric": [self.selection[0], self.selection[2]],
        }

    def play(
        self, trials: list[Trial], base: Candidate, say: Callable[[str], None]
    ) -> None:
        """Fills the trials, from the record where they are in it."""
        kept = {"header": self.header(base), "lines": dict[str, Any]()}
        self.key, lines = _key(kept["header"]), kept["lines"]
        if self.folder and Checkpoint(self.folder).exists:
            found = load(self.folder)[1]
            if found.get("header") != to_json(kept["header"]):
                raise ValueError(
                    f"folder: {self.folder} holds the results of another grid or other "
                    "data; name "
                    "another folder."
                )
            lines |= found["lines"]
        for j, (n, trial) in itertools.product(
            range(len(self.protocols)), enumerate(trials, 1)
        ):
            what = trial.candidate
            key = _key([what.options, j])
            if key not in lines:
                lines[key] = self.score(what, j)
                if self.folder:
                    save(self.folder, {}, kept)
            trial.stopped = trial.stopped or lines[key]["stopped"]
            trial.values.append(torch.tensor(lines[key]["values"], dtype=torch.float64))
            said = lines[key]["stopped"] or f"{trial.score:.5f}"
            say(f"{n}/{len(trials)} {what}: {said}")

    def trained(
        self, candidate: Candidate, run: int
    ) -> tuple[RunConfig, State, str | None]:
        """The state after the last round, from where it is kept or trained now; why it
        ended early."""
        what = candidate.trained
        simulation = self.simulation(what, run)
        name = f"{_key(what.options)}-{run}"
        config = simulation.config._replace(algorithm=candidate.algorithm)
        if self.states == "fresh":
            return config, simulation.state, None
        if self.states is not None:
            return config, self.states[run], None  # type: ignore[return-value]
        if name not in self.memory:
            self.memory = {name: self._run(simulation, name)}
        return config, *self.memory[name]

    def _run(self, simulation: Simulation, name: str) -> TrainedState:
        keeper = None
        if self.folder is not None:
            keeper = Checkpoint(
                self.folder / f"state-{content_digest([name, self.key])}"
            )
            if keeper.exists:
                simulation.restore(keeper.folder)
        with warnings.catch_warnings():  # the trial says it
            warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
            history = simulation.run(checkpoint=keeper)
        if history.failed:  # not the candidate's doing
            raise MemoryError(history.stopped)
        return simulation.state, history.stopped

    def score(self, candidate: Candidate, run: int) -> dict[str, Any]:
        """What is recorded of a candidate: its clients' values, higher is better, and
        whether it left one without a finite value or loss."""
        config, state, stopped = self.trained(candidate, run)
        if stopped:
            return {"values": [], "stopped": stopped}
        p = self.protocols[run]
        name, metrics, up = self.selection
        found = evaluate(config, state, "val", p.tuning_clients, metrics)
        values = found[name] if up else -found[name]
        who = p.tuning_clients[p.without_test.size("val")[p.tuning_clients] > 0]
        # it may have no value for a client: AUC where there is one class
        odd = values[who].isinf() if metrics else ~values[who].isfinite()
        lost = int((odd | ~found["loss"][who].isfinite()).sum())
        if lost or not len(who):
            stopped = (
                f"The validation values of {lost} of {len(who)} clients are not finite."
            )
        values = values.where(values.isfinite(), math.nan)
        return {"values": values.tolist(), "stopped": stopped}


def _key(options: Any) -> str:
    return json.dumps(to_json(options), sort_keys=True)
