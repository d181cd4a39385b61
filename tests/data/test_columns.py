"""A federation keeps the names of columns, classes and clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from entry_points import folder, sentence
from hypothesis import given
from hypothesis import strategies as st
from small import equals
from torch import nn

from pflcore import Evaluation, Federation, Simulation
from pflcore.data import partition

pd = pytest.importorskip("pandas")
from parts.hospitals import CLASSES, FEATURES, HOSPITALS, hospitals, table  # noqa: E402

X = torch.arange(8.0).reshape(4, 2)
Y = torch.tensor([0, 1, 1, 0])
PAIR = (X, Y)


def frame(x, columns=("a", "b")):
    return pd.DataFrame(np.asarray(x), columns=list(columns))


# columns ----------------------------------------------------------------------
def test_a_tables_columns_are_kept_in_their_order():
    data = hospitals()
    assert data.columns == FEATURES
    assert data.names == HOSPITALS
    for other in (data.subset([1]), data.standardize(), data.keep_fraction(0.5)):
        assert other.columns == FEATURES
        assert other.class_names == CLASSES


@given(order=st.permutations(FEATURES))
def test_with_columns_orders_features_and_scaling(order):
    data = hospitals().standardize()

    got = data.with_columns(order)

    assert got.columns == tuple(order)
    positions = [FEATURES.index(name) for name in order]
    equals(got.x, data.x[:, positions])
    equals(got.scaling.mean, data.scaling.mean[:, positions])
    equals(got.with_columns(FEATURES).x, data.x)


def test_with_columns_of_other_names_is_refused():
    with sentence(r"columns: expected the columns \['age'\]"):
        hospitals().with_columns(["age"])
    with sentence("columns: expected a federation whose features have names"):
        Federation.from_clients([PAIR]).with_columns(["a", "b"])


@given(order=st.permutations(["a", "b"]))
def test_frames_of_clients_are_read_by_name(order):
    other = frame(X + 10)[list(order)]

    data = Federation.from_clients([(frame(X), Y), (other, Y)])

    assert data.columns == ("a", "b")
    equals(data.x, torch.cat([X, X + 10]))


@pytest.mark.parametrize("columns", [("a", "c"), ("b",)])
def test_frames_of_other_columns_are_refused(columns):
    other = frame(X[:, : len(columns)], columns)
    with sentence(r"client 1 \(train\): expected the columns \['a', 'b'\]"):
        Federation.from_clients([(frame(X), Y), (other, Y)])


def test_a_frame_without_names_gives_no_columns():
    data = Federation.from_clients([(pd.DataFrame(X.numpy()), Y)])
    assert data.columns is None
    assert Federation.from_clients([PAIR]).columns is None


def test_columns_of_tokens_have_no_names():
    data = Federation.from_clients([(frame(X.long()), Y)])
    assert data.columns is None
    equals(data.x, X.long())


def test_a_partition_of_a_frame_keeps_its_columns():
    y = torch.arange(40) % 2
    x = torch.randn(40, 2)
    cut = partition("iid", y, 2, test_labels=y)
    data = Federation.from_partition(
        frame(x), y, cut, x_test=frame(x)[["b", "a"]], y_test=y, classes=["no", "yes"]
    )
    assert data.columns == ("a", "b")
    assert data.class_names == ("no", "yes")
    equals(data.x, torch.cat([x, x]))


@pytest.mark.parametrize("target", [-1, 0, "y"])
def test_a_csv_header_names_the_columns(tmp_path, target):
    text = "a,y,b\n1,0,2\n3,1,4\n"
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.csv").write_text(text)
    data = folder(tmp_path, target=target, classes=None)
    left = [name for name in ("a", "y", "b") if name != target]
    if target in (-1, 0):
        left = ["a", "y", "b"]
        del left[target]
    assert data.columns == tuple(left)
    assert data.names == ("ann", "bob")


def test_a_csv_without_a_header_has_no_columns(tmp_path):
    (tmp_path / "ann.csv").write_text("1,2,0\n3,4,1\n")
    assert folder(tmp_path).columns is None


def test_labels_below_a_word_are_shown_as_they_are_written(tmp_path):
    (tmp_path / "ann.csv").write_text("1,2,x\n3,4,07\n5,6,7\n")
    (tmp_path / "bob.csv").write_text("7,8,07\n9,10,x\n")
    with sentence("y of client ann .*: expected words that name classes, .*got .'07'."):
        folder(tmp_path)
    data = folder(tmp_path, classes=["7", "07", "x"])
    assert data.client(0)[1].tolist() == [2, 1, 0]
    assert data.client(1)[1].tolist() == [1, 2]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"columns": ("a",)}, "columns: expected 2 different names"),
        ({"columns": ("a", "a")}, "columns: expected 2 different names"),
        ({"class_names": ("a",)}, "class_names: expected 2 different names"),
    ],
)
def test_names_that_do_not_fit_are_refused(options, words):
    with sentence(words):
        replace(Federation.from_clients([PAIR]), **options)


# classes ----------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [list, np.array, pd.Series, pd.Categorical])
def test_words_are_labels_where_classes_are_named(wrap):
    words = ["yes", "no", "no", "maybe"]
    data = Federation.from_clients([(X, wrap(words))], classes=["no", "maybe", "yes"])
    assert data.y.tolist() == [2, 0, 0, 1]
    assert data.classes == 3
    assert data.class_names == ("no", "maybe", "yes")


@pytest.mark.parametrize("classes, names", [(3, ("a", "b", "c")), (5, None)])
def test_more_classes_than_words_leave_no_names(classes, names):
    clients = [(X, ["a", "c", "b", "a"]), (X, ["a", "b", "a", "b"])]

    data = Federation.from_clients(clients, classes=classes)

    assert data.classes == classes and data.class_names == names
    assert data.client(0)[1].tolist() == [0, 2, 1, 0]
    with sentence("classes: expected at least 3, as there are names of so many"):
        Federation.from_clients(clients, classes=2)


def test_numbers_are_labels_where_classes_are_named():
    data = Federation.from_clients([PAIR], classes=["no", "yes"])
    equals(data.y, Y)
    assert data.class_names == ("no", "yes")


def test_a_word_that_names_no_class_is_refused():
    words = "y of client 0 \\(train\\): got 'yess', did you mean 'yes'"
    with sentence(words):
        Federation.from_clients([(X, ["yess"] * 4)], classes=["no", "yes"])
    with sentence("classes: expected .* a list of the classes' names, each once"):
        Federation.from_clients([PAIR], classes=["no", "no"])


def test_an_ignored_last_class_loses_its_name():
    data = Federation.from_clients([PAIR], classes=["no", "masked"])
    loss = nn.CrossEntropyLoss(ignore_index=1)
    evaluation = Evaluation(split="train")
    run = Simulation("fedavg", nn.Linear(2, 1), data, loss=loss, evaluation=evaluation)
    assert run.config.data.class_names == ("no",)


# clients ----------------------------------------------------------------------
def test_a_dict_names_its_clients():
    data = Federation.from_clients({"north": PAIR, "south": (X + 1, Y)})
    assert data.names == ("north", "south")
    equals(data.x, torch.cat([X, X + 1]))


def test_a_dict_by_split_is_one_clients_data():
    with sentence("clients: expected each client's data in a list, or in a dict by"):
        Federation.from_clients({"train": PAIR, "test": PAIR})
    data = Federation.from_clients({"train": PAIR, "north": PAIR})
    assert data.names == ("train", "north")


def test_a_client_is_found_by_its_name():
    data = hospitals()
    for i, name in enumerate(HOSPITALS):
        equals(data.client(name, "test"), data.client(i, "test"))
        assert data.client_id(name) == i
    subset = data.subset(["north", "H03"])
    assert subset.names == ("north", "H03")
    equals(subset.client(0), data.client(2))
    assert data.split_in_half(["H11"]).size("test").tolist() == [12, 20, 12]


def test_a_number_is_a_client_whatever_the_names_are():
    table_of_numbers = table().assign(hospital=np.repeat([7, 1, 2], 40))
    data = Federation.from_table(
        table_of_numbers, "answer", "hospital", classes=CLASSES
    )
    assert data.names == (1, 2, 7)
    assert data.client_id(1) == 1
    assert data.client_id("1") == 0


@pytest.mark.parametrize("name", ["H04", "h03", ""])
def test_an_unknown_name_is_one_sentence(name):
    data = hospitals()
    with sentence("client: (expected|got)"):
        data.client(name)
    with sentence("clients: (expected|got)"):
        data.subset([name])


def test_a_name_of_two_clients_is_refused():
    data = replace(hospitals(), names=("a", "b", "a"))
    assert data.client_id("b") == 1
    with sentence("client: expected a name that one client has alone"):
        data.client("a")
    with sentence("clients: expected a name that one client has alone"):
        data.subset(["a"])


def test_an_error_names_column_and_client():
    rows = table()
    rows.loc[50, "income"] = np.nan
    words = (
        "x: expected columns of numbers without gaps .docs/data.md, Missing values "
        "and categories., got gaps in .'income'."
    )
    with sentence(words):
        Federation.from_table(rows, "answer", "hospital", classes=CLASSES)


def test_a_pool_may_be_a_frame_with_one_column_of_vectors():
    y = torch.arange(8) % 2
    vectors = pd.DataFrame({"embedding": list(np.eye(8, 3))})
    fed = Federation.from_partition(vectors, y, partition("iid", y, n=2))
    assert fed.shape == torch.Size([3]) and fed.columns is None


def test_texts_of_numbers_are_words():
    """They may be codes. Where some are empty, these are gaps."""
    rows = table().assign(code=[f"{i:03}" for i in range(len(table()))])
    with sentence("x: expected columns of numbers .*got words, .* in .'code'.[.]"):
        Federation.from_table(rows, "answer", "hospital", classes=CLASSES)
    rows.loc[3, "code"] = ""
    with sentence("x: expected columns of numbers .*got gaps in .'code'.[.]"):
        Federation.from_table(rows, "answer", "hospital", classes=CLASSES)
