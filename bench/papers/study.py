"""What Motley asks of a trained state beside the mean: who is hurt, other
distributions, less data, one option varied (section 4); and a reproduction's pictures.

Everything here is evaluation: nothing is trained on the server, and nothing is chosen.
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
from pflcore import FedAvg, evaluate, metrics
from pflcore.data._federation import random_permutation
from pflcore.data._protocols import StudyProtocol
from pflcore.results import _pictures as pictures
from pflcore.results._files import write_text
from pflcore.results.record import to_json
from pflcore.simulation._state import RunConfig, State


def results(config: RunConfig, state: State, protocol: StudyProtocol) -> Tensor:
    """Each reported client's accuracy, or loss where there is none, on its test
    samples: [N], NaN for the others."""
    setting = config.context._replace(data=protocol.data.to(config.context.data.device))
    values = evaluate(
        config._replace(context=setting), state, "test", protocol.report_clients
    )
    return values.get("accuracy", values["loss"])


def out_of_distribution(protocol: StudyProtocol, size: int = 1000) -> StudyProtocol:
    """Everybody reported is evaluated on one sample, drawn without replacement from all
    their test samples (Motley, section 4.1).

    Where clients label differently (`relabel`), each sample keeps the label that its
    owner gives it.
    """
    data, mine = protocol.data, protocol.report_clients.tolist()
    y = data.y.clone()
    for split in data.splits:
        for i, rows in enumerate(data.index[split]):
            y[rows] = data.labels(i, split)
    pool = torch.cat([data.index["test"][i] for i in mine]).unique()
    pool = pool[random_permutation(len(pool), 13)[:size].to(pool.device)].sort().values
    test = [pool if i in mine else pool[:0] for i in range(data.n)]
    name, index = f"{data.name}, out of distribution", {**data.index, "test": test}
    return replace(
        protocol, data=replace(data, y=y, relabel=None, index=index, name=name)
    )


def both(config: RunConfig, state: State, protocol: StudyProtocol) -> list[Tensor]:
    """The results in and out of distribution."""
    return [
        results(config, state, p) for p in (protocol, out_of_distribution(protocol))
    ]


def vary(
    config: RunConfig,
    state: State,
    protocol: StudyProtocol,
    option: str,
    choices: Sequence[Any],
) -> dict[Any, list[Tensor]]:
    """One trained state personalized with several values of a `late` option (Motley,
    Fig. 4, 5 and 7): the results in and out of distribution by value; for instance
    `vary(FineTune(), ..., "finetune_epochs", (1, 3, 5, 10, 15))` or `vary(KnnPer(),
    ..., "lam", (0, 0.5, 1))`."""
    late = config.algorithm.traits.evaluation_only
    if option not in late:
        raise ValueError(
            "option: expected one that can be varied after training "
            f"({', '.join(late) or 'none'}), got {option!r}."
        )
    return {
        c: both(
            config._replace(algorithm=replace(config.algorithm, **{option: c})),
            state,
            protocol,
        )
        for c in choices
    }


def by_evaluation(
    config: RunConfig, state: State, protocol: StudyProtocol
) -> dict[str, Tensor]:
    """What personalization changes for each client, measured on the first part of its
    test samples (Motley, Fig. 3d): of fewer samples more clients seem hurt."""
    plain, found = config._replace(algorithm=FedAvg()), {}
    for f in (1.0, 0.25):

        def first(n: int, part: float = f) -> dict[str, Tensor]:
            return {"test": torch.arange(math.ceil(part * n))}

        p = replace(protocol, data=protocol.data.redistribute(first, of=("test",)))
        found[f"{f:.0%} of the test samples"] = results(config, state, p) - results(
            plain, state, p
        )
    return found


def draw(made: Reproduction, rows: Sequence[Row]) -> None:
    """Pictures of each setting, of the first seed where not of all: curves, mixing
    weights and neighbours, weights by round where there is one model, clients in boxes,
    gains by size, cost, and the studies that the plan asks for (studies.json has their
    numbers); and results against the plan's option."""
    studies = Facts()
    for setting in dict.fromkeys(s for s, _, _ in made.runs):
        runs = {
            m: r
            for (s, m, v), r in made.runs.items()
            if (s, v) == (setting, "") and r[0].evaluations
        }
        if not runs:
            continue
        stem, first = (
            f"{made.folder / slug(setting)}",
            {m: r[0] for m, r in runs.items()},
        )
        one = next(iter(first.values()))
        unit = one.main_metric
        named = [
            replace(r, header=r.header | {"algorithm": m, "options": {}})
            for m, each in runs.items()
            for r in each
        ]
        if any(len(r.evaluations) > 1 for r in first.values()):
            cost = {
                m: [(s / 2**20, v) for _, s, v in curve(r, unit)]
                for m, r in first.items()
            }
            what = "sent down and up by all clients, MiB"
            pictures.curves(named, f"{stem}-curves.png")
            pictures.weights(named, f"{stem}-weights-by-round.png")
            figures.curves(cost, f"{stem}-cost.png", what, f"mean {unit}")
        figures.heat_maps(first, f"{stem}-weights.png")
        figures.heat_maps(first, f"{stem}-neighbours.png", k=5)
        pictures.clients(named, f"{stem}-boxes.png")
        last = {m: r.last_values(unit) for m, r in first.items()}
        before = {
            m: b for m in first if (b := made.plan["methods"][m].get("before")) in first
        }
        if before:
            gains = {m: last[m] - last[b] for m, b in before.items()}
            figures.deltas(
                torch.tensor(one.header["size"]), gains, f"{stem}-deltas.png", unit
            )
        base = {m: last[before.get(m, m)] for m in first}
        studies[setting] = _trained(made, setting, base, unit)
    if option := made.plan["against"]:
        with_it = by_setting([r for r in rows if option in r["options"]])
        by = {
            s: sorted((r["options"][option], r["best"]) for r in of)
            for s, of in with_it.items()
        }
        figures.curves(
            by, f"{made.folder}/against-{option}.png", option, "test accuracy, %"
        )
    write_text(made.folder / "studies.json", json.dumps(to_json(studies)) + "\n")


