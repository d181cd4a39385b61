"""The thin loop: sample -> step -> evaluate -> record.

history = Simulation("ditto", model, data, Training(lr=0.05), rounds=20).run()
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from pflcore.algorithms import algorithm_of, name_of
from pflcore.algorithms._protocol import Algorithm, Stop, Tensors, check_training
from pflcore.check import (
    EXPECT_MODEL,
    Fraction,
    PositiveInt,
    Seed,
    check_fields,
    checked,
    device_of,
    ids_of,
    require,
    warn_caller,
)
from pflcore.data._federation import Federation
from pflcore.metrics import metrics_of
from pflcore.simulation import _describe as describe
from pflcore.simulation import checkpoint as store
from pflcore.simulation._describe import Record
from pflcore.simulation._evaluate import evaluate, evaluate_clients
from pflcore.simulation._history import History
from pflcore.simulation._models import LazyModels
from pflcore.simulation._settings import Evaluation, Hardware, Robustness
from pflcore.simulation._setup import (
    adjustable_clients_per_block,
    peak_bytes,
    prepare_run,
    select_eval_clients,
    training_data,
)
from pflcore.simulation._signals import defer_signals
from pflcore.simulation.callbacks import Callback, check_record
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.round import State, check_state, copy_state, sample_cohort, step
from pflcore.train import Net, Training
from pflcore.train import _memory as memory
from pflcore.train._losses import Loss
from pflcore.train._validate import check_torch_modes

ModelSource = Net | nn.Module | Callable[[], nn.Module]  # a model
# so many void rounds in a row end a run: same data, same lr, it will not recover
MAX_VOID_ROUNDS = 3


@dataclass
class Simulation:
    """One algorithm on one federation.

    What a function as `model` draws comes from `seed`, whatever `torch.manual_seed` it
    calls itself; to start from weights that it gives elsewhere, call it and give the
    module.

    >>> history = Simulation("waffle", model, data, rounds=20).run()   # doctest: +SKIP
    """

    # an instance, a class, a name, "module:Class"
    algorithm: Algorithm | type[Algorithm] | str
    model: Annotated[ModelSource, EXPECT_MODEL]
    data: Federation
    training: Training = field(default_factory=Training)
    rounds: PositiveInt = 100
    # max(1, floor(participation * N + 0.5)) clients a round
    participation: Fraction = 1.0
    # ids of those who may take part; None: all
    clients: Tensor | Sequence[int] | None = None
    seed: Seed = 0
    evaluation: Evaluation = field(default_factory=Evaluation)
    robustness: Robustness = field(default_factory=Robustness)
    hardware: Hardware = field(default_factory=Hardware)
    # running statistics: see `policy`
    batch_norm: Literal["auto", "average", "local"] = "auto"
    # a name, a function of (scores, y) or a module; None: by the targets
    loss: Loss | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_torch_modes()
        alg = self.algorithm = algorithm_of(self.algorithm)
        check_training(alg, self.training)
        self.data = training_data(self)
        asked = self.clients
        n = self.data.n
        asked = None if asked is None else ids_of("clients", asked, n).sort().values
        self.clients = self.eligible_clients = asked
        self.eval_clients = select_eval_clients(self)
        self.history: History | None = None  # of the last call of `run`
        # of all rounds up to the state, by `run` or a checkpoint
        self._records: list[Record] = []
        self.config, self._state = prepare_run(self, device_of(self.hardware.device))
        # does somebody outside hold the state, so that a copy must go on?
        self._state_shared = False
        self.metrics = metrics_of(
            self.evaluation.metrics, self.context.net.scores_classes
        )

    # what it is ---------------------------------------------------------------
    @property
    def context(self) -> Any:
        """What training needs, see `TrainContext`."""
        return self.config.context

    @property
    def name(self) -> str:
        """What the algorithm is called in records."""
        return name_of(self.config.algorithm)

    @property
    def state(self) -> State:
        """The state as it is now: a snapshot, which never changes. A state that is set,
        of another run of this algorithm, federation and model, is copied, and the run
        goes on from there up to its own `rounds`; those that the state has played
        count. ValueError in one sentence for any other."""
        self._state_shared = True
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        given = isinstance(state, State) and state.round <= self.rounds
        require(
            given,
            "state",
            f"a State, like history.state, of at most {self.rounds} rounds",
            state,
        )
        check_state(state, self.config.algorithm, self.context.net, self.data.n)
        self._state = copy_state(self.config, state)
        self._state_shared = False
        self._records = [r for r in self._records if r["round"] <= state.round]

    def peak_bytes(self) -> int:
        """An estimate of the run's peak memory beside its data."""
        return peak_bytes(self.config, self.participation)

    def header(self) -> Record:
        """What the run is, as the first line of its record says it."""
        return describe.header(self)

    # the rounds ---------------------------------------------------------------
    def iterate(self) -> Iterator[Record]:
        """Plays the rounds, giving each one's record, whose "eval" is None where its
        evaluation broke off; ends early, after a record with the key "stopped", where
        the run diverged or memory ran out ("failed"): the state is then that of the
        last round given, and can be gone on with."""
        while self._state.round < self.rounds:
            round = self._state.round + 1
            place = "round"
            began = time.perf_counter()
            line: Record = {}
            error: BaseException | str | None = None
            try:
                if self._state_shared:
                    self._state = copy_state(self.config, self._state)
                    self._state_shared = False
                ids = sample_cohort(
                    self.config, round, self.participation, self.eligible_clients
                )
                self._state, outcome = step(self.config, self._state, ids)
                line = describe.round_record(self, outcome)
                place = "the evaluation after round"
                line["report"] = describe.round_report(self, outcome)
                line["eval"] = self._evaluate_round(round)
            except BaseException as e:  # the error itself holds the round's frames
                error = memory.failed_request(e) if memory.is_out_of_memory(e) else e
            if line:  # a round that was played but not evaluated is a round
                line["seconds"] = float(f"{time.perf_counter() - began:.4g}")
                yield line
            if isinstance(error, BaseException):
                raise error
            if error is not None:
                device = self.hardware.device
                where = f"in {place} {round}"
                memory.free_caches(device)
                said = memory.out_of_memory_text(
                    where,
                    self.peak_bytes(),
                    error,
                    device,
                    adjustable_clients_per_block(self.context),
                )
                yield {"stopped": said, "failed": True}
                return
            void = self._state.void_rounds
            if void and (void >= MAX_VOID_ROUNDS or round >= self.rounds):
                yield {"stopped": describe.explain_void(self, outcome)}
                return

    def _evaluate_round(self, round: int) -> Record | None:
        """The evaluation of a round in which one is due."""
        if not self.evaluation.due(round, self.rounds):
            return None
        seen = {k: v.tolist() for k, v in self.evaluate(self.evaluation.split).items()}
        if self.evaluation.train_loss:
            seen["train_loss"] = self.evaluate("train")["loss"].tolist()
        return seen

    def evaluate(self, split: str) -> Tensors:
        """Each client's personalized model as it is now, values [N] float64: see
        `pflcore.evaluate`. Where `evaluation.clients` was a number, the values of those
        alone, whose ids are in "clients"."""
        measures = self.metrics if split == self.evaluation.split else None
        look: Any = (
            evaluate_clients if isinstance(self.evaluation.clients, int) else evaluate
        )
        values: Tensors = look(
            self.config, self._state, split, self.eval_clients, measures
        )
        return values

    @checked
    def run(
        self,
        on_round: Callback | Sequence[Callback] | None = None,
        checkpoint: Checkpoint | str | Path | None = None,
    ) -> History:
        """Plays all rounds; `on_round(round, record)`, one function or several, sees
        each record as it is made, and in a run that goes on from a checkpoint first
        those of the rounds before.

        With `checkpoint`, a folder or when and where, the run can be gone on with after
        a crash: the same simulation's `restore(folder).run()` gives what this one would
        have given. One that cannot be written is a warning.

        Ctrl-C, or a callback that raises `Stop`, ends the run and keeps what there is.
        Any other exception ends it too and is passed on; the rounds up to there are in
        its attribute `history` and in the simulation's, and another `run()` goes on
        from them.
        """
        check_torch_modes()
        callbacks = [on_round] if callable(on_round) else on_round or []
        keeper = (
            Checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
        )
        with store.lock(keeper.folder) if keeper else nullcontext():
            if keeper:
                self._save_checkpoint(keeper)  # what stands there may be of another run
            return self._run_rounds(callbacks, keeper)

    def _run_rounds(
        self, callbacks: Sequence[Callback], keeper: Checkpoint | None
    ) -> History:
        before = [] if self.history else list(self._records)  # a checkpoint's
        history = self.history = History(self.header(), before)
        try:
            # what came before
            for record, callback in itertools.product(before, callbacks):
                callback(record["round"], record)
            for record in self.iterate():
                if "stopped" in record:
                    history.stopped = record["stopped"]
                    history.failed = record.get("failed", False)
                    break
                with defer_signals():  # so that what is written is what was played
                    history.rounds.append(record)
                    self._records.append(record)
                    names = [*record]
                    for callback in callbacks:
                        callback(self._state.round, record)
                        check_record(record, names, callback)
                self._save_checkpoint_if_due(keeper, record)
        except Stop as stop:
            history.stopped = str(stop)
        except KeyboardInterrupt:
            history.interrupted = True
            if not self._is_complete(history.rounds):
                history.stopped = (
                    f"Interrupted after round {self._state.round} of {self.rounds}."
                )
        except Exception as error:
            words = str(error) or "without a message"
            history.stopped = (
                f"{type(error).__name__} in round {self._state.round}: {words}"
            )
            history.failed, error.history = True, history  # type: ignore[attr-defined]
            raise
        finally:
            history.state = self.state
            history.models = LazyModels(self.config, history.state)
        said = (
            [f"stopped early: {history.stopped}"]
            if history.stopped
            else history.problems()
        )
        for what in () if history.interrupted else said:
            warn_caller(f"{self.name}, seed {self.seed}, {what}", RuntimeWarning)
        return history

    def _is_complete(self, rounds: Sequence[Record]) -> bool:
        """Whether all rounds were played and evaluated, and nothing is left to be
        said of them."""
        played = bool(rounds) and rounds[-1]["round"] >= self.rounds
        broke_off = played and self._lacks_evaluation(rounds[-1])
        return played and not broke_off and not self._state.void_rounds

    def _lacks_evaluation(self, record: Record) -> bool:
        return self.evaluation.due(record["round"], self.rounds) and not record["eval"]

    # checkpoints --------------------------------------------------------------
    def save(self, folder: str | Path) -> None:
        """Leaves a checkpoint in `folder`, instead of one that is there: the state as
        it is now, the records of `run` so far, and what the run is. OSError where it
        cannot be written, ValueError where another run is in the folder."""
        with store.lock(folder):
            store.save_run(folder, self)

    def restore(self, folder: str | Path) -> Simulation:
        """Takes up the checkpoint in `folder`, which must be one of this very run, and
        gives the simulation itself: `run()` plays what is left, to the same numbers,
        and gives all records.

        `hardware` may be another than the one it was made with. ValueError in one
        sentence for a checkpoint that is absent, damaged, or of another run.
        """
        self.config, self._state, self._records = store.restore_run(folder, self)
        self._state_shared = False
        self.history = None
        return self

    def _save_checkpoint_if_due(
        self, keeper: Checkpoint | None, record: Record
    ) -> None:
        round = record["round"]
        # void: it may be about to end; a run that goes on evaluates what broke off
        if keeper is None or self._state.void_rounds or self._lacks_evaluation(record):
            return
        if keeper.due(round) or round >= self.rounds:
            self._save_checkpoint(keeper)

    def _save_checkpoint(self, keeper: Checkpoint) -> None:
        try:
            store.save_run(keeper.folder, self)
        except OSError as e:
            warn_caller(f"{e} The run goes on.", RuntimeWarning)
