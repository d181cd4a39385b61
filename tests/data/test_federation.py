"""A federation: its contents, constructors, splits and errors.

Motley's two protocols are among the splits.
"""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.splits import same, sizes
from parts.user import simulation
from places import tabled
from small import equals, with_test
from torch import nn
from torch.utils.data import Subset, TensorDataset

from pflcore import Federation, cross_silo
from pflcore.data import partition
from pflcore.lab.data import federation_of


def index(*lists):
    return [torch.tensor(i, dtype=torch.int64) for i in lists]


def small(**change):
    """Two clients, seven samples, three classes.

    Sample 6 belongs to no client.
    """
    fields = {
        "x": torch.arange(14.0).reshape(7, 2),
        "y": torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        "index": {"train": index([0, 2], [1, 3]), "test": index([4], [5])},
        "classes": 3,
        "relabel": torch.tensor([[0, 1, 2], [1, 2, 0]]),
    }
    return Federation(**(fields | change))


def many(n, low=2, high=30, seed=0):
    rng = np.random.RandomState(seed)
    return Federation.from_clients(
        [(rng.rand(k, 2), rng.randint(0, 3, k)) for k in rng.randint(low, high, n)],
        classes=3,
    )


# -- contents ----------------------------------------------------------------


def test_clients_sizes_counts_and_labels():
    fed = small()
    assert fed.n == 2 and fed.splits == ("train", "test") and fed.shape == (2,)
    assert (
        sizes(fed) == [2, 2] and sizes(fed, "test") == [1, 1] and fed.to("cpu") is fed
    )
    fed.client(1)[0].zero_()  # the pool is never altered
    x, y = fed.client(1)
    # The labels 1, 0 of the pool become 2, 1 by [1, 2, 0].
    assert x.tolist() == [[2, 3], [6, 7]] and y.tolist() == [2, 1]
    assert fed.client(1, "test")[1].tolist() == [0]
    assert fed.counts("test").tolist() == [[0, 1, 0], [1, 0, 0]]
    assert fed.counts("train", torch.tensor([1])).tolist() == [[0, 1, 1]]
    assert fed.counts("train", torch.tensor([], dtype=torch.int64)).shape == (0, 3)
    assert small(relabel=None).client(1)[1].tolist() == [1, 0]
    shared = {"train": index([0], [1]), "test": index([4, 5], [5, 4])}
    assert sizes(small(index=shared), "test") == [2, 2]  # a test set may be shared
    tokens = torch.zeros(3, 4).long()
    numbers = torch.rand(3, 2)
    other = Federation(tokens, numbers, {"train": index([0], [1, 2])})
    assert other.classes is None and other.client(1)[1].shape == (2, 2)
    with sentence("counts: expected labels"):
        other.counts()


def test_summary_is_short_text():
    lines = """clients: 2
samples: {'train': 4, 'test': 2}
classes: 3
labels permuted by client (concept shift): True
draws: 3"""
    assert set(lines.splitlines()) <= set(
        small(facts={"draws": 3}).summary().splitlines()
    )
    numbers = Federation.from_clients([([[1.0]], [0.5])]).summary()
    assert "classes" not in numbers and "targets: numbers to predict" in numbers
    words = Federation.from_clients([([[1.0]] * 3, ["no", "yes", "no"])]).summary()
    assert "names of classes: no, yes" in words


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_device_holds_everything():
    fed = small(truth={"group": torch.tensor([0, 1])})
    moved = fed.to("cuda")
    assert moved.client(1)[1].is_cuda and moved.truth["group"].is_cuda
    assert moved.to("cpu").client(1)[1].tolist() == [2, 1]
    equals(moved.counts(), fed.counts())
    assert moved.size().device.type == "cpu"
    assert moved.split_in_half().keep_fraction(0.5).subset([1]).n == 1


# -- constructors ------------------------------------------------------------

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.array([0, 1] * 4)


