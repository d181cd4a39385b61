"""What a run leaves."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from pflcore.check import reject, require
from pflcore.metrics import mean
from pflcore.results import _export as export
from pflcore.results._export import Per
from pflcore.simulation._describe import NO_OUTLIER, Record, largest_update
from pflcore.simulation._models import LazyModels, Personalized, adapt, export_models
from pflcore.simulation.callbacks import TensorBoard
from pflcore.simulation.round import State

RUNAWAY_RATIO = 1e6  # times the median update of a round


@dataclass(repr=False)
class History:
    """What a run leaves: its header, one record per round, and why it stopped early
    if it did."""

    header: Record
    rounds: list[Record] = field(default_factory=list)
    stopped: str | None = None
    # by Ctrl-C; where that came after the last round the run is whole, and `stopped` is
    # None
    interrupted: bool = False
    # for want of memory, or by an error; the state is that of the last round in
    # `rounds`
    failed: bool = False
    state: State | None = None
    # of the last state, see `model`
    models: LazyModels | Sequence[Personalized] | None = None

    def __repr__(self) -> str:
        known = [
            str(self.header[k]) for k in ("algorithm", "data") if self.header.get(k)
        ]
        clients = [f"{self.header['n']} clients"] if "n" in self.header else []
        what = [*known, *clients, f"{len(self.rounds)} rounds"]
        evaluated: Record = next(
            (r["eval"] for r in reversed(self.rounds) if r["eval"]), {}
        )
        means = [
            f"{k} {mean(evaluated[k]):.4g}"
            for k in ("accuracy", "loss")
            if k in evaluated
        ]
        ended = [f"stopped: {self.stopped!r}"] if self.stopped else []
        return f"History({', '.join([*what, *means, *ended])})"

    def series(self, key: str = "accuracy") -> tuple[list[int], torch.Tensor]:
        """The evaluated rounds and each client's value in them, [T, N] float64;
        ValueError where no evaluation has the key."""
        evaluated = [r for r in self.rounds if r["eval"]]
        keys = list(dict.fromkeys(k for r in evaluated for k in r["eval"]))
        require(
            key in keys or not evaluated, "key", f"one of {', '.join(keys)}", key, keys
        )
        seen = [r for r in evaluated if key in r["eval"]]
        return [r["round"] for r in seen], torch.tensor(
            [r["eval"][key] for r in seen], dtype=torch.float64
        )

    def lines(self) -> Iterator[Record]:
        """The lines of the record file."""
        yield {"header": self.header}
        yield from self.rounds
        if self.stopped:
            yield {"stopped": self.stopped}

    def problems(self) -> list[str]:
        """What somebody should look at, in sentences: clients that were dropped in most
        of their rounds, losses that are not finite, and updates a million times as long
        as others."""
        found = list[str]()
        names = ("cohort", "dropped")
        played, lost = (
            Counter(i for r in self.rounds for i in r[name]) for name in names
        )
        often = sorted(i for i, count in lost.items() if 2 * count > played[i])
        if often:
            found.append(
                f"client(s) {often} were dropped in most of their rounds: their "
                "updates were not "
                "finite, or of no use; look at their data, or lower lr."
            )
        last: Record = next((r["eval"] for r in reversed(self.rounds) if r["eval"]), {})
        losses = last.get("loss", [])
        ids = last.get("clients") or range(len(losses))
        bad = [i for i, loss in zip(ids, losses, strict=True) if loss == math.inf]
        if bad:
            found.append(
                f"the last loss of client(s) {bad} is inf; look at their data, or "
                "lower lr."
            )
        ratio, client, round = max(map(largest_update, self.rounds), default=NO_OUTLIER)
        if ratio > RUNAWAY_RATIO:
            found.append(
                f"client {client}'s update was {ratio:.3g} times the median of round "
                f"{round}; "
                "hold such updates by the run's clip."
            )
        return found

    # what comes out ---------------------------------------------------------
    def export(self, folder: str | Path) -> None:
        """Writes every client's personalized model into `folder`, which is made: a
        safetensors file each, and `manifest.json`, which says whose is which, what the
        tensors are called and how to predict with them.

        Where a method serves one model the file is its `state_dict`; else the tensors
        that its prediction takes, a model's parameters as `w.NAME`. Of a standardized
        federation the manifest has each client's mean and deviation, and says how raw
        features are scaled by them. ValueError where the run kept no model, OSError
        where the folder cannot be written.
        """
        export_models(map(self.model, range(self.header["n"])), self.header, folder)

    def model(self, client: int) -> Personalized:
        """One client's personalized model after the last round, an `nn.Module` from
        samples [B,
        ...] to scores, for every algorithm.

        It takes raw features, also where the federation was standardized. ValueError
        where there is no such client, or where the run kept no model.
        """
        n = -1 if self.models is None else len(self.models)
        require(
            n >= 0, "model", "a history with models, as run() returns it", self.models
        )
        fits = (
            isinstance(client, Integral)
            and not isinstance(client, bool)
            and 0 <= client < n
        )
        require(fits, "client", f"a number from 0 to {n - 1}", client)
        return self.models[client]  # type: ignore[index]

    def predict(self, client: int, x: Any) -> torch.Tensor:
        """What the client's model says of the samples `x` [B, ...], raw features:
        labels int64 [B], or values for continuous targets."""
        return self.model(client).predict(x)

    def adapt(self, samples: Any, rounds: int = 5) -> Personalized:
        """The model of a client who was not there, personalized by the algorithm's own
        rule; the run's state stays as it is.

        `samples` are a Dataset, (x, y), or {"train": (x, y), "val": (x, y)}, with raw
        features: where the federation was standardized they are too, by the newcomer's
        own training samples (a Federation of one that was standardized already, is
        taken as it is). The newcomer starts from a fresh client's state and does its
        own work of `rounds` rounds (so FedAvg's model is the shared one, Ditto's a
        personal one), then what an evaluation does (fine-tuning, kNN-Per's neighbours):
        as a client does that takes part in the `rounds` rounds after the run's last one
        and is evaluated after them, so what FineTune, FedBABU, Per-FedAvg and FedALA
        draw for it is of round `state.round + rounds`. Where the server makes a model
        for each client (FedDWA, FedAMP, MOCHA, ...) everybody plays these rounds with
        it, on copies. ValueError in one sentence for samples that do not fit.
        """
        # runs for each client have no model for others
        if not isinstance(self.models, LazyModels):
            reject("adapt", "the history that Simulation.run() returns", self.models)
        return adapt(self.models.config, self.models.state, samples, rounds)

    def to_pandas(self, per: Per = "round") -> Any:
        """A `pandas.DataFrame` with one row per round (means over clients), or per
        evaluated round and client."""
        return export.frame(self.header, self.rounds, per)

    def to_csv(self, path: str | Path, per: Per = "round") -> None:
        """The rows of `to_pandas` as a CSV file; needs no pandas."""
        export.to_csv(self.header, self.rounds, path, per)

    def to_tensorboard(self, folder: str | Path, clients: bool = False) -> None:
        """The rounds as TensorBoard's events in `folder`, with `clients` a curve for
        each client; needs the package tensorboard."""
        board = TensorBoard(folder, clients)
        for record in self.rounds:
            board(record["round"], record)
