"""Errors that say that memory ran out."""

from __future__ import annotations

import torch

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
