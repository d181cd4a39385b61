"""Grids: every candidate is trained, scored on validation data, recorded; the best one is reported on test data, once.

Selection works on `Protocol.blind`, a federation without a test split, so it cannot see test data even by mistake.
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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore.algorithms.base import FedAvg, State, Tensors, cohort_of
from pflcore.algorithms.finetune import FineTune, layer_mask, lengths, value
from pflcore.algorithms.lookup import algorithm_of
from pflcore.data.roles import Protocol
from pflcore.metrics import Metric, metrics_of
from pflcore.ops import kinds
from pflcore.results.record import plain
from pflcore.simulation import Simulation
from pflcore.simulation.checkpoint import digest_of, load_states, lock, of_data, of_net
from pflcore.simulation.round import evaluate
from pflcore.train import Training
from pflcore.train.bridge import Local, Setting
from pflcore.train.losses import default_loss, loss_name
from pflcore.train.net import Net
from pflcore.train.random import STREAM, generator_of


def _are_seeds(value: Any) -> bool:
    return kinds.SEED.fits(value) or kinds.many(kinds.SEED, "").fits(value)


class Criterion(NamedTuple):
    """What the best is best in."""

    name: str
    metrics: dict[str, Metric]  # the function by its name; none for what every evaluation gives
    maximize: bool


def criterion_of(metric: Any, maximize: bool | None, classes: bool) -> Criterion:
    """A criterion by name or function. ValueError, TypeError or ImportError in one sentence."""
    if metric in (("accuracy", "loss") if classes else ("loss",)):
        name, metrics = str(metric), {}
    elif isinstance(metric, str) or callable(metric):
        metrics = metrics_of([metric], classes)
        name = next(iter(metrics))
    else:
        raise TypeError(f"metric: expected a name or a function of (scores, labels), got {kinds.shown(metric)}.")
    if isinstance(metric, str) == (maximize is not None) or not isinstance(maximize, bool | None):
        words = "nothing, the direction of a name is known" if isinstance(metric, str) else "True or False with a function of one's own"
        raise ValueError(f"maximize: expected {words}, got {kinds.shown(maximize)}.")
    return Criterion(name, metrics, metric not in ("loss", "mae", "rmse") if maximize is None else maximize)


@dataclass(frozen=True)
class Candidate:
    """One point of a grid."""

    options: dict[str, Any]  # what the grid sets, by its names
    algorithm: FedAvg
    training: Training

    @property
    def trained(self) -> str:
        """What sets its training apart: candidates that agree here differ in `late` options only and share a trained state."""
        return _key({k: v for k, v in self.options.items() if k not in self.algorithm.late})


@dataclass
class Trial:
    """What became of a candidate."""

    candidate: Candidate
    values: list[Tensor] = field(default_factory=list)  # one per protocol: each client's validation value [N], higher is better
    stopped: str | None = None  # why its training ended early, if it did

    @property
    def score(self) -> float:
        """Mean over protocols of the mean over clients; minus infinity for a candidate that diverged."""
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
    states: Callable[[Candidate, int], tuple[State, Setting]]

    @property
    def best(self) -> Trial:
        """The trial with the best mean validation value; the first of equals."""
        return max(self.trials, key=lambda t: t.score)

    def report(self, protocol: int = 0) -> Tensors:
        """Test results of the best candidate on a protocol's reported clients: see `pflcore.evaluate`."""
        p, best = self.protocols[protocol], self.best.candidate
        state, setting = self.states(best, protocol)
        return evaluate(best.algorithm, state, setting._replace(data=p.data.to(setting.data.device)), "test", p.report)

    def table(self) -> str:
        """Markdown: the candidates, best first."""
        ranked = sorted(self.trials, key=lambda t: -t.score)
        lines = ["| candidate | validation | note |", "|:---|---:|:---|"]
        for t in ranked:
            score = f"{t.score:.5f}" if math.isfinite(t.score) else "-"
            lines.append(f"| {_in_words(t.candidate.options)} | {score} | {t.stopped or ('chosen' if t is self.best else '')} |")
        return "\n".join(lines) + "\n"


