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
from bench.problem import Facts, parsed
from pflcore import Net
from pflcore.check import NonNegativeFloat, require
from pflcore.lab.cli._experiment import make_algorithm
from pflcore.lab.results._progress import Progress
from pflcore.nn.models import model_for
from pflcore.ops import __version__, backend
from pflcore.simulation._files import lock_folder


def say(text: str) -> None:
    """Prints a line on stderr at once, also where no terminal listens."""
    print(text, file=sys.stderr, flush=True)


def count(plan: Plan, folder: Path) -> None:
    """Writes a client's costs of a round, in MiB and in operations.

    The plan has "costs": {model, shape, classes, n, samples}.
    """
    options = dict(plan["costs"])
    name = options.pop("model")
    folder.mkdir(parents=True, exist_ok=True)
    say(f"Counts {len(plan['methods'])} methods on {name}. Folder: {folder}")
    shape = options.pop("shape")
    classes = options.pop("classes")
    net = Net(lambda: model_for(name, shape, classes))
    by_method = {}
    for method, m in plan["methods"].items():
        say(f"{method} ...")
        algorithm = make_algorithm(m["algorithm"], m.get("options"))
        by_method[method] = costs.cost(algorithm, net, shape, classes, **options)
    traffic = {method: cost.bytes / costs.MIB for method, cost in by_method.items()}
    operations = {method: cost.client for method, cost in by_method.items()}
    rows: list[Facts] = []
    for setting, values in (
        ("MiB per client and round", traffic),
        ("FLOPs per client and round", operations),
    ):
        for method, value in values.items():
            row = {
                "method": method,
                "final": value,
                "paper": plan["reported"].get(setting, {}).get(method),
                "seeds": 1,
                "setting": setting,
                "data": f"{name}, {net.size:,} parameters",
            }
            rows.append(row)
    table = costs.table(by_method, options.get("samples", 2500))
    write(folder, plan, rows, f"{plan['about']}\n\n{table}")


def reproduce(
    plan: Plan,
    folder: Path,
    *,
    quiet: bool = False,
    draw: bool = True,
    minutes: float | None = None,
    **choice: Any,
) -> Reproduction:
    """Plays a whole plan into a folder, and draws its pictures.

    Raises ValueError where another process plays into the folder.

    Args:
        plan: see `bench.papers.plan.complete`
        minutes: the time after which no further run begins; None for no limit
        choice: see `bench.papers.plan.tasks`
    """
    todo = tasks(plan, **choice)
    rounds = sum(task.options.rounds for task in todo if not task.base)
    methods = {task.method for task in todo}
    settings = {task.setting for task in todo}
    say(
        f"Plays {len(todo)} runs, {rounds:,} rounds in all: methods {len(methods)}, "
        f"settings {len(settings)}. Folder: {folder}"
    )
    with lock_folder(folder), Progress(rounds, quiet) as progress:
        made = Reproduction(plan, folder, progress, minutes)
        rows = made.play(todo)
        if made.skipped:
            count = f"{len(made.skipped)} of {len({task.key for task in todo})}"
            progress.say(
                f"The time is over: {count} pairs of setting and method lack runs. "
                "The same command goes on."
            )
    if draw and not made.skipped:
        try:
            study.draw(made, rows)
        except ImportError as e:
            print(e, file=sys.stderr)
    return made


@dataclass(frozen=True)
class Asked:
    """Options that choose from a plan or replace its values.

    Args:
        list: every plan, with the data that it needs and how long it takes
        data: another data set than the plan's
        rounds: rounds of each run
        seeds: runs of each method
        eval_every: rounds between evaluations of all clients; 0: after the last one
            only
        methods: these only, by the plan's names
        settings: these only, by the plan's names
        equal_compute: also plays methods that do not look ahead with as much local work
        out: folder of the results; default: runs/reproduce/NAME-DATA
        minutes: time after which no further run begins; the same command goes on, and
            with 0 it only writes the tables of what is there
        workers: threads; never changes a result
        device: cpu or cuda
        quiet: no progress bar
    """

    list: bool = False
    data: str | None = None
    rounds: int | None = None
    seeds: int | None = None
    eval_every: int | None = None
    methods: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    equal_compute: bool = False
    out: Path | None = None
    minutes: NonNegativeFloat | None = None
    workers: int | None = None
    device: str | None = None
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 1 where a check fails, else 0.

    The words are the plan's name, or the path of a .json file, and options.
    """
    words = list(argv)
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    got = parsed(Asked, "pflcore reproduce NAME", __doc__, words)
    if got.list:
        for plan_name in plans():
            print_plan(plan_name)
        return 0
    plan = load(name)
    takes = f" On two free cores it takes {plan['takes']}." if plan["takes"] else ""
    say(f"{name}: {plan['about']}.{takes}\npflcore {__version__}: {backend()}")
    fits = plan["equal_compute"] or not got.equal_compute
    require(fits, "equal_compute", "a plan that says what equal computation is", name)
    if got.rounds is not None:
        plan, changes = shortened(plan, got.rounds)
        for line in changes:
            print(line, file=sys.stderr)
    data = got.data or plan["options"].get("data")
    if got.data is not None:
        plan |= {"expected": {}, "checks": {}}  # They hold for the plan's own data.
    folder = got.out
    if folder is None:
        parts = filter(None, (Path(name).stem, data))
        folder = Path("runs") / "reproduce" / "-".join(parts)
    failed = False
    if plan["costs"]:
        names = chosen("methods", plan, got.methods)
        methods = {method: plan["methods"][method] for method in names}
        count({**plan, "methods": methods}, folder)
    else:
        choice = {}
        for option, value in vars(got).items():
            if option not in OF_THE_COMMAND and value is not None:
                choice[option] = value
        made = reproduce(plan, folder, quiet=got.quiet, minutes=got.minutes, **choice)
        checks = verdicts(plan, rows_of(plan, made.runs))
        failed = not all(holds for holds, _ in checks)
    print((folder / "table.md").read_text(encoding="utf-8"))
    return int(failed)


# Options of the command; the others choose tasks.
OF_THE_COMMAND = ("list", "rounds", "out", "quiet", "minutes")


def print_plan(name: str) -> None:
    """Prints a plan's description, its data and its duration."""
    plan = load(name)
    data = set()
    for setting in plan["settings"].values():
        options = plan["options"] | setting
        data.add(options.get("data", ""))
    needed = ", ".join(sorted(data)) or "none"
    print(f"{name}\n  {plan['about']}")
    print(f"  data: {needed}; on two free cores: {plan['takes']}")
