"""Timing of problems, and their table."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import pflcore
from bench.problem import Absent, Call, Facts, Measured, Problem, fact
from pflcore.results.table import markdown_table as _markdown

Timer = Callable[[Call, float], tuple[list[float], Any]]


@dataclass
class Row:
    """One provider at one problem."""

    op: str
    size: Facts
    provider: str
    ms: float | None = None  # median
    runs: int = 0
    gb_per_s: float | None = None  # bytes that must move, over the time taken
    gflop_per_s: float | None = None
    limit_ms: float | None = None  # the least time this machine needs
    of_limit: float | None = None  # that time, over the time taken
    error: float | None = None  # relative, against float64
    slower: float | None = None  # times pflcore's time; below 1: pflcore loses here
    note: str = ""
    published: str = ""  # a round's time as its authors say


# fields of a row: their headings, and how they are written
COLUMNS = """\
op | op |
size | size |
provider | provider |
ms | ms | .3f
gb_per_s | GB/s | .1f
gflop_per_s | GFLOP/s | .1f
limit_ms | limit, ms | .3f
of_limit | of limit | .3f
error | error | .0e
slower | times ours | .2f
published | as published |
note | |
"""


def markdown(rows: Iterable[str]) -> list[str]:
    """Rows, each as "one cell | another", as the lines of a Markdown table."""
    return _markdown([row.split(" | ") for row in rows])


class Table:
    """Rows, each as "one cell | another", that are printed as soon as they are known;
    `text()` is all of them as Markdown, under the sentences `about`."""

    def __init__(self, *head: str, about: Sequence[str] = ()) -> None:
        self.about, self.lines, self.width = [*about, ""], list[str](), [0] * 100
        print(*self.about, sep="\n")
        self.add(*head)
        print("|" + "---|" * len(self.width), flush=True)

    def add(self, *row: str) -> None:
        self.lines.append(" | ".join(row))
        cells = self.lines[-1].split(" | ")
        self.width = [*map(max, self.width, map(len, cells))]
        print(f"| {' | '.join(map(str.ljust, cells, self.width))} |", flush=True)

    def text(self) -> str:
        return "\n".join([*self.about, *markdown(self.lines), ""])


@dataclass
class Machine:
    """Where and with what it was measured."""

    cpu: str
    threads: int
    isa: str | None
    limits: dict[str, float]
    versions: dict[str, str]
    date: str
    load: float | None = None  # processes that wanted to run when it began

    @staticmethod
    def measure(megabytes: int = 512) -> Machine:
        threads, backend = torch.get_num_threads(), pflcore.backend()
        limits: dict[str, float] = {}
        with contextlib.suppress(ImportError):  # it was not built
            module = importlib.import_module("pflcore._C")
            limits |= module.limits(threads, megabytes << 20) if backend.kernels else {}
        return Machine(
            processor(),
            threads,
            backend.isa,
            limits,
            {"pflcore": pflcore.__version__, "torch": torch.__version__},
            time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        )

    def lines(self) -> list[str]:
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        isa = self.isa or "no kernels"
        out = [f"{self.cpu}, {self.threads} threads, {isa}; {versions}; {self.date}"]
        if self.limits:
            g = {k: v / 1e9 for k, v in self.limits.items()}
            out.append(
                f"Limits measured now: reading {g['read']:.1f} GB/s, writing past the "
                f"caches {g['write']:.1f} GB/s, multiply-add {g['fma']:.0f} GFLOP/s, "
                f"subtract and multiply-add {g['sub_fma']:.0f} GFLOP/s."
            )
        if self.load is not None and self.load > 0.5:
            out.append(
                f"The machine was busy (load {self.load:.1f}): times and limits are "
                "not its best."
            )
        return out


def processor() -> str:
    return fact("cpuinfo", "model name", platform.processor() or platform.machine())


def clock(call: Call) -> tuple[float, Any]:
    """Seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def timed(call: Call, budget: float) -> tuple[list[float], Any]:
    """Seconds of each run within about `budget` seconds, after one run that is not
    counted unless it alone takes that long.

    A call that gives back `Measured` seconds has timed itself.
    """
    first, result = clock(call)
    if isinstance(result, Measured):
        return list(result), result
    if first > budget:
        return [first], result
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < budget and len(seconds) < 1000):
        spent, result = clock(call)
        seconds.append(spent)
    return seconds, result


def measure(
    problem: Problem,
    limits: Mapping[str, float],
    budget: float,
    patience: float,
    rates: dict[tuple[str, str], float],
    timer: Timer | None = None,
) -> Iterator[Row]:
    """A row for each provider, pflcore's first. What would take longer than `patience`
    seconds is left out, with a note."""
    limit, ours = problem.limit(limits), None
    for provider, call in problem.providers.items():
        row = Row(problem.op, problem.size, provider)
        row.published = problem.published.get(provider, "")
        # by the rate that the provider reached at other sizes
        expected = problem.operations / rates.get((problem.op, provider), math.inf)
        try:
            if expected > patience:
                raise Absent(f"left out: about {expected:.0f} s")
            with torch.set_grad_enabled(bool(problem.size.get("backward"))):
                seconds, result = (timer or timed)(call, budget)
                row.error = problem.error(result)
                del result
        except (ImportError, MemoryError, RuntimeError) as error:
            # torch's own out-of-memory error is a RuntimeError
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            row.note = str(error).splitlines()[0][:120]
            yield row
            continue
        median, work = statistics.median(seconds), problem.costs.get(provider, 1.0)
        row.ms, row.runs = 1e3 * median, len(seconds)
        if problem.operations:
            rates[problem.op, provider] = problem.operations / median
            row.gb_per_s = (problem.reads + problem.writes) / median / 1e9
            row.gflop_per_s = problem.operations * work / median / 1e9
        if limit:
            row.limit_ms, row.of_limit = 1e3 * limit, limit * work / median
        if provider == "pflcore":
            ours = median
        elif ours:
            row.slower = median / ours
            if row.slower < 0.98 and not provider.startswith("pflcore"):
                row.note = "faster than pflcore"
        yield row


def play(
    problems: Iterable[Problem],
    machine: Machine,
    aside: Collection[str],
    budget: float,
    patience: float,
    about: Sequence[str] = (),
    timer: Timer | None = None,
) -> tuple[Facts, str]:
    """Prints a table of every problem's rows, each as soon as it is measured (see
    `measure`), without the columns `aside`. Gives the measurements and the table."""
    columns = [
        [cell.strip() for cell in line.split("|")] for line in COLUMNS.splitlines()
    ]
    columns = [c for c in columns if c[0] not in aside]
    table = Table(*(head for _, head, _ in columns), about=[*machine.lines(), *about])
    rates, rows = dict[tuple[str, str], float](), []
    for problem in problems:
        for row in measure(problem, machine.limits, budget, patience, rates, timer):
            rows.append(asdict(row))
            values = vars(row) | {"size": size_of(row.size)}
            cells = ((values[name], form) for name, _, form in columns)
            table.add(
                *("" if value is None else format(value, form) for value, form in cells)
            )
        del problem  # before the next one is made
    return {"machine": asdict(machine), "rows": rows}, table.text()


def size_of(size: Mapping[str, Any]) -> str:
    return " ".join(
        str(v) if isinstance(v, str) else f"{k}={v}" for k, v in size.items()
    )
