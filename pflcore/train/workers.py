"""Threads that train clients. They share out work and never change a result."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
MOST_WORKERS = 1024
SMALL_RUN = 1 << 22  # weights of all clients; one thread passes through them in a few milliseconds


def cores() -> int:
    """How many of the machine's cores this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


class Workers:
    """Threads of one intra-op thread each: a convolution's gradient differs between one and two."""

    def __init__(self, count: int | None = None) -> None:
        if count is not None and not 1 <= count <= MOST_WORKERS:
            raise ValueError(f"workers: expected 1 to {MOST_WORKERS} threads, or None for one per core, got {count}.")
        self.count = count or cores()
        self._threads: ThreadPoolExecutor | None = None

    def map(self, f: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """`[f(i) for i in items]`; after an error nothing more is begun."""
        if len(items) == 1 and torch.get_num_threads() == 1:  # nothing to gain from a thread
            return [f(items[0])]
        if self._threads is None:
            self._threads = self._start()
        stop = threading.Event()

        def run(item: Any) -> T:
            if stop.is_set():
                raise InterruptedError
            return f(item)

        futures = [self._threads.submit(run, i) for i in items]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C, too
            stop.set()
            raise

    def _start(self) -> ThreadPoolExecutor:
        barrier = threading.Barrier(self.count + 1)

        def one_each() -> None:
            torch.get_num_threads()  # a thread's first look sets its number to the process's
            torch.set_num_threads(1)
            barrier.wait()

        threads = ThreadPoolExecutor(self.count, "pflcore")
        with one_thread():  # set_num_threads is also what new threads start with: put it back
            for _ in range(self.count):
                threads.submit(one_each)
            barrier.wait(60)
        return threads


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """The calling thread works alone inside: on a busy machine, waking others takes longer."""
    before = torch.get_num_threads()
    if wanted and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def few_threads(f: Callable[P, T]) -> Callable[P, T]:
    """For a function of (algorithm, state, setting, ...): with small models the calling thread works
    alone. Some of torch's ops wake its threads whatever the size of their input: microseconds on a
    quiet machine, 25 ms on a busy one, where a round of a linear model takes 2."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        setting: Any = kwargs["setting"] if "setting" in kwargs else args[2]
        others = (*args[3:], *kwargs.values())
        ids = next((a for a in others if isinstance(a, Tensor)), None)  # of the clients, if not all
        count = setting.data.n if ids is None else len(ids)
        with one_thread(count * setting.net.size < SMALL_RUN):
            return f(*args, **kwargs)

    return wrapped


def onto(t: Tensor, device: torch.device) -> Tensor:
    """`t`, a small table, on `device`; to a GPU through pinned memory, so that nobody waits."""
    if t.device == device:
        return t
    pinned = device.type == "cuda" and t.device.type == "cpu"
    return t.pin_memory().to(device, non_blocking=True) if pinned else t.to(device)
