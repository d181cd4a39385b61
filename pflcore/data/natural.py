"""Data that comes with its clients: School, Vehicle, EMNIST by writer, LEAF JSON, a folder with one
file per client."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pflcore.check import shown
from pflcore.data.federation import Federation
from pflcore.data.sources import DIGESTS, check, digest_of, package

Where = str | os.PathLike[str]
Classes = int | Literal["infer"] | None


def school(root: Where | None = None) -> Federation:
    """School (Inner London Education Authority): 139 schools, 15,362 students, 28 features (the
    last is the constant 1), exam scores.

    Targets are (score - 1) / (70 - 1), the extremes being those of all scores. Everything is in
    "train": split it with ``split_samples``, then ``standardized()``. Reads ``school/school.mat``
    (MALSAR's cell format) under ``root``.
    """
    path = _file(root, "school", "school/school.mat", "school.mat")
    x, y = read_cells(path, "school")
    check("school", DIGESTS["school"], [digest_of(*x, *y)], path)
    low, high = min(float(v.min()) for v in y), max(float(v.max()) for v in y)
    clients = [(a, (b - low) / (high - low)) for a, b in zip(x, y, strict=True)]
    return _named(
        Federation.from_arrays(clients, classes=None, name="school"),
        f"targets are (score - {low:g}) / {high - low:g}",
    )


def vehicle(root: Where | None = None) -> Federation:
    """Vehicle sensors: 23 sensors, 43,695 samples of 100 features, two kinds of vehicle; labels -1
    and 1 become 0 and 1.

    Reads ``vehicle/vehicle.mat`` (MALSAR's cell format) or LEAF JSON files under ``vehicle/``
    (``train/`` and ``test/``, or one folder).
    """
    folder = _root(root, "vehicle")
    mat = next(
        (p for p in (folder / "vehicle" / "vehicle.mat", folder / "vehicle.mat") if p.is_file()),
        None,
    )
    if mat is not None:
        x, y = read_cells(mat, "vehicle")
        fed = Federation.from_arrays(list(zip(x, y, strict=True)), classes=None, name="vehicle")
    elif (folder / "vehicle").is_dir():
        fed = replace(leaf(folder / "vehicle", classes=None), name="vehicle")
    else:
        raise FileNotFoundError(
            "data 'vehicle' needs vehicle/vehicle.mat or LEAF JSON files in vehicle/, but "
            f"{folder} holds neither"
        )
    values = fed.y.unique().tolist()
    if len(values) != 2:
        raise OSError(f"data 'vehicle' must have two labels, got {len(values)} different values")
    return replace(fed, y=(fed.y == max(values)).long(), classes=2)


def femnist(root: Where | None = None) -> Federation:
    """EMNIST by writer, 62 classes, images [n, 1, 28, 28]: LEAF's JSON files or TFF's two HDF5
    files, under ``femnist/``.

    Pixels stay as the files have them (white paper is 1 in both).
    """
    folder = _root(root, "femnist") / "femnist"
    if (folder / "fed_emnist_train.h5").is_file():
        return _tff(folder)
    if not folder.is_dir() or not any(folder.rglob("*.json")):
        raise FileNotFoundError(
            "data 'femnist' needs LEAF's train/*.json and test/*.json, or TFF's "
            f"fed_emnist_train.h5 and fed_emnist_test.h5, in {folder}, "
            "which does not hold them: make them with LEAF's femnist scripts, or use data='emnist' "
            "with a partition"
        )
    fed = leaf(folder, classes=62)
    return replace(fed, x=fed.x.reshape(-1, 1, 28, 28), name="femnist")


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
    parts = (
        {"train": base / "train", "test": base / "test"}
        if (base / "train").is_dir()
        else {"train": base}
    )
    if (base / "train").is_dir() and (base / "val").is_dir():
        parts["val"] = base / "val"
    users = {s: _leaf_users(p) for s, p in parts.items() if p.exists() or s == "train"}
    people = list(users["train"])
    others = [u for u in users.get("test", {}) if u not in users["train"]]
    title = name or f"leaf {base.name}"
    if others and len(others) == len(users["test"]):
        everyone = {**users["train"], **users["test"]}
        fed = Federation.from_arrays(
            [_typed(v, classes) for v in everyone.values()], classes=classes, name=title
        )
        held = torch.tensor([u in users["test"] for u in everyone])
        return replace(
            fed,
            names=tuple(everyone),
            truth={"held_out": held},
            notes=[f"{len(others)} clients are LEAF's held-out users"],
        )
    for split, of in users.items():
        strange = [u for u in of if u not in users["train"]]
        if strange:
            raise ValueError(
                f"{parts[split]} must hold users that {parts['train']} holds too, got user "
                f"{strange[0]!r} without training data"
            )
    clients = [
        {
            s: _typed(of[u], classes)
            for s, of in users.items()
            if u in of and (s == "train" or len(of[u][0]))
        }
        for u in people
    ]
    return replace(
        Federation.from_arrays(clients, classes=classes, name=title), names=tuple(people)
    )


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
    base = Path(path)
    files = _client_files(base)
    clients: list[dict[str, Any]] = [{} for _ in files["train"]]
    headers: dict[tuple[str, ...], Path] = {}
    for split, of in files.items():
        for i, stem in enumerate(files["train"]):
            if stem in of and of[stem].suffix == ".npz":
                clients[i] |= _npz(of[stem], split)
            elif stem in of:
                *pair, header = _csv(of[stem], target)
                if header:
                    headers.setdefault(tuple(header), of[stem])
                clients[i][split] = tuple(pair)
    if len(headers) > 1:
        (one, a), (two, b) = list(headers.items())[:2]
        raise ValueError(
            f"{b} must have the columns of {a} in the same order ({', '.join(one)}), got "
            f"{', '.join(two)}"
        )
    targets = [y for c in clients for _, y in c.values()]
    whole = classes is not None and all(np.array_equal(y, np.round(y)) for y in targets)
    kind = np.int64 if whole else np.float32
    typed = [
        {s: (np.asarray(x, np.float32), np.asarray(y).astype(kind)) for s, (x, y) in c.items()}
        for c in clients
    ]
    fed = Federation.from_arrays(typed, classes=classes if whole else None, name=name or base.name)
    return replace(fed, names=tuple(files["train"]))


def _client_files(base: Path) -> dict[str, dict[str, Path]]:
    """The clients' files by split and name; ValueError for a file that is no client's."""
    if not base.is_dir():
        raise FileNotFoundError(
            f"path must be a folder with one .csv or .npz file per client, got {base}"
        )
    parts = {s: base / s for s in ("train", "val", "test") if (base / s).is_dir()}
    parts = parts if "train" in parts else {"train": base}
    files: dict[str, dict[str, Path]] = {}
    for split, part in parts.items():
        mine, stray = {}, []
        for f in sorted(part.iterdir(), key=_natural):
            if f.suffix in (".csv", ".npz"):
                mine[f.stem] = f
            elif f not in parts.values() and not f.name.startswith((".", "README", "LICENSE")):
                stray.append(f.name)
        if not mine and split == "train":
            raise FileNotFoundError(f"{part} must hold one .csv or .npz file per client, got none")
        if stray:
            raise ValueError(
                f"{part} must hold the clients' .csv or .npz files and nothing else, got "
                f"{stray[0]}: give them a folder"
            )
        files[split] = mine
        strange = [f for stem, f in mine.items() if stem not in files["train"]]
        if strange:
            raise ValueError(
                f"{strange[0]} must belong to a client in {parts['train']}, got no file of that "
                "name there"
            )
    return files


def read_cells(path: Path, data: str) -> tuple[list[Any], list[Any]]:
    """MALSAR's cell format: ``X`` a cell of [n_i, d] matrices and ``Y`` one of [n_i, 1], a cell
    entry per client; as float64 arrays."""
    io = package("scipy.io", data)
    try:
        mat = io.loadmat(path)
        x, y = (mat[k] if k in mat else mat[k.lower()] for k in ("X", "Y"))
        xs, ys = ([np.asarray(c, dtype=np.float64) for c in cells.reshape(-1)] for cells in (x, y))
    except Exception as e:  # scipy raises several kinds for a broken file
        raise OSError(
            f"{path} must be a .mat file with the cells X and Y, got {type(e).__name__} "
            f"({str(e).splitlines()[0]})"
        ) from e
    if len(xs) != len(ys):
        raise OSError(f"{path} must have as many cells in X as in Y, got {len(xs)} and {len(ys)}")
    return xs, [v.reshape(-1) for v in ys]


# -- readers -----------------------------------------------------------------


def _leaf_users(path: Path) -> dict[str, tuple[Any, Any]]:
    files = sorted(path.glob("*.json"), key=_natural) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise FileNotFoundError(
            f"{path} must be a LEAF JSON file or a folder of them, got "
            f"{'no .json file there' if path.is_dir() else 'nothing'}"
        )
    users: dict[str, tuple[Any, Any]] = {}
    for f in files:
        try:
            content = json.loads(f.read_text())
        except ValueError as e:
            raise OSError(f"{f} must be JSON, got something else ({e})") from e
        if (
            not isinstance(content, dict)
            or not isinstance(content.get("users"), list)
            or not isinstance(content.get("user_data"), dict)
        ):
            raise OSError(
                f"{f} must have the keys users (a list), num_samples and user_data (a dict), got "
                f"{shown(content)}"
            )
        counts = content.get("num_samples", [None] * len(content["users"]))
        if not isinstance(counts, list) or len(counts) != len(content["users"]):
            raise OSError(
                f"{f} must have one num_samples entry per user ({len(content['users'])}), got "
                f"{shown(counts)}"
            )
        for user, number in zip(content["users"], counts, strict=True):
            data = content["user_data"].get(user)
            if data is None or not {"x", "y"} <= set(data):
                raise OSError(
                    f"{f} must hold x and y of user {user!r}, got "
                    f"{'nothing' if data is None else list(data)}"
                )
            if number is not None and not number == len(data["x"]) == len(data["y"]):
                raise OSError(
                    f"{f} says {number} samples for user {user!r}, but holds {len(data['x'])} x "
                    f"and {len(data['y'])} y"
                )
            if user in users:
                raise OSError(f"{f} must hold new users, but {user!r} came before")
            users[user] = (data["x"], data["y"])
    return users


def _typed(pair: tuple[Any, Any], classes: Classes) -> tuple[Any, Any]:
    """Inputs float32; targets int64 labels, or float32 where they are no integers or ``classes`` is
    None."""
    try:
        x, y = np.asarray(pair[0], dtype=np.float32), np.asarray(pair[1])
    except ValueError as e:
        raise TypeError(
            f"x and y must be numbers in arrays of one shape, got something else ({e}): turn text "
            "into numbers first"
        ) from e
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if classes == "infer" and y.size and set(y.tolist()) <= {-1, 1}:
        y = (y > 0).astype(np.int64)
    labels = classes is not None and y.dtype.kind in "iu"
    return x, y.astype(np.int64 if labels else np.float32)


def _tff(at: Path) -> Federation:
    h5py = package("h5py", "femnist", "h5py")
    clients: list[dict[str, Any]] = []
    if not (at / "fed_emnist_test.h5").is_file():
        raise FileNotFoundError(
            f"{at} must hold fed_emnist_test.h5 beside fed_emnist_train.h5, got only the latter"
        )
    with (
        h5py.File(at / "fed_emnist_train.h5") as train,
        h5py.File(at / "fed_emnist_test.h5") as test,
    ):
        for writer in sorted(train["examples"]):
            of = {
                s: f["examples"][writer]
                for s, f in (("train", train), ("test", test))
                if writer in f["examples"]
            }
            clients.append(
                {
                    s: (g["pixels"][()][:, None], g["label"][()].astype(np.int64))
                    for s, g in of.items()
                }
            )
    return Federation.from_arrays(clients, classes=62, name="femnist")


def _npz(path: Path, split: str) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as z:
            arrays = {k: z[k] for k in z.files}
    except Exception as e:  # a broken zip raises several kinds
        raise OSError(
            f"{path} must be a .npz file of plain arrays, got {type(e).__name__} "
            f"({str(e).splitlines()[0]})"
        ) from e
    odd = [k for k, v in arrays.items() if v.dtype.kind not in "fiub"]
    if odd:
        raise OSError(f"{path} must hold arrays of numbers, got {arrays[odd[0]].dtype} in {odd[0]}")
    if {"x", "y"} <= set(arrays):
        return {split: (arrays["x"], arrays["y"])}
    parts = {
        s: (arrays[f"x_{s}"], arrays[f"y_{s}"])
        for s in ("train", "val", "test")
        if {f"x_{s}", f"y_{s}"} <= set(arrays)
    }
    if "train" not in parts:
        raise OSError(
            f"{path} must hold the arrays x and y, or x_train and y_train, got {sorted(arrays)}"
        )
    return parts


def _csv(path: Path, target: int | str) -> tuple[Any, Any, list[str] | None]:
    """x, y and the header: a first row without a number, or one that counts its columns, as pandas
    writes it for an array."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            rows = [r for r in csv.reader(f) if r]
    except UnicodeDecodeError as e:
        raise OSError(f"{path} must be text in UTF-8, got something else ({e})") from e
    named = rows and (
        not any(map(_number, rows[0])) or rows[0] == [str(i) for i in range(len(rows[0]))]
    )
    header = rows.pop(0) if named else None
    if header and header[0] in ("", "Unnamed: 0"):
        raise ValueError(
            f"{path} must have a name for every column, got {header[0]!r}, as pandas writes row "
            "numbers: use index=False"
        )
    if isinstance(target, str) and (header is None or target not in header):
        raise ValueError(
            f"target must name a column of {path}, got {target!r}: its header is {header}"
        )
    if not rows:
        raise OSError(f"{path} must hold at least one row of numbers, got none")
    try:
        table = np.array([[float(v) for v in r] for r in rows])
    except ValueError as e:
        raise OSError(
            f"{path} must hold rows of numbers, all of one length, got something else "
            f"({str(e).splitlines()[0]})"
        ) from e
    column = header.index(target) if isinstance(target, str) and header is not None else int(target)
    if table.shape[1] < 2 or not -table.shape[1] <= column < table.shape[1]:
        raise ValueError(
            f"target must be a column of {path}, which has {table.shape[1]}, and leave one for x, "
            f"got {target!r}"
        )
    return np.delete(table, column, axis=1), table[:, column], header


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _natural(path: Path) -> list[Any]:
    """client2 before client10."""
    return [
        (0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", path.name) if t
    ]


def _root(root: Where | None, data: str) -> Path:
    where = root if root is not None else os.environ.get("PFLCORE_DATA")
    if where is None:
        raise FileNotFoundError(
            f"data {data!r} is read from a folder, but none is named: set PFLCORE_DATA or pass root"
        )
    return Path(where)


def _file(root: Where | None, data: str, *names: str) -> Path:
    base = _root(root, data)
    path = next((base / n for n in names if (base / n).is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"data {data!r} needs {names[0]} in the data folder, but {base} does not hold it"
        )
    return path


def _named(fed: Federation, note: str) -> Federation:
    return replace(fed, notes=[*fed.notes, note])


FEDERATIONS: dict[str, Any] = {"school": school, "vehicle": vehicle, "femnist": femnist}
READERS: Sequence[tuple[str, Any]] = (("leaf:", leaf), ("folder:", folder))
