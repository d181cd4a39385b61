"""Tests of `nearest`: the number of its distances, and reading in parts."""

import pytest
import torch
from laws import identical
from pretend_gpu import pretended_gpu, waits
from ugly import clustered

from pflcore.ops import _nearest, _sqdist, nearest


def pairs_taken(monkeypatch, *arguments):
    """The number of distances that a call computes."""
    taken = []
    op = _sqdist._op

    def count(a, b, index=None):
        out = op(a, b, index)
        # Distances of the pivots' sketches have fewer columns, and do not count.
        taken.append(out.numel() if a.shape[1] == 521 else 0)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(_sqdist, "_op", count)
        nearest(*arguments)
    return sum(taken)


def test_groups_take_few_pairs_where_there_are_clusters(
    monkeypatch,
):
    many = clustered(20, 20, 521)
    one = clustered(1, 400, 521)
    assert pairs_taken(monkeypatch, *many, 10) == 400 * 400
    assert pairs_taken(monkeypatch, *many, 10, "groups") == 2 * 400 * 20 + 400 * 20
    assert pairs_taken(monkeypatch, *one, 10, "groups") <= 7 * 400 * 20 + 400 * 400


@pytest.mark.parametrize("method", ["exact", "groups"])
def test_tiles_of_few_rows(method, monkeypatch):
    """The result does not change where rows are read in parts."""
    guide, rows = clustered(4, 9, 67)
    rows[7] = torch.nan
    want = nearest(guide, rows, 5, method)
    monkeypatch.setattr(_nearest, "BLOCK_BYTES", 5 * 67 * 4)
    monkeypatch.setattr(_nearest, "MAX_PAIRS", 36)
    got = nearest(guide, rows, 5, method)
    identical(tuple(got), tuple(want))


@pytest.mark.parametrize("method", ["exact", "groups"])
def test_tiles_of_the_same_rows_twice(method, monkeypatch):
    """Each pair of rows is taken once, with the same result."""
    _, rows = clustered(4, 9, 521)
    rows[7] = torch.nan
    want = nearest(rows.clone(), rows, 5)
    monkeypatch.setattr(_nearest, "MAX_PAIRS", 25)
    for both in ((rows, rows), (rows, rows[:])):
        got = nearest(*both, 5, method)
        identical(tuple(got), tuple(want))

    num_tiles = 8  # of 5 rows, the last of 1
    num_pairs = pairs_taken(monkeypatch, rows, rows, 5)
    assert num_pairs == (36 * 36 + (num_tiles - 1) * 25 + 1) / 2


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
