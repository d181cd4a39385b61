"""The loop over rounds: sample -> step -> evaluate -> record.

history = Simulation("ditto", model, data, Training(lr=0.05), rounds=20).run()
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pflcore.algorithms import algorithm_of, name_of
from pflcore.algorithms._protocol import Algorithm, Stop, Tensors, check_training
from pflcore.algorithms._task import check_head
from pflcore.check import (
    BatchNormPolicy,
    Fraction,
    PositiveInt,
    Seed,
    Words,
    check_fields,
    checked,
    ids_of,
    reject,
    require,
    warn_caller,
)
from pflcore.data._federation import Federation
from pflcore.metrics import metrics_of
from pflcore.ops import backend
from pflcore.simulation import _describe as describe
from pflcore.simulation import checkpoint as store
from pflcore.simulation._describe import Record
from pflcore.simulation._evaluate import evaluate, evaluate_clients
from pflcore.simulation._functions import describe_functions, warn_of_names
from pflcore.simulation._history import History, RunEnd
from pflcore.simulation._log import log_engine, log_round
from pflcore.simulation._run_models import RunModels
from pflcore.simulation._sampling import Sampling, checked_sampling, sampling_kind
from pflcore.simulation._settings import Evaluation, Hardware, Robustness
from pflcore.simulation._setup import (
    ModelSource,
    as_net,
    check_sampling,
    make_config,
    select_eligible_clients,
    select_eval_clients,
    training_data,
    with_adversary_ids,
    with_client_ids,
)
from pflcore.simulation._signals import defer_signals
from pflcore.simulation._state import (
    State,
    batch_norm_policy,
    check_state,
    copy_state,
    flatten_state,
    initial_state,
)
from pflcore.simulation.callbacks import (
    Callback,
    CallbackStop,
    Tracker,
    call_back,
)
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.round import sample_cohort, step
from pflcore.train import Net, Training
from pflcore.train._losses import Loss
from pflcore.train._validate import check_autocast

# A run ends after this number of void rounds in a row: with the same data and learning
# rate it cannot recover.
MAX_VOID_ROUNDS = 3


@dataclass(eq=False)
class Simulation:
    """One algorithm on one federation.

    >>> history = Simulation("waffle", model, data, rounds=20).run()   # doctest: +SKIP

    Args:
        algorithm: The algorithm: an instance, a class, a name, or "module:Class".
        model: A module, a `Net` (a module with its loss), or a function that makes a
            module. Random numbers of that function come from `seed`, whatever
            `torch.manual_seed` it calls itself. To start from the weights that it makes
            elsewhere, call it and give the module.
        data: The federation.
        training: The options of local training.
        rounds: The number of rounds.
        participation: The fraction of clients that take part in a round, above 0 and at
            most 1. Of n eligible clients these are max(1, floor(participation * n +
            0.5)).
        clients: The ids of the clients that may take part, each a whole number from 0
            to N - 1 for a federation of N clients, or their names; None for all. Of
            these, clients without training samples never take part.
        seed: The seed of all random numbers, a whole number of 64 bits.
        evaluation: When, on what and for which clients models are evaluated.
        robustness: What is done about long updates, and clients that attack.
        hardware: Where the run is computed.
        batch_norm: The policy for batch norm's running statistics. "average" mixes them
            as the models are mixed, "local" leaves each client its own. "auto" is the
            policy that the algorithm's `traits.batch_norm` names first.
        sampling: The rule by which the clients of a round are drawn. "uniform" draws
            all with the same chance. "poisson" lets each client join with the chance
            `participation`, independently of the others. "size" draws S of them without
            replacement, client i with the chance S n_i / sum(n) for its n_i training
            samples, or always where that exceeds 1. Numbers >= 0, one for each client,
            are weights in place of the n_i; a client of weight 0 is never drawn. A
            function of (round, generator, sizes), or its place
            "package.module:function", returns the ids or names of the clients, each
            once, and at most as many as `participation` says; sizes [N] are the
            training samples of all clients, and it must draw by the generator alone.
        loss: The loss of a model that is no `Net`: "cross_entropy", "squared",
            "half_squared", "hinge", "binary_cross_entropy", a function of (scores, y),
            or a module. None is "cross_entropy" for labels and "squared" for numbers.

    Attributes:
        eligible_clients: The ids of the clients that may take part, ascending: those
            of `clients` that have training samples.
        eval_clients: The ids of the clients that are evaluated, ascending.
        metrics: The functions of the metrics of an evaluation, by name.
        functions: The digests of the functions and classes of one's own among the
            options, by the names of the options.
        history: The history of the last call of `run`; None before the first one.
    """

    algorithm: Algorithm | type[Algorithm] | str
    model: ModelSource
    data: Federation
    training: Training = field(default_factory=Training)
    rounds: PositiveInt = 100
    participation: Fraction = 1.0
    clients: Tensor | Sequence[int | str] | None = None
    seed: Seed = 0
    evaluation: Evaluation = field(default_factory=Evaluation)
    robustness: Robustness = field(default_factory=Robustness)
    hardware: Hardware = field(default_factory=Hardware)
    batch_norm: BatchNormPolicy = "auto"
    loss: Loss | None = None
    sampling: Sampling = "uniform"

    def __post_init__(self) -> None:
        check_fields(self)
        net, data = self._resolve_options()
        # Before anything calls a function that remembers its calls.
        self.functions = self._describe_functions(net)
        self.eval_clients = select_eval_clients(
            data, self.evaluation, self.robustness.adversary, self.seed
        )
        self.config = make_config(
            net,
            data,
            self.hardware,
            self.training,
            self.rounds,
            self.seed,
            algorithm=self.algorithm,
            robustness=self.robustness,
            batch_norm=self.batch_norm,
            eligible=self.eligible_clients,
        )
        net = self.config.net
        self.metrics = metrics_of(self.evaluation.metrics, net.scores_classes)
        self.history: History | None = None
        # The records of all rounds up to the state, by `run` or a checkpoint.
        self._records: list[Record] = []
        self._num_in_history = 0  # the number of records that a history has
        self._state = initial_state(
            self.config.algorithm,
            net,
            data.n,
            trainable_clients=self.config.eligible_clients,
        )
        check_head(self.config.algorithm, self.config)
        # True where the caller may hold the state, so that the run needs a copy.
        self._state_shared = False
        # Digests of the data and the model with which the rounds so far were played;
        # None where they are not of this simulation.
        self._played_digests: Record | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute, but no option of a simulation that is made.

        Raises AttributeError for an option, of which everything else is made already.
        """
        is_made = "config" in vars(self)
        if is_made and name in self.__dataclass_fields__:
            reject(
                name,
                "an option that stays as the simulation was made",
                Words("an assignment"),
                remedy=f"dataclasses.replace(simulation, {name}=...) makes another one",
                error=AttributeError,
            )
        super().__setattr__(name, value)

    def _resolve_options(self) -> tuple[Net, Federation]:
        """Replaces what options name by what they mean, and checks that they fit.

        Returns the model that the run starts from and the data that it trains on. The
        option `data` stays as given: a simulation that is made of this one, with
        another algorithm or seed, poisons and splits the data itself.
        """
        self.algorithm = with_client_ids(algorithm_of(self.algorithm), self.data)
        self.robustness = with_adversary_ids(self.robustness, self.algorithm, self.data)
        check_training(self.algorithm, self.training)
        net = as_net(self.model, self.loss, self.data, self.seed)
        data = training_data(
            self.data,
            self.algorithm,
            net,
            self.robustness,
            self.evaluation,
            self.seed,
        )
        if self.clients is not None:
            ids = ids_of("clients", self.clients, data.n, data.names)
            self.clients = ids.sort().values
        self.eligible_clients = select_eligible_clients(data, self.clients)
        self.sampling = checked_sampling(self.sampling, data.n, self.eligible_clients)
        check_sampling(
            self.sampling,
            self.participation,
            self.algorithm,
            self.eligible_clients,
        )
        net = self.algorithm.prepare(net)
        batch_norm_policy(self.algorithm, net, self.batch_norm)
        return net, data

    def _describe_functions(self, net: Net) -> dict[str, str]:
        """The digests of the run's functions, by the names of their options."""
        return describe_functions(
            net.module,
            net.loss_fn,
            algorithm=self.algorithm,
            # The header has the numbers of a schedule.
            training=replace(self.training, schedule=None),
            metrics=self.evaluation.metrics,
            sampling=self.sampling,
        )

    # the run ------------------------------------------------------------------
    @property
    def state(self) -> State:
        """The state as it is now: a snapshot, which never changes.

        Assigning a state of another run of this algorithm, federation and model
        continues from a copy of it, up to the `rounds` of this simulation; rounds that
        the state has played already are included in that number. Assigning any other
        state raises ValueError.
        """
        self._state_shared = True  # the next round copies before it writes
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        fits = isinstance(state, State) and state.round <= self.rounds
        wanted = f"a State, like history.state, of at most {self.rounds} rounds"
        require(fits, "state", wanted, state)
        config = self.config
        check_state(state, config.algorithm, config.net, self.data.n)
        self._state = copy_state(self.config, state)
        self._state_shared = False
        self._played_digests = None
        kept = [record for record in self._records if record["round"] <= state.round]
        # Of another run's state there are no records of the rounds before.
        self._records = kept if len(kept) == state.round else []
        self._num_in_history = min(self._num_in_history, len(self._records))

    def header(self) -> Record:
        """The description of the run: the first line of its record.

        `history.header` is the header with which `run` began. A checkpoint has it, too,
        and tells runs apart by it.
        """
        return describe.describe_run(self)

    def _header_to_play(self) -> Record:
        """The header of the rounds that are played from here on.

        Raises ValueError where the rounds so far were played on other data: tensors can
        be changed in place, and no header would be true of all rounds then.
        """
        header = self.header()
        played = self._played_digests
        if played is not None and self._state.round:
            expected = f"those of the {self._state.round} rounds that are played"
            got = Words("others, which were changed in place")
            is_same = header["digests"] == played
            remedy = "make a new simulation of changed data"
            require(is_same, "data and model", expected, got, remedy=remedy)
        self._played_digests = header["digests"]
        return header

    # the rounds ---------------------------------------------------------------
    def iterate(self) -> Iterator[Record]:
        """Plays the rounds that are left, and yields the record of each.

        The record's "eval" is None where no evaluation is due, and where an error ended
        the evaluation: Ctrl-C, or an exception of a metric. Raises Stop where the run
        diverges. The state is then that of the last round that was yielded, and the run
        can continue from it.
        """
        config = self.config
        ranks = config.ranks
        if ranks.is_first:
            log_engine(config)
        while self._state.round < self.rounds:
            round = self._state.round + 1
            start = time.perf_counter()
            record: Record = {}
            error: BaseException | None = None
            try:
                # A round that is half written is no state. So a signal waits for its
                # end, but one that comes while clients train or are evaluated.
                with defer_signals():
                    ids = self._start_round(round)
                    self._state, outcome = step(config, self._state, ids)
                    record = describe.round_record(config, self._state, outcome)
                    record["report"] = describe.round_report(
                        config, self._state, outcome
                    )
                    record["eval"] = self._evaluate_round(round)
            except BaseException as e:
                ranks.tell(f"round {round}", e)
                error = e
            if record:
                # A round that was played counts, also without its evaluation.
                record["seconds"] = float(f"{time.perf_counter() - start:.4g}")
                self._records.append(record)
                if ranks.is_first:
                    log_round(record, self.rounds, outcome)
                yield record
            if error is not None:
                raise error
            if self._has_diverged(round):
                raise Stop(
                    describe.explain_void(config, self._state, self._records, outcome)
                )

    def _start_round(self, round: int) -> Tensor:
        """The ids of the round's cohort.

        A state that the caller may hold is copied, so that the round can write to it.
        """
        if self._state_shared:
            self._state = copy_state(self.config, self._state)
            self._state_shared = False

        draw = partial(
            sample_cohort,
            self.config,
            round,
            self.participation,
            self.eligible_clients,
            self.sampling,
        )
        if sampling_kind(self.sampling) != "function":
            return draw()
        # A function of the user's might draw something else on another rank.
        place = f"the cohort of round {round}"
        return self.config.ranks.from_first(place, draw)

    def _has_diverged(self, round: int) -> bool:
        """True where void rounds end the run after `round`."""
        void_rounds = self._state.void_rounds
        is_last = round >= self.rounds
        return void_rounds >= MAX_VOID_ROUNDS or (void_rounds > 0 and is_last)

    def _evaluate_round(self, round: int) -> Record | None:
        """The evaluation of a round in which one is due."""
        if not self.evaluation.due(round, self.rounds):
            return None
        values = self.evaluate(self.evaluation.split)
        record = {name: tensor.tolist() for name, tensor in values.items()}
        if self.evaluation.train_loss:
            record["train_loss"] = self.evaluate("train")["loss"].tolist()
        return record

    def evaluate(self, split: str) -> Tensors:
        """Evaluates each client's personalized model as it is now.

        See `pflcore.evaluate` for the values [N]. Where `evaluation.clients` is a
        number, there are only values of the clients that were drawn, whose ids are in
        "clients".
        """
        metrics = self.metrics if split == self.evaluation.split else None
        clients = self.eval_clients
        if isinstance(self.evaluation.clients, int):
            return evaluate_clients(self.config, self._state, split, clients, metrics)
        return evaluate(self.config, self._state, split, clients, metrics)

    @checked
    def run(
        self,
        on_round: Callback | Sequence[Callback] | None = None,
        checkpoint: Checkpoint | str | Path | None = None,
        resume: bool = False,
    ) -> History:
        """Plays the rounds that are left.

        The history has these rounds, and those of a checkpoint or of `iterate` before
        them. Ctrl-C, or a callback that raises `Stop`, ends the run and keeps its
        rounds so far. Any other exception ends it too and is passed on. The rounds so
        far are in the exception's attribute `history` and in the simulation's. Another
        `run()` continues from them, and returns the rounds that it plays itself.

        Args:
            on_round: A function of (round, record), or several, that are called with
                each record as it is made. In a run that continues from a checkpoint
                they are called first with the records of the rounds before.
            checkpoint: A folder, or a `Checkpoint`, which has the times, too. After a
                crash `run(checkpoint=folder, resume=True)` of the same simulation
                returns what this call would have returned. A checkpoint that cannot be
                written is an error before the first round, and later a warning. Another
                run's checkpoint, or one of later rounds, is never overwritten.
            resume: Goes on from the checkpoint where there is one, as `restore` does,
                also to more rounds. Where there is none, the run begins. It needs
                `checkpoint`.
        """
        check_autocast()
        callbacks = [on_round] if callable(on_round) else on_round or []
        if isinstance(checkpoint, str | Path):
            checkpoint = Checkpoint(checkpoint)
        require(
            checkpoint or not resume, "resume", "False without a checkpoint", resume
        )
        if checkpoint and resume:
            self._restore_if_there(checkpoint)
        ranks = self.config.ranks
        if not ranks.is_first:  # the first rank alone writes and calls back
            callbacks = []
            checkpoint = None
        with _warnings_on(ranks.is_first):
            with ranks.together("the beginning of the run"):
                # Data may be large, so their digests are made once.
                header = self._header_to_play()
                self._check_ranks_agree(header)
                if checkpoint:
                    if not resume:
                        self._check_loses_nothing(checkpoint, header)
                    # Where it cannot be written, no round is played.
                    self._write_checkpoint(checkpoint.folder, header)
            return self._run_rounds(header, callbacks, checkpoint)

    def _check_ranks_agree(self, header: Record) -> None:
        """Raises ValueError on all ranks where one would play another run."""
        ranks = self.config.ranks
        if ranks.count == 1:
            return
        description = {
            **header,
            "number of rounds played": self._state.round,
            "digest of the state": describe.content_digest(flatten_state(self._state)),
            # The number of threads changes no bit.
            "backend": str(backend()._replace(threads=1)),
            "CPU capability": torch.backends.cpu.get_cpu_capability(),
        }
        warn_of_names("ranks", self.functions)
        descriptions = ranks.exchange("the comparison of the ranks", description)
        for rank, other in enumerate(descriptions):
            difference = describe.first_difference(
                descriptions[0], other, places=("on rank 0", f"on rank {rank}")
            )
            if difference is not None:
                raise ValueError(
                    f"ranks: rank {rank} would play another run than rank 0: "
                    f"{difference}; give all ranks the same data and code, and seed "
                    "what the script draws."
                )

    def _run_rounds(
        self,
        header: Record,
        callbacks: Sequence[Callback],
        checkpoint: Checkpoint | None,
    ) -> History:
        """Plays the rounds that are left, and keeps their records."""
        # The rounds of a checkpoint or of `iterate`, which no history has.
        before = self._records[self._num_in_history :]
        # The header of a history is its owner's, who may add to it.
        history = History(dict(header), before, rank=self.config.ranks.rank)
        self._num_in_history = len(self._records)
        self.history = history
        try:
            with self.config.ranks.together("the end of the run"):
                for record, callback in itertools.product(before, callbacks):
                    call_back(callback, record)
                for record in self.iterate():
                    # A signal that ends the program would separate the record from the
                    # round.
                    with defer_signals():
                        history.rounds.append(record)
                        self._num_in_history = len(self._records)
                        for callback in callbacks:
                            call_back(callback, record)
                    self._save_checkpoint_if_due(checkpoint, header, record)
        except Stop as stop:
            is_wanted = isinstance(stop, CallbackStop)
            history.end = RunEnd("stopped", str(stop), is_wanted)
        except KeyboardInterrupt:
            reason = f"Interrupted after round {self._state.round} of {self.rounds}."
            is_whole = self._is_complete(history.rounds)
            history.end = RunEnd("interrupted", None if is_whole else reason)
        except Exception as error:
            words = str(error) or "without a message"
            kind = type(error).__name__
            reason = f"{kind} after round {self._state.round}: {words}"
            history.end = RunEnd("failed", reason)
            error.history = history  # type: ignore[attr-defined]
            raise
        finally:
            history.state = self.state
            history.models = RunModels(self.config.in_process, history.state)
            for callback in callbacks:
                if isinstance(callback, Tracker):
                    callback.take_end(history.end)
        if not history.interrupted:
            self._warn_of_problems(history)
        return history

    def _warn_of_problems(self, history: History) -> None:
        """Warns of an early end that nobody wants, or of problems in the rounds."""
        if history.end is not None and history.end.broke_off:
            problems = [f"stopped early: {history.stopped}"]
        else:
            problems = history.problems()
        for problem in problems:
            name = name_of(self.algorithm)
            warn_caller(f"{name}, seed {self.seed}, {problem}", RuntimeWarning)

    def _is_complete(self, rounds: Sequence[Record]) -> bool:
        """True where no round is missing and the last one is whole.

        The last round must be evaluated, if that is due, and not void.
        """
        if not rounds or rounds[-1]["round"] < self.rounds:
            return False
        return not self._lacks_evaluation(rounds[-1]) and not self._state.void_rounds

    def _lacks_evaluation(self, record: Record) -> bool:
        """True where the evaluation of a round broke off."""
        return self.evaluation.due(record["round"], self.rounds) and not record["eval"]

    # checkpoints --------------------------------------------------------------
    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint into `folder`, in place of one that is there.

        It holds the state as it is now, the records of `run` so far, and the header of
        the run. Raises OSError where it cannot be written.
        """
        ranks = self.config.ranks
        with ranks.together("the saving of a checkpoint"):
            header = self._header_to_play()
            if ranks.is_first:
                self._write_checkpoint(folder, header)

    def restore(self, folder: str | Path) -> Simulation:
        """Takes up the checkpoint in `folder`, and returns the simulation itself.

        The checkpoint must be one of this very run; `hardware` alone may be another.
        Then `run()` plays the rounds that are left, to the same numbers, and returns
        all records.

        `rounds` may be another number than that of the checkpoint's run, so that a
        finished run goes on. Its rounds are those of a run that was begun with this
        number; an evaluation of the earlier last round stays in its record. This is
        refused where the rounds so far depend on their number: by the algorithm
        (`traits.rounds_reason`), or by step sizes of a `schedule` that would have been
        others.

        Raises ValueError for a checkpoint that is absent, damaged, or of another run.
        """
        self.config, self._state, self._records = store.restore_run(
            folder, self.header(), self.config
        )
        self._state_shared = False
        self._num_in_history = 0
        self._played_digests = None
        self.history = None
        return self

    def check_checkpoint(self, folder: str | Path) -> None:
        """Raises ValueError unless `restore` would take up the checkpoint in `folder`.

        Nothing changes. It looks at the checkpoint's header and number of rounds.
        """
        store.check_run(folder, store.load(folder)[1], self.header(), self.config)

    def _restore_if_there(self, checkpoint: Checkpoint) -> None:
        """Takes up a checkpoint where there is one."""
        ranks = self.config.ranks
        # A rank that does not see the folder must fail, and not begin the run anew.
        exists = ranks.from_first("the checkpoint", lambda: checkpoint.exists)
        if exists:
            self.restore(checkpoint.folder)

    def _check_loses_nothing(self, checkpoint: Checkpoint, header: Record) -> None:
        """Raises ValueError where a checkpoint in the folder would be lost.

        It is that of another run, or of more rounds of this run than the simulation has
        played.
        """
        if not checkpoint.exists:
            return
        folder = checkpoint.folder
        facts = store.load(folder)[1]
        store.check_run(folder, facts, header, self.config)
        if facts["round"] > self._state.round:
            raise ValueError(
                f"checkpoint: {folder} holds round {facts['round']} of this run, which "
                f"would begin with round {self._state.round + 1}; give resume=True, or "
                "another folder."
            )

    def _save_checkpoint_if_due(
        self, checkpoint: Checkpoint | None, header: Record, record: Record
    ) -> None:
        """Writes a checkpoint after a round, where it is time for one."""
        if checkpoint is None:
            return
        # A run with void rounds may be about to end. One that continues makes up for an
        # evaluation that broke off, so the round before must stand.
        if self._state.void_rounds or self._lacks_evaluation(record):
            return
        round = record["round"]
        if checkpoint.due(round) or round >= self.rounds:
            self._save_checkpoint(checkpoint, header)

    def _save_checkpoint(self, checkpoint: Checkpoint, header: Record) -> None:
        """Writes a checkpoint; warns where it cannot be written."""
        try:
            self._write_checkpoint(checkpoint.folder, header)
        except OSError as e:
            warn_caller(f"{e} The run goes on.", RuntimeWarning)

    def _write_checkpoint(self, folder: str | Path, header: Record) -> None:
        """Writes a checkpoint of the state as it is now."""
        store.save_run(folder, header, self.config, self._state, self._records)


@contextmanager
def _warnings_on(wanted: bool) -> Iterator[None]:
    """Keeps warnings inside of the block silent, unless they are wanted."""
    if wanted:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
