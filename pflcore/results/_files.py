"""Writes files so that each is either whole or not there at all.

A file is written beside its place, and renamed into it once it is whole.
"""

import contextlib
import glob
import os
import secrets
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, whose file takes the place of `path`.

    It does so when the block ends and the file is on the disk. Where the block fails,
    the file is removed.
    """
    # Under a name that nobody can guess, nobody can have put a link.
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
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def safe_write(path: str | Path) -> Iterator[Path]:
    """`atomic_write` for a path that a user named.

    A link, a pipe or a device is written as it stands, because a rename would put an
    ordinary file into its place.
    """
    path = Path(path)
    is_ordinary = not path.is_symlink() and (path.is_file() or not path.exists())
    if not is_ordinary:
        yield path
        return
    with atomic_write(path) as part:
        yield part


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole text file, in UTF-8."""
    with safe_write(path) as part:
        part.write_text(text, encoding="utf-8")


def remove_part_files(path: Path) -> None:
    """Removes the unfinished files that a killed process left beside `path`.

    No other process may write `path` now.
    """
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        leftover.unlink(missing_ok=True)


def move_aside(paths: Sequence[Path]) -> list[Path]:
    """Renames files and folders to PATH.1 each, or PATH.2 and so on; the new paths.

    All of them get the same number, the first that is free for each.
    """
    for number in count(1):
        new_paths = [path.with_name(f"{path.name}.{number}") for path in paths]
        if not any(map(os.path.lexists, new_paths)):
            break
    return [path.rename(new) for path, new in zip(paths, new_paths, strict=True)]
