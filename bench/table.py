"""Timing of problems, and their table.

A row of a table is a text such as "one cell | another".
"""

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
from pflcore.lab.results.table import escape_cell, markdown_table

Timer = Callable[[Call, float], tuple[list[float], Any]]


@dataclass
class Row:
    """The measurements of one provider at one problem.

    Attributes:
        op: the op's name
        size: the sizes by name
        provider: the provider's name
        ms: the median time of a call, in milliseconds
        runs: calls that were timed
        gb_per_s: bytes that must move, over the time taken
        gflop_per_s: additions and multiplications, over the time taken
        limit_ms: the least time that this machine needs
        of_limit: that least time, over the time taken
        error: the relative error against float64
        slower: the time over pflcore's time; below 1 pflcore is slower
        note: the reason why there are no times, or a remark
        published: a round's time as its authors say
    """

    op: str
    size: Facts
    provider: str
    ms: float | None = None
    runs: int = 0
    gb_per_s: float | None = None
    gflop_per_s: float | None = None
    limit_ms: float | None = None
    of_limit: float | None = None
    error: float | None = None
    slower: float | None = None
    note: str = ""
    published: str = ""


# Fields of a row, their headings, and the formats of their cells.
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
    """Lines of a Markdown table with these rows."""
    return markdown_table([row.split(" | ") for row in rows])


class Table:
    """A table whose rows are printed as soon as they are known.

    Args:
        head: the headings
        about: sentences that are printed above the table
    """

    def __init__(self, *head: str, about: Sequence[str] = ()) -> None:
        self.about = [*about, ""]
        self.rows = list[list[str]]()
        self.width = [0] * 100
        print(*self.about, sep="\n")
        self.add(*head)
        print("|" + "---|" * len(self.width), flush=True)

    def add(self, *row: str) -> None:
        """Prints a row: its cells, or one text such as "one cell | another".

        Columns are as wide as their widest cell that was printed before.
        """
        cells = [*row] if len(row) > 1 else row[0].split(" | ")
        self.rows.append(cells)
        cells = [escape_cell(cell) for cell in cells]
        self.width = [*map(max, self.width, map(len, cells))]
        print(f"| {' | '.join(map(str.ljust, cells, self.width))} |", flush=True)

    def text(self) -> str:
        """The sentences, and all rows as a Markdown table."""
        return "\n".join([*self.about, *markdown_table(self.rows), ""])


@dataclass
class Machine:
    """The machine and the software that times were measured with.

    Attributes:
        cpu: the processor's name, or the card's
        threads: torch's threads
        isa: the kernels' instruction set; None without kernels
        limits: bytes read and written, and operations done, in a second
        versions: versions of pflcore and torch
        date: the time of the measurement, UTC
        load: processes that wanted to run when it began; None where it is not known
    """

    cpu: str
    threads: int
    isa: str | None
    limits: dict[str, float]
    versions: dict[str, str]
    date: str
    load: float | None = None

    @staticmethod
    def measure(megabytes: int = 512) -> Machine:
        """The present machine; its limits are measured on `megabytes` of memory."""
        threads = torch.get_num_threads()
        backend = pflcore.backend()
        limits: dict[str, float] = {}
        with contextlib.suppress(ImportError):  # The module was not built.
            module = importlib.import_module("pflcore._C")
            if backend.kernels:
                limits = module.limits(threads, megabytes << 20)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return Machine(
            cpu=processor(),
            threads=threads,
            isa=backend.isa,
            limits=limits,
            versions={"pflcore": pflcore.__version__, "torch": torch.__version__},
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            load=load,
        )

    def lines(self) -> list[str]:
        """Sentences about the machine, for the head of a table."""
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
    """The processor's name."""
    return fact("cpuinfo", "model name", platform.processor() or platform.machine())


