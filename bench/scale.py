"""A round's time, the process's own memory and the record's bytes, at 100 to 1,000,000
clients of whom 100 take part in a round.

Each measurement has a process of its own: memory that one has had says nothing about
the next.
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

from bench.problem import Facts, fact
from bench.table import Table, clock
from pflcore import Evaluation, Federation, Simulation
from pflcore.data._ragged import Ragged
from pflcore.results._pictures import figure_of, save, tidy
from pflcore.results.record import RecordWriter

ALGORITHMS = ("fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster")
ROOT = Path(__file__).parents[1]  # of the checkout
COHORT, INPUTS, SAMPLES, EVALUATED = 100, 28, 15, 200
HEAD = (
    "algorithm | clients | ms a round, least | ms a round, median | RssAnon, MB | "
    "bytes of record a round"
)


def run(quick: bool, seconds: float, plot: Path | None) -> tuple[list[Facts], str]:
    """Prints a line for each; with `plot` a picture too. Gives the measurements and
    the table."""
    table, rows = Table(HEAD), dict[str, list[Facts]]()
    sizes = [10**k for k in range(2, 5 if quick else 7)]
    for name, n in itertools.product(ALGORITHMS, sizes):
        command = [sys.executable, "-m", "bench.scale", name, str(n), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["killed"])[-1]
            table.add(f"{name} | {n:,} | {why} |  |  | ")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.setdefault(name, []).append(row)
        table.add(
            f"{name} | {n:,} | {row['least']:.2f} | {row['median']:.2f} | "
            f"{row['rss']:.0f} | {row['bytes']:,}"
        )
    for name, mine in rows.items():
        print(f"{name}: {growth(mine)}", flush=True)
    if plot is not None:
        draw(rows, plot)
    return [row for mine in rows.values() for row in mine], table.text()


def growth(rows: list[Facts]) -> str:
    """How one algorithm's numbers grow with N, as exponents of N: slopes of the
    least-squares lines through their logarithms."""
    if len(rows) < 2:
        return "too few sizes to say"
    n, words = (
        np.log([r["n"] for r in rows]),
        {"least": "time", "rss": "memory", "bytes": "record"},
    )
    return ", ".join(
        f"{word} as N^{np.polyfit(n, np.log([r[key] for r in rows]), 1)[0]:.2f}"
        for key, word in words.items()
    )


def draw(rows: dict[str, list[Facts]], path: Path) -> None:
    """Time, memory and record against the number of clients, a line for each
    algorithm."""
    figure, axes = figure_of(13, 4, 3)
    units = {
        "least": "ms a round",
        "rss": "RssAnon, MB",
        "bytes": "bytes of record a round",
    }
    for axis, (key, unit) in zip(axes, units.items(), strict=True):
        for name, mine in rows.items():
            axis.loglog(
                [r["n"] for r in mine], [r[key] for r in mine], marker="o", label=name
            )
        tidy(axis, "", "clients", unit)
    axes[0].legend(fontsize=8, frameon=False)
    save(figure, path)


def one(name: str, n: int, seconds: float) -> Facts:
    """Rounds of one algorithm for about so long."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n * SAMPLES, INPUTS, generator=gen)
    y = torch.randint(0, 2, (n * SAMPLES,), generator=gen)
    places = torch.arange(n * SAMPLES).view(n, SAMPLES)
    index = {"train": places[:, :10], "test": places[:, 10:]}
    lists = {
        s: Ragged(p.reshape(-1), torch.full((n,), p.shape[1])) for s, p in index.items()
    }
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
    times = times[2:]  # the first ones make what the others use
    found = {"least": min(times), "median": statistics.median_high(times), "rss": rss}
    return {"algorithm": name, "n": n, **found, "bytes": size}


def written(folder: str) -> int:
    return sum(p.stat().st_size for p in Path(folder).iterdir())


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
