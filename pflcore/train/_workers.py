"""Threads that train clients on a CPU, without an influence on results."""

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
    """Threads that each let torch compute in one thread.

    If torch used two threads for one operation, the gradient of a convolution would
    have other bits than with one.

    Args:
        count: The number of threads; by default the cores that this process may use. On
            a GPU the calling thread does everything.
        device: The device of the run.

    Attributes:
        count: The number of threads that compute.
        calling_thread_only: True on a GPU.
    """

    def __init__(
        self, count: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        # A GPU works off one queue. Threads would only take turns at it, and each would
        # have to set its stream.
        self.calling_thread_only = torch.device(device).type != "cpu"
        if self.calling_thread_only:
            count = 1
        self.count = count or _available_cores()
        self._threads: ThreadPoolExecutor | None = None

    def map(self, f: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """The results of `f` for each of `items`, in their order.

        After an error no further item is begun, and the error is raised.
        """
        if self.calling_thread_only:
            return [f(i) for i in items]
        if min(len(items), self.count) == 1 and torch.get_num_threads() == 1:
            # Another thread would gain nothing, and the calling one computes the same
            # bits, since it is single-threaded, too.
            return [f(i) for i in items]
        if self._threads is None:
            self._threads = self._start()
        return list(self._threads.map(f, items))

    def _start(self) -> ThreadPoolExecutor:
        """Starts the threads, and sets up each of them once."""
        barrier = threading.Barrier(self.count)

        def set_up(_: int) -> None:
            # The first call in a thread takes over the number of the process, and would
            # undo a number that was set before it.
            torch.get_num_threads()
            torch.set_num_threads(1)
            # A thread waits here until all have begun, so none is set up twice.
            barrier.wait(60)

        threads = ThreadPoolExecutor(self.count, "pflcore")
        # `set_num_threads` also sets the number for new threads. `single_threaded`
        # restores that of the caller.
        with single_threaded():
            list(threads.map(set_up, range(self.count)))
        return threads


def _available_cores() -> int:
    """Number of cores that this process may use.

    Processes that torchrun started on one machine share its cores.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def single_threaded(wanted: bool = True) -> Iterator[None]:
    """Context in which torch computes in the calling thread alone.

    On a busy machine, waking other threads takes longer than small work. Unless
    `wanted`, nothing changes.
    """
    threads = torch.get_num_threads()
    if wanted and threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
