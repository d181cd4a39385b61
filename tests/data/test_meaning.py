"""Types of targets and inputs: one table holds for every reader."""

import json

import numpy as np
import pytest
import torch
from entry_points import folder, leaf, sentence

from pflcore import Client, Evaluation, Federation, Simulation, Training
from pflcore.data import partition
from pflcore.lab.data import federation_of

X = [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]  # inputs of each client


def of_clients(path, x, y, **options):
    return Federation.from_clients(list(zip(x, y, strict=True)), **options)


def of_table(path, x, y, **options):
    owners = [i for i, labels in enumerate(y) for _ in labels]
    x, y = (np.concatenate([np.asarray(v) for v in values]) for values in (x, y))
    return Federation.from_table(x, y, owners, **options)


def of_frame(path, x, y, **options):
    pandas = pytest.importorskip("pandas")
    rows = np.concatenate([np.asarray(v) for v in x])
    columns = {f"x{i}": rows[:, i] for i in range(rows.shape[1])}
    columns["y"] = np.concatenate([np.asarray(v) for v in y])
    columns["client"] = [i for i, labels in enumerate(y) for _ in labels]
    return Federation.from_table(pandas.DataFrame(columns), **options)


def of_leaf(path, x, y, **options):
    users = {
        f"u{i}": {"x": listed(a), "y": listed(b)}
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    }
    text = json.dumps({"users": list(users), "num_samples": [], "user_data": users})
    (path / "all.json").write_text(text)
    return leaf(path, **options)


def listed(values):
    return np.asarray(values).tolist()


def of_csv(path, x, y, **options):
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        rows = [
            [*row, *np.ravel(t)] for row, t in zip(listed(a), listed(b), strict=True)
        ]
        text = "\n".join(",".join(map(str, row)) for row in rows).replace("True", "1")
        (path / f"c{i}.csv").write_text(text.replace("False", "0"))
    return folder(path, **options)


def of_npz(path, x, y, **options):
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        np.savez(path / f"c{i}.npz", x=a, y=b)
    return folder(path, **options)


OBJECTS = (of_clients, of_table, of_frame)
FILES = (of_leaf, of_csv, of_npz)
READERS = (*OBJECTS, *FILES)

# Targets of two clients, options, targets as they are read, number of classes.
KINDS = {
    "whole numbers": ([[0, 2, 1], [1, 1, 2]], {}, [0, 2, 1, 1, 1, 2], 3),
    "one client has one class": ([[0, 2, 1], [1, 1, 1]], {}, [0, 2, 1, 1, 1, 1], 3),
    "true and false": ([[True, False, True], [False] * 3], {}, [1, 0, 1, 0, 0, 0], 2),
    "signs as numbers": (
        [[-1, 1, 1], [1, 1, 1]],
        {"classes": None},
        [-1.0, 1, 1, 1, 1, 1],
        None,
    ),
    "numbers": (
        [[0.5, 1.0, 2.0], [1.0, 2.0, 3.0]],
        {},
        [0.5, 1.0, 2.0, 1.0, 2.0, 3.0],
        None,
    ),
    "whole floats": (
        [[0.0, 2.0, 1.0], [1.0] * 3],
        {"classes": 4},
        [0, 2, 1, 1, 1, 1],
        4,
    ),
    "numbers on demand": (
        [[0, 2, 1], [3, 4, 9]],
        {"classes": None},
        [0.0, 2, 1, 3, 4, 9],
        None,
    ),
    "more classes than samples on demand": (
        [[0, 9, 1], [1, 1, 1]],
        {"classes": 10},
        [0, 9, 1, 1, 1, 1],
        10,
    ),
}
SIGNS = [[-1, 1, 1], [1, 1, 1]], [[-1, -1, -1], [1, 1, 1]]
LABELS_OF_FILES = [[5.0, 4.0, 4.0], [1.0, 1.0, 1.0]]


def same(got, want, classes):
    assert got.classes == classes
    assert got.y.tolist() == want
    assert got.y.dtype == (torch.float32 if classes is None else torch.int64)
    assert got.n == 2 and got.x.dtype == torch.float32 and got.x.tolist() == X + X


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_targets_become_what_the_table_says(kind, reader, tmp_path):
    y, options, want, classes = KINDS[kind]

    same(reader(tmp_path, [X, X], y, **options), want, classes)


@pytest.mark.parametrize("reader", READERS)
def test_whole_floats_are_labels_of_files_and_numbers_of_objects(reader, tmp_path):
    fed = reader(tmp_path, [X, X], LABELS_OF_FILES)

    if reader in FILES:
        same(fed, [5, 4, 4, 1, 1, 1], 6)
    else:
        same(fed, [5.0, 4.0, 4.0, 1.0, 1.0, 1.0], None)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("classes", ["infer", 2])
