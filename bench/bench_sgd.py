"""The fused step of local training. Run `pytest bench/bench_sgd.py`; `pflcore bench --op sgd` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import sgd


@shared.grid(sgd)
def test_sgd(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, sgd, size, provider)
