"""Flags of torch that decide what a GPU computes.

One group decides whether cuDNN repeats its bits, the other whether float32 products are
rounded to TF32. The flags belong to the process. So a run sets them while it computes,
and restores the former values afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Flag = tuple[Any, str, Any]  # the object that has the flag, the flag's name, a value
EXACT_PRECISIONS = ("none", "ieee")  # values of `fp32_precision` that do not round


class ScopedFlags:
    """Flags that have other values while any thread is inside `set_for`.

    The first thread that enters sets them for all threads, and the last one that leaves
    restores them.
    """

    def __init__(self, flags: Sequence[Flag]) -> None:
        self.flags = flags
        self._saved_values: list[Any] = []
        self._num_inside = 0
        self._lock = threading.Lock()

    @contextmanager
    def set_for(self, device: torch.device) -> Iterator[None]:
        """Context in which the flags are set, if `device` is a GPU."""
        if device.type != "cuda":
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        """Sets the flags, if no other thread is inside."""
        with self._lock:
            if not self._num_inside:
                self._saved_values = [
                    getattr(owner, name) for owner, name, _ in self.flags
                ]
                for owner, name, value in self.flags:
                    setattr(owner, name, value)
            self._num_inside += 1

    def _leave(self) -> None:
        """Restores the flags, if no other thread is inside."""
        with self._lock:
            self._num_inside -= 1
            if self._num_inside:
                return
            saved = zip(self.flags, self._saved_values, strict=True)
            for (owner, name, _), value in saved:
                setattr(owner, name, value)


def tf32_flags() -> list[tuple[Any, str]]:
    """The owner and the name of each flag that allows TF32.

    The flags have other names from torch 2.9 on, and that torch refuses to read the old
    names after the new ones were set.
    """
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return [(owner, "fp32_precision") for owner in (matmul, cudnn.conv, cudnn.rnn)]
    return [(owner, "allow_tf32") for owner in (matmul, cudnn)]


def allows_tf32() -> bool:
    """True where a GPU may round inputs of products to TF32."""
    values = [getattr(owner, name) for owner, name in tf32_flags()]
    return any(value not in (False, *EXACT_PRECISIONS) for value in values)


# Without these values cuDNN may choose the fastest of several algorithms in every
# process, and each algorithm has other bits.
REPEATABLE_FLAGS = ScopedFlags(
    [
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
    ]
)


def _exact_value(name: str) -> Any:
    """The value of a flag that forbids TF32."""
    return "ieee" if name == "fp32_precision" else False


NO_TF32_FLAGS = ScopedFlags(
    [(owner, name, _exact_value(name)) for owner, name in tf32_flags()]
)
