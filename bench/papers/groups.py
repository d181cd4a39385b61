"""Tables of the last round, with the subpopulations that a partition makes: WAFFLe's Tables 1 and 2
(Hao et al. 2020)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bench.papers.plan import Plan
from bench.papers.table import Row, Runs, about, by_setting, heading, number, subpopulations
from pflcore import metrics
from pflcore.results.record import plain
from pflcore.results.table import markdown

COLUMNS = ("accuracy", "majority", "minority", "gap", "variance")


def rows_of(plan: Plan, runs: Runs) -> list[dict[str, Any]]:
    """One row per setting and method: means over runs in percent, "std" over runs (ddof = 0) beside
    them."""
    out = []
    for (setting, method, variant), mine in runs.items():
        head = mine[0].header
        seen = [_measures(100 * r.last("accuracy"), head.get("group")) for r in mine]
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
        out.append(plain(row))
    return out


def _measures(percent: Tensor, group: Sequence[int] | None) -> dict[str, float]:
    parts = {"variance": metrics.std(percent) ** 2}
    if group is not None:
        parts = subpopulations(percent, group)
    return {"accuracy": metrics.mean(percent), **parts}


def table(plan: Plan, rows: Sequence[Row]) -> str:
    """Markdown, a table per setting: ours, and the paper's number where it gives one."""
    lines = about(plan)
    for mine in by_setting(rows).values():
        columns = [c for c in COLUMNS if c in mine[0]["ours"]]
        told = [c for c in columns if any(c in (r["paper"] or {}) for r in mine)]
        body = [["method", "parameters", *columns, *(f"paper: {c}" for c in told), ""]]
        for r in mine:
            std, paper = r["std"] if r["seeds"] > 1 else {}, r["paper"] or {}
            cells = [number(r["ours"][c], std.get(c)) for c in columns]
            cells += [number(paper.get(c)) for c in told]
            body.append([r["method"], f"{r['parameters']:,}", *cells, r["stopped"] or ""])
        lines += [heading(mine[0]), "", *markdown(body), ""]
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last round, and their "
        "standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"
