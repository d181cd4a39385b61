"""Tests of `pairwise_sqdist`: accuracy, bits and gradients.

The bits of a distance do not depend on the other rows. `isa` runs a test on every
instruction set that the machine has.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from laws import exact, integers, listed
from tolerance import BF16, F16, F32, F64, FLOATS, assert_close
from ugly import LAYOUTS, lay, randn

from pflcore.ops import pairwise_sqdist, reference

isa = pytest.mark.usefixtures("isa")
every_dtype = pytest.mark.parametrize("dtype", FLOATS)


# accuracy ---------------------------------------------------------------------


@isa
@every_dtype
def test_constant_rows(dtype):
    """Distances of constant rows are accurate.

    The rounding errors of equal addends do not cancel.
    """
    columns = 1_000_003  # prime: no block size divides it
    levels = torch.tensor([1.0, 1.1, 0.1, 1 / 3, -0.7], dtype=F64).to(dtype)[:, None]
    rows = levels.expand(-1, columns).contiguous()

    got = pairwise_sqdist(rows)

    want = columns * exact(levels)
    assert_close(got, want, "sqdist", dtype)


@isa
@pytest.mark.parametrize("columns", [160, 192, 5760])
def test_constant_rows_against_zero(columns):
    values = (1 + torch.arange(500, dtype=F32) / 500)[:, None]

    got = pairwise_sqdist(values.expand(-1, columns), torch.zeros(1, columns))

    want = values.double().square() * columns
    torch.testing.assert_close(got, want, rtol=9.6e-7, atol=0)


@isa
@pytest.mark.unless(lambda isa: isa == "references")  # they sum in float64
def test_the_worst_error_is_that_of_sixteen_roundings():
    """The bound of csrc/cpu/sqdist_tile.h is met, and nearly reached.

    In a float32 sum of 160 products the first one is rounded up in its difference,
    which counts twice, and in its square. Each of the 9 products after it in its lane
    is a little more than half the last place of the sum, and so is the sum of each
    lane that is added to this one. All of 16 roundings go up by nearly 2^-24.
    """
    half_place = 2.0**-12 * (1 + 2.0**-11)  # its square is 2^-24 (1 + 2^-10)
    a = torch.zeros(1, 160, dtype=F64)
    a[0, 0] = 1 + 2.0**-12
    a[0, 16::16] = half_place
    a[0, [8, 4, 2, 1]] = half_place
    b = torch.zeros(1, 160, dtype=F64)
    b[0, 0] = -(2.0**-24) * (1 + 2.0**-16)

    got = pairwise_sqdist(a.float(), b.float()).item()

    want = (a - b).square().sum().item()
    assert 15.9 < (got - want) / want * 2**24 < 16


@isa
@pytest.mark.unless(lambda isa: isa == "references")
@pytest.mark.parametrize("columns", [1, 160, 547])
def test_instruction_sets_sum_in_one_order(columns):
    """The order of the additions is that of 16 lanes of 10 products each.

    The numbers have 8 digits, so that a product is exact, with or without fused
    multiply-adds.
    """
    rows = randn(1, 3, columns, dtype=BF16) * 2.0 ** integers(2, -6, 7, 1, columns)
    rows = rows.bfloat16()

    got = pairwise_sqdist(rows, torch.zeros(1, columns, dtype=BF16))

    squares = torch.nn.functional.pad(rows.float().square(), (0, -columns % 160))
    want = torch.zeros(3, 1, dtype=F64)
    for group in squares.split(160, 1):
        lanes = torch.zeros(3, 16)
        for products in group.split(16, 1):
            lanes = lanes + products
        while lanes.shape[1] > 1:
            low, high = lanes.chunk(2, 1)
            lanes = low + high
        want += lanes.double()
    assert torch.equal(got, want)


@isa
@pytest.mark.parametrize("n, columns", [(2, 60_000), (9, 60_000), (70, 9_000)])
@pytest.mark.parametrize("part", [slice(None), slice(-300, None), slice(300)])
def test_underflowing_squares(n, columns, part):
    """Distances are accurate where squares underflow in float32.

    A kernel then sums the whole row in float64, wherever those columns stand.
    """
    rows = torch.zeros(n, columns)
    rows[:, part] = randn(0, n, columns, dtype=F32)[:, part] * 1e-22

    assert_tiny_distances(rows)


@isa
def test_denormal_squares():
    """Distances are accurate where squares are subnormal.

    1e-41 has three digits in float32, although the sum of many such squares is normal.
    """
    values = torch.tensor([0, 3.3e-21, 6.1e-21])[:, None]

    assert_tiny_distances(values.expand(-1, 300_000))


def assert_tiny_distances(rows):
    want = reference.pairwise_sqdist(rows, None)
    assert 0 < float(want.max()) < 1e-30
    torch.testing.assert_close(pairwise_sqdist(rows), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(pairwise_sqdist(rows, rows), want, rtol=1e-6, atol=0)


# bits -------------------------------------------------------------------------

SHAPES = [  # m, n, columns, pairs listed for each row
    (2, 300, 700, 290),
    (150, 133, 1031, 3),
    (3, 5, 20_011, 4),
    (40, 40, 3001, 129),
    (7, 7, 67, 9),
    (2, 7, 1, 3),
]
every_shape = pytest.mark.parametrize("m, n, columns, pairs", SHAPES)


def matrices(m, n, columns, dtype):
    """Two matrices with close rows and tiny rows.

    Some rows are close to each other. The squares of the tiny rows underflow.
    """
    a = randn(1, m, columns, dtype=dtype)
    b = randn(2, n, columns, dtype=dtype)
    if dtype is not F16:
        b[::2] = a[0] * (1 + 2**-7)
        a[1] = a[1] * 1e-25
        b[1] = b[1] * 1e-25
    return a, b


@isa
@every_dtype
@every_shape
def test_matches_reference(dtype, m, n, columns, pairs):
    a, b = matrices(m, n, columns, dtype)

    got = pairwise_sqdist(a, b)

    want = reference.pairwise_sqdist(a, b)
    assert_close(got, want, "sqdist", dtype)


@isa
@every_dtype
@every_shape
def test_bits_do_not_depend_on_order_or_layout(dtype, m, n, columns, pairs):
    a, b = matrices(m, n, columns, dtype)
    order_a = torch.randperm(m)
    order_b = torch.randperm(n)
    symmetric = pairwise_sqdist(a)
    full = pairwise_sqdist(a, b)

    for layout in LAYOUTS:
        shuffled = lay(a[order_a], layout)

        got_symmetric = pairwise_sqdist(shuffled)
        got_full = pairwise_sqdist(shuffled, b[order_b])

        assert torch.equal(got_symmetric, symmetric[order_a][:, order_a]), layout
        assert torch.equal(got_full, full[order_a][:, order_b]), layout


@isa
@every_dtype
@every_shape
def test_bits_do_not_depend_on_the_other_rows(dtype, m, n, columns, pairs):
    a, b = matrices(m, n, columns, dtype)
    full = pairwise_sqdist(a, b)
    assert torch.equal(pairwise_sqdist(a[1:], b[1:5]), full[1:, 1:5])
    assert torch.equal(pairwise_sqdist(a[1:2], b), full[1:2])
    assert torch.equal(pairwise_sqdist(a, b[1:2]), full[:, 1:2])


@isa
@every_dtype
@pytest.mark.parametrize("columns", [1, 159, 639, 640, 641, 1440, 2560, 20_011])
def test_a_pair_alone_has_the_bits_of_a_pair_among_others(dtype, columns):
    """A kernel takes one pair alone by four groups of 160 columns at a time."""
    a, b = matrices(5, 6, columns, dtype)
    among = pairwise_sqdist(a)
    two = pairwise_sqdist(a[2:4])
    assert torch.equal(two, among[2:4, 2:4])
    assert torch.equal(pairwise_sqdist(a[2:3], a[3:4]), among[2:3, 3:4])

    full = pairwise_sqdist(a, b)
    index = torch.tensor([[4], [0], [-1], [5], [1]])
    assert torch.equal(pairwise_sqdist(a[1:2], b[3:4]), full[1:2, 3:4])
    assert torch.equal(pairwise_sqdist(a, b, index), listed(full, index))


@isa
@every_dtype
@every_shape
def test_swapped_matrices_give_the_transpose(dtype, m, n, columns, pairs):
    a, b = matrices(m, n, columns, dtype)
    assert torch.equal(pairwise_sqdist(b, a), pairwise_sqdist(a, b).T)


@isa
@every_dtype
@every_shape
def test_one_matrix_has_the_bits_of_two(dtype, m, n, columns, pairs):
    """Distances within one matrix have the bits of two equal matrices.

    The diagonal is an exception: it is 0 without being computed.
    """
    a, _ = matrices(m, n, columns, dtype)
    off_diagonal = ~torch.eye(m, dtype=torch.bool)

    got = pairwise_sqdist(a)

    want = pairwise_sqdist(a, a.clone())
    assert torch.equal(got[off_diagonal], want[off_diagonal])


@isa
@pytest.mark.unless(lambda isa: isa == "references")  # they have no such way
@every_dtype
@given(st.data())
def test_the_same_operand_twice_has_the_bits_of_two(dtype, data):
    """A kernel that takes each pair of one matrix once changes no bit.

    The same operand is the same elements in the same memory. A matrix that shares
    memory and shape with another, but not its strides or its first element, is not.
    """
    m = data.draw(st.sampled_from([1, 2, 5, 17, 50, 133]))
    columns = data.draw(st.sampled_from([1, 17, 160, 700]))
    rows = randn(data.draw(st.integers(0, 99)), m + 1, columns, dtype=dtype)
    largest = torch.finfo(dtype).max
    bad = data.draw(st.sampled_from([0.0, torch.nan, torch.inf, largest]))
    is_bad = integers(m, 0, data.draw(st.sampled_from([1, 3])), m + 1) == 0
    rows[is_bad, columns // 2] = bad
    rows = lay(rows, data.draw(st.sampled_from(LAYOUTS)))
    a = rows[:m]
    square = rows[:m, :m]
    others = [a, a[:], a.detach(), rows[1:], a[:1].expand(m, -1)]
    pairs = [(a, other) for other in others] + [(square, square.T), (others[-1],) * 2]

    for left, right in pairs:
        if left.shape != right.shape:
            continue
        got = pairwise_sqdist(left, right).nan_to_num(nan=-1.0, posinf=torch.inf)

        want = pairwise_sqdist(left.clone(), right.clone())
        assert torch.equal(got, want.nan_to_num(nan=-1.0, posinf=torch.inf))


@isa
@every_dtype
@every_shape
def test_listed_pairs_have_the_bits_of_the_matrix(dtype, m, n, columns, pairs):
    """Listed pairs have the bits of the matrix.

    Some lists are longer than the kernel's window.
    """
    a, b = matrices(m, n, columns, dtype)
    index = integers(3, -1, n, m, pairs)

    got = pairwise_sqdist(a, b, index)

    assert torch.equal(got, listed(pairwise_sqdist(a, b), index))


@isa
@every_dtype
@every_shape
def test_equal_rows_have_distance_zero(dtype, m, n, columns, pairs):
    a, _ = matrices(m, n, columns, dtype)
    assert not pairwise_sqdist(a[:1].expand(5, -1)).any()


@isa
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("columns", [1, 67, 1031])
def test_non_finite_row_changes_no_other_distance(dtype, bad, columns):
    rows = randn(2, 7, columns, dtype=dtype)
    others = torch.arange(7) != 3
    want = pairwise_sqdist(rows)[others][:, others]

    rows[3, columns // 2] = bad
    got = pairwise_sqdist(rows)[others][:, others]

    assert torch.equal(got, want)


@isa
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_row_is_not_at_zero_from_itself(dtype, bad):
    """With `b`, a non-finite row has a NaN distance from itself.

    Inf - Inf is NaN, and with `b` the op cannot know that this is the diagonal.
    """
    rows = randn(2, 7, 67, dtype=dtype)
    rows[3, 33] = bad

    got = pairwise_sqdist(rows, rows)

    assert bool(got[3, 3].isnan())


# gradient ---------------------------------------------------------------------


def test_gradient_of_close_rows():
    """The gradient of close rows is accurate.

    2 (a_i - b_j) must not be computed as a difference of two products, because float32
    would lose all digits.
    """
    rows = (1.0 + 1e-4 * randn(1, 4, 67)).float().requires_grad_()

    (got,) = torch.autograd.grad(pairwise_sqdist(rows).sum(), rows)

    values = rows.detach().double()
    want = 4 * (4 * values - values.sum(0))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-9)


def bad_rows(bad):
    rows = randn(2, 3, 5)
    rows[1, 2] = bad
    return rows.requires_grad_()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gradient_ignores_bad_rows_outside_the_loss(bad):
    a = randn(1, 4, 5).requires_grad_()
    b = bad_rows(bad)
    good = torch.tensor([0, 2])

    got = torch.autograd.grad(pairwise_sqdist(a, b)[:, good].sum(), (a, b))

    want = torch.autograd.grad(pairwise_sqdist(a, b[good]).sum(), (a, b))
    assert all(bool(grad.isfinite().all()) for grad in (*got, *want))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("by_index", [False, True])
def test_gradient_of_one_pair(bad, by_index):
    """Padding and unlisted pairs add nothing to a gradient."""
    rows = bad_rows(bad)
    index = torch.tensor([[2, 0], [-1, -1], [0, -1]])
    if by_index:
        distance = pairwise_sqdist(rows, index=index)[2]
    else:
        distance = pairwise_sqdist(rows)[0, 2]

    (got,) = torch.autograd.grad(distance, rows, torch.ones_like(distance))

    torch.testing.assert_close(got[0], 2 * (rows[0] - rows[2]).detach())
    assert not got[1].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gradient_of_a_loss_with_bad_pairs_is_nan(bad):
    rows = bad_rows(bad)

    (got,) = torch.autograd.grad(pairwise_sqdist(rows).sum(), rows)

    assert bool(got.isnan().all())