def test_arrays_of_any_memory():
    for x in (
        X[::-1],
        X.astype(">f4")[::-1],
        X[:, ::-1],
        np.asfortranarray(X),
        X.tolist(),
    ):
        equals(
            Federation.from_clients([(x, Y)]).x, torch.tensor(np.array(x, np.float32))
        )


def test_clients_arrays_of_any_kind():
    a = (np.random.rand(4, 2), [0, 1, 2, 1])  # float64 and a list
    b = (torch.rand(3, 2), torch.tensor([0, 0, 1], dtype=torch.int32))
    fed = Federation.from_clients(pair for pair in [a, b])
    assert (
        fed.classes == 3 and fed.x.dtype == torch.float32 and fed.y.dtype == torch.int64
    )
    assert sizes(fed) == [4, 3] and fed.splits == ("train",)
    equals(fed.client(1)[0], b[0])
    assert Federation.from_clients([a], dtype=None).x.dtype == torch.float64
    assert Federation.from_clients([a, b], classes=7).counts().shape == (2, 7)
    assert (
        Federation.from_clients([(torch.ones(2, 1).int(), [0, 1])]).x.dtype
        == torch.int64
    )
    fed = Federation.from_clients(
        [{"train": a}, {"train": a, "test": b}, {"train": a, "val": b}]
    )
    assert fed.splits == ("train", "val", "test")
    assert sizes(fed, "test") == [0, 3, 0] and sizes(fed, "val") == [0, 0, 3]


