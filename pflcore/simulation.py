"""The thin loop: sample -> step -> evaluate -> record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn as nn

import pflcore
from pflcore import memory
from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg, State, Stop, Tensors
from pflcore.data.federation import Federation
from pflcore.data.roles import held_out
from pflcore.local import Training, prepared
from pflcore.local.net import Net
from pflcore.metrics import human
from pflcore.round import Outcome, begin, evaluate, sample, step

VOID_ROUNDS = 3  # so many void rounds in a row end a run: same data, same lr, it will not recover
Record = dict[str, Any]


@dataclass
class History:
    """What a run leaves: its header, one record per round, and why it stopped early if it did."""

    header: Record
    rounds: list[Record] = field(default_factory=list)
    stopped: str | None = None
    interrupted: bool = False  # by Ctrl-C
    failed: bool = False  # for want of memory; the state is that of the last round in `rounds`
    state: State | None = None

    def series(self, key: str = "accuracy") -> tuple[list[int], torch.Tensor]:
        """The evaluated rounds and each client's value in them, [T, N] float64."""
        seen = [r for r in self.rounds if r["eval"] and key in r["eval"]]
        return [r["round"] for r in seen], torch.tensor([r["eval"][key] for r in seen], dtype=torch.float64)

    def lines(self) -> Iterator[Record]:
        """The lines of the record file."""
        yield {"header": self.header}
        yield from self.rounds
        if self.stopped:
            yield {"stopped": self.stopped}


