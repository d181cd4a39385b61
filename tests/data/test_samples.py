"""Forms of a client's samples: pairs, lists of samples, Datasets, and tables.

Tables are those of other packages. Where a form is refused, the advice of the error
message is followed, and it works.
"""

import types

import numpy as np
import pytest
import torch
from entry_points import sentence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pflcore import Client, Federation, Training
from pflcore.data import partition

X = torch.arange(6.0).view(3, 2)
Y = torch.tensor([0, 1, 1])


def read(samples):
    """One client's inputs and targets, as lists."""
    data = Federation.from_clients([samples])
    return data.x.tolist(), data.y.tolist()


WANT = X.tolist(), Y.tolist()

# pairs and lists of two samples -----------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["vectors", "numbers", "lists"])
def test_a_list_of_tuples_is_samples_however_many(count, kind):
    x = torch.arange(12.0).view(4, 3)[:count]
    y = -x
    if kind == "numbers":
        x = x[:, 0].tolist()
        y = (-y[:, 0]).tolist()
    if kind == "lists":
        x = x.tolist()
        y = y.tolist()

    got = Federation.from_clients([list(zip(x, y, strict=True))], classes=None)

    assert got.x.tolist() == torch.as_tensor(x).tolist()
    assert got.y.tolist() == torch.as_tensor(y).tolist()


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("count", [2, 3])
def test_two_arrays_are_a_pair(kind, count):
    pair = kind([X[:count], Y[:count]])
    assert read(pair) == (X[:count].tolist(), Y[:count].tolist())


def test_a_samples_numbers_in_a_list_are_its_row():
    """A list of numbers is the row of one sample.

    That holds also where there are as many samples as numbers.
    """
    rows = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert read(list(zip(rows, [0, 1, 0], strict=True))) == (rows, [0, 1, 0])
    fields = [({"u": row, "v": 1}, 0) for row in rows]
    assert read(fields)[0] == [[*row, 1] for row in rows]


def test_two_lists_of_two_in_a_tuple_are_a_pair():
    assert read(([[1.0], [2.0]], [0, 1])) == ([[1.0], [2.0]], [0, 1])
    assert read([[1.0, 2.0, 3.0], [0, 1, 1]]) == ([1.0, 2.0, 3.0], [0, 1, 1])


@pytest.mark.parametrize("two", [[[1.0, 2.0], [0, 1]], ((1.0, 0), (2.0, 1))])
def test_what_may_be_a_pair_or_two_samples_is_refused(two):
    with sentence(
        r"client 0 \(train\): expected \(x, y\) as a tuple of two arrays, or samples as"
    ):
        read(two)
    assert read(tuple(map(list, two))) == (
        [float(two[0][0]), float(two[0][1])],
        [*two[1]],
    )
    assert read([*map(tuple, two)])[0] == [two[0][0], two[1][0]]


def test_two_samples_are_two_everywhere():
    """A list of two samples is read as two samples.

    That holds in a split, and for a client on its own machine.
    """
    two = [(X[0], 0), (X[1], 1)]
    fed = Federation.from_clients([{"train": two, "test": two}])
    assert fed.size().tolist() == [2] and fed.size("test").tolist() == [2]
    assert Client("fedavg", torch.nn.Linear(2, 2), two, Training()) is not None


# Datasets ---------------------------------------------------------------------


class Items(Dataset):
    def __init__(self, make):
        self.make = make
        self.read = []

    def __len__(self):
        return 3

    def __getitem__(self, i):
        self.read.append(i)
        return self.make(X[i], int(Y[i]), i)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x, int(y)) for x, y in zip(X, Y, strict=True)])


