"""nearest: it is what all pairs give, bit for bit, whatever the data."""

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from laws import identical, integers, of
from pretend_gpu import pretended_gpu, waits
from tolerance import BF16, F16, F32, F64
from ugly import lay, randn

from pflcore.ops import feddwa_weights, nearest, pairwise_sqdist, stream

METHODS = ("exact", "groups")


def check(guide, rows, k, method, **how):
    """The k nearest by all distances: NaN is infinitely far, of equals the lower
    index."""
    d = pairwise_sqdist(guide, rows)
    index = feddwa_weights(d, k).index
    got = nearest(guide, rows, k, method, **how)
    identical(tuple(got), (d.gather(1, index).nan_to_num(torch.inf, torch.inf), index))


def clustered(groups, each, p, noise=1e-3):
    """Guides and rows [groups * each, P], shuffled, of clusters with isotropic noise
    within."""
    rows = torch.randn(groups, p)[torch.randperm(groups * each) % groups]
    rows = rows + noise * torch.randn(len(rows), p)
    return rows + noise * torch.randn(len(rows), p), rows


@st.composite
def data(draw):
    """Clusters with noise of any size, duplicates, zeros, constant rows, rows that are
    not finite; few columns and many."""
    p, n, m = draw(of(1, 2, 7, 67)), draw(st.integers(1, 40)), draw(st.integers(0, 9))
    seed, groups = draw(st.integers(0, 999)), draw(st.integers(1, 9))
    own, some = integers(seed, 0, groups, n + m), integers(seed + 2, 0, 10, 2, n + m)
    noise = draw(of(0.0, 1e-7, 1e-3, 1.0)) * randn(seed + 1, n + m, p)
    every = draw(of(1e-30, 1e-3, 1.0, 1e4)) * (randn(seed, groups, p)[own] + noise)
    if draw(st.booleans()):
        every = every.round(decimals=1)  # ties
    every[some[0] < draw(of(0, 5))] = 0.0
    if draw(of(False, False, True)):
        every[some[1] < 2, 0] = draw(of(torch.nan, torch.inf, 1e200))
    every = every.to(draw(of(F32, F32, F64, BF16, F16)))
    place = draw(of("contiguous", "wide rows", "transposed"))
    return lay(every[n:], place), lay(every[:n], place)


@given(
    data(), st.sampled_from(METHODS), st.integers(1, 45), st.sampled_from([None, 1, 5])
)
def test_it_is_what_all_pairs_give(both, method, k, pivots):
    guide, rows = both
    check(guide, rows, k, method, pivots=pivots)
    check(rows, rows, k, method)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "how",
    [(20, 20, 521), (1, 300, 521), (300, 1, 521), (5, 50, 521, 1e3), (7, 30, 521, 0.0)],
)
def test_clusters_one_cluster_none_and_duplicates(how, method):
    check(*clustered(*how), 10, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_that_only_just_holds_a_nearer_row_is_looked_into(method):
    """On a line the bound by pivots (here 0 and 10) is the distance: 5.78 is nearer to
    4.9 than the 4 of its own group."""
    rows = torch.tensor([0, 1, 2, 3, 4, 10, 5.78], dtype=F64)[:, None]
    got = nearest(torch.tensor([[4.9]], dtype=F64), rows, 1, method, pivots=2)
    assert got.index.item() == 6


def pairs_taken(monkeypatch, *arguments):
    """How many distances a call takes."""
    taken, file = [], sys.modules["pflcore.ops._sqdist"]
    op = file._op

    def count(a, b, index=None):
        out = op(a, b, index)
        # not those of the pivots' sketches
        taken.append(out.numel() if a.shape[1] == 521 else 0)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(file, "_op", count)
        nearest(*arguments)
    return sum(taken)


def test_groups_take_few_pairs_of_clusters(monkeypatch):
    guide, rows = clustered(20, 20, 521)
    assert pairs_taken(monkeypatch, guide, rows, 10) == 400 * 400
    taken = pairs_taken(monkeypatch, guide, rows, 10, "groups")
    assert taken == 2 * 400 * 20 + 400 * 20


def test_groups_take_about_all_pairs_without_clusters(monkeypatch):
    guide, rows = clustered(1, 400, 521)
    taken = pairs_taken(monkeypatch, guide, rows, 10, "groups")
    assert taken <= 7 * 400 * 20 + 400 * 400


@pytest.mark.parametrize("method", METHODS)
def test_tiles_of_few_rows(method, monkeypatch):
    """Where rows are read in parts, the result is the same."""
    guide, rows = clustered(4, 9, 67)
    rows[7] = torch.nan
    want = nearest(guide, rows, 5, method)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 5 * 67 * 4)
    monkeypatch.setattr(sys.modules["pflcore.ops._nearest"], "MAX_PAIRS", 36)
    for both in ((guide, rows), (guide.numpy(), rows.numpy())):
        got = nearest(*both, 5, method)
        identical(tuple(got), tuple(want))


@pytest.mark.parametrize("scale", [1e-170, 1e160])
def test_underflow_and_overflow_prove_nothing(scale):
    """Squares that float64 cannot hold: distances of 0 and infinity that are
    neither."""
    rows = scale * (randn(1, 30, 3) + 1)
    check(rows, rows - scale, 4, "groups")


def test_groups_on_a_gpu_take_all_pairs_at_once(monkeypatch):
    guide, rows = clustered(20, 20, 521)
    want = nearest(guide, rows, 10)

    with pretended_gpu() as gpu:
        there = guide.to(gpu), rows.to(gpu)
        waits.clear()
        taken = pairs_taken(monkeypatch, *there, 10, "groups")
        got = nearest(*there, 10, "groups")
        waited = list(waits)
        identical(tuple(t.cpu() for t in got), tuple(want))

    assert taken == 400 * 400
    assert not waited
