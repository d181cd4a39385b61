"""The compiled CPU kernels where they could go wrong: tails, alignment, strides, every instruction
set, any number of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pflcore import ops
from pflcore.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")

OPS = torch.ops.pflcore
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# a float32 sum of some 20 terms of size 1; float64 the same; one rounding of the result for the
# 16-bit types
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def gapped(rows, gap, shift):
    """The same rows, `gap` elements apart and `shift` elements off a 64-byte boundary, surrounded
    by NaN."""
    m, p = rows.shape
    room = torch.full((16 + m * (p + gap),), float("nan"), dtype=rows.dtype)
    view = room[shift : shift + m * (p + gap)].view(m, p + gap)[:, :p]
    view.copy_(rows)
    return view


def close(got, want, tolerance):
    return bool(
        torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    )


# --- aggregate --------------------------------------------------------------


@given(
    n=st.sampled_from([1, 2, 7, 13, 31]),
    m=st.sampled_from([1, 2, 5, 6, 7, 13, 23]),
    p=st.sampled_from([1, 3, 15, 16, 17, 63, 64, 65, 127, 131, 1009]),
    gap=st.integers(0, 3),
    shift=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    base=st.sampled_from([None, 1, 2]),
    base_dtype=st.sampled_from(DTYPES),
    precise=st.booleans(),
    sparse=st.booleans(),
)
def test_aggregate_is_the_reference(n, m, p, gap, shift, dtype, base, base_dtype, precise, sparse):
    updates = gapped(normal(n, p, dtype=dtype), gap, shift)
    weight = torch.softmax(normal(m, n if not sparse else min(n, 3), seed=1), 1)
    # duplicates too
    index = (
        torch.randint(n, weight.shape, generator=torch.Generator().manual_seed(2))
        if sparse
        else None
    )
    start = None if base is None else gapped(normal(m, p, seed=3, dtype=base_dtype), gap, shift)
    if base == 1 and start is not None:
        start = start[0]
    got = ops.aggregate(updates, weight, index, start, 0.7, precise=precise)
    want = reference.aggregate(
        updates.double(), weight, index, None if start is None else start.double(), 0.7, True
    )
    assert got.dtype == (dtype if start is None else start.dtype)
    summed = torch.float64 if precise or torch.float64 in (dtype, got.dtype) else torch.float32
    assert close(got, want, max(TOLERANCE[got.dtype], TOLERANCE[summed]))


@pytest.mark.parametrize("shift", [0, 1, 15])
@pytest.mark.parametrize("sparse", [False, True])
def test_aggregate_writes_large_results_past_the_caches_and_nothing_beside_them(sparse, shift):
    m, n, p, gap = 7, 5, 300_007, 5  # 8.4 MB: whole lines of 64 bytes, begun and ended anywhere
    updates, weight = normal(n, p), normal(m, 2 if sparse else n, seed=1)
    index = (
        torch.randint(n, weight.shape, generator=torch.Generator().manual_seed(2))
        if sparse
        else None
    )
    base = normal(p, seed=4)
    room = torch.full((16 + m * (p + gap),), 7.0)
    out = room[shift : shift + m * (p + gap)].view(m, p + gap)[:, :p]
    assert ops.aggregate(updates, weight, index, base, 0.5, out=out) is out
    assert close(
        out,
        reference.aggregate(updates.double(), weight.double(), index, base.double(), 0.5, True),
        1e-5,
    )
    out.fill_(7.0)
    assert torch.equal(room, torch.full_like(room, 7.0))


@pytest.mark.parametrize(
    ("m", "n", "p"), [(1, 7, 400_003), (20, 20, 120_011), (13, 101, 70_001), (3, 2, 1_000_003)]
)
@pytest.mark.parametrize("sparse", [False, True])
def test_aggregate_is_bitwise_the_same_for_any_number_of_threads(m, n, p, sparse):
    updates, weight, base = (
        normal(n, p),
        normal(m, 5 if sparse else n, seed=1),
        normal(m, p, seed=2),
    )
    index = (
        torch.randint(n, weight.shape, generator=torch.Generator().manual_seed(2))
        if sparse
        else None
    )
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [
            ops.aggregate(updates, weight, index, base),
            ops.aggregate(updates, weight, index, base, out=torch.empty(m, p)),
        ]
    assert all(torch.equal(results[0], r) for r in results[1:])
    # and column by column, wherever a column stands
    assert torch.equal(
        ops.aggregate(updates[:, 77:], weight, index, base[:, 77:]), results[0][:, 77:]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_aggregate_does_not_read_rows_of_weight_zero(dtype):
    updates = normal(6, 1003, dtype=dtype)
    updates[2] = float("nan")
    updates[4] = float("inf")
    weight = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    index = torch.tensor([[0, 1, 2], [2, 4, 2], [5, 4, 2]])
    got = ops.aggregate(updates, weight, index)
    want = torch.stack(
        [
            0.25 * updates[0].double() + 0.75 * updates[1].double(),
            torch.zeros(1003).double(),
            updates[5].double(),
        ]
    )
    assert close(got, want, TOLERANCE[dtype])
    assert ops.aggregate(updates, weight, index, base=updates[0])[1].equal(updates[0])
    assert ops.aggregate(updates, weight, index, lr=0.0).isfinite().all(), (
        "nothing is read where lr is 0"
    )


def test_aggregate_shows_a_row_that_is_not_finite_where_it_counts():
    updates = normal(6, 203)
    updates[2, 100] = float("nan")
    got = ops.aggregate(updates, torch.full((4, 6), 1 / 6))
    assert got.isnan().sum() == 4
    assert got[:, 100].isnan().all()


@pytest.mark.parametrize("p", [5, 64, 3_000_001])
def test_aggregate_into_its_own_base(p):
    updates, weight, base = normal(3, p), torch.tensor([[0.5, 0.25, 0.25]]), normal(1, p, seed=1)
    want = ops.aggregate(updates, weight, base=base, lr=0.5)
    assert ops.aggregate(updates, weight, base=base, lr=0.5, out=base) is base
    assert torch.equal(base, want)


def test_aggregate_refuses_a_result_that_is_an_input():
    room = normal(8, 50)
    weight = torch.full((4, 4), 0.25)
    with pytest.raises(ValueError, match="out"):
        ops.aggregate(room[:4], weight, out=room[:4])
    with pytest.raises(ValueError, match="out"):
        ops.aggregate(room[:4], weight, out=room[3:7])
    square = normal(4, 4)
    with pytest.raises(ValueError, match="out"):
        ops.aggregate(normal(4, 4, seed=1), square, out=square)


@pytest.mark.parametrize(("m", "n", "p"), [(0, 3, 5), (2, 3, 0), (2, 0, 5)])
def test_aggregate_of_nothing(m, n, p):
    got = ops.aggregate(torch.ones(n, p), torch.ones(m, n))
    assert got.shape == (m, p)
    assert torch.equal(got, torch.full((m, p), float(n)))


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_16_bit_floats_are_widened_and_rounded_as_torch_does(narrow):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(narrow)[None]
    one = torch.ones(1, 1)
    same = ops.aggregate(every, one)
    assert torch.equal(same.nan_to_num(nan=1.25), every.nan_to_num(nan=1.25))
    assert torch.equal(same.isnan(), every.isnan())
    bits = torch.randint(
        -(2**31), 2**31, (1, 200_000), generator=torch.Generator().manual_seed(0), dtype=torch.int64
    ).to(torch.int32)
    ties = (
        every.float().view(torch.int32)[:, None]
        + torch.tensor([[0x1000], [0x8000], [0x0800], [-1], [1]], dtype=torch.int32)
    ).reshape(1, -1)
    wide = torch.cat([bits, ties], 1).view(torch.float32)
    got = ops.aggregate(torch.zeros_like(wide), one, base=wide.to(narrow))
    assert torch.equal(got.nan_to_num(nan=1.25), wide.to(narrow).nan_to_num(nan=1.25))
    rounded = ops.aggregate(wide, one, base=torch.zeros(wide.shape[1], dtype=narrow))
    assert torch.equal(rounded.nan_to_num(nan=1.25), wide.to(narrow).nan_to_num(nan=1.25))


# --- rank1_linear -----------------------------------------------------------


def factors(lead, b, i, f, o, active, dtype=torch.float64, shared=""):
    """x, w_a, lam, w_b; those named in `shared` (x, a, l, b) have no leading axis."""
    shapes = {"x": (b, i), "a": (o, f), "l": (f,), "b": (f, i)}
    out = [
        normal(*(() if name in shared else lead), *shape, seed=k, dtype=dtype)
        for k, (name, shape) in enumerate(shapes.items())
    ]
    mask = torch.rand(out[2].shape, generator=torch.Generator().manual_seed(9)) < active
    out[2] = torch.where(mask, out[2], 0.0)
    return out


@given(
    lead=st.sampled_from([(), (1,), (3,)]),
    b=st.sampled_from([0, 1, 2, 3, 5, 11, 17]),
    i=st.sampled_from([1, 7, 16, 33, 64]),
    f=st.sampled_from([1, 5, 16, 19, 40]),
    o=st.sampled_from([1, 3, 10, 16, 37]),
    active=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shared=st.sampled_from(["", "x", "a", "l", "b", "alb", "xalb", "ab"]),
    need=st.tuples(*[st.booleans()] * 4),
)
def test_rank1_is_the_reference(
    lead,
    b,
    i,
    f,
    o,
    active,
    dtype,
    shared,
    need,
):
    inputs = factors(lead, b, i, f, o, active, dtype, shared if lead else "")
    if lead and shared == "xalb":
        inputs[0] = inputs[0].expand(*lead, b, i)  # a clients' axis of stride 0
    wide = [t.double() for t in inputs]
    # sums of up to 3 * 17 * 64 terms of size 1
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4
    want = reference.rank1_linear(*wide)
    assert close(OPS.rank1_linear(*inputs), want, tolerance)
    grad = normal(*want.shape, seed=5, dtype=dtype)
    got = OPS.rank1_linear_backward(grad, *inputs, *need)
    for g, w, t, wanted in zip(
        got, reference.rank1_linear_backward(grad.double(), *wide, *need), inputs, need, strict=True
    ):
        assert g.shape == (t.shape if wanted else (0,))
        assert close(g, w, tolerance)


@pytest.mark.parametrize("clients", [(), (5,)])
@pytest.mark.parametrize("active", [0.3, 1.0])
def test_rank1_is_bitwise_the_same_for_any_number_of_threads(clients, active):
    inputs = factors(clients, 301, 401, 97, 103, active, torch.float32)
    grad = normal(*clients, 301, 103, seed=5)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(
            (
                OPS.rank1_linear(*inputs),
                *OPS.rank1_linear_backward(grad, *inputs, True, True, False, True),
            )
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rank1_factors_that_are_off_are_not_used():
    x, w_a, lam, w_b = factors((), 6, 30, 21, 9, 0.5, torch.float32)
    off = lam == 0
    assert 0 < off.sum() < 21
    bad_a, bad_b = w_a.clone(), w_b.clone()
    bad_a[:, off], bad_b[off] = float("nan"), float("inf")
    assert torch.equal(OPS.rank1_linear(x, bad_a, lam, bad_b), OPS.rank1_linear(x, w_a, lam, w_b))
    grad = normal(6, 9, seed=5)
    got = OPS.rank1_linear_backward(grad, x, bad_a, lam, bad_b, True, True, False, True)
    want = OPS.rank1_linear_backward(grad, x, w_a, lam, w_b, True, True, False, True)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert (got[1][:, off] == 0).all() and (got[3][off] == 0).all()


@pytest.mark.parametrize("gap", [0, 1, 5])
def test_rank1_takes_rows_of_any_stride(gap):
    inputs = factors((2,), 7, 33, 12, 10, 0.6, torch.float32)
    apart = [
        t if t.dim() == 2 else torch.nn.functional.pad(t, (0, gap))[..., : t.shape[-1]]
        for t in inputs
    ]
    assert torch.equal(OPS.rank1_linear(*apart), OPS.rank1_linear(*inputs))
    grad = normal(2, 7, 10, seed=5)
    for a, b in zip(
        OPS.rank1_linear_backward(grad, *apart, *[True] * 4),
        OPS.rank1_linear_backward(grad, *inputs, *[True] * 4),
        strict=True,
    ):
        assert torch.equal(a, b)


# --- sgd_step_ --------------------------------------------------------------


@given(
    s=st.sampled_from([1, 2, 5]),
    q=st.sampled_from([1, 3, 4, 15, 16, 17, 67, 131, 16_384, 16_411]),
    gap=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shift=st.booleans(),
    mask=st.sampled_from([None, 1, 2]),
    prox=st.sampled_from([None, 0.3, "rows"]),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
)
def test_sgd_step_is_the_reference(
    s,
    q,
    gap,
    dtype,
    shift,
    mask,
    prox,
    momentum,
    decay,
):
    def rows(seed):
        return gapped(normal(s, q, seed=seed, dtype=dtype), gap, seed % 3)

    grad = rows(1)
    held = None if mask is None else (rows(2) > 0).to(dtype)
    rates = torch.linspace(0, 1, s, dtype=dtype)
    w, buffer, anchor, correction = rows(4), rows(5), rows(6), rows(3) if shift else None
    want_w, want_buffer = w.double(), buffer.double()
    ops.sgd_step_(
        w,
        grad,
        0.1,
        correction,
        held if mask != 1 or held is None else held[0],
        rates if prox == "rows" else prox or 0.0,
        None if prox is None else anchor,
        momentum,
        buffer if momentum else None,
        decay,
    )
    reference.sgd_step_(
        want_w,
        grad.double(),
        0.1,
        None if correction is None else correction.double(),
        None if held is None else (held[0] if mask == 1 else held).double(),
        0.3,
        rates.double() if prox == "rows" else None,
        None if prox is None else anchor.double(),
        momentum,
        want_buffer if momentum else None,
        decay,
    )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    assert close(w, want_w, tolerance)
    assert close(buffer, want_buffer, tolerance)
    assert (
        w.storage_offset() == 4 % 3
        and w._base is not None
        and w._base.isnan().sum() == w._base.numel() - s * q
    ), "nothing beside the rows"


def test_sgd_step_is_bitwise_the_same_for_any_number_of_threads_and_clients():
    w, grad, anchor, mask = (
        normal(3, 200_003),
        normal(3, 200_003, seed=1),
        normal(3, 200_003, seed=2),
        (normal(200_003, seed=3) > 0).float(),
    )
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = w.clone()
        ops.sgd_step_(out, grad, 0.1, mask=mask, mu=0.5, anchor=anchor)
        results.append(out)
    alone = w[1:2].clone()
    ops.sgd_step_(alone, grad[1:2], 0.1, mask=mask, mu=0.5, anchor=anchor[1:2])
    assert (
        torch.equal(results[0], results[1])
        and torch.equal(results[0], results[2])
        and torch.equal(alone[0], results[0][1])
    )


# --- float16 ----------------------------------------------------------------


@pytest.fixture
def flushed():
    """float32 subnormals count as zero, as a user may ask torch for."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    yield
    torch.set_flush_denormal(False)


