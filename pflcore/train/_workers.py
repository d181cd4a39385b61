"""Threads that train clients on a CPU; results do not depend on their number."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Workers:
    """Threads of one intra-op thread each.

    With two of them the bits of a convolution's gradient are others than with one.
    """

    def __init__(
        self, count: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        # A GPU has one queue. Threads would take turns at it, and each would have to
        # set its stream.
        self.calling_thread_only = torch.device(device).type != "cpu"
        if self.calling_thread_only:
            count = 1
        self.count = count or _available_cores()
        self._threads: ThreadPoolExecutor | None = None

    def map(self, f: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """`[f(i) for i in items]`; after an error nothing more is begun."""
        if self.calling_thread_only:
            return [f(i) for i in items]
        if len(items) == 1 and torch.get_num_threads() == 1:
            return [f(items[0])]  # another thread would gain nothing
        if self._threads is None:
            self._threads = self._start()
        return list(self._threads.map(f, items))

    def _start(self) -> ThreadPoolExecutor:
        barrier = threading.Barrier(self.count)

        def set_up(_: int) -> None:
            # The first call in a thread takes over the number of the process.
            torch.get_num_threads()
            torch.set_num_threads(1)
            barrier.wait(60)  # so that no thread is set up twice

        threads = ThreadPoolExecutor(self.count, "pflcore")
        # `set_num_threads` also sets the number for new threads. `single_threaded`
        # restores that of the caller.
        with single_threaded():
            list(threads.map(set_up, range(self.count)))
        return threads


def _available_cores() -> int:
    """The cores that this process may use.

    Processes that torchrun started on one machine share its cores.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def single_threaded(wanted: bool = True) -> Iterator[None]:
    """Lets torch use the calling thread alone inside.

    On a busy machine, waking other threads takes longer than small work.
    """
    threads = torch.get_num_threads()
    if wanted and threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
