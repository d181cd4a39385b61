"""`pflcore reproduce NAME`: the experiments behind a table of a paper.

A plan is a small JSON file in bench/reproduce (or a path): the settings, the methods, how all of them train, and the paper's numbers.
Every run (setting, method, seed) writes a record of its own; a run whose record is whole is not played again, so an interrupted
reproduction goes on where it stopped. `result.json` holds one row per method and setting, `table.md` shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pflcore import metrics
from pflcore.experiment import Job, Options, federation, jobs, model
from pflcore.local import Training
from pflcore.progress import Progress
from pflcore.record import Record, Run, plain, read
from pflcore.simulation import held_out

PLANS = Path(__file__).resolve().parent.parent / "bench" / "reproduce"
KNOWN = {"about", "paper", "data", "options", "training", "model_options", "settings", "methods", "equal_compute", "reported", "pictures"}


@dataclass(frozen=True)
class Task:
    """One run of a plan."""

    method: str
    setting: str
    variant: str  # "" or "equal compute"
    job: Job
    cut: Mapping[str, Any]  # the partition's own options
    shape: Mapping[str, Any]  # the model's own options
    split: str = "test"  # "val" while a grid is searched
    point: Mapping[str, Any] | None = None  # of a grid

    @property
    def path(self) -> Path:
        """Where its record stands in the output folder."""
        words = [self.method, self.variant, *(f"{k}={v}" for k, v in (self.point or {}).items() if self.split == "val")]
        name = "-".join(re.sub(r"[^\w.=+-]", "_", w) for w in words if w)
        return Path("records") / re.sub(r"[^\w.-]", "_", self.setting) / f"{name}-seed{self.job.options.seed}.jsonl"

    @property
    def digest(self) -> str:
        """What the run is, short: a record of something else is never taken for it."""
        j = self.job
        what = [j.algorithm, vars(j.options), vars(j.training), dict(j.hyper), dict(self.cut), dict(self.shape), self.split]
        return hashlib.blake2b(json.dumps(plain(what), sort_keys=True).encode(), digest_size=8).hexdigest()


def plans() -> list[str]:
    return sorted(p.stem for p in PLANS.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """A plan by name or path. ValueError in one sentence where there is none or it has an unknown key."""
    path = Path(name) if name.endswith(".json") else PLANS / f"{name}.json"
    if not path.is_file():
        raise ValueError(
            f"name: expected one of {', '.join(plans()) or 'no plan (run it from a checkout of pflcore)'}, or a .json file, got {name}."
        )
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "protocol" in plan:
        return plan  # Motley's protocol: pflcore.motley checks and plays it
    unknown = set(plan) - KNOWN
    if unknown or not plan.get("settings") or not plan.get("methods"):
        raise ValueError(
            f"name: {path} must have settings and methods, and nothing beside {', '.join(sorted(KNOWN))}; found {sorted(unknown)}."
        )
    return {"about": "", "paper": "", "options": {}, "training": {}, "model_options": {}, "reported": {}, "pictures": []} | plan


def tasks(
    plan: Mapping[str, Any], options: Options, seeds: int, methods: Sequence[str], settings: Sequence[str], equal: bool
) -> Iterator[Task]:
    """The runs of a plan, setting by setting; every name and option checked before the first is played."""
    for setting in settings:
        own = dict(plan["settings"][setting])
        cut, shape = own.pop("partition_options", {}), plan["model_options"]
        asked = replace(options, **own)
        for method in methods:
            m = plan["methods"][method]
            base = Training(**plan["training"] | m.get("training", {}))
            variants = {"": base}
            if equal and "equal_compute" in plan and not m.get("looks_ahead"):
                variants["equal compute"] = replace(base, **plan["equal_compute"])
            for variant, training in variants.items():
                for seed in range(asked.seed, asked.seed + seeds):
                    hyper = {m["algorithm"]: m.get("options", {})}
                    (job,) = jobs([m["algorithm"]], replace(asked, seed=seed), training, hyper)
                    for point in _points(m.get("grid", {})):
                        yield Task(method, setting, variant, _at(job, point), cut, shape, "val" if m.get("grid") else "test", point)


def _points(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    yield from (dict(zip(grid, values, strict=True)) for values in product(*grid.values()))


def _at(job: Job, point: Mapping[str, Any]) -> Job:
    """The job at a grid's point; "training.lr" and the like set how clients train, other names the algorithm."""
    training = {k.removeprefix("training."): v for k, v in point.items() if k.startswith("training.")}
    hyper = {k: v for k, v in point.items() if not k.startswith("training.")}
    (made,) = jobs([job.algorithm], job.options, replace(job.training, **training), {job.algorithm: {**job.hyper, **hyper}})
    return made


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
    data = federation(task.job.options, task.cut)
    if task.split == "val":
        data = held_out(data, task.job.options.seed)
    simulation = task.job.simulation(data, model(task.job.options, data, task.shape), eval_split=task.split)
    with Record(path, overwrite=True) as record:
        extra = {
            "digest": task.digest,
            "method": task.method,
            "setting": task.setting,
            "variant": task.variant,
            "partition_options": dict(task.cut),
        }
        record.write({"header": task.job.header(simulation) | extra})

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
    return read(path)[0]


