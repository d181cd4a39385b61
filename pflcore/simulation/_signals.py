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


class _Waiting:
    """The signals that wait for the end of a block.

    Attributes:
        handlers: The handler that each of them had before the block.
        received: The arguments of the handler of a signal that waits; at most one.
        are_allowed: True in a part of the block in which signals come at once.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.received: list[Any] = []
        self.are_allowed = False
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
                signal.signal(number, self.receive)

    def receive(self, *arguments: Any) -> None:
        """Keeps a signal for later. A second one comes at once, in place of both."""
        if self.are_allowed or self.received:
            self.received.clear()
            self.handlers[arguments[0]](*arguments)
        else:
            self.received.append(arguments)

    @contextlib.contextmanager
    def allowing(self, *, wanted: bool) -> Iterator[None]:
        """A part of the block in which signals come at once, or wait again."""
        before = self.are_allowed
        self.are_allowed = wanted
        try:
            yield
        finally:
            self.are_allowed = before

    def end(self) -> None:
        """Gives the handlers back, and lets the signal come that waited."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        for arguments in self.received:
            self.handlers[arguments[0]](*arguments)


# Signals have one handler in a program. So there is at most one entry.
_waiting: list[_Waiting] = []


def _is_main_thread() -> bool:
    """True in the thread in which Python calls handlers of signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Holds back a signal that would end the program during the block.

    The signal comes at the end of the block, or of the outer one around it; a second
    one comes at once.
    """
    if not _is_main_thread():
        yield
    elif _waiting:
        with _waiting[0].allowing(wanted=False):
            yield
    else:
        signals = _Waiting()
        try:
            _waiting.append(signals)
            yield
        finally:
            _waiting.clear()
            signals.end()


@contextlib.contextmanager
def allow_signals() -> Iterator[None]:
    """Lets signals come at once in a part of a block that holds them back.

    One that waits already goes on waiting for the end of the block.
    """
    if _waiting and _is_main_thread():
        with _waiting[0].allowing(wanted=True):
            yield
    else:
        yield
