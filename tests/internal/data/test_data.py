"""Inside the data: draws of a Dirichlet, files of images, fields side by side, index lists."""

import gzip
import struct
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from doors import IGNORED, school
from parts.fields import STEPS, Tagger, federation, sequences
from parts.sources import cells, sentence

from pflcore import Clients, Net, Training
from pflcore.data import Federation, federation_of, load
from pflcore.data.inputs import Fields, inputs
from pflcore.data.partition import _proportions, counts_of, dominant_classes
from pflcore.data.ragged import Ragged
from pflcore.data.sources import IDX_FILES, SOURCES, digest_of, read_idx
from pflcore.train import prepared
from pflcore.train.losses import cross_entropy

# -- partitions --------------------------------------------------------------


def test_practical2_draws_like_the_released_code():
    """Classes per client and the share of draws that give everybody 20 samples, measured on that
    code: 60,000 balanced samples."""
    assert counts_of(np.array([[0.105, 0.2, 0.695]]), np.array([10])).tolist() == [[1, 2, 7]]
    totals = np.full(10, 6000)
    for n, alpha, held, accepted in (
        (100, 0.07, 3.4, 0.002),
        (100, 0.1, 4.2, 0.08),
        (20, 0.07, 4.1, 0.76),
        (20, 0.1, 5.0, 0.93),
    ):
        rng = np.random.RandomState(0)
        draws = [counts_of(_proportions(totals, n, alpha, True, rng), totals) for _ in range(150)]
        assert all((d.sum(1) == totals).all() for d in draws)
        assert abs(np.mean([(d > 0).sum(0).mean() for d in draws]) - held) < 0.15
        assert abs(np.mean([d.sum(0).min() >= 20 for d in draws]) - accepted) < 0.1


def test_dominant_classes_of_larger_sets():
    assert dominant_classes(10, 4) == [[0, 1, 2], [2, 3, 4], [5, 6, 7], [7, 8, 9]]
    many = dominant_classes(100, 4)
    assert [len(g) for g in many] == [20] * 4 and [g[0] for g in many] == [0, 25, 50, 75]
    assert dominant_classes(3, 2) == [[0, 1, 2], [1, 2, 0]]


# -- image sets --------------------------------------------------------------


def write_idx(path, a, squeeze=gzip.compress):
    raw = struct.pack(f">4B{a.ndim}I", 0, 0, 8, a.ndim, *a.shape) + a.astype(np.uint8).tobytes()
    path.write_bytes(squeeze(raw))


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """Twenty training and ten test images in MNIST's files; two of them not gzipped. They need not
    be the published ones here."""
    monkeypatch.setitem(SOURCES, "mnist", SOURCES["mnist"]._replace(digest=None))
    rng, at = np.random.RandomState(0), tmp_path / "mnist"
    at.mkdir()
    for name, n in zip(IDX_FILES, (20, 20, 10, 10), strict=True):
        a = rng.randint(0, 256, (n, 28, 28)) if "images" in name else np.arange(n) % 10
        plain = name.startswith("t10k")
        write_idx(at / (name if plain else f"{name}.gz"), a, bytes if plain else gzip.compress)
    return tmp_path


def test_idx_files_are_read_normalised_and_cut_by_class(tiny_mnist, monkeypatch):
    source = load("mnist", tiny_mnist)
    assert source.x_train.dtype == torch.float32 and source.y_test.tolist() == list(range(10))
    raw = torch.from_numpy(read_idx(tiny_mnist / "mnist" / f"{IDX_FILES[0]}.gz").copy())
    torch.testing.assert_close(source.x_train, (raw[:, None].float() / 255 - 0.1307) / 0.3081)
    monkeypatch.setenv("PFLCORE_DATA", str(tiny_mnist))
    assert federation_of("mnist", "iid", 4).size().tolist() == [5, 5, 5, 5]
    part = source.sample(train=10, test=5, seed=1)
    assert part.y_train.bincount(minlength=10).tolist() == [1] * 10 and len(part.y_test) == 5
    assert torch.equal(part.x_train, source.sample(train=10, seed=1).x_train)
    assert not torch.equal(part.x_train, source.sample(train=10, seed=2).x_train)
    fed = federation_of("mnist", "iid", 2, root=tiny_mnist, train_samples=10)
    assert fed.size().tolist() == [5, 5] and fed.size("test").tolist() == [5, 5]
    for call, said in (
        (lambda: source.sample(train=21), "train: expected at most the 20 samples there are"),
        (lambda: federation_of(source, "B", classes=3), "B: expected the options sizes, shuffle"),
        (lambda: federation_of(source, fractions={"val": 0.5}), "fractions and standardize: exp"),
    ):
        sentence(ValueError, call, said)


