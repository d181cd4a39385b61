"""Client rows in files: rows of clients that do not fit into memory.

The files take disk space only for clients that took part.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pflcore.algorithms._protocol import lazy_zeros
from pflcore.check import reject
from pflcore.metrics import human_bytes

# A file system allocates whole blocks, so a row may take one block more than its bytes.
FILE_BLOCK_BYTES = 1 << 12


def stored_zeros(n: int, like: Tensor, folder: Path | None = None) -> Tensor:
    """Zeros [n, *like.shape] that take no space before they are written.

    With `folder` they are a memory-mapped file without a name, so nothing is left on
    disk however the process ends. Raises ValueError where the folder cannot be written.

    Args:
        n: The number of rows.
        like: A tensor with the shape, the dtype and the device of a row.
        folder: The folder for the file; None where the rows are in memory.
    """
    if folder is None or like.device.type != "cpu" or not like.numel():
        return lazy_zeros(n, like)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            rows = np.memmap(file, like.numpy().dtype, "w+", shape=(n, *like.shape))
    except OSError:
        reject("storage", "a folder that can be written", str(folder))
    return torch.from_numpy(rows)


def disk_bytes(rows: Tensor) -> int:
    """The most disk space that rows [S, ...] can take.

    It counts the blocks of the file system that are partly filled.
    """
    return rows.nbytes + len(rows) * FILE_BLOCK_BYTES


def check_disk_space(
    what: str, needed: int, folder: Path, error: type[OSError | MemoryError] = OSError
) -> None:
    """Raises `error` where the disk has less than `needed` bytes free.

    A memory-mapped file that cannot grow would end the process without a message.

    Args:
        what: The first words of the message, up to the number of bytes.
        needed: The number of bytes.
        folder: A folder of the disk.
        error: The class of the error.
    """
    free = shutil.disk_usage(folder).free if needed else 0
    if needed > free:
        raise error(
            f"storage: {what} up to {human_bytes(needed)} on disk, and {folder} has "
            f"{human_bytes(free)} free; make room, or name another folder (storage)."
        )