def candidates(algorithm: FedAvg, training: Training, grid: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Every combination of a grid. A key is an option of the algorithm, or "training." and one of the local training."""
    own, its = {f.name for f in fields(algorithm)}, {f.name for f in fields(training)}
    for key, choices in grid.items():
        if key in algorithm.unused:
            raise ValueError(f"grid: {key!r} plays no part in {type(algorithm).__name__}, all candidates would be the same; leave it out.")
        if key in its - own:
            raise ValueError(f"grid: {key!r} is how clients train; write 'training.{key}'.")
        if not (key in own or (key.startswith("training.") and key.removeprefix("training.") in its)):
            known = ", ".join([*sorted(own), *(f"training.{k}" for k in sorted(its))])
            raise ValueError(f"grid: {key!r} is no option of {type(algorithm).__name__} or its training; there are {known}.")
        if not kinds.some("").fits(choices) or not len(choices):
            raise ValueError(f"grid: expected a list of values for {key!r}, got {choices!r}.")
    names = sorted(grid, key=lambda k: k in algorithm.late)  # late options vary fastest, so that trained states are met in blocks
    out = []
    for combination in itertools.product(*(grid[k] for k in names)):
        options = dict(zip(names, combination, strict=True))
        ours = {k: v for k, v in options.items() if k in own}
        theirs = {k.removeprefix("training."): v for k, v in options.items() if k not in own}
        out.append(Candidate(options, replace(algorithm, **ours), replace(training, **theirs)))
    return out


@kinds.takes(
    net=kinds.Kind(kinds.MODEL.words + ", or one for each protocol", lambda v: kinds.MODEL.fits(v) or kinds.some("").fits(v)),
    training=kinds.a(Training),
    grid=kinds.MAPPING,
    rounds=kinds.whole(0),
    states=kinds.many(kinds.a(State), "a State for each protocol"),
    participation=kinds.POSITIVE,
    seed=kinds.Kind("a whole number, or one for each protocol", _are_seeds),
    folder=kinds.PLACE,
    say=kinds.FUNCTION,
)
def tune(
    protocol: Protocol | Sequence[Protocol],
    net: Net | nn.Module | Callable[[], nn.Module] | Sequence[Net],
    algorithm: FedAvg | type[FedAvg] | str,
    training: Training,
    grid: Mapping[str, Sequence[Any]],
    rounds: int,
    *,
    states: Sequence[State] | None = None,
    participation: float = 1.0,
    seed: int | Sequence[int] = 0,
    engine: str = "auto",
    workers: int | None = None,
    device: str = "cpu",
    metric: str | Metric | None = None,
    maximize: bool | None = None,
    folder: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Trains every candidate of the grid and picks the best on validation data, after the last round.

    Several protocols (splits) are averaged; run j has seed `seed + j`, or the j-th of several seeds, and starts at the j-th net where
    several are given. With `rounds=0`
    the fresh state is the trained one. `states`, one per protocol: trained already, so the grid may hold `late` options only.
    The best has the highest accuracy, or for targets the least loss; else the best `metric`: "accuracy", "loss", a name that `Simulation`'s
    `metrics` takes, whose direction is known, or a function of one client's (scores, labels), with `maximize` for its direction.
    With `folder` every result is recorded as it comes, and a second call with the same arguments goes on where the first one stopped
    (functions go by their names).
    A candidate whose run stopped early, or that leaves a single client with validation samples without a finite loss or value, is recorded
    with the reason and never chosen: its mean would be that of the clients who survived it.
    """
    algorithm = algorithm_of(algorithm)
    protocols = [protocol] if isinstance(protocol, Protocol) else list(protocol) if isinstance(protocol, Sequence) else []
    if not protocols or not all(isinstance(p, Protocol) for p in protocols):
        raise TypeError(
            f"protocol: expected cross_silo(data) or cross_device(data), which say what is chosen on what, got {type(protocol).__name__}."
        )
    trials = [Trial(c) for c in candidates(algorithm, training, grid)]
    if states is not None and len({t.candidate.trained for t in trials}) > 1:
        raise ValueError(f"grid: with trained states it may hold {', '.join(algorithm.late) or 'nothing'}, got {', '.join(grid)}.")
    seeds = [seed + j for j in range(len(protocols))] if isinstance(seed, int) else list(seed)
    if not isinstance(net, Sequence) or isinstance(net, nn.Module):  # nn.Sequential is a model
        net = net if isinstance(net, Net) else Net(net, default_loss(protocols[0].data.y), seed=seeds[0] if seeds else 0)
        net = [net] * len(protocols)
    nets = list(net)
    if len(seeds) != len(protocols) or len(nets) != len(protocols):
        raise ValueError(f"seed and net: expected one, or one per protocol ({len(protocols)}), got {len(seeds)} and {len(nets)}.")
    classes = nets[0].scores_classes and not protocols[0].data.y.is_floating_point()
    criterion = None if metric is None and maximize is None else criterion_of(metric, maximize, classes)
    where = Path(folder) if folder else None
    bench = _Bench(criterion, protocols, nets, states, rounds, participation, seeds, engine, workers, device, where)
    header = bench.header(algorithm, training)
    with lock(where) if where else contextlib.nullcontext():
        book, bench.key = _Book(where and where / "tuning.jsonl", header), _key(header)
        for j in range(len(protocols)):
            for n, trial in enumerate(trials):
                name = _key({**trial.candidate.options, "run": j})
                if name not in book.lines:
                    for other, line in bench.score([t.candidate for t in trials[n:]], j):
                        book.add(_key({**other.options, "run": j}), {"candidate": other.options, "run": j, **line})
                line = book.lines[name]
                trial.stopped = trial.stopped or line["stopped"]
                trial.values.append(torch.tensor([math.nan if v is None else v for v in line["values"]], dtype=torch.float64))
                say(f"{n + 1}/{len(trials)} {_in_words(trial.candidate.options)}: {line['stopped'] or f'{trial.score:.5f}'}")
    if all(t.score == -math.inf for t in trials):
        raise ValueError(f"grid: every candidate diverged, the first one with: {trials[0].stopped or 'values that are not finite'}")
    return Tuned(trials, protocols, bench.state)


class _Bench:
    """Trains candidates, and remembers the states they end in: on disk where there is a folder, else the one that is needed."""

    def __init__(
        self,
        criterion: Criterion | None,
        protocols: list[Protocol],
        nets: list[Net],
        states: Sequence[State] | None,
        rounds: int,
        participation: float,
        seeds: list[int],
        engine: str,
        workers: int | None,
        device: str,
        folder: Path | None,
    ) -> None:
        self.protocols, self.nets, self.states, self.rounds, self.seeds = protocols, nets, states, rounds, seeds
        self.participation, self.device, self.criterion = participation, device, criterion
        self.engine, self.workers, self.folder = engine, workers, folder
        self.blind = [p.blind for p in protocols]
        self.memory: dict[str, tuple[State, str | None]] = {}
        self.key = ""  # what the search is, in the names of the files that it keeps

    def header(self, algorithm: FedAvg, training: Training) -> dict[str, Any]:
        """What must agree for results to be used again."""
        return {
            "algorithm": type(algorithm).__name__,
            "options": asdict(algorithm),
            "training": asdict(training),
            "data": [[p.data.name, p.setting, digest_of([p.train, p.choose]), of_data(p.blind)] for p in self.protocols],
            "start": [[digest_of(net.w0), of_net(net), loss_name(net.criterion)] for net in self.nets],
            "states": None if self.states is None else [digest_of(s.g) for s in self.states],
            "rounds": self.rounds,
            "participation": self.participation,
            "seeds": self.seeds,
            "stream": STREAM,
            **({"metric": [self.criterion.name, self.criterion.maximize]} if self.criterion else {}),
        }

    def simulation(self, candidate: Candidate, run: int) -> Simulation:
        p = self.protocols[run]
        return Simulation(
            candidate.algorithm,
            self.nets[run],
            self.blind[run],
            candidate.training,
            rounds=max(1, self.rounds),
            participation=self.participation,
            clients=p.train,
            seed=self.seeds[run],
            engine=self.engine,
            workers=self.workers,
            device=self.device,
            eval_every=0,
            eval_split="val",
            eval_clients=p.choose,
        )

    def trained(self, candidate: Candidate, run: int) -> tuple[State, Setting, str | None]:
        """The state after the last round, from where it is kept or trained now."""
        name, simulation = f"{candidate.trained}-{run}", self.simulation(candidate, run)
        file = self.folder / f"state-{hashlib.blake2b((name + self.key).encode(), digest_size=8).hexdigest()}.pt" if self.folder else None
        if self.states is not None or self.rounds == 0:
            return simulation.state if self.states is None else self.states[run], simulation.setting, None
        if name in self.memory:
            state, stopped = self.memory[name]
        elif file is not None and file.is_file():
            saved = load_states(file, self.device)
            stopped = saved.pop("stopped")
            state = State(**saved)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*stopped early: ", RuntimeWarning)  # the trial says it
                history = simulation.run()
            if history.failed:  # not the candidate's doing
                raise MemoryError(history.stopped)
            state, stopped = simulation.state, history.stopped
            if file is not None:
                part = file.with_suffix(".part")
                torch.save({**{f.name: getattr(state, f.name) for f in fields(state)}, "stopped": stopped}, part)
                part.replace(file)
        self.memory = {name: (state, stopped)}
        return state, simulation.setting, stopped

    def state(self, candidate: Candidate, run: int) -> tuple[State, Setting]:
        state, setting, _ = self.trained(candidate, run)
        return state, setting

    def score(self, todo: Sequence[Candidate], run: int) -> list[tuple[Candidate, dict[str, Any]]]:
        """The record of the first candidate, and of others that come with it for free: all lengths of one fine-tuning."""
        first, p = todo[0], self.protocols[run]
        state, setting, stopped = self.trained(first, run)
        if stopped:
            return [(first, {"values": [], "stopped": stopped})]
        alg = first.algorithm
        if self.criterion is None and isinstance(alg, FineTune) and alg.choose == "fixed" and alg.min_size == 0 and alg.margin is None:
            same = [c for c in todo if c.trained == first.trained and _same_but_epochs(c.algorithm, alg)]
            most = max(c.algorithm.finetune_epochs for c in same if isinstance(c.algorithm, FineTune))
            curve = finetuning_curve(replace(alg, finetune_epochs=most), state, setting, "val", p.choose)
            return [(c, self.line(curve[0, getattr(c.algorithm, "finetune_epochs")], run)) for c in same]  # noqa: B009
        if self.criterion is not None:
            found = evaluate(alg, state, setting, "val", p.choose, metrics=self.criterion.metrics)
            values = found[self.criterion.name]
            return [(first, self.line(values if self.criterion.maximize else -values, run, found["loss"]))]
        found = evaluate(alg, state, setting, "val", p.choose)
        return [(first, self.line(found["accuracy"] if "accuracy" in found else -found["loss"], run, found["loss"]))]

    def line(self, values: Tensor, run: int, loss: Tensor | None = None) -> dict[str, Any]:
        """What is recorded of a candidate, with the count of clients that it left without a finite value or loss."""
        who = self.protocols[run].choose
        who = who[self.blind[run].size("val")[who] > 0]
        if loss is None:
            lost = ~values[who].isfinite()
        elif self.criterion is None:
            lost = ~(values[who] + loss[who]).isfinite()
        else:  # a metric may have no value for a client: AUC where there is one class
            lost = values[who].isinf() | ~loss[who].isfinite()
        count = int(lost.sum())
        stopped = f"The validation values of {count} of {len(who)} clients are not finite." if count or not len(who) else None
        return {"values": values.tolist(), "stopped": stopped}


def finetuning_curve(alg: FineTune, state: State, setting: Setting, split: str, clients: Tensor) -> Tensor:
    """Values on `split` (accuracy, or minus the loss) after 0, 1, ..., `finetune_epochs` epochs with each step size: [L, E + 1, N].

    Clients that are not among `clients` are NaN.
    """
    lrs = alg.lr_grid or (alg.finetune_lr,)
    local = Local(setting, clients, max(1, state.round), state.buffers[clients])
    cohort = cohort_of(alg, setting, clients, max(1, state.round))
    x = alg.send(state.g, cohort, generator_of(setting.seed, max(1, state.round), "evaluation"))["x"]
    out = torch.full((len(lrs), alg.finetune_epochs + 1, setting.data.n), math.nan, dtype=torch.float64)
    out[:, 0, clients] = value(local, x, split).cpu()
    for i, epoch, rows in lengths(local, x, lrs, alg.finetune_epochs, layer_mask(setting.net, alg.layers)):
        out[i, epoch, clients] = value(local, rows, split).cpu()
    return out


class _Book:
    """The record of a grid, JSON lines: read first, then written to line by line."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self.lines, header = path, dict[str, Any](), plain(header)
        if path is None:
            return
        kept = _read(path) if path.is_file() else []
        if kept and kept[0].get("header") != header:
            raise ValueError(f"folder: {path} holds the results of another grid or other data; name another folder.")
        self.lines = {_key({**line["candidate"], "run": line["run"]}): line for line in kept[1:]}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")  # whole lines only: one cut off in the middle must not swallow the next
            part.write_text("".join(json.dumps(line) + "\n" for line in kept or [{"header": header}]), encoding="utf-8")
            part.replace(path)
        except OSError as e:
            raise ValueError(f"folder: expected one that can be written, got {path.parent} ({e.strerror}).") from None

    def add(self, name: str, line: Mapping[str, Any]) -> None:
        self.lines[name] = plain(line)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.lines[name]) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _same_but_epochs(a: FedAvg, b: FedAvg) -> bool:
    return isinstance(a, FineTune) and isinstance(b, FineTune) and replace(a, finetune_epochs=b.finetune_epochs) == b


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(plain(options), sort_keys=True)


def _in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in options.items()) or "as given"
