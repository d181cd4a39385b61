"""Who gets which sample: the papers' counts, the laws every partition obeys, and what is
refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import waffle_partition as waffle
from hypothesis import given
from hypothesis import strategies as st
from parts.partition import counts, labels_with, sizes

from pflcore.data import PARTITIONS, options_of, partition

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def mnist_labels(kind):
    if kind == "counts":
        return labels_with(MNIST), labels_with(MNIST_TEST, 1)
    root = os.environ.get("PFLCORE_DATA")
    if root is None or not (Path(root) / "mnist").is_dir():
        pytest.skip("PFLCORE_DATA holds no mnist/ here")
    from pflcore.data import load

    source = load("mnist", root)
    return source.y_train, source.y_test


GOLDEN = {
    "A": [5996, 6000, 5999, 6001, 6001, 5998, 6000, 6000, 5999, 6006],
    "B": [6186, 6144, 6115, 5997, 5996, 5864, 5861, 5829, 5838, 6170],
    "C": [5758, 5834, 6028, 6133, 6281, 6089, 6036, 5968, 5996, 5877],
}
STEPS = {  # ceil(n_i / 32)
    "A": [188] * 10,
    "B": [194, 192, 192, 188, 188, 184, 184, 183, 183, 193],
    "C": [180, 183, 189, 192, 197, 191, 189, 187, 188, 184],
}
ALICE = {
    "A": [592, 674, 595, 613, 584, 542, 591, 626, 585, 594],
    "B": [1480, 1685, 1489, 1532, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 613, 1168, 2168, 1183, 626, 0, 0],
}
ALICE_TEST = {
    "A": [98, 113, 103, 101, 98, 89, 95, 102, 97, 100],  # 996
    "B": [245, 283, 258, 252, 0, 0, 0, 0, 0, 0],  # 1038
    "C": [0, 0, 0, 101, 196, 356, 191, 102, 0, 0],  # 946
}


@pytest.mark.parametrize("kind", ["counts", "mnist"])
def test_counts_of_the_waffle_paper_on_mnist(kind):
    y, yt = mnist_labels(kind)
    both = torch.cat([torch.as_tensor(y), torch.as_tensor(yt)])
    for base, want in GOLDEN.items():
        part = partition(base, y, 10, test_labels=yt, seed=3)
        assert sizes(part) == want, base
        assert counts(part, both, "train")[0] == ALICE[base]
        assert counts(part, both, "test")[0] == ALICE_TEST[base]
        assert [-(-s // 32) for s in sizes(part)] == STEPS[base]
    assert [sum(ALICE_TEST[b]) for b in "ABC"] == [996, 1038, 946]


def test_alice_overlap_with_the_others():
    y = labels_with([1000] * 10)
    for base, want in (
        ("B", [1, 0.75, 0.5, 0.25, 0, 0, 0, 0.25, 0.5, 0.75]),
        ("C", [1, 0.6, 0.4, 0.2, 0.1, 0, 0.1, 0.2, 0.4, 0.6]),
    ):
        share = torch.tensor(counts(partition(base, y, 10), y, "train")) / 1000
        assert torch.minimum(share, share[:1]).sum(1).tolist() == pytest.approx(want)
    left = torch.tensor(counts(waffle(y, 10, base="C"), y, "train"))
    assert int(left[1].argmax()) == 4  # Table 2: agent 1 of C peaks at label 4


class_counts = st.lists(st.integers(1, 60), min_size=10, max_size=10)


@given(
    class_counts,
    st.integers(1, 33),
    st.sampled_from("ABC"),
    st.integers(0, 5),
)
def test_waffle_is_disjoint_exhaustive_and_in_proportion(have, n, base, seed):
    y = labels_with(have, seed)
    try:
        part = waffle(y, n, base=base, seed=seed, test_labels=y)
    except ValueError as e:  # few samples, many agents
        assert str(e).startswith("n: expected ")
        return
    rows = torch.cat(part.index["train"]).tolist()
    assert len(set(rows)) == len(rows)
    got = torch.tensor(counts(part, y, "train"))
    weight = np.array(
        [
            [
                {"A": [1] * 10, "B": [1, 1, 1, 1] + [0] * 6, "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0]}[
                    base
                ][(t + i) % 10]
                for t in range(10)
            ]
            for i in range(n)
        ]
    )
    column = weight.sum(0)
    used = column > 0
    # every class that somebody asks for is dealt whole
    assert (got.sum(0).numpy() == np.where(used, have, 0)).all()
    want = weight * np.array(have) / np.maximum(column, 1)
    assert (np.abs(got.numpy() - want) < 1 + 1e-9).all()
    unused = [int(t) for t in np.flatnonzero(~used)]
    assert part.facts == ({"unused classes": unused} if unused else {})
    # the test set is cut by the same fractions, in pool order
    test = torch.tensor(counts(part, np.concatenate([y, y]), "test"))
    assert torch.equal(test, got)
    assert all(
        ((r[1:] > r[:-1]) | (y[r[1:] - len(y)] != y[r[:-1] - len(y)])).all()
        for r in (x.numpy() for x in part.index["test"])
    )


def test_seeds_differ_and_the_test_set_does_not():
    y, yt = labels_with([50] * 10), labels_with([20] * 10, 1)
    a, b = (waffle(y, 10, base="C", seed=s, test_labels=yt) for s in (0, 1))
    assert sizes(a) == sizes(b)
    assert not any(
        torch.equal(p.sort().values, q.sort().values)
        for p, q in zip(a.index["train"], b.index["train"], strict=True)
    )
    assert all(torch.equal(p, q) for p, q in zip(a.index["test"], b.index["test"], strict=True))
    plain = waffle(y, 10, base="A", shuffle=False)
    first = np.concatenate([np.flatnonzero(y == t)[:5] for t in range(10)])
    assert sorted(plain.index["train"][0].tolist()) == sorted(first.tolist())


def test_the_size_distributions_of_table_4():
    y = labels_with([1000] * 10)
    for name, want in (
        ("A", [10] * 10),
        ("B", [21, 6, 11, 6, 11, 6, 16, 6, 11, 6]),
        ("C", [10, 10, 10, 10, 20, 5, 5, 10, 10, 10]),
    ):
        assert sizes(waffle(y, 10, base="A", sizes=name)) == [100 * s for s in want]
        assert sizes(partition("iid", y, 10, sizes=name)) == [100 * s for s in want]
    twenty = sizes(waffle(y, 20, base="A", sizes="C"))
    assert twenty[:10] == twenty[10:] == [500, 500, 500, 500, 1000, 250, 250, 500, 500, 500]
    assert sizes(partition("iid", y, 3, sizes=[0.1, 0.2, 0.7])) == [1000, 2000, 7000]
    part = waffle(y, 10, base="B", sizes="B")
    assert sum(sizes(part)) == 10_000


# -- every partition ---------------------------------------------------------


@given(
    st.sampled_from(list(PARTITIONS)),
    st.integers(1, 12),
    st.lists(st.integers(12, 60), min_size=10, max_size=10),
    st.integers(0, 3),
)
def test_every_partition_is_disjoint_repeatable_and_in_range(name, n, have, seed):
    n = max(n, 2) if name == "multimodal" else n  # it has two kinds of clients
    y, yt = labels_with(have, seed), labels_with([h // 2 + 6 for h in have], seed + 1)
    options = {
        "practical1": {"groups": min(n, 4)},
        "multimodal": {"minority_clients": max(1, n // 3)},
    }.get(name, {})
    # of both pools, or of the one for training
    own_cut = name in ("practical2", "unimodal", "multimodal")
    part = partition(name, y, n, test_labels=yt, seed=seed, **options)
    train, test = torch.cat(part.index["train"]), torch.cat(part.index["test"])
    both = torch.cat([train, test])
    assert len(part.index["train"]) == len(part.index["test"]) == n
    assert min(sizes(part)) > 0
    assert len(both.unique()) == len(both)
    assert int(both.min()) >= 0 and int(both.max()) < len(y) + len(yt)
    if not own_cut:
        assert int(train.max()) < len(y) <= int(test.min())
    again = partition(
        name, torch.as_tensor(y), n, test_labels=torch.as_tensor(yt), seed=seed, **options
    )
    assert all(
        torch.equal(p, q)
        for s in ("train", "test")
        for p, q in zip(part.index[s], again.index[s], strict=True)
    )
    if name in ("A", "A*", "iid", "dirichlet", "pathological"):
        assert len(train) == len(y) and len(test) == len(yt)
    if name == "practical2":
        assert len(both) == len(y) + len(yt)
    assert "test" not in partition(name, y, n, seed=seed, **options).index or own_cut


def test_dirichlet_same_proportions_on_the_test_pool():
    y, yt = labels_with([1000] * 10), labels_with([500] * 10, 1)
    part = partition("dirichlet", y, 8, test_labels=yt, alpha=0.3)
    both = np.concatenate([y, yt])
    a, b = (np.array(counts(part, both, s)) for s in ("train", "test"))
    assert np.abs(a / 2 - b).max() <= 1.5
    assert not part.facts["moved samples"]


def test_dirichlet_alpha_and_the_number_of_classes_per_client():
    y = labels_with([6000] * 10)
    even = np.array(counts(partition("dirichlet", y, 10, alpha=1000.0), y, "train"))
    assert np.abs(even / 600 - 1).max() < 0.2


def test_dirichlet_falls_back_and_says_so():
    y = labels_with([600] * 10)
    kwargs = {"alpha": 0.05, "min_size": 40, "seed": 1}
    part = partition("practical2", y, 100, **kwargs)
    total = np.array(sizes(part)) + np.array(sizes(part, "test"))
    assert total.min() == 40 and total.sum() == 6000
    assert part.facts["draws"] == 100 and part.facts["moved samples"] > 0
    again = partition("practical2", y, 100, **kwargs)
    assert all(
        torch.equal(p, q) for p, q in zip(part.index["train"], again.index["train"], strict=True)
    )
    assert not partition("practical2", y, 5).facts["moved samples"]
    same = partition("dirichlet", y, 100, test_labels=labels_with([30] * 10), **kwargs)
    assert min(sizes(same)) == 40 and min(sizes(same, "test")) >= 1


def test_dirichlet_gives_everybody_a_test_sample():
    y, few = labels_with([600] * 10), labels_with([1] * 10)
    for seed in range(5):
        part = partition("dirichlet", y, 10, alpha=0.1, test_labels=few, min_size=1, seed=seed)
        # moved one by one, never from a client that has only one
        assert sizes(part, "test") == [1] * 10
        # a draw that leaves a client untested is not accepted
        assert part.facts["draws"] == 100


def test_dirichlet_pooled_split_is_four_to_one_and_all_equal_min_size_terminates():
    y = labels_with([100] * 10)
    part = partition("practical2", y, 10)
    for a, b in zip(sizes(part), sizes(part, "test"), strict=True):
        assert a == int(0.8 * (a + b) + 1e-9)
    tight = partition("dirichlet", y, 10, alpha=0.1, min_size=100)
    assert sizes(tight) == [100] * 10


def test_dirichlet_tiny_alpha_gives_whole_classes():
    y = labels_with([50] * 10)
    part = partition("dirichlet", y, 2, alpha=1e-8, min_size=1)
    # one sample may move to an empty client
    assert {v for row in counts(part, y, "train") for v in row} <= {0, 50, 49, 1}


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 9))
def test_shards_bound_the_classes_and_test_classes_match(n, k, seed):
    y, yt = labels_with([120 * n] * 10), labels_with([12 * n] * 10, 1)
    part = partition("pathological", y, n, test_labels=yt, k=k, seed=seed)
    both = np.concatenate([y, yt])
    a, b = (np.array(counts(part, both, s)) > 0 for s in ("train", "test"))
    assert a.sum(1).max() <= k * (-(-10 // (n * k)) + (n * k % 10 > 0 and 10 % (n * k) > 0))
    assert (a == b).all()  # balanced pools whose boundaries are in proportion


@given(
    st.integers(1, 25),
    st.integers(1, 10),
    st.lists(st.integers(30, 90), min_size=10, max_size=10),
    st.integers(0, 5),
)
def test_exact_k_laws(n, k, have, seed):
    y, yt = labels_with(have, seed), labels_with([40] * 10, 1)
    part = partition("pathological", y, n, test_labels=yt, mode="exact_k", k=k, seed=seed)
    both = np.concatenate([y, yt])
    for split, supply in (("train", have), ("test", [40] * 10)):
        got = np.array(counts(part, both, split))
        assert ((got > 0).sum(1) == k).all()
        owners = (got > 0).sum(0)
        assert owners.max() - owners.min() <= 1
        q = min(supply[c] // owners[c] for c in range(10) if owners[c])
        assert set(got[got > 0].tolist()) == {q}  # the same amount of every class, for everybody
        spare = sum(supply) - int(got.sum())
        assert part.facts.get(f"unused {split} samples", 0) == spare
    train, test = (np.array(counts(part, both, s)) > 0 for s in ("train", "test"))
    assert (train == test).all()


def test_mnist_runs_dry_and_says_so():
    part = partition("practical1", labels_with(MNIST), 20)
    assert sizes(part) == [3000] * 20
    assert part.facts["train samples of other classes"] > 0


def test_official_sizes_when_the_groups_do_not_divide():
    part = partition("practical1", labels_with([500] * 10), 22, mode="official")
    assert sorted(set(sizes(part)))[0] in (187, 188) and max(sizes(part)) == 246
    assert part.group.bincount().tolist() == [5, 5, 5, 7]
    # the paper: the same size for all
    assert sizes(partition("practical1", labels_with([500] * 10), 22)) == [227] * 22


# -- bad input ---------------------------------------------------------------

Y = labels_with([20] * 10)
BAD = [  # and what the sentence is about
    ("A", {"n": 0}, "n"),
    ("A", {"n": 201}, "n"),
    ("A", {"sizes": "D"}, "sizes"),
    ("A", {"sizes": [1, "x"]}, "sizes"),
    ("A", {"sizes": [1, 0]}, "sizes"),
    ("A", {"seed": -1}, "seed"),
    ("A", {"labels": [0.5]}, "labels"),
    ("A", {"labels": []}, "labels"),
    ("A", {"labels": [-1, 2]}, "labels"),
    ("A", {"classes": 5}, "labels"),
    ("A", {"n": 100, "labels": [0, 1] * 60}, "n"),
    ("B", {"labels": [0, 1, 2], "n": 2}, "partition"),
    ("Z", {}, "partition"),
    ("iid", {"alpha": 1}, "partition iid"),
    ("iid", {"sizes": 3}, "sizes"),
    ("iid", {"seed": 1.7}, "seed"),
    ("dirichlet", {"alpha": 0}, "alpha"),
    ("dirichlet", {"alpha": float("nan")}, "alpha"),
    ("dirichlet", {"mode": "x"}, "mode"),
    ("dirichlet", {"min_size": 50}, "min_size"),
    ("dirichlet", {"min_size": 2.7}, "min_size"),
    ("dirichlet", {"train_fraction": 0.7}, "train_fraction"),
    ("dirichlet", {"train_fraction": 1.0}, "train_fraction"),
    ("dirichlet", {"test_labels": [0, 1]}, "n"),
    ("pathological", {"k": 0}, "k"),
    ("pathological", {"k": 11, "mode": "exact_k"}, "k"),
    ("pathological", {"mode": "exact_k", "n": 150, "k": 2}, "k and n"),
    ("pathological", {"k": 30}, "k"),
    ("practical1", {"groups": 11}, "groups"),
    ("practical1", {"groups": 2.5}, "groups"),
    ("practical1", {"share": 1.5}, "share"),
    ("practical1", {"dominant": 0}, "dominant"),
    ("practical1", {"mode": "x"}, "mode"),
    ("unimodal", {"z": 0}, "z"),
    ("unimodal", {"test": 1.0}, "test"),
    ("unimodal", {"train": 0}, "train"),
    ("multimodal", {"minority": 3}, "minority"),
    ("multimodal", {}, "minority_clients"),
    ("multimodal", {"n": 30, "minority": "letters"}, "minority"),
    ("multimodal", {"n": 30, "minority": [1, 12]}, "minority"),
]


@pytest.mark.parametrize(
    ("name", "change", "about"), BAD, ids=[f"{b[0]}-{'-'.join(b[1])}" for b in BAD]
)
def test_bad_input_is_one_sentence(name, change, about):
    arguments = {"labels": Y, "n": 10} | change
    with pytest.raises(ValueError, match=rf"^{about}: expected [^\n]+, got [^\n]+\.$"):
        partition(name, arguments.pop("labels"), arguments.pop("n"), **arguments)


def test_options_are_listed_with_their_defaults():
    assert options_of("A") == {"sizes": None, "shuffle": True}
    assert options_of("B*")["shift_seed"] == 0
    assert options_of("practical2")["alpha"] == 0.1 and options_of("dirichlet")["alpha"] == 0.5


def test_classes_without_a_shard_are_noted():
    part = partition("unimodal", Y, 2, z=2)
    assert part.facts == {"unused train samples": 120}
    assert partition("unimodal", Y, 10, z=2).facts == {}