@pytest.mark.parametrize("y", SIGNS)
def test_signs_are_labels_of_files_and_no_objects_are_changed(
    y, classes, reader, tmp_path
):
    advised = (np.array(y) > 0).tolist()
    want = [int(v) for labels in advised for v in labels]
    if reader in FILES:
        same(reader(tmp_path, [X, X], y, classes=classes), want, 2)
        return
    with sentence(
        "y: expected int64 labels in 0..1 .*; of -1 and 1 give .y > 0., got .-1, 1."
    ):
        reader(tmp_path, [X, X], y, classes=classes)
    same(reader(tmp_path, [X, X], advised, classes=classes), want, 2)


@pytest.mark.parametrize("reader", [of_clients, of_table, of_leaf, of_npz])
def test_a_column_of_labels_is_labels(reader, tmp_path):
    same(
        reader(tmp_path, [X, X], [[[0], [1], [1]], [[1], [1], [0]]]),
        [0, 1, 1, 1, 1, 0],
        2,
    )
    numbers = reader(tmp_path, [X, X], [[[0.5], [1], [1]], [[1.5], [1], [0]]])
    assert numbers.y.shape == (6, 1) and numbers.classes is None


def test_labels_of_sequences_of_one_step_stay_theirs():
    x = torch.randn(3, 1, 4)
    y = torch.tensor([[0], [1], [0]])
    assert Federation.from_clients([(x, y)]).y.shape == (3, 1)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("low", [[-1, 0, 1], [-1, 7, 1], [-3, 5, 2]])
def test_other_negative_labels_are_refused(low, reader, tmp_path):
    """Negative labels are refused, except for signs.

    That holds also where the labels of one client are only signs, or only classes.
    """
    with sentence("y: expected "):
        reader(tmp_path, [X, X], [low, [1, 1, 1]])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("top", [6, 199000, 3_000_000_000, 10**18])
def test_more_classes_than_samples_are_refused(top, reader, tmp_path):
    y = [[top, 0, 1], [1, 2, 0]]

    with pytest.raises(
        ValueError, match=r"^y: expected labels below 6, the number of"
    ) as e:
        reader(tmp_path, [X, X], y)

    # The advice of the error message works.
    assert f"classes={top + 1} (" in str(e.value)
    assert reader(tmp_path, [X, X], y, classes=top + 1).classes == top + 1
    assert reader(tmp_path, [X, X], y, classes=None).y[0] == pytest.approx(top)


@pytest.mark.parametrize("reader", [of_clients, of_table, of_frame, of_csv])
def test_words_are_classes_in_alphabetical_order(reader, tmp_path):
    data = reader(tmp_path, [X, X], [["dog", "cat", "dog"], ["cat", "cat", "ant"]])
    assert data.class_names == ("ant", "cat", "dog")
    assert data.y.tolist() == [2, 1, 2, 1, 1, 0]


@pytest.mark.parametrize("words", [["cat", "3", "cat"], ["a", "", "b"]])
@pytest.mark.parametrize("reader", [of_clients, of_table, of_frame, of_csv])
def test_words_among_numbers_are_refused(reader, words, tmp_path):
    with pytest.raises((ValueError, OSError), match="expected"):
        reader(tmp_path, [X, X], [words, words])


@pytest.mark.parametrize("reader", [of_clients, of_table, of_npz])
@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize("kind", ["complex", "dates", "records", "bytes", "objects"])
def test_what_is_no_real_number_is_refused(kind, which, reader, tmp_path):
    odd = {
        "complex": np.array([1 + 2j] * 3),
        "dates": np.array(["2020-01-01"] * 3, "datetime64[D]"),
        "records": np.zeros(3, [("a", float)]),
        "bytes": np.array([b"a"] * 3),
        "objects": np.array([{1: 2}] * 3),
    }[kind]
    x, y = (odd[:, None], [0, 1, 1]) if which == "x" else (X, odd)

    with pytest.raises((ValueError, OSError), match="expected"):
        reader(tmp_path, [x, x], [y, y])


# inputs -----------------------------------------------------------------------

LARGE = 2**24 + 1  # float32 cannot represent it
TOKENS = [[1, LARGE], [3, 4], [5, 6]]


@pytest.mark.parametrize("reader", [of_clients, of_table, of_leaf, of_npz])
def test_tokens_stay_whole(reader, tmp_path):
    fed = reader(tmp_path, [TOKENS, TOKENS], [[0, 1, 1], [1, 0, 0]])
    assert fed.x.dtype == torch.int64 and fed.x.tolist() == TOKENS + TOKENS


@pytest.mark.parametrize("reader", [of_csv, of_frame])
def test_columns_are_features_whatever_their_numbers(reader, tmp_path):
    fed = reader(tmp_path, [[[1, 2], [3, 4]]] * 2, [[0, 1], [1, 0]])
    assert fed.x.dtype == torch.float32


