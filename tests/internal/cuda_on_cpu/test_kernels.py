"""The CUDA kernels, run block by block on the CPU (tests/internal/cuda_on_cpu), against the
references."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from internal.cuda_on_cpu import DTYPES, Kernels, compiler, guarded, intact

from pflcore.ops import reference

pytestmark = [
    pytest.mark.deep("a compiler"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler to run the CUDA kernels with"),
]

SIZES = (1, 2, 17, 31, 33, 257, 1023)  # columns
ROWS = (1, 2, 3, 17)
# elements off a 16-byte boundary; None: the last element is the last that may be touched
SHIFTS = (None, 0, 1, 3)
GAPS = (0, 1, 8)  # elements between rows


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return Kernels(Path(tmp_path_factory.mktemp("cuda_on_cpu")))


@pytest.fixture(autouse=True)
def forwards(kernels):
    kernels.order(0)
    yield
    kernels.order(0)
    kernels.shared()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def relative(got, want):
    """The largest relative error; an entry that should be 0 must be 0."""
    if not got.numel():
        return 0.0
    error = (got - want).abs() / want.abs()
    return float(torch.where(want == 0, torch.where(got == 0, 0.0, float("inf")), error).max())


# --- the harness itself -----------------------------------------------------


def test_harness_catches_what_a_gpu_would_not_forgive(kernels):
    out = torch.zeros(64, dtype=torch.float64)
    results = []
    for order in (0, 1):
        kernels.order(order)
        kernels.check(kernels.lib.broken(0, out.data_ptr()))
        results.append(out.nan_to_num(-1.0))
    assert not torch.equal(*results), (
        "a missing barrier must show when the order of the threads changes"
    )
    kernels.check(kernels.lib.broken(2, out.data_ptr()))
    assert out.isnan().all(), "shared memory that was never written must read as NaN"
    kernels.check(kernels.lib.broken(3, out.data_ptr()))
    assert out.isnan().all(), "a copy that was not waited for must not have arrived"
    for fault, sentence in (
        (1, "not every thread reaches"),
        (4, "misaligned"),
        (5, "past the end of shared memory"),
        (6, "outside of its buffers"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            kernels.check(kernels.lib.broken(fault, guarded(out[None]).data_ptr()))


# --- pairwise_sqdist --------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    m=st.sampled_from(ROWS),
    n=st.sampled_from((0, *ROWS)),
    p=st.sampled_from(SIZES),
    shift=st.sampled_from(SHIFTS),
    gap=st.sampled_from(GAPS),
    seed=st.integers(0, 99),
)
def test_sqdist(kernels, dtype, m, n, p, shift, gap, seed):
    centre = normal(1, p, seed=seed)
    # models that are close, as after a round
    a = guarded((centre + 1e-3 * normal(m, p, seed=seed + 1)).to(dtype), shift, gap)
    b = guarded((centre + 1e-3 * normal(n, p, seed=seed + 2)).to(dtype), 0, gap) if n else None
    got, want = kernels.pairwise_sqdist(a, b), reference.pairwise_sqdist(a, b)
    assert relative(got, want) <= (1e-13 if dtype == torch.float64 else 1e-6)
    if b is None:
        assert torch.equal(got, got.T) and (got.diagonal() == 0).all()
        # the same by the road of two matrices
        assert relative(got, kernels.pairwise_sqdist(a, a)) <= 1e-6


@pytest.mark.parametrize(
    ("m", "n"), [(64, 0), (65, 0), (130, 0), (1, 100), (100, 1), (67, 129), (16, 16), (9, 40)]
)
def test_sqdist_windows(kernels, m, n):
    a, b = normal(m, 263, seed=m), normal(n, 263, seed=n + 1) if n else None
    assert relative(kernels.pairwise_sqdist(a, b), reference.pairwise_sqdist(a, b)) <= 1e-6


@pytest.mark.parametrize(("m", "n", "p"), [(300, 1, 9), (257, 3, 100), (129, 70, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sqdist_of_more_rows_than_a_grid_holds(kernels, m, n, p, dtype):
    a, b = guarded(normal(m, p, dtype=dtype), 1, 3), normal(n, p, seed=1, dtype=dtype)
    assert (
        relative(kernels.pairwise_sqdist(a, b, most=128), reference.pairwise_sqdist(a, b)) <= 1e-6
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1e-15, 1.0, 1e15, 1e19, 1e25, 1e30])
@pytest.mark.parametrize("p", [9, 333, 3000])  # one partial sum, several, and many
def test_sqdist_scales(kernels, scale, p):
    a = normal(5, p) * scale
    a[3] = a[1]  # exact duplicates, too
    got = kernels.pairwise_sqdist(a)
    assert relative(got, reference.pairwise_sqdist(a, None)) <= 1e-6
    assert got[1, 3] == 0 and got[3, 1] == 0


def test_sqdist_mixed_scales_and_non_finite(kernels):
    a = normal(7, 700)
    a[1] *= 1e25
    a[2] *= 1e-25
    a[3] = a[2]
    a[3, 699] += 1e-24
    a[4, 5] = float("nan")
    a[5, 6] = float("inf")
    a[6, :] = 0
    got, want = kernels.pairwise_sqdist(a), reference.pairwise_sqdist(a, None)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    assert relative(got[finite], want[finite]) <= 1e-6


@pytest.mark.parametrize("p", [1, 8, 129, 1023])
def test_sqdist_worst_rounding(kernels, p):
    """Rows whose float32 sums all round the same way: constants, and a large square that swallows
    small ones."""
    constant = torch.full((1, p), 0.1)
    spiky = torch.full((1, p), 2.0**-12 * (1 - 2**-10))
    spiky[0, ::8] = 1.0
    a = torch.cat([constant, constant * 3, spiky, torch.zeros(1, p), spiky.flip(1)])
    assert relative(kernels.pairwise_sqdist(a), reference.pairwise_sqdist(a, None)) <= 1e-6


def test_sqdist_repeats_and_follows_its_rows(kernels):
    a = normal(70, 1500)
    first = kernels.pairwise_sqdist(a)
    for order in (1, 7):
        kernels.order(order)
        assert torch.equal(kernels.pairwise_sqdist(a), first)
    kernels.order(0)
    # the same bits by the road of unaligned rows
    assert torch.equal(kernels.pairwise_sqdist(guarded(a, 1, 3)), first)
    moved = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(kernels.pairwise_sqdist(a[moved]), first[moved][:, moved])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    m=st.sampled_from(ROWS),
    n=st.sampled_from((0, *ROWS)),
    p=st.sampled_from((0, *SIZES, 3000)),
    many=st.sampled_from((0, 1, 3, 9)),
    shift=st.sampled_from(SHIFTS),
    gap=st.sampled_from(GAPS),
    seed=st.integers(0, 99),
)
def test_sqdist_of_listed_pairs(kernels, dtype, m, n, p, many, shift, gap, seed):
    """The bits of all pairs in the same order of the threads, or in another; infinity where the
    list is negative, NaN beyond the rows."""
    a = guarded(normal(m, p, seed=seed, dtype=dtype), shift, gap)
    b = guarded(normal(n, p, seed=seed + 1, dtype=dtype), 0, gap) if n else None
    a[0] *= 1e-25  # to be done again
    rows = n or m
    index = guarded(
        torch.randint(-1, rows + 1, (m, many), generator=torch.Generator().manual_seed(seed))
    )
    all_pairs = kernels.pairwise_sqdist(a, b)
    want = torch.where(index < 0, torch.inf, all_pairs.gather(1, index.clamp(0, rows - 1)))
    want[index == rows] = torch.nan
    for order in (0, 1 + seed % 3):
        kernels.order(order)
        got = kernels.pairwise_sqdist(a, b, index)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(
            got.nan_to_num(), want.nan_to_num()
        )
    kernels.order(0)


@pytest.mark.parametrize(("m", "n", "p"), [(70, 0, 1500), (130, 67, 263), (300, 3, 9)])
@pytest.mark.parametrize("most", [0, 128])
def test_sqdist_of_listed_pairs_in_windows(kernels, m, n, p, most):
    a, b = normal(m, p), normal(n, p, seed=1) if n else None
    index = torch.randint(-1, n or m, (m, 5), generator=torch.Generator().manual_seed(2))
    got = kernels.pairwise_sqdist(a, b, index, most=most)
    assert torch.equal(
        got,
        torch.where(
            index < 0,
            torch.inf,
            kernels.pairwise_sqdist(a, b, most=most).gather(1, index.clamp(min=0)),
        ),
    )


def test_sqdist_empty(kernels):
    assert kernels.pairwise_sqdist(torch.zeros(0, 5)).shape == (0, 0)
    assert torch.equal(
        kernels.pairwise_sqdist(torch.zeros(3, 0)), torch.zeros(3, 3, dtype=torch.float64)
    )
    assert torch.equal(
        kernels.pairwise_sqdist(torch.zeros(2, 0), torch.zeros(3, 0)),
        torch.zeros(2, 3, dtype=torch.float64),
    )
    assert kernels.pairwise_sqdist(torch.zeros(2, 4), torch.zeros(0, 4)).shape == (2, 0)


@given(
    m=st.integers(1, 300),
    n=st.integers(1, 300),
    p=st.integers(1, 1 << 40),
    symmetric=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_sqdist_plan(kernels, m, n, p, symmetric, dtype):
    """What a launch may ask for, at every size: whole warps, a number of blocks that the grid
    holds, all columns covered once."""
    plan = kernels.plan(m, m if symmetric else n, p, symmetric, dtype)
    assert plan["loop"] % 32 == 0 and 32 <= plan["loop"] <= 256
    assert (
        plan["lanes"] in (1, 2, 4, 8, 16, 32)
        and plan["stages"] in (2, 4)
        and 1 <= plan["splits"] <= 2048
    )
    if p >= 1 << 24:  # huge P: a card must be filled however few rows there are
        windows = -(-m // 64) * -(-(m if symmetric else n) // 64)
        assert plan["splits"] * windows >= 1024


# --- weights ----------------------------------------------------------------


def distances(rows, n, seed):
    """Ugly distances: ties, zeros, huge and tiny, absent clients."""
    g = torch.Generator().manual_seed(seed)
    d = torch.rand(rows, n, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(
        -3, 4, (rows, 1), generator=g
    )
    kind = torch.randint(0, 7, (rows, n), generator=g)
    d = torch.where(kind == 0, 0.0, torch.where(kind == 1, 2.5, d))
    if seed % 3 == 0:
        d[kind == 2] = float("inf")
        d[kind == 3] = float("nan")
    return torch.full_like(d, 2.5) if seed % 7 == 0 else d


@given(
    rows=st.sampled_from((1, 3)),
    n=st.sampled_from((1, 2, 3, 17, 300, 1100)),
    omega=st.sampled_from((0.0, 0.2, 0.7, 1.0, 1.3)),
    psi=st.sampled_from((0.0, 0.3, 0.9)),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_waffle_weights(kernels, rows, n, omega, psi, ties, seed):
    dist = distances(rows, n, seed)
    target = torch.randint(0, n, (rows,), generator=torch.Generator().manual_seed(seed))
    dist.scatter_(1, target[:, None], 0.0)
    got = kernels.waffle_weights(guarded(dist), target, omega, psi, ties)
    torch.testing.assert_close(
        got, reference.waffle_weights(dist, target, omega, psi, ties), rtol=1e-12, atol=1e-15
    )


def test_waffle_weights_one_target_and_a_wrong_one(kernels):
    dist = distances(3, 5, 1)
    one = kernels.waffle_weights(dist, torch.tensor([2]), 0.5, 0.5, False)
    assert torch.equal(one, kernels.waffle_weights(dist, torch.tensor([2, 2, 2]), 0.5, 0.5, False))
    wrong = kernels.waffle_weights(dist, torch.tensor([2, 5, -1]), 0.5, 0.5, False)
    assert torch.equal(wrong[0], one[0]) and wrong[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    m=st.sampled_from((1, 3)),
    n=st.sampled_from((1, 2, 17, 255, 300, 1100)),
    k=st.sampled_from((1, 2, 5, 16, 255, 2000)),
    gap=st.sampled_from(GAPS),
    seed=st.integers(0, 99),
)
def test_feddwa_weights(kernels, dtype, m, n, k, gap, seed):
    sqdist = guarded((distances(m, n, seed) - (0.1 if seed % 5 == 0 else 0)).to(dtype), 1, gap)
    got, want = kernels.feddwa_weights(sqdist, k), reference.feddwa_weights(sqdist, k)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-300)


# --- aggregate --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    n=st.sampled_from((0, 1, 2, 5, 17)),
    m=st.sampled_from((1, 2, 8, 9, 17, 33, 70, 100)),
    p=st.sampled_from(SIZES),
    sparse=st.booleans(),
    base=st.sampled_from((None, 1, 2)),
    base_dtype=st.sampled_from(list(DTYPES)),
    precise=st.booleans(),
    shift=st.sampled_from(SHIFTS),
    gap=st.sampled_from(GAPS),
    seed=st.integers(0, 99),
)
def test_aggregate(kernels, dtype, n, m, p, sparse, base, base_dtype, precise, shift, gap, seed):
    g = torch.Generator().manual_seed(seed)
    updates = guarded(normal(n, p, seed=seed, dtype=dtype), shift, gap)
    index = None
    if sparse:
        k = min(n, 3) if seed % 2 else (40 if n else 0)
        index = torch.randint(0, max(n, 1), (m, k), generator=g)
    weight = torch.rand(m, n if index is None else index.shape[1], generator=g, dtype=torch.float64)
    weight[torch.rand(weight.shape, generator=g) < 0.2] = 0
    start = (
        None
        if base is None
        else guarded(normal(1 if base == 1 else m, p, seed=seed + 1, dtype=base_dtype), shift, gap)
    )
    start = start[0] if base == 1 and start is not None else start
    out = guarded(
        torch.full((m, p), float("nan"), dtype=dtype if start is None else base_dtype),
        0 if seed % 3 else shift,
        gap,
    )
    kernels.aggregate(updates, weight, index, start, -0.7, precise, out)
    want = torch.empty(m, p, dtype=torch.float64)
    reference.aggregate_out(
        updates, weight, index, None if start is None else start.double(), -0.7, True, want
    )
    size = (
        updates.abs().double().max().item() * weight.abs().sum(1).max().item() + 4
        if n and weight.numel()
        else 4.0
    )
    wide = precise or torch.float64 in (dtype, out.dtype)
    eps = torch.finfo(out.dtype).eps + (1e-15 if wide else 1e-6)
    assert float((out.double() - want).abs().max()) <= eps * size
    assert intact(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [48 * 1024, 64 * 1024, 227 * 1024])
@pytest.mark.parametrize("m", [1, 6, 10, 70, 128, 130, 259])
def test_aggregate_more_rows_than_shared_memory_holds(kernels, m, shared, dtype):
    """On cards that give 48 KiB of it (every one), 64 (compute capability 7.5) or more than is
    wanted."""
    kernels.shared(shared)
    n = 1500 if m < 100 else 300
    updates, weight = normal(n, 45, dtype=dtype), normal(m, n, seed=1).double()
    out = torch.empty(m, 45, dtype=dtype)
    kernels.aggregate(updates, weight, None, None, 1.0, False, out)
    rtol = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(
        out.double(), weight @ updates.double(), rtol=rtol, atol=rtol * n**0.5 * 3
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [9, 100, 130])
def test_aggregate_of_many_rows_whatever_their_alignment(kernels, m, dtype):
    """The updates are copied 16, 8, 4 or 2 bytes at a time, the result written in packs or one by
    one: the same bits."""
    updates, weight = normal(37, 1290, dtype=dtype), normal(m, 37, seed=1).double()
    want = torch.empty(m, 1290, dtype=dtype)
    kernels.aggregate(updates, weight, None, None, 1.0, False, want)
    for shift, gap in ((0, 6), (2, 4), (4, 0), (1, 1), (0, 14), (2, 6), (None, 0)):
        out = guarded(torch.zeros(m, 1290, dtype=dtype), shift, gap)
        kernels.aggregate(guarded(updates, shift, gap), weight, None, None, 1.0, False, out)
        assert torch.equal(out, want) and intact(out), (shift, gap)
    # and a row is the same whoever else is made beside it
    first = torch.empty(m, 1290, dtype=dtype)
    for row in (0, m - 1):
        kernels.aggregate(
            updates,
            weight[row : row + 1].contiguous(),
            None,
            None,
            1.0,
            False,
            first[row : row + 1],
        )
        assert torch.equal(first[row], want[row])


def test_aggregate_in_place_and_unread_rows(kernels):
    updates, base = normal(7, 33), normal(4, 33, seed=1)
    updates[0], updates[6] = float("nan"), float("nan")
    index = torch.tensor([[1, 6], [2, 3], [0, 4], [5, 5]])
    weight = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 2.0], [0.25, 0.75]], dtype=torch.float64)
    want = base + torch.stack(
        [updates[1], (updates[2] + updates[3]) / 2, 2 * updates[4], updates[5]]
    )
    # out is base: every entry is read before it is written
    kernels.aggregate(updates, weight, index, base, 1.0, False, base)
    torch.testing.assert_close(base, want)
    kernels.aggregate(
        updates, weight, torch.tensor([[1, 9], [7, 1], [-1, 1], [1, -1]]), None, 1.0, False, base
    )
    assert (
        base[0].isfinite().all()
        and base[1].isnan().all()
        and base[2].isfinite().all()
        and base[3].isnan().all()
    )


def test_aggregate_weights_that_lr_makes_zero(kernels):
    """A row is read where lr * weight, as it is summed, is not 0: NaN in it must not decide on a
    rounding."""
    updates, out = normal(3, 33), torch.empty(2, 33)
    updates[1] = float("nan")
    weight = torch.tensor([[1e-50, 1.0], [1.0, 1e-30]], dtype=torch.float64)
    kernels.aggregate(updates, weight, torch.tensor([[1, 2], [0, 1]]), None, 1e-20, True, out)
    assert out.isnan().all(1).tolist() == [True, True]  # in float64 they count
    kernels.aggregate(updates, weight, torch.tensor([[1, 2], [0, 1]]), None, 1e-20, False, out)
    assert torch.equal(out, 1e-20 * updates[[2, 0]])


def test_aggregate_nothing_to_add(kernels):
    base, none = normal(3, 5), torch.zeros(3, 0, dtype=torch.int64)
    for updates, index in ((normal(4, 5), none), (normal(0, 5), None), (normal(0, 5), none)):
        out = torch.full((3, 5), float("nan"))
        kernels.aggregate(
            updates, torch.zeros(3, 0, dtype=torch.float64), index, base, 1.0, False, out
        )
        assert torch.equal(out, base)


# --- rank1_linear -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    n=st.sampled_from((1, 3)),
    b=st.sampled_from((1, 5, 33)),
    i=st.sampled_from((1, 17, 70)),
    f=st.sampled_from((1, 31, 67)),
    o=st.sampled_from((1, 10, 65)),
    own=st.tuples(*[st.booleans()] * 4),
    need=st.tuples(*[st.booleans()] * 4),
    zeros=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 99),
)
def test_rank1_linear(kernels, dtype, n, b, i, f, o, own, need, zeros, seed):
    def draw(mine, k, *shape):
        return normal(*([n] if mine else []), *shape, seed=seed + k, dtype=dtype)

    x, w_a, lam, w_b = (
        draw(own[0], 0, b, i),
        draw(own[1], 1, o, f),
        draw(own[2], 2, f),
        draw(own[3], 3, f, i),
    )
    lam[torch.rand(lam.shape, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    wide = [t.double() for t in (x, w_a, lam, w_b)]
    rtol = 1e-4 if dtype == torch.float32 else 1e-11
    y, want = kernels.rank1_linear(x, w_a, lam, w_b), reference.rank1_linear(*wide)
    assert y.shape == want.shape
    torch.testing.assert_close(y.double(), want, rtol=rtol, atol=rtol * (i * f) ** 0.5)
    grad = normal(*y.shape, seed=seed + 9, dtype=dtype)
    got = kernels.rank1_linear_backward(grad, x, w_a, lam, w_b, *need)
    for g, r, wanted in zip(
        got, reference.rank1_linear_backward(grad.double(), *wide, *need), need, strict=True
    ):
        assert (g is not None) == wanted
        if g is not None:
            torch.testing.assert_close(
                g.double(), r, rtol=rtol, atol=rtol * (n * b * (i + o) * f) ** 0.5
            )


def test_rank1_linear_skips_inactive_factors(kernels):
    """Where lam is 0 and needs no gradient, a factor is not touched: what it holds cannot
    matter."""
    x, w_a, w_b = normal(2, 4, 9), normal(7, 40, seed=1), normal(40, 9, seed=2)
    lam = normal(2, 40, seed=3)
    lam[:, ::3] = 0
    grad = normal(2, 4, 7, seed=4)
    clean = kernels.rank1_linear(x, w_a, lam, w_b)
    grads = kernels.rank1_linear_backward(grad, x, w_a, lam, w_b, True, True, False, True)
    w_a[:, ::3], w_b[::3] = float("nan"), float("nan")
    assert torch.equal(kernels.rank1_linear(x, w_a, lam, w_b), clean)
    for got, want in zip(
        kernels.rank1_linear_backward(grad, x, w_a, lam, w_b, True, True, False, True),
        grads,
        strict=True,
    ):
        assert got is None or torch.equal(got, want)


def test_rank1_linear_whatever_runs_first(kernels):
    """More clients than the grid has blocks: what a block holds in shared memory is read by all
    before it takes the next client."""
    inputs = (
        normal(5, 9, 6),
        normal(5, 7, 33, seed=1),
        normal(5, 33, seed=2),
        normal(5, 33, 6, seed=3),
    )
    grad, results = normal(5, 9, 7, seed=4), []
    for order in (0, 1, 7):
        kernels.order(order)
        grads = kernels.rank1_linear_backward(grad, *inputs, True, True, True, True)
        results.append([kernels.rank1_linear(*inputs), *(g for g in grads if g is not None)])
    for other in results[1:]:
        assert len(other) == 5 and all(
            torch.equal(a, b) for a, b in zip(results[0], other, strict=True)
        )


def test_rank1_linear_empty(kernels):
    for b, i, f, o in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        x, w_a, lam, w_b = normal(b, i), normal(o, f), normal(f), normal(f, i)
        assert torch.equal(
            kernels.rank1_linear(x, w_a, lam, w_b), reference.rank1_linear(x, w_a, lam, w_b)
        )
        got = kernels.rank1_linear_backward(normal(b, o), x, w_a, lam, w_b, True, True, True, True)
        want = reference.rank1_linear_backward(
            normal(b, o), x, w_a, lam, w_b, True, True, True, True
        )
        assert all(g is not None and torch.equal(g, r) for g, r in zip(got, want, strict=True))


# --- sgd_step_ --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    s=st.sampled_from((1, 2, 17)),
    q=st.sampled_from(SIZES),
    has=st.tuples(*[st.booleans()] * 5),
    one_mask=st.booleans(),
    decay=st.sampled_from((0.0, 0.01)),
    shift=st.sampled_from(SHIFTS),
    gap=st.sampled_from(GAPS),
    seed=st.integers(0, 99),
)
def test_sgd_step(
    kernels,
    dtype,
    s,
    q,
    has,
    one_mask,
    decay,
    shift,
    gap,
    seed,
):
    def draw(k, rows=s, wanted=True):
        return (
            guarded(normal(rows, q, seed=seed + k, dtype=dtype), shift if k % 2 else 0, gap)
            if wanted
            else None
        )

    w, grad = draw(0), draw(1)
    assert w is not None and grad is not None
    correction, anchor, buffer = (
        draw(2, wanted=has[0]),
        draw(3, wanted=has[1]),
        draw(4, wanted=has[2]),
    )
    mask = draw(5, rows=1 if one_mask else s, wanted=has[3])
    if mask is not None:
        mask = (mask[0] if one_mask else mask).gt(0).to(dtype)
    mu_rows = (
        torch.rand(s, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        if has[4]
        else None
    )
    momentum = 0.9 if buffer is not None else 0.0
    other, other_buffer = w.clone(), None if buffer is None else buffer.clone()
    kernels.sgd_step_(w, grad, 0.1, correction, mask, 0.3, mu_rows, anchor, momentum, buffer, decay)
    reference.sgd_step_(
        other, grad, 0.1, correction, mask, 0.3, mu_rows, anchor, momentum, other_buffer, decay
    )
    tight = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(w, other, rtol=tight, atol=tight)
    assert intact(w)
    if buffer is not None:
        torch.testing.assert_close(buffer, other_buffer, rtol=tight, atol=tight)
        assert intact(buffer)


# --- what a GPU leaves open -------------------------------------------------


def test_the_order_of_the_threads_does_not_matter(kernels):
    """Backwards, shuffled, each warp running ahead as far as the barriers allow: the same bits, or
    a barrier is missing."""
    updates, dist, grad = normal(17, 1023), distances(3, 300, 1), normal(2, 5, 10, seed=9)
    x, w_a, lam, w_b = (
        normal(2, 5, 40),
        normal(10, 67, seed=1),
        normal(2, 67, seed=2),
        normal(67, 40, seed=3),
    )
    lam[:, ::3] = 0
    dense, index = (
        normal(20, 17, seed=1).double(),
        torch.randint(0, 17, (20, 5), generator=torch.Generator().manual_seed(1)),
    )

    def everything():
        mixed, few, chosen, w = (
            torch.empty(20, 1023),
            torch.empty(5, 1023),
            torch.empty(20, 1023),
            updates.clone(),
        )
        kernels.aggregate(updates, dense, None, None, 1.0, False, mixed)
        kernels.aggregate(updates, dense[:5].contiguous(), None, None, 1.0, False, few)
        kernels.aggregate(updates, dense[:, :5].contiguous(), index, None, 1.0, False, chosen)
        kernels.sgd_step_(w, updates, 0.1, None, None, 0.0, None, None, 0.0, None, 0.0)
        return [
            kernels.pairwise_sqdist(updates),
            kernels.pairwise_sqdist(updates * 1e25),
            mixed,
            few,
            chosen,
            w,
            *kernels.feddwa_weights(dist, 40),
            kernels.waffle_weights(dist, torch.tensor([0, 5, 7]), 0.7, 0.6, False),
            kernels.rank1_linear(x, w_a, lam, w_b),
            *kernels.rank1_linear_backward(grad, x, w_a, lam, w_b, True, True, True, True),
        ]

    first = everything()
    for order in (1, 2, 7):
        kernels.order(order)
        for k, (got, want) in enumerate(zip(everything(), first, strict=True)):
            assert got is not None and want is not None and torch.equal(got, want), (
                f"order {order} changes result {k}"
            )
