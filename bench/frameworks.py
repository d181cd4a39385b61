"""The same rounds of FedAvg by the programs that a user would pick instead.

pflcore, a plain torch loop and Flower, and PFLlib, FL-bench and fluke where they are
given, play them on the same arrays, from the same model, each in a process of its own.
The processes of all programs take turns. Times are the least of all turns, a round's
the least of all rounds, since other work on a machine adds to them. It adds more to a
longer round; CPU seconds, which are those of all cores and the least mean of a turn's
rounds, tell programs apart on a busy machine, too.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.players.player import FILE, PLAYERS, Task
from bench.problem import Absent, Facts, Sizes
from bench.table import Machine, Table, size_of
from bench.workload import Workload, is_real, pool, splits

TURNS = 3
PATIENCE_SECONDS = 900
# Fields of a row, their headings, and the formats of their cells.
COLUMNS = """\
start | start and round 1, s | .1f
round | a round, s | .3f
cpu | its CPU, s | .3f
evaluated_round | with evaluation, s | .3f
evaluated_cpu | its CPU, s | .3f
megabytes | memory, MB | .0f
accuracy | accuracy | .3f
"""
CHECKOUTS = {"PFLlib": "pfllib", "FL-bench": "flbench", "fluke": "fluke"}


def sizes(quick: bool) -> Sizes:
    """Models, N clients, and the training images of each."""
    yield {"model": "lenet5", "N": 20, "images": 500}
    if not quick:
        yield {"model": "mlp", "N": 20, "images": 500}


def workload(size: Facts, rounds: int) -> Workload:
    """The rounds of a size, with 100 test images a client."""
    n = size["N"]
    return Workload(
        name="frameworks",
        model=size["model"],
        data="mnist",
        n=n,
        cohort=n,
        samples=n * size["images"],
        tests=n * 100,
        lr=0.1,
        rounds=rounds,
    )


def write_task(w: Workload, evaluate: bool, folder: Path) -> None:
    """Writes the file of the rounds, which every program reads."""
    x, y = pool(w.data, w.samples, w.tests)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = w.build()
    train, test = splits(w).values()
    training = (w.lr, w.batch, w.epochs, w.rounds, w.cohort, evaluate)
    task = Task(x, y, train, test, model, *training)
    torch.save(vars(task), folder / FILE)


def play(
    program: str, w: Workload, evaluate: bool = False, checkout: Path | None = None
) -> Facts:
    """Facts of a program's rounds, in a process of its own.

    They are those of `Clock`, the accuracy (the mean of all clients'), `start` (seconds
    to the end of round 1) and `seconds` (of the later rounds). Raises Absent where the
    program does not play them.
    """
    import pflcore

    if program in ("PFLlib", "FL-bench") and checkout is None:
        raise Absent(f"not measured: give a checkout by --{CHECKOUTS[program]}")
    own = [Path(__file__).parent / "players", Path(pflcore.__file__).parents[1]]
    places = [*map(str, own), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    with tempfile.TemporaryDirectory() as folder:
        write_task(w, evaluate, Path(folder))
        words = [sys.executable, "-c", "import player; player.main()", program, folder]
        if checkout is not None:
            words.append(str(checkout.resolve()))
        options = {"env": env, "cwd": folder, "timeout": PATIENCE_SECONDS}
        began = time.time()
        try:
            done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
        except subprocess.TimeoutExpired:
            raise Absent(f"not measured: over {PATIENCE_SECONDS} s") from None
        if done.returncode:
            errors = done.stderr.strip().splitlines() or ["killed"]
            raise Absent(f"not measured: it failed ({errors[-1]})")
        facts: Facts = json.loads(Path(folder, "result.json").read_text())
    if "absent" in facts:
        raise Absent(f"not measured: {facts['absent']}")
    ends = facts["ends"]
    facts["start"] = ends[0] - began
    facts["seconds"] = [b - a for a, b in itertools.pairwise(ends)]
    return facts


def measure(
    size: Facts, checkouts: Mapping[str, Path | None], quick: bool
) -> list[Facts]:
    """A row for each program; the programs take turns."""
    w = workload(size, 3 if quick else 6)
    rows: list[Facts] = []
    for program in PLAYERS:
        rows.append({"size": size, "program": program, "note": ""})
    runs = dict[tuple[str, bool], list[Facts]]()
    turns = range(1 if quick else TURNS)
    for _, evaluate, row in itertools.product(turns, (False, True), rows):
        program = row["program"]
        if row["note"]:
            continue
        try:
            facts = play(program, w, evaluate, checkouts.get(program))
        except ImportError as error:
            row["note"] = str(error)
            continue
        runs.setdefault((program, evaluate), []).append(facts)
    for row in rows:
        if row["note"]:
            continue
        plain, scored = (runs[row["program"], evaluate] for evaluate in (False, True))
        row["start"] = min(played["start"] for played in plain)
        for prefix, turn in (("", plain), ("evaluated_", scored)):
            seconds = itertools.chain(*(played["seconds"] for played in turn))
            row[f"{prefix}round"] = min(seconds)
            cpu = min(played["cpu"][-1] - played["cpu"][0] for played in turn)
            row[f"{prefix}cpu"] = cpu / (w.rounds - 1)
        row["megabytes"] = plain[0]["megabytes"]
        row["accuracy"] = sum(played["accuracy"] for played in scored) / len(scored)
        row["runs"] = [*plain, *scored]
    return rows


def cells(row: Facts, ours: Facts) -> list[str]:
    """The cells of a row; in brackets the number over pflcore's."""
    texts = [size_of(row["size"]), row["program"]]
    for line in COLUMNS.splitlines():
        name, _, form = line.split(" | ")
        text = format(row[name], form) if name in row else ""
        if text and ours.get(name) and row is not ours and name != "accuracy":
            text += f" ({row[name] / ours[name]:.1f})"
        texts.append(text)
    return [*texts, row["note"]]


def run(
    quick: bool, machine: Machine, checkouts: Mapping[str, Path | None]
) -> tuple[list[Facts], str]:
    """Prints a line for each program; returns the measurements and the table."""
    data = "MNIST" if is_real("mnist") else "made-up images"
    about = [
        *machine.lines(),
        f"FedAvg on {data}, all clients in each round, one epoch in batches of 20, lr "
        ".1. In brackets: times pflcore's.",
    ]
    heads = [line.split(" | ")[1] for line in COLUMNS.splitlines()]
    table = Table("size", "program", *heads, "note", about=about)
    measured = []
    for size in sizes(quick):
        rows = measure(size, checkouts, quick)
        measured += rows
        for row in rows:
            table.add(*cells(row, rows[0]))
    return measured, table.text()