@pytest.mark.parametrize("reader", [of_clients, of_leaf, of_npz])
def test_inputs_are_floats_where_one_client_has_some(reader, tmp_path):
    whole = [[1, 2], [3, 4], [5, 6]]
    fed = reader(tmp_path, [whole, X], [[0, 1, 1], [1, 0, 0]])
    assert fed.x.dtype == torch.float32 and fed.x.tolist() == whole + X
    with sentence(
        "x of client .*: expected floats, as other clients have, or whole numbers wi"
    ):
        reader(tmp_path, [TOKENS, X], [[0, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize("reader", [of_clients, of_table, of_leaf, of_npz, of_frame])
def test_true_and_false_are_features(reader, tmp_path):
    fed = reader(tmp_path, [[[True, False], [False, False]]] * 2, [[0, 1], [1, 0]])
    assert fed.x.tolist() == [[1, 0], [0, 0]] * 2 and fed.x.dtype == torch.float32


@pytest.mark.parametrize("reader", [of_clients, of_table, of_npz])
def test_bytes_may_be_images_and_are_refused(reader, tmp_path):
    images = np.full((3, 4, 4), 255, np.uint8)
    y = [[0, 1, 1], [1, 0, 0]]

    with sentence(
        "x[^:]*: expected dense floats or int64 .tokens to int64, images to float"
    ):
        reader(tmp_path, [images, images], y)
    if reader is not of_table:  # one such client is enough
        with sentence("x[^:]*: expected dense floats or int64"):
            reader(tmp_path, [images.astype(np.float32), images], y)

    as_told = [images.astype(np.float32) / 255] * 2
    assert reader(tmp_path, as_told, y).x.max() == 1


# other cases ------------------------------------------------------------------


def test_vehicles_signs_are_the_tables(tmp_path):
    io = pytest.importorskip("scipy.io")
    (tmp_path / "vehicle").mkdir()
    x, y = (np.empty((1, 2), dtype=object) for _ in range(2))
    for i, of in enumerate([[-1.0, 1, 1], [1.0, 1, 1]]):
        x[0, i] = np.array(X)
        y[0, i] = np.array(of)[:, None]
    io.savemat(tmp_path / "vehicle" / "vehicle.mat", {"X": x, "Y": y})
    as_they_are = {"fractions": {}, "standardize": False}
    same(federation_of("vehicle", root=tmp_path, **as_they_are), [0, 1, 1, 1, 1, 1], 2)


def test_one_of_many_clients_does_not_decide():
    """A single client may have any labels of the federation's classes.

    A client that joins late, or trains on its own machine, does not infer the classes.
    """
    model = torch.nn.Linear(2, 62)
    Client("fedavg", model, (X, [61, 3, 60]), Training(lr=0.1))
    with sentence("y: expected int64 labels"):
        Client("fedavg", torch.nn.Linear(2, 2), (X, [-1, 1, 1]), Training(lr=0.1))


def test_a_pool_is_read_by_the_same_table():
    y = np.array([0, 1, 2, 0, 1, 2])
    part = partition("iid", y, 2)
    fed = Federation.from_partition(X + X, y[:, None], part)
    assert fed.y.tolist() == y.tolist() and fed.classes == 3
    with sentence("labels: expected labels below 3, the number of samples"):
        partition("iid", [0, 1, 3_000_000_000], 2)
    assert partition("iid", [0, 1, 7], 2, classes=8).index["train"]


@pytest.mark.parametrize("y", [[True, False, True, False], [[0], [1], [0], [1]]])
def test_what_a_partition_takes_for_labels_a_pool_does(y):
    part = partition("iid", y[:2], 2, test_labels=y[2:])
    pools = {"x_test": X[:2], "y_test": y[2:]}
    fed = Federation.from_partition(X[:2], y[:2], part, **pools)
    assert fed.classes == 2 and fed.y.tolist() == [*np.ravel(np.array(y) > 0)]


def test_a_number_beyond_int64_is_refused():
    with sentence(r"y of client 0 \(train\): expected whole numbers below 2\*\*63"):
        Federation.from_clients([(X, np.array([2**63 + 5, 0, 1], np.uint64))])


def test_whole_numbers_that_are_no_classes_are_predicted_as_numbers():
    data = Federation.from_clients([(X, [3, 26, 9])], classes=None)
    run = Simulation(
        "local", torch.nn.Linear(2, 1), data, evaluation=Evaluation(split="train")
    )
    assert run.header()["loss"] == "squared"


def test_void_labels_are_told_what_they_may_be():
    x = torch.zeros(2, 3)
    y = np.array([[0, 255, 1], [1, 0, 255]])
    with sentence("y: expected int64 labels in 0..1 .*; .* give ignored_label=255"):
        Federation.from_clients([(x, y)], classes=2)
    void = Federation.from_clients([(x, np.where(y == 255, -100, y))])
    assert void.classes == 2 and void.counts().tolist() == [[2, 2]]
