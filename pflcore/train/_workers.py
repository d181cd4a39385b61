"""Threads that train clients on a CPU. They share out work and never change a
result."""

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
    """Threads of one intra-op thread each: a convolution's gradient differs between
    one and two."""

    def __init__(
        self, count: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        # A GPU has one queue: threads would take turns at it, each with a stream of its
        # own to set.
        self.calling_thread_only = torch.device(device).type != "cpu"
        if self.calling_thread_only:
            count = 1
        bound = hasattr(os, "sched_getaffinity")  # to some of the machine's cores
        self.count = count or (
            len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
        )
        self._threads: ThreadPoolExecutor | None = None

    def map(self, f: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """`[f(i) for i in items]`; after an error nothing more is begun."""
        if self.calling_thread_only:
            return [f(i) for i in items]
        # nothing to gain from a thread
        if len(items) == 1 and torch.get_num_threads() == 1:
            return [f(items[0])]
        if self._threads is None:
            self._threads = self._start()
        return list(self._threads.map(f, items))

    def _start(self) -> ThreadPoolExecutor:
        barrier = threading.Barrier(self.count)

        def one_each(_: int) -> None:
            # a thread's first look sets its number to the process's
            torch.get_num_threads()
            torch.set_num_threads(1)
            barrier.wait(60)

        threads = ThreadPoolExecutor(self.count, "pflcore")
        # set_num_threads is also what new threads start with: put it back
        with single_threaded():
            list(threads.map(one_each, range(self.count)))
        return threads


@contextmanager
def single_threaded(wanted: bool = True) -> Iterator[None]:
    """The calling thread works alone inside: on a busy machine, waking others takes
    longer."""
    before = torch.get_num_threads()
    if wanted and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
