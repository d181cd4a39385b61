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
    """Mean and deviation over clients, worst decile (NaN for one client), and the
    percent hurt against `before`."""
    some = 1.0 if metrics.count(after) > 1 else math.nan
    out = {
        "mean": metrics.mean(after),
        "std": some * metrics.std(after),
        "worst_decile": some
        * metrics.worst_decile(after, higher_is_better=higher_is_better),
    }
    if before is None:
        return out
    # one may not have been evaluated
    hurt = (
        metrics.hurt(after, before, higher_is_better)
        if len(before) == len(after)
        else math.nan
    )
    return {**out, "hurt": hurt}


def rows_of(plan: Plan, runs: Runs) -> list[Facts]:
    """One row per setting, method and variant: means over seeds; accuracies in percent.
    `best` is the best round's mean over clients, selected on test data as in the
    papers, `by_size` the same weighted by test samples, `final` the last round's."""
    out = []
    for (setting, method, variant), mine in runs.items():
        m = plan["methods"][method]
        measure = next((r.main_metric for r in mine if r.evaluations), "accuracy")
        up = measure == "accuracy"
        scale = 100.0 if up else 1.0
        before, trained = (
            runs.get((setting, m.get(k, ""), variant))
            or runs.get((setting, m.get(k, ""), ""))
            for k in ("before", "state_of")
        )
        each = [
            summary(
                r.last_values(measure),
                before[i].last_values(measure) if before else None,
                up,
            )
            for i, r in enumerate(mine)
        ]
        of_all = {k: metrics.mean([e[k] for e in each]) for k in each[0]}
        best, final, by_size = [], [], []
        for r in mine:
            values = r.values(measure)[1]
            means = [metrics.mean(v) for v in values]
            sized = [
                metrics.weighted_mean(v, r.last_evaluation["size"]) for v in values
            ]
            best.append(scale * metrics.best(means, up).value)
            final.append(scale * metrics.final(means))
            by_size.append(scale * metrics.best(sized, up).value)
        shares = [
            largest_share(r.last_evaluation["cluster"])
            for r in mine
            if "cluster" in r.last_evaluation
        ]
        head, played = mine[0].header, trained or mine
        size = 4 * head["parameters"]
        sent, many = [sum(r.cumulative_bytes()[-1:]) for r in mine], len(mine) > 1
        of_last = None
        for line in played[0].rounds[-1:]:
            of_last = (
                (line["bytes_down"] + line["bytes_up"])
                / max(1, len(line["cohort"]))
                / size
            )
        paper, expected = (
            plan[k].get(setting, {}).get(method) for k in ("reported", "expected")
        )
        paper, paper_std = paper if isinstance(paper, list) else (paper, None)
        row = {
            "method": method,
            "variant": variant,
            "setting": setting,
            **{k: head[k] for k in ("data", "rounds", "options", "training")},
            "measure": measure,
            "best": metrics.mean(best),
            "best_std": metrics.std(best) if many else None,
            "final": of_all["mean"] * scale,
            "final_std": metrics.std(final) if many else None,
            "by_seed": final,
            **{k: of_all[k] * scale for k in ("std", "worst_decile")},
            "hurt": of_all.get("hurt"),
            "largest": 100 * metrics.mean(shares) if shares else None,
            "by_size": metrics.mean(by_size),
            "paper": paper,
            "paper_std": paper_std,
            "expected": expected,
            "seeds": len(mine),
            "played": [r.rounds_played for r in mine],
            "evaluations": len(mine[0].evaluations),
            "epochs": head["training"]["epochs"],
            "tuned": [*m.get("grid", ())],
            "models_a_round": of_last,
            "models": metrics.mean([s / (size * head["takes_part"]) for s in sent]),
            "to_goal": _to_goal(runs, setting, mine, measure),
            "seconds_a_round": metrics.mean(
                [r["seconds"] for run in played for r in run.rounds]
            ),
            "held_out": mine[0].held_out,
            "incidents": [
                *dict.fromkeys(said for r in mine for said in describe_incidents(r))
            ],
            "far": [*filter(None, map(describe_outliers, mine))],
            "stopped": next((r.stopped for r in mine if r.stopped), None),
        }
        out.append(row)
    return out


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
                got, (want, within) = whole[name][what], checks[what][name]
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
    lines, selects = about(plan), False
    for setting, mine in by_setting(rows).items():
        # a run may have stopped before it was evaluated
        some = next((r for r in mine if r["evaluations"]), mine[0])
        protocol, up = (
            plan["settings"][setting].get("protocol"),
            some["measure"] == "accuracy",
        )
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
    digits, r = 2 if up else 5, of[""]
    cells = {"method": r["method"]}
    for v in variants:
        one = of.get(v, r)  # a method that looks ahead has one number for both
        best, final = (
            number(one[k], one[f"{k}_std"], digits) for k in ("best", "final")
        )
        cells[(v or "best") + "\\*"] = best if select else ""
        cells[f"{v}, final" if v else "final"] = final
    goal, by_size = (
        r["to_goal"] and r["to_goal"] / 2**20,
        r["by_size"] if select else None,
    )
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
    """One row per setting and method: means over runs in percent, "std" over runs
    (ddof = 0) beside them: WAFFLe's Tables 1 and 2 (Hao et al. 2020)."""
    out = []
    for (setting, method, variant), mine in runs.items():
        head = mine[0].header
        seen = [
            measures(100 * r.last_values("accuracy"), head.get("group")) for r in mine
        ]
        ours, std = (
            {k: of([s[k] for s in seen]) for k in seen[0]}
            for of in (metrics.mean, metrics.std)
        )
        row = {
            "method": method,
            "setting": setting,
            "variant": variant,
            "seeds": len(mine),
            **{k: head[k] for k in ("data", "rounds", "options", "parameters")},
            "ours": ours,
            "std": std,
            "paper": plan["reported"].get(setting, {}).get(method),
            "stopped": next((r.stopped for r in mine if r.stopped), None),
        }
        out.append(row)
    return out


def measures(values: Tensor, group: Sequence[int] | None) -> dict[str, float]:
    """ "accuracy", the mean over clients, and "variance" (ddof = 0); with each client's
    `group` [n]
    also "majority" and "minority", the means over groups 0 and 1, and "gap".

    For accuracies in percent the gap is in points and the variance in percent squared
    (Hao et al. 2020, Table 2).
    """
    parts = {}
    if group is not None:
        major, minor = (metrics.mean(values[torch.tensor(group) == g]) for g in (0, 1))
        parts = {"majority": major, "minority": minor, "gap": major - minor}
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
            std, paper = r["std"] if r["seeds"] > 1 else {}, r["paper"] or {}
            columns = [c for c in OF_GROUPS if c in r["ours"]]
            cells = {"method": r["method"], "parameters": f"{r['parameters']:,}"}
            cells |= {c: number(r["ours"][c], std.get(c)) for c in columns}
            cells |= {f"paper: {c}": number(paper.get(c)) for c in columns}
            body.append(cells | {"": r["stopped"] or ""})
        lines += [heading(mine[0]), "", *of_cells(body), ""]
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last "
        "round, and their "
        "standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"