class Moved(TensorDataset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 100, y


def test_clients_datasets():
    tensors = TensorDataset(torch.rand(4, 2), torch.tensor([0, 1, 2, 2]))
    squares = [(np.full(2, k * k, np.float32), k) for k in range(3)]
    train = [squares, tensors, Subset(tensors, [3, 0])]
    fed = Federation.from_clients(
        with_test(train, [tensors, squares, Subset(tensors, [])])
    )
    assert sizes(fed) == [3, 4, 2] and sizes(fed, "test") == [4, 3, 0]
    x, y = fed.client(0)
    assert x.tolist() == [[0, 0], [1, 1], [4, 4]] and y.tolist() == [0, 1, 2]
    equals(fed.client(2)[0][0], tensors[3][0])
    # A subclass is read by its __getitem__.
    assert Federation.from_clients([Moved(*tensors.tensors)]).x.min() >= 100


def test_from_partition_joins_the_pools():
    x = torch.rand(40, 3)
    y = torch.arange(40) % 10
    part = partition("A*", y[:30], 3, test_labels=y[30:], shift_seed=2)
    fed = Federation.from_partition(x[:30], y[:30], part, x_test=x[30:], y_test=y[30:])
    equals(fed.x, x)
    assert fed.classes == 10
    equals(fed.client(0)[1], y[fed.index["train"][0]])
    equals(fed.client(1, "test")[1], part.relabel[1][y[fed.index["test"][1]]])
    groups = partition("practical1", y, 4, groups=2)
    assert Federation.from_partition(x, y, groups).truth["group"].tolist() == [
        0,
        0,
        1,
        1,
    ]


IDS = np.random.default_rng(0).permutation(np.arange(8) % 4)


def test_a_tables_client_holds_its_own_rows_in_their_order():
    words = np.array(["d", "a", "c", "b"])[IDS]
    for ids in (
        10 * IDS + 7,
        torch.tensor(IDS),
        words.astype(object),
        IDS.astype(np.uint64),
    ):
        # The memory of this matrix is column by column.
        data = Federation.from_table(torch.tensor(X).T.contiguous().T, Y, ids)
        assert data.names == tuple(sorted(set(np.asarray(ids).tolist())))
        assert data.x.is_contiguous()
        for i, name in enumerate(data.names):
            for client_rows, all_rows in zip(data.client(i), (X, Y), strict=True):
                assert np.array_equal(client_rows, all_rows[ids == name])
    assert Federation.from_table(X, Y, words).subset([1]).names == ("b",)


def test_a_memory_mapped_pool_stays_where_it_is(tmp_path, recwarn):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = Federation.from_table(mapped, Y, IDS)
    assert data.x.data_ptr() == mapped.ctypes.data and not recwarn


def test_a_data_frame_is_its_columns():
    pandas = pytest.importorskip("pandas")
    owners = np.array(["b", "a", "d", "c"])[IDS]
    frame = pandas.DataFrame({"u": X[:, 0], "label": Y, "v": X[:, 1], "who": owners})
    want = Federation.from_table(X[:, :2], Y, owners)
    # The frame's index is no input.
    got = Federation.from_table(frame.set_index(Y + 3), "label", "who")
    equals((got.x, got.y), (want.x, want.y))
    assert same(got, want)
    for names, message in (
        ({"client": "who"}, "y: expected one of the columns"),
        ({"y": "label", "client": "u"}, "x: expected columns of numbers .*who"),
    ):
        with sentence(message):
            Federation.from_table(frame, **names)


# -- splits and Motley's protocols -------------------------------------------


def test_a_split_is_scikit_learns_called_twice():
    split = pytest.importorskip("sklearn.model_selection").train_test_split
    fed = many(8, 7, 60)
    for seed in (100, 1100):
        ours = fed.split(val=0.15, test=0.15, seed=seed, of=None)
        for i in range(fed.n):
            rest, test = split(
                fed.index["train"][i].numpy(), test_size=0.15, random_state=seed
            )
            train, val = split(rest, test_size=0.15 / 0.85, random_state=seed)
            for name, want in (("train", train), ("val", val), ("test", test)):
                assert ours.index[name][i].tolist() == want.tolist()


@given(st.integers(2, 12), st.floats(0.05, 0.4), st.floats(0, 0.4), st.integers(0, 99))
def test_cross_silo_laws(n, test, val, seed):
    fed = many(n, 12, 40, seed)
    cut = fed.split(val=val, test=test, seed=seed, of=None)
    for i in range(n):
        rows = torch.cat([cut.index[s][i] for s in cut.splits])
        assert sorted(rows.tolist()) == fed.index["train"][i].tolist()
        assert len(cut.index["test"][i]) == math.ceil(test * len(rows))
    again = cut.split(test=test, seed=seed, of=None)  # all splits are pooled again
    equals(again.size() + again.size("test"), fed.size())
    validated = again.split(val=0.2, seed=2)
    assert same(again, validated, "test")  # a split outside the pool stays
    equals(validated.size() + validated.size("val"), again.size())


@given(st.integers(3, 60), st.integers(0, 99))
def test_client_groups_are_disjoint_exhaustive_and_of_one_permutation(n, seed):
    fed = many(n)
    groups = fed.split_clients(0.5, 0.25, 0.25, seed)
    assert sorted(torch.cat(groups).tolist()) == list(range(n))
    val, test, *train = np.random.RandomState(seed).permutation(n)
    one = np.int64(1)  # numpy's numbers are accepted
    groups = fed.split_clients(n - 2, one, one, seed)
    assert [g.tolist() for g in groups] == [sorted(train), [val], [test]]


@given(st.integers(1, 12), st.integers(0, 99))
def test_halves_laws(n, seed):
    fed = many(n, 4, 40).split(test=0.3, seed=0, of=None)
    total = fed.size() + fed.size("test")
    half = fed.split_in_half(range(0, n, 2), seed)
    for i in range(n):
        a = half.index["train"][i]
        b = half.index["test"][i]
        if i % 2:
            equals((a, b), (fed.index["train"][i], fed.index["test"][i]))
        else:
            assert len(a) == int(total[i]) // 2 and len(a) + len(b) == int(total[i])
            assert not set(a.tolist()) & set(b.tolist())
    only = fed.split_in_half(of=["train"], seed=seed)
    equals(only.size() + only.size("test"), fed.size())


def test_smaller_personalization_sets_are_nested():
    fed = many(6, 4, 40).split_in_half()
    half = fed.keep_fraction(0.5)
    for i, rows in enumerate(fed.index["train"]):
        equals(half.index["train"][i], rows[: math.ceil(len(rows) / 2)])
    assert (
        same(half, fed, "test")
        and sizes(fed.keep_fraction(0.5, [2]))[:2] == sizes(fed)[:2]
    )
    hundred = Federation.from_clients([(np.zeros((100, 1)), np.zeros(100, np.int64))])
    shares = [sizes(hundred.keep_fraction(f))[0] for f in (0.07, 0.55, 0.071, 1e-12)]
    assert shares == [7, 55, 8, 1]  # a share is read as decimals: 0.07 of 100 is 7


def test_a_subset_keeps_its_labels_and_truth():
    fed = federation_of("synthetic_clusters", n=5, groups=2)
    part = fed.subset(np.array([3, 0]))
    assert part.n == 2 and part.truth["group"].tolist() == [1, 0]
    for new, old in ((0, 3), (1, 0)):
        equals(part.client(new), fed.client(old))


def test_a_subset_of_a_used_federation_knows_its_own_trainable_clients():
    data = small(index={"train": index([], [1, 3]), "test": index([4], [5])})
    assert data.trainable_clients.tolist() == [1]
    assert data.subset([1]).trainable_clients.tolist() == [0]
    assert data.subset([1, 0]).trainable_clients.tolist() == [0]


def test_standardised_by_training_samples_only():
    fed = many(5, 12, 40).split(test=0.3, seed=0, of=None)
    x = fed.x.clone()
    x[:, 1] = 7  # a constant feature
    fed = replace(fed, x=x)
    plain = fed.standardize()
    mean, deviation = fed.standardize().scaling
    for i in range(5):
        train = plain.client(i)[0]
        assert (
            train[:, 0].mean().abs() < 1e-5
            and (train[:, 0].std(correction=0) - 1).abs() < 1e-4
        )
        assert (train[:, 1] == 0).all() and (
            plain.client(i, "test")[0][:, 1] == 0
        ).all()
        torch.testing.assert_close(
            ((fed.client(i)[0] - mean[i]) / deviation[i]).float(), train
        )
    equals(plain.subset([2, 0]).scaling.mean, mean[[2, 0]])


def test_names_and_scaling_are_exported(tmp_path):
    pytest.importorskip("safetensors")
    data = replace(many(3).split(test=0.3).standardize(), names=("a", "b", "c"))
    simulation(data=data, model=nn.Linear(2, 3)).run().export(tmp_path)
    entry = json.loads((tmp_path / "manifest.json").read_text())["clients"][1]
    assert entry["name"] == "b" and len(entry["deviation"]) == 2
    assert entry["mean"] == data.scaling.mean[1].tolist()


def rows(data, *splits):
    return set(torch.cat([data.lists(s).flat for s in splits]).tolist())


@pytest.mark.parametrize("there, lacks", [("test", "val"), ("val", "test")])
def test_a_test_split_that_is_there_stays_the_test_split(there, lacks):
    each = [
        {
            s: (torch.randn(n, 6), torch.arange(n) % 4)
            for s, n in (("train", 40), (there, 10))
        }
    ]
    data = Federation.from_clients(each * 5, classes=4)
    completed = cross_silo(data).data
    assert rows(completed, there) == rows(data, there)
    assert rows(completed, "train", lacks) == rows(data, "train")
    assert sizes(completed, lacks) == [8] * 5  # at least 15 % of the 85 %
    # With shares, all samples are split again.
    anew = cross_silo(data, val=0.2, test=0.3).data
    assert sizes(anew, "test") == [15] * 5


# -- bad input ---------------------------------------------------------------

NAN = torch.arange(14.0).reshape(7, 2)
NAN[3, 1] = float("nan")


INDEX = """\
{"train": []} | index['train']: expected a list of index tensors, at least one
{"train": [[0], []]} | clients: expected a sample
{"train": [[0, 2], [2]]} | index['train']: expected a sample once
{"train": [[0], [1]], "test": [[4, 4], [5]]} | index['test']: expected a sample once
{"train": [[0], [1]], "test": [[4], [1]]} | index['test']: expected samples of no other split, got
{"train": [[0], [7]]} | index['train'][1]: expected samples in 0..6, got 7
{"train": [[-1], [1]]} | index['train'][0]: expected samples in 0..6, got -1
{"test": [[0]]} | index: expected the split 'train'
{"train": [[0], [1]], "extra": [[0], [1]]} | index: expected the split
{"train": [[0], [1]], "test": [[4]]} | index['test']: expected a list for each of
"""  # noqa: E501


LABELS = """\
{"y": [0.0, 0, 0, 0, 0, 0, 0]} | y: expected int64 labels in 0..2 (classes=None for regression)
{"classes": 2, "relabel": null} | y: expected int64 labels in 0..1
{"relabel": [[0, 0], [0, 0]]} | relabel: expected int64 [2, 3]
{"relabel": [[3, 3, 3], [3, 3, 3]]} | relabel: expected int64 [2, 3], labels in 0..2
{"classes": null} | relabel: expected int64 [2, 0]
"""  # noqa: E501


BAD = [  # changed fields, beginning of the error message
    (
        {"index": {"train": [torch.zeros(1), torch.ones(1)]}},
        "index['train'][0]: expected an int64",
    ),
    (
        {"x": NAN},
        "x: expected finite numbers, also in sample 3, number 1 of client 1's train "
        "samp",
    ),
    ({"x": NAN.roll(3, 0)}, "x: expected finite numbers, also in sample 6, got"),
    ({"x": torch.zeros(6, 2)}, "y: expected a row per row of x, [6, 2] on cpu"),
    (
        {"x": torch.zeros(7, 2, dtype=torch.uint8)},
        "x: expected dense floats or int64 (tokens to",
    ),
    ({"x": np.zeros((7, 2))}, "x: expected a tensor"),
    (
        {"truth": {"group": torch.zeros(3)}},
        "group: expected a row for each of 2 clients",
    ),
    ({"names": ("a",)}, "names: expected a row for each of 2 clients, got ('a',)"),
]


PAIR = "[[[1.0], [2.0]], [0, 1]]"
# Clients (two lists are a pair (x, y)), and the beginning of the error message.
BAD_CLIENTS = """\
[] | clients: expected the data of at least one client
{"train": PAIR, "test": PAIR} | clients: expected each client's data in a list, or in a dict by the client's name
[PAIR, [[[1.0, 2.0]], [0]]] | client 1: expected inputs and targets [1] and [] (int64), as client 0
[PAIR, [[[1.0]], [0.5]]] | client 1: expected inputs and
[[[[1.0]], [0, 1]]] | client 0 (train): expected one target for each input, got [[1, 1], [2]
[[[["a"]], [0]]] | x of client 0 (train): expected numbers
[[[[1.0, 2.0], [1.0]], [0, 1]]] | x of client 0 (train): expected numbers in one array (pad
[[1, 2, 3]] | client 0 (train): expected a pair (x, y), or a Dataset of pairs (or a list of them); t
[5] | client 0 (train): expected a pair (x, y), or a Dataset
[{"train": PAIR, "dev": PAIR}] | client 0: expected samples by split, one of 'train', 'val'
"""  # noqa: E501
ARRAYS = [
    (
        [(X, np.arange(8).astype(str))],
        "y of client 0 (train): expected words that name classes, or numbers",
    ),
    (
        [[(X[k, :k], 0) for k in (1, 2, 3)]],
        "x of client 0 (train): expected numbers in one array",
    ),
    (
        [TensorDataset(torch.zeros(0, 1), torch.zeros(0))],
        "clients: expected a sample of each, of any split",
    ),
    (
        [(X, Y), ([], [])],
        "clients: expected a sample of each, of any split; leave out the 1 without, ",
    ),
    (
        [(X, 2 * Y - 1), (X, Y * 0)],
        "y: expected int64 labels in 0..1 (classes=None for regression), "
        "also in sample",
    ),
]
TWO = Federation.from_clients([(X, Y), (X, Y)])
IID = partition("iid", Y, 2)
# Method, arguments, beginning of the error message. In `of`, None is all splits.
CALLS = """\
small.client | {"i": 2} | client: expected a number from 0 to 1, got 2
small.client | {"i": 0, "split": "val"} | split: expected one of train, test, got 'val'
small.split | {"test": 0.9} | test: expected no share for the split 'test', which is there, got 0.9; give of=None
small.split | {"test": 0.9, "of": null} | val and test: expected a client with enough sam
small.split_in_half | {"of": ["test"]} | clients: expected at least 2 samples each, to be hal
two.split_clients | {"train": 1, "val": 1, "test": 1} | train, val and test: expected 2 clients in
two.split_clients | {"train": 0.5, "val": NaN} | val: expected a finite number >= 0, got nan
two.split | {"val": 0.5, "test": 0.5} | val and test: expected shares below 1 together
two.split_in_half | {"seed": 4294967296} | seed: expected a whole number from 0 to 2**32 - 1
two.subset | {"clients": [0, 0]} | clients: expected ids of clients from 0 to 1, each once
two.subset | {"clients": []} | clients: expected ids of clients from 0 to 1, each once
two.subset | {"clients": [0.9, 1]} | clients: expected ids of clients from 0 to 1, each once
two.subset | {"clients": [false, true]} | clients: expected ids of clients from 0 to 1, each once
made.from_table | {"x": [0, 0], "y": [0, 1], "client": [0.5, 1.5]} | client: expected a whole number
made.from_table | {"x": [0, 0], "y": [0, 1], "client": [null, "a"]} | client: expected a whole
made.from_table | {"x": [0, 0], "y": [0, 1], "client": [0]} | client: expected a whole number or a
two.subset | {"clients": 0} | clients: expected ids of clients from 0 to 1, each once
"""  # noqa: E501


def paired(client):
    """Turns lists of two into tuples, which JSON does not have."""
    if isinstance(client, dict):
        return {split: paired(samples) for split, samples in client.items()}
    return tuple(client) if isinstance(client, list) and len(client) == 2 else client


def listed(clients):
    return [*map(paired, clients)] if isinstance(clients, list) else clients


def lists(of):
    return {split: index(*rows) for split, rows in of.items()}


def tensors(change):
    return {
        key: torch.tensor(v) if isinstance(v, list) else v for key, v in change.items()
    }


def method(call):
    name, called = call.split(".")
    return getattr({"small": small(), "two": TWO, "made": Federation}[name], called)


made = Federation.from_clients
PAIRS = BAD_CLIENTS.replace("PAIR", PAIR)
REFUSED = [  # function, arguments, beginning of the error message
    *((small, {"index": lists(of)}, words) for of, words in tabled(INDEX)),
    *((small, tensors(change), words) for change, words in tabled(LABELS)),
    *((small, change, words) for change, words in BAD),
    *((method(call), options, words) for call, options, words in tabled(CALLS)),
    *((made, {"clients": listed(c)}, words) for c, words in tabled(PAIRS)),
    *((made, {"clients": c}, words) for c, words in ARRAYS),
]


@pytest.mark.parametrize("call, options, words", REFUSED)
def test_bad_input_is_one_sentence(call, options, words):
    with sentence(re.escape(words)):
        call(**options)


def test_a_pool_that_is_half_there_is_one_sentence():
    with sentence("y_test: expected numbers, or a word for each sample"):
        Federation.from_partition(X, Y, IID, x_test=X)


def test_a_file_and_a_pair_where_they_do_not_belong_are_named():
    with pytest.raises(ValueError, match=r"x: expected a table .*read a file first"):
        Federation.from_table("sites.csv", y="ill", client="site")
    pair = (torch.randn(4, 2), torch.arange(4) % 2)
    with pytest.raises(ValueError, match=r"without them a pair.*arrays in a tup"):
        Federation.from_clients([pair, pair], x="a", y="b")


def unbalanced(sizes=((40, 10, 1), (3, 30, 0), (1, 1, 1))):
    """A federation whose clients have these numbers of samples of three classes."""
    clients = []
    for counts in sizes:
        y = torch.arange(3).repeat_interleave(torch.tensor(counts))
        clients.append((torch.randn(len(y), 2), y))
    return Federation.from_clients(clients, classes=3)


def test_a_stratified_split_holds_out_the_share_of_each_class():
    fed = unbalanced().split(val=0.1, test=0.2, seed=3, stratify=True)
    assert fed.counts("test").tolist() == [[9, 2, 0], [0, 7, 0], [0, 0, 0]]
    assert fed.counts("val").tolist() == [[4, 1, 0], [0, 4, 0], [0, 0, 0]]
    total = sum(fed.counts(split) for split in fed.splits)
    assert total.tolist() == [[40, 10, 1], [3, 30, 0], [1, 1, 1]]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 99),
)
def test_a_stratified_split_keeps_every_class_in_training(counts, share, seed):
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    other = torch.zeros(60, dtype=torch.long)
    pairs = [(torch.randn(len(y), 1), y), (torch.randn(60, 1), other)]
    fed = Federation.from_clients(pairs, classes=len(counts))

    got = fed.split(test=share, seed=seed, stratify=True)

    had = fed.counts()[0]
    held = got.counts("test")[0]
    assert ((got.counts()[0] > 0) == (had > 0)).all()
    free = (had - 1).clamp(min=0)
    count = min(int(np.ceil(share * int(had.sum()))), int(free.sum()))
    assert held.sum() == count
    even = free * count / max(int(free.sum()), 1)
    assert ((held - even).abs() < 1).all()
    assert torch.equal(got.counts()[0] + held, had)


