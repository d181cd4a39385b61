"""Samples of several parts, which names or positions tell apart.

A stand-in has what a Dataset of Hugging Face has for `from_hf`; where `datasets` and
flwr-datasets are installed, theirs are read, too.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from entry_points import sentence
from small import equals
from torch.utils.data import TensorDataset

from pflcore import Federation

ROWS = 12
PIXELS = np.arange(ROWS * 6, dtype=np.uint8).reshape(ROWS, 2, 3) * 3
LABELS = np.arange(ROWS) % 3
WRITERS = np.array(["ann", "bob", "cay"])[[2, 0, 0, 1] * 3]
NAMES = ["yes", "no", "perhaps"]


def picture(pixels, mode=None):
    image = pytest.importorskip("PIL.Image").fromarray(pixels)
    return image.convert(mode) if mode else image


class Table:
    """A stand-in for a Dataset: columns by name, rows by number, dicts by slices."""

    def __init__(self, **columns):
        self.columns_of_rows = columns
        self.column_names = list(columns)
        self.features = {name: SimpleNamespace() for name in columns}
        self.features["label"] = SimpleNamespace(names=NAMES)

    def __len__(self):
        return len(self.columns_of_rows["label"])

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns_of_rows[key]
        return {name: column[key] for name, column in self.columns_of_rows.items()}


def table(rows=slice(None)):
    images = [picture(pixels) for pixels in PIXELS[rows]]
    labels = LABELS[rows].tolist()
    writers = WRITERS[rows].tolist()
    notes = ["words"] * len(labels)
    return Table(image=images, note=notes, label=labels, writer=writers)


def assert_rows(data, i, rows, split="train"):
    """Client i has these rows as its samples."""
    samples = data.index[split][i]
    want = torch.from_numpy(PIXELS[rows][:, None].astype(np.float32) / 255)
    equals(data.x[samples], want)
    assert data.y[samples].tolist() == LABELS[rows].tolist()


# dicts, tuples and columns ----------------------------------------------------

X = torch.rand(4, 2)
Y = torch.tensor([0, 1, 1, 0])
ID = torch.arange(4)


@pytest.mark.parametrize(
    "samples, x, y",
    [
        (TensorDataset(X, Y, ID), 0, 1),
        (TensorDataset(ID, Y, X), 2, 1),
        ([(x, int(y), "a") for x, y in zip(X, Y, strict=True)], 0, 1),
        ([{"v": x, "t": y, "id": 3} for x, y in zip(X, Y, strict=True)], "v", "t"),
        ({"v": X.numpy(), "t": Y.tolist(), "id": ID}, "v", "t"),
    ],
    ids=["triples", "other places", "list", "dicts", "columns"],
)
def test_named_parts_are_the_pair(samples, x, y):
    want = Federation.from_clients([(X, Y), {"train": (X, Y), "test": (X, Y)}])

    entries = [samples, {"train": samples, "test": samples}]
    got = Federation.from_clients(entries, x=x, y=y)

    equals(got.x, want.x)
    equals(got.y, want.y)
    assert got.splits == want.splits


def test_several_parts_are_fields():
    samples = [{"a": x, "b": int(i), "y": y} for x, y, i in zip(X, Y, ID, strict=True)]

    data = Federation.from_clients([samples], x=["a", "b"], y="y")

    assert [field.name for field in data.fields] == ["a", "b"]
    equals(data.fields.split_fields(data.x)["b"], ID)


@pytest.mark.parametrize(
    "samples, keys, words",
    [
        ([{"image": X[0], "t": 1}], {"x": "imag", "y": "t"}, ".*did you mean 'image'"),
        (
            TensorDataset(X, Y),
            {"x": 0, "y": 2},
            r".*parts of a sample, \[0, 1\], got 2",
        ),
        (
            SimpleNamespace(column_names=["image", "t"]),
            {"x": "image", "y": "t"},
            r"expected a Dataset of known length .*, got SimpleNamespace",
        ),
        ([3, 4], {"x": 0, "y": 1}, ".*samples with parts that x and y name.*, got 3"),
    ],
)
def test_missing_parts_are_one_sentence(samples, keys, words):
    with sentence(rf"client 0 \(train\): {words}"):
        Federation.from_clients([samples], **keys)


def test_one_name_asks_for_the_other():
    with sentence("y: expected the name of the targets, as x has one"):
        Federation.from_clients([[{"a": 1}]], x="a")


# pictures ---------------------------------------------------------------------


@pytest.mark.parametrize("mode, bands", [("L", 1), ("RGB", 3), ("1", 1), ("P", 3)])
def test_a_picture_is_its_bands_from_0_to_1(mode, bands):
    image = picture(PIXELS[0], mode)

    data = Federation.from_clients([[(image, 0), (image, 1)]])

    assert data.x.shape == (2, bands, 2, 3) and data.x.dtype == torch.float32
    if mode == "RGB":
        want = torch.from_numpy(np.array(image) / 255).float().permute(2, 0, 1)
        equals(data.x[0], want)


def test_deep_pixels_are_refused():
    with sentence(
        "'image' of client .*: expected one of the modes L, RGB.* of mode F; convert"
    ):
        Federation.from_hf([table(), Table(image=[picture(PIXELS[0], "F")], label=[0])])


# Hugging Face -----------------------------------------------------------------


def test_the_column_by_makes_the_clients():
    data = Federation.from_hf({"train": table(), "test": table(slice(4))}, "writer")

    assert data.names == ("ann", "bob", "cay") and data.class_names == tuple(NAMES)
    for i, writer in enumerate(data.names):
        assert_rows(data, i, writer == WRITERS)
        assert_rows(data, i, np.flatnonzero(WRITERS[:4] == writer), "test")


def test_partitions_are_the_clients():
    parts = [slice(0, 5), slice(5, 12)]
    partitioner = SimpleNamespace(
        num_partitions=2, load_partition=lambda i, split=None: table(parts[i])
    )
    federated = SimpleNamespace(
        load_partition=partitioner.load_partition,
        partitioners={"train": partitioner, "test": partitioner},
    )
    for source in ([table(part) for part in parts], partitioner, federated):
        data = Federation.from_hf(source)
        for i, part in enumerate(parts):
            assert_rows(data, i, part)
    assert data.splits == ("train", "test")


@pytest.mark.parametrize(
    "dataset, options, words",
    [
        (table, {}, "by: expected the name of the column with each row's client, one"),
        (table, {"by": "wirter"}, "by: got 'wirter', did you mean 'writer'"),
        (lambda: [table()], {"by": "writer"}, "by: expected None, as each client's"),
        (lambda: {"dev": table()}, {"by": "writer"}, "dataset: expected the splits tr"),
        (
            table,
            {"by": "writer", "x": "note"},
            r"x of client ann \(train\): expected nu",
        ),
        (lambda: 5, {"by": "writer"}, "dataset: expected a Dataset with named columns"),
        (
            lambda: SimpleNamespace(column_names=["image", "label"]),
            {"by": "writer"},
            "dataset: expected a Dataset of known length",
        ),
    ],
)
def test_other_sources_are_one_sentence(dataset, options, words):
    with sentence(words):
        Federation.from_hf(dataset(), **options)


def test_validation_rows_are_val_and_test_rows_test():
    thirds = [slice(0, 4), slice(4, 8), slice(8, 12)]
    tables = [table(rows) for rows in thirds]
    splits = dict(zip(("train", "validation", "test"), tables, strict=True))

    data = Federation.from_hf(splits, "writer")

    assert data.names == ("ann", "bob", "cay")
    for split, rows in zip(("train", "val", "test"), thirds, strict=True):
        for i, name in enumerate(data.names):
            own = np.arange(ROWS)[rows][WRITERS[rows] == name]
            assert_rows(data, i, own, split)


def test_clients_that_are_numbers_have_their_own_names():
    """A column of class labels holds places in a list of names."""
    rows = table()
    places = ["zoe", "cay", "ann", "bob"]
    numbers = [places.index(name) for name in WRITERS]
    rows.columns_of_rows["writer"] = numbers
    rows.features["writer"] = SimpleNamespace(names=places)

    data = Federation.from_hf(rows, "writer")

    assert data.names == ("cay", "ann", "bob")
    for i, name in enumerate(data.names):
        assert_rows(data, i, np.flatnonzero(name == WRITERS))


def test_a_name_needs_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with sentence("from_hf: a Dataset by name needs datasets, which is n", ImportError):
        Federation.from_hf("ylecun/mnist", "writer")


@pytest.mark.deep("it takes a second")
def test_real_datasets_are_read_as_the_stand_in():
    datasets = pytest.importorskip("datasets")
    rows = table()
    features = datasets.Features(
        image=datasets.Image(),
        note=datasets.Value("string"),
        label=datasets.ClassLabel(names=NAMES),
        writer=datasets.Value("string"),
    )
    real = datasets.Dataset.from_dict(rows.columns_of_rows, features=features)
    want = Federation.from_hf(rows, "writer")

    splits = datasets.DatasetDict(train=real)
    as_floats = real.with_transform(
        lambda rows: {
            **rows,
            "image": [torch.from_numpy(np.array(i))[None] / 255 for i in rows["image"]],
        }
    )
    for source in (real, splits, as_floats):
        got = Federation.from_hf(source, "writer")
        equals(got.x, want.x)
        assert got.class_names == want.class_names and got.names == want.names
    with sentence("dataset: expected a Dataset of known length"):
        Federation.from_hf(real.to_iterable_dataset(), "writer")

    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    partitioner = partitioners.NaturalIdPartitioner("writer")
    partitioner.dataset = real
    got = Federation.from_hf(partitioner)
    assert set(got.names) == set(want.names)
    for writer in want.names:
        assert_rows(got, got.names.index(writer), writer == WRITERS)
