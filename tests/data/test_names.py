"""Facts of a federation are decided over all clients, splits and files.

Names of classes, ids of partitions and first lines of files have one meaning for all.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from entry_points import folder, sentence
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from pflcore import Federation
from pflcore.data import partition
from pflcore.lab.data import federation_of


class Folders(Dataset):
    """A Dataset as torchvision's ImageFolder."""

    def __init__(self, classes, labels, target_transform=None):
        self.classes = classes
        self.class_to_idx = {name: k for k, name in enumerate(classes)}
        self.labels = labels
        self.target_transform = target_transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, k):
        return torch.tensor([float(k)]), self.labels[k]


class Feature:
    def __init__(self, names):
        self.names = names


class Table:
    """A Dataset as Hugging Face's."""

    def __init__(self, names=None, **columns):
        self.columns_by_name = columns
        self.column_names = list(columns)
        self.features = {k: Feature(v) for k, v in (names or {}).items()}

    def __len__(self):
        return len(self.columns_by_name[self.column_names[0]])

    def __getitem__(self, k):
        if isinstance(k, str):
            return self.columns_by_name[k]
        return {name: values[k] for name, values in self.columns_by_name.items()}


def words(data, client, split="train"):
    return [data.class_names[k] for k in data.labels(client, split).tolist()]


ILL = ["covid", "normal", "pneumonia"]


def test_folders_of_classes_are_joined_by_name():
    other = Subset(Folders(["normal", "pneumonia"], [0, 1]), [1, 0])
    data = Federation.from_clients([{"train": Folders(ILL, [0, 1, 2]), "test": other}])
    assert data.class_names == ("covid", "normal", "pneumonia")
    assert words(data, 0, "test") == ["pneumonia", "normal"]


