"""Studies of trained states as in Motley, section 4, and pictures.

The studies show which clients are hurt, results on other distributions and with less
data, and the effect of one option. Everything here is evaluation: nothing is trained on
the server, and nothing is chosen.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.papers import figures
from bench.papers.plan import slug
from bench.papers.runs import Reproduction
from bench.papers.table import Row, by_setting, curve
from bench.problem import Facts
from pflcore import FedAvg, History, evaluate, metrics
from pflcore.data._protocols import StudyProtocol
from pflcore.data._splits import random_permutation
from pflcore.lab.results import _run_pictures as pictures
from pflcore.simulation._files import write_text
from pflcore.simulation._state import RunConfig, State
from pflcore.simulation.record import to_json


def results(config: RunConfig, state: State, protocol: StudyProtocol) -> Tensor:
    """Accuracies [N] of reported clients on test samples, others NaN.

    Without accuracies they are losses.
    """
    data = protocol.data.to(config.data.device)
    config = replace(config, data=data)
    values = evaluate(config, state, "test", protocol.report_clients)
    return values.get("accuracy", values["loss"])


def out_of_distribution(protocol: StudyProtocol, size: int = 1000) -> StudyProtocol:
    """The protocol with one common test set for all reported clients.

    It has `size` samples, drawn without replacement from the test samples of all
    reported clients (Motley, section 4.1).

    Where clients label differently (`relabel`), each sample keeps the label that its
    owner gives it.
    """
    data = protocol.data
    reported = protocol.report_clients.tolist()
    y = data.y.clone()
    for split in data.splits:
        for i, rows in enumerate(data.index[split]):
            y[rows] = data.labels(i, split)
    pool = torch.cat([data.index["test"][i] for i in reported]).unique()
    drawn = random_permutation(len(pool), 13)[:size].to(pool.device)
    pool = pool[drawn].sort().values
    test = [pool if i in reported else pool[:0] for i in range(data.n)]
    name = f"{data.name}, out of distribution"
    index = {**data.index, "test": test}
    data = replace(data, y=y, relabel=None, index=index, name=name)
    return replace(protocol, data=data)


def both(config: RunConfig, state: State, protocol: StudyProtocol) -> list[Tensor]:
    """The results in and out of distribution."""
    outside = out_of_distribution(protocol)
    return [results(config, state, p) for p in (protocol, outside)]


def vary(
    config: RunConfig,
    state: State,
    protocol: StudyProtocol,
    option: str,
    choices: Sequence[Any],
) -> dict[Any, list[Tensor]]:
    """Results of a trained state, by the value of an option.

    They are results in and out of distribution (Motley, Fig. 4, 5 and 7). The option is
    one that only evaluation uses, such as "finetune_epochs" of FineTune or "lam" of
    KnnPer. Raises ValueError for another option.
    """
    late = config.algorithm.traits.evaluation_only
    if option not in late:
        raise ValueError(
            "option: expected one that can be varied after training "
            f"({', '.join(late) or 'none'}), got {option!r}."
        )
    found = {}
    for choice in choices:
        algorithm = replace(config.algorithm, **{option: choice})
        varied = replace(config, algorithm=algorithm)
        found[choice] = both(varied, state, protocol)
    return found


def by_evaluation(
    config: RunConfig, state: State, protocol: StudyProtocol
) -> dict[str, Tensor]:
    """Each client's gain by personalization, on all and on some test samples.

    They are the first part of its test samples (Motley, Fig. 3d). With fewer samples
    more clients seem to be hurt.
    """
    plain = replace(config, algorithm=FedAvg())
    found = {}
    for f in (1.0, 0.25):

        def first(n: int, part: float = f) -> dict[str, Tensor]:
            return {"test": torch.arange(math.ceil(part * n))}

        p = replace(protocol, data=protocol.data.redistribute(first, of=("test",)))
        gain = results(config, state, p) - results(plain, state, p)
        found[f"{f:.0%} of the test samples"] = gain
    return found


def draw(made: Reproduction, rows: Sequence[Row]) -> None:
    """Draws the pictures of each setting.

    They show curves, mixing weights and neighbours, weights by round where there is one
    model, clients in boxes, gains by size, cost, and the studies that the plan asks
    for. A picture that does not show all seeds shows the first. The studies' numbers go
    into studies.json. A last picture shows results against the plan's option.
    """
    studies = Facts()
    for setting in dict.fromkeys(setting for setting, _, _ in made.runs):
        runs = _evaluated_runs(made, setting)
        if runs:
            studies[setting] = _draw_setting(made, setting, runs)
    option = made.plan["against"]
    if option:
        by: dict[str, list[tuple[float, float]]] = {}
        for setting, of_setting in by_setting(rows).items():
            of_option = [r for r in of_setting if option in r["options"]]
            if of_option:
                by[setting] = sorted(
                    (r["options"][option], r["best"]) for r in of_option
                )
        path = f"{made.folder}/against-{option}.png"
        figures.curves(by, path, option, "test accuracy, %")
    write_text(made.folder / "studies.json", json.dumps(to_json(studies)) + "\n")


def _evaluated_runs(made: Reproduction, setting: str) -> dict[str, list[History]]:
    """The runs of each method that were evaluated, without other variants."""
    runs = {}
    for (of_setting, method, variant), of_method in made.runs.items():
        if (of_setting, variant) == (setting, "") and of_method[0].evaluations:
            runs[method] = of_method
    return runs


def _draw_setting(
    made: Reproduction, setting: str, runs: Mapping[str, list[History]]
) -> Facts:
    """Draws the pictures of a setting; returns the numbers of its studies."""
    stem = f"{made.folder / slug(setting)}"
    first = {method: of_method[0] for method, of_method in runs.items()}
    one = next(iter(first.values()))
    unit = one.main_metric
    named = []
    for method, of_method in runs.items():
        for run in of_method:
            header = run.header | {"algorithm": method, "options": {}}
            named.append(replace(run, header=header))
    if any(len(run.evaluations) > 1 for run in first.values()):
        cost = {}
        for method, run in first.items():
            cost[method] = [(sent / 2**20, v) for _, sent, v in curve(run, unit)]
        what = "sent down and up by all clients, MiB"
        pictures.curves(named, f"{stem}-curves.png")
        pictures.weights(named, f"{stem}-weights-by-round.png")
        figures.curves(cost, f"{stem}-cost.png", what, f"mean {unit}")
    figures.heat_maps(first, f"{stem}-weights.png")
    figures.heat_maps(first, f"{stem}-neighbours.png", k=5)
    pictures.clients(named, f"{stem}-boxes.png")
    last = {method: run.last_values(unit) for method, run in first.items()}
    before = {}
    for method in first:
        other = made.plan["methods"][method].get("before")
        if other in first:
            before[method] = other
    if before:
        gains = {method: last[method] - last[b] for method, b in before.items()}
        sizes = torch.tensor(one.header["size"])
        figures.deltas(sizes, gains, f"{stem}-deltas.png", unit)
    base = {method: last[before.get(method, method)] for method in first}
    return _trained(made, setting, base, unit)


def _trained(
    made: Reproduction, setting: str, before: Mapping[str, Tensor], unit: str
) -> Facts:
    """The numbers of the studies of trained states; draws their pictures.

    Args:
        before: the values of each client against which it may be hurt, by method
    """
    stem = f"{made.folder / slug(setting)}"
    spread: dict[str, list[figures.Triple]] = {}
    fewer: dict[str, dict[float, float]] = {}
    for method in before:
        m = made.plan["methods"][method]
        task = made.tasks[setting, method, ""][0]
        has_studies = "vary" in m or "sizes" in m
        states = made.states(task.base or task) if has_studies else []
        if not states:
            continue
        simulation, p = made.simulation(task)
        config = simulation.config
        state = states[-1][3]
        path = f"{stem}-{slug(method)}"
        if m.get("sizes"):
            # Only the first part of each reported client's personalization set is used
            # (Motley, Fig. 7c).
            by = {f: results(config, state, p.keep(f)) for f in (1.0, 0.5, 0.25)}
            fewer[method] = {f: metrics.mean(v) for f, v in by.items()}
        if m.get("sizes") and "state_of" in m:
            gains = by_evaluation(config, state, p)
            figures.deltas(p.data.size("test"), gains, f"{path}-tests.png", unit)
        for option, choices in m.get("vary", {}).items():
            found = vary(config, state, p, option, choices)
            means = []
            hurt = []
            for choice, (own, far) in found.items():
                mean = metrics.mean(own)
                is_accuracy = unit == "accuracy"
                part_hurt = metrics.hurt(own, before[method], is_accuracy)
                means.append((choice, mean, metrics.mean(far)))
                hurt.append((choice, mean, part_hurt))
            figures.option(hurt, f"{path}-{option}.png", option, unit)
            if option != "finetune_lr":
                spread[method] = means
        if "vary" in m and method not in spread:
            inside, outside = map(metrics.mean, both(config, state, p))
            spread[method] = [(method, inside, outside)]
    figures.distributions(spread, f"{stem}-distributions.png", unit)
    parts = {}
    for method, by_part in fewer.items():
        parts[method] = sorted((100 * f, value) for f, value in by_part.items())
    what = "personalization set used, %"
    figures.curves(parts, f"{stem}-sizes.png", what, f"mean {unit}")
    return {"distributions": spread, "sizes": fewer}
