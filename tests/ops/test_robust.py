"""Means of columns beyond their laws: edges, very many rows, and gradients."""

import math

import pytest
import torch
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


def test_the_gradient_goes_to_the_nearest_numbers():
    rows = torch.tensor([[5.0], [1.0], [60.0], [2.0], [4.0]], requires_grad=True)
    ops.mean_around_median(rows, 2).sum().backward()
    assert rows.grad is not None
    identical(rows.grad[:, 0] * 2, torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0]))