@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda x, y, i: {"image": x, "label": y}, r"\['image', 'label'\]"),
        (lambda x, y, i: (x, y, i), r"\[0, 1, 2\]"),
    ],
)
def test_items_that_are_no_pairs_say_which_parts_there_are(make, parts):
    with sentence(r"client 0 \(train\): .*say which are x= and y=, of " + parts):
        read(Items(make))
    # A list of two such items is no pair either.
    two = [make(X[i], int(Y[i]), i) for i in range(2)]
    with sentence(r"client 0 \(train\): expected a pair"):
        read(two)


def test_an_item_is_read_once():
    dataset = Items(lambda x, y, i: (x, y))
    assert read(dataset) == WANT and dataset.read == [0, 1, 2]


def test_a_loader_has_a_dataset():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    with sentence(r"client 0 \(train\): .*; of a DataLoader give its \.dataset"):
        read(loader)
    assert read(loader.dataset) == WANT


@pytest.mark.parametrize("stream", [Stream(), iter(Stream())])
def test_what_has_no_numbers_is_listed(stream):
    with sentence(r"client 0 \(train\): .*; of a \w+ give list\(it\)"):
        read(stream)
    assert read(list(stream)) == WANT


def test_a_tuple_of_three_is_no_pair():
    with sentence(r"client 0 \(train\): .*this is a tuple of 3"):
        read((X, Y, Y))


def test_three_tensors_are_no_pairs():
    dataset = TensorDataset(X, Y, Y)
    with sentence(r"client 0 \(train\): .*say which are x= and y=, of \[0, 1, 2\]"):
        read(dataset)
    assert read([(d[0], d[1]) for d in dataset]) == WANT


@pytest.mark.parametrize(
    "none", [TensorDataset(X[:0], Y[:0]), [], (X[:0], Y[:0]), ([], [])]
)
def test_a_client_without_samples_can_be_left_out(none):
    with sentence(r"clients: .*leave out the 1 without, got \[1\]"):
        Federation.from_clients([(X, Y), none])
    assert Federation.from_clients([(X, Y)]).n == 1
    tested = Federation.from_clients(
        [{"train": (X, Y), "test": (X, Y)}, {"train": (X, Y)}]
    )
    same = [{"train": (X, Y), "test": (X, Y)}, {"train": (X, Y), "test": none}]
    assert (
        Federation.from_clients(same).size("test").tolist()
        == tested.size("test").tolist()
    )


# tables -----------------------------------------------------------------------


class Column:
    """Column like Arrow's and polars'.

    It converts to numpy and has no order.
    """

    __hash__ = None

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return np.asarray(self.values)


class Arrow:
    """Table like pyarrow.Table.

    Its attribute `columns` holds columns, not names.
    """

    def __init__(self, of):
        self.of = of
        self.column_names = list(of)
        self.columns = [Column(v) for v in of.values()]

    def __getitem__(self, name):
        return Column(self.of[name])


class Polars(Arrow):
    def __init__(self, of):
        super().__init__(of)
        self.columns = list(of)
        del self.column_names


class HuggingFace(Arrow):
    """Table whose columns are lists, and which has no `columns`."""

    columns = property(lambda self: pytest.fail("it has none"))

    def __init__(self, of):
        self.of = of
        self.column_names = list(of)

    def __getitem__(self, name):
        return list(self.of[name])


TABLE = {
    "u": [0.0, 2.0, 4.0],
    "label": [0, 1, 1],
    "v": [1.0, 3.0, 5.0],
    "who": ["b", "a", "b"],
}


@pytest.mark.parametrize("kind", [Arrow, Polars, HuggingFace])
def test_tables_of_other_packages_are_read_by_their_columns(kind):
    got = Federation.from_table(kind(TABLE), "label", "who")
    assert got.names == ("a", "b")
    assert got.x.tolist() == WANT[0] and got.y.tolist() == WANT[1]
    with sentence("y: expected one of the columns .'u', 'label', 'v', 'who'"):
        Federation.from_table(kind(TABLE))
    with sentence("x: expected columns of numbers without gaps .*, got words, .*'who'"):
        Federation.from_table(kind(TABLE), "label", "u")


