"""Tables of the last round, with the subpopulations that a partition makes: WAFFLe's Tables 1 and 2
(Hao et al. 2020)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.papers.plan import Plan
from bench.papers.table import Row, Runs, about, by_setting, heading, number, of_cells
from bench.problem import Facts
from pflcore import metrics

COLUMNS = ("accuracy", "majority", "minority", "gap", "variance")


def rows_of(plan: Plan, runs: Runs) -> list[Facts]:
    """One row per setting and method: means over runs in percent, "std" over runs (ddof = 0) beside
    them."""
    out = []
    for (setting, method, variant), mine in runs.items():
        head = mine[0].header
        seen = [measures(100 * r.last("accuracy"), head.get("group")) for r in mine]
        ours, std = (
            {k: of([s[k] for s in seen]) for k in seen[0]} for of in (metrics.mean, metrics.std)
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
    """ "accuracy", the mean over clients, and "variance" (ddof = 0); with each client's `group` [n]
    also "majority" and "minority", the means over groups 0 and 1, and "gap".

    For accuracies in percent the gap is in points and the variance in percent squared (Hao et al.
    2020, Table 2).
    """
    parts = {}
    if group is not None:
        major, minor = (metrics.mean(values[torch.tensor(group) == g]) for g in (0, 1))
        parts = {"majority": major, "minority": minor, "gap": major - minor}
    return {"accuracy": metrics.mean(values), **parts, "variance": metrics.std(values) ** 2}


def table(plan: Plan, rows: Sequence[Row]) -> str:
    """Markdown, a table per setting: ours, and the paper's number where it gives one."""
    lines = about(plan)
    for mine in by_setting(rows).values():
        body = []
        for r in mine:
            std, paper = r["std"] if r["seeds"] > 1 else {}, r["paper"] or {}
            columns = [c for c in COLUMNS if c in r["ours"]]
            cells = {"method": r["method"], "parameters": f"{r['parameters']:,}"}
            cells |= {c: number(r["ours"][c], std.get(c)) for c in columns}
            cells |= {f"paper: {c}": number(paper.get(c)) for c in columns}
            body.append(cells | {"": r["stopped"] or ""})
        lines += [heading(mine[0]), "", *of_cells(body), ""]
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last round, and their "
        "standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"
