"""Timing of problems, and their table."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import pflcore
from bench.problem import Absent, Measured, Problem, seconds_of


def measure_limits(threads: int, size: int) -> dict[str, float]:
    """What this machine can do at most, by `pflcore._C`; nothing where that was not built."""
    try:
        return dict(importlib.import_module("pflcore._C").limits(threads, size))
    except ImportError:
        return {}


@dataclass
class Row:
    """One provider at one problem."""

    op: str
    size: dict[str, Any]
    provider: str
    ms: float | None = None  # median
    runs: int = 0
    gb_per_s: float | None = None  # bytes that must move, over the time taken
    gflop_per_s: float | None = None
    of_limit: float | None = None  # the least time this machine needs, over the time taken
    error: float | None = None  # relative, against float64
    slower: float | None = None  # times pflcore's time; below 1: pflcore loses here
    note: str = ""
    published: str | None = None  # a round's time as its authors say


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
    system: str = field(default_factory=platform.platform)

    @staticmethod
    def measure(megabytes: int = 512) -> Machine:
        threads, backend = torch.get_num_threads(), pflcore.backend()
        limits = measure_limits(threads, megabytes << 20) if backend.kernels else {}
        return Machine(
            cpu=processor(),
            threads=threads,
            isa=backend.isa,
            limits=limits,
            versions={
                "pflcore": pflcore.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        )

    def lines(self) -> list[str]:
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        out = [
            f"{self.cpu}, {self.threads} threads, {self.isa or 'no kernels'}; {versions}; "
            f"{self.date}"
        ]
        if self.limits:
            g = {k: v / 1e9 for k, v in self.limits.items()}
            out.append(
                f"Limits measured now: reading {g['read']:.1f} GB/s, writing past the caches "
                f"{g['write']:.1f} GB/s, "
                f"multiply-add {g['fma']:.0f} GFLOP/s, subtract and multiply-add "
                f"{g['sub_fma']:.0f} GFLOP/s."
            )
        if self.load is not None and self.load > 0.5:
            out.append(
                f"The machine was busy (load {self.load:.1f}): times and limits are not its best."
            )
        return out


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def timed(call: Callable[[], Any], budget: float) -> tuple[list[float], Any]:
    """Seconds of each run within about `budget` seconds, after one run that is not counted unless
    it alone takes that long.

    A call that gives back `Measured` seconds has timed itself.
    """
    began = time.perf_counter()
    result = call()
    if isinstance(result, Measured):
        return list(result), result
    first = time.perf_counter() - began
    if first > budget:
        return [first], result
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < budget and len(seconds) < 1000):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    return seconds, result


def measure(
    problem: Problem,
    machine: Machine,
    budget: float,
    patience: float,
    rates: dict[tuple[str, str], float],
) -> Iterator[Row]:
    """A row for each provider, pflcore's first. What would take longer than `patience` seconds is
    left out, with a note."""
    limit = problem.limit(machine.limits)
    ours = None
    for provider, call in problem.providers.items():
        row = Row(problem.op, dict(problem.size), provider)
        expected = seconds_of(problem, provider, rates)
        if expected > patience:
            row.note = f"left out: about {expected:.0f} s"
            yield row
            continue
        try:
            with torch.no_grad() if not problem.size.get("backward") else torch.enable_grad():
                seconds, result = timed(call, budget)
                row.error = problem.error(result)
                del result
        except (Absent, MemoryError, RuntimeError) as error:
            # torch's own out-of-memory error is a RuntimeError
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            row.note = str(error).splitlines()[0][:120]
            yield row
            continue
        median = statistics.median(seconds)
        row.ms, row.runs = 1e3 * median, len(seconds)
        if problem.operations:
            rates[problem.op, provider] = problem.operations / median
            row.gb_per_s = (problem.reads + problem.writes) / median / 1e9
            row.gflop_per_s = problem.operations * problem.costs.get(provider, 1.0) / median / 1e9
        if limit:
            row.of_limit = limit * problem.costs.get(provider, 1.0) / median
        if provider == "pflcore":
            ours = median
        elif ours:
            row.slower = median / ours
            if row.slower < 0.98 and not provider.startswith("pflcore"):
                row.note = "faster than pflcore"
        yield row


HEADINGS = (
    "op",
    "size",
    "provider",
    "ms",
    "GB/s",
    "GFLOP/s",
    "of limit",
    "error",
    "times ours",
    "",
)


def size_of(size: Mapping[str, Any]) -> str:
    return " ".join(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in size.items())


def cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, pattern: str) -> str:
        return "" if value is None else format(value, pattern)

    ms = "" if row.ms is None else f"{row.ms:.3f}" if row.ms < 10 else f"{row.ms:.1f}"
    return (
        row.op,
        size_of(row.size),
        row.provider,
        ms,
        number(row.gb_per_s, ".1f"),
        number(row.gflop_per_s, ".1f"),
        number(row.of_limit, ".2f"),
        number(row.error, ".0e"),
        number(row.slower, ".2f"),
        row.note,
    )


def line(
    texts: tuple[str, ...], widths: tuple[int, ...] = (14, 38, 22, 9, 7, 8, 8, 6, 10, 0)
) -> str:
    return " ".join(
        t.ljust(w) if i < 3 or not w else t.rjust(w)
        for i, (t, w) in enumerate(zip(texts, widths, strict=True))
    ).rstrip()


def markdown(machine: Machine, rows: list[Row]) -> str:
    """The same as a Markdown table."""
    out = [*machine.lines(), "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    out += ["| " + " | ".join(cells(r)) + " |" for r in rows]
    return "\n".join(out) + "\n"


def as_json(machine: Machine, rows: list[Row]) -> dict[str, Any]:
    return {"machine": asdict(machine), "rows": [asdict(r) for r in rows]}
