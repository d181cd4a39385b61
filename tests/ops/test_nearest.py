"""`nearest` has the bits of all pairs' distances, for any data."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from laws import identical, integers, of
from tolerance import BF16, F16, F32, F64
from ugly import clustered, lay, randn

from pflcore.ops import feddwa_weights, nearest, pairwise_sqdist

METHODS = ("exact", "groups")


def check(guide, rows, k, method, **how):
    """Asserts that the k nearest are those by all distances.

    NaN is infinitely far. Of equal distances the lower index comes first. The rows are
    copied, as guides that are the rows themselves have a way of their own.
    """
    d = pairwise_sqdist(guide, rows.clone())
    index = feddwa_weights(d, k).index
    got = nearest(guide, rows, k, method, **how)
    identical(tuple(got), (d.gather(1, index).nan_to_num(torch.inf, torch.inf), index))


@st.composite
def data(draw):
    """Strategy for two matrices of rows in clusters.

    There is noise of any size, and there are duplicates, zeros, constant rows, rows
    that are not finite, few columns and many.
    """
    p = draw(of(1, 2, 7, 67))
    n = draw(st.integers(1, 40))
    m = draw(st.integers(0, 9))
    seed = draw(st.integers(0, 999))
    groups = draw(st.integers(1, 9))
    cluster = integers(seed, 0, groups, n + m)
    kinds = integers(seed + 2, 0, 10, 2, n + m)
    noise = draw(of(0.0, 1e-7, 1e-3, 1.0)) * randn(seed + 1, n + m, p)
    every = draw(of(1e-30, 1e-3, 1.0, 1e4)) * (randn(seed, groups, p)[cluster] + noise)
    if draw(st.booleans()):
        every = every.round(decimals=1)  # makes ties
    every[kinds[0] < draw(of(0, 5))] = 0.0
    if draw(of(False, False, True)):
        every[kinds[1] < 2, 0] = draw(of(torch.nan, torch.inf, 1e200))
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
    """A group whose bound is just below the best distance is searched.

    On a line, the bound by pivots (here 0 and 10) is the distance itself. 5.78 is
    nearer to 4.9 than 4, the nearest row of its own group.
    """
    rows = torch.tensor([0, 1, 2, 3, 4, 10, 5.78], dtype=F64)[:, None]
    got = nearest(torch.tensor([[4.9]], dtype=F64), rows, 1, method, pivots=2)
    assert got.index.item() == 6


@pytest.mark.parametrize("scale", [1e-170, 1e160])
def test_underflow_and_overflow_prove_nothing(scale):
    """Squares outside the range of float64 exclude no group.

    Such distances are computed as 0 or infinity, but are neither.
    """
    rows = scale * (randn(1, 30, 3) + 1)
    check(rows, rows - scale, 4, "groups")
