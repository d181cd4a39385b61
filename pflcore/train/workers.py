"""The threads that train clients, and what they keep over a run."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.data.federation import Federation
from pflcore.data.ragged import Ragged
from pflcore.train.chain import Chain
from pflcore.train.steps import Plan, make_plan
from pflcore.train.training import Training

P = ParamSpec("P")
T = TypeVar("T")
MOST_WORKERS = 1024


def cores() -> int:
    """How many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Engine:
    """Worker threads, each with one intra-op thread: a convolution's gradient differs bitwise between one and two."""

    def __init__(self, name: str = "threads", workers: int | None = None, chain: Chain | None = None) -> None:
        if workers is not None and not 1 <= workers <= MOST_WORKERS:
            raise ValueError(f"workers: expected 1 to {MOST_WORKERS} threads, or None for one per core, got {workers}.")
        self.name = name
        self.chain = chain  # what the kernels train; the rest is this engine's
        self.workers = workers or cores()
        self._threads: ThreadPoolExecutor | None = None
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._lists: dict[Any, tuple[Federation, Ragged, Tensor]] = {}
        self._counts: tuple[Federation, Tensor] | None = None

    def map(self, f: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """`[f(i) for i in items]` on the workers; the caller's thread setting is untouched."""
        if len(items) == 1 and torch.get_num_threads() == 1:  # nothing to gain from a worker
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
        except BaseException:
            stop.set()
            raise

    def counts(self, data: Federation, ids: Tensor) -> Tensor:
        """Training samples of these clients by class, [S, C], on the CPU; on a GPU all clients' are counted, but once a run."""
        if data.device.type == "cpu":
            return data.counts("train", ids)
        if self._counts is None or self._counts[0] is not data:
            self._counts = data, data.counts("train")
        return self._counts[1][ids]

    def plan(self, key: tuple[Any, ...], training: Training) -> Plan:
        """The steps of clients of these sizes, made once a run."""
        if key not in self._plans:
            if len(self._plans) > 4096:  # cohorts that are never the same twice
                self._plans.clear()
            self._plans[key] = make_plan(training, *key)
        return self._plans[key]

    def lists(self, data: Federation, split: str, ids: NDArray[np.int64]) -> tuple[Ragged, Tensor]:
        """The clients' samples of a split, and whose (0 to S - 1) each of them is: int64 [n], on the CPU."""
        key = id(data), split, ids.tobytes()
        if key not in self._lists:
            if len(self._lists) >= 4:
                self._lists.clear()
            lists = data.lists(split)
            own = lists if len(ids) == data.n and bool((ids[1:] > ids[:-1]).all()) else lists.take(torch.from_numpy(ids))
            self._lists[key] = data, own, torch.arange(len(own)).repeat_interleave(own.size)  # holds `data`, and so its id
        return self._lists[key][1:]

    def _start(self) -> ThreadPoolExecutor:
        before = torch.get_num_threads()
        barrier = threading.Barrier(self.workers + 1)

        def one_thread() -> None:
            torch.get_num_threads()  # a thread's first look sets its number to the process's: later it would undo the next line
            torch.set_num_threads(1)
            barrier.wait()

        threads = ThreadPoolExecutor(self.workers, "pflcore")
        try:
            for _ in range(self.workers):
                threads.submit(one_thread)
            barrier.wait(60)
        finally:
            torch.set_num_threads(before)  # set_num_threads is also what *new* threads start with
        return threads

    def pieces(self, count: int, width: int, samples: int = 0, most: int = 16) -> int:
        """Into how many pieces a cohort of `count` rows of `width` is cut; never a matter of the number of workers.

        `samples`: how many of them go through the kernels of a chain, where a call costs little and only the arithmetic counts; `most` is
        for work that is Python's at every step, which each piece does for itself and one at a time.
        """
        if self.name == "threads" and not samples:
            return count
        parts = 16 if samples * width >= 1 << 28 else 4 if samples * width >= 1 << 22 else 2 if count * width >= 1 << 18 else 1
        return max(1, min(count, parts, most))


SMALL_RUN = 1 << 22  # weights of all clients that are looked at together: one thread passes through them in a few milliseconds


def few_threads(f: Callable[P, T]) -> Callable[P, T]:
    """For a function of (algorithm, state, setting, ...): with small models the calling thread works alone.

    Some of torch's ops (indexing by a tensor, sqrt) wake its threads whatever the size of their input: microseconds on a quiet
    machine, 25 ms on a busy one, where a round of a linear model takes 2.
    """

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        setting: Any = kwargs["setting"] if "setting" in kwargs else args[2]
        ids = next((a for a in (*args[3:], *kwargs.values()) if isinstance(a, Tensor)), None)  # of the clients, where not all
        if (setting.data.n if ids is None else len(ids)) * setting.net.size >= SMALL_RUN:
            return f(*args, **kwargs)
        with one_thread():
            return f(*args, **kwargs)

    return wrapped


@contextmanager
def one_thread() -> Iterator[None]:
    """The calling thread works alone inside."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def onto(t: Tensor, device: torch.device) -> Tensor:
    """`t`, a small table, on `device`: to a GPU through pinned memory, so that the host does not wait for what runs there."""
    if t.device == device:
        return t
    pinned = device.type == "cuda" and t.device.type == "cpu"
    return t.pin_memory().to(device, non_blocking=True) if pinned else t.to(device)
