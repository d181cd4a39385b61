"""Files that are either whole or absent, also after a crash.

A file is written under another name in its folder, and renamed once it is whole.
"""

import contextlib
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from pflcore.check import reject

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A context with a new path, whose file replaces `path`.

    The new file is on the disk before it replaces the other one. Where the block fails,
    the new file is removed.
    """
    # A random name keeps other users from making a link of this name before.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        _sync_to_disk(part)
        part.replace(path)
        # Some file systems, and Windows, cannot sync a folder.
        with contextlib.suppress(OSError):
            _sync_to_disk(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sync_to_disk(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def safe_write(path: str | Path) -> Iterator[Path]:
    """The context of `atomic_write`, for a path that a user named.

    A link, a pipe or a device is written directly, because a rename would replace it by
    an ordinary file.
    """
    path = Path(path)
    is_ordinary = not path.is_symlink() and (path.is_file() or not path.exists())
    if not is_ordinary:
        yield path
        return
    with atomic_write(path) as part:
        yield part


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file in UTF-8, by `safe_write`."""
    with safe_write(path) as part:
        part.write_text(text, encoding="utf-8")


def remove_part_files(path: Path) -> None:
    """Removes the unfinished files of `path` that a killed process left.

    No other process may write `path` at the same time.
    """
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def lock_folder(folder: str | Path, name: str = "out") -> Iterator[None]:
    """Keeps other runs out of `folder` during the block.

    The lock also ends with the process. The folder is made. Raises ValueError, which
    begins with `name`, where another run is in it, or where it cannot be written.
    """
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 (closed below)
    except OSError:
        reject(name, "a folder that can be written", str(folder))
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{name}: another run is writing into {folder}; wait until it has "
                "ended, or name another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
