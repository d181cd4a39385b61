"""Grids: every candidate is trained, scored on validation data, recorded; the best one is reported
on test data, once.

Selection works on `Protocol.blind`, a federation without a test split, so it cannot see test data
even by mistake.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore.algorithms.adaptation import FineTune, layer_mask, lengths, value
from pflcore.algorithms.lookup import algorithm_of
from pflcore.algorithms.protocol import Algorithm, Tensors
from pflcore.check import ANYTHING, Fraction, Model, Seed, Whole, checked, shown
from pflcore.data.roles import Protocol
from pflcore.metrics import Metric, metrics_of
from pflcore.results.record import plain
from pflcore.simulation import Simulation
from pflcore.simulation.checkpoint import Checkpoint, lock
from pflcore.simulation.describe import digest_of, of_data, of_net
from pflcore.simulation.evaluate import evaluate
from pflcore.simulation.round import Setup, State, flat
from pflcore.simulation.settings import Evaluation, Hardware
from pflcore.train import Clients, Net, Training
from pflcore.train.losses import default_loss, loss_name
from pflcore.train.random import STREAM

Grid = Mapping[str, Sequence[Any]]


class Criterion(NamedTuple):
    """What the best is best in."""

    name: str  # "": accuracy, or for targets the least loss
    metrics: dict[str, Metric]  # the function by its name; none for what every evaluation gives
    maximize: bool

    def values(self, found: Tensors) -> Tensor:
        """What an evaluation found of it for each client [N], higher is better."""
        if not self.name:
            return found["accuracy"] if "accuracy" in found else -found["loss"]
        return found[self.name] if self.maximize else -found[self.name]


def criterion_of(metric: Any, maximize: bool | None, classes: bool) -> Criterion:
    """A criterion by name or function. ValueError, TypeError or ImportError in one sentence."""
    if metric is None and maximize is None:
        return Criterion("", {}, True)
    if metric in (("accuracy", "loss") if classes else ("loss",)):
        name, metrics = str(metric), {}
    elif isinstance(metric, str) or callable(metric):
        metrics = metrics_of([metric], classes)
        name = next(iter(metrics))
    else:
        raise TypeError(
            f"metric: expected a name or a function of (scores, labels), got {shown(metric)}."
        )
    if isinstance(metric, str) is not (maximize is None):
        words = "True or False with a function of one's own"
        if isinstance(metric, str):
            words = "nothing, the direction of a name is known"
        raise ValueError(f"maximize: expected {words}, got {shown(maximize)}.")
    up = metric not in ("loss", "mae", "rmse") if maximize is None else maximize
    return Criterion(name, metrics, up)


@dataclass(frozen=True)
class Candidate:
    """One point of a grid."""

    options: dict[str, Any]  # what the grid sets, by its names
    algorithm: Algorithm
    training: Training

    @property
    def trained(self) -> Candidate:
        """What is trained: candidates that differ in `late` options only share a trained state."""
        late = self.algorithm.traits.late
        defaults = {f.name: f.default for f in fields(self.algorithm) if f.name in late}
        first = {k: v for k, v in defaults.items() if v is not MISSING}
        options = {k: v for k, v in self.options.items() if k not in late}
        return Candidate(options, replace(self.algorithm, **first), self.training)


@dataclass
class Trial:
    """What became of a candidate."""

    candidate: Candidate
    values: list[Tensor] = field(default_factory=list)  # one per protocol: each client's [N]
    stopped: str | None = None  # why its training ended early, if it did

    @property
    def score(self) -> float:
        """Mean over protocols of the mean over clients; minus infinity for a candidate that
        diverged."""
        if self.stopped or not self.values:
            return -math.inf
        means = [v[~v.isnan()].mean().item() for v in self.values]
        score = sum(means) / len(means)
        return score if math.isfinite(score) else -math.inf


@dataclass
class Tuned:
    """A grid's trials and the choice. `report` is the only thing here that looks at test data."""

    trials: list[Trial]
    protocols: list[Protocol]
    states: Callable[[Candidate, int], tuple[Setup, State]]

    @property
    def best(self) -> Trial:
        """The trial with the best mean validation value; the first of equals."""
        return max(self.trials, key=lambda t: t.score)

    def report(self, protocol: int = 0) -> Tensors:
        """Test results of the best candidate on a protocol's reported clients: see
        `pflcore.evaluate`."""
        p, (setup, state) = self.protocols[protocol], self.states(self.best.candidate, protocol)
        setting = setup.setting
        setting = setting._replace(data=p.data.to(setting.data.device))
        return evaluate(setup._replace(setting=setting), state, "test", p.report)

    def table(self) -> str:
        """Markdown: the candidates, best first."""
        lines = ["| candidate | validation | note |", "|:---|---:|:---|"]
        for t in sorted(self.trials, key=lambda t: -t.score):
            score = f"{t.score:.5f}" if math.isfinite(t.score) else "-"
            note = t.stopped or ("chosen" if t is self.best else "")
            lines.append(f"| {_in_words(t.candidate.options)} | {score} | {note} |")
        return "\n".join(lines) + "\n"


