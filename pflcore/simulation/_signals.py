"""Ctrl-C, and the signals that a command answers as it does: when they may come."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDING_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
]


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """What would end the program comes when all within is done; a second signal
    comes at once."""
    kept: dict[int, Any] = {}
    came: list[Any] = []  # what handlers are given

    def wait(*given: Any) -> None:
        came.append(given)
        if len(came) > 1:
            kept[given[0]](*given)

    if threading.current_thread() is threading.main_thread():  # no other gets signals
        kept = {
            number: handler
            for number in ENDING_SIGNALS
            if callable(handler := signal.getsignal(number))
        }
    try:
        for number in kept:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if len(came) == 1:
            kept[came[0][0]](*came[0])
