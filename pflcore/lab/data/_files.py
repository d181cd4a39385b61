"""Data that come with their clients, in files.

They are School, Vehicle, EMNIST by writer, LEAF's JSON files, a folder with one file
per client, and one table of all clients. A reader makes {client: {split: (x, y)}} of
what the files have; `_read` does the rest, by the table in `_labels`. Where a file is
missing or holds something else, readers raise OSError or ValueError with one sentence
that names the file.

Symbols: N clients; client i has n_i samples of D features; n rows are in a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pflcore.check import PositiveInt, checked, import_optional, reject, require
from pflcore.data._federation import Federation
from pflcore.data._labels import Classes, ReaderOptions
from pflcore.data._read import SPLITS, read_clients
from pflcore.data._read_errors import explain_read_errors
from pflcore.data._tables import read_frame, read_tables
from pflcore.lab.data._sources import DATA_FOLDER_HINT, check_published, digest_of
from pflcore.lab.data._text import CHARACTERS, number_texts

AnyPath = str | os.PathLike[str]
# Starts of the names of files that may be in a folder of data.
EXTRA_FILE_PREFIXES = ("README", "LICENSE")
TABLE_SUFFIXES = (".csv", ".parquet")
Pairs = dict[str, dict[str, tuple[Any, Any]]]  # client -> split -> (x, y)
# Names of the files that the data folder must hold, for errors and lists.
FILES_TEXT = {
    "school": "school/school.mat (MALSAR's cells X and Y)",
    "vehicle": "vehicle/vehicle.mat (MALSAR's cells X and Y)",
    "femnist": (
        "femnist/fed_emnist_train.h5 and femnist/fed_emnist_test.h5 (of TFF), or "
        "LEAF's .json files in femnist/ (with data/train/ and data/test/ or without)"
    ),
}


def school(root: AnyPath | None = None) -> Federation:
    """School (Inner London Education Authority): exam scores of 139 schools.

    There are 15,362 students, with 28 features (the last is the constant 1). Targets
    are (score - 1) / (70 - 1): 1 and 70 are the lowest and the highest of all scores.
    All samples are in "train": hold out samples by `split`, then `standardize`. Reads
    ``school/school.mat`` (MALSAR's cell format).

    Args:
        root: the data folder; None for the folder that PFLCORE_DATA names
    """
    x, y = read_cells(_root(root, "school") / "school" / "school.mat")
    check_published("school", digest_of(*x, *y), "44afd5cc166e1c1c")
    low = min(float(scores.min()) for scores in y)
    high = max(float(scores.max()) for scores in y)
    targets = [(scores - low) / (high - low) for scores in y]
    pairs = list(zip(x, targets, strict=True))
    federation = Federation.from_clients(pairs, classes=None, name="school")
    return federation._copy_with(facts={"lowest score": low, "highest score": high})


def vehicle(root: AnyPath | None = None) -> Federation:
    """Vehicle sensors: 23 sensors that tell two kinds of vehicle apart.

    There are 43,695 samples of 100 features. Labels -1 and 1 become 0 and 1. Reads
    ``vehicle/vehicle.mat`` (MALSAR's cell format).

    Args:
        root: the data folder; None for the folder that PFLCORE_DATA names
    """
    x, y = read_cells(_root(root, "vehicle") / "vehicle" / "vehicle.mat")
    reader = ReaderOptions(2, from_files=True)
    pairs = zip(x, y, strict=True)
    return Federation(**read_clients(pairs, reader, None), name="vehicle")


def femnist(root: AnyPath | None = None) -> Federation:
    """EMNIST by writer: 62 classes, images [n, 1, 28, 28].

    Reads LEAF's JSON files, or TFF's ``fed_emnist_train.h5`` and
    ``fed_emnist_test.h5``, in the folder ``femnist/``. Pixels stay as the files have
    them (white paper is 1 in both).

    Args:
        root: the data folder; None for the folder that PFLCORE_DATA names
    """
    base = _root(root, "femnist") / "femnist"
    if not (base / "fed_emnist_train.h5").is_file():
        if next(base.rglob("*.json"), None) is None:
            expected = FILES_TEXT["femnist"]
            raise FileNotFoundError(f"{base.parent}: expected {expected}, got none.")
        federation = leaf(base, classes=62, name="femnist")
        images = federation.x.float().reshape(-1, 1, 28, 28)
        return federation._copy_with(x=images)
    clients = Pairs()
    for split in ("train", "test"):
        path = base / f"fed_emnist_{split}.h5"
        for writer, (pixels, labels) in _read_examples(path, ("pixels", "label")):
            pair = (pixels[:, None], labels.astype(np.int64))
            clients.setdefault(writer, {})[split] = pair
    reader = ReaderOptions(62, None, from_files=True)
    return _federation(dict(sorted(clients.items())), reader, "femnist")


@checked
def leaf(
    path: AnyPath,
    *,
    classes: Classes = "infer",
    text: Literal["characters", "words"] | None = None,
    length: PositiveInt = 80,
    vocabulary: PositiveInt = 10_000,
    name: str | None = None,
    ignored_label: int | None = None,
) -> Federation:
    """A federation from LEAF-style JSON files.

    A file holds ``{"users": [...], "num_samples": [...], "user_data": {user: {"x":
    [...], "y": [...]}}}``. ``path`` is one file, a folder of files, or a folder with
    ``train/`` and ``test/``, which may be in ``data/``. Clients are in the order of the
    training users. Where the test users are other people (LEAF's split by user), all
    users' samples are "train", and ``truth["held_out"]`` [N] marks the test users.
    Targets and inputs are interpreted for all users together (docs/data.md).

    With `text` the inputs are texts, which become tokens int64 [n, T], padded with 0. A
    list of several texts is a row of Sent140, whose fifth entry is the text. Targets
    that are single characters (Shakespeare) become tokens, too. Words are numbered by
    how often the training users write them.

    Args:
        path: the file or the folder
        classes: number of classes, or their names; infer takes the largest label plus
            one; None reads targets as numbers to predict
        text: characters or words, where inputs are texts; None where they are numbers
        length: tokens of a text; further ones are cut off
        vocabulary: number of words
        name: name of the data, for summaries and records
        ignored_label: label of samples or steps that count in nothing, such as 255
    """
    base = Path(path)
    if (base / "data" / "train").is_dir():
        base = base / "data"
    users = {}
    for split, part in _split_folders(base).items():
        users[split] = _leaf_users(part, is_text=text is not None)
    if text is not None:
        are_characters = number_texts(users, text, length, vocabulary)
        if are_characters and classes == "infer":
            classes = CHARACTERS
    test_users = users.get("test", {}).keys()
    strangers = test_users - users["train"].keys()
    split_by_user = bool(strangers) and len(strangers) == len(test_users)
    clients = Pairs()
    for split, pairs in users.items():
        for user, pair in pairs.items():
            if split == "train" or len(pair[1]):
                target = "train" if split_by_user else split
                clients.setdefault(user, {})[target] = pair
    reader = ReaderOptions(classes, from_files=True, ignored_label=ignored_label)
    federation = _federation(clients, reader, name or f"leaf {base.name}")
    if not split_by_user:
        return federation
    held_out = torch.tensor([user in strangers for user in clients])
    return federation._copy_with(truth={"held_out": held_out})


@checked
def folder(
    path: AnyPath,
    *,
    target: int | str = -1,
    classes: Classes = "infer",
    name: str | None = None,
    ignored_label: int | None = None,
) -> Federation:
    """A federation from a folder with one file per client.

    A file is ``.npz`` (arrays x, y; or x_train, y_train, x_test, y_test, ...),
    ``.csv`` or ``.parquet`` (numbers, one row per sample). Files in ``train/`` and
    ``test/`` (and ``val/``) with the same names are one client's splits. Clients are in
    the order of the names; numbers in a name count as numbers, so client2 is before
    client10. Whether the CSV files have a line of names, and what targets and inputs
    become, is decided for all files together (docs/data.md).

    Args:
        path: the folder with the files, or with a folder for each split
        target: the column of the targets, by number or by its name in the header
        classes: number of classes, or their names; infer takes the largest label plus
            one, or the words that are there; None reads targets as numbers to predict
        name: name of the data, for summaries and records
        ignored_label: label of samples or steps that count in nothing, such as 255
    """
    base = Path(path)
    reader = ReaderOptions(classes, from_files=True, ignored_label=ignored_label)
    files = []
    for split, part in _split_folders(base, *TABLE_SUFFIXES, ".npz").items():
        for file in _list_files(part, *TABLE_SUFFIXES, ".npz"):
            files.append((split, file))
    paths = [file for _, file in files if file.suffix != ".npz"]
    tables = dict(
        zip(paths, read_tables(paths, target, reader.class_names), strict=True)
    )
    clients = Pairs()
    for split, file in files:
        pairs = _npz(file, split) if file.suffix == ".npz" else {split: tables[file]}
        client = clients.setdefault(file.stem, {})
        twice = sorted(client.keys() & pairs.keys())
        expected = f"samples that {file.stem} has in no other file"
        require(not twice, str(file), expected, twice)
        client |= pairs
    return _federation(clients, reader, name or base.name)


@checked
def table(
    path: AnyPath,
    *,
    client: str = "client",
    label: str = "label",
    classes: Classes = "infer",
    name: str | None = None,
    ignored_label: int | None = None,
) -> Federation:
    """A federation from one table of all clients, a .csv or .parquet file.

    What targets and inputs become is the same as in a folder of files (docs/data.md).

    Args:
        path: the file, whose first line names the columns
        client: the column that says which client holds a row
        label: the column of the targets
        classes: number of classes, or their names; infer takes the largest label plus
            one, or the words that are there; None reads targets as numbers to predict
        name: name of the data, for summaries and records
        ignored_label: label of samples that count in nothing, such as 255
    """
    reader = ReaderOptions(classes, from_files=True, ignored_label=ignored_label)
    frame = read_frame(Path(path), client)
    return Federation._from_table(frame, label, client, reader, name or Path(path).stem)


def _federation(clients: Pairs, reader: ReaderOptions, name: str) -> Federation:
    """A federation of these clients."""
    arguments = read_clients(clients.values(), reader, list(clients))
    return Federation(**arguments, name=name)


# files ------------------------------------------------------------------------


def _root(root: AnyPath | None, name: str) -> Path:
    """The data folder: `root`, or else the one that PFLCORE_DATA names.

    Raises ValueError where neither names a folder.

    Args:
        root: the data folder, or None
        name: name of the data, whose files the error names
    """
    path = os.environ.get("PFLCORE_DATA") if root is None else root
    files = FILES_TEXT[name]
    expected = f"the folder of the data (or set PFLCORE_DATA), which holds {files}"
    require(path, "root", expected, path)
    return Path(str(path))


def _split_folders(base: Path, *kinds: str) -> dict[str, Path]:
    """The folder of each split.

    Where `base` has no folders of splits, it is the folder of "train" itself. Raises
    FileNotFoundError where there are folders of splits without ``train/``, and
    ValueError where `base` has both these folders and files of these kinds.
    """
    parts = {split: base / split for split in SPLITS if (base / split).is_dir()}
    if not parts:
        return {"train": base}
    names = " and ".join(f"{split}/" for split in parts)
    if "train" not in parts:
        raise FileNotFoundError(
            f"{base}: expected a folder train/ beside {names}, got none."
        )
    outside = sorted(file.name for file in base.glob("*") if file.suffix in kinds)
    require(not outside, str(base), f"no samples beside {names}", outside[:5])
    return parts


def _list_files(part: Path, *kinds: str) -> list[Path]:
    """The files in a folder, client2 before client10.

    Raises FileNotFoundError where the folder holds no file of these kinds, or anything
    else but a README, a license, hidden files and folders. A pipe or a device would be
    read without end, so only regular files are accepted.
    """
    visible = [path for path in part.glob("*") if not path.name.startswith(".")]
    files = []
    stray = []
    for path in sorted(visible, key=_natural):
        if path.suffix in kinds:
            if path.is_file():
                files.append(path)
            else:
                stray.append(f"{path.name} (no regular file)")
        elif not path.is_dir() and not path.name.startswith(EXTRA_FILE_PREFIXES):
            stray.append(path.name)
    if stray or not files:
        expected = f"{' or '.join(kinds)} files and nothing else; give them a folder"
        raise FileNotFoundError(
            f"{part}: expected {expected}, got {stray or 'none there'}."
        )
    return files


def _natural(path: Path) -> str:
    """A sort key that puts client2 before client10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), path.name)


def read_cells(path: Path) -> tuple[list[Any], list[Any]]:
    """Each client's x [n_i, D] and y [n_i], float64, from MALSAR's cell format.

    ``X`` is a cell of [n_i, D] matrices and ``Y`` one of [n_i, 1], with an entry per
    client.
    """
    io = import_optional("scipy.io", "data: it", DATA_FOLDER_HINT)
    text = f"{path}: expected a .mat file with the cells X and Y, got none"
    if not path.exists():
        raise FileNotFoundError(f"{text}.")
    with explain_read_errors(text):
        require(path.is_file(), "file", "a regular one", path.name)
        cells = {name.upper(): cell for name, cell in io.loadmat(path).items()}
        x = [np.asarray(entry, np.float64) for entry in cells["X"].reshape(-1)]
        y = [np.asarray(entry, np.float64) for entry in cells["Y"].reshape(-1)]
    return x, [targets.reshape(-1) for targets in y]


def _leaf_users(path: Path, *, is_text: bool) -> dict[str, tuple[Any, Any]]:
    """The x and y of each user in a file or folder.

    Args:
        path: the file or folder
        is_text: True where x are texts, which stay as the file has them, and so do y
    """
    users: dict[str, tuple[Any, Any]] = {}
    expected = "LEAF's users and user_data, each user once, numbers as x and y"
    for file in [path] if path.is_file() else _list_files(path, ".json"):
        with explain_read_errors(f"{file}: expected {expected}, got none"):
            content = json.loads(file.read_text())
            for user in content["users"]:
                require(user not in users, "users", "each once", user)
                samples = content["user_data"][user]
                if is_text:
                    users[user] = (samples["x"], samples["y"])
                    continue
                x = _to_number_array(samples["x"], f"x of {user}")
                y = _to_number_array(samples["y"], f"y of {user}")
                users[user] = (x, y)
    return users


def _to_number_array(values: Any, name: str) -> Any:
    """The values as an array of real numbers, which keep their type.

    Raises ValueError for words, dates, complex numbers and records.
    """
    try:
        numbers = np.asarray(values)
    except ValueError:
        reject(name, "as many numbers in each row", values)
    is_text = numbers.dtype.kind in "US"
    words = (
        "numbers (for words their numbers; of LEAF's text say text='words' or "
        "'characters')"
    )
    expected = words if is_text else "numbers"
    require(numbers.dtype.kind in "fiub", name, expected, values)
    return numbers.astype(np.float64) if numbers.dtype.itemsize > 8 else numbers


def _npz(path: Path, split: str) -> dict[str, tuple[Any, Any]]:
    """A client's x and y by split.

    Arrays whose names have no split, x and y, are of the split `split`. A pickle is
    never loaded.
    """
    text = (
        f"{path}: expected arrays of numbers x and y, or x_train and y_train, got none"
    )
    with explain_read_errors(text), np.load(path, allow_pickle=False) as file:
        arrays = {k if "_" in k else f"{k}_{split}": file[k] for k in file.files}
        is_once = len(arrays) == len(file.files)
        require(is_once, "arrays", "each split once", file.files)
        names = {f"{part}_{split}" for part in "xy" for split in SPLITS}
        of_splits = {k for k in arrays if k[:2] in ("x_", "y_")}
        pairs = {}
        for part in SPLITS:
            has_both = [f"{k}_{part}" in arrays for k in "xy"]
            fits = has_both[0] == has_both[1] and of_splits <= names
            require(fits, "arrays", "x and y of train, val or test", file.files)
            if all(has_both):
                x = _to_number_array(arrays[f"x_{part}"], f"x_{part}")
                pairs[part] = (x, _to_number_array(arrays[f"y_{part}"], f"y_{part}"))
        require(pairs, "arrays", "x and y of train, val or test", file.files)
        return pairs


def _read_examples(
    path: Path, fields: tuple[str, ...]
) -> Iterator[tuple[str, list[Any]]]:
    """Each client's name, and its arrays of these fields, in the order of the names.

    Raises OSError, which names the file, where it is missing or is not TFF's.
    """
    h5py = import_optional("h5py", "data: it")
    with explain_read_errors(f"{path}: expected TFF's HDF5 file, got none"):
        require(path.is_file(), "file", "a regular one", path.name)
        with h5py.File(path) as file:
            clients = file["examples"]
            for client in sorted(clients):
                yield client, [clients[client][field][()] for field in fields]


FEDERATIONS: dict[str, Any] = {
    "school": school,
    "vehicle": vehicle,
    "femnist": femnist,
}
READERS: dict[str, Any] = {"leaf": leaf, "folder": folder, "table": table}
