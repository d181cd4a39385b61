"""Tables of the last round, with the subpopulations that a partition makes: WAFFLe's Tables 1 and 2
(Hao et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bench.papers import measures
from bench.papers.table import Runs, heading, number
from bench.table import markdown
from pflcore import metrics
from pflcore.results.record import plain

COLUMNS = ("accuracy", "majority", "minority", "gap", "variance")


def rows_of(plan: Mapping[str, Any], runs: Runs) -> list[dict[str, Any]]:
    """One row per setting and method: means over runs in percent, "std" over runs (ddof = 0) beside
    them."""
    out = []
    for (setting, method, variant), mine in runs.items():
        head = mine[0].header
        seen = [_measures(100 * r.last("accuracy"), head.get("group")) for r in mine]
        row = {
            "method": method,
            "setting": setting,
            "variant": variant,
            "seeds": len(mine),
            **{k: head[k] for k in ("data", "rounds", "options", "parameters")},
            "ours": {k: metrics.mean([s[k] for s in seen]) for k in seen[0]},
            "std": {k: metrics.std([s[k] for s in seen]) for k in seen[0]},
            "paper": plan["reported"].get(setting, {}).get(method),
            "stopped": next((r.stopped for r in mine if r.stopped), None),
        }
        out.append(dict(plain(row)))
    return out


def _measures(percent: Tensor, group: Sequence[int] | None) -> dict[str, float]:
    if group is None:
        return {"accuracy": metrics.mean(percent), "variance": metrics.std(percent) ** 2}
    return {"accuracy": metrics.mean(percent), **measures.subpopulations(percent, group)}


def table(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a table per setting: ours, and the paper's number where it gives one."""
    lines = [plan["about"], ""] if plan["about"] else []
    for setting in dict.fromkeys(r["setting"] for r in rows):
        mine = [r for r in rows if r["setting"] == setting]
        columns = [c for c in COLUMNS if c in mine[0]["ours"]]
        told = [c for c in columns if any(c in (r["paper"] or {}) for r in mine)]
        body = [" | ".join(["method", "parameters", *columns, *(f"paper: {c}" for c in told), ""])]
        for r in mine:
            std = r["std"] if r["seeds"] > 1 else {}
            cells = [number(r["ours"][c], std.get(c)) for c in columns]
            cells += [number((r["paper"] or {}).get(c)) for c in told]
            numbers = " | ".join(cells)
            body.append(f"{r['method']} | {r['parameters']:,} | {numbers} | {r['stopped'] or ''}")
        lines += [heading(mine[0]), "", *markdown(body), ""]
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last round, and their "
        "standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"
