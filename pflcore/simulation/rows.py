"""Rows of clients that do not fit into memory: a file of fixed rows, mapped, with blocks on disk only for those that were ever written.

The file has no name any more as soon as it is mapped, so that nothing is left behind however the process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from pflcore.metrics import human
from pflcore.train import memory

CHUNK = 1 << 26  # bytes that are copied, or evaluated, at once
BLOCK = 1 << 12  # bytes of a file's blocks: a row may take so many more


class OnDisk(dict[str, Tensor]):
    """The clients' state, name -> [N, ...], in a file. A client's rows are written when it first takes part: until then they are zeros
    there, and `read` gives a fresh client's."""

    def __init__(self, fresh: dict[str, Tensor], n: int, folder: Path) -> None:
        super().__init__({k: mapped((n, *v.shape), v.dtype, folder) for k, v in fresh.items()})
        self.fresh, self.known, self.folder = fresh, torch.zeros(n, dtype=torch.bool), folder

    def see(self, ids: Tensor) -> None:
        """From here on the rows of the clients `ids` are what they are: for those who come first, a fresh client's. OSError, one
        sentence, where the disk has no room for them."""
        new = ids[~self.known[ids]]
        size = {k: v.numel() * v.element_size() for k, v in self.fresh.items()}
        need = sum(min(len(new) * (one + BLOCK), len(self.known) * one) for one in size.values())
        check_room(f"{len(new)} more clients need", need, self.folder)
        for k, v in self.fresh.items() if len(new) else ():
            self[k][new] = v
        self.known[new] = True

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """A copy of the rows of the clients `ids` in memory; nothing is written."""
        new = ~self.known[ids]
        return {k: torch.where(new.view(-1, *[1] * v.dim()), v, self[k][ids]) for k, v in self.fresh.items()}

    def clone(self) -> OnDisk:
        """Another file with the same rows."""
        other = OnDisk(self.fresh, len(self.known), self.folder)
        other.known = self.known.clone()
        ids = self.known.nonzero()[:, 0]
        check_room("a copy of the clients' rows needs", sum(len(ids) * (v[0].nbytes + BLOCK) for v in self.values()), self.folder)
        for k, v in self.items():
            for part in ids.split(at_once(v)):
                other[k][part] = v[part]
        return other


def check_room(what: str, need: int, folder: Path) -> None:
    """OSError, one sentence, where the disk has less than `need` bytes free: a mapped file that cannot grow would end the process."""
    free = shutil.disk_usage(folder).free if need else 0
    if need > free:
        raise OSError(
            f"rows: {what} up to {human(need)} on disk, and {folder} has {human(free)} free; make room, or name another folder (rows)."
        )


def see(own: dict[str, Tensor], ids: Tensor) -> None:
    """Whoever is about to write the rows `ids` of the clients' state says so first."""
    if isinstance(own, OnDisk):
        own.see(ids)


def read(own: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """A copy of the rows `ids` of the clients' state."""
    return own.read(ids) if isinstance(own, OnDisk) else {k: v[ids] for k, v in own.items()}


def mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """A tensor of zeros in a nameless file in `folder`. ValueError where that cannot be written."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    try:
        handle, name = tempfile.mkstemp(".rows", "pflcore-", folder)
    except OSError as e:
        raise ValueError(f"rows: expected a folder that can be written, got {folder} ({e.strerror}); name another.") from None
    os.close(handle)
    try:
        t = torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
    finally:
        with contextlib.suppress(OSError):  # where a mapped file cannot be removed
            os.unlink(name)
    t.folder = folder  # type: ignore[attr-defined]  # what `cloned` looks at
    return t


def at_once(rows: Tensor) -> int:
    """How many of the rows [N, ...] are handled at once."""
    return max(1, CHUNK // max(1, rows[0].numel() * rows.element_size()))


def cloned(t: Tensor, folder: Path | None = None) -> Tensor:
    """A copy, in a file where the tensor is in one, or in `folder`."""
    folder = getattr(t, "folder", folder)
    if folder is None:
        return t.clone()
    check_room("a copy of the state needs", t.nbytes, folder)
    new = mapped(tuple(t.shape), t.dtype, folder)
    for a in range(0, len(t), at_once(t)):
        new[a : a + at_once(t)] = t[a : a + at_once(t)]
    return new


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(v.numel() * v.element_size() for v in tensors)


def place(choice: str | Path, kept: int, need: int, peak: int, device: str) -> Path | None:
    """The folder for the clients' rows, or None: they stay in memory. `kept`: bytes of all rows, `need`: of those that will be written
    at most, `peak`: of the whole run in memory. RunTooLarge, one sentence, where the disk has less."""
    if choice == "memory" or not kept or device != "cpu" or (choice == "auto" and peak <= (memory.capacity(device) or peak) // 2):
        return None
    folder = Path(tempfile.gettempdir() if choice == "auto" else choice)
    if not folder.is_dir():
        raise ValueError(f"rows: expected 'auto', 'memory' or a folder, got {str(choice)!r}, which is none of them.")
    free = shutil.disk_usage(folder).free
    if need > free:
        raise memory.RunTooLarge(
            f"rows: the clients' rows may take {human(need)} on disk, and {folder} has {human(free)} free; name a folder with more room "
            "(rows), or let fewer clients take part."
        )
    return folder
