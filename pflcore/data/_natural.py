"""Data that comes with its clients: School, Vehicle, EMNIST by writer, LEAF JSON, a
folder with one file per client.

A reader makes {client: {split: (x, y)}}, arrays of numbers as the file has them;
`_federation` does the rest, by the table in `_meaning`. OSError or ValueError, one
sentence that names the file, where one is missing or holds something else.
"""

import contextlib
import csv
import itertools
import json
import os
import re
from array import array
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
EXTRA_FILE_PREFIXES = ("README", "LICENSE")  # of files that may lie beside data
Pairs = dict[str, dict[str, tuple[Any, Any]]]  # client -> split -> (x, y)


def school(root: AnyPath | None = None) -> Federation:
    """School (Inner London Education Authority): 139 schools, 15,362 students, 28
    features (the last is the constant 1), exam scores.

    Targets are (score - 1) / (70 - 1), the extremes being those of all scores.
    Everything is in "train": hold out samples by `split`, then `standardize`. Reads
    ``school/school.mat`` (MALSAR's cell format) under ``root``.
    """
    x, y = read_cells(_root(root) / "school" / "school.mat")
    check_published("school", digest_of(*x, *y), "44afd5cc166e1c1c")
    low = min(float(v.min()) for v in y)
    high = max(float(v.max()) for v in y)
    pairs = [(a, (b - low) / (high - low)) for a, b in zip(x, y, strict=True)]
    fed = Federation.from_clients(pairs, classes=None, name="school")
    return fed._copy_with(facts={"lowest score": low, "highest score": high})


def vehicle(root: AnyPath | None = None) -> Federation:
    """Vehicle sensors: 23 sensors, 43,695 samples of 100 features, two kinds of
    vehicle; labels -1 and 1 become 0 and 1.

    Reads ``vehicle/vehicle.mat`` (MALSAR's cell format).
    """
    x, y = read_cells(_root(root) / "vehicle" / "vehicle.mat")
    how = ReaderOptions(2, from_files=True)
    return Federation._from_reader(zip(x, y, strict=True), how, "vehicle")


def femnist(root: AnyPath | None = None) -> Federation:
    """EMNIST by writer, 62 classes, images [n, 1, 28, 28]: LEAF's JSON files or TFF's
    ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, under ``femnist/``.

    Pixels stay as the files have them (white paper is 1 in both).
    """
    at = _root(root) / "femnist"
    if not (at / "fed_emnist_train.h5").is_file():
        fed = leaf(at, classes=62, name="femnist")
        return fed._copy_with(x=fed.x.float().reshape(-1, 1, 28, 28))
    h5py = import_optional("h5py", "data: it")
    clients = Pairs()
    for split in ("train", "test"):
        path = at / f"fed_emnist_{split}.h5"
        with explain_read_errors(f"{path}: expected TFF's HDF5 file, got none"):
            require(path.is_file(), "file", "a regular one", path.name)
            with h5py.File(path) as file:
                for writer, of in file["examples"].items():
                    pair = of["pixels"][()][:, None], of["label"][()].astype(np.int64)
                    clients.setdefault(writer, {})[split] = pair
    return _federation(
        dict(sorted(clients.items())),
        ReaderOptions(62, None, from_files=True),
        "femnist",
    )


@checked
def leaf(
    path: AnyPath, *, classes: Classes = "infer", name: str | None = None
) -> Federation:
    """LEAF-style JSON: ``{"users": [...], "num_samples": [...], "user_data": {user:
    {"x": [...], "y": [...]}}}``.

    ``path``: one file, a folder of files, or a folder with
    ``train/`` and ``test/`` (below ``data/`` too). Clients in the order of the training
    users. Where the test users are other people (LEAF's split by user), everybody's
    samples are "train" and ``truth["held_out"]`` [N] marks them. What targets and
    inputs become is decided for all users together (docs/data.md).

    Args:
        classes: number of classes; infer takes the largest label plus one; None reads
            targets as numbers to predict
    """
    base = Path(path)
    base = base / "data" if (base / "data" / "train").is_dir() else base
    clients = Pairs()
    users = {split: _leaf_users(part) for split, part in _split_folders(base).items()}
    strangers = users.get("test", {}).keys() - users["train"].keys()
    apart = bool(strangers) and len(strangers) == len(users["test"])
    for split, of in users.items():
        for user, pair in of.items():
            if split == "train" or len(pair[1]):
                clients.setdefault(user, {})["train" if apart else split] = pair
    fed = _federation(
        clients, ReaderOptions(classes, from_files=True), name or f"leaf {base.name}"
    )
    held = torch.tensor([u in strangers for u in clients])
    return fed._copy_with(truth={"held_out": held}) if apart else fed


