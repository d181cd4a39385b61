"""`pflcore reproduce NAME`: the experiments behind a table of a paper.

A plan is a small JSON file in pflcore/reproduce/plans (or a path): see `pflcore.reproduce.plan`.
Every run (setting, method, seed) writes a record of its own; a run whose record is whole is not played again, so an interrupted
reproduction goes on where it stopped. `result.json` holds one row per method and setting, `table.md` shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pflcore import metrics
from pflcore.data.roles import held_out
from pflcore.experiment import Options, algorithm, federation, model
from pflcore.local.net import Net
from pflcore.models import model_for
from pflcore.reproduce import costs
from pflcore.reproduce.plan import Task, load, plans, tasks
from pflcore.results.progress import Progress
from pflcore.results.record import Record, Run, plain, read


def whole(path: Path, task: Task) -> Run | None:
    """The record of this very run, if it is whole (all rounds, or stopped because it diverged)."""
    if not path.is_file() or not path.stat().st_size:
        return None
    runs = read(path)
    run = runs[0] if runs else Run()
    if run.header and run.header.get("digest") != task.digest:
        raise ValueError(f"out: {path} holds a run with other options; name another folder, or take that file away.")
    done = len(run.rounds) == task.job.options.rounds or (run.stopped or "").startswith("The run diverged")
    return run if done else None


def play(task: Task, folder: Path, progress: Progress) -> Run:
    """The run's record, played now unless it is there already."""
    path = folder / task.path
    run = whole(path, task)
    progress.name(f"{task.setting}, {task.method}{f' ({task.variant})' if task.variant else ''}, seed {task.job.options.seed}")
    if run is not None:
        progress.skip(task.job.options.rounds)
        return run
    job = replace(task.job, options=replace(task.job.options, eval_split=task.split))
    data = federation(job.options, task.cut)
    if task.split == "val":
        data = held_out(data, job.options.seed)
    simulation = job.simulation(data, model(job.options, data, task.shape))
    with Record(path, overwrite=True) as record:
        extra = {
            "digest": task.digest,
            "method": task.method,
            "setting": task.setting,
            "variant": task.variant,
            "partition_options": dict(task.cut),
        }
        record.write({"header": job.header(simulation) | extra})

        def on_round(_: int, line: dict[str, Any]) -> None:
            record.write(line)
            progress.step(line)

        history = simulation.run(on_round)
        if history.stopped:
            record.write({"stopped": history.stopped})
            progress.skip(simulation.rounds - len(history.rounds))
            progress.say(f"{task.setting}, {task.method}: {history.stopped}")
            if history.stopped.startswith("Interrupted"):
                raise KeyboardInterrupt
            if history.failed:  # not the method's doing
                raise MemoryError(history.stopped)
    return read(path)[0]


def selected(found: Sequence[tuple[Task, Run]]) -> list[Task]:
    """A grid's best point by the last validation value (mean over clients, then seeds), as runs to test, one per seed.

    A point that diverged is not chosen; the first of equals is.
    """
    scores: dict[str, list[float]] = {}
    for task, run in found:
        values, sign = run.last(), 1 if run.measure == "accuracy" else -1
        fine = not run.stopped and bool(values[~values.isnan()].isfinite().all())
        scores.setdefault(repr(task.point), []).append(sign * metrics.mean(values) if fine else -math.inf)
    best = max(scores, key=lambda point: metrics.mean(scores[point]))
    if metrics.mean(scores[best]) == -math.inf:
        raise ValueError(f"grid: every point diverged for {found[0][0].method!r}; give it others.")
    return [replace(task, split="test") for task, _ in found if repr(task.point) == best]


def row(plan: Mapping[str, Any], data: str, runs: Sequence[Run]) -> dict[str, Any]:
    """One method in one setting: `ours` is the best round's mean over clients in percent, selected on test data as in the papers."""
    head, scale = runs[0].header, 100.0 if runs[0].measure == "accuracy" else 1.0
    best = [_over_rounds(r, False) for r in runs]
    paper = plan["reported"].get(head["setting"], {}).get(head["method"])
    sent = [r["bytes_down"] + r["bytes_up"] for r in runs[0].rounds[-1:]]
    made: dict[str, Any] = plain(
        {
            "method": head["method"],
            "data": data,
            "setting": head["setting"],
            "ours": scale * metrics.mean([b for b, _ in best]),
            "std": scale * metrics.std([b for b, _ in best]) if len(runs) > 1 else None,
            "paper": paper,
            "seeds": len(runs),
            "final": scale * metrics.mean([f for _, f in best]),
            "weighted": scale * metrics.mean([_over_rounds(r, True)[0] for r in runs]),
            "weighted_final": scale * metrics.mean([_over_rounds(r, True)[1] for r in runs]),
            "variant": head["variant"],
            "options": head["options"],
            "rounds": len(runs[0].rounds),
            "epochs": head["training"]["epochs"],
            "models_sent": sum(sent) / max(1, len(runs[0].rounds[-1]["cohort"])) / (4 * head["parameters"]) if runs[0].rounds else None,
            "seconds_per_round": metrics.mean([r["seconds"] for run in runs for r in run.rounds]),
            "stopped": next((r.stopped for r in runs if r.stopped), None),
        }
    )
    return made


