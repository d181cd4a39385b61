"""Mixing client models. Run `pytest bench/bench_aggregate.py`; `pflcore bench --op aggregate` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import aggregate


@shared.grid(aggregate)
def test_aggregate(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, aggregate, size, provider)