def test_every_float16_is_read_as_it_is(flushed):
    """Subnormals too, the size of ordinary updates: in float32 they are normal numbers."""
    half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    wide = half.float()
    got = ops.aggregate(half[None], torch.ones(1, 1), base=torch.zeros(1 << 16))[0]
    assert torch.equal(got.isnan(), wide.isnan()) and torch.equal(
        got.nan_to_num(0.0), wide.nan_to_num(0.0)
    )
    small = half[1:0x400].contiguous()  # all positive subnormals
    want = small.double().square().sum()
    assert abs(
        float(ops.pairwise_sqdist(small[None], torch.zeros_like(small)[None]) - want)
    ) <= 1e-6 * float(want)


def test_a_mean_of_small_float16_updates(flushed):
    updates = torch.full((4, 100), 1e-5, dtype=torch.float16)
    assert torch.equal(ops.aggregate(updates, torch.full((2, 4), 0.25)), updates[:2])


# --- far from the ordinary --------------------------------------------------


@pytest.mark.parametrize("n", [2, 9, 70])
@pytest.mark.parametrize("at", ["everywhere", "in the last columns", "in the first columns"])
def test_tiny_distances_over_many_columns(n, at):
    """What is done again in float64 is all of the row, however many blocks it has."""
    p = 60_000 if n < 70 else 9_000
    a = normal(n, p) * 1e-22
    if at != "everywhere":
        a[:, : p - 300 if "last" in at else p] = 0
    if "first" in at:
        a[:, :300] = normal(n, 300, seed=1) * 1e-22
    want = reference.pairwise_sqdist(a, None)
    assert float(want.max()) < 1e-30 and bool((want + torch.eye(n) > 0).all())
    for got in (ops.pairwise_sqdist(a), ops.pairwise_sqdist(a, a)):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [160, 192, 5760])
