"""Partitions: the papers' counts, common properties, and errors."""

import doctest
import hashlib

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.splits import same, sizes
from places import golden, tabled
from small import equals

from pflcore import Federation
from pflcore import data as rules
from pflcore.data import partition
from pflcore.lab.data import federation_of

GOLDEN = golden("partitions")
MNIST, BASES, PUBLISHED = (GOLDEN[name] for name in ("mnist", "bases", "published"))


def labels_with(counts, seed=0):
    """Labels with these class counts, in random order."""
    return np.random.RandomState(seed).permutation(
        np.repeat(np.arange(len(counts)), counts)
    )


def counts(part, y, split="train"):
    """Numbers [N, 10] of samples of each client in each class."""
    return np.array(
        [np.bincount(y[rows.numpy()], minlength=10) for rows in part.index[split]]
    )


def tens(low, high):
    """Strategy for the class counts of ten classes."""
    return st.lists(st.integers(low, high), min_size=10, max_size=10)


Y = labels_with([20] * 10)
YT = labels_with([7] * 10, 1)

# -- published partitions ----------------------------------------------------


@pytest.mark.parametrize("name, options, digest", PUBLISHED, ids=range(len(PUBLISHED)))
def test_a_partition_is_the_published_one(name, options, digest):
    part = partition(name, Y, 10, test_labels=YT, seed=4, **options)
    splits = [
        (s, [r.tolist() for r in lists]) for s, lists in sorted(part.index.items())
    ]
    assignments = [
        None if t is None else t.tolist() for t in (part.relabel, part.group)
    ]
    text = repr((splits, assignments, dict(part.facts)))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == digest


@pytest.mark.parametrize("base", "ABC")
def test_counts_of_the_waffle_paper_on_mnist(base):
    y = labels_with(MNIST)
    part = partition(base, y, 10, seed=3)
    assert sizes(part) == GOLDEN["sizes"][base]
    assert counts(part, y)[0].tolist() == GOLDEN["first"][base]


@given(tens(1, 60), st.integers(1, 33), st.sampled_from("ABC"), st.integers(0, 5))
def test_waffle_is_exhaustive_and_in_proportion(have, n, base, seed):
    y = labels_with(have, seed)
    try:
        part = partition(base, y, n, seed=seed, test_labels=y)
    except ValueError as e:  # few samples, many clients
        assert str(e).startswith("n: expected ")
        return
    got = counts(part, y)
    weight = np.array(
        [[BASES[base][(t + i) % 10] for t in range(10)] for i in range(n)]
    )
    column = weight.sum(0)
    # Each class with a weight is dealt completely.
    assert (got.sum(0) == np.where(column > 0, have, 0)).all()
    assert (
        np.abs(got - weight * np.array(have) / np.maximum(column, 1)) < 1 + 1e-9
    ).all()
    unused = np.flatnonzero(column == 0).tolist()
    assert part.facts == ({"unused classes": unused} if unused else {})
    # The test set is cut by the same fractions, in the order of the pool.
    assert np.array_equal(counts(part, np.concatenate([y, y]), "test"), got)
    for r in part.index["test"]:
        r = r.numpy() - len(y)
        assert ((r[1:] > r[:-1]) | (y[r[1:]] != y[r[:-1]])).all()


def test_seeds_and_sizes_of_the_waffle_paper():
    a, b = (partition("C", Y, 10, seed=s, test_labels=YT) for s in (0, 1))
    assert sizes(a) == sizes(b) and same(a, b, "test")
    assert set(a.index["train"][0].tolist()) != set(b.index["train"][0].tolist())
    plain = partition("A", Y, 10, shuffle=False)
    first = np.concatenate([np.flatnonzero(t == Y)[:2] for t in range(10)])
    assert plain.index["train"][0].tolist() == first.tolist()
    y = labels_with([1000] * 10)
    for name, want in GOLDEN["table_4"].items():
        assert sizes(partition("iid", y, 20, sizes=name)) == [50 * s for s in want] * 2
    assert sizes(partition("A", y, 3, sizes=[0.1, 0.2, 0.7])) == [1000, 2000, 7000]


