"""A federation: what it holds, how it is made from other containers, Motley's two protocols, and
what it refuses."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import with_test
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from pflcore import (
    Client,
    Federation,
    Server,
    Simulation,
    Training,
    cross_silo,
)
from pflcore.data import federation_of, partition


def index(*lists):
    return [torch.tensor(i, dtype=torch.int64) for i in lists]


def small(**change):
    """Two clients, seven samples, three classes; sample 6 belongs to nobody."""
    fields = {
        "x": torch.arange(14.0).reshape(7, 2),
        "y": torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        "index": {"train": index([0, 2], [1, 3]), "test": index([4], [5])},
        "classes": 3,
        "relabel": torch.tensor([[0, 1, 2], [1, 2, 0]]),
    }
    return Federation(**(fields | change))


def sizes(fed, split="train"):
    return fed.size(split).tolist()


# -- what it holds -----------------------------------------------------------


def test_clients_sizes_counts_and_labels():
    fed = small()
    assert fed.n == 2 and fed.splits == ("train", "test") and fed.shape == (2,)
    assert sizes(fed) == [2, 2] and sizes(fed, "test") == [1, 1]
    x, y = fed.client(1)
    # pool labels 1, 0 through [1, 2, 0]
    assert x.tolist() == [[2, 3], [6, 7]] and y.tolist() == [2, 1]
    assert fed.client(0, "test")[1].tolist() == [1] and fed.client(1, "test")[1].tolist() == [0]
    assert fed.counts().tolist() == [[1, 0, 1], [0, 1, 1]]
    assert fed.counts("test").tolist() == [[0, 1, 0], [1, 0, 0]]
    assert small(relabel=None).client(1)[1].tolist() == [1, 0]


def test_the_pool_is_never_altered():
    fed = small()
    before = fed.x.clone(), fed.y.clone()
    x, y = fed.client(1)
    x.zero_()
    y.zero_()
    fed.counts()
    assert torch.equal(fed.x, before[0]) and torch.equal(fed.y, before[1])


def test_summary_is_short_text():
    text = small(facts={"draws": 3}).summary()
    for line in (
        "clients: 2",
        "samples: {'train': 4, 'test': 2}",
        "classes: 3",
        "labels permuted by client (concept shift): True",
        "draws: 3",
    ):
        assert line in text.splitlines()
    assert "classes" not in Federation.from_clients([([[1.0]], [0.5])]).summary()


def test_the_same_device_is_no_copy():
    fed = small()
    assert fed.to("cpu") is fed and fed.device == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_device_holds_everything():
    fed = small(truth={"group": torch.tensor([0, 1])})
    moved = fed.to("cuda")
    assert (
        moved.client(1)[1].is_cuda
        and moved.truth["group"].is_cuda
        and moved.to("cpu").client(1)[1].tolist() == [2, 1]
    )
    assert torch.equal(moved.counts(), fed.counts()) and moved.size().device.type == "cpu"
    assert moved.halves().keep(0.5).subset([1]).n == 1


def test_regression_and_tokens():
    fed = Federation(
        torch.zeros(3, 4, dtype=torch.int64), torch.rand(3, 2), {"train": index([0], [1, 2])}
    )
    assert fed.classes is None and fed.client(1)[1].shape == (2, 2)
    with pytest.raises(ValueError, match=r"^counts: expected labels"):
        fed.counts()


# -- constructors ------------------------------------------------------------


def test_clients_arrays_of_any_kind():
    a = (np.random.rand(4, 2), [0, 1, 2, 1])  # float64 and a list
    b = (torch.rand(3, 2), torch.tensor([0, 0, 1], dtype=torch.int32))
    fed = Federation.from_clients([a, b])
    assert fed.classes == 3 and fed.x.dtype == torch.float32 and fed.y.dtype == torch.int64
    assert sizes(fed) == [4, 3] and fed.splits == ("train",)
    assert torch.equal(fed.client(1)[0], b[0])
    assert Federation.from_clients([a], dtype=None).x.dtype == torch.float64
    assert Federation.from_clients([(np.ones((2, 1)), np.array([0.5, 1.0]))]).classes is None
    assert Federation.from_clients([a, b], classes=7).counts().shape == (2, 7)
    tested = Federation.from_clients(with_test([a, b], [b, a]))
    assert sizes(tested) == [4, 3] and sizes(tested, "test") == [3, 4]


def test_clients_with_splits_of_some_clients():
    pair = ([[1.0], [2.0]], [0, 1])
    fed = Federation.from_clients(
        [{"train": pair}, {"train": pair, "test": pair}, {"train": pair, "val": pair}]
    )
    assert fed.splits == ("train", "val", "test")
    assert sizes(fed, "test") == [0, 2, 0] and sizes(fed, "val") == [0, 0, 2]


def test_a_fraction_is_cut_off_for_testing():
    pair = (np.arange(10.0)[:, None], np.arange(10) % 2)
    fed = Federation.from_clients([pair, pair]).split(test=0.3, seed=5)
    assert sizes(fed) == [7, 7] and sizes(fed, "test") == [3, 3]
    every = torch.cat([fed.client(0)[0], fed.client(0, "test")[0]]).flatten()
    assert sorted(every.tolist()) == list(range(10))


class Squares(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, k):
        return np.full(2, float(k * k), dtype=np.float32), k


def test_clients_datasets():
    tensors = TensorDataset(torch.rand(4, 2), torch.tensor([0, 1, 2, 2]))
    fed = Federation.from_clients(
        with_test([Squares(), tensors, Subset(tensors, [3, 0])], [tensors, Squares(), Squares()])
    )
    assert sizes(fed) == [3, 4, 2] and sizes(fed, "test") == [4, 3, 3]
    assert fed.client(0)[0].tolist() == [[0, 0], [1, 1], [4, 4]] and fed.client(0)[1].tolist() == [
        0,
        1,
        2,
    ]
    assert torch.equal(fed.client(2)[0][0], tensors[3][0])


def test_from_partition_joins_the_pools():
    x, y = torch.rand(40, 3), torch.arange(40) % 10
    part = partition("A*", y[:30], 3, test_labels=y[30:], shift_seed=2)
    fed = Federation.from_partition(x[:30], y[:30], part, x_test=x[30:], y_test=y[30:])
    assert torch.equal(fed.x, x) and fed.classes == 10
    assert int(fed.size().sum()) == 30 and int(fed.size("test").sum()) == 10
    assert torch.equal(fed.client(0)[1], y[fed.index["train"][0]])
    assert torch.equal(fed.client(1, "test")[1], part.relabel[1][y[fed.index["test"][1]]])
    groups = partition("practical1", y, 4, groups=2)
    assert Federation.from_partition(x, y, groups).truth["group"].tolist() == [0, 0, 1, 1]


# -- Motley's protocols ------------------------------------------------------


def many(n, low=2, high=30, seed=0):
    rng = np.random.RandomState(seed)
    return Federation.from_clients(
        [(rng.rand(k, 2), rng.randint(0, 3, k)) for k in rng.randint(low, high, n)], classes=3
    )


def test_cross_silo_is_scikit_learns_split_called_twice():
    split = pytest.importorskip("sklearn.model_selection").train_test_split
    fed = many(8, 7, 60)
    for seed in (100, 1100):
        ours = fed.split(val=0.15, test=0.15, seed=seed, of=None)
        for i in range(fed.n):
            rest, test = split(fed.index["train"][i].numpy(), test_size=0.15, random_state=seed)
            train, val = split(rest, test_size=0.15 / 0.85, random_state=seed)
            for name, want in (("train", train), ("val", val), ("test", test)):
                assert ours.index[name][i].tolist() == want.tolist()


@given(st.integers(2, 12), st.floats(0.05, 0.4), st.floats(0, 0.4), st.integers(0, 99))
def test_cross_silo_laws(n, test, val, seed):
    fed = many(n, 12, 40, seed)
    fractions = {"train": 1 - test - val, "test": test} | ({"val": val} if val else {})
    cut = fed.split(**{k: v for k, v in fractions.items() if k != "train"}, seed=seed, of=None)
    for i in range(n):
        rows = torch.cat([cut.index[s][i] for s in cut.splits])
        assert sorted(rows.tolist()) == fed.index["train"][i].tolist()
        assert len(cut.index["test"][i]) == math.ceil(test * len(rows))
    again = cut.split(test=test, seed=seed, of=None)  # all splits pooled anew
    assert torch.equal(again.size() + again.size("test"), fed.size())


def test_a_split_outside_the_pool_stays():
    fed = many(4, 10, 20).split(test=0.2, seed=1, of=None)
    held = fed.split(val=0.2, seed=2, of=["train"])
    assert all(
        torch.equal(a, b) for a, b in zip(fed.index["test"], held.index["test"], strict=True)
    )
    assert torch.equal(held.size() + held.size("val"), fed.size())
    with pytest.raises(ValueError, match=r"^of: expected \['test'\] too"):
        fed.split(test=0.5, seed=0, of=["train"])


@given(st.integers(3, 60), st.integers(0, 99))
def test_client_groups_are_disjoint_and_exhaustive(n, seed):
    fed = many(n)
    groups = fed.split_clients(0.5, 0.25, 0.25, seed)
    assert sorted(torch.cat(groups).tolist()) == list(range(n))
    by_number = fed.split_clients(1, 1, n - 2, seed)
    assert [len(g) for g in by_number] == [1, 1, n - 2]


def test_client_groups_follow_one_permutation():
    order = np.random.RandomState(13).permutation(20)
    groups = many(20).split_clients(14, 2, 4)
    assert groups.val.tolist() == sorted(order[:2]) and groups.test.tolist() == sorted(order[2:6])
    assert groups.train.tolist() == sorted(order[6:])


@given(st.integers(1, 12), st.integers(0, 99))
def test_halves_laws(n, seed):
    fed = many(n, 4, 40).split(test=0.3, seed=0, of=None)
    total = fed.size() + fed.size("test")
    chosen = list(range(0, n, 2))
    half = fed.halves(chosen, seed)
    for i in range(n):
        a, b = half.index["train"][i], half.index["test"][i]
        if i in chosen:
            assert len(a) == int(total[i]) // 2 and len(a) + len(b) == int(total[i])
            assert not set(a.tolist()) & set(b.tolist())
        else:
            assert torch.equal(a, fed.index["train"][i]) and torch.equal(b, fed.index["test"][i])
    only = fed.halves(of=["train"], seed=seed)
    assert torch.equal(only.size() + only.size("test"), fed.size())


def test_smaller_personalization_sets_are_nested():
    fed = many(6, 4, 40).halves()
    quarter, half = fed.keep(0.25), fed.keep(0.5)
    for i in range(6):
        n = len(fed.index["train"][i])
        assert torch.equal(half.index["train"][i], fed.index["train"][i][: math.ceil(n / 2)])
        assert torch.equal(quarter.index["train"][i], half.index["train"][i][: math.ceil(n / 4)])
        assert torch.equal(half.index["test"][i], fed.index["test"][i])
    assert sizes(fed.keep(0.5, [2]))[:2] == sizes(fed)[:2]


def test_a_subset_keeps_its_labels_and_truth():
    fed = federation_of("synthetic_clusters", n=5, groups=2)
    part = fed.subset([3, 0])
    assert part.n == 2 and part.truth["group"].tolist() == [1, 0]
    for new, old in ((0, 3), (1, 0)):
        assert torch.equal(part.client(new)[0], fed.client(old)[0]) and torch.equal(
            part.client(new)[1], fed.client(old)[1]
        )


def test_standardised_by_training_samples_only():
    fed = many(5, 12, 40).split(test=0.3, seed=0, of=None)
    x = fed.x.clone()
    x[:, 1] = 7  # constant
    fed = Federation(x, fed.y, fed.index, 3)
    plain = fed.standardize()
    assert torch.equal(fed.x, x)
    for i in range(5):
        train = plain.client(i)[0]
        assert train[:, 0].mean().abs() < 1e-5 and (train[:, 0].std(correction=0) - 1).abs() < 1e-4
        assert (train[:, 1] == 0).all() and (plain.client(i, "test")[0][:, 1] == 0).all()
    poisoned = x.clone()
    poisoned[fed.index["test"][0]] = 1e6  # held-out values, and other clients', change nothing
    other = Federation(poisoned, fed.y, fed.index, 3).standardize()
    for i in range(5):
        assert torch.equal(other.client(i)[0], plain.client(i)[0])


# -- bad input ---------------------------------------------------------------

NAN = torch.arange(14.0).reshape(7, 2)
NAN[3, 1] = float("nan")
INF = NAN.nan_to_num()
INF[5, 0] = float("inf")
NONE = torch.zeros(2, 2, dtype=torch.int64)
BAD = [  # and the beginning of the sentence
    ({"index": {"train": []}}, "index['train']: expected a list of index tensors, at least one"),
    ({"index": {"train": index([0], []), "test": index([4], [5])}}, "clients: expected a sample"),
    ({"index": {"train": index([0, 2], [2])}}, "index['train']: expected a sample once"),
    ({"index": {"train": index([0, 0], [1])}}, "index['train']: expected a sample once"),
    (
        {"index": {"train": index([0], [1]), "test": index([4, 4], [5])}},
        "index['test']: expected a sample once",
    ),
    (
        {"index": {"train": index([0], [1]), "test": index([4], [1])}},
        "index['test']: expected samples of no other split, got [1]",
    ),
    ({"index": {"train": index([0], [7])}}, "index['train'][1]: expected samples in 0..6, got 7"),
    ({"index": {"train": index([-1], [1])}}, "index['train'][0]: expected samples in 0..6, got -1"),
    ({"index": {"train": [torch.zeros(1), torch.ones(1)]}}, "index['train'][0]: expected an int64"),
    ({"index": {"train": [[0], [1]]}}, "index['train'][0]: expected an int64 tensor"),
    ({"index": {"test": index([0])}}, "index: expected the split 'train'"),
    ({"index": {"train": index([0], [1]), "extra": index([2], [3])}}, "index: expected the split"),
    (
        {"index": {"train": index([0], [1]), "test": index([4])}},
        "index['test']: expected a list for each of 2 clients, got 1",
    ),
    (
        {"x": NAN},
        "x: expected finite numbers, also in sample 3, number 1 of client 1's train samples",
    ),
    (
        {"x": INF},
        "x: expected finite numbers, also in sample 5, number 0 of client 1's test samples",
    ),
    ({"x": torch.zeros(6, 2)}, "y: expected a row per row of x, [6, 2] on cpu"),
    ({"x": torch.zeros(7, 2, dtype=torch.uint8)}, "x: expected dense floats or int64 (tokens to"),
    ({"x": np.zeros((7, 2))}, "x: expected a tensor"),
    ({"y": torch.zeros(7)}, "y: expected int64 labels in 0..2 (classes=None for regression)"),
    ({"classes": 2, "relabel": None}, "y: expected int64 labels in 0..1"),
    ({"classes": 0}, "classes: expected a whole number, at least 1, got 0"),
    ({"relabel": NONE}, "relabel: expected int64 [2, 3]"),
    ({"relabel": torch.full((2, 3), 3)}, "relabel: expected int64 [2, 3], labels in 0..2"),
    ({"classes": None}, "relabel: expected a label at every step"),
    ({"truth": {"group": torch.zeros(3)}}, "group: expected a row for each of 2 clients"),
    ({"names": ("a",)}, "names: expected a row for each of 2 clients, got ('a',)"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_one_sentence(change, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}[^\n]*\.$"):
        small(**change)


def test_clients_may_share_a_test_set():
    assert sizes(
        small(index={"train": index([0], [1]), "test": index([4, 5], [5, 4])}), "test"
    ) == [2, 2]


PAIR = ([[1.0], [2.0]], [0, 1])
EMPTY = TensorDataset(torch.zeros(0, 1), torch.zeros(0))
BAD_CALLS = [
    (lambda: Federation.from_clients([]), "clients: expected the data of at least one client"),
    (
        lambda: Federation.from_clients({"a": PAIR}),
        "clients: expected each client's data in a list",
    ),
    (
        lambda: Federation.from_clients([PAIR, ([], [])]),
        "client 1: expected inputs and targets [1]",
    ),
    (
        lambda: Federation.from_clients([PAIR, (np.zeros((0, 1)), np.zeros(0, dtype=int))]),
        "clients: expected a sample to train on for each; leave out the 1 without, got [1]",
    ),
    (
        lambda: Federation.from_clients([PAIR, ([[1.0, 2.0]], [0])]),
        "client 1: expected inputs and targets [1] and [] (int64), as client 0 has, got '[2] and",
    ),
    (lambda: Federation.from_clients([PAIR, ([[1.0]], [0.5])]), "client 1: expected inputs and"),
    (
        lambda: Federation.from_clients([([[1.0]], [0, 1])]),
        "client 0 (train): expected one target for each input, got [[1, 1], [2]]",
    ),
    (lambda: Federation.from_clients([([["a"]], [0])]), "x of client 0 (train): expected numbers"),
    (lambda: Federation.from_clients([[1, 2, 3]]), "client 0 (train): expected a pair (x, y)"),
    (lambda: Federation.from_clients([{"train": PAIR, "dev": PAIR}]), "client 0: expected 'train'"),
    (lambda: Federation.from_clients([{"test": PAIR}]), "client 0: expected 'train' samples"),
    (lambda: Federation.from_clients([EMPTY]), "client 0 (train): expected a pair (x, y), or a D"),
    (
        lambda: Federation.from_clients([5]),
        "client 0 (train): expected a pair (x, y), or a Dataset",
    ),
    (lambda: small().client(2), "client: expected a number from 0 to 1, got 2"),
    (lambda: small().client(0, "val"), "split: expected one of train, test, got 'val'"),
    (
        lambda: small().subset([0, 0]),
        "clients: expected distinct ids in 0..1, at least one, got [0",
    ),
    (lambda: small().subset([]), "clients: expected distinct ids in 0..1, at least one, got []"),
    (lambda: small().split_clients(1, 1, 1), "train, val and test: expected 2 clients in all, one"),
    (lambda: small().split_clients(-1), "train: expected a finite number >= 0, got -1"),
    (lambda: small().keep(0), "fraction: expected a number above 0, at most 1, got 0"),
    (lambda: small().split(val=0.5, test=0.5), "val and test: expected shares below 1 together"),
    (lambda: small().split(test=1.0), "test: expected a number from 0 to below 1, got 1.0"),
    (
        lambda: small().split(test=0.9),
        "of: expected ['test'] too, which exist, or None for all splits, got ('train',)",
    ),
    (lambda: small().split(test=0.9, of=None), "val and test: expected a client with enough sam"),
    (
        lambda: Federation.from_clients([([[1.0]], [0])]).halves(),
        "clients: expected at least 2 samples each, to be halved; leave out, got [0]",
    ),
    (
        lambda: Federation.from_partition(
            torch.zeros(10, 1),
            torch.zeros(10).long(),
            partition("iid", [0] * 10, 2),
            x_test=torch.zeros(1, 1),
        ),
        "x_test: expected y_test beside it",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_calls_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}[^\n]*\.$"):
        call()


def federation(seed):
    gen = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(12, 3, generator=gen), torch.randint(0, 2, (12,), generator=gen))
        for _ in range(3)
    ]
    return Federation.from_clients(with_test(parts, parts), classes=2)


def test_what_standardized_data_were_scaled_by_is_kept():
    data = federation(0).standardize()
    x = federation(0).client(0)[0]
    scaling = data.scaling
    torch.testing.assert_close(
        ((x - scaling.mean[0]) / scaling.deviation[0]).float(), data.client(0)[0]
    )
    assert torch.equal(data.subset([2, 0]).scaling.mean, scaling.mean[[2, 0]])


def test_clients_keep_their_names():
    data = Federation.from_table(
        np.eye(4, dtype=np.float32), np.arange(4) % 2, ["north", "south", "north", "south"]
    )
    assert data.names == ("north", "south") and data.subset([1]).names == ("south",)


def test_names_and_scaling_are_exported(tmp_path):
    pytest.importorskip("safetensors")
    data = replace(federation(0).standardize(), names=("a", "b", "c"))
    Simulation("fedavg", nn.Linear(3, 2), data, Training(), rounds=1).run().export(tmp_path)
    told = json.loads((tmp_path / "manifest.json").read_text())["clients"][1]
    assert (
        told["name"] == "b"
        and told["mean"] == data.scaling.mean[1].tolist()
        and len(told["deviation"]) == 3
    )


gen = torch.Generator().manual_seed(0)


def federation_held_out(splits):
    made = [
        {s: (torch.randn(n, 6, generator=gen), torch.arange(n) % 4) for s, n in splits.items()}
        for _ in range(5)
    ]
    return Federation.from_clients(made, classes=4)


def rows(data, split):
    return set(data.lists(split).flat.tolist())


def test_a_test_split_that_is_there_stays_the_test_split():
    data = federation_held_out({"train": 40, "test": 10})
    made = cross_silo(data).data
    assert rows(made, "test") == rows(data, "test") and rows(made, "train") | rows(
        made, "val"
    ) == rows(data, "train")
    assert [len(i) for i in made.index["val"]] == [8] * 5  # 15 of 85 %, at least


def test_a_validation_split_that_is_there_stays_one():
    data = federation_held_out({"train": 40, "val": 10})
    made = cross_silo(data).data
    assert rows(made, "val") == rows(data, "val") and rows(made, "train") | rows(
        made, "test"
    ) == rows(data, "train")


def test_shares_divide_everything_anew():
    made = cross_silo(federation_held_out({"train": 40, "test": 10}), val=0.2, test=0.3).data
    assert made.size("test").tolist() == [15] * 5


def test_scaffolds_control_variate_is_the_mean_of_all_after_a_client_joined():
    """Algorithm 1 of SCAFFOLD: c is the mean of the c_i, also of more clients than the server
    expected."""
    data = [(torch.randn(8, 3, generator=gen), torch.randn(8, generator=gen)) for _ in range(4)]
    model = nn.Linear(3, 1, bias=False)
    server = Server("scaffold", model, 3, rounds=400)
    training = Training(lr=0.1, batch_size=8)
    clients = [Client("scaffold", model, d, training, loss="squared") for d in data]
    for r in range(400):
        ids = range(3 if r < 5 else 4)
        for i in ids:
            server.join(f"c{i}")
        server.aggregate({f"c{i}": clients[i].train(server.download(f"c{i}")) for i in ids})
    x, y = (torch.cat(parts).double() for parts in zip(*data, strict=True))
    best = torch.linalg.lstsq(x, y[:, None]).solution.flatten()
    torch.testing.assert_close(
        server.state_dict()["state"]["server.x"].double(), best, rtol=0, atol=1e-5
    )


def sentence(error):
    text = str(error.value)
    assert text.count(". ") == 0 and "\n" not in text
    return text


# data -----------------------------------------------------------------------
def test_data_errors_name_the_client_and_the_remedy():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    bad = x.clone()
    bad[2, 1] = torch.nan
    ragged = [[1.0, 2.0], [1.0]], [0, 1]
    for parts, word in [
        ([(x, y), (bad, y)], "client 1"),
        ([(x, 2 * y - 1)], r"\(y > 0\)"),
        ([ragged], "pad sequences"),
        ([([{"a": 1}], [0])], "dict"),
    ]:
        with pytest.raises((ValueError, TypeError), match=word) as e:
            Federation.from_clients(parts)
        sentence(e)
    assert (
        Federation.from_clients([(torch.zeros(4, 3, dtype=torch.int32), y)]).x.dtype == torch.int64
    )
    fed = Federation.from_clients([(x, y)] * 4)
    for share in (math.nan, 1.0, -0.5):
        with pytest.raises(ValueError, match=r"^test: expected a number from 0 to below 1, got"):
            fed.split(test=share)
    with pytest.raises(ValueError, match="val"):
        fed.split_clients(0.5, math.nan, 0.5)


def test_a_client_with_one_sample_keeps_it():
    parts = [(torch.randn(k, 3), torch.arange(k) % 2) for k in (10, 1, 10)]
    fed = Simulation(
        "l2c", nn.Linear(3, 2), Federation.from_clients(with_test(parts, parts), classes=2)
    ).data
    assert fed.size("train").tolist() == [8, 1, 8] and fed.size("val").tolist() == [2, 0, 2]
    with pytest.raises(ValueError, match="a client with enough samples"):
        one = [(torch.randn(1, 3), torch.tensor([0]))]
        Simulation("l2c", nn.Linear(3, 2), Federation.from_clients(with_test(one, one), classes=2))


def test_a_download_folder_is_no_federation(tmp_path):
    (tmp_path / "a.csv").write_text("1,0\n2,1\n")
    (tmp_path / "b.csv").write_text("1,0\n2,1\n")
    (tmp_path / "README.md").write_text("about")
    assert federation_of(f"folder:{tmp_path}", fractions={"test": 0.5}).n == 2
    (tmp_path / "holiday.jpg").write_bytes(b"")
    with pytest.raises(OSError, match=r"holiday\.jpg") as e:
        federation_of(f"folder:{tmp_path}")
    sentence(e)
