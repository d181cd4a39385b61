"""Index lists of many clients as one flat tensor with offsets.

Symbols: N clients (`n` in code), S of them in a selection; client i has a list of n_i
indices; m indices are in all lists together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore._device import to_device

Ints = NDArray[np.int64]


class Ragged(Sequence[Tensor]):
    """N lists of int64: list i is ``flat[begin[i] : begin[i + 1]]``, a view.

    Attributes:
        flat: [m] all lists, one after the other, on the pool's device
        size: [N] lengths of the lists, on the CPU
        begin: [N + 1] positions in `flat` where the lists begin, on the CPU; the last
            entry is the end of the last list
    """

    def __init__(self, flat: Tensor, size: Tensor) -> None:
        self.flat = flat
        self.size = size
        self.begin = torch.cat([size.new_zeros(1), size.cumsum(0)])

    @classmethod
    def from_lists(cls, lists: Sequence[Tensor]) -> Ragged:
        """Lists with the indices of the tensors [n_i]; at least one is given."""
        sizes = [rows.numel() for rows in lists]  # `len` of a tensor is slow
        return cls(torch.cat(list(lists)), torch.tensor(sizes))

    @classmethod
    def from_owners(cls, rows: Tensor | Ints, owner: Tensor | Ints, n: int) -> Ragged:
        """The samples `rows` [m] in the lists of their owners [m].

        Owners are numbers from 0 to n - 1. A client's samples keep their order.
        """
        order = torch.from_numpy(np.argsort(np.asarray(owner), kind="stable"))
        sizes = torch.as_tensor(owner).bincount(minlength=n)
        return cls(torch.as_tensor(rows)[order], sizes)

    @classmethod
    def from_single_list(cls, rows: Tensor, i: int, n: int) -> Ragged:
        """N lists, all empty but list i, which has the samples `rows` [m]."""
        lists = cls(rows, torch.tensor([len(rows)]))
        # numpy's zeros take no memory before they are written, so the empty lists take
        # almost none.
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
        """List i, a view of `flat`; for a slice, a `Ragged`."""
        if isinstance(i, slice):
            return self.take(torch.arange(len(self))[i])
        i = range(len(self))[i]
        return self.flat[int(self.begin[i]) : int(self.begin[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.size.tolist()))

    def take(self, ids: Tensor) -> Ragged:
        """The lists of the clients `ids` [S], in their order."""
        has_all = len(ids) == len(self)
        if has_all and bool((ids == torch.arange(len(self))).all()):
            return self
        size = self.size[ids]
        new_begin = size.cumsum(0) - size
        shift = self.begin[ids] - new_begin
        index = torch.arange(int(size.sum())) + shift.repeat_interleave(size)
        return Ragged(self.flat[to_device(index, self.flat.device)], size)

    @cached_property  # a round must not look at all clients
    def nonempty(self) -> Tensor:
        """The ids [S] of the clients whose lists have an index, on the CPU."""
        return self.size.nonzero()[:, 0]

    def owners(self) -> Tensor:
        """The client of each index in `flat`: int64 [m], on its device."""
        owners = torch.arange(len(self)).repeat_interleave(self.size)
        return to_device(owners, self.flat.device)

    def to(self, device: str | torch.device) -> Ragged:
        """The same lists on `device`."""
        return Ragged(self.flat.to(device), self.size)
