"""Who gets which sample: the papers' counts, the laws every partition obeys, and what is
refused."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from parts.partition import counts, labels_with, sizes

from pflcore.data import partition
from pflcore.data.dirichlet import _proportions, counts_of
from pflcore.data.label_skew import dominant_classes
from pflcore.data.partition import concept_shift

# -- concept shift -----------------------------------------------------------


@given(st.integers(1, 30), st.integers(2, 20), st.integers(0, 1000))
def test_concept_shift_laws(n, classes, seed):
    relabel = concept_shift(n, classes, seed)
    assert relabel.shape == (n, classes)
    assert torch.equal(relabel[0], torch.arange(classes))  # Alice
    assert (relabel.sort(1).values == torch.arange(classes)).all()  # bijections
    # a client's own does not depend on N
    assert torch.equal(concept_shift(n + 3, classes, seed)[:n], relabel)


def test_concept_shift_is_independent_per_client_and_of_the_seed():
    y = labels_with([30] * 10)
    a, b = (partition("A*", y, 10, seed=s) for s in (0, 1))
    assert torch.equal(a.relabel, b.relabel)
    assert not torch.equal(a.relabel, partition("A*", y, 10, shift_seed=1).relabel)
    assert len({tuple(r) for r in a.relabel.tolist()}) == 10
    assert partition("A", y, 10).relabel is None
    # samples are assigned by their true class
    plain, shifted = partition("B", y, 10, seed=4), partition("B*", y, 10, seed=4)
    assert all(
        torch.equal(p, q) for p, q in zip(plain.index["train"], shifted.index["train"], strict=True)
    )
    fixed = (concept_shift(2000, 10, 0)[1:] == torch.arange(10)).float().sum(1)
    # uniform permutations: one fixed point each on average, none forced away
    assert abs(float(fixed.mean()) - 1) < 0.1


# -- Dirichlet ---------------------------------------------------------------


def test_golden_dirichlet_cut():
    p = np.array([0.105, 0.2, 0.695])
    assert counts_of(p[None], np.array([10]))[0].tolist() == [1, 2, 7]


def test_practical2_draws_like_the_released_code():
    """Classes per client and the share of draws that give everybody 20 samples, measured on that
    code: 60,000 balanced samples."""
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


# -- practical setting 1 -----------------------------------------------------


def test_golden_groups_of_the_official_code():
    want = [[0, 1, 2], [2, 3, 4], [5, 6, 7], [7, 8, 9]]
    assert dominant_classes(10, 4) == want
    y = labels_with([2000] * 10)
    for mode in ("official", "paper"):
        part = partition("practical1", y, 20, mode=mode, seed=2)
        assert part.group.tolist() == [i // 5 for i in range(20)]
        got = np.array(counts(part, y, "train")).reshape(4, 5, 10).sum(1)
        # 200 a class come from the common part
        assert [np.flatnonzero(row > 400).tolist() for row in got] == want
        assert sizes(part) == [1000] * 20


def test_paper_mode_is_four_fifths_dominant_and_equal_within_what_there_is():
    y = labels_with([2000] * 10)
    part = partition("practical1", y, 20)
    got = np.array(counts(part, y, "train"))
    for i, row in enumerate(got):
        dominant = dominant_classes(10, 4)[i // 5]
        rest = np.delete(row, dominant)
        # 80 % and their part of the common 20 %
        assert rest.sum() < 200 and row[dominant].sum() > 800
    assert not part.facts
    # shared classes 2 and 7 are scarce: their two groups split them evenly
    by_group = got.reshape(4, 5, 10).sum(1)
    assert abs(by_group[0, 2] - by_group[1, 2]) <= 60 and abs(by_group[2, 7] - by_group[3, 7]) <= 60


def test_dominant_classes_of_larger_sets():
    assert [len(g) for g in dominant_classes(100, 4)] == [20] * 4
    assert [g[0] for g in dominant_classes(100, 4)] == [0, 25, 50, 75]
    assert [len(g) for g in dominant_classes(200, 4)] == [40] * 4
    assert dominant_classes(3, 2) == [[0, 1, 2], [1, 2, 0]]
