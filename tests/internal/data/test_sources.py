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
from pflcore.data.sources import IDX_FILES, SOURCES, digest_of, read_idx


def write_idx(path, a, squeeze=gzip.compress):
    raw = struct.pack(f">4B{a.ndim}I", 0, 0, 8, a.ndim, *a.shape) + a.astype(np.uint8).tobytes()
    path.write_bytes(squeeze(raw))


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """Twenty training and ten test images in MNIST's files; two of them not gzipped. They need not
    be the published ones here."""
    monkeypatch.setitem(SOURCES, "mnist", SOURCES["mnist"]._replace(digest=None))
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
    a, b, c, d = (
        read_idx(next(p for p in (at / f"{f}.gz", at / f) if p.is_file())) for f in IDX_FILES
    )
    mine = digest_of(a, b, c, d)

    def published(name, digest):
        monkeypatch.setitem(SOURCES, name, SOURCES[name]._replace(digest=digest))

    published("mnist", mine)
    # packed or not, these are the published ones
    assert len(load("mnist", tiny_mnist).y_train) == 20
    published("mnist", mine[::-1])
    sentence(OSError, lambda: load("mnist", tiny_mnist), "files of 'mnist', got those of 'others'")
    published("fashion_mnist", mine)
    sentence(OSError, lambda: load("mnist", tiny_mnist), "got those of 'fashion_mnist'")
    cells(tmp_path / "school" / "school.mat", [(np.ones((3, 28)), [1.0, 2.0, 3.0])])
    sentence(OSError, lambda: school(tmp_path), "expected the published files of 'school'")


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
    for call, said in (
        (lambda: source.sample(train=21), "train: expected at most the 20 samples there are"),
        (lambda: federation_of(source, "B", classes=3), "B: expected the options sizes, shuffle"),
        (
            lambda: federation_of(source, fractions={"val": 0.5}),
            "fractions and standardize: exp",
        ),
    ):
        sentence(ValueError, call, said)


def test_broken_and_missing_image_files(tiny_mnist):
    at = tiny_mnist / "mnist"
    labels = at / f"{IDX_FILES[1]}.gz"
    whole = labels.read_bytes()
    for broken in (
        whole[:-9],
        b"<html>",
        gzip.compress(b"<html>"),
        gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 20) + b"abc"),
        None,
    ):
        labels.write_bytes(broken) if broken else labels.unlink()
        sentence(OSError, lambda: load("mnist", tiny_mnist), "'mnist' can be neither read from")


def test_federation_is_what_comes_back(tiny_mnist):
    assert isinstance(federation_of("mnist", n=2, root=tiny_mnist), Federation)
