"""The rows of a reproduction from its records, what of the plan must hold, and both
as Markdown."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bench.papers.plan import Plan
from bench.problem import Facts
from pflcore import metrics
from pflcore.results.record import Run
from pflcore.results.table import describe_incidents, describe_outliers, markdown_table

Key = tuple[str, str, str]  # setting, method, variant
Runs = Mapping[Key, Sequence[Run]]
Row = Mapping[str, Any]
# columns, what of a row they hold, and decimals where they are not the measure's
NUMBERS = """\
std | std |
worst decile | worst_decile |
paper | paper |
expected | expected |
by size | by_size |
% hurt | hurt | 1
% in largest cluster | largest | 1
models a round | models_a_round | 2
models in all | models | 1
MiB to GOAL % | to_goal | 1
seconds a round | seconds_a_round | 3
"""
OF_GROUPS = ("accuracy", "majority", "minority", "gap", "variance")


def summary(
    after: Tensor, before: Tensor | None = None, higher_is_better: bool = True
) -> dict[str, float]:
    """Mean and deviation over clients, and the mean of the worst decile.

    The deviation and the worst decile are NaN for a single client. With `before` there
    is the percentage of clients that are hurt, too.
    """
    numbers = {
        "mean": metrics.mean(after),
        "std": metrics.std(after),
        "worst_decile": metrics.worst_decile(after, higher_is_better=higher_is_better),
    }
    if metrics.count(after) < 2:
        numbers["std"] = math.nan
        numbers["worst_decile"] = math.nan
    if before is not None:
        numbers["hurt"] = math.nan  # where other clients were evaluated before
        if len(before) == len(after):
            numbers["hurt"] = metrics.hurt(after, before, higher_is_better)
    return numbers


def rows_of(plan: Plan, runs: Runs) -> list[Facts]:
    """One row per setting, method and variant, with means over seeds.

    Accuracies are in percent. `best` is the best round's mean over clients, selected on
    test data as in the papers, `by_size` is the same weighted by test samples, and
    `final` is the last round's mean.
    """
    rows = []
    for key, group in runs.items():
        setting, method, variant = key
        header = group[0].header
        metric = next((r.main_metric for r in group if r.evaluations), "accuracy")
        played = _related(plan, runs, key, "state_of") or group
        paper, paper_std = _paper_number(plan, "reported", setting, method)
        row = {
            "method": method,
            "variant": variant,
            "setting": setting,
            **{k: header[k] for k in ("data", "rounds", "options", "training")},
            "measure": metric,
            **_scores(group, _related(plan, runs, key, "before"), metric),
            "largest": _largest_cluster(group),
            "paper": paper,
            "paper_std": paper_std,
            "expected": plan["expected"].get(setting, {}).get(method),
            "seeds": len(group),
            "played": [run.rounds_played for run in group],
            "evaluations": len(group[0].evaluations),
            "epochs": header["training"]["epochs"],
            "tuned": [*plan["methods"][method].get("grid", ())],
            **_costs(group, played),
            "to_goal": _to_goal(runs, setting, group, metric),
            "held_out": group[0].held_out,
            "incidents": _incidents(group),
            "far": [*filter(None, map(describe_outliers, group))],
            "stopped": next((run.stopped for run in group if run.stopped), None),
        }
        rows.append(row)
    return rows


def _related(
    plan: Plan, runs: Runs, key: tuple[str, str, str], relation: str
) -> Sequence[Run] | None:
    """The runs of the method that a method names as its "before" or "state_of"."""
    setting, method, variant = key
    other = plan["methods"][method].get(relation, "")
    return runs.get((setting, other, variant)) or runs.get((setting, other, ""))


def _paper_number(
    plan: Plan, kind: str, setting: str, method: str
) -> tuple[float | None, float | None]:
    """The number that a paper reports, and its standard deviation where it has one."""
    number = plan[kind].get(setting, {}).get(method)
    if isinstance(number, list):
        mean, std = number
        return mean, std
    return number, None


def _scores(
    group: Sequence[Run], before: Sequence[Run] | None, metric: str
) -> dict[str, Any]:
    """The numbers of a row that depend on the clients' values.

    Args:
        before: The runs against which clients are hurt, with the same seeds.
    """
    higher_is_better = metric == "accuracy"
    scale = 100.0 if higher_is_better else 1.0
    summaries = []
    best = []
    final = []
    by_size = []
    for i, run in enumerate(group):
        old = before[i].last_values(metric) if before else None
        summaries.append(summary(run.last_values(metric), old, higher_is_better))
        rows = run.values(metric)[1]
        size = run.last_evaluation.get("size", [])
        means = [metrics.mean(values) for values in rows]
        weighted = [metrics.weighted_mean(values, size) for values in rows]
        best.append(scale * metrics.best(means, higher_is_better).value)
        final.append(scale * metrics.final(means))
        by_size.append(scale * metrics.best(weighted, higher_is_better).value)
    mean = {k: metrics.mean([s[k] for s in summaries]) for k in summaries[0]}
    has_seeds = len(group) > 1
    return {
        "best": metrics.mean(best),
        "best_std": metrics.std(best) if has_seeds else None,
        "final": mean["mean"] * scale,
        "final_std": metrics.std(final) if has_seeds else None,
        "by_seed": final,
        "std": mean["std"] * scale,
        "worst_decile": mean["worst_decile"] * scale,
        "hurt": mean.get("hurt"),
        "by_size": metrics.mean(by_size),
    }


def _largest_cluster(group: Sequence[Run]) -> float | None:
    """The percentage of clients in the largest cluster; None without clusters."""
    shares = []
    for run in group:
        if "cluster" in run.last_evaluation:
            shares.append(largest_share(run.last_evaluation["cluster"]))
    return 100 * metrics.mean(shares) if shares else None


def _costs(group: Sequence[Run], played: Sequence[Run]) -> dict[str, Any]:
    """The numbers of a row on what was sent, in models, and on the time of a round.

    Args:
        played: The runs that were trained: the group's own, or those whose states the
            group evaluates.
    """
    header = group[0].header
    model_bytes = 4 * header["parameters"]
    models_a_round = None
    for line in played[0].rounds[-1:]:
        sent = line["bytes_down"] + line["bytes_up"]
        models_a_round = sent / max(1, len(line["cohort"])) / model_bytes
    models = []
    for run in group:
        sent = sum(run.cumulative_bytes()[-1:])
        models.append(sent / (model_bytes * header["takes_part"]))
    seconds = []
    for run in played:
        seconds += [line["seconds"] for line in run.rounds]
    return {
        "models_a_round": models_a_round,
        "models": metrics.mean(models),
        "seconds_a_round": metrics.mean(seconds),
    }


def _incidents(group: Sequence[Run]) -> list[str]:
    """The incidents of all runs, each text once."""
    texts: dict[str, None] = {}
    for run in group:
        texts |= dict.fromkeys(describe_incidents(run))
    return list(texts)


def curve(run: Run, measure: str) -> list[tuple[int, int, float]]:
    """Round, bytes sent until then, and the mean over clients, of each evaluation."""
    at = {
        line["round"]: sent
        for line, sent in zip(run.rounds, run.cumulative_bytes(), strict=True)
    }
    return [(r, at[r], v) for r, v in zip(*run.curve(measure=measure), strict=True)]


def _to_goal(
    runs: Runs, setting: str, mine: Sequence[Run], measure: str
) -> float | None:
    """Bytes, down and up by all clients, until the mean over clients reaches what the
    setting's first method with several evaluations ends at, less 2 % (of a loss: more);
    the mean over seeds, None where a seed never does or nothing was evaluated twice."""
    of_setting = (group[0] for key, group in runs.items() if key[0] == setting)
    first = next((run for run in of_setting if len(run.evaluations) > 1), None)
    if first is None:
        return None
    sign, near = (1, 0.98) if measure == "accuracy" else (-1, 1.02)
    goal = sign * near * metrics.mean(first.last_values(measure))
    sent = [
        next((at for _, at, value in curve(run, measure) if sign * value >= goal), None)
        for run in mine
    ]
    return None if None in sent else metrics.mean(sent)


def verdicts(plan: Plan, rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """What the plan says must hold, and whether it does. Methods that were not played
    are passed over, numbers where seeds lack too."""
    checks = {"below": {}, "above": {}, "hurt": {}, "largest": {}, **plan["checks"]}
    pairs = [(low, high) for high, lows in checks["below"].items() for low in lows]
    pairs += [(low, high) for low, highs in checks["above"].items() for high in highs]
    for setting, of_setting in by_setting(rows).items():
        mine = {r["method"]: r for r in of_setting if not r["variant"]}
        whole = {
            name: r for name, r in mine.items() if r["seeds"] == len(plan["seeds"])
        }
        wanted = plan["expected"].get(setting, {}) if "tolerance" in checks else {}
        checks["final"] = {
            name: (want, checks["tolerance"]) for name, want in wanted.items()
        }
        for what in ("final", "hurt", "largest"):
            for name in filter(whole.get, checks[what]):
                got = whole[name][what]
                want, within = checks[what][name]
                value = "not measured" if got is None else f"{got:.1f} %"
                said = f"{what} {value}, expected {want:g}"
                if what == "final":
                    said = f"{got:.5f}, expected {want:.5f}"
                good = got is not None and abs(got - want) <= within
                yield good, f"{name}: {said} ± {within:g}"
        for low, high in pairs:
            if low in mine and high in mine:
                by_seed = zip(mine[low]["by_seed"], mine[high]["by_seed"], strict=True)
                good = [a < b for a, b in by_seed]
                yield (
                    all(good),
                    f"{low} below {high} in {sum(good)} of {len(good)} runs",
                )


def table(plan: Plan, rows: Sequence[Row]) -> str:
    """Markdown: a table per setting, methods in the plan's order, columns that some
    method has something for."""
    lines = about(plan)
    selects = False
    for setting, mine in by_setting(rows).items():
        # a run may have stopped before it was evaluated
        some = next((r for r in mine if r["evaluations"]), mine[0])
        protocol = plan["settings"][setting].get("protocol")
        up = some["measure"] == "accuracy"
        select = any(r["evaluations"] > 1 for r in mine) and not protocol
        selects |= select
        variants = dict.fromkeys(r["variant"] for r in mine)
        body = [
            _cells({r["variant"]: r for r in of_method}, variants, up, select)
            for _, of_method in groupby(mine, lambda r: r["method"])
        ]
        # NaN for one client
        whose = (
            "mean over clients" if some["std"] == some["std"] else "of the target alone"
        )
        unit = "accuracy in percent" if up else "loss"
        lines += [f"{heading(mine[0])}; test {unit}, {whose}", "", *of_cells(body), ""]
        lines += [
            f"{r['method']}, moved far: {whom}; look at the data or set clip.\n"
            for r in mine
            for whom in r["far"]
        ]
    if selects:
        lines.append(
            "\\* the best round, selected on test data as in the paper; "
            '"by size" weighs clients by their test samples.'
        )
    return "\n".join(lines) + "\n"


def about(plan: Plan) -> list[str]:
    """The lines above the tables."""
    return [plan["about"], ""] if plan["about"] else []


def largest_share(cluster: Sequence[int]) -> float:
    """Share of the clients in the largest cluster; `cluster [n]` holds each client's
    cluster id, negative for none."""
    sizes = Counter(c for c in cluster if c >= 0)
    return max(sizes.values()) / sizes.total() if sizes else math.nan


def of_cells(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Markdown of rows by column, the columns that some row has something for."""
    kept = [
        c for c in rows[0] if c in ("method", "") or {r[c] for r in rows} - {"", "-"}
    ]
    return markdown_table([kept, *([r[c] for c in kept] for r in rows)])


