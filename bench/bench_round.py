"""One round, end to end, by algorithm family. Run `pytest bench/bench_round.py`; `pflcore bench --op rounds` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import rounds


@shared.grid(rounds)
def test_rounds(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, rounds, size, provider)
