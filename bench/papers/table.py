"""The rows of a reproduction from its records, what of the plan must hold, and both as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pflcore import metrics
from pflcore.results.record import Run
from pflcore.results.table import far_movers, incidents

Runs = Mapping[tuple[str, str, str], Sequence[Run]]


def summary(
    after: Tensor, before: Tensor | None = None, higher_is_better: bool = True
) -> dict[str, float]:
    """Mean and deviation over clients, worst decile, tenth percentile (ninetieth of a loss; NaN for
    one client), and the percent hurt against `before`."""
    some = 1.0 if int((~after.isnan()).sum()) > 1 else math.nan
    out = {
        "mean": metrics.mean(after),
        "std": some * metrics.std(after),
        "worst_decile": some * metrics.worst_decile(after, higher_is_better=higher_is_better),
        "percentile": some
        * metrics.percentile(after[~after.isnan()], 10 if higher_is_better else 90),
    }
    if before is None:
        return out
    # one may not have been evaluated
    hurt = metrics.hurt(after, before, higher_is_better) if len(before) == len(after) else math.nan
    return {**out, "hurt": hurt}


def rows_of(plan: Mapping[str, Any], runs: Runs) -> list[dict[str, Any]]:
    """One row per setting, method and variant."""
    return [_row(plan, runs, *key) for key in runs]


def _row(
    plan: Mapping[str, Any], runs: Runs, setting: str, method: str, variant: str
) -> dict[str, Any]:
    """Means over seeds; accuracies in percent. `best` is the best round's mean over clients,
    selected on test data as in the papers, `final` the last round's, `by_size` and `by_size_final`
    the same weighted by test samples."""
    mine, m = runs[setting, method, variant], plan["methods"][method]
    measure = next((r.measure for r in mine if r.evaluations), "accuracy")
    up, scale = measure == "accuracy", 100.0 if measure == "accuracy" else 1.0
    before = runs.get((setting, m.get("before", ""), variant)) or runs.get(
        (setting, m.get("before", ""), "")
    )
    base = m.get("state_of", "")
    trained = runs.get((setting, base, variant)) or runs.get((setting, base, "")) or mine
    head = mine[0].header
    last = [r.last(measure) for r in mine]
    each = [summary(v, before[i].last(measure) if before else None, up) for i, v in enumerate(last)]
    of_all = {
        k: metrics.mean([e[k] for e in each]) * (1 if k == "hurt" else scale) for k in each[0]
    }
    best = [[scale * v for v in _over_rounds(r, measure, weighted=False)] for r in mine]
    sized = [[scale * v for v in _over_rounds(r, measure, weighted=True)] for r in mine]
    clusters = [
        metrics.largest_share(r.evaluations[-1]["eval"]["cluster"])
        for r in mine
        if r.evaluations and "cluster" in r.evaluations[-1]["eval"]
    ]
    several = len(mine) > 1
    sent = [sum(r["bytes_down"] + r["bytes_up"] for r in run.rounds) for run in mine]
    models = [s / (4 * head["parameters"] * head["takes_part"]) for s in sent]
    round = trained[0].rounds[-1] if trained[0].rounds else {}
    goal = {k: plan[k].get(setting, {}).get(method) for k in ("reported", "expected")}
    paper, paper_std = (
        goal["reported"] if isinstance(goal["reported"], list) else (goal["reported"], None)
    )
    return {
        "method": method,
        "variant": variant,
        "setting": setting,
        "data": head["data"],
        "measure": measure,
        "best": metrics.mean([b for b, _ in best]),
        "best_std": metrics.std([b for b, _ in best]) if several else None,
        "final": of_all["mean"],
        "final_std": metrics.std([f for _, f in best]) if several else None,
        "by_seed": [f for _, f in best],
        "std": of_all["std"],
        "worst_decile": of_all["worst_decile"],
        "percentile": of_all["percentile"],
        "hurt": of_all.get("hurt"),
        "largest": 100 * metrics.mean(clusters) if clusters else None,
        "by_size": metrics.mean([b for b, _ in sized]),
        "by_size_final": metrics.mean([f for _, f in sized]),
        "paper": paper,
        "paper_std": paper_std,
        "expected": goal["expected"],
        "seeds": len(mine),
        "rounds": head["rounds"],
        "played": [r.rounds[-1]["round"] if r.rounds else 0 for r in mine],
        "evaluations": len(mine[0].evaluations),
        "epochs": head["training"]["epochs"],
        "options": head["options"],
        "training": head["training"],
        "tuned": list(m.get("grid", ())),
        "models_a_round": (round["bytes_down"] + round["bytes_up"])
        / max(1, len(round["cohort"]))
        / (4 * head["parameters"])
        if round
        else None,
        "models": metrics.mean(models),
        "bytes": metrics.mean([float(s) for s in sent]),
        "curve": [[r, sent, scale * metrics.mean(v)] for r, sent, v in _curve(mine[0], measure)],
        "to_goal": _to_goal(runs, setting, mine, measure),
        "seconds_a_round": metrics.mean([r["seconds"] for run in trained for r in run.rounds]),
        "held_out": mine[0].held_out,
        "incidents": list(dict.fromkeys(said for r in mine for said in incidents(r))),
        "far": list(filter(None, map(far_movers, mine))),
        "stopped": next((r.stopped for r in mine if r.stopped), None),
    }


def _over_rounds(run: Run, measure: str, weighted: bool) -> tuple[float, float]:
    """The best and the last of the means over clients, uniform or by their test samples."""
    values = run.values(measure)[1]
    size = run.evaluations[-1]["eval"]["size"] if run.evaluations else []
    means = [metrics.weighted_mean(v, size) if weighted else metrics.mean(v) for v in values]
    return metrics.best(means, measure == "accuracy").value, metrics.final(means)


def _curve(run: Run, measure: str) -> list[tuple[int, int, Any]]:
    """Round, bytes sent until then, and values [N], of each evaluation."""
    at = {line["round"]: sent for line, sent in zip(run.rounds, run.sent(), strict=True)}
    return [(r, at[r], v) for r, v in zip(*run.values(measure), strict=True)]


def _to_goal(runs: Runs, setting: str, mine: Sequence[Run], measure: str) -> float | None:
    """Bytes, down and up by all clients, until the mean over clients reaches what the setting's
    first method with several evaluations ends at, less 2 % (of a loss: more); the mean over seeds,
    None where a seed never does or nothing was evaluated twice."""
    first = next(
        (
            group[0]
            for key, group in runs.items()
            if key[0] == setting and len(group[0].evaluations) > 1
        ),
        None,
    )
    if first is None:
        return None
    up = measure == "accuracy"
    goal = goal_of(metrics.mean(first.last(measure)), up)
    curves = [_curve(r, measure) for r in mine]
    sent = [
        metrics.bytes_to_reach([metrics.mean(v) for *_, v in c], [s for _, s, _ in c], goal, up)
        for c in curves
    ]
    reached = [float(s) for s in sent if s is not None]
    return metrics.mean(reached) if len(reached) == len(sent) else None


def goal_of(value: float, higher_is_better: bool) -> float:
    """Near enough to a result: 2 % worse."""
    return value * (0.98 if higher_is_better else 1.02)


def verdicts(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """What the plan says must hold, and whether it does. Methods that were not played are passed
    over, numbers where seeds lack too."""
    checks, out = plan["checks"], []
    for setting in dict.fromkeys(r["setting"] for r in rows):
        mine = {r["method"]: r for r in rows if r["setting"] == setting and not r["variant"]}
        whole = {name: r for name, r in mine.items() if r["seeds"] == len(plan["seeds"])}
        for name, want in plan["expected"].get(setting, {}).items():
            if name in whole and "tolerance" in checks:
                got, within = whole[name]["final"], checks["tolerance"]
                out.append(
                    (
                        abs(got - want) <= within,
                        f"{name}: {got:.5f}, expected {want:.5f} ± {within:g}",
                    )
                )
        for what in ("hurt", "largest"):
            for name, (want, within) in checks.get(what, {}).items():
                if name in whole:
                    got = whole[name][what]
                    good, value = (
                        got is not None and abs(got - want) <= within,
                        "not measured" if got is None else f"{got:.1f} %",
                    )
                    out.append((good, f"{name}: {what} {value}, expected {want:g} ± {within:g}"))
        pairs = [(low, high) for high, lows in checks.get("below", {}).items() for low in lows]
        pairs += [(low, high) for low, highs in checks.get("above", {}).items() for high in highs]
        for low, high in pairs:
            if low in mine and high in mine:
                by_seed = list(zip(mine[low]["by_seed"], mine[high]["by_seed"], strict=True))
                good = sum(a < b for a, b in by_seed)
                out.append(
                    (good == len(by_seed), f"{low} below {high} in {good} of {len(by_seed)} runs")
                )
    return out


def table(
    plan: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    checks: Sequence[tuple[bool, str]] = (),
) -> str:
    """Markdown: a table per setting, methods in the plan's order, columns that some method has
    something for."""
    lines = [plan["about"], ""] if plan["about"] else []
    selects = False
    for setting in dict.fromkeys(r["setting"] for r in rows):
        mine = [r for r in rows if r["setting"] == setting]
        # a run may have stopped before it was evaluated
        some = next((r for r in mine if r["evaluations"]), mine[0])
        up = some["measure"] == "accuracy"
        variants = list(dict.fromkeys(r["variant"] for r in mine))
        select = any(r["evaluations"] > 1 for r in mine) and not plan["settings"][setting].get(
            "protocol"
        )
        selects |= select
        body = []
        for method in dict.fromkeys(r["method"] for r in mine):
            of = {r["variant"]: r for r in mine if r["method"] == method}
            cells = {"method": method}
            for v in variants:
                r = of.get(v) or of[""]  # a method that looks ahead has one number for both
                cells[(v or "best") + "\\*"] = (
                    _number(r["best"], up, r["best_std"]) if select else ""
                )
                cells["final" if not v else f"{v}, final"] = _number(r["final"], up, r["final_std"])
            r = of.get("") or next(iter(of.values()))
            cells |= {k: _number(r[k.replace(" ", "_")], up) for k in ("std", "worst decile")}
            cells |= {
                "paper": _number(r["paper"], up, r.get("paper_std")),
                "expected": _number(r["expected"], up),
            }
            cells["by size"] = _number(r["by_size"], up) if select else ""
            cells |= {
                "% hurt": _number(r["hurt"], digits=1),
                "% in largest cluster": _number(r["largest"], digits=1),
            }
            cells |= {
                "models a round": _number(r["models_a_round"], digits=2),
                "models in all": _number(r["models"], digits=1),
            }
            cells["MiB to 98 %" if up else "MiB to 102 %"] = _number(
                r["to_goal"] and r["to_goal"] / 2**20, digits=1
            )
            cells["seconds a round"] = _number(r["seconds_a_round"], digits=3)
            played = (
                []
                if r["stopped"] is None
                else [f"{min(r['played'])} of {r['rounds']} rounds: {r['stopped']}"]
            )
            tuned = [f"{k} {_option(r, k)}" for k in r["tuned"]]
            cells["note"] = "; ".join(
                [*tuned, *([r["held_out"]] if r["held_out"] else []), *r["incidents"], *played]
            )
            body.append(cells)
        columns = [
            c for c in body[0] if c == "method" or any(cells[c] not in ("", "-") for cells in body)
        ]
        unit = "accuracy in percent" if up else "loss"
        # NaN for one client
        whose = "mean over clients" if some["std"] == some["std"] else "of the target alone"
        name = setting.replace("*", "\\*")
        said = (
            f"**{name}**, {mine[0]['data']}, {mine[0]['rounds']} rounds, {mine[0]['seeds']} "
            f"seed(s); test {unit}, {whose}"
        )
        lines += [
            said,
            "",
            "| " + " | ".join(columns) + " |",
            "|:---|" + "---:|" * (len(columns) - 1),
        ]
        lines += ["| " + " | ".join(cells[c] for c in columns) + " |" for cells in body] + [""]
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
    lines += [f"- {'holds' if good else 'FAILS'}: {text}" for good, text in checks]
    return "\n".join(lines) + "\n"


def _option(row: Mapping[str, Any], name: str) -> Any:
    return (
        row["options"].get(name)
        if not name.startswith("training.")
        else row["training"][name.removeprefix("training.")]
    )


def _number(
    x: float | None, percent: bool = True, std: float | None = None, digits: int | None = None
) -> str:
    if x is None or x != x:
        return "-"
    digits = (2 if percent else 5) if digits is None else digits
    return f"{x:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")