def by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each setting."""
    return {s: list(mine) for s, mine in groupby(rows, lambda row: row["setting"])}


def heading(row: Row) -> str:
    """What all rows of a setting share."""
    name = row["setting"].replace("*", "\\*")
    return f"**{name}**, {row['data']}, {row['rounds']} rounds, {row['seeds']} seed(s)"


def _cells(
    of: Mapping[str, Row], variants: Iterable[str], up: bool, select: bool
) -> dict[str, str]:
    """One method's cells by column, from its row of each variant."""
    digits = 2 if up else 5
    r = of[""]
    cells = {"method": r["method"]}
    for v in variants:
        one = of.get(v, r)  # a method that looks ahead has one number for both
        best, final = (
            number(one[k], one[f"{k}_std"], digits) for k in ("best", "final")
        )
        cells[(v or "best") + "\\*"] = best if select else ""
        cells[f"{v}, final" if v else "final"] = final
    goal = r["to_goal"] and r["to_goal"] / 2**20
    by_size = r["by_size"] if select else None
    r = {**r, "to_goal": goal, "by_size": by_size}
    for line in NUMBERS.splitlines():
        head, key, places = (word.strip() for word in line.split("|"))
        std = r["paper_std"] if key == "paper" else None
        head = head.replace("GOAL", "98" if up else "102")
        cells[head] = number(r[key], std, int(places or digits))
    given = r["options"] | {f"training.{k}": v for k, v in r["training"].items()}
    notes = [f"{k} {given.get(k)}" for k in r["tuned"]]
    notes += [r["held_out"], *r["incidents"]]
    if r["stopped"] is not None:
        notes.append(f"{min(r['played'])} of {r['rounds']} rounds: {r['stopped']}")
    return cells | {"note": "; ".join(filter(None, notes))}


