"""A run's record as rows, CSV, a pandas frame or TensorBoard events."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pflcore.check import checked, import_optional
from pflcore.metrics import mean
from pflcore.simulation._files import safe_write

Per = Literal["round", "client"]
Line = Mapping[str, Any]
# Fields of a record that the row of a round has unchanged.
ROUND_FIELDS = ("seconds", "void", "bytes_down", "bytes_up", "train_loss")


@checked
def rows(
    header: Line, rounds: Sequence[Line], per: Per = "round"
) -> list[dict[str, Any]]:
    """A row for each round, or for each round's evaluated clients.

    The row of a round has means over clients, in which each client counts once. A
    missing value is NaN, as in a round without evaluation or for a client without
    samples. Raises ValueError where `per` is neither "round" nor "client".
    """
    run = {"algorithm": header.get("algorithm"), "seed": header.get("seed")}
    names = header.get("names")
    metrics: dict[str, None] = {}  # in the order in which the records have them
    for record in rounds:
        metrics |= dict.fromkeys(evaluated_values(record))
    table: list[dict[str, Any]] = []
    for record in rounds:
        if per == "round":
            table.append({**run, **_round_row(record, list(metrics))})
        else:
            table += [{**run, **row} for row in _client_rows(record, names)]
    return table


def _round_row(record: Line, metrics: Sequence[str]) -> dict[str, Any]:
    """A round's number, counts, other fields and means of metrics."""
    row = {
        "round": record["round"],
        "clients": len(record["cohort"]),
        "dropped": len(record["dropped"]),
    }
    for field in ROUND_FIELDS:
        row[field] = record.get(field)
    values = evaluated_values(record)
    for metric in metrics:
        row[f"mean_{metric}"] = mean(values.get(metric, ()))
    return row


def _client_rows(record: Line, names: Sequence[Any] | None) -> list[dict[str, Any]]:
    """A row for each evaluated client of a round, with its name where it has one."""
    rows = []
    for index, client in enumerate(evaluated_clients(record)):
        row = {"round": record["round"], "client": client}
        if names is not None:
            row["name"] = names[client]
        row["took_part"] = client in record["cohort"]
        row["dropped"] = client in record["dropped"]
        for metric, values in record["eval"].items():
            if metric != "clients":
                row[metric] = values[index]
        rows.append(row)
    return rows


def evaluated_values(record: Line) -> dict[str, Sequence[float]]:
    """The clients' values [N] in a round's evaluation, by metric."""
    evaluation = record["eval"] or {}
    return {k: v for k, v in evaluation.items() if k not in ("size", "clients")}


def evaluated_clients(record: Line) -> Sequence[int]:
    """The ids of the evaluated clients of a round."""
    evaluation = record["eval"] or {}
    count = len(next(iter(evaluation.values()), ()))
    return evaluation.get("clients") or range(count)


def frame(header: Line, rounds: Sequence[Line], per: Per = "round") -> Any:
    """A `pandas.DataFrame` of `rows`; raises ImportError without pandas."""
    return import_optional("pandas").DataFrame(rows(header, rounds, per))


def to_csv(
    header: Line, rounds: Sequence[Line], path: str | Path, per: Per = "round"
) -> None:
    """Writes `rows` as a CSV file with a line of names.

    NaN is written as an empty field. Raises ImportError without pandas, ValueError
    where the file cannot be written.
    """
    try:
        with safe_write(path) as part:
            frame(header, rounds, per).to_csv(part, index=False)
    except OSError as e:
        raise ValueError(
            f"path: expected a file that can be written, got {path} ({e.strerror}); "
            "name another."
        ) from None


def scalars(
    record: Line, clients: bool = False, names: Sequence[Any] | None = None
) -> dict[str, float]:
    """A round's numbers by name: "train/...", "traffic/..." and "eval/...".

    The numbers of the evaluation are means over clients. Missing numbers are left out.

    Args:
        clients: True adds each client's number as "eval/METRIC/client NAME".
        names: The names of all clients; None where ids stand for them.
    """
    numbers = {
        "train/seconds": record["seconds"],
        "train/dropped": len(record["dropped"]),
        "traffic/bytes_down": record["bytes_down"],
        "traffic/bytes_up": record["bytes_up"],
        "train/loss": record["train_loss"],
    }
    for metric, values in evaluated_values(record).items():
        numbers[f"eval/{metric}"] = mean(values)
        if clients:
            for client, value in zip(evaluated_clients(record), values, strict=True):
                name = client if names is None else names[client]
                numbers[f"eval/{metric}/client {name}"] = value
    present = {}
    for name, number in numbers.items():
        if number is not None and not math.isnan(number):
            present[name] = float(number)
    return present


def require_tensorboard() -> None:
    """Raises ImportError where the package tensorboard is missing."""
    import_optional("tensorboard")


def summary_writer(folder: str | Path, first_round: int) -> Any:
    """The writer of TensorBoard events of torch, from a round on.

    TensorBoard no longer shows what the folder has of this round and of later ones,
    such as the rounds of a run that is resumed, which are written again.
    """
    require_tensorboard()
    module = import_optional("torch.utils.tensorboard")
    return module.SummaryWriter(str(folder), purge_step=first_round)


def to_tensorboard(
    header: Line, rounds: Sequence[Line], folder: str | Path, clients: bool = False
) -> None:
    """Writes the rounds as TensorBoard's events into `folder`.

    They take the place of rounds of the same numbers that the folder has already.

    Args:
        header: The description of the run, which has the clients' names.
        rounds: The records of the rounds.
        folder: The folder of the events.
        clients: True adds a curve for each client.
    """
    require_tensorboard()
    if not rounds:
        return
    first_round = rounds[0]["round"]
    with contextlib.closing(summary_writer(folder, first_round)) as writer:
        for record in rounds:
            for name, value in scalars(record, clients, header.get("names")).items():
                writer.add_scalar(name, value, record["round"])
