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


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Holds back a signal that would end the program during the block.

    The signal comes at the end of the block; a second one comes at once.
    """
    handlers: dict[int, Any] = {}
    received: list[Any] = []  # the arguments of a handler for each signal

    def receive(*arguments: Any) -> None:
        """Keeps the first signal, and passes on the second."""
        received.append(arguments)
        if len(received) > 1:
            handlers[arguments[0]](*arguments)

    # Python calls handlers of signals in the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
    try:
        for number in handlers:
            signal.signal(number, receive)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(received) == 1:
            arguments = received[0]
            handlers[arguments[0]](*arguments)
