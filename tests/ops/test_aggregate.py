"""Tests of `aggregate`: exact results, and the memory of results."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from laws import close_mix, dtypes, identical, integers
from small import crossed
from tolerance import F16, F32, F64, FLOATS
from ugly import SIZES, randn, refuses

from pflcore import ops
from pflcore.ops import aggregate

NAN = torch.nan
isa = pytest.mark.usefixtures("isa")
kernels = pytest.mark.usefixtures("kernels")
both_forms = pytest.mark.parametrize("sparse", [False, True])
every_dtype = pytest.mark.parametrize("dtype", FLOATS)


# --- accuracy ---------------------------------------------------------------


@kernels
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("m", [1, 2, 3, 6, 7, 13])
def test_bits_do_not_depend_on_other_results_or_columns(dtype, m):
    """A number has the same bits however many results and columns there are.

    Kernels hold rows in a buffer or not, and take few or many results and columns at a
    time.
    """
    updates = randn(1, 10, 3 * 64 + 5).to(dtype)
    weight = randn(2, m, 10)
    base = randn(3, m, 3 * 64 + 5).to(dtype)

    whole = aggregate(updates, weight, base=base)

    for row in range(m):
        got = aggregate(updates, weight[row : row + 1], base=base[row])
        assert torch.equal(got[0], whole[row])
    for end in (1, 64, 65, 128):
        got = aggregate(updates[:, :end], weight, base=base[:, :end])
        assert torch.equal(got, whole[:, :end])
    out = base.clone()
    assert torch.equal(aggregate(updates, weight, base=out, out=out), whole)


@pytest.mark.deep("together they take seconds", quick=4)
@kernels
@pytest.mark.parametrize("n, dtype", crossed([15, 16, 29, 129], [F16, F32]))
def test_one_result_of_large_rows_has_the_same_bits(n, dtype):
    """One result has its bits among seven, where rows exceed the caches.

    A kernel reads many large rows a few at a time there. Two million columns of one
    row are results that are written past the caches.
    """
    columns = 2_100_000 if (n, dtype) == (16, F32) else 160_003
    updates = randn(1, n, columns).to(dtype)
    weight, base = randn(2, 7, n), randn(3, columns).to(dtype)

    whole = aggregate(updates, weight, base=base)

    assert torch.equal(aggregate(updates, weight[4:5], base=base), whole[4:5])
    assert torch.equal(aggregate(updates, weight[4:5]), aggregate(updates, weight)[4:5])
    home = torch.zeros(columns + 3, dtype=dtype)
    got = aggregate(updates, weight[4:5], base=base, out=home[3:][None])
    assert torch.equal(got, whole[4:5]) and not home[:3].any()


@isa
@every_dtype
def test_precise_survives_cancellation(dtype):
    """With precise=True, 1 + 1e8 - 1e8 is 1.

    A float32 sum would lose the 1.
    """
    large, one = (2.0**14, 2.0**-13) if dtype == F16 else (1e8, 1.0)
    updates = torch.tensor([[one], [large], [-large]]).expand(-1, 67).to(dtype)
    for index in (None, torch.tensor([[0, 1, 2], [2, 0, 1]])):
        got = aggregate(updates, torch.ones(2, 3), index, precise=True)
        assert torch.equal(got, torch.full((2, 67), one, dtype=dtype))


@kernels
@every_dtype
@pytest.mark.parametrize("n", [129, 1000, 20_000])
@pytest.mark.parametrize(
    "form", ["dense", "few results", "sparse", "sparse of many rows"]
)
def test_the_error_does_not_grow_with_the_clients(n, form, dtype):
    """A mean over many clients is as accurate as over few.

    All roundings of constant rows have the same direction.
    """
    updates = torch.full((1, 67), 0.7, dtype=dtype).expand(n, -1)
    weight = torch.full((7 if form == "dense" else 2, n), 1 / n, dtype=F64)
    index = torch.arange(n).expand(2, n) if form.startswith("sparse") else None
    if form == "sparse":  # the index names a few rows many times
        updates = updates[:50]
        index = index % 50
    got = aggregate(updates, weight, index, torch.ones(67)).double() - 1
    assert float((got - float(updates[0, 0])).abs().max()) <= 2e-6


@isa
@every_dtype
@pytest.mark.parametrize("m", [96, 97, 192, 193, 300])
@pytest.mark.parametrize("n", [128, 129, 257])
def test_results_are_right_in_every_block(m, n, dtype):
    """Results are exact at every block size, for integers.

    The kernels sum blocks of results and blocks of rows.
    """
    updates = integers(m, -1, 2, n, 67).to(dtype)
    weight = integers(n, -1, 2, m, n).to(F64)
    got = aggregate(updates, weight)
    assert torch.equal(got, (weight @ updates.double()).to(dtype))


def bits(narrow):
    """Every number of a 16-bit type."""
    return (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(narrow)[None]
    )


@kernels
@pytest.mark.parametrize(
    "narrow, flush", [(F16, False), (torch.bfloat16, False), (F16, True)]
)
def test_16_bit_floats_are_widened_and_rounded_as_torch_does(narrow, flush):
    """Conversions from and to 16-bit floats have torch's bits.

    That holds also where the user asks torch to flush subnormals of float32 to zero.
    Subnormals of float16 are normal numbers in float32, of the size of ordinary
    updates.
    """
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        every = bits(narrow)
        one = torch.ones(1, 1)
        identical(aggregate(every, one), every)
        ties = torch.tensor(
            [[0x1000], [0x8000], [0x0800], [-1], [1]], dtype=torch.int32
        )
        ties = every.float().view(torch.int32)[:, None] + ties
        random_bits = integers(0, -(2**31), 2**31, 1, 200_000).to(torch.int32)
        wide = torch.cat([random_bits, ties.reshape(1, -1)], 1).view(F32)
        wide = every.float() if flush else wide
        base = wide.to(narrow)
        identical(aggregate(torch.zeros_like(wide), one, base=base), base)
        identical(aggregate(wide, one, base=torch.zeros_like(base)), base)
        # The positive subnormals of float16.
        small = bits(F16)[:, 2**15 + 1 : 2**15 + 0x400].contiguous()
        want = float(small.double().square().sum())
        assert float(ops.pairwise_sqdist(small, 0 * small)) == pytest.approx(
            want, rel=1e-6
        )
    finally:
        torch.set_flush_denormal(False)


# --- properties -------------------------------------------------------------


@isa
@given(dtypes, st.sampled_from([2, 7, 20]), st.sampled_from(SIZES), st.integers(0, 99))
def test_a_weight_of_one_copies_its_row(dtype, n, p, seed):
    """A weight of one copies a row bit for bit."""
    rows = randn(seed, n, p, dtype=dtype)
    one = integers(seed, 0, n, 5, 1)
    assert torch.equal(aggregate(rows, torch.ones(5, 1), one), rows[one[:, 0]])
    assert torch.equal(aggregate(rows, torch.eye(n)), rows)


@isa
@every_dtype
@pytest.mark.parametrize("bad", [NAN, torch.inf])
def test_a_row_that_is_not_finite_shows_where_it_counts_alone(dtype, bad):
    updates = randn(1, 4, 131, dtype=dtype)
    updates[2, 5] = bad
    for weight, index, spoilt in (
        (torch.ones(2, 4), None, [[0, 5], [1, 5]]),
        (torch.ones(2, 1), torch.tensor([[2], [1]]), [[0, 5]]),
    ):
        got = aggregate(updates, weight, index)
        assert (~got.isfinite()).nonzero().tolist() == spoilt


@pytest.mark.deep("together they take seconds", quick=3)
@kernels
@pytest.mark.parametrize(
    "m, n, p", [(1, 7, 400_003), (13, 101, 70_001), (3, 2, 1_000_003)]
)
@both_forms
def test_a_column_has_the_same_bits_wherever_it_stands(m, n, p, sparse):
    updates = randn(0, n, p, dtype=F32)
    base = randn(2, m, p, dtype=F32)
    weight = randn(1, m, 5 if sparse else n, dtype=F32)
    index = integers(2, 0, n, m, 5) if sparse else None
    want = aggregate(updates, weight, index, base)
    out = torch.empty(m, p)
    assert torch.equal(aggregate(updates, weight, index, base, out=out), want)
    assert torch.equal(
        aggregate(updates[:, 77:], weight, index, base[:, 77:]), want[:, 77:]
    )


def test_gradients_of_float32_are_those_of_float64():
    """Gradients of float32 are those of float64, rounded once."""

    def gradients(dtype):
        shapes = (20, 67), (5, 20), (5, 67), (5, 67)
        *leaves, grad = (
            randn(k, *s, dtype=F32).to(dtype) for k, s in enumerate(shapes)
        )
        u, w, b = (t.requires_grad_() for t in leaves)
        return [
            g.double()
            for g in torch.autograd.grad(aggregate(u, w, base=b), (u, w, b), grad)
        ]

    torch.testing.assert_close(gradients(F32), gradients(F64), rtol=1e-7, atol=0)


# --- out --------------------------------------------------------------------


@pytest.mark.deep("together they take seconds", quick=4)
@isa
@pytest.mark.parametrize(
    "place, shift, sparse",
    crossed([(65, 0), (71, 40), (80, 5), (300_007, 5)], [0, 1, 15], [False, True]),
)
def test_large_results_leave_what_lies_between_their_rows(place, shift, sparse):
    """Large results do not overwrite the memory between their rows.

    Results of megabytes are written in whole cache lines, past the caches. The last
    cache line of a row may belong to other data too. The same holds where the base is
    the result itself.
    """
    p, gap = place
    m = (8 << 20) // (4 * p) + 100 if p < 100 else 7
    home = torch.full((16 + m * (p + gap),), 7.0)
    out = home[shift : shift + m * (p + gap)].view(m, p + gap)[:, :p]
    updates = randn(0, 5, p, dtype=F32)
    base = randn(4, p, dtype=F32)
    weight = randn(1, m, 2 if sparse else 5, dtype=F32)
    index = integers(2, 0, 5, m, 2) if sparse else None
    assert aggregate(updates, weight, index, base, 0.5, out=out) is out
    close_mix(out, updates, weight, index, base, 0.5)
    base = out.clone()
    aggregate(updates, weight, index, out, 0.5, out=out)
    close_mix(out, updates, weight, index, base, 0.5)
    out.fill_(7.0)
    assert (home == 7.0).all()


HOME = torch.ones(6, 6)
ARRAY = torch.ones(6, 6).numpy()  # each from_numpy makes a new storage
PAIR = torch.ones(2, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"updates": HOME[:2], "out": HOME[:2]},
        {"updates": HOME[:2], "out": HOME[1:3]},
        {"updates": HOME[1:3, :3], "out": HOME[:2, 2:5]},
        {"updates": PAIR, "weight": HOME[:2, :2], "out": HOME[:2, :2]},
        *(
            {"base": base, "out": HOME[:2]}
            for base in (HOME[0], HOME[1:3], HOME[::2][:2])
        ),
        {"updates": torch.from_numpy(ARRAY)[:2], "out": torch.from_numpy(ARRAY)[1:3]},
        {"base": torch.from_numpy(ARRAY)[:2], "out": torch.from_numpy(ARRAY)[1:3]},
        {"updates": torch.ones(2, 6, requires_grad=True), "out": torch.zeros(2, 6)},
        {"out": torch._neg_view(torch.zeros(2, 6))},
        {"out": torch.zeros(2, 6, dtype=torch.complex64).conj().imag},
    ],
)
def test_out_is_no_other_input(arguments):
    with refuses("aggregate", "out"):
        aggregate(**{"updates": torch.ones(2, 6), "weight": PAIR, **arguments})


def test_out_may_be_other_rows_of_the_same_memory():
    home = torch.ones(6, 6)
    array = np.ones((4, 7))
    aggregate(home[2:4], PAIR, base=home[4], out=home[:2])
    assert torch.equal(home[:2], torch.full((2, 6), 3.0))
    tail = torch.from_numpy(array[2:])
    aggregate(
        torch.ones(2, 7, dtype=F64), PAIR, base=tail, out=torch.from_numpy(array[2:])
    )
    assert torch.equal(tail, torch.full((2, 7), 3.0, dtype=F64))
    grad = torch.ones(2, 6, requires_grad=True)
    meta = torch.empty(2, 6, device="meta")
    with torch.no_grad():
        aggregate(grad, PAIR, out=torch.zeros(2, 6))
    assert aggregate(meta, PAIR.to("meta"), out=meta.clone()).is_meta


@pytest.mark.parametrize("dtype", [F32, F64])
def test_large_results_in_memory_at_an_odd_address(dtype):
    """As a memory map of a file with a header has it."""
    n = 3_000_000
    memory = bytearray(n * dtype.itemsize + 16)
    out = torch.frombuffer(memory, dtype=dtype, offset=1, count=n).view(1, n)
    updates, weight = randn(1, 2, n).to(dtype), randn(2, 1, 2)
    assert torch.equal(aggregate(updates, weight, out=out), aggregate(updates, weight))


def test_out_under_compile_is_refused_where_a_gradient_is_wanted():
    def mix(x):
        out = torch.empty(1, 2)
        ops.aggregate(x, torch.ones(1, 1), out=out)
        return (out * 3 + x).sum()

    x = torch.ones(1, 2, requires_grad=True)
    for call in (mix, torch.compile(mix, backend="aot_eager")):
        with refuses("aggregate", "out"):
            call(x)


def test_only_what_a_gradient_needs_is_kept():
    """The rows are far larger than all else."""
    updates, weight = randn(1, 3, 5), randn(2, 2, 3)
    base = torch.zeros(5, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        aggregate(updates, weight, base=base)
        assert not kept
        aggregate(updates, weight.requires_grad_(), base=base)
    assert [t.shape for t in kept] == [updates.shape]
