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


class Deferral:
    """Signals that wait until a block is done.

    Attributes:
        handlers: The handler that each signal had before the block.
        received: The arguments of a handler, for each signal that came in the block.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.received: list[Any] = []

    def receive(self, *arguments: Any) -> None:
        """Keeps a signal for later. A second one comes at once."""
        self.received.append(arguments)
        if len(self.received) > 1:
            self.handlers[arguments[0]](*arguments)

    def install(self) -> None:
        """Takes the place of the handlers that are there."""
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
        for number in self.handlers:
            signal.signal(number, self.receive)

    def uninstall(self) -> None:
        """Puts the handlers back."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Calls the handler of a signal that waits."""
        if len(self.received) == 1:
            arguments = self.received.pop()
            self.handlers[arguments[0]](*arguments)


_active: list[Deferral] = []  # of the main thread, the innermost last


@contextlib.contextmanager
def defer_signals(wanted: bool = True) -> Iterator[None]:
    """Holds back a signal that would end the program during the block.

    The signal comes at the end of the block; a second one comes at once.

    Args:
        wanted: False changes nothing.
    """
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield  # Python calls handlers of signals in the main thread only
        return
    deferral = Deferral()
    _active.append(deferral)
    try:
        deferral.install()
        yield
    finally:
        deferral.uninstall()
        _active.remove(deferral)
        deferral.deliver()


@contextlib.contextmanager
def allow_signals() -> Iterator[None]:
    """Lets signals come at once in a part of a block that holds them back."""
    if not _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferrals = list(reversed(_active))
    for deferral in deferrals:
        deferral.uninstall()
    try:
        for deferral in deferrals:
            deferral.deliver()
        yield
    finally:
        for deferral in reversed(deferrals):
            deferral.install()
