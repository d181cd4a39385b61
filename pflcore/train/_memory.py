"""Memory of a run: what a training step keeps, what a device has, and what to do when
memory runs out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pflcore.metrics import human_bytes
from pflcore.nn._context import forward_context

if TYPE_CHECKING:
    from pflcore.train._net import Net

CONTAINER_LIMIT_FILES = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    Not every library has an error class for it: torch on a CPU and cuBLAS raise
    RuntimeError.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in OUT_OF_MEMORY_TEXTS
    )


def failed_request(error: BaseException) -> str:
    """The size that was asked for last, such as "20.00 MiB", or "" if unknown."""
    size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    return size[1] if size else ""


def free_caches(device: str) -> None:
    """Frees the memory that a failed round left.

    Errors and the frames that they hold form cycles, and allocators keep free blocks.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    # glibc has it, whose heap keeps blocks of up to 32 MB; other libraries do not.
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)


def capacity(device: str) -> int | None:
    """Bytes that the device has, or that this process may use; None if unknown."""
    with contextlib.suppress(Exception):
        if device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(device)[1])
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        for file in CONTAINER_LIMIT_FILES:
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(Path(file).read_text()))
        return min(limits)
    return None


def activation_bytes(
    net: Net,
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B, ...]
) -> int:
    """Bytes that one client's training step keeps between forward and backward pass.

    They are what autograd saves, without the weights and the samples, on any device.
    Each memory counts once.
    """
    row = net.w0.detach().clone().requires_grad_()
    excluded_tensors = (row, net.b0, x, y, *net.fixed_tensors())
    excluded = {t.untyped_storage()._cdata for t in excluded_tensors}
    sizes: dict[int, int] = {}  # bytes by storage

    def record_saved(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in excluded:
            sizes[storage._cdata] = storage.nbytes()
        return saved

    def return_saved(saved: Tensor) -> Tensor:
        return saved

    seed = torch.zeros((), dtype=torch.int64, device=x.device)
    with torch.enable_grad(), forward_context(True, net.b0, seed, single_client=True):
        with saved_tensors_hooks(record_saved, return_saved):
            loss = net.loss(row, x, y)
        # Until here the loss holds what autograd saved, so that no address was used
        # twice.
        del loss
    return sum(sizes.values())


class RunTooLarge(MemoryError):
    """A run does not fit the memory; the text is the whole sentence."""


def memory_remedy(clients_per_block: int | None) -> str:
    """Clause on how to need less memory.

    `clients_per_block` is the number of clients that take a step at once.
    """
    remedy = "let fewer clients take part in a round (participation)"
    if clients_per_block is not None and clients_per_block > 1:
        remedy = (
            "compute fewer clients at once (clients_per_block, here "
            f"{clients_per_block}), {remedy}"
        )
    return remedy


def check_fits_memory(
    peak: int, device: str, clients_per_block: int | None = None
) -> None:
    """Raises RunTooLarge where a run needs more memory than there is."""
    available = capacity(device)
    if available is not None and peak > available:
        remedy = memory_remedy(clients_per_block)
        raise RunTooLarge(
            f"memory: the run needs about {human_bytes(peak)} beside its data, and "
            f"{device} has {human_bytes(available)}; {remedy}, or make the batches "
            "(batch_size), the federation or the model smaller."
        )


def out_of_memory_text(
    where: str,
    peak: int,
    request: str,
    device: str,
    clients_per_block: int | None = None,
) -> str:
    """Sentence on where memory ran out, what the run needs and what to do."""
    asked = f", when {request} more were asked for" if request else ""
    available = capacity(device)
    has = f", and {device} has {human_bytes(available)}" if available else ""
    return (
        f"Out of memory {where}{asked}: the run needs about {human_bytes(peak)} beside "
        f"its data{has}; {memory_remedy(clients_per_block)}, or make the batches "
        "(batch_size) or the model smaller."
    )
