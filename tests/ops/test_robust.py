"""Means of columns beyond their laws: edges, very many rows, and gradients."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from laws import identical, trimmed_mean
from ugly import randn

from pflcore import ops

INF = math.inf
pytestmark = pytest.mark.usefixtures("isa")


def test_columns_by_hand():
    """Infinities are numbers, NaN spoils its own column alone, zeros have no sign."""
    columns = {
        (3.0, 1.0, 2.0, 10.0, -7.0): 2.0,
        (INF, -INF, 1.0, 2.0, 6.0): 3.0,
        (INF, INF, 1.0, 2.0, 6.0): INF,
        (INF, INF, -INF, -INF, 6.0): math.nan,
        (math.nan, 1.0, 2.0, 3.0, 4.0): math.nan,
        (-0.0, -0.0, 0.0, -0.0, 0.0): 0.0,
    }
    rows = torch.tensor(list(columns)).T
    want = torch.tensor(list(columns.values()))
    got = ops.trimmed_mean(rows, 1)
    identical(got, want)
    assert not got[-1].signbit()


def test_thousands_of_rows_and_the_median():
    rows = randn(0, 1500, 37, dtype=torch.float32)
    identical(ops.trimmed_mean(rows, 400), trimmed_mean(rows, 400))
    middle = rows.double().quantile(0.5, 0).float()
    torch.testing.assert_close(ops.trimmed_mean(rows, 749), middle, rtol=1e-6, atol=0)


def test_a_column_has_the_same_bits_wherever_it_stands():
    rows = randn(1, 40, 331, dtype=torch.float32)
    whole = ops.trimmed_mean(rows, 3)
    parts = [ops.trimmed_mean(part, 3) for part in rows.split(71, 1)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_gradient_goes_to_the_numbers_in_the_mean():
    """Of equal numbers the earlier row's counts as smaller."""
    rows = torch.tensor([[5.0], [1.0], [5.0], [2.0], [5.0]], requires_grad=True)
    ops.trimmed_mean(rows, 1).sum().backward()
    assert rows.grad is not None
    identical(rows.grad[:, 0] * 3, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]))


def test_the_nearest_by_hand():
    """Windows at either end, ties, infinities, a median of two, and no overflow."""
    columns = {  # the three nearest of each
        (3.0, 1.0, 2.0, 10.0, -7.0, 4.0): 2.0,
        (0.0, 1.0, 5.0, 5.0, 5.0, 9.0): 5.0,
        (1.0, 2.0, 3.0, 4.0, 5.0, 60.0): 3.0,
        (-INF, 0.0, 3.0, 3.0, 6.0, INF): 2.0,
        (-INF, -INF, 0.0, 2.0, INF, INF): -INF,
        (INF, INF, INF, INF, 6.0, -INF): INF,
        (-INF, -INF, -INF, 5.0, 6.0, 7.0): -INF,
        (-INF, -INF, -INF, INF, INF, INF): math.nan,
        (math.nan, 1.0, 2.0, 3.0, 4.0, 5.0): math.nan,
        (3e38, 3e38, 3e38, 3e38, -3e38, -3e38): INF,
        (1e38, 1e38, 1e38, 3e38, 3e38, 3e38): 1e38,
        (-0.0, -0.0, 0.0, -0.0, 0.0, 1.0): 0.0,
    }
    rows = torch.tensor(list(columns)).T
    want = torch.tensor(list(columns.values()))
    got = ops.mean_around_median(rows, 3)
    identical(got, want)
    assert not got[-1].signbit()


def test_the_next_in_order_after_an_infinite_median():
    """All others are equally far from it; with -inf the mean would be NaN."""
    rows = torch.tensor([[-INF, 0.0, INF, INF, INF], [INF, 0.0, -INF, -INF, -INF]]).T
    identical(ops.mean_around_median(rows, 4), torch.tensor([INF, -INF]))


# Numbers (offset + k) * 2**exponent with a small whole k: multiples of the least number
# above 0, neighbours of 1, and of the largest power of two.
GRIDS = {
    torch.float32: [(0, -149), (1 << 23, -23), (1 << 23, 104)],
    torch.float64: [(0, -1074), (1 << 52, -52), (1 << 52, 971)],
}


def nearest_to_median(values):
    """The whole number that is nearest to the median, and the lesser of two."""
    ordered = sorted(values)
    twice = ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]
    return min(ordered, key=lambda v: (abs(2 * v - twice), v))


@pytest.mark.parametrize("dtype", GRIDS)
@given(st.data())
def test_the_nearest_number_is_the_exact_one(dtype, data):
    """Whatever its median rounds to: of equally near numbers it is the lesser one."""
    offset, exponent = data.draw(st.sampled_from(GRIDS[dtype]))
    sign = data.draw(st.sampled_from([1, -1]))
    n = data.draw(st.integers(1, 9))
    steps = st.lists(st.integers(0, 12), min_size=n, max_size=n)
    columns = data.draw(st.lists(steps, min_size=1, max_size=40))
    exact = [[sign * (offset + k) for k in column] for column in columns]
    numbers = [[math.ldexp(v, exponent) for v in column] for column in exact]
    rows = torch.tensor(numbers, dtype=dtype).T

    got = ops.mean_around_median(rows, 1)

    nearest = [math.ldexp(nearest_to_median(column), exponent) for column in exact]
    identical(got, torch.tensor(nearest, dtype=dtype))


def test_the_gradient_goes_to_the_nearest_numbers():
    rows = torch.tensor([[5.0], [1.0], [60.0], [2.0], [4.0]], requires_grad=True)
    ops.mean_around_median(rows, 2).sum().backward()
    assert rows.grad is not None
    identical(rows.grad[:, 0] * 2, torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_than_a_network_sorts(dtype):
    """Bits are those of a sorted column that is summed; NaN spoils its own alone."""
    n, removed = 9_000, 3_000
    rows = randn(2, n, 19, dtype=dtype)
    rows[5, 3], rows[7, 4], rows[8, 5] = math.nan, INF, -INF
    got = ops.trimmed_mean(rows, removed)
    total = torch.zeros(19, dtype=dtype)
    for chunk in rows.sort(0).values[removed : n - removed].split(16):
        part = torch.zeros(19, dtype=dtype)
        for row in chunk:
            part = part + row
        total = total + part
    want = total / torch.tensor(n - 2 * removed, dtype=dtype)
    want[3] = math.nan
    identical(got, want)
    middle = rows.double().quantile(0.5, 0).to(dtype)
    nearest = ops.mean_around_median(rows, 1)
    torch.testing.assert_close(nearest, middle, rtol=1e-2, atol=1e-3, equal_nan=True)


EQUAL = torch.tensor([[1.0, 5.0], [1.0, 5.0], [1.0, 2.0], [5.0, 5.0], [9.0, 7.0]])


@pytest.mark.parametrize("op", [ops.trimmed_mean, ops.mean_around_median])
def test_torch_func_has_the_gradient_of_equal_numbers(op):
    rows = EQUAL.clone().requires_grad_()
    want = op(rows, 2)
    want.sum().backward()
    grad, value = torch.func.grad_and_value(lambda r: op(r, 2).sum())(EQUAL)
    assert torch.equal(grad, rows.grad) and torch.equal(value, want.sum())
    value, change = torch.func.jvp(lambda r: op(r, 2), (EQUAL,), (EQUAL + 1,))
    assert torch.equal(value, want)
    torch.testing.assert_close(change, (rows.grad * (EQUAL + 1)).sum(0))
