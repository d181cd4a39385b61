"""`pflcore reproduce NAME`: the experiments behind a table of a paper.

A plan is a small JSON file in bench/papers/plans (or a path): see `bench.papers.plan`.
Every run (setting, method, seed) writes a record of its own; a run whose record is whole is not
played again, so an interrupted reproduction goes on where it stopped. `result.json` holds one row
per method and setting, `table.md` shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.papers import costs, study
from bench.papers.plan import EMPTY, chosen, load, plans, shortened, tasks
from bench.papers.runs import Reproduction, write
from bench.papers.table import rows_of, verdicts
from bench.problem import parsed
from pflcore.cli.experiment import algorithm
from pflcore.nn.models import model_for
from pflcore.results.progress import Progress
from pflcore.train.net import Net


def count(plan: Mapping[str, Any], folder: Path) -> None:
    """What a round costs a client, for a plan with "costs": {model, shape, classes, n, samples}.
    Rows in MiB and in operations."""
    c = dict(plan["costs"])
    name, shape, classes = c.pop("model"), c.pop("shape"), c.pop("classes")
    net = Net(lambda: model_for(name, shape, classes))
    each = {
        m: costs.cost(algorithm(o["algorithm"], o.get("options")), net, shape, classes, **c)
        for m, o in plan["methods"].items()
    }
    rows = []
    for setting, value in (
        ("MiB per client and round", lambda x: x.bytes / costs.MIB),
        ("FLOPs per client and round", lambda x: x.client),
    ):
        paper, data = plan["reported"].get(setting, {}), f"{name}, {net.size:,} parameters"
        for m, x in each.items():
            row = {"method": m, "final": value(x), "paper": paper.get(m), "seeds": 1}
            rows.append(row | {"setting": setting, "data": data})
    write(folder, plan, rows, f"{plan['about']}\n\n{costs.table(each, c.get('samples', 2500))}")


def listed() -> str:
    """Every plan: what it is, the data that it needs, and how long it takes."""
    lines = []
    for name in plans():
        plan = load(name)
        data = sorted(
            {s.get("data", plan["options"].get("data", "")) for s in plan["settings"].values()}
        )
        lines += [
            name,
            f"  {plan['about']}",
            f"  data: {', '.join(data) or 'none'}; on two free cores: {plan['takes']}",
        ]
    return "\n".join(lines)


def reproduce(
    plan: Mapping[str, Any],
    folder: str | Path,
    *,
    quiet: bool = False,
    draw: bool = True,
    **choice: Any,
) -> Reproduction:
    """Plays a whole plan (see `bench.papers.plan.complete`) into `folder`; `choice`: see
    `bench.papers.plan.tasks`."""
    todo = tasks(plan, **choice)
    with Progress(sum(t.job.options.rounds for t in todo if not t.base), quiet) as progress:
        progress.say(f"Results: {folder}")
        made = Reproduction(plan, Path(folder), progress)
        rows = made.play(todo)
    if draw:
        try:
            study.draw(made, rows)
        except ImportError as e:
            print(e, file=sys.stderr)
    return made


OWN = ("list", "rounds", "out", "quiet")  # of the command; the others choose tasks


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
    name = words.pop(0) if words and not words[0].startswith("-") else None
    got = parsed(Asked, "pflcore reproduce NAME", __doc__, words)
    if got.list:
        print(listed())
        return 0
    if name is None:
        raise ValueError(
            f"name: expected one of {', '.join(plans())}, or a .json file, got none; --list says "
            "what they are."
        )
    plan = load(name)
    if got.equal_compute and not plan["equal_compute"]:
        raise ValueError(
            "equal_compute: this plan does not say what equal computation is; leave it out."
        )
    if got.rounds is not None:
        plan, said = shortened(plan, got.rounds)
        print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
    data = got.data or plan["options"].get("data")
    if got.data is not None:
        plan |= {k: EMPTY[k] for k in ("expected", "checks")}  # they are of the plan as it stands
    folder = got.out or Path("runs") / "reproduce" / "-".join(filter(None, (Path(name).stem, data)))
    good = True
    if plan["costs"]:
        names = chosen("methods", plan, got.methods)
        count({**plan, "methods": {m: plan["methods"][m] for m in names}}, folder)
    else:
        given = {k: v for k, v in vars(got).items() if k not in OWN and v is not None}
        made = reproduce(plan, folder, quiet=got.quiet, **given)
        good = all(holds for holds, _ in verdicts(plan, rows_of(plan, made.runs)))
    print((folder / "table.md").read_text(encoding="utf-8"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
