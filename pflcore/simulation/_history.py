"""The results of a run: its records, its models, and what needs attention.

Symbols: N clients of the federation; M models; T evaluated rounds; B samples of a
batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pflcore import metrics, privacy
from pflcore.check import (
    OpenUnitFloat,
    Words,
    checked,
    client_id,
    name_few,
    reject,
    require,
)
from pflcore.simulation import _export as export
from pflcore.simulation._compare import Comparison, compare_runs
from pflcore.simulation._export import Per
from pflcore.simulation._updates import OUTLIER_RATIO, longest_update, updates_of_round
from pflcore.simulation._weights import dense_weights, has_weights

Record = dict[str, Any]
RUNAWAY_RATIO = 1e6  # times the median update of a round


class Models(Protocol):
    """The personalized models of a run that was played."""

    def __len__(self) -> int:
        """The number of clients."""

    def __getitem__(self, client: int) -> Any:
        """The `Personalized` of one client."""

    def adapt(self, samples: Any, rounds: int) -> Any:
        """The `Personalized` of a newcomer, see `History.adapt`."""

    def export(self, header: Mapping[str, Any], folder: str | Path) -> None:
        """Writes all models into files, see `History.export`."""


class RunEnd(NamedTuple):
    """The end of a run before its last round, or by Ctrl-C after it.

    Attributes:
        kind: "stopped" by the algorithm or a callback, "interrupted" by Ctrl-C, or
            "failed" by an error.
        reason: One sentence; None where Ctrl-C came after the last round, so that the
            run is whole.
        wanted: True where a callback stopped the run, as its user wants.
    """

    kind: Literal["stopped", "interrupted", "failed"]
    reason: str | None
    wanted: bool = False

    @property
    def broke_off(self) -> bool:
        """True where rounds are missing, and nobody wanted that."""
        return self.reason is not None and not self.wanted


@dataclass(repr=False)
class History:
    """The results of a run: its records and its models.

    `Simulation.run` returns the history of a run that it played, and
    `pflcore.lab.results.read` those of the runs in a file. A file holds neither models
    nor the state: what needs them raises ValueError.

    Attributes:
        header: The description of the run: algorithm, options, data, seed; {} where the
            header line of a file is lost.
        rounds: The records of the rounds, in order.
        end: The reason why the run ended early; None for a whole run.
        models: The personalized models of the last state, see `model`; None where the
            run was read from a file.
        rank: The number of this process among those that played the run together.
        samples: The outcome of each evaluated sample after the last round, in a record
            of the command line: "round", "split" and "correct", by client a text with
            "1" for each sample that is classified correctly, else "0"; {} where the
            record has none.
        state: The state after the last round of `rounds`. Raises ValueError where there
            is none, as in a file or in the runs of `run_each_target`.
    """

    header: Record = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)
    end: RunEnd | None = None
    models: Models | None = None
    rank: int = 0
    samples: Record = field(default_factory=dict)
    _state: Any = field(default=None, init=False)

    @property
    def state(self) -> Any:
        """The state after the last round.

        Raises ValueError where there is none: in a file, or in `run_each_target`'s.
        """
        if self._state is None:
            reject(
                "state",
                "a history with the run's state, as Simulation.run() returns it",
                Words("one without"),
                remedy="take up a checkpoint: Simulation.restore(folder)",
            )
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def __repr__(self) -> str:
        words = [
            str(self.header[key])
            for key in ("algorithm", "data")
            if self.header.get(key)
        ]
        if "n" in self.header:
            words.append(f"{self.header['n']} clients")
        words.append(f"{len(self.rounds)} rounds")
        values = self.last_evaluation
        for key in ("accuracy", "loss"):
            if values.get(key) is not None:
                words.append(f"{key} {metrics.mean(values[key]):.4g}")
        if self.stopped:
            words.append(f"stopped: {self.stopped!r}")
        return f"History({', '.join(words)})"

    # the record ---------------------------------------------------------------
    @property
    def stopped(self) -> str | None:
        """The reason why the run ended early, one sentence; None for a whole run."""
        return None if self.end is None else self.end.reason

    @property
    def interrupted(self) -> bool:
        """True after Ctrl-C, also where it came after the last round."""
        return self.end is not None and self.end.kind == "interrupted"

    @property
    def failed(self) -> bool:
        """True where an error ended the run."""
        return self.end is not None and self.end.kind == "failed"

    @property
    def unfinished(self) -> bool:
        """True where Ctrl-C or an error stopped the run.

        False where the run is whole, and where the algorithm or a callback stopped it.
        """
        return self.stopped is not None and (self.interrupted or self.failed)

    @property
    def complete(self) -> bool:
        """True where the run is over, and its record lacks no line.

        Such a record has a header. It has all planned rounds, or all rounds up to the
        one after which the algorithm stopped the run.
        """
        numbers = [record["round"] for record in self.rounds]
        lacks_no_round = numbers == [*range(1, len(numbers) + 1)]
        if not self.header or self.unfinished or not lacks_no_round:
            return False
        return self.stopped is not None or len(numbers) == self.header.get("rounds")

    def lines(self) -> Iterator[Record]:
        """Yields the lines of the record file."""
        yield {"header": self.header}
        yield from self.rounds
        if self.samples:
            yield {"samples": self.samples}
        if self.stopped is not None:
            yield self.last_line()

    def last_line(self) -> Record:
        """The line of the record file that says why the run ended early."""
        line = {"stopped": self.stopped, "unfinished": self.unfinished}
        if self.interrupted:
            line["interrupted"] = True
        return line

    @property
    def algorithm(self) -> str:
        """The name of the algorithm; "?" where no line has it."""
        for line in (self.header, *self.rounds):
            if "algorithm" in line:
                return str(line["algorithm"])
        return "?"

    @property
    def target(self) -> int | None:
        """The only client with a personalized model; None for all clients."""
        target = self.header.get("target")
        return target if isinstance(target, int) else None

    @property
    def held_out(self) -> str:
        """A note on training samples that the algorithm held out.

        It is "" for an algorithm that trains on all samples, as most do.
        """
        share = (self.header.get("facts") or {}).get("held out for validation")
        return f"{share:.0%} of its training samples held out" if share else ""

    @property
    def rounds_played(self) -> int:
        """The number of the last round in the record."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @checked
    def privacy(self, delta: OpenUnitFloat | None = None) -> tuple[float, float] | None:
        """The (epsilon, delta) with which the noise of a `Private` mean hides a client.

        It counts the rounds so far, void ones too, by `pflcore.privacy.epsilon`. A run
        draws its clients as that assumes: each joins by itself with the probability
        `participation`, or all join in every round. It is None where the run adds no
        noise, or has a single client with training samples.

        Args:
            delta: See `pflcore.privacy.epsilon`. None is one over the number of clients
                that may take part.
        """
        rate = self.header.get("participation")
        noise = self.header.get("noise_multiplier", 0.0)
        if not (noise and rate and self.rounds):
            return None
        sizes = self.header.get("size") or []
        eligible = self.header.get("clients") or range(len(sizes))
        num_trainable = sum(sizes[client] > 0 for client in eligible)
        if num_trainable == 1 or (delta is None and num_trainable == 0):
            return None  # there is nobody among whom a client could hide
        if delta is None:
            delta = 1 / num_trainable
        return privacy.epsilon(noise, rate, self.rounds_played, delta), delta

    def compare(self, other: History) -> Comparison:
        """The differences from another run: in the description and in the numbers.

        Its text has the fields of the headers that differ, and the first round that
        does, with its numbers. Equal bits are said, too. The seconds of rounds are left
        out.
        """
        words = "a History, of Simulation.run() or pflcore.lab.results.read()"
        require(isinstance(other, History), "other", words, other)
        names = (f"{self.name} (first)", f"{other.name} (second)")
        headers = (self.header, other.header)
        return compare_runs(headers, (self.rounds, other.rounds), names)

    @property
    def name(self) -> str:
        """The algorithm and the seed in words."""
        seed = self.header.get("seed")
        return self.algorithm if seed is None else f"{self.algorithm}, seed {seed}"

    # the clients' names -------------------------------------------------------
    def client_name(self, client: int) -> str | int:
        """The name of a client; its id where the federation has no names."""
        names = self.header.get("names") or ()
        return str(names[client]) if client < len(names) else client

    def by_name(
        self, values: Sequence[Any], ids: Sequence[int] | None = None
    ) -> dict[str | int, Any]:
        """Clients' values by the clients' names, or by their ids without names.

        A record has lists of values, for example HypCluster's clusters of a round:

            report = history.rounds[-1]["report"]
            history.by_name(report["cluster"], report["rows"])

        Raises ValueError unless there is a value for each client, and where two of them
        have the same name.

        Args:
            values: The values, one for each client.
            ids: The clients' ids, such as an evaluation's "clients"; None for the
                clients 0, 1, ...
        """
        if ids is None:
            n = self.header.get("n", len(values))
            words = f"one for each of the {n} clients, or their ids"
            require(len(values) == n, "values", words, values)
        clients = range(len(values)) if ids is None else ids
        names = [self.client_name(int(client)) for client in clients]
        require(len(values) == len(names), "values", f"{len(names)} of them", values)
        words = "clients with different names"
        require(len({*names}) == len(names), "ids", words, names)
        return dict(zip(names, values, strict=True))

    # the clients' values ------------------------------------------------------
    @property
    def evaluations(self) -> list[Record]:
        """The records of the rounds that were evaluated."""
        return [record for record in self.rounds if record.get("eval")]

    @property
    def last_evaluation(self) -> Record:
        """The values of the last round that was evaluated; {} without one."""
        evaluations = self.evaluations
        return {**evaluations[-1]["eval"]} if evaluations else {}

    @property
    def keys(self) -> list[str]:
        """The names of the clients' values: "accuracy", "loss", "size", ..."""
        keys: dict[str, None] = {}  # in the order of their appearance
        for record in self.evaluations:
            keys |= dict.fromkeys(record["eval"])
        return [key for key in keys if key != "clients"]

    @property
    def main_metric(self) -> str:
        """The metric "accuracy", or "loss" where no client has an accuracy."""
        evaluations = self.evaluations
        if not evaluations:
            return "accuracy"
        for record in evaluations:
            if metrics.count(record["eval"].get("accuracy", ())):
                return "accuracy"
        return "loss"  # as for regression

    @property
    def extra_metrics(self) -> list[str]:
        """The names of the chosen metrics other than accuracy and loss."""
        return sorted({*self.last_evaluation} - {"size", "clients", "loss", "accuracy"})

    def series(self, key: str | None = None) -> tuple[list[int], Tensor]:
        """The evaluated rounds, and each client's value in them, [T, N] float64.

        A client without samples has NaN. A loss that was not finite is null in a file
        and infinite here, so that no mean leaves it out. Raises ValueError where no
        evaluation has the key.

        Args:
            key: The name of the value: "accuracy", "loss", or one of the run's metrics;
                None for accuracies, or for losses where there are no accuracies.
        """
        key = key or self.main_metric
        evaluations = self.evaluations
        if not evaluations:
            return [], torch.empty(0, 0, dtype=torch.float64)
        keys = self.keys
        require(key in keys, "key", f"one of {', '.join(keys)}", key, keys)
        records = [record for record in evaluations if key in record["eval"]]
        rounds = [record["round"] for record in records]
        return rounds, torch.stack([client_values(r["eval"], key) for r in records])

    def curve(
        self, client: int | None = None, key: str | None = None
    ) -> tuple[list[int], list[float]]:
        """The evaluated rounds, and one client's value or the mean in each of them.

        Raises ValueError where no evaluation has the key.

        Args:
            client: The id of the client; None gives the mean over clients. A client
                that was not evaluated has NaN.
            key: The name of the value, see `series`.
        """
        rounds, values = self.series(key)
        if client is None:
            return rounds, [metrics.mean(row) for row in values]
        # A record has the ids of the evaluated clients only where some clients are not
        # evaluated.
        ids = self.last_evaluation.get("clients", range(values.shape[1]))
        if client not in ids:
            return rounds, [math.nan] * len(rounds)
        return rounds, values[:, list(ids).index(client)].tolist()

    def last_values(self, key: str | None = None) -> Tensor:
        """The clients' values at the last evaluation [N], see `series`."""
        values = self.series(key)[1]
        return values[-1] if len(values) else values.reshape(0)

    # the rounds ---------------------------------------------------------------
    def outliers(self) -> dict[int, tuple[float, int]]:
        """The clients with an update many times longer than the cohort's median.

        The value of a client has the largest ratio to the median, and the number of
        rounds with a ratio above `OUTLIER_RATIO`.
        """
        outliers: dict[int, tuple[float, int]] = {}
        for record in self.rounds:
            for ratio, client, _ in updates_of_round(record):
                if ratio > OUTLIER_RATIO:
                    largest, times = outliers.get(client, (0.0, 0))
                    outliers[client] = max(largest, ratio), times + 1
        return outliers

    def cumulative_bytes(self) -> list[int]:
        """The bytes that were sent up to the end of each round."""
        by_round = []
        for record in self.rounds:
            by_round.append(record.get("bytes_down", 0) + record.get("bytes_up", 0))
        return list(accumulate(by_round))

    def rounds_with_weights(self) -> list[int]:
        """The numbers of the rounds that report mixing weights."""
        return [record["round"] for record in self.rounds if has_weights(record)]

    def weights(
        self, rounds: Sequence[int] | None = None
    ) -> tuple[list[int], list[Tensor]]:
        """The rounds that report mixing weights, and these weights.

        The weights are `[N]` for a single model and `[M, N]` for several models.

        Args:
            rounds: The rounds to look at; by default all.
        """
        n = self.header.get("n")
        reporting = []
        weights = []
        for record in self.rounds:
            is_chosen = rounds is None or record["round"] in rounds
            if is_chosen and has_weights(record):
                reporting.append(record["round"])
                weights.append(dense_weights(record["report"], n))
        return reporting, weights

    def problems(self) -> list[str]:
        """Sentences about what needs attention.

        These are clients that were dropped in most of their rounds, losses that are not
        finite, and updates a million times as long as others.
        """
        problems: list[str] = []
        played: Counter[int] = Counter()
        dropped: Counter[int] = Counter()
        for record in self.rounds:
            played.update(record.get("cohort") or [])
            dropped.update(record.get("dropped") or [])
        often = sorted(i for i, count in dropped.items() if 2 * count > played[i])
        if often:
            names = name_few([self.client_name(client) for client in often])
            problems.append(
                f"client(s) {names} were dropped in most of their rounds: their "
                "updates were not finite, or of no use; look at their data, or lower "
                "lr."
            )
        values = self.last_evaluation
        losses = []
        if "loss" in values:
            losses = client_values(values, "loss").tolist()
        ids = values.get("clients") or range(len(losses))
        bad = [i for i, loss in zip(ids, losses, strict=True) if loss == math.inf]
        if bad:
            names = name_few([self.client_name(client) for client in bad])
            problems.append(
                f"the last loss of client(s) {names} is inf; look at their data, or "
                "lower lr."
            )
        longest = longest_update(self.rounds)
        if longest is not None and longest.ratio > RUNAWAY_RATIO:
            name = self.client_name(longest.client)
            problems.append(
                f"client {name}'s update was {longest.ratio:.3g} times the "
                f"median of round {longest.round}; hold such updates by the run's clip."
            )
        return problems

    # models and tables --------------------------------------------------------
    def export(self, folder: str | Path) -> None:
        """Writes every client's personalized model into `folder`, which is made.

        Each client has a safetensors file. `manifest.json` has the file of each client,
        the names of the tensors, and the way to predict with them. Where an algorithm
        predicts with one model, the file is its `state_dict`. Else it has the tensors
        that its prediction takes, a model's parameters as `w.NAME`. For a standardized
        federation the manifest has each client's mean and deviation, and says how they
        scale raw features. It also has the names of columns, classes and clients.
        `pflcore.simulation.load_model` loads a model from the folder.

        Raises ValueError where the run kept no model, OSError where the folder cannot
        be written.

        Of several ranks that played the run only the first one writes.
        """
        if self.rank:
            return
        self._models("model").export(self.header, folder)

    def model(self, client: int | str) -> Any:
        """One client's personalized model after the last round, a `Personalized`.

        For every algorithm it is an `nn.Module` from samples [B, ...] to scores. It
        takes raw features, also where the federation was standardized. Raises
        ValueError where there is no such client, or where the run kept no model.

        Args:
            client: The id of the client, or its name where the federation has names.
        """
        models = self._models("model")
        names = self.header.get("names")
        return models[client_id("client", client, len(models), names)]

    def _models(self, name: str) -> Models:
        """The models of the run.

        Raises ValueError for the argument `name` where there are none, as in a file.
        """
        if self.models is None:
            reject(
                name,
                "a history with models, as run() returns it",
                Words("one without"),
                remedy="a record of a run holds no model",
            )
        return self.models

    def predict(self, client: int | str, x: Any) -> Any:
        """The answers of a client's model to the samples `x` [B, ...].

        They are labels int64 [B], or their names where classes have names, or values
        for continuous targets, see `Personalized.predict`.

        Args:
            client: The id or the name of the client.
            x: Samples with raw features, or a data frame whose columns have the names
                of the federation's.
        """
        return self.model(client).predict(x)

    def adapt(self, samples: Any, rounds: int = 5) -> Any:
        """The `Personalized` of a newcomer, made by the algorithm's own rule.

        The newcomer is a client that was not in the run. It starts from the state of a
        new client and does its own work of `rounds` rounds. Then follows the work of an
        evaluation (fine-tuning, kNN-Per's neighbours). So FedAvg's model is the shared
        one, Ditto's a personal one.

        The result is the same as if the client took part in the `rounds` rounds after
        the run's last one, and was evaluated after them. Their step size is the run's
        `lr`, without a schedule. Random numbers that FineTune,
        FedBABU, Per-FedAvg and FedALA draw for it belong to round `state.round +
        rounds`. Where the server makes a model for each client (FedDWA, FedAMP, MOCHA,
        ...), all clients play these rounds with the newcomer, on copies. The run's
        state stays as it is.

        Raises ValueError for samples that do not fit.

        Args:
            samples: A Dataset, (x, y), or {"train": (x, y), "val": (x, y)}, with raw
                features. Where the federation was standardized, these are too, by the
                newcomer's own training samples. The columns of a data frame are taken
                by name, and labels may be names of classes. A Federation of one client
                that was standardized already is taken as it is.
            rounds: The number of rounds of the newcomer's work.
        """
        return self._models("adapt").adapt(samples, rounds)

    def to_pandas(self, per: Per = "round") -> Any:
        """A `pandas.DataFrame` with one row per round, or per round and client.

        A row of a round has means over clients; rows of clients are of the evaluated
        rounds.
        """
        return export.frame(self.header, self.rounds, per)

    def to_csv(self, path: str | Path, per: Per = "round") -> None:
        """Writes the rows of `to_pandas` into a CSV file."""
        export.to_csv(self.header, self.rounds, path, per)

    def to_tensorboard(self, folder: str | Path, clients: bool = False) -> None:
        """Writes the rounds as TensorBoard's events into `folder`.

        With `clients` there is a curve for each client. It needs the package
        tensorboard.
        """
        export.to_tensorboard(self.header, self.rounds, folder, clients)


def client_values(evaluation: Mapping[str, Any], key: str) -> Tensor:
    """The value of each client in an evaluation, [N] float64.

    A client without a value has NaN. A loss or another error is infinite for a client
    with samples but without a finite value, because its model diverged.
    """
    size = evaluation.get("size")
    values = metrics.vector(evaluation[key])
    is_error = key.endswith("loss") or metrics.HIGHER_IS_BETTER.get(key) is False
    if not is_error or size is None or len(size) != len(values):
        return values
    diverged = values.isnan() & (metrics.vector(size) > 0)
    return torch.where(diverged, math.inf, values)
