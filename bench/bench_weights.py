"""Mixing weights from distances. Run `pytest bench/bench_weights.py`; `pflcore bench --op weights` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import weights


@shared.grid(weights)
def test_weights(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, weights, size, provider)
