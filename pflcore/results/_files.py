"""Files that are whole or not there at all: written beside their place, and renamed
into it."""

import contextlib
import glob
import os
import secrets
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which takes its place once it is whole and on
    the disk; where the block fails it is removed."""
    # nobody can have put a link
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        _sync_to_disk(part)
        part.replace(path)
        # not every file system, nor Windows, syncs a folder
        with contextlib.suppress(OSError):
            _sync_to_disk(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def safe_write(path: str | Path) -> Iterator[Path]:
    """`atomic_write` for a path that somebody names: a link, a pipe or a device is
    written as it stands, because a rename would put a file into its place."""
    path = Path(path)
    ordinary = not path.is_symlink() and (path.is_file() or not path.exists())
    with atomic_write(path) if ordinary else contextlib.nullcontext(path) as part:
        yield part


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole text file, in UTF-8."""
    with safe_write(path) as part:
        part.write_text(text, encoding="utf-8")


def remove_part_files(path: Path) -> None:
    """Removes what a process that was killed has left of `path`; nobody else may
    write it now."""
    for old in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        old.unlink(missing_ok=True)


def move_aside(paths: Sequence[Path]) -> list[Path]:
    """Renames files and folders to PATH.1 each, or PATH.2, ...: the first number that
    is free for all of them."""
    for number in count(1):
        free = [path.with_name(f"{path.name}.{number}") for path in paths]
        if not any(map(os.path.lexists, free)):
            break
    return [path.rename(name) for path, name in zip(paths, free, strict=True)]