def clock(call: Call) -> tuple[float, Any]:
    """Seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def timed(call: Call, budget: float) -> tuple[list[float], Any]:
    """Seconds of each run, and the last result.

    The runs take about `budget` seconds together. A first run is not counted, unless it
    alone takes that long. A call that returns `Measured` seconds has timed itself.
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
    """Rows of all providers, pflcore's first.

    A provider that would take longer than `patience` seconds is left out, with a note.

    Args:
        budget: seconds for each provider
        rates: operations a second that each op's providers reached at other sizes; the
            problem's own rates are added
        timer: the function that times a call; None: `timed`
    """
    limit = problem.limit(limits)
    ours = None
    for provider, call in problem.providers.items():
        row = Row(problem.op, problem.size, provider)
        row.published = problem.published.get(provider, "")
        expected = problem.operations / rates.get((problem.op, provider), math.inf)
        try:
            if expected > patience:
                raise Absent(f"left out: about {expected:.0f} s")
            seconds = _run_provider(problem, row, call, budget, timer or timed)
        except (ImportError, MemoryError, RuntimeError) as error:
            # Torch's own out-of-memory error is a RuntimeError.
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            row.note = str(error).splitlines()[0][:120]
            yield row
            continue
        median = statistics.median(seconds)
        row.runs = len(seconds)
        _fill_times(row, problem, median, limit)
        if problem.operations:
            rates[problem.op, provider] = problem.operations / median
        if provider == "pflcore":
            ours = median
        elif ours:
            row.slower = median / ours
            if row.slower < 0.98 and not provider.startswith("pflcore"):
                row.note = "faster than pflcore"
        yield row


def _run_provider(
    problem: Problem, row: Row, call: Call, budget: float, timer: Timer
) -> list[float]:
    """Seconds of a provider's runs; its error goes into the row.

    The result is freed before the next provider runs.
    """
    with torch.set_grad_enabled(bool(problem.size.get("backward"))):
        seconds, result = timer(call, budget)
        row.error = problem.error(result)
    return seconds


def _fill_times(row: Row, problem: Problem, median: float, limit: float | None) -> None:
    """Fills in the row's time, rates, and part of the limit."""
    work = problem.costs.get(row.provider, 1.0)
    row.ms = 1e3 * median
    if problem.operations:
        row.gb_per_s = (problem.reads + problem.writes) / median / 1e9
        row.gflop_per_s = problem.operations * work / median / 1e9
    if limit:
        row.limit_ms = 1e3 * limit
        row.of_limit = limit * work / median


def play(
    problems: Iterable[Problem],
    machine: Machine,
    aside: Collection[str],
    budget: float,
    patience: float,
    about: Sequence[str] = (),
    timer: Timer | None = None,
) -> tuple[Facts, str]:
    """Prints a table of all rows; returns measurements and table.

    Each row is printed as soon as it is measured, see `measure`.

    Args:
        aside: the names of columns that are left out
        about: sentences above the table
    """
    columns = []
    for line in COLUMNS.splitlines():
        name, head, form = map(str.strip, line.split("|"))
        if name not in aside:
            columns.append((name, head, form))
    table = Table(*(head for _, head, _ in columns), about=[*machine.lines(), *about])
    rates = dict[tuple[str, str], float]()
    rows = []
    for problem in problems:
        for row in measure(problem, machine.limits, budget, patience, rates, timer):
            rows.append(asdict(row))
            values = vars(row) | {"size": size_of(row.size)}
            cells = []
            for name, _, form in columns:
                value = values[name]
                cell = "" if value is None else format(value, form)
                cells.append(cell)
            table.add(*cells)
        del problem  # Its memory is free before the next one is made.
    return {"machine": asdict(machine), "rows": rows}, table.text()


def size_of(size: Mapping[str, Any]) -> str:
    """A size as text, such as "lenet5 N=20"."""
    words = []
    for name, value in size.items():
        word = value if isinstance(value, str) else f"{name}={value}"
        words.append(word)
    return " ".join(words)
