"""Rows of clients that do not fit into memory: a file of fixed rows, mapped, with blocks on disk
only for those that were ever written.

The file has no name any more as soon as it is mapped, so that nothing is left behind however the
process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pflcore.algorithms.protocol import zero_rows
from pflcore.check import refuse
from pflcore.metrics import human

CHUNK = 1 << 26  # bytes that are copied, or evaluated, at once
BLOCK = 1 << 12  # bytes of a file's blocks: a row may take so many more


def zeros(n: int, like: Tensor, folder: Path | None = None) -> Tensor:
    """Zeros [n, *like.shape] that take no memory, or no room in a file in `folder`, before they are
    written."""
    if folder is None or like.device.type != "cpu":
        return zero_rows(n, like)
    return mapped((n, *like.shape), like.dtype, folder)


def check_room(
    what: str, need: int, folder: Path, error: type[OSError | MemoryError] = OSError
) -> None:
    """An error, one sentence, where the disk has less than `need` bytes free: a mapped file that
    cannot grow would end the process."""
    free = shutil.disk_usage(folder).free if need else 0
    if need > free:
        raise error(
            f"rows: {what} up to {human(need)} on disk, and {folder} has {human(free)} free; make "
            "room, or name another folder (rows)."
        )


def room(rows: Tensor) -> int:
    """The bytes that rows [S, ...] may take on disk: each its own, and a block that it only
    begins."""
    return rows.nbytes + len(rows) * BLOCK


def mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """A tensor of zeros in a nameless file in `folder`. ValueError where that cannot be written."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    try:
        handle, name = tempfile.mkstemp(".rows", "pflcore-", folder)
    except OSError:
        refuse("rows", "a folder that can be written", str(folder))
    os.close(handle)
    try:
        t = torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
    finally:
        with contextlib.suppress(OSError):  # where a mapped file cannot be removed
            os.unlink(name)
    return t


def at_once(rows: Tensor) -> int:
    """How many of the rows [N, ...] are handled at once."""
    return max(1, CHUNK // max(1, rows[0].numel() * rows.element_size()))