def test_constant_rows_whose_roundings_all_point_one_way(p):
    value = (1 + torch.arange(500, dtype=torch.float32) / 500)[:, None]
    got = ops.pairwise_sqdist(value.expand(-1, p), torch.zeros(1, p))
    torch.testing.assert_close(got, value.double().square() * p, rtol=9.6e-7, atol=0)


def test_squares_that_float32_holds_badly():
    """1e-41 has three digits in float32, though a sum of many is not small itself."""
    a = torch.zeros(3, 300_000)
    a[1], a[2] = 3.3e-21, 6.1e-21
    want = reference.pairwise_sqdist(a, None)
    assert 1e-36 < float(want[0, 1]) < 1e-30
    torch.testing.assert_close(ops.pairwise_sqdist(a), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [65, 71, 79, 80])
@pytest.mark.parametrize("shift", [0, 1, 15])
def test_large_results_leave_what_lies_between_their_rows(p, shift):
    """Results of megabytes are written in whole cache lines: the line that a row ends in belongs to
    others, too."""
    m = (8 << 20) // (4 * p) + 100
    home = torch.full((m, p + 40), 7.0)
    out = home[:, shift : shift + p]
    updates, index = normal(5, p), torch.arange(m)[:, None] % 5
    ops.aggregate(updates, torch.ones(m, 1), index, out=out)
    assert torch.equal(out, updates[index[:, 0]])
    assert bool((home[:, :shift] == 7).all()) and bool((home[:, shift + p :] == 7).all())


