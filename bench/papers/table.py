"""The rows of a reproduction, and the checks of its plan.

Both become Markdown.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bench.papers.plan import Plan
from bench.problem import Facts
from pflcore import History, metrics
from pflcore.lab.results._notes import describe_incidents, describe_outliers
from pflcore.lab.results._verdicts import Verdict, compare_with_baseline
from pflcore.lab.results.table import markdown_table

Key = tuple[str, str, str]  # setting, method, variant
Runs = Mapping[Key, Sequence[History]]
Row = Mapping[str, Any]
# Columns, the keys of a row that they show, and decimals if not those of the measure.
NUMBERS = """\
by validation | by_val |
after a local step | after_step |
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
            "seed_numbers": [run.header["seed"] for run in group],
            "edges": header.get("edges", {}),
            "played": [run.rounds_played for run in group],
            "evaluations": len(group[0].evaluations),
            "epochs": header["training"]["epochs"],
            "tuned": [*_grid_of(plan, setting, method)],
            **_costs(group, played),
            "to_goal": _to_goal(runs, setting, group, metric),
            "held_out": group[0].held_out,
            "incidents": _incidents(group),
            "far": [*filter(None, map(describe_outliers, group))],
            "stopped": next((run.stopped for run in group if run.stopped), None),
        }
        rows.append(row)
    return rows


def _grid_of(plan: Plan, setting: str, method: str) -> Mapping[str, Any]:
    """The grid of a method in a setting."""
    of_method = plan["methods"][method].get("grid", plan["grid"])
    grids = plan["settings"][setting].get("grids", {})
    grid: Mapping[str, Any] = grids.get(method, of_method)
    return grid


def _related(
    plan: Plan, runs: Runs, key: tuple[str, str, str], relation: str
) -> Sequence[History] | None:
    """The runs of a method's "before" or "state_of"."""
    setting, method, variant = key
    other = plan["methods"][method].get(relation, "")
    return runs.get((setting, other, variant)) or runs.get((setting, other, ""))


def _paper_number(
    plan: Plan, kind: str, setting: str, method: str
) -> tuple[float | None, float | None]:
    """The number in a paper, with its standard deviation if given."""
    number = plan[kind].get(setting, {}).get(method)
    if isinstance(number, list):
        mean, std = number
        return mean, std
    return number, None


