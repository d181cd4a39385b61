"""nearest: it is what all pairs give, bit for bit, whatever the data."""

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tolerance import BF16, F16, F32, F64
from ugly import lay, randn, refuses

from pflcore.ops import feddwa_weights, nearest, pairwise_sqdist, stream

METHODS = ("exact", "groups")


def by_all_pairs(guide, rows, k):
    """The k nearest by all distances: NaN is infinitely far, of equals the lower index."""
    d = pairwise_sqdist(guide, rows)
    index = feddwa_weights(d, k).index
    return d.gather(1, index).nan_to_num(torch.inf, torch.inf), index


def clustered(groups, each, p, noise=1e-3, seed=0):
    """Guides and rows [groups * each, P], shuffled, of clusters with isotropic noise within."""
    gen = torch.Generator().manual_seed(seed)
    centre = torch.randn(groups, p, generator=gen)
    rows = centre[torch.randperm(groups * each, generator=gen) % groups]
    rows = rows + noise * torch.randn(len(rows), p, generator=gen)
    return rows + noise * torch.randn(len(rows), p, generator=gen), rows


@st.composite
def data(draw):
    """Clusters with noise of any size, duplicates, zeros, constant rows, rows that are not finite;
    few columns and many."""
    p, n, m = (
        draw(st.sampled_from([1, 2, 7, 67])),
        draw(st.integers(1, 40)),
        draw(st.integers(0, 9)),
    )
    seed, groups = draw(st.integers(0, 999)), draw(st.integers(1, 9))
    gen = torch.Generator().manual_seed(seed)
    centre = torch.randn(groups, p, generator=gen, dtype=F64)
    own = torch.randint(0, groups, (n + m,), generator=gen)
    noise, scale = (
        draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0])),
        draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e4])),
    )
    every = scale * (centre[own] + noise * torch.randn(n + m, p, generator=gen, dtype=F64))
    if draw(st.booleans()):
        every = every.round(decimals=1)  # ties
    every[torch.rand(n + m, generator=gen) < draw(st.sampled_from([0.0, 0.5]))] = 0.0
    if draw(st.sampled_from([False, False, True])):
        every[torch.rand(n + m, generator=gen) < 0.2, 0] = draw(
            st.sampled_from([torch.nan, torch.inf, 1e200])
        )
    dtype = draw(st.sampled_from([F32, F32, F64, BF16, F16]))
    place = draw(st.sampled_from(["contiguous", "wide rows", "transposed"]))
    return lay(every[n:].to(dtype), place), lay(every[:n].to(dtype), place)


@given(data(), st.sampled_from(METHODS), st.integers(1, 45), st.sampled_from([None, 1, 5]))
def test_it_is_what_all_pairs_give(both, method, k, pivots):
    guide, rows = both
    got = nearest(guide, rows, k, method, pivots=pivots)
    want = by_all_pairs(guide, rows, k)
    assert got.sqdist.dtype == F64 and got.index.shape == got.sqdist.shape == (
        len(guide),
        min(k, len(rows)),
    )
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@given(data(), st.sampled_from(METHODS), st.integers(1, 9))
def test_rows_among_themselves(both, method, k):
    _, rows = both
    got, want = nearest(rows, rows, k, method), by_all_pairs(rows, rows, k)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("groups", "each", "noise"),
    [(20, 20, 1e-3), (1, 300, 1e-3), (300, 1, 1e-3), (5, 50, 1e3), (7, 30, 0.0)],
)
def test_clusters_one_cluster_none_and_duplicates(groups, each, noise):
    guide, rows = clustered(groups, each, 521, noise)
    want = by_all_pairs(guide, rows, 10)
    for method in METHODS:
        got = nearest(guide, rows, 10, method)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_group_that_only_just_holds_a_nearer_row_is_looked_into():
    """On a line the bound by pivots (here 0 and 10) is the distance: 5.78 is nearer to 4.9 than the
    4 of its own group."""
    rows = torch.tensor([0, 1, 2, 3, 4, 10, 5.78], dtype=F64)[:, None]
    for method in METHODS:
        got = nearest(torch.tensor([[4.9]], dtype=F64), rows, 1, method, pivots=2)
        assert got.index.item() == 6


def pairs_taken(monkeypatch, call):
    """How many distances a call takes."""
    taken = 0
    file = sys.modules["pflcore.ops.sqdist"]
    op = file._op

    def count(a, b, index=None):
        nonlocal taken
        out = op(a, b, index)
        taken += out.numel() if a.shape[1] == 521 else 0  # not those of the pivots' sketches
        return out

    monkeypatch.setattr(file, "_op", count)
    call()
    monkeypatch.undo()
    return taken


def test_groups_take_few_pairs_where_there_are_clusters_and_about_all_where_there_are_none(
    monkeypatch,
):
    guide, rows = clustered(20, 20, 521)
    assert pairs_taken(monkeypatch, lambda: nearest(guide, rows, 10)) == 400 * 400
    assert (
        pairs_taken(monkeypatch, lambda: nearest(guide, rows, 10, "groups"))
        == 2 * 400 * 20 + 400 * 20
    )
    one, alone = clustered(1, 400, 521)
    assert (
        pairs_taken(monkeypatch, lambda: nearest(one, alone, 10, "groups"))
        <= 7 * 400 * 20 + 400 * 400
    )


@pytest.mark.parametrize("method", METHODS)
def test_progress(method):
    guide, rows = clustered(3, 5, 67)
    seen: list[tuple[int, int]] = []
    nearest(guide, rows, 2, method, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (15, 15) and seen == sorted(seen)


@pytest.mark.parametrize(
    ("arguments", "name", "kind"),
    [
        ({"k": 0}, "k", ValueError),
        ({"k": 1.5}, "k", ValueError),
        ({"k": True}, "k", ValueError),
        ({"method": "fast"}, "method", ValueError),
        ({"pivots": -1}, "pivots", ValueError),
        ({"rows": torch.zeros(0, 3)}, "rows", ValueError),
        ({"rows": torch.zeros(2, 4)}, "rows", ValueError),
        ({"rows": torch.zeros(2, 3, dtype=F64)}, "rows", TypeError),
        ({"rows": [[1.0]]}, "rows", TypeError),
        ({"guide": torch.zeros(3)}, "guide", ValueError),
    ],
)
def test_bad_input(arguments, name, kind):
    with refuses("nearest", name, kind):
        nearest(**{"guide": torch.zeros(2, 3), "rows": torch.zeros(2, 3), "k": 1, **arguments})


def test_tiles_of_few_rows(monkeypatch):
    """Where rows are read in parts, the result is the same."""
    guide, rows = clustered(4, 9, 67)
    want = {method: nearest(guide, rows, 5, method) for method in METHODS}
    monkeypatch.setattr(stream, "BYTES", 5 * 67 * 4)
    monkeypatch.setattr(sys.modules["pflcore.ops.nearest"], "PAIRS", 36)
    for method in METHODS:
        assert all(
            torch.equal(g, w)
            for g, w in zip(nearest(guide, rows, 5, method), want[method], strict=True)
        )


def test_underflow_and_overflow_prove_nothing():
    """Squares that float64 cannot hold: distances of 0 and infinity that are neither."""
    for scale in (1e-170, 1e160):
        rows = scale * randn(1, 30, 3)
        got, want = nearest(rows + scale, rows, 4, "groups"), by_all_pairs(rows + scale, rows, 4)
        assert torch.equal(got.sqdist, want[0]) and torch.equal(got.index, want[1])