def test_a_stratified_split_needs_labels():
    fed = Federation.from_clients([(torch.randn(9, 2), torch.randn(9))])
    with sentence("stratify: expected labels, one for each sample, got"):
        fed.split(test=0.3, stratify=True)


def test_labels_that_may_be_counts_are_said():
    visits = Federation.from_clients([(torch.randn(80, 2), torch.arange(80) % 78)])
    assert visits.classes_note == (
        "78 classes; --loss squared (classes=None) if their labels are numbers to "
        "predict"
    )
    words = Federation.from_clients([(torch.randn(6, 2), [*"abcabc"])])
    assert words.classes_note is None
    assert unbalanced(((2, 2, 0),)).classes_note is not None


def test_a_split_keeps_the_training_samples():
    data = Federation.from_clients([(torch.rand(40, 2), torch.arange(40) % 2)] * 2)
    data = data.split(val=0.25)
    with sentence("of: expected 'train' among the splits"):
        data.split(test=0.5, of=("val",))


def test_a_partitions_inputs_have_a_target_each():
    labels = torch.arange(100) % 10
    part = partition("A", labels, 5, test_labels=labels)
    x, x_test = torch.rand(90, 2), torch.rand(110, 2)
    with sentence("y: expected a value for each of the 90 samples of x, got 100"):
        Federation.from_partition(x, labels, part, x_test=x_test, y_test=labels)
    x = torch.rand(100, 2)
    with sentence("y_test: expected a value for each of the 110 samples of x_test"):
        Federation.from_partition(x, labels, part, x_test=x_test, y_test=labels)
    with sentence("x_test: expected the inputs of y_test, got None"):
        Federation.from_partition(x, labels, part, y_test=labels)