def test_other_data_do_not_go_by_a_name(tiny_mnist, monkeypatch, tmp_path):
    """Files in the right format are not enough: Fashion-MNIST's would load as MNIST, and so would a
    part of either."""
    at = tiny_mnist / "mnist"
    mine = digest_of(*(read_idx(next(at.glob(f"{f}*"))) for f in IDX_FILES))

    def published(name, digest):
        monkeypatch.setitem(SOURCES, name, SOURCES[name]._replace(digest=digest))

    published("mnist", mine)  # packed or not, these are the published ones
    assert len(load("mnist", tiny_mnist).y_train) == 20
    published("mnist", mine[::-1])
    sentence(OSError, lambda: load("mnist", tiny_mnist), "files of 'mnist', got those of 'others'")
    published("fashion_mnist", mine)
    sentence(OSError, lambda: load("mnist", tiny_mnist), "got those of 'fashion_mnist'")
    cells(tmp_path / "school" / "school.mat", [(np.ones((3, 28)), [1.0, 2.0, 3.0])])
    sentence(OSError, lambda: school(tmp_path), "expected the published files of 'school'")


def test_broken_and_missing_image_files(tiny_mnist):
    labels = tiny_mnist / "mnist" / f"{IDX_FILES[1]}.gz"
    whole = labels.read_bytes()
    short = gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 20) + b"abc")
    for broken in (whole[:-9], b"<html>", gzip.compress(b"<html>"), short, None):
        labels.write_bytes(broken) if broken else labels.unlink()
        sentence(OSError, lambda: load("mnist", tiny_mnist), "'mnist' can be neither read from")


# -- fields ------------------------------------------------------------------


def test_fields_come_back_as_they_were():
    x, _, _ = sequences(20, torch.Generator().manual_seed(0))
    rows, fields = inputs(x, "x", torch.float32)
    assert rows.shape == (20, 2 * STEPS + 1) and fields == Fields(fields)
    for name, back in fields.apart(rows[[3, 1]]).items():
        assert back.dtype == x[name].dtype and torch.equal(back, x[name][[3, 1]])


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_training_is_a_loop_over_the_sequences_as_they_are(per_step, engine):
    data = federation(per_step)
    torch.manual_seed(0)
    module, training = Tagger(per_step), Training(lr=0.3, batch_size=100, epochs=2)
    setting = prepared(Net(module), data, training, engine, workers=1)
    clients = Clients(setting, torch.arange(data.n), 1, torch.zeros(data.n, 0))
    got = clients.fit(setting.net.w0.expand(data.n, -1)).w
    for i in range(data.n):
        rows, y = data.client(i)
        x, model = data.fields.apart(rows), Tagger(per_step)
        model.load_state_dict(module.state_dict())
        sgd = torch.optim.SGD(model.parameters(), 0.3)
        for _ in range(2):
            each = []
            # one sequence at a time, cut to its length: no padding, no mask
            for j, t in enumerate(x["mask"].sum(1).tolist()):
                one = {k: v[j : j + 1, :t] if v.dim() > 1 else v[j : j + 1] for k, v in x.items()}
                labels = y[j : j + 1, :t] if per_step else y[j : j + 1]
                each.append(F.cross_entropy(model(one), labels))
            sgd.zero_grad()
            torch.stack(each).mean().backward()
            sgd.step()
        torch.testing.assert_close(got[i], setting.net.row(model), rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_whole_sequences_is_torchs():
    scores, y = torch.randn(5, 3, STEPS, dtype=torch.float64), torch.randint(3, (5, STEPS))
    torch.testing.assert_close(cross_entropy(scores, y), F.cross_entropy(scores, y))
    y[2, 1:] = IGNORED
    each = [F.cross_entropy(s[None], t[None]) for s, t in zip(scores, y, strict=True)]
    torch.testing.assert_close(cross_entropy(scores, y), torch.stack(each).mean())
    y[3] = IGNORED  # a sequence without a step has no loss, and no gradient that is none
    assert bool(cross_entropy(scores.requires_grad_(), y).isfinite())


# -- index lists -------------------------------------------------------------


def test_lists_of_some_clients_and_of_slices():
    lists = [[0, 1, 2], [], [7, 5]]
    ragged = Ragged.of([torch.tensor(rows, dtype=torch.int64) for rows in lists])
    assert [r.tolist() for r in ragged] == [ragged[i].tolist() for i in range(3)] == lists
    assert [r.tolist() for r in ragged.take(torch.tensor([2, 0, 1]))] == [[7, 5], [0, 1, 2], []]
    assert [r.tolist() for r in ragged[1:]] == lists[1:]
    assert ragged.owner().tolist() == [0, 0, 0, 2, 2]
    with pytest.raises(IndexError):
        ragged[3]


def test_one_large_client_costs_nothing_for_the_others():
    size = torch.ones(100_000, dtype=torch.int64)
    size[0] = 300_000  # padded, these lists would take 240 GB
    n = int(size.sum())
    began, x, y = time.process_time(), torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64)
    data = Federation(x, y, {"train": Ragged(torch.arange(n), size)}, 1)
    assert data.size()[0] == 300_000 and data.counts().sum() == n
    assert data.split(test=0.5, seed=100, of=None).n == 100_000
    assert time.process_time() - began < 5
    with pytest.raises(ValueError, match=r"leave out the 99999 without, got \[1, 2, 3, 4, 5\]"):
        Federation(x, y, {"train": Ragged(torch.arange(300_000), size * (size > 1))})
