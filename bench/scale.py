"""Growth of a round's time, memory and record with the clients.

There are 100 to 1,000,000 clients, of which 100 take part in a round. Each measurement
runs in a process of its own, so that memory that one has used does not count for the
next.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.child import child_words
from bench.problem import Facts, fact
from bench.table import Table, clock
from pflcore import Evaluation, Federation, Simulation
from pflcore.data._ragged import Ragged
from pflcore.lab.results._pictures import (
    figure_of,
    line_styles,
    plain_ticks,
    save,
    tidy,
)
from pflcore.simulation.record import RecordWriter

ALGORITHMS = ("fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster")

COHORT = 100
INPUTS = 28
SAMPLES = 15
EVALUATED = 200
HEAD = (
    "algorithm | clients | ms a round, least | ms a round, median | memory, MB | "
    "bytes of record a round"
)


def run(quick: bool, seconds: float, plot: Path | None) -> tuple[list[Facts], str]:
    """Prints a line for each measurement; returns the measurements and the table.

    With `plot` it draws a picture, too.
    """
    table = Table(HEAD)
    rows = dict[str, list[Facts]]()
    end = 5 if quick else 7
    sizes = [10**k for k in range(2, end)]
    for name, n in itertools.product(ALGORITHMS, sizes):
        words = child_words("bench.scale", name, str(n), str(seconds))
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        if done.returncode:
            errors = done.stderr.strip().splitlines() or ["killed"]
            table.add(f"{name} | {n:,} | {errors[-1]} |  |  | ")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.setdefault(name, []).append(row)
        table.add(
            f"{name} | {n:,} | {row['least']:.2f} | {row['median']:.2f} | "
            f"{row['rss']:.0f} | {row['bytes']:,}"
        )
    measured = []
    for name, of_algorithm in rows.items():
        print(f"{name}: {growth(of_algorithm)}", flush=True)
        measured += of_algorithm
    if plot is not None:
        draw(rows, plot)
    return measured, table.text()


def growth(rows: list[Facts]) -> str:
    """A sentence on the growth of an algorithm's numbers with N.

    The growth is given as powers of N.

    The exponents are slopes of the least-squares lines through the logarithms.
    """
    if len(rows) < 2:
        return "too few sizes to say"
    n = np.log([r["n"] for r in rows])
    words = {"least": "time", "rss": "memory", "bytes": "record"}
    parts = []
    for key, word in words.items():
        values = np.log([r[key] for r in rows])
        slope, _ = np.polyfit(n, values, 1)
        parts.append(f"{word} as N^{slope:.2f}")
    return ", ".join(parts)


def draw(rows: dict[str, list[Facts]], path: Path) -> None:
    """Draws time, memory and record against the number of clients.

    Each algorithm has a line. The times are medians, on an axis that begins at 0.
    """
    figure, axes = figure_of(11, 3.4, 3)
    panels = {
        "median": ("time", "ms a round, median"),
        "rss": ("memory of the process", "MB, data included"),
        "bytes": ("record", "bytes a round"),
    }
    styles = dict(zip(rows, line_styles(len(rows)), strict=True))
    for axis, (key, (title, unit)) in zip(axes, panels.items(), strict=True):
        for name, of_algorithm in rows.items():
            clients = [r["n"] for r in of_algorithm]
            values = [r[key] for r in of_algorithm]
            axis.plot(clients, values, **styles[name]._asdict(), label=name)
        axis.set(xscale="log", yscale="linear" if key == "median" else "log")
        if key == "median":
            axis.set_ylim(bottom=0)
        else:
            plain_ticks(axis.yaxis)
        tidy(axis, title, "clients in the federation, 100 in a round", unit)
    handles, names = axes[-1].get_legend_handles_labels()
    last = [rows[name][-1]["bytes"] for name in names]
    order = sorted(range(len(names)), key=lambda i: -last[i])
    axes[-1].legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=9,
        frameon=False,
    )
    save(figure, path)


def one(name: str, n: int, seconds: float) -> Facts:
    """The measurements of one algorithm, whose rounds are played for about `seconds`.

    The clients have random samples of two classes.
    """
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n * SAMPLES, INPUTS, generator=gen)
    y = torch.randint(0, 2, (n * SAMPLES,), generator=gen)
    places = torch.arange(n * SAMPLES).view(n, SAMPLES)
    index = {"train": places[:, :10], "test": places[:, 10:]}
    lists = {}
    for split, of_split in index.items():
        counts = torch.full((n,), of_split.shape[1])
        lists[split] = Ragged(of_split.reshape(-1), counts)
    play = Simulation(
        name,
        lambda: torch.nn.Linear(INPUTS, 2),
        Federation(x, y, lists, 2),
        rounds=10**6,
        participation=min(1.0, COHORT / n),
        evaluation=Evaluation(every=10, clients=min(n, EVALUATED)),
    )
    times: list[float] = []
    rounds = play.iterate()
    with (
        tempfile.TemporaryDirectory() as folder,
        RecordWriter(Path(folder) / "record.jsonl") as record,
    ):
        record.write({"header": play.header()})
        before = written(folder)
        while len(times) < 12 or sum(times) < 1e3 * seconds:
            spent, line = clock(lambda: next(rounds))
            times.append(1e3 * spent)
            record.write(line)
        size = (written(folder) - before) // len(times)
    rss = int(fact("self/status", "RssAnon", "0").split()[0]) / 1e3
    times = times[2:]  # The first rounds also prepare the others.
    found = {"least": min(times), "median": statistics.median_high(times), "rss": rss}
    return {"algorithm": name, "n": n, **found, "bytes": size}


def written(folder: str) -> int:
    """The bytes of all files in a folder."""
    return sum(p.stat().st_size for p in Path(folder).iterdir())


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
