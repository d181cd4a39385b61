"""Flags of torch's that decide what a card computes: whether cuDNN repeats its bits,
and whether float32 products are rounded to TF32.

They are the process's. So a run sets what it needs for as long as it computes, and puts
back what was there.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Flag = tuple[Any, str, Any]  # its owner, its name, a value
EXACT_PRECISIONS = ("none", "ieee")  # of `fp32_precision`: float32 as it is


class ScopedFlags:
    """Flags that have other values inside, for all threads: the first who comes sets
    them, and the last who goes puts them back."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        self.flags = flags
        self._saved_values: list[Any] = []
        self._num_inside = 0
        self._lock = threading.Lock()

    @contextmanager
    def set_for(self, device: torch.device) -> Iterator[None]:
        """They are set inside, if `device` is a card."""
        if device.type != "cuda":
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._saved_values = [
                    getattr(owner, name) for owner, name, _ in self.flags
                ]
                for owner, name, value in self.flags:
                    setattr(owner, name, value)
            self._num_inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                for (owner, name, _), value in zip(
                    self.flags, self._saved_values, strict=True
                ):
                    setattr(owner, name, value)


def tf32_flags() -> list[tuple[Any, str]]:
    """The flags that allow TF32. From torch 2.9 on they have other names, and torch
    refuses to read the old ones where somebody set the new ones."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return [(owner, "fp32_precision") for owner in (matmul, cudnn.conv, cudnn.rnn)]
    return [(owner, "allow_tf32") for owner in (matmul, cudnn)]


def allows_tf32() -> bool:
    """Whether a card may round what goes into float32 products or convolutions to
    TF32."""
    values = [getattr(owner, name) for owner, name in tf32_flags()]
    return any(value not in (False, *EXACT_PRECISIONS) for value in values)


# cuDNN may choose the fastest of several algorithms anew in every process, and each has
# other bits.
REPEATABLE_FLAGS = ScopedFlags(
    [
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
    ]
)
NO_TF32_FLAGS = ScopedFlags(
    [(owner, name, "ieee" if "fp32" in name else False) for owner, name in tf32_flags()]
)