@pytest.mark.parametrize("kind", [Arrow, HuggingFace])
def test_one_column_of_arrays_is_the_inputs(kind):
    images = np.random.rand(3, 2, 2).astype(np.float32)
    table = {"image": images, "label": [0, 1, 1], "who": [1, 0, 1]}
    assert torch.equal(
        Federation.from_table(kind(table), "label", "who").x, torch.from_numpy(images)
    )
    with sentence(
        "x: expected one number a row in each column, or a single column of arrays"
    ):
        Federation.from_table(kind({**table, "u": [1.0, 2.0, 3.0]}), "label", "who")


@pytest.mark.deep("it takes a second")
def test_the_packages_themselves_are_read():
    """Tables of the installed packages are read."""
    for name in ("pandas", "polars", "pyarrow", "datasets"):
        try:
            package = __import__(name)
        except ImportError:
            continue
        make = {
            "pandas": lambda p: p.DataFrame(TABLE),
            "polars": lambda p: p.DataFrame(TABLE),
            "pyarrow": lambda p: p.table(TABLE),
            "datasets": lambda p: p.Dataset.from_dict(TABLE),
        }[name]
        got = Federation.from_table(make(package), "label", "who")
        assert got.x.tolist() == WANT[0] and got.y.tolist() == WANT[1]


def test_a_table_that_numpy_cannot_read_says_what_can_be_given():
    class Lazy(Arrow):
        def __getitem__(self, name):
            raise TypeError("not so")

    with sentence(
        r"x: expected a table whose columns numpy reads; give arrays, from_table\(x, y,"
    ):
        Federation.from_table(Lazy(TABLE), "label", "who")
    of = {k: np.asarray(v) for k, v in TABLE.items()}
    inputs = np.stack([of["u"], of["v"]], 1)
    assert Federation.from_table(inputs, of["label"], of["who"]).x.tolist() == WANT[0]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_row_whose_client_is_missing_is_refused(missing):
    table = {**TABLE, "who": ["b", missing, "b"]}
    with sentence("client: expected a whole number or a string for each of 3 samples"):
        Federation.from_table(HuggingFace(table), "label", "who")
    with sentence("client: expected a whole number or a string for each of 3 samples"):
        Federation.from_table(X, Y, table["who"])
    pandas = pytest.importorskip("pandas")
    with sentence("client: expected a whole number or a string for each of 3 samples"):
        Federation.from_table(pandas.DataFrame(table), "label", "who")


def test_tables_by_split_are_one_each():
    splits = types.SimpleNamespace(
        column_names={"train": list(TABLE), "test": list(TABLE)}
    )
    with sentence("x: expected one table, as x"):
        Federation.from_table(splits, "label", "who")


def test_a_frame_is_no_client():
    with sentence(r"client 0 \(train\): .*of a data frame give .frame"):
        read(Polars(TABLE))


# pools ------------------------------------------------------------------------


def test_a_test_pool_needs_a_partition_that_knows_it():
    x = torch.rand(40, 3)
    y = torch.arange(40) % 4
    pool = {"x": x[:30], "y": y[:30], "x_test": x[30:], "y_test": y[30:]}
    with sentence(
        r"partition: expected one of .*test_labels=y_test\)\), got \{'train': 30\}"
    ):
        Federation.from_partition(partition=partition("iid", y[:30], 3), **pool)
    whole = partition("iid", y[:30], 3, test_labels=y[30:])
    assert Federation.from_partition(partition=whole, **pool).splits == (
        "train",
        "test",
    )
    # The partition covers only a part of these samples.
    with sentence("partition: expected one of {'train': 40} samples"):
        Federation.from_partition(x, y, partition("iid", y[:30], 3))
    # A unimodal partition splits the training pool itself.
    own_split = partition("unimodal", y[:30], 3, test_labels=y[30:])
    assert Federation.from_partition(partition=own_split, **pool).n == 3
