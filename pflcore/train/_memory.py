"""Memory of a run: need, capacity, and texts of errors.

Symbols: B samples of a batch; x, y samples and labels.
"""

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
    """True for an error that says that memory ran out.

    The text decides where a library has no error class for it: torch on a CPU and
    cuBLAS raise RuntimeError.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def failed_request(error: BaseException) -> str:
    """The size of the request that failed, such as "20.00 MiB".

    The text is empty where the error names no size.
    """
    size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    return size[1] if size else ""


def free_caches(device: str) -> None:
    """Frees the memory that a failed round left.

    Errors and the frames that they hold form cycles, and allocators keep free blocks.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    # The heap of glibc keeps freed blocks of up to 32 MB. Other C libraries have no
    # `malloc_trim`.
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)


def capacity(device: str) -> int | None:
    """Bytes of memory that this process may use; None if unknown."""
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
    """Bytes that one client's step keeps between its forward and backward pass.

    They are the tensors that autograd saves, without the weights and the samples.
    Tensors that share memory count once. The number is the same on every device.
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
    context = forward_context(train=True, buffers=net.b0, seed=seed, single_client=True)
    with torch.enable_grad(), context:
        with saved_tensors_hooks(record_saved, return_saved):
            loss = net.loss(row, x, y)
        # Up to this line the loss holds what autograd saved, so no address was freed
        # and used again, which would count two tensors as one.
        del loss
    return sum(sizes.values())


class RunTooLarge(MemoryError):
    """A run does not fit into memory.

    The text is the whole sentence for the user.
    """


def memory_remedy(clients_per_block: int | None) -> str:
    """Clause that says how a run would need less memory.

    Args:
        clients_per_block: The number of clients that take a step at once, or None where
            the user cannot choose it.
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
    """Raises RunTooLarge where a run needs more memory than the device has.

    Args:
        peak: The bytes that the run needs.
        device: The device, as torch writes it.
        clients_per_block: As in `memory_remedy`.
    """
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
    """Sentence for the user, after memory ran out.

    Args:
        where: The time of the error, such as "in round 7".
        peak: The bytes that the run needs, as far as is known.
        request: The size that was asked for, as `failed_request` gives it.
        device: The device, as torch writes it.
        clients_per_block: As in `memory_remedy`.
    """
    asked = f", when {request} more were asked for" if request else ""
    available = capacity(device)
    has = f", and {device} has {human_bytes(available)}" if available else ""
    return (
        f"Out of memory {where}{asked}: the run needs about {human_bytes(peak)} beside "
        f"its data{has}; {memory_remedy(clients_per_block)}, or make the batches "
        "(batch_size) or the model smaller."
    )
