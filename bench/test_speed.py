"""pflcore's time at every op and size, as pytest-benchmark keeps it.

The other providers' times are kept, too. Run `pytest bench -k sqdist`; `pflcore
bench` prints the same as a table.
"""

from typing import Any

import pytest
import torch

import bench
from bench import table

SIZES = bench.sizes(bench.OPS, False)
RATES: dict[tuple[str, str], float] = {}


def text_of(value: Any) -> str:
    """The name of an op or of a size, for tests."""
    return value if isinstance(value, str) else table.size_of(value)


@pytest.mark.parametrize(("name", "size"), SIZES, ids=text_of)
def test_speed(benchmark: Any, name: str, size: dict[str, Any]) -> None:
    problem = bench.suite(name).problem(size)
    if problem is None:
        pytest.skip("not enough free memory")
    first = next(iter(problem.providers.values()))
    with torch.set_grad_enabled(bool(size.get("backward"))):
        benchmark.pedantic(first, rounds=7, warmup_rounds=1)
    benchmark.group = f"{problem.op} {table.size_of(size)}"
    if benchmark.stats is not None:  # not with --benchmark-disable
        rows = table.measure(problem, {}, 0.2, 10.0, RATES)
        benchmark.extra_info["ms"] = {r.provider: r.ms for r in rows}
