"""Writes the tables of docs/leaderboard.md and the lessons of docs/choose.md.

They are made of bench/papers/outcomes.json, which holds the rows of the plans
"leaderboard" and "resnet-cifar" as far as they are played.

- `python docs/make_leaderboard.py` makes the pages, and a test compares them.
- `python docs/make_leaderboard.py FOLDER ...` first takes the rows from the folders of
  `pflcore reproduce`. A row takes the place of what the file has of its setting and
  method, so that parts may be played in folders of their own, on any machine.

A row is shown where it is of the plan as it stands: its "cell" is a digest of what the
plan says of the method in the setting. Other rows stay in the file until they are
played anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.papers.plan import load, tasks
from bench.papers.table import number, of_cells, verdict_text, verdicts_of
from pflcore.lab.results._verdicts import Verdict
from pflcore.lab.results.table import escape_stars

DOCS = Path(__file__).parent
OUTCOMES = DOCS.parent / "bench" / "papers" / "outcomes.json"
PLANS = ("leaderboard", "resnet-cifar")
KEYS = (
    "setting",
    "method",
    "variant",
    "cell",
    "measure",
    "seeds",
    "seed_numbers",
    "by_seed",
    "rounds",
    "final",
    "final_std",
    "after_step",
    "after_step_std",
    "worst_decile",
    "hurt",
    "models_a_round",
    "mib",
    "training_seconds",
    "edges",
    "stopped",
)
DIGITS = 8  # behind the point, of the numbers that are kept
Facts = Mapping[str, Any]
Rows = Sequence[Facts]


def outcome(row: Facts) -> dict[str, Any]:
    """The facts of a row of result.json that the pages need."""
    kept: dict[str, Any] = {}
    for key in KEYS:
        kept[key] = _rounded(row[key])
    options = {**row["options"]}
    options |= {f"training.{name}": value for name, value in row["training"].items()}
    kept["chosen"] = {name: options[name] for name in row["tuned"]}
    return kept


def _rounded(value: Any) -> Any:
    """The value with few digits, if it has numbers."""
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def take(folder: Path, outcomes: dict[str, Any]) -> None:
    """Puts the rows of a folder in the place of those that are there.

    A row stays where it has more seeds than the one in the folder, and is of the plan
    as it stands. Raises ValueError for the result of another plan.
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
        if row["variant"]:
            continue
        rows = of_plan.setdefault(row["setting"], {})
        there = rows.get(row["method"])
        is_same = there is not None and there["cell"] == row["cell"]
        if is_same and there["seeds"] > row["seeds"]:
            continue
        rows[row["method"]] = played | outcome(row)


def cells_of(plan: Facts) -> dict[str, dict[str, str]]:
    """The digests of a plan by setting and method, without what it leaves out."""
    cells: dict[str, dict[str, str]] = {}
    for task in tasks(plan, seeds=1):
        cells.setdefault(task.setting, {})[task.method] = task.cell
    return cells


def rows_of_plan(plan: Facts, played: Facts) -> dict[str, dict[str, Facts]]:
    """The rows by setting and method that are of the plan as it stands.

    Each method of the plan has an entry, which is {} where it was not played.
    """
    rows: dict[str, dict[str, Facts]] = {}
    for setting, cells in cells_of(plan).items():
        rows[setting] = {}
        for method, cell in cells.items():
            row = played.get(setting, {}).get(method, {})
            rows[setting][method] = row if row.get("cell") == cell else {}
    return rows


def tables(plan: Facts, played: Facts) -> str:
    """A table for each setting of a plan; a row that was not played is empty."""
    lines = []
    for setting, of_setting in rows_of_plan(plan, played).items():
        rows = [row for row in of_setting.values() if row]
        compared = comparisons(plan, setting, of_setting)
        body = []
        for method, row in of_setting.items():
            work = work_of(plan, setting, method)
            body.append(_cells(method, work, row, compared))
        runs = sum(row["seeds"] for row in rows)
        planned = len(of_setting) * len(plan["seeds"])
        lines += [f"**{setting}**: {runs} of {planned} runs are played.", ""]
        left_out = plan["settings"][setting].get("leaves_out", {})
        for reason in dict.fromkeys(left_out.values()):
            names = [name for name, other in left_out.items() if other == reason]
            lines += [f"Left out: {', '.join(names)}; {reason}.", ""]
        if not rows:
            continue
        lines += [*of_cells(body), ""]
        where = {f"{row['date']}, {row['machine']}": None for row in rows}
        lines += [f"{'; '.join(where)}.", ""]
    return "\n".join(lines)


