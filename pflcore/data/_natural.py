"""Data that come with their clients.

They are School, Vehicle, EMNIST by writer, LEAF's JSON files, and a folder with one
file per client. A reader makes {client: {split: (x, y)}}, arrays of numbers as the file
has them; `_federation` does the rest, by the table in `_meaning`. Where a file is
missing or holds something else, readers raise OSError or ValueError with one sentence
that names the file.

Symbols: N clients; client i has n_i samples of D features; n rows are in a file.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pflcore.check import checked, import_optional, reject, require
from pflcore.data._federation import Federation
from pflcore.data._meaning import Classes, ReaderOptions
from pflcore.data._samples import SPLITS
from pflcore.data._sources import (
    DATA_FOLDER_HINT,
    check_published,
    digest_of,
    explain_read_errors,
)

AnyPath = str | os.PathLike[str]
# Starts of the names of files that may be in a folder of data.
EXTRA_FILE_PREFIXES = ("README", "LICENSE")
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
    return Federation._from_reader(zip(x, y, strict=True), reader, "vehicle")


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
    h5py = import_optional("h5py", "data: it")
    clients = Pairs()
    for split in ("train", "test"):
        path = base / f"fed_emnist_{split}.h5"
        with explain_read_errors(f"{path}: expected TFF's HDF5 file, got none"):
            require(path.is_file(), "file", "a regular one", path.name)
            with h5py.File(path) as file:
                for writer, examples in file["examples"].items():
                    x = examples["pixels"][()][:, None]
                    y = examples["label"][()].astype(np.int64)
                    clients.setdefault(writer, {})[split] = (x, y)
    reader = ReaderOptions(62, None, from_files=True)
    return _federation(dict(sorted(clients.items())), reader, "femnist")


@checked
def leaf(
    path: AnyPath,
    *,
    classes: Classes = "infer",
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

    Args:
        path: the file or the folder
        classes: number of classes, or their names; infer takes the largest label plus
            one; None reads targets as numbers to predict
        name: name of the data, for summaries and records
        ignored_label: label of samples or steps that count in nothing, such as 255
    """
    base = Path(path)
    if (base / "data" / "train").is_dir():
        base = base / "data"
    users = {split: _leaf_users(part) for split, part in _split_folders(base).items()}
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

    A file is ``.npz`` (arrays x, y; or x_train, y_train, x_test, y_test, ...) or
    ``.csv`` (numbers, one row per sample, in the grammar of Python's csv module). Files
    in ``train/`` and ``test/`` (and ``val/``) with the same names are one client's
    splits. Clients are in the order of the names; numbers in a name count as numbers,
    so client2 is before client10. Targets and inputs are interpreted for all files
    together (docs/data.md).

    Args:
        path: the folder with the files, or with a folder for each split
        target: the CSV column of the targets, by number or by its name in the header
        classes: number of classes, or their names; infer takes the largest label plus
            one; None reads targets as numbers to predict
        name: name of the data, for summaries and records
        ignored_label: label of samples or steps that count in nothing, such as 255
    """
    base = Path(path)
    clients = Pairs()
    first_header: tuple[str, ...] = ()
    first_columns: tuple[str, ...] = ()
    for split, part in _split_folders(base, ".csv", ".npz").items():
        for file in _list_files(part, ".csv", ".npz"):
            if file.suffix == ".npz":
                pairs = _npz(file, split)
            else:
                header, columns, pair = _csv(file, target)
                first_header = first_header or header
                first_columns = first_columns or columns
                expected = f"the columns of other files, {first_header}"
                require(header in ((), first_header), str(file), expected, header)
                pairs = {split: pair}
            client = clients.setdefault(file.stem, {})
            twice = sorted(client.keys() & pairs.keys())
            expected = f"samples that {file.stem} has in no other file"
            require(not twice, str(file), expected, twice)
            client |= pairs
    has_names = first_columns and len(set(first_columns)) == len(first_columns)
    reader = ReaderOptions(classes, from_files=True, ignored_label=ignored_label)
    if has_names:
        reader = reader._replace(columns=first_columns)
    return _federation(clients, reader, name or base.name)


def _federation(clients: Pairs, reader: ReaderOptions, name: str) -> Federation:
    """A federation of these clients."""
    return Federation._from_reader(clients.values(), reader, name, list(clients))


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


def _leaf_users(path: Path) -> dict[str, tuple[Any, Any]]:
    """The x and y of each user in a file or folder."""
    users: dict[str, tuple[Any, Any]] = {}
    expected = "LEAF's users and user_data, each user once, numbers as x and y"
    for file in [path] if path.is_file() else _list_files(path, ".json"):
        with explain_read_errors(f"{file}: expected {expected}, got none"):
            content = json.loads(file.read_text())
            for user in content["users"]:
                require(user not in users, "users", "each once", user)
                samples = content["user_data"][user]
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
    expected = "numbers (for words their numbers)" if is_text else "numbers"
    require(numbers.dtype.kind in "fiub", name, expected, values)
    return numbers.astype(np.float64) if numbers.dtype.itemsize > 8 else numbers


def _npz(path: Path, split: str) -> dict[str, tuple[Any, Any]]:
    """A client's x and y by split.

    Arrays whose names have no split, x and y, are of the split `split`.
    """
    text = (
        f"{path}: expected arrays of numbers x and y, or x_train and y_train, got none"
    )
    with explain_read_errors(text), np.load(path, allow_pickle=False) as file:
        names = file.files
        rewrite = "; load it where you trust it and write np.savez(path, x=..., y=...)"
        pflib = f"x and y (data is PFLlib's pickled dict, which is never read{rewrite})"
        require(names != ["data"], "arrays", pflib, names)  # only a pickle holds a dict
        name_of = {k if "_" in k else f"{k}_{split}": k for k in names}
        pairs = {}
        is_complete = True
        for part in SPLITS:
            x = name_of.get(f"x_{part}")
            y = name_of.get(f"y_{part}")
            if x and y:
                pairs[part] = (x, y)
            is_complete = is_complete and bool(x) == bool(y)
        odd = [k for k in names if k[:2] in ("x_", "y_") and k[2:] not in SPLITS]
        fits = pairs and is_complete and not odd
        require(fits, "arrays", "x and y of train, val or test", names)
        arrays = {}
        for part, (x, y) in pairs.items():
            inputs = _to_number_array(file[x], x)
            arrays[part] = (inputs, _to_number_array(file[y], y))
        return arrays


def _csv(
    path: Path, target: int | str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, Any]]:
    """The header, the names of the inputs, and the inputs x and the targets y.

    Without a header the names are ().

    Header and rows are read by one grammar, that of Python's csv module. A header has
    no number, or counts its columns, as pandas writes it for an array.
    """
    text = f"{path}: expected rows of numbers in UTF-8, all of one length, got others"
    with explain_read_errors(text), path.open(encoding="utf-8-sig", newline="") as file:
        first, has_header, rows = _read_table(csv.reader(file, strict=True))
    has_row_numbers = has_header and first[0] in ("", "Unnamed: 0")
    expected = "a name for every column (row numbers of pandas: index=False)"
    require(not has_row_numbers, str(path), expected, first)
    columns = [i for i, name in enumerate(first) if name == target]
    if isinstance(target, int):
        columns = [target] if -len(first) <= target < len(first) else []
    expected = f"one of the columns {first} of {path}, by a name that it has alone"
    require(len(first) > 1 and len(columns) == 1, "target", expected, target)
    x = np.delete(rows, columns[0], 1)
    y = rows[:, columns[0]]
    if not has_header:
        return (), (), (x, y)
    names = tuple(name for i, name in enumerate(first) if i != columns[0] % len(first))
    return first, names, (x, y)


def _read_table(reader: Any) -> tuple[tuple[str, ...], bool, Any]:
    """The first row, True for a header, and the data rows, float64 [n, D].

    Blank rows are skipped. Raises ValueError, with the number of the line, where a row
    has another length than the first, or a value that is no number.
    """
    rows = (row for row in reader if not _is_blank(row))
    first = tuple(cell.strip() for cell in next(rows, ()))
    only_cell = first[0] if len(first) == 1 else ""
    expected = f"several values{_number_hint(only_cell)}"
    require(not _find_separator(only_cell), "line 1", expected, only_cell)
    column_numbers = tuple(map(str, range(len(first))))
    has_header = not any(map(_is_number, first)) or first == column_numbers
    data_rows = rows if has_header else itertools.chain([first], rows)
    # A growing buffer of doubles: lists of Python's floats take four times the memory.
    values = array("d")
    expected = f"{len(first)} values, as the first line has"
    for row in data_rows:
        line = f"line {reader.line_num}"
        require(len(row) == len(first), line, expected, len(row))
        _append_numbers(values, row, line)
    require(values, "rows", "at least one", 0)
    return first, has_header, np.frombuffer(values).reshape(-1, len(first))


def read_csv_rows(path: Path) -> Any:
    """The numbers of a CSV file, float64 [n, D], with or without a line of names.

    Raises ValueError for a cell that is no number, and OSError for the file.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        _, _, rows = _read_table(csv.reader(file, strict=True))
        return rows.copy()


def read_csv_columns(path: Path, columns: Sequence[str]) -> dict[str, Any]:
    """Those of the named columns that a CSV file has, float64 [n] each.

    Other columns of the file may hold anything. Raises ValueError for a cell of these
    columns that is no number, and for a name that two columns have.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        rows = (row for row in reader if not _is_blank(row))
        header = [cell.strip() for cell in next(rows, ())]
        twice = [name for name in columns if header.count(name) > 1]
        require(not twice, "columns", "each once in the first line", twice)
        positions = {name: header.index(name) for name in columns if name in header}
        values: dict[str, list[float]] = {name: [] for name in positions}
        for row in rows:
            line = f"line {reader.line_num}"
            expected = f"{len(header)} values, as the first line has"
            require(len(row) == len(header), line, expected, len(row))
            for name, position in positions.items():
                cell = row[position]
                place = f"{line}, column {name!r}"
                hint = _number_hint(cell)
                require(_is_number(cell), place, f"a number{hint}", cell)
                values[name].append(float(cell))
    return {name: np.array(numbers) for name, numbers in values.items()}


def _is_blank(row: Sequence[str]) -> bool:
    """True where a row has nothing but spaces between its commas."""
    return not any(cell.strip() for cell in row)


def _append_numbers(values: array[float], row: Sequence[str], line: str) -> None:
    """Appends the numbers of a row's cells to `values`.

    Raises ValueError for the first cell that is no number.
    """
    try:
        # Python allows "_" in a number, and a CSV file here does not.
        if "_" not in "".join(row):
            values.extend(map(float, row))
            return
    except ValueError:
        pass  # The sentence below names the cell.
    wrong = next(cell for cell in row if not _is_number(cell))
    reject(line, f"numbers{_number_hint(wrong)}", wrong)


def _is_number(text: str) -> bool:
    """True where Python reads the text as a number without "_"."""
    with contextlib.suppress(ValueError):
        float(text)
        return "_" not in text
    return False


def _find_separator(text: str) -> str:
    """The quoted separator that replaces the comma in a text, or ""."""
    for separator in (";", "\t", "|", " "):
        if separator in text.strip():
            return repr(separator)
    return ""


def _number_hint(text: str) -> str:
    """A remedy for a value that is no number, or ""."""
    separator = _find_separator(text)
    if separator:
        return f" (',' between values, where this has {separator})"
    if "," in text:
        return " (0.5, where this has a decimal comma)"
    return ""


FEDERATIONS: dict[str, Any] = {"school": school, "vehicle": vehicle, "femnist": femnist}
READERS: dict[str, Any] = {"leaf": leaf, "folder": folder}
