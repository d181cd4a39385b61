"""Squared distances of client models. Run `pytest bench/bench_sqdist.py`; `pflcore bench --op sqdist` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import sqdist


@shared.grid(sqdist)
def test_sqdist(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, sqdist, size, provider)