def work_of(plan: Facts, setting: str, method: str) -> float:
    """The operations of a client's round, times FedAvg's; 0 where nobody counted."""
    of_setting = plan["settings"][setting].get("work", {})
    work: float = of_setting.get(method, plan["methods"][method].get("work", 0))
    return work


def comparisons(
    plan: Facts, setting: str, of_setting: Mapping[str, Facts]
) -> dict[str, dict[str, Verdict]]:
    """The verdicts on the methods of a setting, by baseline and method.

    The first baseline is compared with all methods, and the one of equal work with
    those whose work is 2 or more.

    Args:
        of_setting: The rows of all planned methods, {} where one was not played.
    """
    compared = {}
    costly = [m for m in of_setting if work_of(plan, setting, m) >= 2]
    methods_of = {"baseline": [*of_setting], "equal_work_baseline": costly}
    for key, methods in methods_of.items():
        if plan[key]:
            rows = [of_setting[method] for method in methods if of_setting[method]]
            as_planned = {**plan, "baseline": plan[key]}
            compared[plan[key]] = verdicts_of(as_planned, rows, len(methods) - 1)
    return compared


def _cells(
    method: str, work: float, row: Facts, compared: Mapping[str, Mapping[str, Verdict]]
) -> dict[str, str]:
    """The cells of a method by column, empty where it was not played.

    Args:
        compared: The verdicts by baseline and method.
    """
    cells = {"method": method}
    is_loss = row.get("measure", "accuracy") != "accuracy"
    digits = 5 if is_loss else 2

    def value(key: str, places: int = 2) -> str:
        text = number(row.get(key), row.get(f"{key}_std"), places)
        return "" if text == "-" else text

    cells["last round"] = value("final", digits)
    if row.get("stopped") is not None:
        lost = row["by_seed"].count(None)
        cells["last round"] = f"diverged with {lost} of {row['seeds']} seeds"
    for baseline, verdicts in compared.items():
        text = verdict_text(verdicts.get(method), digits)
        cells[f"against {baseline}"] = text
    cells["after a local step"] = value("after_step", digits)
    cells["worst decile"] = value("worst_decile", digits)
    cells["% hurt"] = value("hurt", 1)
    cells["work"] = f"{work:g}" if work and row else ""
    cells["models a round"] = value("models_a_round")
    cells["MiB a client"] = value("mib", 1)
    cells["seconds a round"] = value("training_seconds")
    cells["chosen options"] = _chosen(row)
    cells["seeds"] = str(row.get("seeds", ""))
    return cells


def _chosen(row: Facts) -> str:
    """The chosen options, of which a star marks those at an end of the grid."""
    texts = []
    for name, value in row.get("chosen", {}).items():
        star = "*" if name in row["edges"] else ""
        texts.append(f"{name} {value}{star}")
    return escape_stars(", ".join(texts).replace("training.", ""))


def lessons(plan: Facts, played: Facts) -> str:
    """The verdicts of each setting, as far as methods have runs of all seeds."""
    lines = []
    for setting, of_setting in rows_of_plan(plan, played).items():
        verdicts = comparisons(plan, setting, of_setting)[plan["baseline"]]
        if verdicts:
            lines.append(_lesson(setting, plan["baseline"], verdicts))
    if not lines:
        return "No setting is played with all seeds yet, so nothing is said here."
    return "\n".join(lines)


def _lesson(setting: str, baseline: str, verdicts: Mapping[str, Verdict]) -> str:
    """One line on a setting."""
    names: dict[str, list[str]] = {"better": [], "worse": [], "no difference shown": []}
    for method, verdict in verdicts.items():
        names[verdict.word].append(method)
    line = f"- **{setting}**, {len(verdicts)} methods against {baseline}."
    for word, some in names.items():
        # A name may have a comma: "Local, 2 epochs".
        line += f" {word.capitalize()}: {'; '.join(some) or 'none'}."
    return line


def grids(plan: Facts) -> str:
    """A table of what is searched for each method, and where its values are from."""
    body = []
    for method, facts in plan["methods"].items():
        texts = []
        for name, values in facts["grid"].items():
            key = name.removeprefix("training.")
            texts.append(f"{key}: {', '.join(map(str, values))}")
        cells = {"method": method, "algorithm": facts["algorithm"]}
        cells["searched"] = escape_stars("; ".join(texts))
        cells["its own option"] = facts["source"]
        body.append(cells)
    return "\n".join(of_cells(body))


def pages(outcomes: Facts) -> dict[Path, dict[str, str]]:
    """The texts between the markers of each page, by the marker's name."""
    made: dict[str, str] = {}
    for name in PLANS:
        made[name] = tables(load(name), outcomes.get(name, {}))
    board = load("leaderboard")
    made["grids"] = grids(board)
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
