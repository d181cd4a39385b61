"""Users' files: CSV tables, npz arrays, LEAF's users, and folders."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from entry_points import folder, leaf, sentence, table

from pflcore.lab.data import federation_of, load


def csv(path, *texts):
    for i, text in enumerate(texts):
        (path / f"c{i}.csv").write_bytes(text.encode())
    return path


# one grammar for header and rows ----------------------------------------------

HEIGHT = '"height, cm",weight,label\n170,60,0\n171,62,1\n172,64,0\n'


@pytest.mark.parametrize(
    "target, y, x",
    [
        ("weight", [60, 62, 64], [[170, 0], [171, 1], [172, 0]]),
        ("label", [0, 1, 0], [[170, 60], [171, 62], [172, 64]]),
        ("height, cm", [170, 171, 172], [[60, 0], [62, 1], [64, 0]]),
        (-2, [60, 62, 64], [[170, 0], [171, 1], [172, 0]]),
    ],
)
def test_a_target_by_name_is_its_column(target, y, x, tmp_path):
    fed = folder(csv(tmp_path, HEIGHT), target=target, classes=None)
    assert fed.y.tolist() == y and fed.x.tolist() == x


@pytest.mark.parametrize(
    "names", [["a", "b", "y"], ["a, b", 'say "b"', "y"], ["a\nb", ";", "y"]]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_pandas_writes_is_read(names, end, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1.5, 2, 0], [3.5, -4e-3, 1]], columns=names)
    frame.to_csv(tmp_path / "a.csv", index=False, lineterminator=end, quoting=1)
    fed = folder(tmp_path, target="y")
    assert fed.y.tolist() == [0, 1]
    torch.testing.assert_close(fed.x, torch.tensor([[1.5, 2], [3.5, -4e-3]]))


PLAIN = "a,b,y\n1,2,0\n3,4,1\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\n\n") + "  \n\n",
        "\ufeff" + PLAIN,
        PLAIN.replace(",", " , "),
        '"a","b","y"\n"1","2","0"\n"3","4","1"',
        PLAIN[6:],
    ],
)
def test_every_row_is_a_sample(text, tmp_path):
    fed = folder(csv(tmp_path, text))
    assert fed.x.tolist() == [[1, 2], [3, 4]] and fed.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    "text, words",
    [
        ("a,b,y\n1,2,0\n#3,4,1\n5,6,1\n", "got '#3' in column 'a'"),
        ("# a table\na,b,y\n1,2,0\n", "Expected 1 fields in line 2, saw 3"),
        ("a;b;y\n1;2;0\n", "several values, with ','"),
        ("1,5;2,5;0\n", "several values, with ','"),
        ("a\tb\ty\n1\t2\t0\n", "several values, with ','"),
        ("a b y\n1 2 0\n", "several values, with ','"),
        ('a,b,y\n"1,5",2,0\n', "a point in decimals, got '1,5' in column 'a'"),
        ("a,b,y\n1,2,0\n3,4\n", "got \\[''\\]"),
        ("a,y\n1,2,0\n", "Expected 2 fields in line 2, saw 3"),
        ("a,b,y\n1_0,2,0\n", "got '1_0' in column 'a'"),
        ('a,b,y\n"1,2,0\n', "EOF inside string"),
        ("a,b,y\n1,,0\n", "got '' in column 'b'"),
    ],
)
def test_what_is_no_table_of_numbers_is_said(text, words, tmp_path):
    with sentence(r".*c0.*: expected .*" + words, (OSError, ValueError)):
        folder(csv(tmp_path, text))


@pytest.mark.parametrize("separator", [";", "\t", "|", " "])
@pytest.mark.parametrize("point", [".", ","])
def test_a_table_written_anew_as_the_sentence_says_is_read(separator, point, tmp_path):
    """The advice of the error message makes a table readable.

    The tables have another separator, and some of them a decimal comma.
    """
    rows = "1.5,2,0\n3.5,4,1\n"
    theirs = rows.replace(",", separator).replace(".", point)
    with pytest.raises(OSError, match="with ',' between them"):
        folder(csv(tmp_path, theirs))
    ours = theirs.replace(",", ".").replace(separator, ",")
    assert folder(csv(tmp_path, ours)).x.tolist() == [[1.5, 2], [3.5, 4]]


def test_a_name_that_two_columns_have_is_no_target(tmp_path):
    csv(tmp_path, "a,a,y\n1,2,0\n")
    with sentence(".*c0.csv: expected the column 'a' once in the first line"):
        folder(tmp_path, target="a")
    with sentence(".*c0.csv: expected each column once, got .'a'."):
        folder(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_of_a_table_mean_what_they_mean_in_a_folder(suffix, tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": [0.5, 1.5, 2.5, 3.5], "y": [0, 1, 1, 0]})
    whole = frame.assign(site=["a", "a", "b", "b"])
    for site, rows in frame.groupby(whole["site"]):
        (tmp_path / "of_sites").mkdir(exist_ok=True)
        write(rows, tmp_path / "of_sites" / f"{site}.{suffix}")
    write(whole, tmp_path / f"all.{suffix}")

    of_table = table(tmp_path / f"all.{suffix}", client="site", label="y")
    of_folder = folder(tmp_path / "of_sites")

    assert of_table.classes == of_folder.classes == 2
    assert torch.equal(of_table.y, of_folder.y)
    assert torch.equal(of_table.x, of_folder.x)
    signs = whole.assign(y=[-1, 1, 1, -1])
    write(signs, tmp_path / f"signs.{suffix}")
    of_signs = table(tmp_path / f"signs.{suffix}", client="site", label="y")
    assert of_signs.y.tolist() == [0, 1, 1, 0]


def write(frame, path):
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)


def test_a_row_without_a_client_is_refused(tmp_path):
    path = tmp_path / "all.csv"
    path.write_text("x,y,site\n1,0,a\n2,1,\n3,1,b\n4,0, \n")
    with sentence("client: expected .* got none in the rows 1, 3 .from 0.[.]"):
        table(path, client="site", label="y")


@pytest.mark.deep("it takes a second")
def test_a_large_table_is_read_as_fast_as_by_numpy(tmp_path):
    rows = np.random.default_rng(0).random((20_000, 20))
    np.savetxt(tmp_path / "a.csv", rows, delimiter=",")

    def seconds(call):
        began = time.process_time()
        got = call()
        return time.process_time() - began, got

    theirs, want = seconds(lambda: np.loadtxt(tmp_path / "a.csv", delimiter=","))
    ours, got = seconds(lambda: folder(tmp_path))
    assert torch.equal(got.x, torch.from_numpy(want[:, :-1]).float())
    assert ours < 4 * theirs + 1


# npz --------------------------------------------------------------------------

X = np.ones((3, 2))
Y = np.array([0, 1, 1])


class Harmful:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["member", "whole", "words", "complex", "list"])
def test_another_pickle_is_never_run(kind, tmp_path):
    made = tmp_path / "made"
    content = {
        "member": {"x": Harmful(made), "y": Y},
        "whole": Harmful(made),
        "words": {"x": np.array(["a", "b", "c"]), "y": Y},
        "complex": {"x": X * 1j, "y": Y},
        "list": [X, Y],
    }[kind]
    data = np.empty((), dtype=object)
    data[()] = content
    np.savez(tmp_path / "0.npz", data=data)
    with sentence(r".*0\.npz: expected arrays of numbers", OSError):
        folder(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": X},
        {"y": Y},
        {"x": X, "y": Y, "x_valid": X, "y_valid": Y},  # an unknown split
        {"x_train": X, "y_train": Y, "x_test": X},
        {"x": X, "y": np.array([{}] * 3, dtype=object)},
    ],
)
def test_arrays_that_do_not_make_pairs_are_refused(arrays, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with sentence(r".*a\.npz: expected arrays of numbers x and y", OSError):
        folder(tmp_path)


def test_a_client_has_a_split_in_one_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    csv(tmp_path, "1,1,0\n")
    (tmp_path / "c0.csv").rename(tmp_path / "a.csv")
    with sentence(
        r".*a\.npz: expected samples that a has in no other file, got \['train'\]"
    ):
        folder(tmp_path)


# LEAF -------------------------------------------------------------------------


def users(path, **of):
    text = json.dumps({"users": list(of), "num_samples": [], "user_data": of})
    path.write_text(text)
    return path


def test_a_user_without_samples_is_named_and_can_be_left_out(tmp_path):
    full = {"x": [[0.5, 1.0], [1.5, 2.0]], "y": [0, 1]}
    path = tmp_path / "a.json"
    users(path, ann=full, bob={"x": [], "y": []})
    with sentence(
        r"clients: expected a sample .*; leave out the 1 without, got \['bob'\]"
    ):
        leaf(path)
    assert leaf(users(path, ann=full)).n == 1


def test_users_and_files_in_test_alone_never_train(tmp_path):
    full = {"x": [[0.5, 1.0], [1.5, 2.0]], "y": [0, 1]}
    none = {"x": [], "y": []}
    for split in ("train", "test"):
        (tmp_path / "leaf" / split).mkdir(parents=True)
        (tmp_path / "files" / split).mkdir(parents=True)
        np.savez(tmp_path / "files" / split / f"{split}.npz", x=X, y=Y)
    users(tmp_path / "leaf" / "train" / "a.json", ann=full, bob=none)
    users(tmp_path / "leaf" / "test" / "a.json", ann=full, bob=full, eve=full)
    by_user = leaf(tmp_path / "leaf")
    assert by_user.names == ("ann", "bob", "eve")
    assert by_user.size().tolist() == [2, 0, 0]
    assert by_user.size("test").tolist() == [2, 2, 2]
    by_file = folder(tmp_path / "files")
    assert by_file.names == ("train", "test")
    assert by_file.trainable_clients.tolist() == [0]
    void = folder(tmp_path / "files", ignored_label=1)
    assert int(void.counts().sum()) == int((torch.as_tensor(Y) != 1).sum())


def test_a_user_with_other_inputs_is_named(tmp_path):
    full = {"x": [[0.5, 1.0], [1.5, 2.0]], "y": [0, 1]}
    users(tmp_path / "a.json", ann=full, bob={"x": [[0.5]], "y": [0]})
    with sentence("client bob: expected inputs and targets .*, as client ann has"):
        leaf(tmp_path)


@pytest.mark.parametrize("y", [["7", "8"], ["cat", "dog"], [None, 1], [[0], [1, 2]]])
def test_labels_that_are_no_numbers_are_refused(y, tmp_path):
    users(tmp_path / "a.json", ann={"x": [[0.5], [1.0]], "y": y})
    with sentence(".*a.json: expected LEAF's users", OSError):
        leaf(tmp_path)


# folders ----------------------------------------------------------------------


@pytest.fixture
def in_time():
    """Fails a test that waits for a file."""

    alarms = []

    def ring(*_):
        alarms.append("it waits for ever")
        raise TimeoutError(*alarms)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    # The reader may have turned the TimeoutError into its own error.
    assert not alarms


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing"])
@pytest.mark.parametrize("data", ["a.csv", "a.npz", "a.json"])
def test_only_regular_files_are_read(data, kind, tmp_path, in_time):
    make = {
        "pipe": os.mkfifo,
        "device": lambda p: p.symlink_to("/dev/zero"),
        "folder": os.mkdir,
        "nothing": lambda p: p.symlink_to("no/where"),
    }[kind]
    make(tmp_path / data)
    read = leaf if data.endswith("json") else folder
    with sentence(rf".*got \['{data} \(no regular file\)'\]", OSError):
        read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_is_no_data_set_by_name(tmp_path, in_time):
    pytest.importorskip("scipy")
    for name in ("mnist", "school"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "school" / "school.mat")
    with sentence("[^:]*school.mat: expected a .mat file", OSError):
        federation_of("school", root=tmp_path)
    os.mkfifo(tmp_path / "mnist" / "train-images-idx3-ubyte")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"")
    with sentence("data: 'mnist' cannot be read from", OSError):
        load("mnist", tmp_path)


def test_a_test_folder_alone_is_no_federation(tmp_path):
    """A folder with test/ but without train/ is refused."""
    (tmp_path / "test").mkdir()
    csv(tmp_path, "1,2,0\n")
    csv(tmp_path / "test", "1,2,0\n")
    with sentence(".*: expected a folder train/ beside test/, got none", OSError):
        folder(tmp_path)


def test_files_beside_the_folders_of_splits_are_refused(tmp_path):
    (tmp_path / "train").mkdir()
    csv(tmp_path, "1,2,0\n")
    csv(tmp_path / "train", "1,2,0\n")
    with sentence(r".*: expected no samples beside train/, got \['c0.csv'\]"):
        folder(tmp_path)


def test_a_missing_data_set_names_its_files(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(
        OSError,
        match=r"expected the files of torchvision\.datasets\.MNIST in MNIST/raw",
    ):
        load("mnist", tmp_path)


def test_an_array_of_a_split_is_there_once(tmp_path):
    names = {f"{part}{split}" for part in "xy" for split in ("", "_train")}
    np.savez(tmp_path / "a.npz", **{name: np.zeros(3) for name in names})
    with pytest.raises(OSError, match=r"a.npz: .*arrays: expected each split once"):
        folder(tmp_path)


def test_row_numbers_of_pandas_are_no_feature(tmp_path):
    path = tmp_path / "all.csv"
    path.write_text(",u,client,label\n0,1.5,a,0\n1,2.5,a,1\n2,3.5,b,0\n3,1.0,b,1\n")
    with sentence(".*all.csv: expected a name for every column .*index=False"):
        table(path)


def test_an_empty_cell_is_a_gap_and_no_word(tmp_path):
    path = tmp_path / "all.csv"
    path.write_text("u,v,client,label\n1.5,,a,0\n2.5,1,a,1\n3.5,2,b,0\n1.0,3,b,1\n")
    with sentence("x: expected columns of numbers without gaps .*got gaps in .'v'.[.]"):
        table(path)