def number(x: float | None, std: float | None = None, digits: int = 2) -> str:
    if x is None or x != x:
        return "-"
    return f"{x:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")


# the last round, by subpopulations --------------------------------------------


def rows_of_groups(plan: Plan, runs: Runs) -> list[Facts]:
    """One row per setting and method, as in WAFFLe's Tables 1 and 2 (Hao et al. 2020).

    "ours" has means over runs in percent, and "std" their deviations (ddof = 0).
    """
    rows = []
    for (setting, method, variant), group in runs.items():
        header = group[0].header
        values: dict[str, list[float]] = {}  # of each run, by measure
        for run in group:
            accuracies = 100 * run.last_values("accuracy")
            for name, value in measures(accuracies, header.get("group")).items():
                values.setdefault(name, []).append(value)
        row = {
            "method": method,
            "setting": setting,
            "variant": variant,
            "seeds": len(group),
            **{k: header[k] for k in ("data", "rounds", "options", "parameters")},
            "ours": {name: metrics.mean(numbers) for name, numbers in values.items()},
            "std": {name: metrics.std(numbers) for name, numbers in values.items()},
            "paper": plan["reported"].get(setting, {}).get(method),
            "stopped": next((run.stopped for run in group if run.stopped), None),
        }
        rows.append(row)
    return rows