def candidates(algorithm: Algorithm, training: Training, grid: Grid) -> list[Candidate]:
    """Every combination of a grid. A key is an option of the algorithm, or "training." and one of
    the local training."""
    own = {f.name for f in fields(algorithm)}
    its = {f"training.{f.name}" for f in fields(training)}
    for key, choices in grid.items():
        if key not in own and f"training.{key}" in its:
            raise ValueError(f"grid: {key!r} is how clients train; write 'training.{key}'.")
        if key not in own | its:
            raise ValueError(
                f"grid: {key!r} is no option of {type(algorithm).__name__} or its training; there "
                f"are {', '.join([*sorted(own), *sorted(its)])}."
            )
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not len(choices):
            raise ValueError(f"grid: expected a list of values for {key!r}, got {choices!r}.")
    late = algorithm.traits.late
    names = sorted(grid, key=lambda k: k in late)  # late ones vary fastest: states in blocks
    out = []
    for combination in itertools.product(*(grid[k] for k in names)):
        options = dict(zip(names, combination, strict=True))
        ours = {k: v for k, v in options.items() if k in own}
        theirs = {k.removeprefix("training."): v for k, v in options.items() if k in its}
        out.append(Candidate(options, replace(algorithm, **ours), replace(training, **theirs)))
    return out


