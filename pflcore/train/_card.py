"""Flags of torch's that decide what a card computes: whether cuDNN repeats its bits, and whether
float32 products are rounded to TF32.

They are the process's. So a run sets what it needs for as long as it computes, and puts back what
was there.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Flag = tuple[Any, str, Any]  # its owner, its name, a value
EXACT = ("none", "ieee")  # of `fp32_precision`: float32 as it is


class Flags:
    """Flags that have other values inside, for all threads: the first who comes sets them, and the
    last who goes puts them back."""

    def __init__(self, wanted: Sequence[Flag]) -> None:
        self.wanted = wanted
        self._before: list[Any] = []
        self._inside = 0
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
            if not self._inside:
                self._before = [getattr(owner, name) for owner, name, _ in self.wanted]
                for owner, name, value in self.wanted:
                    setattr(owner, name, value)
            self._inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for (owner, name, _), value in zip(self.wanted, self._before, strict=True):
                    setattr(owner, name, value)


def precisions() -> list[tuple[Any, str]]:
    """The flags that allow TF32. From torch 2.9 on they have other names, and torch refuses to read
    the old ones where somebody set the new ones."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return [(owner, "fp32_precision") for owner in (matmul, cudnn.conv, cudnn.rnn)]
    return [(owner, "allow_tf32") for owner in (matmul, cudnn)]


def allows_tf32() -> bool:
    """Whether a card may round what goes into float32 products or convolutions to TF32."""
    values = [getattr(owner, name) for owner, name in precisions()]
    return any(value not in (False, *EXACT) for value in values)


# cuDNN may choose the fastest of several algorithms anew in every process, and each has other bits.
REPEATING = Flags(
    [(torch.backends.cudnn, "deterministic", True), (torch.backends.cudnn, "benchmark", False)]
)
WITHOUT_TF32 = Flags(
    [(owner, name, "ieee" if "fp32" in name else False) for owner, name in precisions()]
)
