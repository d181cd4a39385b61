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
    """Holds back a signal that would end the program until the block is done.

    A second signal comes at once.
    """
    handlers: dict[int, Any] = {}
    received: list[Any] = []  # the arguments of a handler for each signal

    def receive(*arguments: Any) -> None:
        received.append(arguments)
        if len(received) > 1:
            handlers[arguments[0]](*arguments)

    if threading.current_thread() is threading.main_thread():  # no other gets signals
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