@checked
def tune(  # noqa: PLR0913 (a run's, and a grid's)
    protocol: Annotated[Protocol | Sequence[Protocol], ANYTHING],  # a sentence of its own says more
    net: Model | Sequence[Net],
    algorithm: Algorithm | type[Algorithm] | str,
    training: Training,
    grid: Grid,
    rounds: Whole,
    *,
    states: Sequence[State] | None = None,
    participation: Fraction = 1.0,
    seed: Seed | Sequence[int] = 0,
    hardware: Hardware = Hardware(),  # noqa: B008 (frozen)
    metric: Any = None,
    maximize: Any = None,
    folder: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Trains every candidate of the grid and picks the best on validation data, after the last
    round.

    Several protocols (splits) are averaged; run j has seed `seed + j`, or the j-th of several
    seeds, and starts at the j-th net where several are given. With `rounds=0` the fresh state is
    the trained one. `states`, one per protocol: trained already, so the grid may hold `late`
    options only. The best has the highest accuracy, or for targets the least loss; else the best
    `metric`: "accuracy", "loss", a name that `Evaluation.metrics` takes, whose direction is known,
    or a function of one client's (scores, labels), with `maximize` for its direction. With `folder`
    every result is recorded as it comes, and a second call with the same arguments goes on where
    the first one stopped (functions go by their names). A candidate whose run stopped early, or
    that leaves a single client with validation samples without a finite loss or value, is recorded
    with the reason and never chosen: its mean would be that of the clients who survived it.
    """
    algorithm = algorithm_of(algorithm)
    protocols = [protocol] if isinstance(protocol, Protocol) else protocol
    if not isinstance(protocols, Sequence) or not all(isinstance(p, Protocol) for p in protocols):
        raise TypeError(
            "protocol: expected cross_silo(data) or cross_device(data), which say what is chosen "
            f"on what, got {type(protocol).__name__}."
        )
    trials = [Trial(c) for c in candidates(algorithm, training, grid)]
    if states is not None and len({_key(t.candidate.trained.options) for t in trials}) > 1:
        late = ", ".join(algorithm.traits.late) or "nothing"
        raise ValueError(f"grid: with trained states it may hold {late}, got {', '.join(grid)}.")
    count = len(protocols)
    seeds = [seed + j for j in range(count)] if isinstance(seed, int) else list(seed)
    if isinstance(net, nn.Module) or not isinstance(net, Net | Sequence):  # Sequential is a model
        net = Net(net, default_loss(protocols[0].data.y), seed=[*seeds, 0][0])
    nets = [net] * count if isinstance(net, Net) else list(net)
    if len(seeds) != count or len(nets) != count:
        raise ValueError(
            f"seed and net: expected one, or one per protocol ({count}), got {len(seeds)} and "
            f"{len(nets)}."
        )
    classes = nets[0].scores_classes and not protocols[0].data.y.is_floating_point()
    criterion, where = criterion_of(metric, maximize, classes), Path(folder) if folder else None
    run = {"rounds": max(1, rounds), "participation": participation, "hardware": hardware}
    bench = _Bench([*protocols], nets, seeds, criterion, run, rounds, states, where)
    with lock(where) if where else contextlib.nullcontext():
        bench.play(trials, bench.header(algorithm, training), say)
    if all(t.score == -math.inf for t in trials):
        why = trials[0].stopped or "values that are not finite"
        raise ValueError(f"grid: every candidate diverged, the first one with: {why}")
    return Tuned(trials, [*protocols], lambda candidate, run: bench.trained(candidate, run)[:2])


@dataclass
class _Bench:
    """Trains candidates, and remembers the states they end in: on disk where there is a folder,
    else the one that is needed."""

    protocols: list[Protocol]
    nets: list[Net]
    seeds: list[int]
    criterion: Criterion
    run: dict[str, Any]
    rounds: int
    states: Sequence[State] | None
    folder: Path | None
    memory: dict[str, tuple[State, str | None]] = field(default_factory=dict)
    key: str = ""  # what the search is, in the names of what it keeps

    def header(self, algorithm: Algorithm, training: Training) -> dict[str, Any]:
        """What must agree for results to be used again."""
        data = [
            [p.data.name, p.setting, digest_of([p.train, p.choose]), of_data(p.blind)]
            for p in self.protocols
        ]
        start = [[digest_of(net.w0), of_net(net), loss_name(net.criterion)] for net in self.nets]
        return {
            "algorithm": type(algorithm).__name__,
            "options": asdict(algorithm),
            "training": asdict(training),
            "data": data,
            "start": start,
            "states": self.states and [digest_of(flat(s)) for s in self.states],
            "rounds": self.rounds,
            "participation": self.run["participation"],
            "seeds": self.seeds,
            "stream": STREAM,
            "metric": [self.criterion.name, self.criterion.maximize],
        }

    def play(
        self, trials: list[Trial], header: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Fills the trials, from the record where they are in it."""
        book, self.key = _Book(self.folder and self.folder / "tuning.jsonl", header), _key(header)
        for j, n in itertools.product(range(len(self.protocols)), range(len(trials))):
            trial, options = trials[n], trials[n].candidate.options
            if _key({**options, "run": j}) not in book.lines:
                for other, line in self.score([t.candidate for t in trials[n:]], j):
                    book.add({"candidate": other.options, "run": j, **line})
            line = book.lines[_key({**options, "run": j})]
            trial.stopped = trial.stopped or line["stopped"]
            values = [math.nan if v is None else v for v in line["values"]]
            trial.values.append(torch.tensor(values, dtype=torch.float64))
            said = line["stopped"] or f"{trial.score:.5f}"
            say(f"{n + 1}/{len(trials)} {_in_words(options)}: {said}")

    def trained(self, candidate: Candidate, run: int) -> tuple[Setup, State, str | None]:
        """The state after the last round, from where it is kept or trained now; why it ended
        early."""
        p, what = self.protocols[run], candidate.trained
        simulation = Simulation(
            what.algorithm,
            self.nets[run],
            p.blind,
            what.training,
            clients=p.train,
            seed=self.seeds[run],
            evaluation=Evaluation(every=0, split="val", clients=p.choose),
            **self.run,
        )
        setup = simulation.setup._replace(algorithm=candidate.algorithm)
        if self.states is not None:
            return setup, self.states[run], None
        if not self.rounds:
            return setup, simulation.state, None
        name = f"{_key(what.options)}-{run}"
        if name not in self.memory:
            self.memory = {name: self._trained(simulation, name)}
        return setup, *self.memory[name]

    def _trained(self, simulation: Simulation, name: str) -> tuple[State, str | None]:
        keeper = None
        if self.folder is not None:
            digest = hashlib.blake2b((name + self.key).encode(), digest_size=8).hexdigest()
            keeper = Checkpoint(self.folder / f"state-{digest}")
            if keeper.exists:
                simulation.restore(keeper.folder)
        with warnings.catch_warnings():  # the trial says it
            warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)
            history = simulation.run(checkpoint=keeper)
        if history.failed:  # not the candidate's doing
            raise MemoryError(history.stopped)
        return simulation.state, history.stopped

    def score(self, todo: Sequence[Candidate], run: int) -> list[tuple[Candidate, dict[str, Any]]]:
        """The record of the first candidate, and of others that come with it for free: all lengths
        of one fine-tuning."""
        first, p = todo[0], self.protocols[run]
        setup, state, stopped = self.trained(first, run)
        if stopped:
            return [(first, {"values": [], "stopped": stopped})]
        if not self.criterion.name and _has_curve(first.algorithm):
            same = [c for c in todo if _longer(c, 0) == _longer(first, 0)]
            most = max(c.algorithm.finetune_epochs for c in same)  # type: ignore[attr-defined]
            longest: Any = _longer(first, most)[1]
            curve = finetuning_curve(setup._replace(algorithm=longest), state, "val", p.choose)
            lengths = [getattr(c.algorithm, "finetune_epochs") for c in same]  # noqa: B009
            return [(c, self.line(curve[0, e], run)) for c, e in zip(same, lengths, strict=True)]
        found = evaluate(setup, state, "val", p.choose, self.criterion.metrics)
        return [(first, self.line(self.criterion.values(found), run, found["loss"]))]

    def line(self, values: Tensor, run: int, loss: Tensor | None = None) -> dict[str, Any]:
        """What is recorded of a candidate, with the count of clients that it left without a finite
        value or loss."""
        p = self.protocols[run]
        who = p.choose[p.blind.size("val")[p.choose] > 0]
        lost = ~values[who].isfinite()
        # it may have no value for a client: AUC where there is one class
        if self.criterion.metrics:
            lost = values[who].isinf()
        if loss is not None:
            lost |= ~loss[who].isfinite()
        count, stopped = int(lost.sum()), None
        if count or not len(who):
            stopped = f"The validation values of {count} of {len(who)} clients are not finite."
        return {"values": values.tolist(), "stopped": stopped}


