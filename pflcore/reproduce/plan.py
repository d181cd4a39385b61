"""Plans of reproductions: what a table of a paper takes, as a small JSON file, and the runs that it stands for.

A plan has the keys `settings` (name -> options of `pflcore run`, with "partition_options"), `methods` (name -> "algorithm", "options",
"training", "grid", "looks_ahead"), `options` and `training` of all runs, and `reported` (setting -> method -> the paper's number).
"equal_compute" is what methods that do not look ahead train with in `--equal-compute`; "against" is an option to draw accuracy against.
A method's "grid" (option -> values; "training.lr" and the like set how clients train) is searched on validation data, 20 % of each
client's training samples, and only the point that is chosen there is tested. A method's "late" (name -> options that play no part in
training) are ways to evaluate its last state. With "groups": true the table is that of `pflcore.reproduce.groups`, of the last round.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from pflcore.experiment import Job, Options, jobs
from pflcore.local import Training
from pflcore.results.record import plain

PLANS = Path(__file__).resolve().parent / "plans"
KNOWN = {
    "about",
    "paper",
    "data",
    "options",
    "training",
    "model_options",
    "settings",
    "methods",
    "equal_compute",
    "reported",
    "against",
} | {"groups"}
COUNTED = {"about", "paper", "costs", "methods", "reported"}  # a plan that counts what a round costs, and trains nothing


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
    late: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> options to evaluate the last state with

    @property
    def path(self) -> Path:
        """Where its record stands in the output folder."""
        words = [self.method, self.variant, *(f"{k}={v}" for k, v in (self.point or {}).items() if self.split == "val")]
        name = "-".join(re.sub(r"[^\w.=+-]", "_", w) for w in words if w)
        return Path("records") / re.sub(r"[^\w.-]", "_", self.setting) / f"{name}-seed{self.job.options.seed}.jsonl"

    @property
    def digest(self) -> str:
        """What the run is, short, so that a record of something else is never taken for it. Only what differs from the defaults counts."""
        j = self.job
        asked = [{k: v for k, v in vars(o).items() if v != vars(type(o)())[k] and k != "workers"} for o in (j.options, j.training)]
        what = [j.algorithm, *asked, dict(j.hyper), dict(self.cut), dict(self.shape), self.split]
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
    try:
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"name: expected a plan in JSON, got {path}, which is none ({e}).") from None
    if not isinstance(plan, dict):
        raise ValueError(f"name: expected a plan, an object of settings and methods, got {path}, which holds a {type(plan).__name__}.")
    if "protocol" in plan:
        return plan  # Motley's protocol: pflcore.motley checks and plays it
    unknown = set(plan) - (COUNTED if "costs" in plan else KNOWN)
    lacks = [k for k in (("costs", "methods") if "costs" in plan else ("data", "settings", "methods")) if not plan.get(k)]
    if unknown or lacks:
        raise ValueError(
            f"name: {path} must have data, settings and methods, and nothing beside {', '.join(sorted(KNOWN))}; "
            f"{f'there is {sorted(unknown)[0]}' if unknown else f'there is no {lacks[0]}'}."
        )
    return {"about": "", "paper": "", "options": {}, "training": {}, "model_options": {}, "reported": {}, "settings": {}} | plan


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
                        split = "val" if m.get("grid") else "test"
                        yield Task(method, setting, variant, _at(job, point), cut, shape, split, point, m.get("late", {}))


def _points(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    yield from (dict(zip(grid, values, strict=True)) for values in product(*grid.values()))


def _at(job: Job, point: Mapping[str, Any]) -> Job:
    """The job at a grid's point; "training.lr" and the like set how clients train, other names the algorithm."""
    training = {k.removeprefix("training."): v for k, v in point.items() if k.startswith("training.")}
    hyper = {k: v for k, v in point.items() if not k.startswith("training.")}
    (made,) = jobs([job.algorithm], job.options, replace(job.training, **training), {job.algorithm: {**job.hyper, **hyper}})
    return made