@dataclass
class Simulation:
    """One algorithm on one federation.

    >>> history = Simulation("waffle", model, data, Training(lr=0.1), rounds=20).run()   # doctest: +SKIP
    """

    algorithm: FedAvg | str
    model: Net | nn.Module | Callable[[], nn.Module]
    data: Federation
    training: Training = field(default_factory=Training)
    rounds: int = 100
    participation: float = 1.0  # max(1, floor(participation * N + 0.5)) clients a round
    clients: torch.Tensor | None = None  # ids of those who may take part; default: all
    seed: int = 0
    engine: str = "auto"  # "threads", "vmap", or by the model; see `pflcore.local.path`
    workers: int | None = None  # threads; never changes a result
    device: str = "cpu"
    buffers: str = "local"  # batch norm's running statistics: each client its own, or "average"
    eval_every: int = 1  # rounds between evaluations, the last round in any case; 0: none at all
    eval_split: str = "test"
    eval_clients: torch.Tensor | None = None  # ids of those who are evaluated; default: all
    eval_train: bool = False  # the train loss of every client too
    warm_start: State | None = None

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, str):
            if self.algorithm not in ALGORITHMS:
                raise ValueError(f"algorithm: {self.algorithm!r} is none of {', '.join(ALGORITHMS)}.")
            self.algorithm = ALGORITHMS[self.algorithm]()
        if self.rounds < 1 or self.eval_every < 0:
            raise ValueError(f"rounds and eval_every: expected at least 1 and 0, got {self.rounds} and {self.eval_every}.")
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation: expected a fraction in (0, 1], got {self.participation}.")
        if self.buffers not in ("local", "average"):
            raise ValueError(f"buffers: expected 'local' or 'average', got {self.buffers!r}.")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"device: expected 'cpu' or 'cuda', got {self.device!r}.") from None
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device: got {self.device!r}, but torch {torch.__version__} sees no GPU here; use device='cpu'.")
        if self.algorithm.needs_val:
            self.data = held_out(self.data, self.seed)
        if self.eval_split not in self.data.index:
            raise ValueError(f"eval_split: the federation has {', '.join(self.data.index)}, not {self.eval_split!r}.")
        model = self.model
        net = (
            model
            if isinstance(model, Net)
            else Net(model, criterion="squared" if self.data.y.is_floating_point() else "cross_entropy", seed=self.seed)
        )
        asked = self._set_up(net)
        if asked is not None:
            memory.give_back(self.device)
            peak = peak_bytes(net, self.data.n, self.participation, *self.algorithm.init(net, self.data.n))
            data = sum(t.numel() * t.element_size() for t in (self.data.x, self.data.y))
            raise MemoryError(memory.sentence(f"before the first round, with {human(data)} of data", peak, asked, self.device))

    def _set_up(self, net: Net) -> str | None:
        """Everything to its device. Where memory runs out nothing is kept, and what was asked for last is returned."""
        assert isinstance(self.algorithm, FedAvg)
        data = self.data
        try:
            if self.device != "cpu":
                net, data = net.to(self.device), data.to(self.device)
            self.setting, self.path = prepared(net, data, self.training, self.engine, self.workers, self.seed, self.rounds)
            net = self.setting.net
            self.state = self.warm_start or begin(self.algorithm, net, data.n)
        except (MemoryError, RuntimeError) as error:
            if not memory.ran_out(error):
                raise
            return memory.asked_for(error)
        return None

    @property
    def name(self) -> str:
        return next((k for k, v in ALGORITHMS.items() if v is type(self.algorithm)), type(self.algorithm).__name__)

    def peak_bytes(self) -> int:
        """An estimate of the run's peak memory, see `peak_bytes`."""
        fresh = {k: v[0] for k, v in self.state.own.items()}
        return peak_bytes(self.setting.net, self.data.n, self.participation, self.state.g, fresh)

    def header(self) -> Record:
        """What the run is: everything needed to repeat it."""
        assert isinstance(self.algorithm, FedAvg)
        s = self.setting
        return {
            "algorithm": self.name,
            "options": {k: _plain(v) for k, v in asdict(self.algorithm).items()} if is_dataclass(self.algorithm) else {},
            "training": {k: _plain(v) for k, v in asdict(self.training).items()},
            "data": self.data.name,
            "n": self.data.n,
            "size": s.data.size("train").tolist(),
            "notes": list(self.data.notes),
            "parameters": s.net.size,
            "rounds": self.rounds,
            "participation": self.participation,
            "seed": self.seed,
            "engine": s.engine.name,
            "path": self.path._asdict(),
            "device": self.device,
            "buffers": self.buffers,
            "eval_split": self.eval_split,
            "target": self.algorithm.required[0] if self.algorithm.required else None,
            "backend": _plain(pflcore.backend()),
            "versions": {"pflcore": pflcore.__version__, "torch": torch.__version__},
            "peak_bytes": self.peak_bytes(),
        }

    def iterate(self) -> Iterator[Record]:
        """Play the rounds, giving each one's record; ends early, after a record with the key "stopped", where the run diverged or
        memory ran out. In the latter case ("failed") the state is that of the last round given, and the run can be gone on with."""
        assert isinstance(self.algorithm, FedAvg)
        while self.state.round < self.rounds:
            round, began = self.state.round + 1, time.perf_counter()
            done: Outcome | None = None
            found: Record | None = None
            report: Record = {}
            asked: str | None = None  # where memory ran out: what for, if that is known
            try:
                ids = sample(self.algorithm, self.setting, round, self.participation, self.clients)
                self.state, done = step(self.algorithm, self.state, self.setting, ids, self.buffers)
                report = {k: v.tolist() for k, v in self.algorithm.report(self.state.g).items()}
                if self.eval_every and (round % self.eval_every == 0 or round == self.rounds):
                    seen: Record = {k: v.tolist() for k, v in self.evaluate(self.eval_split).items()}
                    if self.eval_train:
                        seen["train_loss"] = self.evaluate("train")["loss"].tolist()
                    found = seen
            except (MemoryError, RuntimeError) as error:
                if not memory.ran_out(error):
                    raise
                asked = memory.asked_for(error)  # the error itself holds the round's frames, and so its memory
            if done is not None:  # a round that was played but not evaluated is a round
                yield {
                    "round": round,
                    "algorithm": self.name,
                    "engine": self.setting.engine.name,
                    "seed": self.seed,
                    "seconds": round_to(time.perf_counter() - began),
                    "cohort": done.ids,
                    "dropped": done.dropped,
                    "void": done.void,
                    "bytes_down": done.bytes_down,
                    "bytes_up": done.bytes_up,
                    "train_loss": done.train_loss,
                    "report": report,
                    "eval": found,
                }
            if asked is not None:
                memory.give_back(self.device)
                where = f"in round {round}" if done is None else f"in the evaluation after round {round}"
                yield {"stopped": memory.sentence(where, self.peak_bytes(), asked, self.device), "failed": True}
                return
            if self.state.void >= VOID_ROUNDS and round < self.rounds:
                assert done is not None
                yield {
                    "stopped": f"The run diverged: rounds {round - VOID_ROUNDS + 1} to {round} were void, because client(s) {done.dropped} "
                    f"sent updates that are not finite; lower the learning rate ({self.training.lr})."
                }
                return

    def evaluate(self, split: str) -> dict[str, torch.Tensor]:
        """Each client's personalized model as it is now: see `pflcore.algorithms.evaluate`."""
        assert isinstance(self.algorithm, FedAvg)
        return evaluate(self.algorithm, self.state, self.setting, split, self.eval_clients)

    def run(self, on_round: Callable[[int, Record], None] | None = None) -> History:
        """Play all rounds; `on_round(round, record)` sees each record as it is made. Ctrl-C ends the run and keeps what there is."""
        history = History(self.header(), state=self.state)
        try:
            for record in self.iterate():
                if "stopped" in record:
                    history.stopped, history.failed = record["stopped"], record.get("failed", False)
                    break
                history.rounds.append(record)
                if on_round:
                    on_round(record["round"], record)
        except Stop as stop:
            history.stopped = str(stop)
        except KeyboardInterrupt:
            history.stopped, history.interrupted = f"Interrupted after round {len(history.rounds)} of {self.rounds}.", True
        history.state = self.state
        return history


