"""CIFAR's files become the arrays that unpickling them would give."""

import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pflcore.data import SOURCES, load
from pflcore.data._cifar import CIFAR10, CIFAR100, read_cifar

LAYOUTS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
LABEL_KEYS = {"cifar10": "labels", "cifar100": "fine_labels"}


def short_text(text):
    """A text as Python 2 pickles it."""
    return b"U" + bytes([len(text)]) + text.encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def python2_pickle(x, y, label_key):
    """The pickle that Python 2 and its numpy wrote of images and labels."""
    raw = x.tobytes("A")
    flag = b"\x88" if x.flags.f_contiguous and not x.flags.c_contiguous else b"\x89"
    labels = b"".join(map(number, y))
    shape = b"".join(map(number, x.shape)) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08"
        + number(0)
        + b"\x85U\x01b\x87R("
        + number(1)
        + shape
        + b"cnumpy\ndtype\nU\x02u1"
        + number(0)
        + number(1)
        + b"\x87R("
        + number(3)
        + b"U\x01|NNN"
        + 2 * number(-1)
        + number(0)
        + b"tb"
        + flag
        + b"T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    names = short_text("filenames") + b"](" + short_text("a.png") + b"e"
    batch = short_text("batch_label") + short_text("batch 1 of 1")
    head = b"\x80\x02}(" + batch + short_text(label_key)
    return head + b"](" + labels + b"e" + short_text("data") + array + names + b"u."


def python3_pickle(x, y, label_key, protocol):
    batch = {"batch_label": b"batch", label_key: [*map(int, y)], "data": x}
    batch["coarse_labels"] = [7] * len(y)
    return pickle.dumps(batch, protocol=protocol)


def drawn_batch(n, seed=0, classes=10):
    draw = np.random.RandomState(seed).randint
    x = draw(0, 256, (n, 3072)).astype(np.uint8)
    return x, draw(0, classes, n)


def file_names(layout):
    return [*layout.train, *layout.test]


def write_version(root, layout, contents):
    """Writes the files of a version, each with its own bytes."""
    folder = root / layout.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(file_names(layout), contents, strict=True):
        (folder / name).write_bytes(content)
    return folder


def binary_file(x, y, coarse):
    columns = [y[:, None].astype(np.uint8), x]
    if coarse:
        columns.insert(0, np.full((len(y), 1), 19, dtype=np.uint8))
    return np.concatenate(columns, 1).tobytes()


def parsed_by(layout, raw):
    x, y = layout.parse(raw)
    return x.tolist(), y.tolist()


def assert_refused(name, root, message):
    with pytest.raises(OSError) as e:
        load(name, root)
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.fixture
def no_torchvision(monkeypatch):
    """Torchvision cannot be imported, and made-up files are accepted."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.datasets", raising=False)
    for name in LAYOUTS:
        monkeypatch.setitem(SOURCES, name, SOURCES[name]._replace(digest=None))
    for name in ("train", "test"):
        monkeypatch.delitem(CIFAR100[0].md5, name)


@given(
    n=st.integers(1, 3),
    seed=st.integers(0, 99),
    name=st.sampled_from(["cifar10", "cifar100"]),
    order=st.sampled_from("CF"),
    protocol=st.sampled_from(["python 2", 2, 3, 4]),
)
def test_scan_gives_what_unpickling_gives(n, seed, name, order, protocol):
    x, y = drawn_batch(n, seed)
    x = np.asarray(x, order=order)
    key = LABEL_KEYS[name]
    raw = python2_pickle(x, y, key)
    if protocol != "python 2":
        raw = python3_pickle(x, y, key, protocol)

    got = parsed_by(LAYOUTS[name][0], raw)

    want = pickle.loads(raw, encoding="latin1")
    assert got == (want["data"].tolist(), want[key])
    assert got == (x.tolist(), y.tolist())


@given(n=st.integers(1, 3), seed=st.integers(0, 99), name=st.sampled_from([*LAYOUTS]))
def test_both_versions_give_the_same_arrays(n, seed, name):
    x, y = drawn_batch(n, seed)
    python, binary = LAYOUTS[name]

    got = parsed_by(binary, binary_file(x, y, coarse=name == "cifar100"))

    assert got == parsed_by(python, python2_pickle(x, y, LABEL_KEYS[name]))


@given(st.data())
def test_a_damaged_file_is_refused_or_still_has_its_form(data):
    raw = python2_pickle(*drawn_batch(2), "labels")
    where = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["cut", "byte", "head"]))
    if kind == "cut":
        raw = raw[:where]
    else:
        where = where % 300 if kind == "head" else where
        byte = data.draw(st.binary(min_size=1, max_size=1))
        raw = raw[:where] + byte + raw[where + 1 :]

    try:
        x, y = CIFAR10[0].parse(raw)
    except ValueError as error:
        assert "a pickled dict with images" in str(error)
    else:
        assert x.dtype == np.uint8 and x.shape[1:] == (3072,)
        assert y.dtype == np.int64


@pytest.mark.parametrize("inside", ["", "NAME"])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_files_are_read_without_torchvision(
    name, version, inside, tmp_path, no_torchvision
):
    layout = LAYOUTS[name][version]
    batches = [drawn_batch(2, seed) for seed in range(len(file_names(layout)))]
    if version == 0:
        contents = [python2_pickle(x, y, LABEL_KEYS[name]) for x, y in batches]
    else:
        contents = [binary_file(x, y, coarse=name == "cifar100") for x, y in batches]
    write_version(tmp_path / inside.replace("NAME", name), layout, contents)

    source = load(name, tmp_path)

    *train, (x_test, y_test) = batches
    want = np.concatenate([y for _, y in train])
    assert source.y_train.tolist() == want.tolist()
    assert source.y_test.tolist() == y_test.tolist()
    assert source.x_train.shape == (len(want), 3, 32, 32)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (source.mean, source.std))
    pixels = torch.from_numpy(x_test).view(-1, 3, 32, 32).float() / 255
    torch.testing.assert_close(source.x_test, (pixels - mean) / deviation)


def cifar10_folder(root):
    """A folder with small files of CIFAR-10's version for Python."""
    contents = [python2_pickle(*drawn_batch(2, seed), "labels") for seed in range(6)]
    return write_version(root, CIFAR10[0], contents)


X, Y = drawn_batch(2)
FORM = "data_batch_3: expected a pickled dict with images 'data' [n, 3072] uint8 and"
MALFORMED = {
    "no pickle": (b"<html>", FORM),
    "empty": (b"", FORM),
    "other key": (python2_pickle(X, Y, "fine_labels"), FORM),
    "floats": (python3_pickle(X.astype(np.float32), Y, "labels", 2), FORM),
    "narrow": (python2_pickle(X[:, :3071], Y, "labels"), FORM),
    "other shape": (python2_pickle(X.reshape(4, 1536), Y, "labels"), FORM),
    "no images": (python2_pickle(X[:0], Y[:0], "labels"), FORM),
    "few labels": (python2_pickle(X, Y[:1], "labels"), "got 1 for 2 images"),
    "wrong labels": (python2_pickle(X, Y + 10, "labels"), "expected labels in 0..9"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_one_sentence(case, tmp_path, no_torchvision):
    folder = cifar10_folder(tmp_path)
    raw, message = MALFORMED[case]
    (folder / "data_batch_3").write_bytes(raw)

    assert_refused("cifar10", tmp_path, message)


@pytest.mark.parametrize("cut", [1, 3073, 2 * 3073])
def test_a_cut_binary_file_is_one_sentence(cut, tmp_path, no_torchvision):
    """A file without a whole number of images, or without any, is refused.

    A file that is cut between two images has the right form. The digest of the
    published arrays refuses that one.
    """
    raw = binary_file(*drawn_batch(2), coarse=False)
    folder = write_version(tmp_path, CIFAR10[1], 6 * [raw])
    (folder / "test_batch.bin").write_bytes(raw[:-cut])
    messages = {1: "expected records of 3073 bytes, got 6145", 6146: "got 0 for 0"}

    if cut in messages:
        assert_refused("cifar10", tmp_path, messages[cut])
    else:
        assert len(load("cifar10", tmp_path).y_test) == 1


def test_a_missing_batch_is_named(tmp_path, no_torchvision):
    folder = cifar10_folder(tmp_path)
    (folder / "test_batch").unlink()

    message = "test_batch: expected a regular file"
    assert_refused("cifar10", tmp_path, message)


class Intruder:
    """An object that makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_nothing_in_a_file_is_run(tmp_path, no_torchvision):
    folder = cifar10_folder(tmp_path)
    made = tmp_path / "made"
    x, y = drawn_batch(2)
    batch = {"intruder": Intruder(made), "labels": [*map(int, y)], "data": x}
    raw = pickle.dumps(batch, protocol=2)
    (folder / "test_batch").write_bytes(raw)

    assert load("cifar10", tmp_path).y_test.tolist() == y.tolist()

    assert not made.exists()
    pickle.loads(raw)
    assert made.is_dir()  # unpickling would have made it


def test_other_files_than_the_published_ones_are_refused(tmp_path):
    contents = 2 * [python2_pickle(*drawn_batch(2), "fine_labels")]
    write_version(tmp_path, CIFAR100[0], contents)
    message = "train: expected the published file, got another one"
    assert_refused("cifar100", tmp_path, message)

    cifar10_folder(tmp_path)
    message = "expected the published files of 'cifar10'"
    assert_refused("cifar10", tmp_path, message)


@pytest.mark.deep("all of CIFAR-10 is read twice")
def test_real_files_become_torchvisions_arrays():
    datasets = pytest.importorskip("torchvision.datasets")
    root = os.environ.get("PFLCORE_DATA")
    if root is None or not (Path(root) / CIFAR10[0].folder).is_dir():
        pytest.skip("PFLCORE_DATA holds no cifar-10-batches-py/ here")

    x, y, x_test, y_test = read_cifar(CIFAR10, Path(root))

    for train, images, labels in ((True, x, y), (False, x_test, y_test)):
        want = datasets.CIFAR10(root, train=train)
        pixels = torch.from_numpy(want.data).permute(0, 3, 1, 2)
        assert torch.equal(torch.from_numpy(images), pixels)
        assert labels.tolist() == want.targets
