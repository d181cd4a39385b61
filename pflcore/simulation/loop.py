"""The thin loop: sample -> step -> evaluate -> record."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from pflcore.algorithms.base import FedAvg, State, Stop
from pflcore.algorithms.lookup import algorithm_of, name_of
from pflcore.algorithms.split import Split
from pflcore.data.federation import Federation
from pflcore.data.roles import held_out
from pflcore.metrics import Metric, human, metrics_of
from pflcore.ops import __version__, backend, kinds
from pflcore.results.record import LONG, plain
from pflcore.simulation import checkpoint as checkpoints
from pflcore.simulation import footprint, kept, rows
from pflcore.simulation.arguments import SEEDS, WORKERS, check_start, copied, device_of, ids_of, limit, whole
from pflcore.simulation.attacks import Adversary
from pflcore.simulation.checkpoint import Checkpoint, brief, lock, of_net
from pflcore.simulation.history import History, Record
from pflcore.simulation.interrupts import unbroken
from pflcore.simulation.personal import Models
from pflcore.simulation.round import Outcome, begin, buffers_of, evaluate, evaluate_some, per_client, sample, step
from pflcore.simulation.uploads import farthest
from pflcore.train import Training, memory
from pflcore.train.bridge import Path as LocalPath
from pflcore.train.bridge import prepared
from pflcore.train.choose import LARGE
from pflcore.train.fits import check_modes
from pflcore.train.losses import Loss, default_loss, loss_name
from pflcore.train.net import Net
from pflcore.train.random import STREAM, drawn

VOID_ROUNDS = 3  # so many void rounds in a row end a run: same data, same lr, it will not recover
Callback = Callable[[int, Record], None]


@kinds.takes(
    model=kinds.MODEL,
    training=kinds.a(Training),
    participation=kinds.number(0, 1, "a fraction in (0, 1]"),
    eval_split=kinds.TEXT,
    clip=kinds.POSITIVE,
    rows=kinds.PLACE,
    adversary=kinds.a(Adversary, Mapping, words="an Adversary"),
)
@dataclass
class Simulation:
    """One algorithm on one federation.

    >>> history = Simulation("waffle", model, data, Training(lr=0.1), rounds=20).run()   # doctest: +SKIP
    """

    algorithm: FedAvg | type[FedAvg] | str  # an instance, a class, a name, or "package.module:Class"
    model: Net | nn.Module | Callable[[], nn.Module]
    data: Federation
    training: Training = field(default_factory=Training)
    rounds: int = 100
    participation: float = 1.0  # max(1, floor(participation * N + 0.5)) clients a round
    clients: torch.Tensor | Sequence[int] | None = None  # ids of those who may take part; default: all
    seed: int = 0
    engine: str = "auto"  # "chain", "loop", "vmap", or by the model; see `pflcore.train.choose`
    workers: int | None = None  # threads; never changes a result
    device: str = "cpu"
    buffers: str = "auto"  # batch norm's running statistics: "average", "local" (each client its own), or as the method has it
    eval_every: int = 1  # rounds between evaluations, the last round in any case; 0: none at all
    eval_split: str = "test"
    eval_clients: torch.Tensor | Sequence[int] | int | None = None  # ids of those who are evaluated, or so many, drawn once; default: all
    eval_train: bool = False  # the train loss of every client too
    warm_start: State | None = None  # is copied
    clip: float | None = None  # no client's update is longer (Euclidean norm, before the server sees it)
    loss: Loss | None = None  # a name, a function of (scores, y) or an nn.Module; default: by the targets, or the Net's own
    rows: str | Path = "auto"  # where each client's rows are: "memory", a folder for a file of them, or by what fits
    metrics: Sequence[str | Metric] | Mapping[str, Metric] = ()  # "auc", "f1", "mae", "r2", ..., functions of one client's (scores, labels)
    adversary: Adversary | Mapping[str, Any] | None = None  # clients that attack; the others are evaluated, unless `eval_clients` says so

    def __post_init__(self) -> None:
        kinds.pythonic(self)
        self.algorithm = algorithm_of(self.algorithm)
        self.rounds, self.eval_every = whole("rounds", self.rounds, 1), whole("eval_every", self.eval_every, 0)
        self.seed = whole("seed", self.seed, -SEEDS, SEEDS - 1)
        self.workers = None if self.workers is None else whole("workers", self.workers, 1, WORKERS)
        self.clip = limit("clip", self.clip)
        if not isinstance(self.data, Federation):
            raise TypeError(f"data: expected a Federation, got {type(self.data).__name__}; make one: Federation.from_arrays(...).")
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation: expected a fraction in (0, 1], got {self.participation}.")
        self.device = device_of(self.device)
        if isinstance(self.adversary, Mapping):
            self.adversary = Adversary(**self.adversary)
        if self.adversary is not None:
            self._honest, self.data = self.adversary.honest(self.data.n), self.adversary.poisoned(self.data)
        else:
            self._honest = torch.arange(self.data.n)
        self._drawn = isinstance(self.eval_clients, int) and not isinstance(self.eval_clients, bool)
        self._asked = self.eval_clients if self._drawn else None  # how many: what a checkpoint keeps of it
        self.clients = self._among = ids_of("clients", self.clients, self.data.n)
        self.algorithm.check_training(self.training)
        if self.algorithm.needs_val:
            self.data = held_out(self.data, self.seed)
        if self.eval_split not in self.data.index:
            raise ValueError(
                f"eval_split: the federation has {', '.join(self.data.index)}, not {self.eval_split!r}; make it with test_fraction=, or "
                "split_samples()."
            )
        self.eval_clients = self._looked_at = self._evaluated()
        model = self.model
        check_modes()
        if isinstance(model, Net) and self.loss is not None:
            raise ValueError("loss: this Net has a loss of its own; give it to the Net, Net(model, loss), or give the bare model.")
        net = model if isinstance(model, Net) else Net(model, self.loss or default_loss(self.data.y), seed=self.seed)
        net = self.algorithm.prepare(net)
        buffers_of(self.algorithm, net, self.buffers)
        self.training.lr_at(1, self.rounds)  # so that a schedule that fails does so now
        self.history: History | None = None  # of the last call of `run`
        self._content: Record | None = None  # of the federation: what a checkpoint says of it
        self._past: list[Record] = []  # the rounds before the checkpoint that the run goes on from
        self._earlier: list[Record] = []  # those of this object's runs before the one of `history`
        self._came_from: Path | None = None  # that checkpoint's folder
        self._outlier: tuple[float, int, int] | None = None  # the farthest update so far: times the median, client, round
        request = self._set_up(net)
        if request is not None:
            memory.give_back(self.device)
            peak = self._peak_bytes(net)
            data = sum(t.numel() * t.element_size() for t in (self.data.x, self.data.y))
            raise MemoryError(memory.sentence(f"before the first round, with {human(data)} of data", peak, request, self.device))
        self.measures = metrics_of(self.metrics, self.setting.net.scores_classes and not self.data.y.is_floating_point())

    def _evaluated(self) -> torch.Tensor | None:
        """The ids of those who are evaluated, ascending; None: everybody. A number of them is drawn of those with samples."""
        if self.eval_clients is None and self.adversary is not None:
            return self._honest
        if not self._drawn:
            return ids_of("eval_clients", self.eval_clients, self.data.n)  # type: ignore[arg-type]
        count = whole("eval_clients", self.eval_clients, 1)
        have = self._honest[self.data.size(self.eval_split)[self._honest] > 0]
        return have[drawn(len(have), min(count, len(have)), self.seed, "eval_clients")].sort().values

    def _set_up(self, net: Net) -> str | None:
        """Everything to its device. Where memory runs out nothing is kept, and what was asked for last is returned."""
        self.folder: Path | None = None  # of the file with the clients' rows
        data, self.path = self.data, LocalPath("vmap", "vmap", "not chosen yet")
        try:
            if self.device != "cpu":
                net, data = net.to(self.device), data.to(self.device)
            self.setting, self.path = prepared(net, data, self.training, self.engine, self.workers, self.seed, self.rounds)
            net = self.setting.net
            if net.size > LARGE:
                memory.give_back(self.device)  # the copies that the model was compared with
            self.folder = self._place(net)
            memory.refuse(self._peak_bytes(net), self.device)
            if self.warm_start is not None:
                check_start(self.warm_start, self._algorithm, net, data.n)
            self._state = begin(self._algorithm, net, data.n, self.folder) if self.warm_start is None else copied(self.warm_start)
            self._seen = False  # whether somebody outside holds the state, so that the run must go on with a copy
            if self._state.round >= self.rounds:
                raise ValueError(f"rounds: expected more than the {self._state.round} that the warm start has played, got {self.rounds}.")
        except (MemoryError, RuntimeError) as error:
            if not memory.ran_out(error) or isinstance(error, memory.RunTooLarge):
                raise
            return memory.request_of(error)
        training = torch.zeros(data.n, dtype=torch.bool).index_fill(0, self._among, True) if self._among is not None else None
        left_out = 0 if training is None else int((~(training if self._looked_at is None else training[self._looked_at])).sum())
        if left_out and self._state.own:
            warnings.warn(
                f"{self.name} keeps a state for each client, and {left_out} of those who are evaluated never take part: they get "
                "what a newcomer is; in such a setting take a method without client state.",
                stacklevel=5,
            )
        return None

    @property
    def state(self) -> State:
        """The state as it is now. It is a snapshot: whoever holds it never sees it change (the run goes on with a copy)."""
        self._seen = True
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._seen = state, True

    @property
    def _algorithm(self) -> FedAvg:
        assert isinstance(self.algorithm, FedAvg)  # whatever it was given as
        return self.algorithm

    @property
    def name(self) -> str:
        """What the algorithm is called in records."""
        return name_of(self._algorithm)

    def peak_bytes(self) -> int:
        """An estimate of the run's peak memory beside data and activations, see `footprint`."""
        return self._peak_bytes(self.setting.net)

    def _peak_bytes(self, net: Net) -> int:
        engine = self.setting.engine
        peak = footprint.peak_bytes(self._algorithm, net, self.data.n, self.participation, self.training, self.path, engine)
        return peak - sum(self._row_bytes(net)) if self.folder else peak

    def _row_bytes(self, net: Net) -> tuple[int, int]:
        """Bytes of all clients' own rows, and of the server's models for each."""
        g, fresh = self._algorithm.init(net, self.data.n)
        return self.data.n * rows.nbytes(fresh.values()), rows.nbytes(g[k] for k in per_client(g, self.data.n))

    def _place(self, net: Net) -> Path | None:
        own, server = self._row_bytes(net)
        n = self.data.n
        ever = min(n, int(self.participation * n + 1) * self.rounds)
        need = own * ever // n + server
        return rows.place(self.rows, own + server if self.warm_start is None else 0, need, self._peak_bytes(net), self.device)

    def where(self) -> str:
        """One line: where the clients' rows are, with bytes, and the memory that the run needs at its peak."""
        own, server = self._row_bytes(self.setting.net)
        place = f"in a file in {self.folder}, blocks only for clients that take part" if self.folder else "in memory"
        kept = f"{human(own)} of the clients' own and {human(server)} of the server's for each"
        return f"rows: {kept}, {place}; peak memory beside data and activations about {human(self.peak_bytes())}"

    def header(self) -> Record:
        """What the run is. Data without a name of their own, the model and a loss with options of its own have a digest in theirs."""
        s = self.setting
        among, looked_at = (None if v is None else v.tolist() for v in (self._among, self._looked_at))
        return {
            "algorithm": self.name,
            "options": plain(self._algorithm),
            **({"private": list(self._algorithm.names(s.net))} if isinstance(self._algorithm, Split) else {}),
            "training": plain(self.training),
            "data": self.data.name if self.data.name != "data" else f"data {brief([self.data.x, self.data.y])}",
            "model": f"{type(s.net.module).__name__} {brief(of_net(s.net)['layers'])}",
            "clients": among,
            "eval_clients": self._asked if self._drawn else looked_at if self.adversary is None else None,
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
            "rows": "disk" if self.folder else "memory",
            "buffers": self.buffers,
            "clip": self.clip,
            **({} if self.adversary is None else {"adversary": plain(self.adversary)}),
            "stream": STREAM,
            "criterion": loss_name(s.net.criterion) + (f" {brief(vars(own))}" if isinstance(own := s.net.criterion, nn.Module) else ""),
            "metrics": list(self.measures),
            "eval_split": self.eval_split,
            "target": self._algorithm.required[0] if self._algorithm.required and self._algorithm.root is None else None,
            "backend": plain(backend()),
            "versions": {"pflcore": __version__, "torch": torch.__version__},
            "peak_bytes": self.peak_bytes(),
        }

    def iterate(self) -> Iterator[Record]:
        """Play the rounds, giving each one's record, whose "eval" is None where its evaluation broke off; ends early, after a record with
        the key "stopped", where the run diverged or memory ran out. In the latter case ("failed") the state is that of the last round
        given, and the run can be gone on with."""
        while self._state.round < self.rounds:
            round, began = self._state.round + 1, time.perf_counter()
            done: Outcome | None = None
            best: Record | None = None
            report: Record = {}
            request: str | None = None  # where memory ran out: what for, if that is known
            broken: BaseException | None = None
            try:
                if self._seen:
                    self._state, self._seen = copied(self._state), False
                ids = sample(self._algorithm, self.setting, round, self.participation, self._among)
                transport = self.adversary.send if isinstance(self.adversary, Adversary) else None
                self._state, done = step(self._algorithm, self._state, self.setting, ids, self.buffers, self.clip, transport)
                said = {} if done.void else self._algorithm.report(self._state.g)  # a void round changed nothing
                report = {k: _as_lists(v) for k, v in said.items()}
                if self._due(round):
                    seen: Record = {k: v.tolist() for k, v in self.evaluate(self.eval_split).items()}
                    if self.eval_train:
                        seen["train_loss"] = self.evaluate("train")["loss"].tolist()
                    best = seen
            except BaseException as error:
                if memory.ran_out(error):
                    request = memory.request_of(error)  # the error itself holds the round's frames, and so its memory
                elif done is None:
                    raise
                else:
                    broken = error
            if done is not None:  # a round that was played but not evaluated is a round
                far = farthest(done.ids, done.moved)
                if far is not None:  # before the record is given: whoever gets it may save
                    self._outlier = max(self._outlier or (0.0, 0, 0), (far[1], far[0], round))
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
                    "moved": done.moved and [None if v is None else float(f"{v:.3g}") for v in done.moved],
                    "clipped": done.clipped,
                    "report": report,
                    "eval": best,
                }
            if broken is not None:  # Ctrl-C, or a metric that failed
                raise broken
            if request is not None:
                memory.give_back(self.device)
                where = f"in round {round}" if done is None else f"in the evaluation after round {round}"
                yield {"stopped": memory.sentence(where, self.peak_bytes(), request, self.device), "failed": True}
                return
            assert done is not None
            if self._state.void >= VOID_ROUNDS or (self._state.void and round >= self.rounds):
                yield {"stopped": self._why_void(round, done)}
                return

    def _due(self, round: int) -> bool:
        return bool(self.eval_every) and (round % self.eval_every == 0 or round == self.rounds)

    def _why_void(self, round: int, done: Outcome) -> str:
        outlier = self._outlier
        first = round - self._state.void + 1
        which = f"round {round} was" if first == round else f"rounds {first} to {round} were"
        if done.why is not None:
            return f"{which.capitalize()} void: {done.why}"
        why = f"the server's {', '.join(done.spoilt)} would not be finite" if done.spoilt else ""
        why = why or f"client(s) {done.dropped} sent updates that are not finite"
        what = f"lower the learning rate ({self.training.lr})"
        if outlier is not None:
            what = f"client {outlier[1]}'s update was {outlier[0]:.3g} times the median in round {outlier[2]}: look at its data or set clip"
        return f"The run diverged: {which} void, because {why}; {what}."

    def evaluate(self, split: str) -> dict[str, torch.Tensor]:
        """Each client's personalized model as it is now: see `pflcore.evaluate`. Where `eval_clients` was a number, the
        values of those clients alone, whose ids are in "clients"."""
        measures = self.measures if split == self.eval_split else None
        if self._drawn and self._looked_at is not None:
            return evaluate_some(self._algorithm, self._state, self.setting, split, self._looked_at, self.buffers, measures)
        return evaluate(self._algorithm, self._state, self.setting, split, self._looked_at, self.buffers, measures)

    def run(self, on_round: Callback | Sequence[Callback] | None = None, checkpoint: Checkpoint | str | Path | None = None) -> History:
        """Play all rounds; `on_round(round, record)`, one function or several, sees each record as it is made.

        With `checkpoint`, a folder or when and where, the run can be gone on with after a crash: `Simulation.load(folder, ...).run()` gives
        what this one would have given; see `save`. One that cannot be written is a warning.

        Ctrl-C, or a callback that raises `Stop`, ends the run and keeps what there is. Any other exception ends it too and is passed on;
        the rounds up to there are in its attribute `history` and in the simulation's, and another `run()` goes on from them.
        """
        check_modes()
        callbacks = [on_round] if callable(on_round) else on_round or []
        if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):
            raise TypeError(f"on_round: expected a function of (round, record), or several in a list, got {on_round!r}.")
        keeper = checkpoint if isinstance(checkpoint, Checkpoint) or checkpoint is None else Checkpoint(checkpoint)
        with lock(keeper.folder) if keeper is not None and keeper.note is None else contextlib.nullcontext():
            return self._run(callbacks, keeper)

    def _run(self, callbacks: Sequence[Callback], keeper: Checkpoint | None) -> History:
        self._earlier = [] if self._past else kept.played(self)
        history = self.history = History(self.header(), self._past)
        before, self._past = self._state.round - len(self._past), []
        if keeper is not None and keeper.note is None and self._came_from != Path(keeper.folder):
            self._keep(keeper)  # what stands there may be of another run
        try:
            for callback in callbacks if history.rounds else ():
                getattr(callback, "resume", lambda rounds: None)(history.rounds)
            for record in self.iterate():
                if "stopped" in record:
                    history.stopped, history.failed = record["stopped"], record.get("failed", False)
                    break
                with unbroken():  # so that what is written is what was played
                    history.rounds.append(record)
                    for callback in callbacks:
                        callback(record["round"], record)
                last = self._state.round >= self.rounds and keeper is not None and keeper.note is None
                broke_off = self._due(record["round"]) and not record["eval"]  # whoever goes on evaluates it
                # void: it may be about to end
                if keeper is not None and not (self._state.void or broke_off) and (keeper.due(self._state.round) or last):
                    self._keep(keeper)
        except Stop as stop:
            history.stopped = str(stop)
        except KeyboardInterrupt:
            history.stopped, history.interrupted = f"Interrupted after round {before + len(history.rounds)} of {self.rounds}.", True
        except Exception as error:
            history.stopped = f"{type(error).__name__} in round {self._state.round}: {str(error) or 'without a message'}"
            history.failed, error.history = True, history  # type: ignore[attr-defined]
            raise
        finally:
            history.state = self.state
            history.models = Models(self._algorithm, self.setting, history.state, self.buffers, self.clip)
        said = [f"stopped early: {history.stopped}"] if history.stopped else history.concerns()
        for what in () if history.interrupted else said:
            warnings.warn(f"{self.name}, seed {self.seed}, {what}", RuntimeWarning, stacklevel=3)
        return history

    # checkpoints ------------------------------------------------------------------------------------------------------
    def save(self, folder: str | Path) -> None:
        """Leaves a checkpoint in `folder`, in the place of one that is there: the state as it is now, the records of `run` so far, and what
        the run is. OSError where it cannot be written, ValueError where another run is in the folder."""
        with lock(folder):
            kept.save(self, Checkpoint(folder))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        model: Net | nn.Module | Callable[[], nn.Module],
        data: Federation,
        loss: Loss | None = None,
        **options: Any,
    ) -> Simulation:
        """The simulation whose checkpoint is in `folder`; `run()` plays what is left of it, to the same numbers, and gives all records.

        `model`, `data` and `loss` (where it was no name) are those it was made with. So are all `options`, and they need not be given, but
        for functions, which no file holds: an `algorithm` of one's own, a `training` with a schedule, `metrics`. Other may be `device`,
        `engine`, `workers` and `rows`. ValueError in one sentence for a checkpoint that is absent, damaged, or of another run.
        """
        tensors, facts = checkpoints.load(folder)
        if loss is not None or isinstance(model, Net):
            options["loss"] = loss
        simulation = cls(model=model, data=data, **kept.options(folder, facts["run"], options))
        kept.take(simulation, folder, tensors, facts)
        return simulation

    def restore(self, folder: str | Path) -> None:
        """Takes up the checkpoint in `folder`, which must be one of this very run. ValueError in one sentence where it is not."""
        kept.take(self, folder, *checkpoints.load(folder))

    def _keep(self, keeper: Checkpoint) -> None:
        try:
            kept.save(self, keeper)
        except OSError as e:
            warnings.warn(f"{e} The run goes on.", RuntimeWarning, stacklevel=4)


def round_to(x: float, digits: int = 4) -> float:
    return float(f"{x:.{digits}g}")


def _as_lists(value: torch.Tensor) -> Any:
    """A small tensor as lists; a large one as itself, a copy."""
    return value.tolist() if value.numel() <= LONG else value.detach().cpu().clone()
