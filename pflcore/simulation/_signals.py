"""The moments at which Ctrl-C and other signals may end a program."""

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


# While signals wait: the handler that each of them had before, and the arguments of a
# handler for each signal that came.
_handlers: dict[int, Any] = {}
_received: list[Any] = []


def _receive(*arguments: Any) -> None:
    """Keeps a signal for later. A second one comes at once."""
    _received.append(arguments)
    if len(_received) > 1:
        _handlers[arguments[0]](*arguments)


def _hold_back() -> None:
    """Lets signals wait from here on."""
    for number in ENDING_SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            _handlers[number] = handler
            signal.signal(number, _receive)


def _let_through() -> dict[int, Any]:
    """Lets signals come at once from here on; returns their handlers."""
    handlers = dict(_handlers)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _handlers.clear()
    return handlers


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Holds back a signal that would end the program during the block.

    The signal comes at the end of the block; a second one comes at once. A block inside
    of another changes nothing.
    """
    # Python calls handlers of signals in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _handlers:
        yield
        return
    try:
        _hold_back()
        yield
    finally:
        handlers = _let_through()
        received = _received.copy()
        _received.clear()
        if len(received) == 1:
            arguments = received[0]
            handlers[arguments[0]](*arguments)


@contextlib.contextmanager
def allow_signals() -> Iterator[None]:
    """Lets signals come at once in a part of a block that holds them back.

    One that waits already goes on waiting for the end of the block.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not _handlers:
        yield
        return
    try:
        _let_through()
        yield
    finally:
        _hold_back()
