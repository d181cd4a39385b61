"""One run for each client as the target: WAFFLE and Weight Erosion for everyone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from pflcore.algorithms.lookup import algorithm_of
from pflcore.algorithms.protocol import Algorithm
from pflcore.check import Model, checked
from pflcore.data.federation import Federation
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.history import History, Record
from pflcore.simulation.loop import Simulation
from pflcore.train import Training


@checked
def for_everyone(
    algorithm: Algorithm | type[Algorithm] | str,
    model: Model,
    data: Federation,
    training: Training | None = None,
    *,
    on_round: Callable[[int, int, Record], None] | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> History:
    """Runs `algorithm`, which has a `target`, N times from one start, each time for another client;
    N times the work and the traffic.

    `options` are those of `Simulation`; `on_round(target, round, record)` sees each run's records.
    In the history that comes back a client's numbers are those of the run made for it, "weights"
    has a row per target [N, N], bytes and seconds are sums, and a client counts as dropped, and a
    round as void, where that happened in any run. It ends with the shortest run. With `checkpoint`
    every run has one in a folder of its own, and goes on from it where it is there.
    """
    algorithm = algorithm_of(algorithm)
    if not any(f.name == "target" for f in fields(algorithm)):
        raise ValueError(
            "algorithm: expected one with a target (WAFFLE, Weight Erosion), got "
            f"{type(algorithm).__name__}."
        )
    if isinstance(getattr(options.get("evaluation"), "clients", None), int):
        raise ValueError(
            "evaluation.clients: here every client is evaluated in the run made for it; leave a "
            "number out."
        )
    runs, models = [], []
    for target in range(data.n):
        made_for: Algorithm = replace(algorithm, **{"target": target})  # type: ignore[arg-type]
        simulation = Simulation(made_for, model, data, training or Training(), **options)
        seen = (
            None
            if on_round is None
            else lambda r, record, target=target: on_round(target, r, record)
        )
        keeper = checkpoint and Checkpoint(
            Path(checkpoint.folder) / f"target-{target}", checkpoint.every, checkpoint.minutes
        )
        if keeper and keeper.exists:
            simulation.restore(keeper.folder)
        runs.append(simulation.run(seen, keeper))
        if runs[-1].interrupted or runs[-1].failed:
            break
        models.append(runs[-1].model(target))
        runs[-1].state = runs[-1].models = None  # N of them are not kept
    header = {**runs[0].header, "target": None, "made_for": "each client"}
    header["options"] = {**header["options"], "target": "each client"}
    interrupted, failed = any(r.interrupted for r in runs), any(r.failed for r in runs)
    complete = len(runs) == data.n and not (interrupted or failed)
    rounds = (
        [merged(records, data.n) for records in zip(*(r.rounds for r in runs), strict=False)]
        if complete
        else []
    )
    stopped = [f"target {i}: {r.stopped}" for i, r in enumerate(runs) if r.stopped]
    return History(
        header,
        rounds,
        " ".join(stopped) or None,
        interrupted=interrupted,
        failed=failed,
        models=models,
    )


def merged(records: Sequence[Record], n: int) -> Record:
    """One round of all targets' runs as one record."""
    first = records[0]
    reports = [whole(r["report"], n) for r in records]

    def own(key: str, split: str) -> list[Any]:
        return [r[split][key][i] for i, r in enumerate(records)]

    ratio: dict[int, float] = {}
    for r in records:
        for i, v in zip(r["cohort"], r["moved"] or [], strict=False):
            ratio[i] = max(v or 0.0, ratio.get(i, 0.0))
    cohort = sorted(set().union(*(r["cohort"] for r in records)))
    losses = [r["train_loss"] for r in records if r["train_loss"] is not None]
    return {
        **first,
        "seconds": sum(r["seconds"] for r in records),
        "cohort": cohort,
        "moved": [ratio.get(i) for i in cohort] if ratio else None,
        "clipped": sorted(set().union(*(r["clipped"] for r in records))),
        "dropped": sorted(set().union(*(r["dropped"] for r in records))),
        "void": any(r["void"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "train_loss": sum(losses) / len(losses) if losses else None,
        "report": {
            k: [report[k] for report in reports]
            for k in reports[0]
            if all(k in report for report in reports)
        },
        "eval": {k: own(k, "eval") for k in first["eval"]} if first["eval"] else None,
    }


def whole(report: Record, n: int) -> Record:
    """A run's report with the weights of all clients, [N], where it has those of the cohort alone;
    NaN for a void round's."""
    if report and "index" not in report:
        return report
    index, weight = (
        v.tolist() if isinstance(v := report.get(k, []), torch.Tensor) else v
        for k in ("index", "weight")
    )
    share = dict(zip(index, weight, strict=True))
    others = {k: v for k, v in report.items() if k not in ("index", "weight")}
    return {**others, "weights": [share.get(i, 0.0 if report else math.nan) for i in range(n)]}
