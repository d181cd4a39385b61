"""Helpers of the tests of memory and of its exhaustion."""

import multiprocessing
import re
from pathlib import Path

import torch
from parts.modes import Mode

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 12.00 MiB is free."
)
KINDS = {
    "on a GPU": (torch.OutOfMemoryError(CUDA), "20.00 MiB"),
    "of cuBLAS": (
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
        "",
    ),
    "of a kernel": (RuntimeError("CUDA error: out of memory"), ""),
    "on a CPU": (
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 3072 bytes."
        ),
        "3072 bytes",
    ),
    "of Python": (MemoryError(), ""),
}


def fails(function, at, error):
    """A function that raises `error` at its call number `at`, once.

    Calls count from 1. All other calls are passed to `function`.
    """
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise error
        return function(*args, **kwargs)

    return call


STATUS = Path("/proc/self/status")


def resident(key="VmRSS"):
    """Bytes of memory that this process has."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", STATUS.read_text())[1])


def in_a_process(function, *args):
    """The result of `function` in a fresh process.

    A forked process would reuse memory that its parent's allocator keeps.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


class Making(Mode):
    """Calls `look` with every new result that operations inside allocate."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.is_mutable):
            self.look(out)
        return out
