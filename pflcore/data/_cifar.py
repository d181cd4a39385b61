"""CIFAR-10 and CIFAR-100 from their files, without torchvision and without unpickling.

Both sets are published in a version for Python, whose files are pickles, and in a
binary version. A pickle is a program. It is scanned here for the texts and the numbers
in it, and nothing of it is run.

Symbols: n images of a file.
"""

from __future__ import annotations

import hashlib
import pickletools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PIXELS = 3 * 32 * 32
FileArrays = tuple[Any, Any]  # images [n, PIXELS] and labels [n]


class Layout(NamedTuple):
    """The files of one version of a data set.

    Attributes:
        folder: name of the folder that holds the files
        train: names of the files of the training pool, in order
        test: names of the files of the test pool, in order
        parse: images and labels of a file's bytes; raises ValueError where the bytes
            have another form
        md5: published MD5 sums of files, by name, where they are known
    """

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[bytes], FileArrays]
    md5: dict[str, str]


def read_cifar(layouts: Iterable[Layout], root: Path) -> list[Any] | None:
    """Both pools from the first version that a folder has, or None without one.

    Raises OSError where a file is missing, or has another form.

    Args:
        layouts: the versions of the data set
        root: the folder that holds the folder of a version
    """
    for layout in layouts:
        folder = root / layout.folder
        names = layout.train + layout.test
        if any((folder / name).exists() for name in names):
            train = _read_pool(folder, layout.train, layout)
            return [*train, *_read_pool(folder, layout.test, layout)]
    return None


def _read_pool(folder: Path, names: Iterable[str], layout: Layout) -> FileArrays:
    """Images [n, 3, 32, 32] uint8 and labels [n] int64 of several files."""
    images = []
    labels = []
    for name in names:
        x, y = _read_file(folder / name, layout)
        images.append(x)
        labels.append(y)
    return np.concatenate(images).reshape(-1, 3, 32, 32), np.concatenate(labels)


def _read_file(path: Path, layout: Layout) -> FileArrays:
    """Images [n, PIXELS] uint8 and labels [n] int64 of a file."""
    if not path.is_file():  # a pipe is read without end
        raise OSError(f"{path}: expected a regular file")
    raw = path.read_bytes()
    published = layout.md5.get(path.name)
    if published is not None and published != _md5(raw):
        raise OSError(f"{path}: expected the published file, got another one")
    try:
        x, y = layout.parse(raw)
    except ValueError as error:
        raise OSError(f"{path}: expected {error}") from error
    if len(x) == 0 or len(x) != len(y):
        text = f"got {len(y)} for {len(x)} images"
        raise OSError(f"{path}: expected a label for each image, {text}")
    return x, y


def _md5(raw: bytes) -> str:
    """The MD5 sum of bytes, as the publishers give it."""
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


# The binary version: a record for each image, of one or two labels and the pixels.


def _parse_binary(raw: bytes, label_bytes: int) -> FileArrays:
    """Images and labels of records, in which the label stands before the pixels.

    Args:
        raw: bytes of a file
        label_bytes: bytes before the pixels, of which the last one is the label
    """
    size = label_bytes + PIXELS
    if len(raw) % size:
        raise ValueError(f"records of {size} bytes, got {len(raw)} bytes")
    records = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _parse_cifar10_binary(raw: bytes) -> FileArrays:
    return _parse_binary(raw, label_bytes=1)


def _parse_cifar100_binary(raw: bytes) -> FileArrays:
    """Images and labels of records that begin with the label of a superclass."""
    return _parse_binary(raw, label_bytes=2)


# The version for Python: a pickled dict with the array "data" and lists of labels.

KEYS = ("batch_label", "labels", "data", "filenames", "fine_labels", "coarse_labels")
NUMBERS = ("BININT", "BININT1", "BININT2")
FLAGS = {"NEWFALSE": False, "NEWTRUE": True}
FORM_TEXT = "a pickled dict with images 'data' [n, 3072] uint8 and a list {!r}"


class _Entry:
    """Texts and numbers of one entry of the dict, in the order of the file."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.numbers: list[int] = []


def _scan_pickle(raw: bytes) -> dict[str, _Entry]:
    """Texts and numbers of a pickled dict, by the key that they follow.

    Raises ValueError where the bytes are no pickle.
    """
    entries: dict[str, _Entry] = {}
    entry = _Entry()
    for opcode, argument, _ in pickletools.genops(raw):
        if isinstance(argument, str) and argument in KEYS:
            entry = entries.setdefault(argument, _Entry())
        elif opcode.name in NUMBERS and isinstance(argument, int):
            entry.numbers.append(argument)
        elif opcode.name in FLAGS:
            entry.numbers.append(FLAGS[opcode.name])
        elif isinstance(argument, str | bytes):
            entry.texts.append(argument)
    return entries


def _parse_pickle(raw: bytes, label_key: str) -> FileArrays:
    """Images and labels of a pickled dict, of which nothing is run.

    Args:
        raw: bytes of a file
        label_key: key of the labels
    """
    form = FORM_TEXT.format(label_key)
    try:
        entries = _scan_pickle(raw)
        images = _image_array(entries["data"])
        labels = np.array(entries[label_key].numbers, dtype=np.int64)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(form) from error
    return images, labels


def _image_array(entry: _Entry) -> Any:
    """The array [n, PIXELS] uint8 whose parts numpy wrote into a pickle.

    numpy writes the shape, the dtype, whether columns are contiguous, and the bytes.
    Raises ValueError where a part differs from this form.
    """
    pixels = max(entry.texts, key=len)
    if isinstance(pixels, str):  # Python 2 wrote bytes as text
        pixels = pixels.encode("latin-1")
    n, rest = divmod(len(pixels), PIXELS)
    shapes = zip(entry.numbers, entry.numbers[1:], strict=False)
    by_columns = entry.numbers[-1]
    if rest or "u1" not in entry.texts or (n, PIXELS) not in shapes:
        raise ValueError("another array")
    values = np.frombuffer(pixels, np.uint8)
    if by_columns:
        return values.reshape(PIXELS, n).T
    return values.reshape(n, PIXELS)


def _parse_cifar10_pickle(raw: bytes) -> FileArrays:
    return _parse_pickle(raw, "labels")


def _parse_cifar100_pickle(raw: bytes) -> FileArrays:
    return _parse_pickle(raw, "fine_labels")


CIFAR10_BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
CIFAR10 = (
    Layout(
        "cifar-10-batches-py",
        CIFAR10_BATCHES,
        ("test_batch",),
        _parse_cifar10_pickle,
        md5={},  # `load` compares the arrays with the published ones
    ),
    Layout(
        "cifar-10-batches-bin",
        tuple(f"{name}.bin" for name in CIFAR10_BATCHES),
        ("test_batch.bin",),
        _parse_cifar10_binary,
        md5={},
    ),
)
CIFAR100 = (
    Layout(
        "cifar-100-python",
        ("train",),
        ("test",),
        _parse_cifar100_pickle,
        md5={
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
    ),
    Layout(
        "cifar-100-binary",
        ("train.bin",),
        ("test.bin",),
        _parse_cifar100_binary,
        md5={},
    ),
)
