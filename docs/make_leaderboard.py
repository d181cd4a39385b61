"""Writes the tables of docs/leaderboard.md and the lessons of docs/choose.md.

They are made of bench/papers/outcomes.json, which holds the rows of the plans
"leaderboard" and "resnet-cifar" as far as they are played.

- `python docs/make_leaderboard.py` makes the pages, and a test compares them.
- `python docs/make_leaderboard.py FOLDER ...` first takes the rows from the folders of
  `pflcore reproduce`. A row takes the place of what the file has of its setting and
  method, so that parts may be played in folders of their own, on any machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.papers.plan import load
from bench.papers.table import number
from pflcore.lab.results.table import markdown_table

DOCS = Path(__file__).parent
OUTCOMES = DOCS.parent / "bench" / "papers" / "outcomes.json"
PLANS = ("leaderboard", "resnet-cifar")
KEYS = (
    "setting",
    "method",
    "seeds",
    "rounds",
    "final",
    "final_std",
    "by_val",
    "by_val_std",
    "worst_decile",
    "hurt",
    "models_a_round",
    "mib",
    "training_seconds",
    "stopped",
)
HEAD = (
    "method",
    "last round",
    "round chosen on validation",
    "worst decile",
    "% hurt",
    "models a round",
    "MiB a client",
    "seconds a round",
    "chosen options",
    "seeds",
)
Facts = Mapping[str, Any]
Rows = Sequence[Facts]


def outcome(row: Facts) -> dict[str, Any]:
    """The facts of a row of result.json that the pages need, with few digits."""
    kept: dict[str, Any] = {}
    for key in KEYS:
        value = row[key]
        kept[key] = round(value, 4) if isinstance(value, float) else value
    options = {**row["options"]}
    options |= {f"training.{name}": value for name, value in row["training"].items()}
    kept["chosen"] = {name: options[name] for name in row["tuned"]}
    return kept


def take(folder: Path, outcomes: dict[str, Any]) -> None:
    """Puts the results of a folder in the place of those of its plan and settings.

    Raises ValueError for the result of another plan.
    """
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    abouts = {load(name)["about"]: name for name in PLANS}
    if result["plan"] not in abouts:
        known = ", ".join(PLANS)
        raise ValueError(
            f"folder: expected a result of {known}, got {result['plan']!r} in {folder}."
        )
    of_plan = outcomes.setdefault(abouts[result["plan"]], {})
    played = {"date": result["date"], "machine": result["machine"]}
    for row in result["rows"]:
        if not row["variant"]:
            of_plan.setdefault(row["setting"], {})[row["method"]] = played | outcome(
                row
            )


def tables(plan: Facts, played: Facts) -> str:
    """A table for each setting of a plan; a row that was not played is empty."""
    lines = []
    for setting in plan["settings"]:
        rows = played.get(setting, {})
        body = [_cells(method, rows.get(method)) for method in plan["methods"]]
        runs = sum(row["seeds"] for row in rows.values())
        planned = len(plan["methods"]) * len(plan["seeds"])
        columns = [i for i in range(len(HEAD)) if i == 0 or any(row[i] for row in body)]
        lines += [f"**{setting}**: {runs} of {planned} runs are played.", ""]
        if not rows:
            continue
        shown = [[row[i] for i in columns] for row in [HEAD, *body]]
        where = {f"{row['date']}, {row['machine']}": None for row in rows.values()}
        lines += [*markdown_table(shown), "", f"{'; '.join(where)}.", ""]
    return "\n".join(lines)


def _cells(method: str, row: Facts | None) -> list[str]:
    """The cells of a method, empty where it was not played."""
    if row is None:
        return [method, *[""] * (len(HEAD) - 1)]
    if row["stopped"]:
        return [method, row["stopped"], *[""] * (len(HEAD) - 2)]
    chosen = ", ".join(f"{name} {value}" for name, value in row["chosen"].items())
    by_val = number(row["by_val"], row["by_val_std"])
    return [
        method,
        number(row["final"], row["final_std"]),
        "" if by_val == "-" else by_val,
        number(row["worst_decile"]),
        number(row["hurt"], digits=1),
        number(row["models_a_round"]),
        number(row["mib"], digits=1),
        number(row["training_seconds"]),
        chosen.replace("training.", ""),
        str(row["seeds"]),
    ]


def lessons(plan: Facts, played: Facts) -> str:
    """What the numbers say of each setting, beyond their deviations.

    Two methods differ where their means differ by more than the sum of their
    deviations over the seeds. Of a method with a single seed nothing is said.
    """
    lines = []
    for setting in plan["settings"]:
        rows = []
        for method in plan["methods"]:
            row = played.get(setting, {}).get(method)
            is_played = row is not None and row["seeds"] > 1 and not row["stopped"]
            if is_played and row["by_val"] is not None:
                rows.append(row)
        lines += _lesson(setting, rows)
    if not lines:
        return "No setting is played with two seeds yet, so nothing is said here."
    return "\n".join(lines)


def _lesson(setting: str, rows: Rows) -> Iterator[str]:
    """One line on a setting, where Local and another method are played."""
    local = next((row for row in rows if row["method"] == "Local"), None)
    others = [row for row in rows if row["hurt"] is not None]
    if local is None or not others:
        return
    first = max(rows, key=lambda row: row["by_val"])
    near = [row for row in rows if row is not first and not _differ(row, first)]
    ahead = [row for row in rows if _differ(row, local) and _is_above(row, local)]
    behind = [row for row in rows if _differ(row, local) and _is_above(local, row)]
    fewest = min(row["hurt"] for row in others)
    spared = [row for row in others if row["hurt"] == fewest]
    value = number(first["by_val"], first["by_val_std"])
    yield (
        f"- **{setting}** ({len(rows)} of the methods): {first['method']} is first "
        f"with {value} %; no different from it: {_names(near)}. Ahead of Local: "
        f"{_names(ahead)}. Behind Local: {_names(behind)}. Fewest clients are hurt by "
        f"{_names(spared)}: {fewest:.1f} %."
    )


def _differ(a: Facts, b: Facts) -> bool:
    """True where the means differ by more than the sum of the deviations."""
    gap = abs(a["by_val"] - b["by_val"])
    return bool(gap > a["by_val_std"] + b["by_val_std"])


def _is_above(a: Facts, b: Facts) -> bool:
    """True where the first mean is the larger one."""
    return bool(a["by_val"] > b["by_val"])


def _names(rows: Rows) -> str:
    """The methods' names, or "none"."""
    return ", ".join(row["method"] for row in rows) or "none"


def pages(outcomes: Facts) -> dict[Path, dict[str, str]]:
    """The texts between the markers of each page, by the marker's name."""
    made: dict[str, str] = {}
    for name in PLANS:
        made[name] = tables(load(name), outcomes.get(name, {}))
    board = load("leaderboard")
    said = lessons(board, outcomes.get("leaderboard", {}))
    return {DOCS / "leaderboard.md": made, DOCS / "choose.md": {"lessons": said}}


def with_texts(page: str, texts: Mapping[str, str]) -> str:
    """The page with new texts between its markers."""
    for name, text in texts.items():
        begin = f"<!-- {name} (made by docs/make_leaderboard.py) -->\n"
        end = f"\n<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        assert re.search(pattern, page, re.DOTALL), f"no markers of {name}"
        new = f"{begin}{text}{end}"
        page = re.sub(pattern, lambda _, new=new: new, page, flags=re.DOTALL)
    return page


def main(folders: Sequence[str]) -> None:
    """Takes the folders' results, and writes the pages."""
    outcomes = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    for folder in folders:
        take(Path(folder), outcomes)
    if folders:
        OUTCOMES.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    for path, texts in pages(outcomes).items():
        page = with_texts(path.read_text(encoding="utf-8"), texts)
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