@checked
def folder(
    path: AnyPath,
    *,
    target: int | str = -1,
    classes: Classes = "infer",
    name: str | None = None,
) -> Federation:
    """One file per client: ``.npz`` (arrays x, y; or x_train, y_train, x_test, y_test,
    ...) or ``.csv`` (numbers, one row per sample, in the grammar of Python's csv
    module).

    Files in ``train/`` and ``test/`` (and ``val/``) with the same names are one
    client's splits. Clients in the order of the names, numbers in them counted as
    numbers. What targets and inputs become is decided for all files together
    (docs/data.md).

    Args:
        target: the CSV column of the targets, by number or by its name in the header
        classes: number of classes; infer takes the largest label plus one; None reads
            targets as numbers to predict
    """
    base = Path(path)
    clients = Pairs()
    first: tuple[str, ...] = ()
    for split, part in _split_folders(base, ".csv", ".npz").items():
        for file in _list_files(part, ".csv", ".npz"):
            if file.suffix == ".npz":
                found = _npz(file, split)
            else:
                header, pair = _csv(file, target)
                first = first or header
                found = {split: pair}
                right = f"the columns of other files, {first}"
                require(header in ((), first), str(file), right, header)
            mine = clients.setdefault(file.stem, {})
            twice = sorted(mine.keys() & found.keys())
            require(
                not twice,
                str(file),
                f"samples that {file.stem} has in no other file",
                twice,
            )
            mine |= found
    return _federation(
        clients, ReaderOptions(classes, from_files=True), name or base.name
    )


def _federation(clients: Pairs, reader: ReaderOptions, name: str) -> Federation:
    without = [c for c, of in clients.items() if "train" not in of]
    require(not without, "path", "training samples of every client", without[:5])
    return Federation._from_reader(clients.values(), reader, name, list(clients))


# files ------------------------------------------------------------------------


def _root(root: AnyPath | None) -> Path:
    where = os.environ.get("PFLCORE_DATA") if root is None else root
    require(
        where is not None, "root", "the folder of the data (or set PFLCORE_DATA)", where
    )
    return Path(str(where))


def _split_folders(base: Path, *kinds: str) -> dict[str, Path]:
    """A folder per split, with no files of these kinds beside them, or all in
    "train"."""
    parts = {s: base / s for s in SPLITS if (base / s).is_dir()}
    there = " and ".join(f"{s}/" for s in parts)
    if parts and "train" not in parts:
        raise FileNotFoundError(
            f"{base}: expected a folder train/ beside {there}, got none."
        )
    beside = (
        sorted(f.name for f in base.glob("*") if f.suffix in kinds) if parts else []
    )
    require(not beside, str(base), f"no samples beside {there}", beside[:5])
    return parts or {"train": base}


def _list_files(part: Path, *kinds: str) -> list[Path]:
    """The files in a folder, client2 before client10; nothing but those of these kinds
    may be there, a README, hidden files and folders aside.

    A pipe or a device would be read without end, so that only regular files are.
    """
    found = sorted(
        (f for f in part.glob("*") if not f.name.startswith(".")), key=_natural
    )
    mine = [f for f in found if f.suffix in kinds and f.is_file()]
    stray = []
    for f in found:
        if f.suffix in kinds and not f.is_file():
            stray.append(f"{f.name} (no regular file)")
        elif (
            f.suffix not in kinds
            and not f.is_dir()
            and not f.name.startswith(EXTRA_FILE_PREFIXES)
        ):
            stray.append(f.name)
    if stray or not mine:
        wanted = f"{' or '.join(kinds)} files and nothing else; give them a folder"
        raise FileNotFoundError(
            f"{part}: expected {wanted}, got {stray or 'none there'}."
        )
    return mine


