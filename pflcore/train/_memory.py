"""Running out of memory, on a GPU or beside it: how it is recognised, what it is said
with, and what can be given back; and how much a training step keeps."""

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

OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is about memory. Not every library has an error class for it: torch
    on a CPU and cuBLAS raise RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in OUT_OF_MEMORY_TEXTS
    )


def failed_request(error: BaseException) -> str:
    """What the last, refused request was for, where the error says it: "20.00 MiB",
    or nothing."""
    size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    return size[1] if size else ""


def free_caches(device: str) -> None:
    """Frees what a failed round left: errors and the frames they hold form cycles, and
    allocators keep what they once had."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    # there only with glibc, whose heap keeps blocks of up to 32 MB
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)


def capacity(device: str) -> int | None:
    """Bytes that the device has, or that this process may use; None where it cannot
    be said."""
    with contextlib.suppress(Exception):
        if device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(device)[1])
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        # a container's
        for file in (
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        ):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(Path(file).read_text()))
        return min(limits)
    return None


def activation_bytes(
    net: Net,
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B, ...]
) -> int:
    """Bytes that a training step of one client keeps from its forward for its backward
    pass, on any device: what autograd saves, each memory once, without the weights and
    the samples."""
    row = net.w0.detach().clone().requires_grad_()
    fixed = net.fixed_tensors()
    apart = {t.untyped_storage()._cdata for t in (row, net.b0, x, y, *fixed)}
    kept: dict[int, int] = {}

    def record_saved(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in apart:
            kept[storage._cdata] = storage.nbytes()
        return saved

    seed = torch.zeros((), dtype=torch.int64, device=x.device)
    with torch.enable_grad(), forward_context(True, net.b0, seed, single_client=True):
        with saved_tensors_hooks(record_saved, lambda saved: saved):
            loss = net.loss(row, x, y)
        # until here autograd holds what it saved, so no address was used twice
        del loss
    return sum(kept.values())


class RunTooLarge(MemoryError):
    """Refused before it began; its text is the whole sentence."""


def memory_remedy(clients_per_block: int | None) -> str:
    """What to do about memory; `clients_per_block`: so many clients take a step at
    once."""
    fewer = "let fewer clients take part in a round (participation)"
    if clients_per_block is not None and clients_per_block > 1:
        fewer = (
            "compute fewer clients at once (clients_per_block, here "
            f"{clients_per_block}), {fewer}"
        )
    return fewer


def check_fits_memory(
    peak: int, device: str, clients_per_block: int | None = None
) -> None:
    """A run that cannot fit is not begun."""
    most = capacity(device)
    if most is not None and peak > most:
        raise RunTooLarge(
            f"memory: the run needs about {human_bytes(peak)} beside its data, and "
            f"{device} has {human_bytes(most)}; {memory_remedy(clients_per_block)}, or "
            "make the batches (batch_size), the federation or the model smaller."
        )


def out_of_memory_text(
    where: str,
    peak: int,
    request: str,
    device: str,
    clients_per_block: int | None = None,
) -> str:
    """One sentence: where memory ran out, what the run needs, what there is, what to
    do."""
    asked = f", when {request} more were asked for" if request else ""
    most = capacity(device)
    has = f", and {device} has {human_bytes(most)}" if most else ""
    return (
        f"Out of memory {where}{asked}: the run needs about {human_bytes(peak)} beside "
        f"its data{has}; {memory_remedy(clients_per_block)}, or make the batches "
        "(batch_size) or the model smaller."
    )