def _over_rounds(run: Run, weighted: bool) -> tuple[float, float]:
    """The best and the last of the means over clients, uniform or by their test samples."""
    values = run.values()[1]
    size = run.evaluations[-1]["eval"]["size"] if run.evaluations else []
    means = [metrics.weighted_mean(v, size) if weighted else metrics.mean(v) for v in values]
    return metrics.best(means, run.measure == "accuracy").value, metrics.final(means)


def table(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table per setting, methods in the plan's order, "best (final)" beside the paper's number."""
    lines = [f"{plan['about']}", ""] if plan["about"] else []
    for setting in dict.fromkeys(r["setting"] for r in rows):
        mine = [r for r in rows if r["setting"] == setting]
        variants = list(dict.fromkeys(r["variant"] for r in mine))
        columns = [c for v in variants for c in ((v or "best") + "\\*", "final")] + ["by size", "paper", "models sent", "seconds a round"]
        lines += [f"**{setting}**, {mine[0]['data']}, {mine[0]['rounds']} rounds, {mine[0]['seeds']} seed(s)", ""]
        lines += ["| method | " + " | ".join(columns) + " |", "|:---|" + "---:|" * len(columns)]
        for method in dict.fromkeys(r["method"] for r in mine):
            of = {r["variant"]: r for r in mine if r["method"] == method}
            cells = [method]
            for v in variants:
                r = of.get(v) or of[""]  # a method that looks ahead has one number for both
                cells += [_number(r["ours"], r["std"]), _number(r["final"])]
            r = of.get("") or next(iter(of.values()))
            cells += [_number(r["weighted"]), _number(r["paper"]), _number(r["models_sent"]), _number(r["seconds_per_round"])]
            lines.append("| " + " | ".join(cells) + (f" | {r['stopped']}" if r["stopped"] else "") + " |")
        lines.append("")
    lines.append(
        '\\* the best round\'s mean over clients, selected on test data as in the paper; "by size" weighs clients by their test samples.'
    )
    return "\n".join(lines) + "\n"


def _number(x: float | None, std: float | None = None) -> str:
    return "-" if x is None else f"{x:.2f}" + (f" ± {std:.2f}" if std is not None else "")


def reproduce(plan: Mapping[str, Any], folder: Path, todo: Sequence[Task], quiet: bool = False) -> list[dict[str, Any]]:
    """Plays what is missing and writes result.json and table.md after every method, so that there is a result at any time."""
    done: dict[tuple[str, str, str], list[Run]] = {}
    searched: dict[tuple[str, str, str], list[tuple[Task, Run]]] = {}
    with Progress(sum(t.job.options.rounds for t in todo), quiet) as progress:
        progress.say(f"Results: {folder}")
        for i, task in enumerate(todo):
            run, key = play(task, folder, progress), (task.setting, task.method, task.variant)
            if task.split == "val":
                searched.setdefault(key, []).append((task, run))
                last = i + 1 == len(todo) or (todo[i + 1].setting, todo[i + 1].method, todo[i + 1].variant) != key
                if not last:
                    continue
                done[key] = [play(t, folder, progress) for t in selected(searched[key])]
            else:
                done.setdefault(key, []).append(run)
            rows = [row(plan, task.job.options.data, runs) for runs in done.values()]
            write(folder, plan, rows, table(plan, rows))
    return rows


def draw(folder: Path, todo: Sequence[Task], rows: Sequence[Mapping[str, Any]], option: str | None) -> None:
    """Curves, heat maps and nearest neighbours of each setting (first seed), and accuracy against the plan's option."""
    from pflcore.results import mixing as figures
    from pflcore.results import pictures

    first = min((t.job.options.seed for t in todo), default=0)
    for setting in dict.fromkeys(t.setting for t in todo):
        mine = [t for t in todo if t.setting == setting and not t.variant and t.split == "test" and t.job.options.seed == first]
        runs = {t.method: read(folder / t.path)[0] for t in mine}
        stem = re.sub(r"[^\w.-]", "_", setting)
        if runs:
            named = [replace(r, header=r.header | {"algorithm": name, "options": {}}) for name, r in runs.items()]
            pictures.curves(named, folder / f"{stem}-curves.png")
            figures.heat_maps(runs, folder / f"{stem}-weights.png")
            figures.neighbours(runs, folder / f"{stem}-neighbours.png")
    if option:
        figures.against(rows, option, folder / f"against-{option}.png")


def count(plan: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What a round costs a client, for a plan with "costs": {model, shape, classes, n, samples}. Rows in MiB and in operations."""

    c = dict(plan["costs"])
    name, shape, classes = c.pop("model"), c.pop("shape"), c.pop("classes")
    net = Net(lambda: model_for(name, shape, classes))
    found = {m: costs.cost(algorithm(o["algorithm"], o.get("options")), net, shape, classes, **c) for m, o in plan["methods"].items()}
    rows = []
    for setting, value in (("MiB per client and round", lambda x: x.bytes / costs.MIB), ("FLOPs per client and round", lambda x: x.client)):
        reported = plan["reported"].get(setting, {})
        what = {"data": f"{name}, {net.size:,} parameters", "setting": setting, "std": None, "seeds": 1}
        rows += [{"method": m, "ours": value(x), "paper": reported.get(m)} | what for m, x in found.items()]
    write(folder, plan, rows, f"{plan['about']}\n\n{costs.table(found, c.get('samples', 2500))}")
    return rows


def write(folder: Path, plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"plan": plan["about"], "paper": plan["paper"], "date": time.strftime("%Y-%m-%d"), "machine": machine(), "rows": rows}
    (folder / "result.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(text, encoding="utf-8")


def machine() -> str:
    """Processor, cores and torch, in words."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("pflcore reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=f"a plan: {', '.join(plans())}, or the path of a .json file")
    parser.add_argument("--data", help="another data set than the plan's")
    parser.add_argument("--rounds", type=int, help="rounds of each run")
    parser.add_argument("--seeds", type=int, help="runs of each method")
    parser.add_argument("--eval-every", type=int, help="rounds between evaluations of all clients")
    parser.add_argument("--methods", nargs="+", help="these only, by the plan's names")
    parser.add_argument("--settings", nargs="+", help="these only, by the plan's names")
    parser.add_argument("--equal-compute", action="store_true", help="beside it, methods that do not look ahead with as much local work")
    parser.add_argument("--out", type=Path, help="folder of the results; default: runs/reproduce/NAME-DATA")
    parser.add_argument("--workers", type=int, help="threads; never changes a result")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    got = parser.parse_args(argv)
    plan = load(got.name)
    if "protocol" in plan:
        return _under_protocol(plan, got)
    for what in ("methods", "settings"):
        unknown = set(getattr(got, what) or ()) - set(plan[what])
        if unknown:
            raise ValueError(f"{what}: expected some of {', '.join(plan[what])}, got {', '.join(sorted(unknown))}.")
    if "costs" in plan:
        folder = got.out or Path("runs") / "reproduce" / Path(got.name).stem
        count(plan | {"methods": {m: plan["methods"][m] for m in got.methods or plan["methods"]}}, folder)
        print((folder / "table.md").read_text(encoding="utf-8"))
        return 0
    given = {k: getattr(got, k) for k in ("data", "rounds", "eval_every", "workers") if getattr(got, k) is not None}
    planned = dict(plan["options"])
    seeds = got.seeds or planned.pop("seeds", 1)
    planned.pop("seeds", None)
    options = Options(**{"data": plan["data"], **planned, **given})
    folder = got.out or Path("runs") / "reproduce" / f"{Path(got.name).stem}-{options.data}"
    todo = list(
        tasks(plan, options, seeds, got.methods or list(plan["methods"]), got.settings or list(plan["settings"]), got.equal_compute)
    )
    rows = reproduce(plan, folder, todo, got.quiet)
    try:
        draw(folder, todo, rows, plan.get("against"))
    except ImportError as e:
        print(e, file=sys.stderr)
    print((folder / "table.md").read_text(encoding="utf-8"))
    return 0


def _under_protocol(plan: dict[str, Any], got: argparse.Namespace) -> int:
    """A plan with held-out clients or samples and grids, in Motley's manner."""
    from pflcore.reproduce import motley

    for what in ("settings", "equal_compute", "eval_every"):
        if getattr(got, what):
            raise ValueError(f"{what}: a plan under Motley's protocol takes none; leave it out.")
    if got.rounds is not None:
        if got.rounds < 1:
            raise ValueError(f"rounds: expected at least 1, got {got.rounds}.")
        for name, m in plan["methods"].items():  # methods with rounds of their own keep their part, and so do their warm rounds
            m |= {"rounds": max(1, round(m["rounds"] * got.rounds / plan["rounds"]))} if m.get("rounds") else {}
            warm = m.get("options", {}).get("warm")
            if warm:
                m["options"]["warm"] = round(warm * got.rounds / plan["rounds"])
                print(f"{name}: warm {m['options']['warm']}, as {warm} of {plan['rounds']} rounds", file=sys.stderr)
        plan["rounds"] = got.rounds
    if got.data is not None:
        plan["data"] = got.data
    if got.data is not None or got.rounds is not None:
        plan |= {"reported": {}, "expected": {}, "checks": {}}  # they are of the plan as it stands
    folder = got.out or Path("runs") / "reproduce" / f"{Path(got.name).stem}-{plan['data']}"
    with Progress(0, True) as progress:
        say = (lambda text: None) if got.quiet else progress.say
        code = motley.reproduce(plan, folder, seeds=got.seeds, methods=got.methods, workers=got.workers, say=say)
    print((folder / "table.md").read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
