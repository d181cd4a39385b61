"""Local training of linear models. Run `pytest bench/bench_linear.py`; `pflcore bench --op linear` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import linear


@shared.grid(linear)
def test_linear(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, linear, size, provider)