def peak_bytes(net: Net, n: int, participation: float, g: Tensors, own: Tensors) -> int:
    """An estimate of a run's peak memory beside data and activations: 2 S P floats for FedAvg, 6 S P + N P for SCAFFOLD.

    The state (the server's `g`, and of each client its `own` rows), and for the cohort its trained rows and updates, and four
    matrices for each matrix of client state: as gathered, its correction, as renewed, as uploaded.
    """
    cohort = max(1, int(participation * n + 0.5))
    server, client = (sum(v.numel() * v.element_size() for v in tensors.values()) for tensors in (g, own))
    return server + n * (client + net.b0.numel() * net.b0.element_size()) + cohort * (2 * net.size * net.w0.element_size() + 4 * client)


def round_to(x: float, digits: int = 4) -> float:
    return float(f"{x:.{digits}g}")


def _plain(value: Any) -> Any:
    """JSON's own types, and names for everything else."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", None) or str(value)


def for_everyone(
    algorithm: FedAvg,
    model: Net | nn.Module | Callable[[], nn.Module],
    data: Federation,
    training: Training | None = None,
    *,
    on_round: Callable[[int, int, Record], None] | None = None,
    **options: Any,
) -> History:
    """Runs `algorithm`, which has a `target`, N times from one start, each time for another client; N times the work and the traffic.

    `options` are those of `Simulation`; `on_round(target, round, record)` sees each run's records. In the history that comes back a
    client's numbers are those of the run made for it, "weights" has a row per target [N, N], bytes and seconds are sums, and a client
    counts as dropped, and a round as void, where that happened in any run. It ends with the shortest run.
    """
    if not any(f.name == "target" for f in fields(algorithm)):
        raise ValueError(f"algorithm: expected one with a target (WAFFLE, Weight Erosion), got {type(algorithm).__name__}.")
    runs = []
    for target in range(data.n):
        made_for: FedAvg = replace(algorithm, **{"target": target})  # type: ignore[arg-type]
        simulation = Simulation(made_for, model, data, training or Training(), **options)
        seen = None if on_round is None else lambda r, record, target=target: on_round(target, r, record)
        runs.append(simulation.run(seen))
        if runs[-1].interrupted or runs[-1].failed:
            break
    header = {**runs[0].header, "target": None, "made_for": "each client"}
    header["options"] = {**header["options"], "target": "each client"}
    interrupted, failed = any(r.interrupted for r in runs), any(r.failed for r in runs)
    complete = len(runs) == data.n and not (interrupted or failed)
    rounds = [merged(records) for records in zip(*(r.rounds for r in runs), strict=False)] if complete else []
    stopped = [f"target {i}: {r.stopped}" for i, r in enumerate(runs) if r.stopped]
    return History(header, rounds, " ".join(stopped) or None, interrupted=interrupted, failed=failed)


def merged(records: Sequence[Record]) -> Record:
    """One round of all targets' runs as one record."""
    first = records[0]

    def own(key: str, split: str) -> list[Any]:
        return [r[split][key][i] for i, r in enumerate(records)]

    losses = [r["train_loss"] for r in records if r["train_loss"] is not None]
    return {
        **first,
        "seconds": sum(r["seconds"] for r in records),
        "cohort": sorted(set().union(*(r["cohort"] for r in records))),
        "dropped": sorted(set().union(*(r["dropped"] for r in records))),
        "void": any(r["void"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "train_loss": sum(losses) / len(losses) if losses else None,
        "report": {k: [r["report"][k] for r in records] for k in first["report"]},
        "eval": {k: own(k, "eval") for k in first["eval"]} if first["eval"] else None,
    }
