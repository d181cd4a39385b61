"""Data that comes with its clients: School, Vehicle, EMNIST by writer, LEAF JSON, a folder with one
file per client.

A reader makes {client: {split: (x, y)}}; `_federation` does the rest. OSError or ValueError, one
sentence that names the file, where one is missing or holds something else.
"""

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pflcore.check import need, optional
from pflcore.data._federation import Classes, Federation, infer
from pflcore.data._samples import SPLITS
from pflcore.data._sources import INSTEAD, digest_of, known, reading

Where = str | os.PathLike[str]
Pairs = dict[str, dict[str, tuple[Any, Any]]]  # client -> split -> (x, y)


def school(root: Where | None = None) -> Federation:
    """School (Inner London Education Authority): 139 schools, 15,362 students, 28 features (the
    last is the constant 1), exam scores.

    Targets are (score - 1) / (70 - 1), the extremes being those of all scores. Everything is in
    "train": hold out samples by `split`, then `standardize`. Reads ``school/school.mat`` (MALSAR's
    cell format) under ``root``.
    """
    x, y = read_cells(_root(root) / "school" / "school.mat")
    known("school", digest_of(*x, *y), "44afd5cc166e1c1c")
    low, high = min(float(v.min()) for v in y), max(float(v.max()) for v in y)
    pairs = [(a, (b - low) / (high - low)) for a, b in zip(x, y, strict=True)]
    fed = Federation.from_clients(pairs, classes=None, name="school")
    return fed._with(facts={"lowest score": low, "highest score": high})


def vehicle(root: Where | None = None) -> Federation:
    """Vehicle sensors: 23 sensors, 43,695 samples of 100 features, two kinds of vehicle; labels -1
    and 1 become 0 and 1.

    Reads ``vehicle/vehicle.mat`` (MALSAR's cell format).
    """
    x, y = read_cells(_root(root) / "vehicle" / "vehicle.mat")
    pairs = [(a, (b > 0).astype(np.int64)) for a, b in zip(x, y, strict=True)]
    return Federation.from_clients(pairs, classes=2, name="vehicle")


def femnist(root: Where | None = None) -> Federation:
    """EMNIST by writer, 62 classes, images [n, 1, 28, 28]: LEAF's JSON files or TFF's
    ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, under ``femnist/``.

    Pixels stay as the files have them (white paper is 1 in both).
    """
    at = _root(root) / "femnist"
    if not (at / "fed_emnist_train.h5").is_file():
        fed = leaf(at, classes=62, name="femnist")
        return fed._with(x=fed.x.reshape(-1, 1, 28, 28))
    h5py, clients = optional("h5py", "data: it"), Pairs()
    for split in ("train", "test"):
        path = at / f"fed_emnist_{split}.h5"
        with reading(f"{path}: expected TFF's HDF5 file, got none"), h5py.File(path) as file:
            for writer, of in file["examples"].items():
                pair = of["pixels"][()][:, None], of["label"][()].astype(np.int64)
                clients.setdefault(writer, {})[split] = pair
    return _federation(dict(sorted(clients.items())), 62, "femnist")


def leaf(path: Where, *, classes: Classes = "infer", name: str | None = None) -> Federation:
    """LEAF-style JSON: ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...],
    "y": [...]}}}``.

    ``path``: one file, a folder of files, or a folder with ``train/`` and ``test/`` (below
    ``data/`` too). Clients in the order of the training users. Where the test users are other
    people (LEAF's split by user), everybody's samples are "train" and ``truth["held_out"]`` [N]
    marks them. Integer y are labels; ``classes=None`` reads them as regression targets.
    """
    base = Path(path)
    base = base / "data" if (base / "data" / "train").is_dir() else base
    clients = Pairs()
    users = {split: _leaf_users(part, classes) for split, part in _parts(base).items()}
    strangers = users.get("test", {}).keys() - users["train"].keys()
    apart = bool(strangers) and len(strangers) == len(users["test"])
    for split, of in users.items():
        for user, pair in of.items():
            if split == "train" or len(pair[1]):
                clients.setdefault(user, {})["train" if apart else split] = pair
    fed = _federation(clients, classes, name or f"leaf {base.name}")
    held = torch.tensor([u in strangers for u in clients])
    return fed._with(truth={"held_out": held}) if apart else fed


def folder(
    path: Where, *, target: int | str = -1, classes: Classes = "infer", name: str | None = None
) -> Federation:
    """One file per client: ``.npz`` (arrays x, y; or x_train, y_train, x_test, y_test, ...) or
    ``.csv`` (numbers, one row per sample).

    ``target``: the CSV column of y, by number or by its name in the header. Files in ``train/`` and
    ``test/`` (and ``val/``) with the same names are one client's splits. Clients in the order of
    the names, numbers in them counted as numbers. Whole-number targets in every file are labels;
    ``classes=None`` reads them as regression targets.
    """
    base, clients = Path(path), Pairs()
    first: tuple[str, ...] = ()
    for split, part in _parts(base).items():
        for file in _files(part, ".csv", ".npz"):
            mine = clients.setdefault(file.stem, {})
            if file.suffix == ".npz":
                mine |= _npz(file, split)
                continue
            header, mine[split] = _csv(file, target)
            first = first or header
            need(header in ((), first), str(file), f"the columns of other files, {first}", header)
    fed = _federation(clients, None, name or base.name)
    labels = classes is not None and bool((fed.y == fed.y.round()).all())
    y = fed.y.long() if labels else fed.y.float()
    return replace(fed, y=y, classes=infer(classes, y) if labels else None)