def _trained(
    made: Reproduction, setting: str, before: Mapping[str, Tensor], unit: str
) -> Facts:
    """The studies of trained states, and their pictures."""
    stem = f"{made.folder / slug(setting)}"
    spread: dict[str, list[figures.Triple]] = {}
    fewer: dict[str, dict[float, float]] = {}
    for method in before:
        m, task = made.plan["methods"][method], made.tasks[setting, method, ""][0]
        states = made.states(task.base or task) if {"vary", "sizes"} & {*m} else []
        if not states:
            continue
        simulation, p = made.simulation(task)
        config, state, path = simulation.config, states[-1][3], f"{stem}-{slug(method)}"
        if m.get("sizes"):
            # the first part of each reported client's personalization set (Motley, Fig.
            # 7c)
            by = {f: results(config, state, p.keep(f)) for f in (1.0, 0.5, 0.25)}
            fewer[method] = {f: metrics.mean(v) for f, v in by.items()}
        if m.get("sizes") and "state_of" in m:
            gains = by_evaluation(config, state, p)
            figures.deltas(p.data.size("test"), gains, f"{path}-tests.png", unit)
        for option, choices in m.get("vary", {}).items():
            found = vary(config, state, p, option, choices)
            means = [
                (c, metrics.mean(own), metrics.mean(far))
                for c, (own, far) in found.items()
            ]
            hurt = [
                (c, mean, metrics.hurt(found[c][0], before[method], unit == "accuracy"))
                for c, mean, _ in means
            ]
            figures.option(hurt, f"{path}-{option}.png", option, unit)
            if option != "finetune_lr":
                spread[method] = means
        if "vary" in m and method not in spread:
            own, others = map(metrics.mean, both(config, state, p))
            spread[method] = [(method, own, others)]
    figures.distributions(spread, f"{stem}-distributions.png", unit)
    parts = {m: sorted((100 * f, v) for f, v in of.items()) for m, of in fewer.items()}
    what = "personalization set used, %"
    figures.curves(parts, f"{stem}-sizes.png", what, f"mean {unit}")
    return {"distributions": spread, "sizes": fewer}
