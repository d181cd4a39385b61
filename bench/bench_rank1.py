"""The rank-1 linear layer. Run `pytest bench/bench_rank1.py`; `pflcore bench --op rank1` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import rank1


@shared.grid(rank1)
def test_rank1(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, rank1, size, provider)
