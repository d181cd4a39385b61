"""pairwise_sqdist: exact where float32 expansions are not, the same bits for any order,
on every path of the kernels."""

import pytest
import torch
from laws import exact, integers, listed
from tolerance import F16, F32, F64, FLOATS, assert_close
from ugly import LAYOUTS, lay, randn

from pflcore.ops import pairwise_sqdist, reference

isa = pytest.mark.usefixtures("isa")
every_dtype = pytest.mark.parametrize("dtype", FLOATS)


# --- right ------------------------------------------------------------------


@isa
@every_dtype
def test_constant_rows(dtype):
    """Equal addends, whose rounding errors do not cancel; a prime number of them,
    and few."""
    p = 1_000_003
    level = torch.tensor([1.0, 1.1, 0.1, 1 / 3, -0.7], dtype=F64).to(dtype)[:, None]
    a = level.expand(-1, p).contiguous()
    assert_close(pairwise_sqdist(a), p * exact(level), "sqdist", dtype)
    value = (1 + torch.arange(500, dtype=F32) / 500)[:, None]
    for p in (160, 192, 5760):
        got = pairwise_sqdist(value.expand(-1, p), torch.zeros(1, p))
        torch.testing.assert_close(
            got, value.double().square() * p, rtol=9.6e-7, atol=0
        )


@isa
@pytest.mark.parametrize("n, p", [(2, 60_000), (9, 60_000), (70, 9_000)])
@pytest.mark.parametrize("part", [slice(None), slice(-300, None), slice(300)])
def test_tiny_distances_over_many_columns(n, p, part):
    """What is done again in float64 is all of the row, wherever its numbers stand;
    1e-41 has three digits in float32, though a sum of many is not small itself."""
    a = torch.zeros(n, p)
    a[:, part] = randn(0, n, p, dtype=F32)[:, part] * 1e-22
    badly = torch.tensor([0, 3.3e-21, 6.1e-21])[:, None].expand(-1, 300_000)
    for rows in (a, badly):
        want = reference.pairwise_sqdist(rows, None)
        assert 0 < float(want.max()) < 1e-30
        for got in (pairwise_sqdist(rows), pairwise_sqdist(rows, rows)):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


# --- laws -------------------------------------------------------------------


@isa
@every_dtype
@pytest.mark.parametrize(
    "m, n, p, many",
    [
        (2, 300, 700, 290),
        (150, 133, 1031, 3),
        (3, 5, 20_011, 4),
        (40, 40, 3001, 129),
        (7, 7, 67, 9),
        (2, 7, 1, 3),
    ],
)
def test_a_pair_has_the_same_bits_in_every_matrix(dtype, m, n, p, many):
    """In any order and place of the rows, in lists longer than a window, in parts of a
    matrix, in a row alone: a pair's sum depends on its columns alone."""
    a, b = randn(1, m, p, dtype=dtype), randn(2, n, p, dtype=dtype)
    if dtype is not F16:
        b[::2] = a[0] * (1 + 2**-7)  # close, and
        a[1], b[1] = a[1] * 1e-25, b[1] * 1e-25  # to be done again
    index = integers(3, -1, n, m, many)
    full, own, off = (
        pairwise_sqdist(a, b),
        pairwise_sqdist(a),
        ~torch.eye(m, dtype=torch.bool),
    )
    assert_close(full, reference.pairwise_sqdist(a, b), "sqdist", dtype)
    pa, pb = torch.randperm(m), torch.randperm(n)
    for place in LAYOUTS:
        moved = lay(a[pa], place)
        assert torch.equal(pairwise_sqdist(moved), own[pa][:, pa])
        assert torch.equal(pairwise_sqdist(moved, b[pb]), full[pa][:, pb])
    assert torch.equal(pairwise_sqdist(b, a), full.T)
    assert torch.equal(pairwise_sqdist(a, b, index), listed(full, index))
    assert torch.equal(pairwise_sqdist(a[1:], b[1:5]), full[1:, 1:5])
    assert torch.equal(pairwise_sqdist(a[1:2], b), full[1:2])
    assert torch.equal(pairwise_sqdist(a, b[1:2]), full[:, 1:2])
    assert torch.equal(own[off], pairwise_sqdist(a, a[:])[off])
    assert not pairwise_sqdist(a[:1].expand(5, -1)).any()


@isa
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cols", [1, 67, 1031])
def test_a_client_that_is_not_finite_changes_no_bit_of_the_others(dtype, bad, cols):
    a, others = randn(2, 7, cols, dtype=dtype), torch.arange(7) != 3
    clean = pairwise_sqdist(a)
    a[3, cols // 2] = bad
    assert torch.equal(pairwise_sqdist(a)[others][:, others], clean[others][:, others])
    # Inf - Inf: with b nothing is known of the diagonal
    assert bool(pairwise_sqdist(a, a)[3, 3].isnan())


# --- gradient ---------------------------------------------------------------


def test_gradient_of_close_rows():
    """2 (a_i - b_j) as a difference of two nearly equal products would lose everything
    in float32."""
    a = (1.0 + 1e-4 * randn(1, 4, 67)).float().requires_grad_()
    (got,) = torch.autograd.grad(pairwise_sqdist(a).sum(), a)
    d = a.detach().double()
    want = 4 * (4 * d - d.sum(0))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_client_spoils_no_other_gradient(bad):
    """Neither in pairs that take no part in the loss, nor in a list that does not
    name it."""
    a, b, keep = randn(1, 4, 5).requires_grad_(), randn(2, 3, 5), torch.tensor([0, 2])
    b[1, 2] = bad
    b.requires_grad_()
    got = torch.autograd.grad(pairwise_sqdist(a, b)[:, keep].sum(), (a, b))
    want = torch.autograd.grad(pairwise_sqdist(a, b[keep]).sum(), (a, b))
    assert all(bool(t.isfinite().all()) for t in (*got, *want))
    torch.testing.assert_close(got, want)
    few = pairwise_sqdist(b, index=torch.tensor([[2, 0], [-1, -1], [0, -1]]))
    for d in (pairwise_sqdist(b)[0, 2], few[2]):  # to which padding adds nothing
        (one,) = torch.autograd.grad(d, b, torch.ones_like(d))
        torch.testing.assert_close(one[0], 2 * (b[0] - b[2]).detach())
        assert not one[1].any()
    (all_pairs,) = torch.autograd.grad(pairwise_sqdist(b).sum(), b)
    assert bool(all_pairs.isnan().all())  # a loss that takes the broken pairs says so