def finetuning_curve(setup: Setup, state: State, split: str, clients: Tensor) -> Tensor:
    """Values on `split` (accuracy, or minus the loss) after 0, 1, ..., `finetune_epochs` epochs of
    a FineTune with each step size: [L, E + 1, N].

    Clients that are not among `clients` are NaN.
    """
    alg, n = setup.algorithm, setup.setting.data.n
    assert isinstance(alg, FineTune)
    lrs, epochs = alg.lr_grid or (alg.finetune_lr,), alg.finetune_epochs
    cohort = setup.cohort(clients, max(1, state.round), "evaluation")
    some = Clients(setup.setting, clients, cohort.round, state.batch_norm[clients])
    x = alg.send(state.server, cohort)["x"]
    out = torch.full((len(lrs), epochs + 1, n), math.nan, dtype=torch.float64)
    out[:, 0, clients] = value(some, x, split).cpu()
    mask = layer_mask(some.net, alg.layers)
    for i, epoch, tuned in lengths(some, x, lrs, epochs, mask):
        out[i, epoch, clients] = value(some.after(tuned), tuned.w, split).cpu()
    return out


class _Book:
    """The record of a grid, JSON lines: read first, then written to line by line."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self.lines, header = path, dict[str, Any](), plain(header)
        if path is None:
            return
        kept = _read(path) if path.is_file() else []
        if kept and kept[0].get("header") != header:
            raise ValueError(
                f"folder: {path} holds the results of another grid or other data; name another "
                "folder."
            )
        self.lines = {_name(line): line for line in kept[1:]}
        part = path.with_suffix(".part")  # whole lines only: one cut off must not swallow the next
        part.write_text("".join(json.dumps(line) + "\n" for line in kept or [{"header": header}]))
        part.replace(path)

    def add(self, line: Mapping[str, Any]) -> None:
        line = plain(line)
        self.lines[_name(line)] = line
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _has_curve(alg: Algorithm) -> bool:
    plain = isinstance(alg, FineTune) and alg.choose == "fixed"
    return plain and alg.min_size == 0 and alg.margin is None  # type: ignore[attr-defined]


def _longer(candidate: Candidate, epochs: int) -> tuple[str, Algorithm | None]:
    """What is trained, and the method with so many epochs of fine-tuning; None without one."""
    alg, tunes = candidate.algorithm, isinstance(candidate.algorithm, FineTune)
    longer = replace(alg, finetune_epochs=epochs) if tunes else None  # type: ignore[call-arg]
    return _key(candidate.trained.options), longer


def _name(line: Mapping[str, Any]) -> str:
    return _key({**line["candidate"], "run": line["run"]})


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(plain(options), sort_keys=True)


def _in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in options.items()) or "as given"