@pytest.mark.parametrize("gapped", ["w", "grad", "shift", "anchor", "mask", "buffer"])
def test_sgd_step_with_one_row_stride_unlike_the_others(gapped):
    t = {
        name: normal(3, 37, seed=k)
        for k, name in enumerate(("w", "grad", "shift", "anchor", "mask", "buffer"))
    }
    want = {name: v.double() for name, v in t.items()}
    reference.sgd_step_(
        want["w"],
        want["grad"],
        0.1,
        want["shift"],
        want["mask"],
        0.5,
        None,
        want["anchor"],
        0.9,
        want["buffer"],
        0.01,
    )
    home = torch.full((3, 45), 7.0)
    home[:, 3:40] = t[gapped]
    t[gapped] = home[:, 3:40]
    ops.sgd_step_(
        t["w"], t["grad"], 0.1, t["shift"], t["mask"], 0.5, t["anchor"], 0.9, t["buffer"], 0.01
    )
    assert close(t["w"], want["w"], 1e-5) and close(t["buffer"], want["buffer"], 1e-5)
    assert bool((home[:, :3] == 7).all()) and bool((home[:, 40:] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank1_a_factor_that_is_off_but_may_be_turned_on(dtype):
    """Where lam's gradient is wanted all factors are computed; one that is off still adds nothing
    to the other gradients."""
    x, w_a, lam, w_b = (
        normal(*s, seed=k, dtype=dtype) for k, s in enumerate([(5, 9), (7, 6), (6,), (6, 9)])
    )
    grad = normal(5, 7, seed=8, dtype=dtype)
    lam[2] = lam[5] = 0
    want = OPS.rank1_linear_backward(grad, x, w_a, lam, w_b, True, True, True, True)
    bad_a, bad_b = w_a.clone(), w_b.clone()
    bad_a[:, 2], bad_b[5] = torch.nan, torch.inf
    got = OPS.rank1_linear_backward(grad, x, bad_a, lam, w_b, True, True, True, True)
    assert (
        torch.equal(got[0], want[0])
        and torch.equal(got[1], want[1])
        and torch.equal(got[3], want[3])
    )
    got = OPS.rank1_linear_backward(grad, x, w_a, lam, bad_b, True, True, True, True)
    assert torch.equal(got[1], want[1]) and torch.equal(got[3], want[3])
    on = lam != 0
    assert torch.equal(got[2][on], want[2][on]) and not bool(got[2][5].isfinite())


@pytest.mark.parametrize("k", [31, 32, 33, 34])
def test_feddwa_around_the_number_that_is_held_in_registers(k):
    d = normal(3, 60, dtype=torch.float64).square()
    d[1, ::2] = d[1, 0]
    for n in (k, k + 1, 60):
        got, want = ops.feddwa_weights(d[:, :n], k), reference.feddwa_weights(d[:, :n], k)
        assert torch.equal(got.index, want[1])
        torch.testing.assert_close(got.weight, want[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("gap", [1e-9, 1e-10, 1e-11])
def test_waffle_distances_that_differ_by_little_are_no_tie(gap):
    d = torch.tensor([0.0, 1.0, 1.0 + gap / 2, 1.0 + gap], dtype=torch.float64)
    low, high = d[1], d[3]
    s = low / high * (1 - 0.6)
    raw = (0.6 - ((d[1:] - low) / (high - low) + s) / (1 + s)).clamp(min=0)
    want = torch.cat([torch.tensor([0.6], dtype=torch.float64), raw])
    for tie in ("closed", "uniform"):
        torch.testing.assert_close(
            ops.waffle_weights(d, 0, 0.6, tie=tie), want / want.sum(), rtol=1e-5, atol=1e-12
        )
