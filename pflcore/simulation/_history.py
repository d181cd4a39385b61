"""The results of a run: its records, its models, and what needs attention.

Symbols: N clients of the federation; T evaluated rounds; B samples of a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pflcore.check import client_id, reject, require
from pflcore.metrics import mean
from pflcore.results import _export as export
from pflcore.results._export import Per
from pflcore.simulation._describe import Record, longest_update
from pflcore.simulation._exported import export_models
from pflcore.simulation._models import LazyModels, Personalized, adapt
from pflcore.simulation._state import State
from pflcore.simulation.callbacks import TensorBoard

RUNAWAY_RATIO = 1e6  # times the median update of a round


@dataclass(repr=False)
class History:
    """The results of a run: its records and its models.

    Attributes:
        header: The description of the run.
        rounds: The records of the rounds.
        stopped: The reason why the run ended early; None for a whole run.
        interrupted: True after Ctrl-C. Where it came after the last round, the run is
            whole and `stopped` is None.
        failed: True where an error ended the run, or a lack of memory.
        state: The state after the last round of `rounds`.
        models: The personalized models of the last state, see `model`.
        rank: The number of this process among those that played the run together.
    """

    header: Record
    rounds: list[Record] = field(default_factory=list)
    stopped: str | None = None
    interrupted: bool = False
    failed: bool = False
    state: State | None = None
    models: LazyModels | Sequence[Personalized] | None = None
    rank: int = 0

    def __repr__(self) -> str:
        words = [
            str(self.header[key])
            for key in ("algorithm", "data")
            if self.header.get(key)
        ]
        if "n" in self.header:
            words.append(f"{self.header['n']} clients")
        words.append(f"{len(self.rounds)} rounds")
        values = self._last_evaluation()
        for key in ("accuracy", "loss"):
            if key in values:
                words.append(f"{key} {mean(values[key]):.4g}")
        if self.stopped:
            words.append(f"stopped: {self.stopped!r}")
        return f"History({', '.join(words)})"

    def _last_evaluation(self) -> Record:
        """The values of the last round that was evaluated; {} without one."""
        for record in reversed(self.rounds):
            if record["eval"]:
                values: Record = record["eval"]
                return values
        return {}

    def series(self, key: str = "accuracy") -> tuple[list[int], torch.Tensor]:
        """The evaluated rounds, and each client's value in them, [T, N] float64.

        Raises ValueError where no evaluation has the key.

        Args:
            key: The name of the value: "accuracy", "loss", or one of the run's metrics.
        """
        evaluated = [record for record in self.rounds if record["eval"]]
        keys: dict[str, None] = {}  # in the order of their appearance
        for record in evaluated:
            keys |= dict.fromkeys(record["eval"])
        is_known = key in keys or not evaluated
        require(is_known, "key", f"one of {', '.join(keys)}", key, list(keys))
        records = [record for record in evaluated if key in record["eval"]]
        values = [record["eval"][key] for record in records]
        rounds = [record["round"] for record in records]
        return rounds, torch.tensor(values, dtype=torch.float64)

    def lines(self) -> Iterator[Record]:
        """The lines of the record file."""
        yield {"header": self.header}
        yield from self.rounds
        if self.stopped:
            yield {"stopped": self.stopped}

    def problems(self) -> list[str]:
        """Sentences about what needs attention.

        These are clients that were dropped in most of their rounds, losses that are not
        finite, and updates a million times as long as others.
        """
        problems: list[str] = []
        played: Counter[int] = Counter()
        dropped: Counter[int] = Counter()
        for record in self.rounds:
            played.update(record["cohort"])
            dropped.update(record["dropped"])
        often = sorted(i for i, count in dropped.items() if 2 * count > played[i])
        if often:
            names = self._names_of(often)
            problems.append(
                f"client(s) {names} were dropped in most of their rounds: their "
                "updates were not finite, or of no use; look at their data, or lower "
                "lr."
            )
        values = self._last_evaluation()
        losses = values.get("loss", [])
        ids = values.get("clients") or range(len(losses))
        bad = [i for i, loss in zip(ids, losses, strict=True) if loss == math.inf]
        if bad:
            names = self._names_of(bad)
            problems.append(
                f"the last loss of client(s) {names} is inf; look at their data, or "
                "lower lr."
            )
        longest = longest_update(self.rounds)
        if longest is not None and longest.ratio > RUNAWAY_RATIO:
            (name,) = self._names_of([longest.client])
            problems.append(
                f"client {name}'s update was {longest.ratio:.3g} times the "
                f"median of round {longest.round}; hold such updates by the run's clip."
            )
        return problems

    def _names_of(self, ids: Sequence[int]) -> list[str | int]:
        """The names of clients; their ids where they have no names."""
        names = self.header.get("names")
        return [*ids] if names is None else [names[i] for i in ids]

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
        export_models(map(self.model, range(self.header["n"])), self.header, folder)

    def model(self, client: int | str) -> Personalized:
        """One client's personalized model after the last round.

        For every algorithm it is an `nn.Module` from samples [B, ...] to scores. It
        takes raw features, also where the federation was standardized. Raises
        ValueError where there is no such client, or where the run kept no model.

        Args:
            client: The id of the client, or its name where the federation has names.
        """
        models = self.models
        n = -1 if models is None else len(models)
        wanted = "a history with models, as run() returns it"
        require(n >= 0, "model", wanted, models)
        number = client_id("client", client, n, self.header.get("names"))
        return models[number]  # type: ignore[index]

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

    def adapt(self, samples: Any, rounds: int = 5) -> Personalized:
        """The model of a newcomer, made by the algorithm's own rule.

        The newcomer is a client that was not in the run. It starts from the state of a
        new client and does its own work of `rounds` rounds. Then follows the work of an
        evaluation (fine-tuning, kNN-Per's neighbours). So FedAvg's model is the shared
        one, Ditto's a personal one.

        The result is the same as if the client took part in the `rounds` rounds after
        the run's last one, and was evaluated after them. Random numbers that FineTune,
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
        # Runs of `run_each_target` have no model for other clients.
        if not isinstance(self.models, LazyModels):
            reject("adapt", "the history that Simulation.run() returns", self.models)
        return adapt(self.models.config, self.models.state, samples, rounds)

    def to_pandas(self, per: Per = "round") -> Any:
        """A `pandas.DataFrame` with one row per round, or per round and client.

        A row of a round has means over clients; rows of clients are of the evaluated
        rounds.
        """
        return export.frame(self.header, self.rounds, per)

    def to_csv(self, path: str | Path, per: Per = "round") -> None:
        """Writes the rows of `to_pandas` into a CSV file; needs no pandas."""
        export.to_csv(self.header, self.rounds, path, per)

    def to_tensorboard(self, folder: str | Path, clients: bool = False) -> None:
        """Writes the rounds as TensorBoard's events into `folder`.

        With `clients` there is a curve for each client. It needs the package
        tensorboard.
        """
        board = TensorBoard(folder, clients)
        for record in self.rounds:
            board(record["round"], record)
