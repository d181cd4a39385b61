"""pairwise_sqdist: exact where float32 expansions are not, the same bits for any threads and order,
on every path of the kernels."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tolerance import BF16, F16, F32, F64, FLOATS, assert_close
from ugly import LAYOUTS, SIZES, dtypes, lay, matrices, randn, refuses, same_for_any_threads, scales

from pflcore.ops import pairwise_sqdist, reference

ROWS = st.sampled_from([0, 1, 2, 3, 5, 7, 11])
COLS = st.sampled_from(SIZES)


def exact(a, b=None):
    """The definition in float64."""
    b = a if b is None else b
    return (a.double()[:, None] - b.double()).square().sum(-1)


def centred(a):
    """Distances of close rows by another road: float64 scalar products of the differences from the
    first row."""
    d = a.double() - a[0].double()
    gram = d @ d.T
    square = gram.diagonal()
    return square[:, None] + square - 2 * gram


# --- right ------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_definition(dtype, data):
    scale = data.draw(scales(dtype))
    cols = data.draw(COLS)
    a = data.draw(matrices(ROWS, st.just(cols), dtype, scale))
    b = data.draw(matrices(ROWS, st.just(cols), dtype, scale))
    assert_close(pairwise_sqdist(a, b), exact(a, b), "sqdist", dtype)
    got = pairwise_sqdist(a)
    assert got.dtype == F64 and got.shape == (len(a), len(a))
    assert_close(got, exact(a), "sqdist", dtype)
    assert torch.equal(got, got.T) and bool((got.diagonal() == 0).all())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("cols", [1, 7, 67, 4099])
def test_rows_of_very_different_scale(dtype, cols):
    scale = torch.tensor([1e-30, 1e-20, 1e-15, 1e-10, 1.0, 1e10, 1e19, 1e30, 0.0], dtype=F64)
    a = (randn(3, 9, cols) * scale[:, None]).to(dtype)
    assert_close(pairwise_sqdist(a), exact(a), "sqdist", dtype)
    a = torch.cat([a, a])  # pairs that are equal beside pairs that are far
    assert_close(pairwise_sqdist(a), exact(a), "sqdist", dtype)
    one = randn(4, 5, cols, dtype=dtype)
    one[:, ::3] *= 1e-25  # small and large numbers in one row
    one[2, 0] = 1e30
    assert_close(pairwise_sqdist(one), exact(one), "sqdist", dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("spread", "p"),
    [
        (1e-4, 50_000),
        *(
            pytest.param(spread, 1_000_000, marks=pytest.mark.deep("a large model"))
            for spread in (1e-3, 1e-4)
        ),
    ],
)
def test_forty_clients_close_together(spread, p):
    """What models look like after a round; |a|^2 + |b|^2 - 2ab in float32 is wrong by more than 100
    % here."""
    gen = torch.Generator().manual_seed(5)
    a = torch.randn(p, generator=gen) * 0.05
    a = a + spread * 0.05 * torch.randn(40, p, generator=gen)
    assert_close(pairwise_sqdist(a), centred(a), "sqdist", F32)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_rows(dtype):
    """Equal addends, whose rounding errors do not cancel; a prime number of them."""
    p = 1_000_003
    level = torch.tensor([1.0, 1.1, 0.1, 1 / 3, -0.7], dtype=F64).to(dtype)
    a = level[:, None].expand(-1, p).contiguous()
    assert_close(pairwise_sqdist(a), p * exact(level[:, None]), "sqdist", dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("n", "p"), [(129, 1100), (300, 67)])
def test_more_rows_than_fit_a_cache_block(n, p):
    a, b = lay(randn(1, n, p, dtype=F32), "wide rows"), randn(2, 133, p, dtype=F32)
    exact_a, exact_b = centred(a), centred(torch.cat([a, b]))[:n, n:]
    off = ~torch.eye(n, dtype=torch.bool)
    assert_close(pairwise_sqdist(a)[off], exact_a[off], "sqdist", F32)
    assert_close(pairwise_sqdist(a, b), exact_b, "sqdist", F32)
    assert_close(pairwise_sqdist(a[-1:], b), exact_b[-1:], "sqdist", F32)


# --- laws -------------------------------------------------------------------


@given(dtypes, ROWS, COLS, st.integers(0, 99), st.integers(-100, 100))
def test_whole_numbers_are_exact_and_a_common_shift_changes_nothing(dtype, rows, cols, seed, shift):
    # up to 150 in size, which bfloat16 holds exactly
    a = randn(seed, rows, cols, scale=15).round().clamp(-50, 50)
    got = pairwise_sqdist(a.to(dtype))
    assert torch.equal(got, exact(a))
    assert torch.equal(pairwise_sqdist((a + shift).to(dtype)), got)
    assert torch.equal(pairwise_sqdist((a + shift).to(dtype), a.to(dtype)), exact(a + shift, a))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_order_and_place_of_the_clients_change_no_bit(dtype, data):
    cols = data.draw(COLS)
    a = data.draw(matrices(ROWS, st.just(cols), dtype))
    b = data.draw(matrices(ROWS, st.just(cols), dtype))
    pa, pb = (
        torch.tensor(data.draw(st.permutations(range(len(t)))), dtype=torch.int64) for t in (a, b)
    )
    place = data.draw(st.sampled_from(LAYOUTS))
    assert torch.equal(pairwise_sqdist(lay(a[pa], place)), pairwise_sqdist(a)[pa][:, pa])
    assert torch.equal(pairwise_sqdist(lay(a[pa], place), b[pb]), pairwise_sqdist(a, b)[pa][:, pb])
    assert torch.equal(pairwise_sqdist(b, a), pairwise_sqdist(a, b).T)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_order_of_many_clients_changes_no_bit(dtype):
    """More rows than one window of the kernel holds, more columns than one strip: pairs change from
    large windows to small ones."""
    a = randn(1, 133, 1031, dtype=dtype)
    got = pairwise_sqdist(a)
    assert torch.equal(pairwise_sqdist(a.flip(0)), got.flip(0, 1))
    assert torch.equal(pairwise_sqdist(a.flip(0), a[:7]), pairwise_sqdist(a, a[:7]).flip(0))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "cols"), [(2, 300_007), (13, 10_007), (37, 1031)])
def test_threads_change_no_bit(dtype, rows, cols):
    a = randn(1, rows, cols, dtype=dtype)
    same_for_any_threads(lambda: pairwise_sqdist(a))
    same_for_any_threads(lambda: pairwise_sqdist(a, a[: rows // 2 + 1]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cols", [1, 67, 1031])
def test_a_client_that_is_not_finite_spoils_its_own_row_and_column_alone(dtype, bad, cols):
    a = randn(2, 7, cols, dtype=dtype)
    clean = pairwise_sqdist(a)
    a[3, cols // 2] = bad
    got = pairwise_sqdist(a)
    others = torch.tensor([0, 1, 2, 4, 5, 6])
    assert torch.equal(got[others][:, others], clean[others][:, others])
    assert bool((got.diagonal() == 0).all())
    for line in (got[3, others], got[others, 3], pairwise_sqdist(a, a[others])[3]):
        assert bool(line.isnan().all() if bad != bad else (line == torch.inf).all())
    # Inf - Inf: with b nothing is known of the diagonal
    assert bool(pairwise_sqdist(a, a)[3, 3].isnan())


def test_no_columns_and_no_rows():
    assert torch.equal(pairwise_sqdist(torch.zeros(3, 0)), torch.zeros(3, 3, dtype=F64))
    assert pairwise_sqdist(torch.zeros(0, 4)).shape == (0, 0)
    assert pairwise_sqdist(torch.zeros(2, 4), torch.zeros(0, 4)).shape == (2, 0)


def test_one_row_for_everybody():
    """A row expanded without a copy."""
    a = randn(1, 1, 67, dtype=F32)
    assert torch.equal(pairwise_sqdist(a.expand(5, -1)), torch.zeros(5, 5, dtype=F64))


# --- listed pairs -----------------------------------------------------------


def listed(all_pairs, index):
    """The entries of all pairs; padding is infinitely far."""
    return torch.where(index < 0, torch.inf, all_pairs.gather(1, index.clamp(min=0)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_listed_pairs_have_the_bits_of_all_pairs(dtype, data):
    scale, cols = data.draw(scales(dtype)), data.draw(COLS)
    a = data.draw(matrices(st.sampled_from([1, 2, 5, 7]), st.just(cols), dtype, scale))
    b = data.draw(matrices(st.sampled_from([1, 2, 5, 11]), st.just(cols), dtype, scale))
    many = data.draw(st.sampled_from([0, 1, 3, 4, 9]))
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bad = data.draw(st.sampled_from([None, torch.nan, torch.inf]))
    if bad is not None and cols:
        a[0, -1] = bad
    index = torch.randint(-1, len(b), (len(a), many), generator=gen)
    own = torch.randint(-1, len(a), (many, len(a)), generator=gen).T  # not contiguous
    for got, want in (
        (pairwise_sqdist(a, b, index), listed(pairwise_sqdist(a, b), index)),
        (pairwise_sqdist(a, index=own), listed(pairwise_sqdist(a), own)),
        (reference.pairwise_sqdist(a, b, index), listed(reference.pairwise_sqdist(a, b), index)),
        (reference.pairwise_sqdist(a, None, own), listed(reference.pairwise_sqdist(a, None), own)),
    ):
        assert got.dtype == F64 and torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("m", "n", "p", "many"),
    [(2, 300, 700, 290), (150, 133, 1031, 3), (3, 5, 20_011, 4), (40, 40, 3001, 129)],
)
def test_a_pair_has_the_same_bits_in_every_matrix(dtype, m, n, p, many):
    """In lists longer than a window, in parts of a matrix, in a row alone: a pair's sum depends on
    its columns alone."""
    a, b = randn(1, m, p, dtype=dtype), randn(2, n, p, dtype=dtype)
    if dtype in (F32, F64, BF16):
        b[::2] = a[0] * (1 + 2**-7)  # close, and
        a[1], b[1] = a[1] * 1e-25, b[1] * 1e-25  # to be done again
    index = torch.randint(-1, n, (m, many), generator=torch.Generator().manual_seed(3))
    full = pairwise_sqdist(a, b)
    same_for_any_threads(lambda: pairwise_sqdist(a, b, index))
    assert torch.equal(pairwise_sqdist(a, b, index), listed(full, index))
    assert torch.equal(pairwise_sqdist(a[1:], b[1:5]), full[1:, 1:5])
    assert torch.equal(pairwise_sqdist(a[1:2], b), full[1:2]) and torch.equal(
        pairwise_sqdist(a, b[1:2]), full[:, 1:2]
    )
    off = ~torch.eye(m, dtype=torch.bool)
    assert torch.equal(pairwise_sqdist(a)[off], pairwise_sqdist(a, a[:])[off])
    some = slice(0, min(m, 3))
    assert torch.equal(
        reference.pairwise_sqdist(a[some], b[1:5]),
        reference.pairwise_sqdist(a[some], b[:7])[:, 1:5],
    )


def test_a_list_of_nobody():
    a = randn(1, 3, 9, dtype=F32)
    index = torch.full((3, 2), -1)
    for call in (pairwise_sqdist, reference.pairwise_sqdist):
        for other, cols in ((None, 9), (a[:0], 9), (None, 0)):
            got = call(a[:, :cols], None if other is None else other[:, :cols], index)
            assert torch.equal(got, torch.full((3, 2), torch.inf, dtype=F64))
        assert call(a[:0], a, index[:0]).shape == (0, 2) and call(a, None, index[:, :0]).shape == (
            3,
            0,
        )


def test_gradient_of_listed_pairs():
    """That of the same entries of all pairs; what is padding, and a client that is NaN and in no
    pair, add nothing."""
    index = torch.tensor([[1, 4, -1], [0, 0, 2], [-1, -1, -1], [3, 1, 4]])
    for own in (False, True):
        a, b = randn(1, 4, 21).requires_grad_(), randn(2, 5, 21)
        b[1 if own else 3, 0] = 1.0
        inputs = (a,) if own else (a, b.requires_grad_())
        near = index.clamp(max=3) if own else index
        grad = randn(3, 4, 3)
        got = torch.autograd.grad(pairwise_sqdist(*inputs, index=near), inputs, grad)
        dense = torch.zeros(4, 4 if own else 5, dtype=F64).scatter_add(
            1, near.clamp(min=0), torch.where(near < 0, 0.0, grad)
        )
        want = torch.autograd.grad(pairwise_sqdist(*inputs), inputs, dense)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)
    a = randn(1, 3, 5).requires_grad_()
    with torch.no_grad():
        a[2] = torch.nan
    (got,) = torch.autograd.grad(
        pairwise_sqdist(a, index=torch.tensor([[1, -1], [0, 0], [-1, -1]]))
        .nan_to_num(posinf=0)
        .sum(),
        a,
    )
    assert bool(got.isfinite().all())


def test_listed_pairs_in_forward_mode():
    a, b = randn(1, 3, 7), randn(2, 4, 7)
    index = torch.tensor([[0, 3], [2, 2], [1, -1]])
    step = randn(3, 3, 7)
    value, slope = torch.func.jvp(lambda t: pairwise_sqdist(t, b, index), (a,), (step,))
    torch.testing.assert_close(value, pairwise_sqdist(a, b, index))
    want = 2 * ((a[:, None] - b[index.clamp(min=0)]) * step[:, None]).sum(-1)
    torch.testing.assert_close(slope, torch.where(index < 0, 0.0, want))


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        ([[0]], TypeError),
        (torch.zeros(2, 1), TypeError),
        (torch.zeros(2, dtype=torch.int64), ValueError),
        (torch.zeros(3, 1, dtype=torch.int64), ValueError),
        (torch.tensor([[0], [4]]), ValueError),
        (torch.zeros(2, 1, dtype=torch.int64, device="meta"), ValueError),
    ],
)
def test_bad_index(index, kind):
    with refuses("pairwise_sqdist", "index", kind):
        pairwise_sqdist(torch.zeros(2, 3), torch.zeros(4, 3), index)


# --- gradient ---------------------------------------------------------------


@given(st.sampled_from([F32, F64]), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_gradient(dtype, rows, cols, own):
    a = randn(1, rows, cols, dtype=dtype).requires_grad_()
    b = None if own else randn(2, 4, cols, dtype=dtype).requires_grad_()
    grad = randn(3, rows, rows if own else 4)
    a64 = a.detach().double().requires_grad_()
    b64 = None if b is None else b.detach().double().requires_grad_()
    inputs, inputs64 = ((a,), (a64,)) if own else ((a, b), (a64, b64))
    got = torch.autograd.grad(pairwise_sqdist(a, b), inputs, grad)
    want = torch.autograd.grad(exact(a64, b64), inputs64, grad)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(
            g.double(),
            w,
            rtol=1e-6 if dtype == F32 else 1e-12,
            atol=1e-6 if dtype == F32 else 1e-11,
        )


def test_gradient_of_close_rows():
    """2 (a_i - b_j) as a difference of two nearly equal products would lose everything in
    float32."""
    a = (1.0 + 1e-4 * randn(1, 4, 67)).float().requires_grad_()
    (got,) = torch.autograd.grad(pairwise_sqdist(a).sum(), a)
    d = a.detach().double()
    want = 4 * (len(d) * d - d.sum(0))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-9)


# --- bad input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "name", "kind"),
    [
        ([[1.0]], None, "a", TypeError),
        (torch.zeros(3), None, "a", ValueError),
        (torch.zeros(2, 3, dtype=torch.int64), None, "a", TypeError),
        (torch.zeros(2, 3), torch.zeros(2, 4), "b", ValueError),
        (torch.zeros(2, 3), torch.zeros(3), "b", ValueError),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=F16), "b", TypeError),
        (torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), "b", ValueError),
    ],
)
def test_bad_input(a, b, name, kind):
    with refuses("pairwise_sqdist", name, kind):
        pairwise_sqdist(a, b)