def _federation(clients: Pairs, classes: Classes, name: str) -> Federation:
    without = [c for c, of in clients.items() if "train" not in of]
    need(not without, "path", "training samples of every client", without[:5])
    fed = Federation.from_clients(clients.values(), classes=classes, dtype=None, name=name)
    return fed._with(names=tuple(clients))


# files ------------------------------------------------------------------------------------------


def _root(root: Where | None) -> Path:
    where = os.environ.get("PFLCORE_DATA") if root is None else root
    need(where is not None, "root", "the folder of the data (or set PFLCORE_DATA)", where)
    return Path(str(where))


def _parts(base: Path) -> dict[str, Path]:
    """A folder per split, or all in "train"."""
    parts = {s: base / s for s in SPLITS if (base / s).is_dir()}
    return parts if "train" in parts else {"train": base}


def _files(part: Path, *kinds: str) -> list[Path]:
    """The files in a folder, client2 before client10; nothing but those of these kinds may be
    there."""
    found = sorted((f for f in part.glob("*") if not f.is_dir()), key=_natural)
    mine = [f for f in found if f.suffix in kinds]
    stray = {f.name for f in found if not re.match(r"\.|README|LICENSE", f.name)}
    stray -= {f.name for f in mine}
    if stray or not mine:
        wanted = f"{' or '.join(kinds)} files and nothing else; give them a folder"
        raise FileNotFoundError(f"{part}: expected {wanted}, got {sorted(stray) or 'none there'}.")
    return mine


def _natural(path: Path) -> str:
    """client2 before client10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), path.name)


def read_cells(path: Path) -> tuple[list[Any], list[Any]]:
    """MALSAR's cell format: ``X`` a cell of [n_i, d] matrices and ``Y`` one of [n_i, 1], a cell
    entry per client; as float64 arrays."""
    io = optional("scipy.io", "data: it", INSTEAD)
    with reading(f"{path}: expected a .mat file with the cells X and Y, got none"):
        mat = {k.upper(): v for k, v in io.loadmat(path).items()}
        x, y = ([np.asarray(c, np.float64) for c in mat[k].reshape(-1)] for k in "XY")
    return x, [v.reshape(-1) for v in y]


def _leaf_users(path: Path, classes: Classes) -> dict[str, tuple[Any, Any]]:
    users: dict[str, tuple[Any, Any]] = {}
    for file in [path] if path.is_file() else _files(path, ".json"):
        right = "LEAF's users and user_data, each user once, numbers as x and y"
        with reading(f"{file}: expected {right}, got none"):
            content = json.loads(file.read_text())
            for user in content["users"]:
                need(user not in users, "users", "each once", user)
                of = content["user_data"][user]
                users[user] = _typed(of["x"], of["y"], classes)
    return users


def _typed(x: Any, y: Any, classes: Classes) -> tuple[Any, Any]:
    """Inputs float32; targets int64 labels, or float32 where they are no integers or ``classes`` is
    None."""
    y = np.asarray(y)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if classes == "infer" and y.size and set(y.tolist()) <= {-1, 1}:
        y = (y > 0).astype(np.int64)
    labels = classes is not None and y.dtype.kind in "iu"
    return np.asarray(x, np.float32), y.astype(np.int64 if labels else np.float32)


def _npz(path: Path, split: str) -> dict[str, tuple[Any, Any]]:
    said = f"{path}: expected arrays of numbers x and y, or x_train and y_train, got none"
    with reading(said), np.load(path, allow_pickle=False) as z:
        arrays = {k if "_" in k else f"{k}_{split}": z[k] for k in z.files}
        splits = [s for s in SPLITS if f"x_{s}" in arrays]
        need(splits, "arrays", "x and y", z.files)
        return {s: (arrays[f"x_{s}"].astype(np.float32), arrays[f"y_{s}"] * 1.0) for s in splits}


def _csv(path: Path, target: int | str) -> tuple[tuple[str, ...], tuple[Any, Any]]:
    """The header, () for none, and x, y. A header has no number, or counts its columns, as pandas
    writes it for an array."""
    with reading(f"{path}: expected rows of numbers in UTF-8, all of one length, got others"):
        lines = path.read_text("utf-8-sig").splitlines()
        first = tuple(lines[0].strip().replace('"', "").split(","))
        named = not any(map(_is_number, first)) or first == tuple(map(str, range(len(first))))
        rows = np.loadtxt(lines[named:], delimiter=",", ndmin=2, quotechar='"')
        need(rows.size, "rows", "at least one", 0)
    own = named and first[0] in ("", "Unnamed: 0")
    need(not own, str(path), "a name for every column (row numbers of pandas: index=False)", first)
    known = target in first if isinstance(target, str) else -len(first) <= target < len(first)
    need(len(first) > 1 and known, "target", f"one of the columns {first} of {path}", target)
    column = first.index(target) if isinstance(target, str) else target
    x = np.delete(rows, column, 1).astype(np.float32)
    return first if named else (), (x, rows[:, column])


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


FEDERATIONS: dict[str, Any] = {"school": school, "vehicle": vehicle, "femnist": femnist}
READERS: dict[str, Any] = {"leaf": leaf, "folder": folder}
