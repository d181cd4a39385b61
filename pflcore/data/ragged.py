"""Index lists of many clients as one flat tensor with offsets, and the one way to make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class Ragged(Sequence[Tensor]):
    """N lists of int64: list i is ``flat[begin[i] : begin[i + 1]]``, a view.

    flat   [n]      all lists, one after the other, on the pool's device
    size   [N]      the lengths, on the CPU
    begin  [N + 1]  where each begins, on the CPU
    """

    def __init__(self, flat: Tensor, size: Tensor) -> None:
        self.flat, self.size = flat, size
        self.begin = torch.cat([size.new_zeros(1), size.cumsum(0)])

    @classmethod
    def of(cls, lists: Sequence[Tensor]) -> Ragged:
        """The same lists, from at least one tensor [n_i]."""
        # numel: len of a tensor is slow
        return cls(torch.cat(list(lists)), torch.tensor([rows.numel() for rows in lists]))

    @classmethod
    def grouped(cls, rows: Tensor | Ints, owner: Tensor | Ints, n: int) -> Ragged:
        """Samples `rows` [m] to their owners [m] in 0..n-1, each client's in the order given."""
        order = torch.from_numpy(np.argsort(np.asarray(owner), kind="stable"))
        return cls(torch.as_tensor(rows)[order], torch.as_tensor(owner).bincount(minlength=n))

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, i: Any) -> Any:
        """List i, a view; of a slice the lists."""
        if isinstance(i, slice):
            return self.take(torch.arange(len(self))[i])
        i = range(len(self))[i]
        return self.flat[int(self.begin[i]) : int(self.begin[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.size.tolist()))

    def take(self, ids: Tensor) -> Ragged:
        """The lists of these clients [S], in their order."""
        if len(ids) == len(self) and bool((ids == torch.arange(len(ids))).all()):
            return self
        size = self.size[ids]
        shift = self.begin[ids] - (size.cumsum(0) - size)
        at = torch.arange(int(size.sum())) + shift.repeat_interleave(size)
        return Ragged(self.flat[onto(at, self.flat.device)], size)

    def owner(self) -> Tensor:
        """Whose each of the flat indices is: int64 [n], on their device."""
        return onto(torch.arange(len(self)).repeat_interleave(self.size), self.flat.device)

    def to(self, device: str | torch.device) -> Ragged:
        """The same lists on ``device``."""
        return Ragged(self.flat.to(device), self.size)


def onto(t: Tensor, device: torch.device) -> Tensor:
    """`t`, a small table, on `device`; to a GPU through pinned memory, so that nobody waits."""
    if t.device == device:
        return t
    pinned = device.type == "cuda" and t.device.type == "cpu"
    return t.pin_memory().to(device, non_blocking=True) if pinned else t.to(device)