def _natural(path: Path) -> str:
    """client2 before client10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), path.name)


def read_cells(path: Path) -> tuple[list[Any], list[Any]]:
    """MALSAR's cell format: ``X`` a cell of [n_i, d] matrices and ``Y`` one of
    [n_i, 1], a cell entry per client; as float64 arrays."""
    io = import_optional("scipy.io", "data: it", DATA_FOLDER_HINT)
    with explain_read_errors(
        f"{path}: expected a .mat file with the cells X and Y, got none"
    ):
        require(path.is_file(), "file", "a regular one", path.name)
        mat = {k.upper(): v for k, v in io.loadmat(path).items()}
        x, y = ([np.asarray(c, np.float64) for c in mat[k].reshape(-1)] for k in "XY")
    return x, [v.reshape(-1) for v in y]


def _leaf_users(path: Path) -> dict[str, tuple[Any, Any]]:
    users: dict[str, tuple[Any, Any]] = {}
    for file in [path] if path.is_file() else _list_files(path, ".json"):
        right = "LEAF's users and user_data, each user once, numbers as x and y"
        with explain_read_errors(f"{file}: expected {right}, got none"):
            content = json.loads(file.read_text())
            for user in content["users"]:
                require(user not in users, "users", "each once", user)
                of = content["user_data"][user]
                users[user] = (
                    _to_number_array(of["x"], f"x of {user}"),
                    _to_number_array(of["y"], f"y of {user}"),
                )
    return users


def _to_number_array(values: Any, name: str) -> Any:
    """An array of real numbers, of the type that they have. ValueError for words,
    dates, complex numbers and records."""
    try:
        a = np.asarray(values)
    except ValueError:
        reject(name, "as many numbers in each row", values)
    words = "numbers (for words their numbers)" if a.dtype.kind in "US" else "numbers"
    require(a.dtype.kind in "fiub", name, words, values)
    return a.astype(np.float64) if a.dtype.itemsize > 8 else a


def _npz(path: Path, split: str) -> dict[str, tuple[Any, Any]]:
    said = (
        f"{path}: expected arrays of numbers x and y, or x_train and y_train, got none"
    )
    with explain_read_errors(said), np.load(path, allow_pickle=False) as z:
        keys = {k if "_" in k else f"{k}_{split}": k for k in z.files}
        pairs = {s: [keys.get(f"{v}_{s}") for v in "xy"] for s in SPLITS}
        pairs = {s: names for s, names in pairs.items() if any(names)}
        pickled = z.files == ["data"]  # PFLlib's: a dict, which only a pickle holds
        rewrite = "; load it where you trust it and write np.savez(path, x=..., y=...)"
        pflib = f"x and y (data is PFLlib's pickled dict, which is never read{rewrite})"
        require(not pickled, "arrays", pflib, z.files)
        whole = pairs and all(all(names) for names in pairs.values())
        odd = [k for k in z.files if k[:2] in ("x_", "y_") and k[2:] not in SPLITS]
        require(whole and not odd, "arrays", "x and y of train, val or test", z.files)
        return {
            s: (_to_number_array(z[x], str(x)), _to_number_array(z[y], str(y)))
            for s, (x, y) in pairs.items()
        }


def _csv(path: Path, target: int | str) -> tuple[tuple[str, ...], tuple[Any, Any]]:
    """The header, () for none, and x, y.

    Header and rows are read by one grammar, that of Python's csv module. A header has
    no number, or counts its columns, as pandas writes it for an array.
    """
    said = f"{path}: expected rows of numbers in UTF-8, all of one length, got others"
    with explain_read_errors(said), path.open(encoding="utf-8-sig", newline="") as file:
        first, named, rows = _read_table(csv.reader(file, strict=True))
    own = named and first[0] in ("", "Unnamed: 0")
    require(
        not own,
        str(path),
        "a name for every column (row numbers of pandas: index=False)",
        first,
    )
    places = [i for i, name in enumerate(first) if name == target]
    if isinstance(target, int):
        places = [target] if -len(first) <= target < len(first) else []
    once = f"one of the columns {first} of {path}, by a name that it has alone"
    require(len(first) > 1 and len(places) == 1, "target", once, target)
    x = np.delete(rows, places[0], 1)
    return first if named else (), (x, rows[:, places[0]])


def _read_table(reader: Any) -> tuple[tuple[str, ...], bool, Any]:
    """The first row, whether it is a header, and all other rows as float64 [n, D]."""
    rows = (row for row in reader if any(cell.strip() for cell in row))
    first = tuple(cell.strip() for cell in next(rows, ()))
    alone = first[0] if len(first) == 1 else ""
    require(
        not _find_separator(alone),
        "line 1",
        f"several values{_number_hint(alone)}",
        alone,
    )
    named = not any(map(_is_number, first)) or first == tuple(
        map(str, range(len(first)))
    )
    values = array("d")
    for row in itertools.chain([] if named else [first], rows):
        right = f"{len(first)} values, as the first line has"
        require(len(row) == len(first), f"line {reader.line_num}", right, len(row))
        try:
            if "_" in "".join(row):  # which Python allows in a number
                raise ValueError
            values.extend(map(float, row))
        except ValueError:
            wrong = next(cell for cell in row if not _is_number(cell))
            reject(f"line {reader.line_num}", f"numbers{_number_hint(wrong)}", wrong)
    require(values, "rows", "at least one", 0)
    return first, named, np.frombuffer(values).reshape(-1, len(first))


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return "_" not in text
    return False


def _find_separator(text: str) -> str:
    """What stands between values instead of a comma, "" for nothing known."""
    return next((repr(s) for s in (";", "\t", "|", " ") if s in text.strip()), "")


def _number_hint(text: str) -> str:
    """What to change in a value that is no number."""
    if separator := _find_separator(text):
        return f" (',' between values, where this has {separator})"
    return " (0.5, where this has a decimal comma)" if "," in text else ""


FEDERATIONS: dict[str, Any] = {"school": school, "vehicle": vehicle, "femnist": femnist}
READERS: dict[str, Any] = {"leaf": leaf, "folder": folder}
