"""A run's records as rows of a table, a CSV file, a pandas frame, or TensorBoard's
events."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pflcore.check import checked, import_optional
from pflcore.metrics import mean
from pflcore.results._files import safe_write

Per = Literal["round", "client"]
Line = Mapping[str, Any]
# of a record, as they are
ROUND_FIELDS = ("seconds", "void", "bytes_down", "bytes_up", "train_loss")


@checked
def rows(
    header: Line, rounds: Sequence[Line], per: Per = "round"
) -> list[dict[str, Any]]:
    """One row per round, with means over clients (each counted once), or one per
    evaluated round and client. ValueError for another `per`.

    A value that is not there is NaN: a round without evaluation, a client without
    samples.
    """
    run = {"algorithm": header.get("algorithm"), "seed": header.get("seed")}
    keys = dict.fromkeys(k for r in rounds for k in evaluated_values(r))
    out: list[dict[str, Any]] = []
    for r in rounds:
        seen = evaluated_values(r)
        row = {**run, "round": r["round"]}
        if per == "round":
            counts = {"clients": len(r["cohort"]), "dropped": len(r["dropped"])}
            means = {f"mean_{k}": mean(seen.get(k, ())) for k in keys}
            out.append(
                {**row, **counts, **{k: r.get(k) for k in ROUND_FIELDS}, **means}
            )
            continue
        for at, i in enumerate(evaluated_clients(r)):
            took_part = {"took_part": i in r["cohort"], "dropped": i in r["dropped"]}
            values = {k: v[at] for k, v in r["eval"].items() if k != "clients"}
            out.append({**row, "client": i, **took_part, **values})
    return out


def evaluated_values(record: Line) -> dict[str, Sequence[float]]:
    """What a round's evaluation measured of each client."""
    seen = record["eval"] or {}
    return {k: values for k, values in seen.items() if k not in ("size", "clients")}


def evaluated_clients(record: Line) -> Sequence[int]:
    """Who was evaluated in a round."""
    seen = record["eval"] or {}
    return seen.get("clients") or range(len(next(iter(seen.values()), ())))


def frame(header: Line, rounds: Sequence[Line], per: Per = "round") -> Any:
    """`rows` as a `pandas.DataFrame`; ImportError in one sentence without pandas."""
    return import_optional("pandas").DataFrame(rows(header, rounds, per))


def to_csv(
    header: Line, rounds: Sequence[Line], path: str | Path, per: Per = "round"
) -> None:
    """`rows` as a CSV file with a line of names; numbers that are not there are empty.
    ValueError where it cannot be written."""
    table = rows(header, rounds, per)
    try:
        with (
            safe_write(path) as part,
            open(part, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, list(table[0]) if table else ["round"])
            writer.writeheader()
            writer.writerows(
                {k: "" if v != v else v for k, v in row.items()} for row in table
            )
    except OSError as e:
        raise ValueError(
            f"path: expected a file that can be written, got {path} ({e.strerror}); "
            "name another."
        ) from None


def scalars(record: Line, clients: bool = False) -> dict[str, float]:
    """A round's numbers by name: "train/...", "traffic/...", "eval/..." (means over
    clients) and, with `clients`, "eval/KEY/client I"."""
    out = {
        "train/seconds": record["seconds"],
        "train/dropped": len(record["dropped"]),
        "traffic/bytes_down": record["bytes_down"],
        "traffic/bytes_up": record["bytes_up"],
        "train/loss": record["train_loss"],
    }
    for key, values in evaluated_values(record).items():
        out[f"eval/{key}"] = mean(values)
        if clients:
            each = zip(evaluated_clients(record), values, strict=True)
            out |= {f"eval/{key}/client {i}": v for i, v in each}
    return {k: float(v) for k, v in out.items() if v is not None and not math.isnan(v)}


def summary_writer(folder: str | Path) -> Any:
    """torch's writer of TensorBoard events; ImportError in one sentence where the
    package tensorboard is missing."""
    import_optional("tensorboard")
    return import_optional("torch.utils.tensorboard").SummaryWriter(str(folder))
