"""Convolutions of few channels. Run `pytest bench/bench_conv.py`; `pflcore bench --op conv` prints the same as a table."""

from typing import Any

import shared

from pflcore.bench import conv


@shared.grid(conv)
def test_conv(benchmark: Any, size: Any, provider: str) -> None:
    shared.play(benchmark, conv, size, provider)
