"""Where data comes from: image sets by name, data with clients of its own, made-up data with known
answers."""

import gzip
import struct

import numpy as np
import pytest
import torch
from doors import school
from parts.sources import cells, sentence

from pflcore.data import Federation, federation_of, load
from pflcore.data.sources import DIGESTS, IDX_FILES, digest_of, read_idx


def write_idx(path, a, squeeze=gzip.compress):
    raw = struct.pack(f">4B{a.ndim}I", 0, 0, 8, a.ndim, *a.shape) + a.astype(np.uint8).tobytes()
    path.write_bytes(squeeze(raw))


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """Twenty training and ten test images in MNIST's files; two of them not gzipped. They need not
    be the published ones here."""
    monkeypatch.delitem(DIGESTS, "mnist")
    rng = np.random.RandomState(0)
    at = tmp_path / "mnist"
    at.mkdir()
    for name, n in zip(IDX_FILES, (20, 20, 10, 10), strict=True):
        a = rng.randint(0, 256, (n, 28, 28)) if "images" in name else np.arange(n) % 10
        plain = name.startswith("t10k")
        write_idx(at / (name if plain else f"{name}.gz"), a, bytes if plain else gzip.compress)
    return tmp_path


# -- image sets --------------------------------------------------------------


def test_idx_files_are_read_and_normalised(tiny_mnist):
    source = load("mnist", tiny_mnist)
    assert source.x_train.shape == (20, 1, 28, 28) and source.x_train.dtype == torch.float32
    assert source.y_test.tolist() == list(range(10)) and source.y_test.dtype == torch.int64
    raw = read_idx(tiny_mnist / "mnist" / f"{IDX_FILES[0]}.gz")
    torch.testing.assert_close(
        source.x_train[:, 0], (torch.from_numpy(raw.copy()).float() / 255 - 0.1307) / 0.3081
    )


def test_the_data_folder_is_named_by_the_environment(tiny_mnist, monkeypatch):
    monkeypatch.setenv("PFLCORE_DATA", str(tiny_mnist))
    assert len(load("mnist").y_train) == 20
    assert federation_of("mnist", "iid", 4).size().tolist() == [5, 5, 5, 5]


def test_other_data_do_not_go_by_a_name(tiny_mnist, monkeypatch, tmp_path):
    """Files in the right format are not enough: Fashion-MNIST's would load as MNIST, and so would a
    part of either."""
    at = tiny_mnist / "mnist"
    arrays = [read_idx(next(p for p in (at / f"{f}.gz", at / f) if p.is_file())) for f in IDX_FILES]
    mine = [digest_of(a) for a in arrays]
    monkeypatch.setitem(DIGESTS, "mnist", mine)
    # packed or not, these are the published ones
    assert len(load("mnist", tiny_mnist).y_train) == 20
    monkeypatch.setitem(DIGESTS, "mnist", mine[::-1])
    sentence(
        OSError,
        lambda: load("mnist", tiny_mnist),
        "must hold the published files of 'mnist', got others",
        mine[0],
    )
    monkeypatch.setitem(DIGESTS, "fashion_mnist", mine)
    sentence(OSError, lambda: load("mnist", tiny_mnist), "got those of 'fashion_mnist'")
    cells(tmp_path / "school" / "school.mat", [(np.ones((3, 28)), [1.0, 2.0, 3.0])])
    sentence(OSError, lambda: school(tmp_path), "must hold the published files of 'school'")


def test_a_stratified_part_of_a_source(tiny_mnist):
    source = load("mnist", tiny_mnist)
    part = source.sample(train=10, test=5, seed=1)
    assert part.y_train.bincount(minlength=10).tolist() == [1] * 10 and len(part.y_test) == 5
    assert torch.equal(part.x_train, source.sample(train=10, seed=1).x_train)
    assert not torch.equal(part.x_train, source.sample(train=10, seed=2).x_train)
    fed = federation_of("mnist", "iid", 2, root=tiny_mnist, train_samples=10)
    assert fed.size().tolist() == [5, 5] and fed.size("test").tolist() == [5, 5]


def test_samples_out_of_range(tiny_mnist):
    source = load("mnist", tiny_mnist)
    sentence(
        ValueError,
        lambda: source.sample(train=21),
        "train must lie in 1..20, the samples there are, got 21",
    )
    sentence(
        ValueError,
        lambda: federation_of(source, "B", classes=3),
        "partition B takes the options roll, sizes, shuffle",
        "got classes",
    )
    sentence(
        ValueError,
        lambda: federation_of(source, fractions={"train": 1}),
        "fractions and standardize are for data that comes with its clients",
    )


def test_broken_and_missing_image_files(tiny_mnist):
    at = tiny_mnist / "mnist"
    labels = at / f"{IDX_FILES[1]}.gz"
    write_idx(labels, np.zeros(19))
    sentence(
        OSError,
        lambda: load("mnist", tiny_mnist),
        "data 'mnist' must have one label per image, got 20 and 19",
    )
    labels.write_bytes(labels.read_bytes()[:-9])
    sentence(
        OSError, lambda: load("mnist", tiny_mnist), str(labels), "must be a complete gzip file"
    )
    labels.write_bytes(b"<html>")
    sentence(
        OSError, lambda: load("mnist", tiny_mnist), str(labels), "must be a complete gzip file"
    )
    labels.write_bytes(gzip.compress(b"<html>"))
    sentence(
        OSError,
        lambda: load("mnist", tiny_mnist),
        str(labels),
        "must be an IDX file of unsigned bytes, got the head 3c68746d",
    )
    labels.write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 20) + b"abc"))
    sentence(
        OSError, lambda: load("mnist", tiny_mnist), "must hold 20 bytes for its shape [20], got 3"
    )
    labels.unlink()
    sentence(
        OSError,
        lambda: load("mnist", tiny_mnist),
        "must hold the four IDX files of mnist, but train-labels-idx1-ubyte is missing",
    )


def test_federation_is_what_comes_back(tiny_mnist):
    assert isinstance(federation_of("mnist", n=2, root=tiny_mnist), Federation)