def selected(found: Sequence[tuple[Task, Run]]) -> list[Task]:
    """A grid's best point by the last validation value (mean over clients, then seeds), as runs to test, one per seed.

    A point that diverged is not chosen; the first of equals is.
    """
    scores: dict[str, list[float]] = {}
    for task, run in found:
        scores.setdefault(repr(task.point), []).append(-1.0 if run.stopped else metrics.mean(run.last()))
    best = max(scores, key=lambda point: metrics.mean(scores[point]))
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
            about = {"plan": plan["about"], "paper": plan["paper"], "date": time.strftime("%Y-%m-%d"), "machine": machine(), "rows": rows}
            (folder / "result.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            (folder / "table.md").write_text(table(plan, rows), encoding="utf-8")
    return rows


def machine() -> str:
    """Processor, cores and torch, in words."""
    import os

    import torch

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
    given = {k: getattr(got, k) for k in ("data", "rounds", "eval_every", "workers") if getattr(got, k) is not None}
    planned = dict(plan["options"])
    seeds = got.seeds or planned.pop("seeds", 1)
    planned.pop("seeds", None)
    options = Options(**{"data": plan["data"], **planned, **given})
    folder = got.out or Path("runs") / "reproduce" / f"{Path(got.name).stem}-{options.data}"
    todo = list(
        tasks(plan, options, seeds, got.methods or list(plan["methods"]), got.settings or list(plan["settings"]), got.equal_compute)
    )
    reproduce(plan, folder, todo, got.quiet)
    print((folder / "table.md").read_text(encoding="utf-8"))
    return 0


def _under_protocol(plan: dict[str, Any], got: argparse.Namespace) -> int:
    """A plan with held-out clients or samples and grids, in Motley's manner."""
    from pflcore import motley

    for what in ("settings", "equal_compute", "eval_every"):
        if getattr(got, what):
            raise ValueError(f"{what}: a plan under Motley's protocol takes none; leave it out.")
    if got.rounds is not None:
        if got.rounds < 1:
            raise ValueError(f"rounds: expected at least 1, got {got.rounds}.")
        for m in plan["methods"].values():  # methods with rounds of their own keep their part
            m |= {"rounds": max(1, round(m["rounds"] * got.rounds / plan["rounds"]))} if m.get("rounds") else {}
        plan["rounds"] = got.rounds
    if got.data is not None:
        plan["data"] = got.data
    folder = got.out or Path("runs") / "reproduce" / f"{Path(got.name).stem}-{plan['data']}"
    with Progress(0, True) as progress:
        say = (lambda text: None) if got.quiet else progress.say
        code = motley.reproduce(plan, folder, seeds=got.seeds, methods=got.methods, workers=got.workers, say=say)
    print((folder / "table.md").read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