def _scores(
    group: Sequence[History], before: Sequence[History] | None, metric: str
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
        old = None
        if before and i < len(before):
            old = before[i].last_values(metric)
        summaries.append(summary(run.last_values(metric), old, higher_is_better))
        rows = run.series(metric)[1]
        size = run.last_evaluation.get("size", [])
        means = [metrics.mean(values) for values in rows]
        weighted = [metrics.weighted_mean(values, size) for values in rows]
        best.append(scale * metrics.best(means, higher_is_better).value)
        final.append(scale * metrics.final(means))
        by_size.append(scale * metrics.best(weighted, higher_is_better).value)
    mean = {}
    for name in summaries[0]:
        mean[name] = metrics.mean([of_seed.get(name) for of_seed in summaries])
    has_seeds = len(group) > 1
    by_val = [scale * value for run in group for value in _by_val(run, metric)]
    stepped = [scale * value for run in group for value in _after_step(run)]
    return {
        "best": metrics.mean(best),
        "best_std": metrics.std_over_seeds(best) if has_seeds else None,
        "final": mean["mean"] * scale,
        "final_std": metrics.std_over_seeds(final) if has_seeds else None,
        "by_seed": final,
        "by_val": metrics.mean(by_val) if by_val else None,
        "by_val_std": metrics.std_over_seeds(by_val) if by_val and has_seeds else None,
        "after_step": metrics.mean(stepped) if stepped else None,
        "after_step_std": (
            metrics.std_over_seeds(stepped) if stepped and has_seeds else None
        ),
        "std": mean["std"] * scale,
        "worst_decile": mean["worst_decile"] * scale,
        "hurt": mean.get("hurt"),
        "by_size": metrics.mean(by_size),
    }


def _by_val(run: History, metric: str) -> list[float]:
    """The test mean of the evaluation that is the best on validation samples.

    It is a list of one number, or empty where no evaluation has a result on them.
    """
    if "val" not in run.last_evaluation:
        return []
    higher_is_better = metric == "accuracy"
    val = [metrics.mean(values) for values in run.series("val")[1]]
    best = metrics.best(val, higher_is_better).at
    return [metrics.mean(run.series(metric)[1][best])]


def _after_step(run: History) -> list[float]:
    """The mean after a local step, as a list of one number; empty without it."""
    if "after_step" not in run.last_evaluation:
        return []
    return [metrics.mean(run.last_values("after_step"))]


def verdicts_of(
    plan: Plan, rows: Sequence[Row], planned: int = 0
) -> dict[str, Verdict]:
    """The verdict on each method of a setting against the plan's baseline.

    It is that of `pflcore report --baseline`: a paired t test over the seeds at the
    last evaluation, corrected by Holm for all methods that are compared. Methods
    without runs of all seeds of the plan are left out.

    Args:
        rows: The setting's rows.
        planned: The number of comparisons once all rows are there.
    """
    whole = {}
    for row in rows:
        if row["seeds"] == len(plan["seeds"]) and not row["variant"]:
            whole[row["method"]] = row
    baseline = whole.pop(plan["baseline"], None)
    if baseline is None:
        return {}
    of_baseline = _number_by_seed(baseline)
    differences: dict[str, list[float]] = {}
    for method, row in whole.items():
        differences[method] = []
        for seed, value in _number_by_seed(row).items():
            difference = value - of_baseline.get(seed, math.nan)
            differences[method].append(difference)
    higher_is_better = baseline["measure"] == "accuracy"
    return compare_with_baseline(differences, higher_is_better, planned)


def _number_by_seed(row: Row) -> dict[int, float]:
    """A row's mean over clients of each seed, infinite where it was stopped."""
    by_seed = dict(zip(row["seed_numbers"], row["by_seed"], strict=True))
    if row["stopped"]:
        return dict.fromkeys(by_seed, math.inf)
    return by_seed


def verdict_text(verdict: Verdict | None, digits: int = 2) -> str:
    """A verdict with its interval; "" for none."""
    if verdict is None:
        return ""
    low, high = (f"{end:+.{digits}f}" for end in (verdict.low, verdict.high))
    return f"{verdict.word}: {verdict.difference:+.{digits}f} ({low} to {high})"


def _largest_cluster(group: Sequence[History]) -> float | None:
    """The percentage of clients in the largest cluster; None without clusters."""
    shares = []
    for run in group:
        if "cluster" in run.last_evaluation:
            shares.append(largest_share(run.last_evaluation["cluster"]))
    return 100 * metrics.mean(shares) if shares else None


def _costs(group: Sequence[History], played: Sequence[History]) -> dict[str, Any]:
    """The numbers of a row on its traffic and time.

    The traffic counts models, and the time is that of a round.

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
    trained = []  # seconds of rounds without an evaluation
    for run in played:
        seconds += [line["seconds"] for line in run.rounds]
        trained += [line["seconds"] for line in run.rounds if not line["eval"]]
    return {
        "models_a_round": models_a_round,
        "models": metrics.mean(models),
        "mib": metrics.mean(models) * model_bytes / 2**20,
        "seconds_a_round": metrics.mean(seconds),
        "training_seconds": metrics.percentile(trained, 50) if trained else None,
    }


def _incidents(group: Sequence[History]) -> list[str]:
    """The incidents of all runs, each text once."""
    texts: dict[str, None] = {}
    for run in group:
        texts |= dict.fromkeys(describe_incidents(run))
    return list(texts)


def curve(run: History, measure: str) -> list[tuple[int, int, float]]:
    """Round, bytes until then, and mean over clients of each evaluation."""
    sent_until = {}
    for line, sent in zip(run.rounds, run.cumulative_bytes(), strict=True):
        sent_until[line["round"]] = sent
    rounds, values = run.curve(key=measure)
    return [(r, sent_until[r], v) for r, v in zip(rounds, values, strict=True)]


def _to_goal(
    runs: Runs, setting: str, group: Sequence[History], measure: str
) -> float | None:
    """Bytes by all clients until a method's mean reaches the goal.

    The goal is where the setting's first method with several evaluations ends, less 2 %
    (of a loss: 2 % more). The number is a mean over seeds. It is None where a seed
    never reaches the goal, and where nothing was evaluated twice.
    """
    of_setting = (runs[key][0] for key in runs if key[0] == setting)
    first = next((run for run in of_setting if len(run.evaluations) > 1), None)
    if first is None:
        return None
    end = metrics.mean(first.last_values(measure))
    sign = 1
    goal = 0.98 * end
    if measure != "accuracy":
        sign = -1
        goal = sign * 1.02 * end
    sent = []
    for run in group:
        reached = [
            bytes_sent
            for _, bytes_sent, value in curve(run, measure)
            if sign * value >= goal
        ]
        if not reached:
            return None
        sent.append(reached[0])
    return metrics.mean(sent)


def verdicts(plan: Plan, rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """The plan's checks: whether each holds, and a sentence on it.

    Methods that were not played are passed over. So are numbers of methods without runs
    of all seeds.
    """
    checks = plan["checks"]
    for setting, of_setting in by_setting(rows).items():
        by_method = {r["method"]: r for r in of_setting if not r["variant"]}
        expected = {what: checks.get(what, {}) for what in ("hurt", "largest")}
        final = {}
        if "tolerance" in checks:
            for name, want in plan["expected"].get(setting, {}).items():
                final[name] = (want, checks["tolerance"])
        for what, of_methods in {"final": final, **expected}.items():
            for name, (want, within) in of_methods.items():
                row = by_method.get(name)
                if row is not None and row["seeds"] == len(plan["seeds"]):
                    yield _verdict_on_number(name, what, row[what], want, within)
        for low, high in _pairs_in_order(checks):
            if low in by_method and high in by_method:
                yield _verdict_on_order(by_method[low], by_method[high])


def _pairs_in_order(checks: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of methods of which the first must end below the second."""
    pairs = []
    for high, lows in checks.get("below", {}).items():
        pairs += [(low, high) for low in lows]
    for low, highs in checks.get("above", {}).items():
        pairs += [(low, high) for high in highs]
    return pairs


def _verdict_on_number(
    name: str, what: str, got: float | None, want: float, within: float
) -> tuple[bool, str]:
    """True where a number is as expected, and a sentence on it."""
    value = "not measured" if got is None else f"{got:.1f} %"
    text = f"{what} {value}, expected {want:g}"
    if what == "final":
        text = f"{got:.5f}, expected {want:.5f}"
    holds = got is not None and abs(got - want) <= within
    return holds, f"{name}: {text} ± {within:g}"


def _verdict_on_order(low: Row, high: Row) -> tuple[bool, str]:
    """True where a method is below another, and a sentence on it.

    It must end below the other with every seed.
    """
    by_seed = zip(low["by_seed"], high["by_seed"], strict=True)
    is_below = [a < b for a, b in by_seed]
    count = f"{sum(is_below)} of {len(is_below)}"
    return all(is_below), f"{low['method']} below {high['method']} in {count} runs"


def table(plan: Plan, rows: Sequence[Row]) -> str:
    """A Markdown table per setting, with methods in the plan's order.

    It has the columns for which some method has something.
    """
    lines = about(plan)
    selects = False
    for setting, of_setting in by_setting(rows).items():
        # A run may have stopped before it was evaluated.
        some = next((r for r in of_setting if r["evaluations"]), of_setting[0])
        protocol = plan["settings"][setting].get("protocol")
        is_accuracy = some["measure"] == "accuracy"
        several = any(r["evaluations"] > 1 for r in of_setting)
        # With validation samples no round is selected on test data.
        select = several and not protocol and some["by_val"] is None
        selects |= select
        variants = dict.fromkeys(r["variant"] for r in of_setting)
        compared = verdicts_of(plan, of_setting)
        body = []
        for _, of_method in groupby(of_setting, lambda r: r["method"]):
            by_variant = {r["variant"]: r for r in of_method}
            cells = _cells(by_variant, variants, is_accuracy, select)
            if plan["baseline"]:
                verdict = compared.get(cells["method"])
                text = verdict_text(verdict, 2 if is_accuracy else 5)
                cells[f"against {plan['baseline']}"] = text
            body.append(cells)
        # The deviation over clients is NaN for one client.
        one_client = math.isnan(some["std"])
        whose = "of the target alone" if one_client else "mean over clients"
        unit = "accuracy in percent" if is_accuracy else "loss"
        head = f"{heading(of_setting[0])}; test {unit}, {whose}"
        lines += [head, "", *of_cells(body), ""]
        for r in of_setting:
            for clients in r["far"]:
                advice = "look at the data or set clip"
                lines.append(f"{r['method']}, moved far: {clients}; {advice}.\n")
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
    """The share of the clients in the largest cluster; NaN without clusters.

    Args:
        cluster: each client's cluster [n], negative for none
    """
    sizes = Counter(c for c in cluster if c >= 0)
    return max(sizes.values()) / sizes.total() if sizes else math.nan


def of_cells(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of Markdown for rows of cells by column.

    A column is shown where some row has something for it.
    """
    columns = []
    for column in rows[0]:
        texts = {row[column] for row in rows}
        if column in ("method", "") or texts - {"", "-"}:
            columns.append(column)
    lines = [columns]
    for row in rows:
        lines.append([row[column] for column in columns])
    return markdown_table(lines)


def by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each setting."""
    groups = groupby(rows, lambda row: row["setting"])
    return {setting: list(of_setting) for setting, of_setting in groups}


def heading(row: Row) -> str:
    """The facts that all rows of a setting have in common."""
    name = row["setting"].replace("*", "\\*")
    return f"**{name}**, {row['data']}, {row['rounds']} rounds, {row['seeds']} seed(s)"


def _cells(
    by_variant: Mapping[str, Row],
    variants: Iterable[str],
    is_accuracy: bool,
    select: bool,
) -> dict[str, str]:
    """One method's cells by column, from its row of each variant.

    Args:
        select: shows the best round, too
    """
    digits = 2 if is_accuracy else 5
    r = by_variant[""]
    cells = {"method": r["method"]}
    for variant in variants:
        # A method that looks ahead has one number for all variants.
        row = by_variant.get(variant, r)
        best = number(row["best"], row["best_std"], digits) if select else ""
        cells[(variant or "best") + "\\*"] = best
        final = f"{variant}, final" if variant else "final"
        cells[final] = number(row["final"], row["final_std"], digits)
    to_goal = r["to_goal"] and r["to_goal"] / 2**20
    by_size = r["by_size"] if select else None
    r = {**r, "to_goal": to_goal, "by_size": by_size}
    goal = "98" if is_accuracy else "102"
    for line in NUMBERS.splitlines():
        head, key, places = map(str.strip, line.split("|"))
        column = head.replace("GOAL", goal)
        cells[column] = number(r[key], r.get(f"{key}_std"), int(places or digits))
    notes = [*_tuned_notes(r), r["held_out"], *r["incidents"]]
    if r["stopped"] is not None:
        notes.append(f"{min(r['played'])} of {r['rounds']} rounds: {r['stopped']}")
    return cells | {"note": "; ".join(filter(None, notes))}


def _tuned_notes(row: Row) -> list[str]:
    """The options that were tuned, with the values that were chosen."""
    chosen = dict(row["options"])
    for name, value in row["training"].items():
        chosen[f"training.{name}"] = value
    notes = []
    for name in row["tuned"]:
        end = row["edges"].get(name)
        mark = f" ({end} tried)" if end else ""
        notes.append(f"{name} {chosen.get(name)}{mark}")
    return notes


def number(x: float | None, std: float | None = None, digits: int = 2) -> str:
    """A number as text, with its deviation; "-" for none or NaN."""
    if x is None or math.isnan(x):
        return "-"
    text = f"{x:.{digits}f}"
    return text if std is None else f"{text} ± {std:.{digits}f}"


# The last round, by subpopulations --------------------------------------------


def rows_of_groups(plan: Plan, runs: Runs) -> list[Facts]:
    """Rows by setting and method, as in WAFFLe's Tables 1 and 2.

    WAFFLe is that of Hao et al. 2020.

    "ours" has means over runs in percent, and "std" their deviations (ddof = 1).
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
            "std": {
                name: metrics.std_over_seeds(numbers)
                for name, numbers in values.items()
            },
            "paper": plan["reported"].get(setting, {}).get(method),
            "stopped": next((run.stopped for run in group if run.stopped), None),
        }
        rows.append(row)
    return rows


def measures(values: Tensor, group: Sequence[int] | None) -> dict[str, float]:
    """The "accuracy", a mean over clients, and its "variance" (ddof = 0).

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
    """A Markdown table per setting, with our numbers and the paper's."""
    lines = about(plan)
    for of_setting in by_setting(rows).values():
        body = []
        for r in of_setting:
            std = r["std"] if r["seeds"] > 1 else {}
            paper = r["paper"] or {}
            columns = [c for c in OF_GROUPS if c in r["ours"]]
            cells = {"method": r["method"], "parameters": f"{r['parameters']:,}"}
            cells |= {c: number(r["ours"][c], std.get(c)) for c in columns}
            cells |= {f"paper: {c}": number(paper.get(c)) for c in columns}
            body.append(cells | {"": r["stopped"] or ""})
        lines += [heading(of_setting[0]), "", *of_cells(body), ""]
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last "
        "round, and their standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"