def measures(values: Tensor, group: Sequence[int] | None) -> dict[str, float]:
    """The mean over clients, "accuracy", and the "variance" over them (ddof = 0).

    With each client's `group` [N] there are "majority" and "minority", the means over
    groups 0 and 1, and "gap". For accuracies in percent the gap is in points and the
    variance in percent squared (Hao et al. 2020, Table 2).
    """
    parts = {}
    if group is not None:
        groups = torch.tensor(group)
        majority = metrics.mean(values[groups == 0])
        minority = metrics.mean(values[groups == 1])
        gap = majority - minority
        parts = {"majority": majority, "minority": minority, "gap": gap}
    return {
        "accuracy": metrics.mean(values),
        **parts,
        "variance": metrics.std(values) ** 2,
    }


def table_of_groups(plan: Plan, rows: Sequence[Row]) -> str:
    """Markdown, a table per setting: ours, and the paper's number where it gives
    one."""
    lines = about(plan)
    for mine in by_setting(rows).values():
        body = []
        for r in mine:
            std = r["std"] if r["seeds"] > 1 else {}
            paper = r["paper"] or {}
            columns = [c for c in OF_GROUPS if c in r["ours"]]
            cells = {"method": r["method"], "parameters": f"{r['parameters']:,}"}
            cells |= {c: number(r["ours"][c], std.get(c)) for c in columns}
            cells |= {f"paper: {c}": number(paper.get(c)) for c in columns}
            body.append(cells | {"": r["stopped"] or ""})
        lines += [heading(mine[0]), "", *of_cells(body), ""]
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last "
        "round, and their standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"
