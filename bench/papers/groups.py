"""Tables of the last round, with the subpopulations that a partition makes: WAFFLe's Tables 1 and 2
(Hao et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.papers.table import Runs
from pflcore import metrics
from pflcore.results.record import plain

COLUMNS = ("accuracy", "majority", "minority", "gap", "variance")


def rows_of(plan: Mapping[str, Any], runs: Runs) -> list[dict[str, Any]]:
    """One row per setting and method: means over runs in percent, "std" over runs (ddof = 0) beside
    them."""
    out = []
    for (setting, method, variant), mine in runs.items():
        head = mine[0].header
        seen = [
            _measures(
                [100 * v for v in metrics.vector(r.last("accuracy")).tolist()], head.get("group")
            )
            for r in mine
        ]
        out.append(
            {
                "method": method,
                "data": head["data"],
                "setting": setting,
                "variant": variant,
                "seeds": len(mine),
                "rounds": head["rounds"],
                "options": head["options"],
                "ours": {k: metrics.mean([s[k] for s in seen]) for k in seen[0]},
                "std": {k: metrics.std([s[k] for s in seen]) for k in seen[0]},
                "paper": plan["reported"].get(setting, {}).get(method),
                "parameters": head["parameters"],
                "stopped": next((r.stopped for r in mine if r.stopped), None),
            }
        )
    return [dict(plain(r)) for r in out]


def _measures(percent: list[float], group: Sequence[int] | None) -> dict[str, float]:
    if group is None:
        return {"accuracy": metrics.mean(percent), "variance": metrics.std(percent) ** 2}
    return {"accuracy": metrics.mean(percent), **metrics.subpopulations(percent, group)}


def table(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a table per setting: ours, and the paper's number where it gives one."""
    lines = [plan["about"], ""] if plan["about"] else []
    for setting in dict.fromkeys(r["setting"] for r in rows):
        mine = [r for r in rows if r["setting"] == setting]
        columns = [c for c in COLUMNS if c in mine[0]["ours"]]
        told = [c for c in columns if any(c in (r["paper"] or {}) for r in mine)]
        head = ["parameters", *columns, *(f"paper: {c}" for c in told)]
        lines += [
            f"**{setting}**, {mine[0]['data']}, {mine[0]['rounds']} rounds, {mine[0]['seeds']} "
            "seed(s)",
            "",
        ]
        lines += ["| method | " + " | ".join(head) + " |", "|:---|" + "---:|" * len(head)]
        for r in mine:
            ours = [_number(r["ours"][c], r["std"][c] if r["seeds"] > 1 else None) for c in columns]
            paper = [_number((r["paper"] or {}).get(c)) for c in told]
            cells = [r["method"], f"{r['parameters']:,}", *ours, *paper]
            lines.append(
                "| " + " | ".join(cells) + f" |{' ' + r['stopped'] if r['stopped'] else ''}"
            )
        lines.append("")
    lines.append(
        "Means over clients in percent (variance: percent squared) after the last round, and their "
        "standard deviation over the seeds."
    )
    return "\n".join(lines) + "\n"


def _number(x: float | None, std: float | None = None) -> str:
    return "-" if x is None else f"{x:.2f}" + (f" ± {std:.2f}" if std is not None else "")
