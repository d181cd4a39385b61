"""Index lists of many clients as one flat tensor with offsets: as long as their samples, with no
padding to the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class Ragged(Sequence[Tensor]):
    """N lists of int64: list i is ``flat[begin[i] : begin[i + 1]]``, a view.

    flat   [n]      all lists, one after the other, on the pool's device
    begin  [N + 1]  where each begins, on the CPU
    size   [N]      the lengths, on the CPU
    """

    def __init__(self, flat: Tensor, begin: Tensor) -> None:
        self.flat, self.begin, self.size = flat, begin, begin.diff()

    @classmethod
    def of(cls, lists: Sequence[Tensor], device: torch.device | str = "cpu") -> Ragged:
        """The same lists, from tensors of their own."""
        if isinstance(lists, Ragged):
            return lists
        # numel: len of a tensor is slow
        size = torch.tensor([i.numel() for i in lists], dtype=torch.int64)
        return cls(
            torch.cat(list(lists))
            if len(size)
            else torch.empty(0, dtype=torch.int64, device=device),
            starts(size),
        )

    @classmethod
    def of_parts(cls, n: int, parts: Sequence[tuple[Tensor, Tensor]]) -> Ragged:
        """The lists of n clients from parts of equal lengths: ids [m] and their lists [m, length];
        together everybody, each once."""
        size = torch.zeros(n, dtype=torch.int64)
        for ids, rows in parts:
            size[ids] = rows.shape[1]
        begin = starts(size)
        flat = torch.empty(int(begin[-1]), dtype=torch.int64, device=parts[0][1].device)
        for ids, rows in parts:
            flat[(begin[ids][:, None] + torch.arange(rows.shape[1])).to(flat.device)] = rows
        return cls(flat, begin)

    @classmethod
    def grouped(cls, rows: Ints, owner: Ints, n: int) -> Ragged:
        """Samples `rows` [m] to their owners [m] in 0..n-1, each client's in the order given."""
        size = torch.from_numpy(np.bincount(owner, minlength=n))
        return cls(torch.from_numpy(rows[np.argsort(owner, kind="stable")]), starts(size))

    def every(self, k: int) -> Ragged:
        """Each k lists joined to one: N / k lists."""
        return Ragged(self.flat, self.begin[::k])

    def __len__(self) -> int:
        return len(self.size)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> Ragged: ...
    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return self.take(torch.arange(len(self))[i])
        i = range(len(self))[i]
        return self.flat[int(self.begin[i]) : int(self.begin[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.size.tolist()))

    def take(self, ids: Tensor, size: Tensor | None = None) -> Ragged:
        """The lists of these clients [S], in their order; of each the first `size` [S] where that
        is given."""
        if size is None and len(ids) == len(self) and bool((ids == torch.arange(len(ids))).all()):
            return self
        size = self.size[ids] if size is None else size
        begin = starts(size)
        at = torch.arange(int(begin[-1])) + (self.begin[ids] - begin[:-1]).repeat_interleave(size)
        return Ragged(self.flat[onto(at, self.flat.device)], begin)

    def owner(self) -> Tensor:
        """Whose each of the flat indices is: int64 [n], on their device."""
        return onto(torch.arange(len(self)).repeat_interleave(self.size), self.flat.device)

    def to(self, device: str | torch.device) -> Ragged:
        """The same lists on ``device``."""
        return Ragged(self.flat.to(device), self.begin)


def starts(size: Tensor) -> Tensor:
    """Where lists of these lengths [N] begin in one: [N + 1]."""
    return torch.cat([size.new_zeros(1), size.cumsum(0)])


def onto(t: Tensor, device: torch.device) -> Tensor:
    """`t`, a small table, on `device`; to a GPU through pinned memory, so that nobody waits."""
    if t.device == device:
        return t
    pinned = device.type == "cuda" and t.device.type == "cpu"
    return t.pin_memory().to(device, non_blocking=True) if pinned else t.to(device)