@given(st.integers(1, 30), st.integers(2, 20), st.integers(0, 1000))
def test_concept_shift_laws(n, classes, seed):
    y = np.tile(np.arange(classes), n)
    relabel, of_fewer = (
        partition("A*", y, m, shift_seed=seed).relabel for m in (n, max(1, n // 2))
    )
    assert relabel.shape == (n, classes)
    equals(relabel[0], torch.arange(classes))  # the first client's labels stay
    assert (relabel.sort(1).values == torch.arange(classes)).all()  # permutations
    equals(relabel[: len(of_fewer)], of_fewer)  # independent of N


def test_concept_shift_is_independent_per_client_and_of_the_seed():
    a, b = (partition("B*", Y, 10, seed=s) for s in (4, 5))
    equals(a.relabel, b.relabel)
    assert len(a.relabel.unique(dim=0)) == 10
    assert not torch.equal(a.relabel, partition("B*", Y, 10, shift_seed=1).relabel)
    # Samples are assigned by their true class.
    plain = partition("B", Y, 10, seed=4)
    assert plain.relabel is None and same(plain, a)
    many = partition("A*", np.tile(np.arange(10), 2000), 2000).relabel[1:]
    # Uniform permutations have one fixed point on average.
    assert abs(float((many == torch.arange(10)).float().sum(1).mean()) - 1) < 0.1


# -- all partitions ----------------------------------------------------------


@given(
    st.sampled_from([*rules.PARTITIONS]),
    st.integers(2, 12),
    tens(12, 60),
    st.integers(0, 3),
)
def test_every_partition_is_disjoint_repeatable_and_in_range(name, n, have, seed):
    y = labels_with(have, seed)
    yt = labels_with([h // 2 + 6 for h in have], seed + 1)
    groups = {
        "practical1": {"groups": min(n, 4)},
        "multimodal": {"minority_clients": n // 3 or 1},
    }
    options = {"seed": seed, **groups.get(name, {})}
    part = partition(name, y, n, test_labels=yt, **options)
    train = torch.cat(part.index["train"])
    test = torch.cat(part.index["test"])
    both = torch.cat([train, test]).tolist()
    pool = range(len(y) + len(yt))
    assert (
        len(part.index["train"]) == len(part.index["test"]) == n
        and min(sizes(part)) > 0
    )
    assert len({*both}) == len(both) and {*both} <= {*pool}
    again = partition(
        name, torch.as_tensor(y), n, test_labels=torch.as_tensor(yt), **options
    )
    assert same(part, again) and same(part, again, "test")
    # These partitions cut their own test sets.
    own_cut = name in ("practical2", "unimodal", "multimodal")
    assert own_cut or int(train.max()) < len(y) <= int(test.min())
    whole_pool = ("A", "A*", "iid", "dirichlet", "pathological", "practical2")
    if name in whole_pool or name == "inner_dirichlet":
        assert len(both) == len(pool)
    assert "test" not in partition(name, y, n, **options).index or own_cut


def test_dirichlet_cuts_both_pools_alike_and_pools_them_four_to_one():
    y = labels_with([1000] * 10)
    yt = labels_with([500] * 10, 1)
    part = partition("dirichlet", y, 8, test_labels=yt, alpha=0.3)
    a, b = (counts(part, np.concatenate([y, yt]), s) for s in ("train", "test"))
    assert np.abs(a / 2 - b).max() <= 1.5 and not part.facts["moved samples"]
    even = counts(partition("dirichlet", y, 10, alpha=1000.0), y)
    assert np.abs(even / 100 - 1).max() < 0.2
    # So small an alpha makes all draws underflow. Clients get whole classes, except for
    # a sample that is moved to an empty client.
    tiny = counts(partition("dirichlet", y, 2, alpha=1e-8, min_size=1), y)
    assert set(tiny.ravel().tolist()) <= {0, 1, 999, 1000}
    part = partition("practical2", y, 10)
    for a, b in zip(sizes(part), sizes(part, "test"), strict=True):
        assert a == int(0.8 * (a + b) + 1e-9)


# Counts of ten classes, of which some may be absent.
SOME = st.lists(st.integers(0, 30), min_size=10, max_size=10).filter(any)
ALPHAS = st.sampled_from([1e-300, 0.01, 0.5, 100.0, 1e6])


@pytest.mark.deep("it takes a second")
def test_dirichlet_falls_back_and_says_so():
    y = labels_with([600] * 10)
    kwargs = {"alpha": 0.05, "min_size": 40, "seed": 1}
    part = partition("practical2", y, 100, **kwargs)
    assert min(len(rows) for rows in whole(part)) == 40
    assert part.facts["draws"] == 100 and part.facts["moved samples"] > 0
    assert not partition("practical2", y, 5).facts["moved samples"]
    alike = partition("dirichlet", y, 100, test_labels=labels_with([30] * 10), **kwargs)
    assert min(sizes(alike)) == 40 and min(sizes(alike, "test")) >= 1
    assert sizes(partition("dirichlet", y, 10, alpha=0.1, min_size=600)) == [600] * 10
    # Samples move one by one, never from a client that has only one.
    test_pool = labels_with([1] * 10)
    part = partition("dirichlet", y, 10, alpha=0.1, test_labels=test_pool, min_size=1)
    # A draw that leaves a client without test samples is not accepted.
    assert sizes(part, "test") == [1] * 10 and part.facts["draws"] == 100


@pytest.mark.parametrize(
    "size, n, at_least", [(1000, 5, 20), (200, 5, 20), (190, 5, 19), (11, 5, 1)]
)
@pytest.mark.parametrize("name", ["dirichlet", "practical2"])
def test_dirichlets_minimum_is_half_of_the_mean_share_in_a_small_pool(
    name, size, n, at_least
):
    part = partition(name, np.arange(size) % 2, n)
    lists = part.index["train"] if name == "dirichlet" else whole(part)
    least = 2 if name == "practical2" else 1  # one for training, one for the test
    assert part.facts["min_size"] == max(at_least, least)
    assert min(map(len, lists)) >= max(at_least, least)


def test_dirichlet_needs_a_test_sample_for_each_client():
    with sentence("n: expected at most as many as the 4 test samples, got 5"):
        partition("dirichlet", Y, 5, test_labels=YT[:4])
    # practical2 joins both pools, so four test samples are enough.
    assert partition("practical2", Y, 5, test_labels=YT[:4]).facts["draws"]


@pytest.mark.parametrize("classes", [3, 12])
def test_other_numbers_of_classes_have_equal_shares_alone(classes):
    y = np.arange(60 * classes) % classes
    part = partition("A", y, 4)
    assert all(
        (np.bincount(y[rows], minlength=classes) == 15).all()
        for rows in part.index["train"]
    )
    with sentence("partition: expected 10 classes for B"):
        partition("B", y, 4)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 9))
def test_shards_bound_the_classes_and_test_classes_match(n, k, seed):
    y = labels_with([120 * n] * 10)
    yt = labels_with([12 * n] * 10, 1)
    part = partition("pathological", y, n, test_labels=yt, k=k, seed=seed)
    a, b = (counts(part, np.concatenate([y, yt]), s) > 0 for s in ("train", "test"))
    assert a.sum(1).max() <= k * (
        -(-10 // (n * k)) + (n * k % 10 > 0 and 10 % (n * k) > 0)
    )
    assert (a == b).all()  # balanced pools whose boundaries are in proportion


@given(st.integers(1, 25), st.integers(1, 10), tens(30, 90), st.integers(0, 5))
def test_exact_k_laws(n, k, have, seed):
    supply = {"train": np.array(have), "test": np.full(10, 40)}
    y = labels_with(have, seed)
    yt = labels_with([40] * 10, 1)
    part = partition(
        "pathological", y, n, test_labels=yt, mode="exact_k", k=k, seed=seed
    )
    class_counts = {s: counts(part, np.concatenate([y, yt]), s) for s in supply}
    for split, got in class_counts.items():
        owners = (got > 0).sum(0)
        assert ((got > 0).sum(1) == k).all() and owners.max() - owners.min() <= 1
        # Every client has the same number of samples of each of its classes.
        assert set(got[got > 0]) == {
            (supply[split] // np.maximum(owners, 1))[owners > 0].min()
        }
        assert (
            part.facts.get(f"unused {split} samples", 0)
            == supply[split].sum() - got.sum()
        )
    assert ((class_counts["train"] > 0) == (class_counts["test"] > 0)).all()


def test_dominant_classes_of_a_group_are_four_fifths_of_its_data():
    y = labels_with([2000] * 10)
    part = partition("practical1", y, 20, seed=2)
    assert part.group.tolist() == [i // 5 for i in range(20)] and not part.facts
    for i, row in enumerate(counts(part, y)):
        # 80 %, and a part of the common 20 %.
        assert row.sum() == 1000 and row[GOLDEN["dominant"][i // 5]].sum() > 800
    # A class runs out of samples, which `facts` records.
    mnist = partition("practical1", labels_with(MNIST), 20)
    assert (
        sizes(mnist) == [3000] * 20
        and mnist.facts["train samples of other classes"] > 0
    )


def test_examples_of_the_docstrings_are_true():
    b = counts(partition("B", Y, 10), Y)
    assert b[0].tolist() == [5] * 4 + [0] * 6
    assert b[1].tolist() == [5] * 3 + [0] * 6 + [5]
    assert sizes(partition("iid", np.arange(10), 4)) == [2, 3, 2, 3]

    y = np.array([0] * 5 + [1] * 3)
    shards = counts(partition("pathological", y, 2, k=1), y)
    assert sorted(shards[:, :2].tolist()) == [[1, 3], [4, 0]]
    exact = partition("pathological", y, 2, k=1, mode="exact_k")
    assert sorted(counts(exact, y)[:, :2].tolist()) == [[0, 3], [3, 0]]
    assert exact.facts == {"unused train samples": 2}

    y = np.array([0] * 5 + [1] * 5)
    uniform = counts(partition("A", y, 2), y)
    assert uniform[:, :2].tolist() == [[2, 2], [3, 3]]
    own_class = counts(partition("practical1", y, 2, groups=2, dominant=1), y)
    assert own_class.sum(1).tolist() == [5, 5] and own_class[[0, 1], [0, 1]].min() >= 4
    part = partition("unimodal", Y, 10, z=2)
    assert {len(rows) for rows in whole(part)} == {20}  # 2 shards of 10 samples


@pytest.mark.parametrize("function", [partition, rules.pad_sequences])
def test_docstring_examples_run(function):
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner()

    for example in finder.find(function, function.__name__, globs=vars(rules)):
        runner.run(example)

    assert runner.tries > 0 and runner.failures == 0


# -- WAFFLe's subpopulations -------------------------------------------------

SORTED = np.repeat(np.arange(10), MNIST)


def whole(part):
    """Each client's samples of all splits together."""
    return [torch.cat(rows) for rows in zip(*part.index.values(), strict=True)]


@pytest.mark.parametrize("z", [2, 3])
def test_unimodal_deals_single_class_shards(z):
    part = partition("unimodal", SORTED, 100, z=z, seed=1)
    rows = whole(part)
    equals(torch.cat(rows).sort().values, torch.arange(60_000))
    assert part.group is None
    for r, test in zip(rows, sizes(part, "test"), strict=True):
        assert len(np.unique(SORTED[r])) <= z and abs(test / len(r) - 0.2) < 0.002
        assert z == 3 or 542 <= len(r) <= 676  # 20 shards of each class
    short = partition("unimodal", SORTED, 100, z=z, seed=1, train=20)
    assert same(short, part, "test")  # fewer training samples, the same test sets
    equals([*short.index["train"]], [r[:20] for r in part.index["train"]])


def test_multimodal_is_two_populations_with_equal_shards():
    part = partition("multimodal", SORTED, 120, seed=3)
    rows = whole(part)
    assert part.group.tolist() == [0] * 100 + [1] * 20
    assert {len(r) for r in rows} == {270} and len(
        torch.cat(rows).unique()
    ) == 120 * 270
    # A shard has 5421 // 40 samples.
    assert all((SORTED[r] % 2 == (i < 100)).all() for i, r in enumerate(rows))
    assert part.facts == {"unused train samples": 27600}
    y = np.repeat(np.arange(10), 6000)
    for name, minority in GOLDEN["minority"].items():
        rows = whole(partition("multimodal", y, 110, minority=name))
        assert np.unique(y[torch.cat(rows[90:])]).tolist() == minority
    data = federation_of("digits", "multimodal", 12, minority_clients=2)
    assert data.n == 12 and data.truth["group"].tolist() == [0] * 10 + [1] * 2
    assert partition("unimodal", Y, 2, z=2).facts == {"unused train samples": 120}


# -- bad input ---------------------------------------------------------------

# Partition, changed arguments, the arguments that the error message names.
BAD = """\
A | {"n": 201} | n
A | {"sizes": [1, 0]} | sizes
A | {"labels": [-1, 2]} | labels
A | {"classes": 5} | labels
A | {"n": 5, "labels": [0, 1, 0, 1, 0, 1]} | n
B | {"labels": [0, 1, 2], "n": 2} | partition
Z | {} | partition
iid | {"alpha": 1} | partition iid
A | {"base": "B"} | partition A
B | {"shift_seed": 1} | partition B
dirichlet | {"min_size": 50} | min_size
dirichlet | {"train_fraction": 0.7} | train_fraction
dirichlet | {"test_labels": [0, 1]} | n
pathological | {"k": 11, "mode": "exact_k"} | k
pathological | {"mode": "exact_k", "n": 150, "k": 2} | k and n
pathological | {"k": 30} | k
practical1 | {"groups": 11} | groups
practical1 | {"dominant": 11} | dominant
unimodal | {"z": 30} | n
multimodal | {} | minority_clients
multimodal | {"n": 30, "minority": "letters"} | minority
multimodal | {"n": 30, "minority": [1, 12]} | minority
"""


@pytest.mark.parametrize("name, change, about", tabled(BAD))
def test_bad_input_is_one_sentence(name, change, about):
    with sentence(f"{about}: expected .+, got .+"):
        partition(name, **{"labels": Y, "n": 10} | change)


def test_unlabelled_samples_go_to_no_client():
    labels = torch.arange(60) % 3
    void = labels.clone()
    void[::4] = 255
    where = (void != 255).nonzero()[:, 0]
    for name in ("iid", "dirichlet", "pathological"):
        part = partition(name, void, 5, test_labels=void, ignored_label=255, seed=1)
        want = partition(name, labels[where], 5, test_labels=labels[where], seed=1)
        at = torch.cat([where, where + 60])
        for split in ("train", "test"):
            for got, rows in zip(part.index[split], want.index[split], strict=True):
                assert torch.equal(got, at[rows])
    data = Federation.from_partition(
        torch.randn(60, 2),
        void,
        part,
        x_test=torch.randn(60, 2),
        y_test=void,
        ignored_label=255,
    )
    assert data.classes == 3 and int(data.counts().sum()) == len(where)
    with sentence("labels: expected a label that counts, at least one"):
        partition("iid", torch.full((9,), -100), 3)
