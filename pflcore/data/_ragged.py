"""Index lists of many clients as one flat tensor with offsets, and ways to make them.

A partition says how many samples of each class every client gets, and `deal` gives each
client its samples. Random choices come from numpy's RandomState, whose streams are
frozen: a partition with its seed is the same on every machine and in every release.

Symbols: N clients (`n` in code), S of them in a selection, C classes; client i has a
list of n_i indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore._device import to_device

Ints = NDArray[np.int64]


class Ragged(Sequence[Tensor]):
    """N lists of int64: list i is ``flat[begin[i] : begin[i + 1]]``, a view.

    - flat: all lists, one after the other, on the pool's device
    - size: [N] lengths of the lists, on the CPU
    - begin: [N + 1] where each list begins in `flat`, on the CPU
    """

    def __init__(self, flat: Tensor, size: Tensor) -> None:
        self.flat = flat
        self.size = size
        self.begin = torch.cat([size.new_zeros(1), size.cumsum(0)])

    @classmethod
    def from_lists(cls, lists: Sequence[Tensor]) -> Ragged:
        """Makes it of at least one tensor [n_i]."""
        sizes = [rows.numel() for rows in lists]  # `len` of a tensor is slow
        return cls(torch.cat(list(lists)), torch.tensor(sizes))

    @classmethod
    def from_owners(cls, rows: Tensor | Ints, owner: Tensor | Ints, n: int) -> Ragged:
        """Gives the samples `rows` [m] to their owners [m] in 0..n-1.

        A client's samples keep their order.
        """
        order = torch.from_numpy(np.argsort(np.asarray(owner), kind="stable"))
        sizes = torch.as_tensor(owner).bincount(minlength=n)
        return cls(torch.as_tensor(rows)[order], sizes)

    @classmethod
    def from_single_list(cls, rows: Tensor, i: int, n: int) -> Ragged:
        """List i of n lists, of which the others are empty.

        numpy's zeros take no memory before they are written, so the empty lists cost
        none.
        """
        lists = cls(rows, torch.tensor([len(rows)]))
        lists.size = torch.from_numpy(np.zeros(n, np.int64))
        lists.begin = torch.from_numpy(np.zeros(n + 1, np.int64))
        lists.size[i] = len(rows)
        # The lists after this one begin at 0, not at its end: an empty list may begin
        # anywhere.
        lists.begin[i + 1] = len(rows)
        return lists

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, i: Any) -> Any:
        """List i, a view; for a slice its lists as a `Ragged`."""
        if isinstance(i, slice):
            return self.take(torch.arange(len(self))[i])
        i = range(len(self))[i]
        return self.flat[int(self.begin[i]) : int(self.begin[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.size.tolist()))

    def take(self, ids: Tensor) -> Ragged:
        """The lists of the clients `ids` [S], in their order."""
        if len(ids) == len(self) and bool((ids == torch.arange(len(ids))).all()):
            return self
        size = self.size[ids]
        new_begin = size.cumsum(0) - size
        shift = self.begin[ids] - new_begin
        index = torch.arange(int(size.sum())) + shift.repeat_interleave(size)
        return Ragged(self.flat[to_device(index, self.flat.device)], size)

    def owners(self) -> Tensor:
        """The client of each flat index: int64, as long as `flat` and on its device."""
        owners = torch.arange(len(self)).repeat_interleave(self.size)
        return to_device(owners, self.flat.device)

    def to(self, device: str | torch.device) -> Ragged:
        """The same lists on ``device``."""
        return Ragged(self.flat.to(device), self.size)
