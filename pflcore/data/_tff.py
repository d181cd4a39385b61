"""Data sets in the HDF5 files of TensorFlow Federated (TFF).

They are CIFAR-100, Shakespeare and Stack Overflow. A file has the samples of a split:
`examples/CLIENT/FIELD`. h5py reads it.

Symbols: N clients; client i has n_i samples; T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pflcore.check import import_optional, require
from pflcore.data._sources import SOURCES, explain_read_errors
from pflcore.data._text import (
    CHARACTERS,
    Numbering,
    frequent_words,
    next_tokens,
)

Pair = tuple[Any, Any]
Pairs = dict[str, dict[str, Pair]]  # client -> split -> (x, y)


def read_examples(
    path: Path, fields: tuple[str, ...], limit: int | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Each client's name, and its arrays of these fields, in the order of the names.

    Raises OSError, which names the file, where it is missing or has another form.

    Args:
        path: the file
        fields: names of the fields
        limit: number of clients that are read at most; None for all
    """
    h5py = import_optional("h5py", "data: it")
    with explain_read_errors(f"{path}: expected TFF's HDF5 file, got none"):
        require(path.is_file(), "file", "a regular one", path.name)
        with h5py.File(path) as file:
            clients = file["examples"]
            for client in sorted(clients)[:limit]:
                yield client, [clients[client][field][()] for field in fields]


def read_cifar100(folder: Path) -> tuple[Pairs, list[bool]]:
    """The clients of CIFAR-100, and whether each is a client of the test file.

    The two files have different clients, although both count them from 0: the names of
    those of the test file begin with "test ".
    """
    scale = SOURCES["cifar100"]
    mean = np.array(scale.mean, dtype=np.float32)
    std = np.array(scale.std, dtype=np.float32)
    clients: Pairs = {}
    held_out = []
    for split in ("train", "test"):
        path = folder / f"fed_cifar100_{split}.h5"
        for client, (images, labels) in read_examples(path, ("image", "label")):
            pixels = images.astype(np.float32) / 255
            x = ((pixels - mean) / std).transpose(0, 3, 1, 2)
            name = f"test {client}" if split == "test" else client
            clients[name] = {"train": (x, labels.reshape(-1).astype(np.int64))}
            held_out.append(split == "test")
    return clients, held_out


def read_shakespeare(folder: Path, length: int, limit: int | None) -> Pairs:
    """Windows of T characters of each role's lines, and the characters that follow."""
    numbering = Numbering(CHARACTERS)
    clients: Pairs = {}
    for split in ("train", "test"):
        path = folder / f"shakespeare_{split}.h5"
        for client, (snippets,) in read_examples(path, ("snippets",)):
            texts = [numbering.encode(text, ends=True) for text in _texts(snippets)]
            pair = next_tokens(texts, length, whole=True)
            clients.setdefault(client, {})[split] = pair
    return _first_with_training(clients, limit)


def read_stackoverflow(
    folder: Path, length: int, words: int, limit: int | None
) -> tuple[Pairs, tuple[str, ...]]:
    """The first T words of each sentence with those that follow, and the vocabulary.

    The vocabulary is that of the training sentences of the clients that are read. Only
    these clients' test sentences are read.
    """
    sentences: dict[str, dict[str, list[list[str]]]] = {}
    for split in ("train", "test"):
        path = folder / f"stackoverflow_{split}.h5"
        kept = limit if split == "train" else None
        for client, (tokens,) in read_examples(path, ("tokens",), kept):
            if split == "train" or client in sentences:
                texts = [text.split() for text in _texts(tokens)]
                sentences.setdefault(client, {})[split] = texts
    training = (text for parts in sentences.values() for text in parts["train"])
    vocabulary = frequent_words(training, words)
    numbering = Numbering(vocabulary)
    clients: Pairs = {}
    for client, parts in sentences.items():
        clients[client] = {}
        for split, texts in parts.items():
            numbered = [numbering.encode(text, ends=True) for text in texts]
            clients[client][split] = next_tokens(numbered, length, whole=False)
    return clients, vocabulary


def _first_with_training(clients: Pairs, limit: int | None) -> Pairs:
    """The first clients that have training samples."""
    names = [name for name in sorted(clients) if "train" in clients[name]][:limit]
    return {name: clients[name] for name in names}


def _texts(values: Any) -> list[str]:
    """The texts of an array of bytes or strings."""
    texts = []
    for value in np.atleast_1d(values):
        is_bytes = isinstance(value, bytes)
        texts.append(value.decode("utf-8", "replace") if is_bytes else str(value))
    return texts
