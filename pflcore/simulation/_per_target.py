"""One run for each client as the target: WAFFLE and Weight Erosion for all clients.

Symbols: N clients of the federation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pflcore.algorithms import FedAvg, Scaffold, Waffle, WeightErosion, algorithm_of
from pflcore.algorithms._protocol import Algorithm
from pflcore.check import Model, Words, checked, reject, require
from pflcore.data._federation import Federation
from pflcore.simulation._attacks import Adversary
from pflcore.simulation._describe import Record
from pflcore.simulation._history import History, RunEnd
from pflcore.simulation._loop import Simulation
from pflcore.simulation._models import Personalized
from pflcore.simulation._run_models import TargetModels
from pflcore.simulation._weights import dense_weights
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.train import Training


@checked
def run_each_target(
    algorithm: Algorithm | type[Algorithm] | str,
    model: Model,
    data: Federation,
    training: Training | None = None,
    *,
    others: Algorithm | None = None,
    on_round: Callable[[int, int, Record], None] | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> History:
    """Runs an algorithm with a `target` once for each of N clients.

    Every run begins from the same start. Together they take N times the work and the
    traffic of one run. Clients without training samples, or that attack, cannot be the
    target. They are served by one more run, of `others`. In the history that is
    returned

    - a client's numbers are those of the run whose target it is, or of that one more;
    - "weights" has a row for each target, [N, N]; it is NaN for the other clients;
    - bytes and seconds are sums over the runs;
    - a client counts as dropped, and a round as void, where that happened in any run;
    - the rounds end with the shortest run.

    Raises ValueError for an algorithm without a target.

    Args:
        algorithm: An algorithm with a target: an instance, a class, or a name.
        model: A module, a `Net`, or a function that makes a module.
        data: The federation.
        training: The options of local training.
        others: The algorithm that serves clients that cannot be the target. None takes
            SCAFFOLD for WAFFLE, and FedAvg with equal weights for Weight Erosion.
        on_round: Is called as `on_round(target, round, record)` in each run. Of the
            clients that cannot be the target it is the first one.
        checkpoint: The folder and the times of the checkpoints. Every run has a
            checkpoint in a folder of its own inside of this one, and continues from it
            where there is one.
        options: More options of `Simulation`.
    """
    algorithm = algorithm_of(algorithm)
    has_target = hasattr(algorithm, "target")
    wanted = "one with a target (WAFFLE, Weight Erosion)"
    require(has_target, "algorithm", wanted, algorithm)
    eval_clients = getattr(options.get("evaluation"), "clients", None)
    is_listed = not isinstance(eval_clients, int)
    wanted = "every client, each in its own run"
    require(is_listed, "evaluation.clients", wanted, eval_clients)
    adversary = getattr(options.get("robustness"), "adversary", None)
    targets = possible_targets(data, adversary)
    groups = [[target] for target in targets]  # the clients that each run serves
    algorithms = [replace(algorithm, target=target) for target in targets]  # type: ignore[call-arg]
    rest = [client for client in range(data.n) if client not in targets]
    if rest:
        groups.append(rest)
        algorithms.append(others or without_target(algorithm))
    runs: list[History] = []
    models: dict[int, Personalized] = {}
    for target_algorithm, clients in zip(algorithms, groups, strict=True):
        target = clients[0]
        simulation = Simulation(
            target_algorithm, model, data, training or Training(), **options
        )
        target_checkpoint = _target_checkpoint(checkpoint, target)
        on_target_round = on_round and functools.partial(on_round, target)
        has_checkpoint = target_checkpoint is not None
        run = simulation.run(on_target_round, target_checkpoint, resume=has_checkpoint)
        runs.append(run)
        if run.interrupted and run.stopped:
            break
        for client in clients:
            models[client] = run.model(client)
        # Memory has no room for the states of N runs.
        run.state = None
        run.models = None
        if run.interrupted:
            break
    return _merge_runs(runs, groups, models, data.n)


def without_target(algorithm: Algorithm) -> Algorithm:
    """The algorithm that serves clients that cannot be the target.

    Raises ValueError for an algorithm that has no such counterpart.
    """
    if isinstance(algorithm, Waffle):
        return Scaffold(algorithm.server_lr, "uniform", algorithm.option)
    if isinstance(algorithm, WeightErosion):
        return FedAvg(algorithm.server_lr, "uniform")
    expected = "training samples of each client, which is the target of a run"
    got = Words("clients without, or that attack")
    remedy = f"give others=, which serves them beside {type(algorithm).__name__}"
    reject("data", expected, got, remedy=remedy)


def possible_targets(data: Federation, adversary: Adversary | None) -> list[int]:
    """The ids of the clients that can be the target of a run, ascending.

    They have training samples, and do not attack.
    """
    can_train = data.size("train") > 0
    if adversary is not None:
        can_train[list(adversary.with_ids(data).clients)] = False
    ids: list[int] = can_train.nonzero()[:, 0].tolist()
    return ids


def _target_checkpoint(checkpoint: Checkpoint | None, target: int) -> Checkpoint | None:
    """The checkpoint of one target's run."""
    if checkpoint is None:
        return None
    return replace(checkpoint, folder=target_folder(checkpoint.folder, target))


