"""`pflcore reproduce NAME`: the experiments behind a table of a paper.

A plan is a small JSON file in bench/papers/plans (or a path): see `bench.papers.plan`.
Every run (setting, method, seed) writes a record of its own; a run whose record is
whole is not played again, so an interrupted reproduction goes on where it stopped.
`result.json` holds one row per method and setting, `table.md` shows them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.papers import costs, study
from bench.papers.plan import Plan, chosen, load, plans, shortened, tasks
from bench.papers.runs import Reproduction, write
from bench.papers.table import rows_of, verdicts
from bench.problem import parsed
from pflcore import Net
from pflcore.check import require
from pflcore.cli._experiment import make_algorithm
from pflcore.nn.models import model_for
from pflcore.results._progress import Progress


def count(plan: Plan, folder: Path) -> None:
    """What a round costs a client, for a plan with "costs": {model, shape, classes, n,
    samples}. Rows in MiB and in operations."""
    c = dict(plan["costs"])
    name, shape, classes = map(c.pop, ("model", "shape", "classes"))
    net = Net(lambda: model_for(name, shape, classes))
    each = {
        m: costs.cost(
            make_algorithm(o["algorithm"], o.get("options")), net, shape, classes, **c
        )
        for m, o in plan["methods"].items()
    }
    measured = {
        "MiB per client and round": {m: x.bytes / costs.MIB for m, x in each.items()},
        "FLOPs per client and round": {m: x.client for m, x in each.items()},
    }
    rows = [
        {
            "method": m,
            "final": value,
            "paper": plan["reported"].get(setting, {}).get(m),
            "seeds": 1,
            "setting": setting,
            "data": f"{name}, {net.size:,} parameters",
        }
        for setting, values in measured.items()
        for m, value in values.items()
    ]
    write(
        folder,
        plan,
        rows,
        f"{plan['about']}\n\n{costs.table(each, c.get('samples', 2500))}",
    )


def reproduce(
    plan: Plan, folder: Path, *, quiet: bool = False, draw: bool = True, **choice: Any
) -> Reproduction:
    """Plays a whole plan (see `bench.papers.plan.complete`) into `folder`; `choice`:
    see `bench.papers.plan.tasks`."""
    todo = tasks(plan, **choice)
    with Progress(sum(t.options.rounds for t in todo if not t.base), quiet) as progress:
        progress.say(f"Results: {folder}")
        made = Reproduction(plan, folder, progress)
        rows = made.play(todo)
    if draw:
        try:
            study.draw(made, rows)
        except ImportError as e:
            print(e, file=sys.stderr)
    return made


@dataclass(frozen=True)
class Asked:
    """What is taken of a plan, and what goes before it."""

    list: bool = False  # every plan, with the data that it needs and how long it takes
    data: str | None = None  # another data set than the plan's
    rounds: int | None = None  # rounds of each run
    seeds: int | None = None  # runs of each method
    # rounds between evaluations of all clients; 0: after the last one only
    eval_every: int | None = None
    methods: tuple[str, ...] | None = None  # these only, by the plan's names
    settings: tuple[str, ...] | None = None  # these only, by the plan's names
    # beside it, methods that do not look ahead with as much local work
    equal_compute: bool = False
    out: Path | None = None  # folder of the results; default: runs/reproduce/NAME-DATA
    workers: int | None = None  # threads; never changes a result
    device: str | None = None  # cpu or cuda
    quiet: bool = False  # no progress bar


def main(argv: Sequence[str]) -> int:
    """The command line: the plan's name or the path of a .json file, and options."""
    words = list(argv)
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    got = parsed(Asked, "pflcore reproduce NAME", __doc__, words)
    if got.list:
        for name in plans():
            plan = load(name)
            asked = (plan["options"] | s for s in plan["settings"].values())
            data = (
                ", ".join(sorted({options.get("data", "") for options in asked}))
                or "none"
            )
            print(f"{name}\n  {plan['about']}")
            print(f"  data: {data}; on two free cores: {plan['takes']}")
        return 0
    plan = load(name)
    told = plan["equal_compute"] or not got.equal_compute
    require(told, "equal_compute", "a plan that says what equal computation is", name)
    if got.rounds is not None:
        plan, said = shortened(plan, got.rounds)
        for line in said:
            print(line, file=sys.stderr)
    data = got.data or plan["options"].get("data")
    if got.data is not None:
        plan |= {"expected": {}, "checks": {}}  # they are of the plan as it stands
    folder = got.out or Path("runs") / "reproduce" / "-".join(
        filter(None, (Path(name).stem, data))
    )
    bad = False
    if plan["costs"]:
        names = chosen("methods", plan, got.methods)
        count({**plan, "methods": {m: plan["methods"][m] for m in names}}, folder)
    else:
        # of the command; the others choose tasks
        own = ("list", "rounds", "out", "quiet")
        given = {k: v for k, v in vars(got).items() if k not in own and v is not None}
        made = reproduce(plan, folder, quiet=got.quiet, **given)
        bad = not all(holds for holds, _ in verdicts(plan, rows_of(plan, made.runs)))
    print((folder / "table.md").read_text(encoding="utf-8"))
    return int(bad)
