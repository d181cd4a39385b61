"""One run for each client as the target: WAFFLE and Weight Erosion for everyone."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._protocol import Algorithm
from pflcore.check import Model, checked, require
from pflcore.data._federation import Federation
from pflcore.results.record import dense_weights
from pflcore.simulation._describe import Record
from pflcore.simulation._history import History
from pflcore.simulation._loop import Simulation
from pflcore.simulation._models import Personalized
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training


@checked
def run_each_target(
    algorithm: Algorithm | type[Algorithm] | str,
    model: Model,
    data: Federation,
    training: Training | None = None,
    *,
    on_round: Callable[[int, int, Record], None] | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> History:
    """Runs `algorithm`, which has a `target`, N times from one start, each time for
    another client; N times the work and the traffic.

    `options` are those of `Simulation`; `on_round(target, round, record)` sees each
    run's records. In the history that comes back a client's numbers are those of the
    run made for it, "weights" has a row per target [N, N], bytes and seconds are sums,
    and a client counts as dropped, and a round as void, where that happened in any run.
    It ends with the shortest run. With `checkpoint` every run has one in a folder of
    its own, and goes on from it where it is there.
    """
    algorithm = algorithm_of(algorithm)
    n = data.n
    fits = hasattr(algorithm, "target")
    require(fits, "algorithm", "one with a target (WAFFLE, Weight Erosion)", algorithm)
    asked = getattr(options.get("evaluation"), "clients", None)
    words = "every client, each in its own run"
    require(not isinstance(asked, int), "evaluation.clients", words, asked)
    runs = list[History]()
    models = list[Personalized]()
    for target in range(n):
        made_for: Algorithm = replace(algorithm, target=target)  # type: ignore[call-arg]
        simulation = Simulation(
            made_for, model, data, training or Training(), **options
        )
        keeper = checkpoint
        if checkpoint is not None:
            keeper = replace(
                checkpoint, folder=Path(checkpoint.folder, f"target-{target}")
            )
            if keeper.exists:
                simulation.restore(keeper.folder)
        run = simulation.run(on_round and functools.partial(on_round, target), keeper)
        runs.append(run)
        if run.failed or (run.interrupted and run.stopped):
            break
        models.append(run.model(target))
        run.state = run.models = None  # N of them are not kept
        if run.interrupted:
            break
    options = {**runs[0].header["options"], "target": "each client"}
    header = {
        **runs[0].header,
        "options": options,
        "target": None,
        "model_target": "each client",
    }
    stopped = " ".join(
        f"target {i}: {r.stopped}" for i, r in enumerate(runs) if r.stopped
    )
    if not stopped and len(models) < n:
        stopped = (
            f"Interrupted after the run of target {len(models) - 1}, of {n} targets."
        )
    every = zip(*(r.rounds for r in runs), strict=False) if len(models) == n else ()
    rounds = list(map(merge_records, every))
    ended = stopped or None, runs[-1].interrupted, runs[-1].failed
    return History(header, rounds, *ended, models=models)


def merge_records(records: Sequence[Record]) -> Record:
    """One round of all targets' runs as one record."""
    first = records[0]
    reports = [dense_report(r["report"], len(records)) for r in records]
    keys = [k for k in reports[0] if all(k in report for report in reports)]
    losses = [r["train_loss"] for r in records if r["train_loss"] is not None]
    line = {
        **first,
        **{
            k: sum(r[k] for r in records) for k in ("seconds", "bytes_down", "bytes_up")
        },
        **{
            k: sorted({i for r in records for i in r[k]})
            for k in ("cohort", "clipped", "dropped")
        },
        "void": any(r["void"] for r in records),
        "train_loss": sum(losses) / len(losses) if losses else None,
        "report": {k: [report[k] for report in reports] for k in keys},
    }
    farthest: dict[int, float] = {}
    for r in records:
        for i, ratio in zip(r["cohort"], r["relative_update_norm"] or [], strict=False):
            farthest[i] = max(ratio or 0.0, farthest.get(i, 0.0))
    line["relative_update_norm"] = (
        [farthest.get(i) for i in line["cohort"]] if farthest else None
    )
    if first["eval"]:  # each client's numbers are those of its own run
        line["eval"] = {
            k: [r["eval"][k][i] for i, r in enumerate(records)] for k in first["eval"]
        }
    return line


def dense_report(report: Record, n: int) -> Record:
    """A run's report with the weights of all clients, [N], where it has those of the
    cohort alone; NaN for a void round's."""
    if report and "index" not in report:
        return report
    others = {k: v for k, v in report.items() if k not in ("index", "weight")}
    weights = dense_weights(report, n) if report else torch.full((n,), math.nan)
    return {**others, "weights": weights.tolist()}