def target_folder(folder: str | Path, target: int) -> Path:
    """The folder of one target's checkpoint in the folder of all."""
    return Path(folder, f"target-{target}")


def _merge_runs(
    runs: Sequence[History],
    groups: Sequence[Sequence[int]],
    models: Mapping[int, Personalized],
    n: int,
) -> History:
    """One history of the runs that serve all clients.

    It has no rounds where a run is missing or did not come to its end.

    Args:
        runs: The histories of the runs so far.
        groups: The clients that each run serves.
        models: The models of the clients whose runs came to their end.
        n: The number of clients.
    """
    header = dict(runs[0].header)
    header["options"] = {**header["options"], "target": "each client"}
    header["target"] = None
    header["model_target"] = "each client"
    is_complete = len(models) == n
    stopped = " ".join(
        f"target {clients[0]}: {run.stopped}"
        for run, clients in zip(runs, groups, strict=False)
        if run.stopped
    )
    if not stopped and not is_complete:
        last = max(models)
        stopped = f"Interrupted after the run of target {last}, of {n} targets."
    rounds = []
    if is_complete:
        by_round = zip(*(run.rounds for run in runs), strict=False)
        rounds = [merge_records(records, groups) for records in by_round]
    end = runs[-1].end
    if stopped:
        ends = [run.end for run in runs if run.end is not None]
        is_wanted = is_complete and not any(of_run.broke_off for of_run in ends)
        end = RunEnd("stopped" if end is None else end.kind, stopped, is_wanted)
    return History(
        header,
        rounds,
        end,
        models=TargetModels([models[client] for client in sorted(models)]),
        rank=runs[0].rank,
    )


def merge_records(records: Sequence[Record], groups: Sequence[Sequence[int]]) -> Record:
    """One record of the records of a round in all runs.

    Args:
        records: The records of the runs.
        groups: The clients that each run serves.
    """
    own = dict[int, Record]()  # the record of each client's run
    for record, clients in zip(records, groups, strict=True):
        own |= dict.fromkeys(clients, record)
    by_client = [own[client] for client in sorted(own)]
    merged = dict(records[0])
    for key in ("seconds", "bytes_down", "bytes_up", "replayed"):
        if key in merged:
            merged[key] = sum(record[key] for record in records)
    for key in ("cohort", "clipped", "dropped"):
        merged[key] = sorted(set().union(*(record[key] for record in records)))
    if "steps" in merged:
        steps = dict[int, int]()  # a client takes the same in every run
        for record in records:
            steps |= dict(zip(record["cohort"], record["steps"], strict=True))
        merged["steps"] = [steps[client] for client in merged["cohort"]]
    merged["void"] = any(record["void"] for record in records)
    merged["train_loss"] = _mean_train_loss(records)
    merged["report"] = _merge_reports(by_client)
    largest = _largest_norms(records)
    merged["relative_update_norm"] = None
    if largest:
        merged["relative_update_norm"] = [largest.get(i) for i in merged["cohort"]]
    if merged["eval"]:
        merged["eval"] = _merge_evaluations(by_client)
    return merged


def _merge_evaluations(records: Sequence[Record]) -> Record:
    """The evaluation in which each client's numbers are those of its own run.

    Args:
        records: The record of each client's run.
    """
    merged: Record = {}
    for key in records[0]["eval"]:
        merged[key] = [record["eval"][key][i] for i, record in enumerate(records)]
    return merged


def _mean_train_loss(records: Sequence[Record]) -> float | None:
    """The mean of the runs' training losses, if there are any."""
    losses = [record["train_loss"] for record in records]
    losses = [loss for loss in losses if loss is not None]
    return sum(losses) / len(losses) if losses else None


def _merge_reports(records: Sequence[Record]) -> Record:
    """The reports of all runs, as lists with an entry for each client's run."""
    reports = [dense_report(record["report"], len(records)) for record in records]
    merged: Record = {}
    for key in reports[0]:
        # A run whose round is void has a report without the other keys.
        if all(key in report for report in reports):
            merged[key] = [report[key] for report in reports]
    return merged


def _largest_norms(records: Sequence[Record]) -> dict[int, float]:
    """Each client's largest relative update norm in any run.

    A client that was dropped in a run counts with 0 there.
    """
    largest: dict[int, float] = {}
    for record in records:
        norms = record["relative_update_norm"] or []
        for client, norm in zip(record["cohort"], norms, strict=False):
            largest[client] = max(norm or 0.0, largest.get(client, 0.0))
    return largest


def dense_report(report: Record, n: int) -> Record:
    """A run's report with the weights of all N clients.

    A report has only the weights of the cohort where clients were absent. In a void
    round it has no weights; then they are NaN.
    """
    if report and "index" not in report:
        return report
    others = {k: v for k, v in report.items() if k not in ("index", "weight")}
    weights = torch.full((n,), math.nan)
    if report:
        weights = dense_weights(report, n)
    return {**others, "weights": weights.tolist()}
