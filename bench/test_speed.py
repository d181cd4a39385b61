"""Every op, size and provider as pytest-benchmark sees them: `pytest bench -k sqdist`; `pflcore
bench` prints the same as a table."""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any

import pytest
import torch

import bench
from bench import table
from bench.problem import Absent, Problem, seconds_of

PATIENCE = 10.0  # seconds: a call that would take longer is skipped
# operations a second, by op and provider: tells how long a call will take
RATES: dict[tuple[str, str], float] = {}


@functools.lru_cache(1)
def machine() -> table.Machine:
    return table.Machine.measure()


@functools.lru_cache(1)
def _problem(module: ModuleType, size: tuple[tuple[str, Any], ...]) -> Problem | None:
    _problem.cache_clear()  # the last problem's memory is free before this one's is taken
    return module.problem(dict(size))  # type: ignore[no-any-return]


def play(
    benchmark: Any, module: ModuleType, size: tuple[tuple[str, Any], ...], provider: str
) -> None:
    problem = _problem(module, size)
    if problem is None:
        pytest.skip("not enough free memory")
    if provider not in problem.providers:
        pytest.skip(f"{provider} has no such form")
    if (expected := seconds_of(problem, provider, RATES)) > PATIENCE:
        pytest.skip(f"would take about {expected:.0f} s")
    call = problem.providers[provider]
    with torch.enable_grad() if problem.size.get("backward") else torch.no_grad():
        try:
            began = time.perf_counter()
            result = call()  # warm, and whether it is there at all
            iterations = max(1, int(1e-3 / (time.perf_counter() - began)))
        except Absent as why:
            pytest.skip(str(why))
        benchmark.group = f"{problem.op} " + " ".join(f"{k}={v}" for k, v in size)
        benchmark.extra_info["error"] = problem.error(result)
        del result
        benchmark.pedantic(call, rounds=7, iterations=iterations, warmup_rounds=0)
    if benchmark.stats is None:  # --benchmark-disable
        return
    median = benchmark.stats.stats.median
    if problem.operations:
        RATES[problem.op, provider] = problem.operations / median
        benchmark.extra_info["gb_per_s"] = (problem.reads + problem.writes) / median / 1e9
        benchmark.extra_info["gflop_per_s"] = (
            problem.operations * problem.costs.get(provider, 1.0) / median / 1e9
        )
    if limit := problem.limit(machine().limits):
        benchmark.extra_info["of_limit"] = limit * problem.costs.get(provider, 1.0) / median


CASES = [
    (name, tuple(size.items()), provider)
    for name in bench.OPS
    for size in bench.suite(name).sizes(False)
    for provider in bench.suite(name).PROVIDERS
]


@pytest.mark.parametrize(
    ("name", "size", "provider"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else " ".join(f"{k}={x}" for k, x in v),
)
def test_speed(benchmark: Any, name: str, size: tuple[tuple[str, Any], ...], provider: str) -> None:
    play(benchmark, bench.suite(name), size, provider)
