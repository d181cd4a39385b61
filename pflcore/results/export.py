"""A run's records as rows of a table, a CSV file, a pandas frame, or TensorBoard's events."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pflcore.metrics import mean

Per = Literal["round", "client"]
PLAIN = ("seconds", "void", "bytes_down", "bytes_up", "train_loss")  # of a record, as they are


def rows(
    header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], per: Per = "round"
) -> list[dict[str, Any]]:
    """One row per round, with means over clients (each counted once), or one per evaluated round
    and client. ValueError for another `per`.

    A value that is not there is NaN: a round without evaluation, a client without samples.
    """
    if per not in ("round", "client"):
        raise ValueError(f"per: expected 'round' or 'client', got {per!r}.")
    run = {"algorithm": header.get("algorithm"), "seed": header.get("seed")}
    keys = list(
        dict.fromkeys(
            k
            for r in rounds
            for k, v in (r["eval"] or {}).items()
            if k not in ("size", "clients") and _per_client(v)
        )
    )
    out: list[dict[str, Any]] = []
    for r in rounds:
        seen = r["eval"] or {}
        if per == "client":
            for at, i in enumerate(
                seen.get("clients") or range(len(next(iter(seen.values()), ())))
            ):
                took_part = {"took_part": i in r["cohort"], "dropped": i in r["dropped"]}
                values = {k: _number(seen[k][at]) for k in [*keys, "size"] if k in seen}
                out.append({**run, "round": r["round"], "client": i, **took_part, **values})
            continue
        counts = {"clients": len(r["cohort"]), "dropped": len(r["dropped"])}
        means = {k: mean(seen[k]) if k in seen else math.nan for k in keys}
        out.append(
            {
                **run,
                "round": r["round"],
                **counts,
                **{k: r.get(k) for k in PLAIN},
                **means_named(means),
            }
        )
    return out


def means_named(means: Mapping[str, float]) -> dict[str, float]:
    """Means over clients, under names that `train_loss`, the mean over a round's minibatches, does
    not take."""
    return {f"mean_{k}": v for k, v in means.items()}


def frame(
    header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], per: Per = "round"
) -> Any:
    """`rows` as a `pandas.DataFrame`; ImportError in one sentence without pandas."""
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "to_pandas needs pandas, which is not installed; get it with pip install pandas, or "
            "use to_csv."
        ) from None
    return pandas.DataFrame(rows(header, rounds, per))


def to_csv(
    header: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    path: str | Path,
    per: Per = "round",
) -> None:
    """`rows` as a CSV file with a line of names; numbers that are not there are empty. ValueError
    where it cannot be written."""
    table = rows(header, rounds, per)
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]) if table else ["round"])
            writer.writeheader()
            writer.writerows(
                {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
                for row in table
            )
    except OSError as e:
        raise ValueError(
            f"path: expected a file that can be written, got {path} ({e.strerror}); name another."
        ) from None


def to_tensorboard(
    rounds: Sequence[Mapping[str, Any]], folder: str | Path, clients: bool = False
) -> None:
    """Every round's `scalars` as events in `folder`, by torch's own writer; ImportError in one
    sentence without tensorboard."""
    writer = summary_writer(folder)
    for r in rounds:
        for name, value in scalars(r, clients).items():
            writer.add_scalar(name, value, r["round"])
    writer.close()


def scalars(record: Mapping[str, Any], clients: bool = False) -> dict[str, float]:
    """A round's numbers by name: "train/...", "traffic/...", "eval/..." (means over clients) and,
    with `clients`, "eval/KEY/client I"."""
    out: dict[str, float] = {
        "train/seconds": record["seconds"],
        "train/dropped": len(record["dropped"]),
    }
    out |= {f"traffic/{k}": record[k] for k in ("bytes_down", "bytes_up")}
    if record["train_loss"] is not None:
        out["train/loss"] = record["train_loss"]
    for key, values in (record["eval"] or {}).items():
        if key in ("size", "clients") or not _per_client(values):
            continue
        out[f"eval/{key}"] = mean(values)
        if clients:
            ids = record["eval"].get("clients") or range(len(values))
            out |= {f"eval/{key}/client {i}": _number(v) for i, v in zip(ids, values, strict=True)}
    return {k: float(v) for k, v in out.items() if not math.isnan(v)}


def summary_writer(folder: str | Path) -> Any:
    """torch's writer of TensorBoard events; ImportError in one sentence where the package
    tensorboard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "TensorBoard's events need tensorboard, which is not installed; get it with: pip "
            "install tensorboard."
        ) from None
    return SummaryWriter(str(folder))


def _per_client(values: Any) -> bool:
    return isinstance(values, list) and all(v is None or isinstance(v, int | float) for v in values)


def _number(value: Any) -> Any:
    return math.nan if value is None else value