@given(
    st.lists(
        st.lists(st.sampled_from("abcdef"), min_size=1, unique=True).flatmap(
            lambda names: st.tuples(
                st.just(names),
                st.lists(st.integers(0, len(names) - 1), min_size=1, max_size=5),
            )
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_sample_keeps_the_name_of_its_class(sites):
    data = Federation.from_clients([Folders(*site) for site in sites])
    for i, (names, labels) in enumerate(sites):
        assert words(data, i) == [names[k] for k in labels]


def test_equal_lists_keep_their_order():
    names = ["zero", "one", "two"]
    data = Federation.from_clients([Folders(names, [0, 1]), Folders(names, [1])])
    assert data.y.tolist() == [0, 1, 1] and data.classes == 3
    assert data.class_names == ("zero", "one", "two")


def test_a_target_transform_makes_numbers_without_names():
    data = Federation.from_clients([Folders(ILL, [0, 1], int), Folders(ILL, [1], int)])
    assert data.class_names is None and data.classes == 2


def test_names_beside_numbers_are_refused():
    named = Folders(ILL, [0, 1])
    plain = (np.zeros((2, 1)), np.array([0, 1]))
    with sentence(r"y of client 1 \(train\): expected labels with names"):
        Federation.from_clients([named, plain])
    with sentence(r"y of client 0 .*: expected one of the classes .*got 'covid'"):
        Federation.from_clients([named], classes=["ill", "normal"])


def test_parts_of_one_dataset_have_one_list():
    parts = ConcatDataset([Folders(["a", "b"], [0]), Folders(["b", "c"], [0])])
    with sentence(r"client 0 \(train\): expected parts of which each number names"):
        Federation.from_clients([parts])


@pytest.mark.parametrize("classes", ["infer", ["yes", "no"]])
def test_features_are_joined_by_name(classes):
    sites = [
        Table({"label": ["no", "yes"]}, x=[[0.0], [1.0]], label=[0, 1]),
        Table({"label": ["yes", "no"]}, x=[[0.0], [1.0]], label=[0, 1]),
    ]
    data = Federation.from_hf(sites, x="x", classes=classes)
    assert words(data, 0) == ["no", "yes"] and words(data, 1) == ["yes", "no"]


def test_splits_have_lists_of_their_own():
    columns = {"x": [[0.0], [1.0]], "label": [0, 1], "site": [0, 1]}
    train = Table({"label": ["a", "b"], "site": ["s", "t"]}, **columns)
    test = Table({"label": ["b", "a"], "site": ["t", "s"]}, **columns)
    data = Federation.from_hf({"train": train, "test": test}, by="site", x="x")
    assert data.names == ("s", "t")
    assert words(data, "s") == ["a"] and words(data, "s", "test") == ["a"]


def test_an_ignored_label_is_no_class():
    columns = {"x": [[0.0], [1.0]], "site": ["s", "t"]}
    train = Table({"label": ["a", "b"]}, label=[0, 1], **columns)
    test = Table({"label": ["a", "b"]}, label=[-1, 1], **columns)
    splits = {"train": train, "test": test}
    data = Federation.from_hf(splits, by="site", x="x", ignored_label=-1)
    assert data.labels("s", "test").tolist() == [-100]
    with sentence(r"y of client s \(test\): expected labels in 0..1.*ignored_label=-1"):
        Federation.from_hf(splits, by="site", x="x")


class Partitioner:
    def __init__(self, rows):
        ids = list(dict.fromkeys(name for name, *_ in rows))
        self.partition_id_to_natural_id = dict(enumerate(ids))
        self.num_partitions = len(ids)
        self.rows = rows

    def load_partition(self, i):
        name = self.partition_id_to_natural_id[i]
        rows = [row for row in self.rows if row[0] == name]
        return Table(x=[[row[1]] for row in rows], label=[row[2] for row in rows])


class Partitions:
    def __init__(self, **partitioners):
        self.partitioners = partitioners

    def load_partition(self, i, split):
        return self.partitioners[split].load_partition(i)


def test_a_partition_belongs_to_the_writer_of_its_id():
    train = Partitioner([("ann", 1.0, 0), ("bob", 2.0, 1)])
    test = Partitioner([("cyd", 3.0, 0), ("bob", 2.0, 1), ("ann", 1.0, 0)])
    data = Federation.from_hf(Partitions(train=train, test=test), x="x")
    assert data.names == ("ann", "bob", "cyd")
    for name, x in (("ann", 1), ("bob", 2), ("cyd", 3)):
        assert data.client(name, "test")[0].tolist() == [[x]]
    assert data.size().tolist() == [1, 1, 0]


ROWS = "".join(f"{i},{2 * i},{i % 2}\n" for i in range(12))


@pytest.mark.parametrize("header", ["0,1,2", "1,2,3", "5,6,7", "2019,2020,2021"])
def test_a_first_line_that_counts_is_a_header(header, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(f"{header}\n{ROWS}")
    data = folder(tmp_path)
    assert data.size().tolist() == [12, 12] and data.classes == 2
    assert data.columns == tuple(header.split(",")[:2])


@pytest.mark.parametrize("gap", ["?", "", "NA", "n/a"])
def test_a_gap_in_the_first_line_makes_no_header(gap, tmp_path):
    (tmp_path / "a.csv").write_text(f"1,{gap},0\n{ROWS}")
    with pytest.raises(OSError, match="expected numbers, a point in decimals"):
        folder(tmp_path)


def test_a_single_file_that_counts_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text(f"5,6,7\n{ROWS}")
    with pytest.raises(ValueError, match="put a line of names into every file"):
        folder(tmp_path)


@pytest.mark.parametrize("names", ["a,2020,label", "2020,a,label", "age,bp,died"])
def test_a_header_needs_no_target_by_name(names, tmp_path):
    (tmp_path / "a.csv").write_text(f"{names}\n{ROWS}")
    assert folder(tmp_path).columns == tuple(names.split(",")[:2])


def test_a_header_with_a_number_is_a_header(tmp_path):
    (tmp_path / "a.csv").write_text(f"region,2020,label\n{ROWS}")
    assert folder(tmp_path, target="label").columns == ("region", "2020")


@pytest.mark.parametrize(
    "first, second",
    [("1,2,3\n", ""), ("a,b,c\n", ""), ("1,2,3\n", "2,3,4\n"), ("0,2,3\n", "0,2,3\n")],
)
def test_first_lines_that_may_be_either_are_refused(first, second, tmp_path):
    (tmp_path / "a.csv").write_text(first + ROWS)
    (tmp_path / "b.csv").write_text(second + ROWS)
    with pytest.raises(ValueError, match="put a line of names into every file"):
        folder(tmp_path)


@pytest.mark.parametrize("classes", ["infer", ["no", "yes"]])
@pytest.mark.parametrize("header", ["", "age,died\n"])
def test_words_of_files_are_classes(header, classes, tmp_path):
    (tmp_path / "a.csv").write_text(f"{header}60,yes\n50,no\n70,yes\n")
    (tmp_path / "b.csv").write_text(f"{header}60,yes\n50,yes\n70,yes\n")
    data = folder(tmp_path, classes=classes)
    assert words(data, "a") == ["yes", "no", "yes"] and words(data, "b") == ["yes"] * 3


def test_words_of_tables_are_classes():
    rows = {"a": [1.0, 2, 3], "y": ["no", "yes", "no"], "client": [0, 0, 1]}
    data = Federation.from_table(pd.DataFrame(rows))
    assert data.class_names == ("no", "yes") and data.y.tolist() == [0, 1, 0]


def test_words_of_two_pools_are_classes():
    part = partition("iid", [0, 1], 2, test_labels=[0, 0])
    x = np.zeros((2, 1))
    data = Federation.from_partition(x, ["b", "c"], part, x_test=x, y_test=["a", "a"])
    assert data.class_names == ("a", "b", "c") and data.y.tolist() == [1, 2, 0, 0]


def test_pictures_of_classes_are_numbers():
    image = pytest.importorskip("PIL.Image")
    ids = np.array([[0, 1], [2, 255]], np.uint8)
    x = image.fromarray(np.zeros((2, 2, 3), np.uint8))
    for mode in ("L", "I", "I;16"):
        y = image.fromarray(ids.astype({"L": "u1", "I": "i4", "I;16": "u2"}[mode]))
        data = Federation.from_clients([[(x, y)] * 3], classes=3, ignored_label=255)
        assert data.y[0].tolist() == [[0, 1], [2, -100]]
    with sentence(r"y of client 0 \(train\): expected a picture of classes.*mode RGB"):
        Federation.from_clients([[(x, x)] * 3])


def test_a_palette_picture_is_its_places():
    image = pytest.importorskip("PIL.Image")
    mask = image.fromarray(np.array([[0, 1], [1, 0]], np.uint8)).convert("P")
    mask.putpalette([9, 9, 9, 200, 100, 50])
    x = image.fromarray(np.zeros((2, 2), np.uint8))
    data = Federation.from_clients([[(x, mask)] * 2])
    assert data.y[0].tolist() == [[0, 1], [1, 0]] and data.classes == 2


@pytest.mark.parametrize("kind", [pd.Series, np.array, list])
def test_a_frame_with_targets_apart(kind):
    x = pd.DataFrame({"age": [1.0, 2, 3, 4], "bp": [1.0, 2, 3, 4]})
    data = Federation.from_table(x, kind([0, 1, 0, 1]), kind(["a", "b", "a", "b"]))
    assert data.columns == ("age", "bp") and data.names == ("a", "b")


def test_a_column_of_vectors_is_the_inputs():
    rows = {"e": [np.arange(3.0)] * 4, "y": [0, 1, 0, 1], "client": [0, 0, 1, 1]}
    data = Federation.from_table(pd.DataFrame(rows))
    assert data.x.shape == (4, 3) and data.columns is None


def test_one_table_of_all_clients(tmp_path):
    path = tmp_path / "sites.csv"
    path.write_text("site,age,died\n007,60,yes\n7,50,no\n007,70,yes\n7,61,no\n")
    data = federation_of(f"table:{path}", client="site", label="died", fractions={})
    assert data.names == ("007", "7") and data.columns == ("age",)
    assert words(data, "007") == ["yes", "yes"]


def test_a_client_with_validation_samples_alone_is_refused():
    pair = (torch.randn(6, 2), torch.arange(6) % 2)
    clients = {"ann": pair, "bob": {"val": pair}}
    with sentence("client bob: expected samples to train on or to test beside those"):
        Federation.from_clients(clients)
    assert Federation.from_clients({**clients, "bob": {"test": pair}}).n == 2
