"""A round's time, the process's own memory and the record's bytes, at 100 to 1,000,000 clients of
whom 100 take part in a round.

Each measurement has a process of its own: memory that one has had says nothing about the next.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ALGORITHMS = ("fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster")
COHORT, INPUTS, SAMPLES, EVALUATED = 100, 28, 15, 200
HEADINGS = (
    "| algorithm | clients | ms a round, least | ms a round, median | RssAnon, MB | bytes of "
    "record a round |"
)


def sizes(quick: bool) -> Iterator[tuple[str, int]]:
    """Algorithms and numbers of clients, up to 10,000 or a million."""
    yield from itertools.product(ALGORITHMS, [10**k for k in range(2, 5 if quick else 7)])


def run(quick: bool, seconds: float, plot: Path | None) -> list[dict[str, Any]]:
    """Prints a line for each; with `plot` a picture too."""
    print(HEADINGS, "|---|---:|---:|---:|---:|---:|", sep="\n", flush=True)
    rows = []
    for name, n in sizes(quick):
        command = [sys.executable, "-m", "bench.scale", name, str(n), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(
                f"| {name} | {n:,} | {(done.stderr.strip().splitlines() or ['killed'])[-1]} | | | "
                "|",
                flush=True,
            )
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"| {name} | {n:,} | {row['least']:.2f} | {row['median']:.2f} | {row['rss']:.0f} | "
            f"{row['bytes']:,} |",
            flush=True,
        )
    for name in dict.fromkeys(r["algorithm"] for r in rows):
        print(f"{name}: {growth([r for r in rows if r['algorithm'] == name])}", flush=True)
    if plot is not None:
        draw(rows, plot)
    return rows


def growth(rows: list[dict[str, Any]]) -> str:
    """How one algorithm's numbers grow with N, as exponents of N: slopes of the least-squares lines
    through their logarithms."""
    import numpy as np

    n, words = np.log([r["n"] for r in rows]), {"least": "time", "rss": "memory", "bytes": "record"}
    if len(rows) < 2:
        return "too few sizes to say"
    return ", ".join(
        f"{word} as N^{np.polyfit(n, np.log([r[key] for r in rows]), 1)[0]:.2f}"
        for key, word in words.items()
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time, memory and record against the number of clients, a line for each algorithm."""
    from pflcore.results.pictures import _figure, _save, _tidy

    figure, axes = _figure(13, 4, 3)
    for axis, (key, unit) in zip(
        axes,
        {"least": "ms a round", "rss": "RssAnon, MB", "bytes": "bytes of record a round"}.items(),
        strict=True,
    ):
        for name in dict.fromkeys(r["algorithm"] for r in rows):
            mine = [r for r in rows if r["algorithm"] == name]
            axis.loglog([r["n"] for r in mine], [r[key] for r in mine], marker="o", label=name)
        _tidy(axis, "", "clients", unit)
    axes[0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def one(name: str, n: int, seconds: float) -> dict[str, Any]:
    """Rounds of one algorithm for about so long."""
    import torch

    from pflcore.data.federation import Federation
    from pflcore.data.ragged import Ragged
    from pflcore.results.record import Record
    from pflcore.simulation import Evaluation, Simulation
    from pflcore.train import Training

    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n * SAMPLES, INPUTS, generator=gen)
    y = torch.randint(0, 2, (n * SAMPLES,), generator=gen)
    places = torch.arange(n * SAMPLES).view(n, SAMPLES)
    index = {"train": places[:, :10], "test": places[:, 10:]}
    lists = {s: Ragged(p.reshape(-1), torch.arange(n + 1) * p.shape[1]) for s, p in index.items()}
    look = Evaluation(every=10, clients=min(n, EVALUATED))
    options: dict[str, Any] = {"participation": min(1.0, COHORT / n), "evaluation": look}
    play = Simulation(
        name,
        lambda: torch.nn.Linear(INPUTS, 2),
        Federation(x, y, lists, 2),
        Training(),
        rounds=10**6,
        **options,
    )
    times: list[float] = []
    rounds, until = play.iterate(), time.perf_counter() + seconds
    with tempfile.TemporaryDirectory() as folder, Record(Path(folder) / "record.jsonl") as record:
        record.write({"header": play.header()})
        before = sum(p.stat().st_size for p in Path(folder).iterdir())
        while len(times) < 12 or time.perf_counter() < until:
            began = time.perf_counter()
            line = next(rounds)
            times.append(1e3 * (time.perf_counter() - began))
            record.write(line)
        size = (sum(p.stat().st_size for p in Path(folder).iterdir()) - before) // len(times)
    status = Path("/proc/self/status").read_text().splitlines()
    rss = next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3
    times = sorted(times[2:])  # the first ones make what the others use
    return {
        "algorithm": name,
        "n": n,
        "least": times[0],
        "median": times[len(times) // 2],
        "rss": rss,
        "bytes": size,
    }


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
