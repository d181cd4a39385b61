"""Cosines of rows of any length, beside inner products in numpy's longest floats.

Symbols: M rows of P numbers.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from tolerance import FLOATS
from ugly import randn

from pflcore.ops._directions import BLOCK_COLUMNS, cosine_matrix, length_ratios

seeds = st.integers(0, 10**6)
exponents = st.integers(-30, 30)


def inner_products(a, b, origin=0.0):
    """Cosines by numpy, in its longest floats."""
    a = a.double().numpy().astype(np.longdouble) - origin
    b = b.double().numpy().astype(np.longdouble) - origin
    lengths = np.sqrt((a * a).sum(1))[:, None] * np.sqrt((b * b).sum(1))
    return (a @ b.T / lengths).astype(np.float64)


def assert_cosines(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
@given(seeds, st.sampled_from([1, 2, 33, 1000]))
def test_cosines_are_inner_products(dtype, seed, columns):
    a = randn(seed, 4, columns, dtype=dtype)
    b = randn(seed + 1, 3, columns, dtype=dtype)
    assert_cosines(cosine_matrix(a, b), inner_products(a, b))


@pytest.mark.parametrize("columns", [BLOCK_COLUMNS - 1, BLOCK_COLUMNS + 1])
def test_blocks_of_columns_are_joined(columns):
    a = randn(0, 3, columns, dtype=torch.float32)
    assert_cosines(cosine_matrix(a), inner_products(a, a))


@given(seeds, exponents, exponents)
def test_cosines_know_no_lengths(seed, i, j):
    rows = randn(seed, 5, 40)
    scaled = rows.clone()
    scaled[0] *= 10.0**i
    scaled[1] *= -(10.0**j)
    want = cosine_matrix(rows)
    want[1] *= -1
    want[:, 1] *= -1
    assert_cosines(cosine_matrix(scaled), want)


@given(seeds, exponents)
def test_cosines_are_between_minus_one_and_one(seed, exponent):
    row = randn(seed, 1, 30)
    rows = torch.cat([row, row * 10.0**exponent, -row * 10.0**exponent])
    cosine = cosine_matrix(rows)
    assert (cosine.abs() <= 1).all()
    assert_cosines(cosine, [[1, 1, -1], [1, 1, -1], [-1, -1, 1]])


@given(seeds)
def test_cosines_are_symmetric(seed):
    cosine = cosine_matrix(randn(seed, 6, 50))
    assert torch.equal(cosine, cosine.T)


@pytest.mark.parametrize("largest", [1.7e308, 1e200, 1e-200, 1e-307])
def test_squares_neither_overflow_nor_vanish(largest):
    rows = randn(3, 4, 20).clamp(-3, 3) / 3
    scaled = rows.clone()
    scaled[2] *= largest
    assert_cosines(cosine_matrix(scaled), inner_products(rows, rows))


@pytest.mark.parametrize("dtype", FLOATS)
def test_least_and_largest_numbers_have_a_direction(dtype):
    info = torch.finfo(dtype)
    least = info.tiny * info.eps
    rows = torch.zeros(3, 2, dtype=dtype)
    rows[0] = info.max
    rows[1] = -least
    rows[2, 0] = least
    half = 0.5**0.5
    want = [[1, -1, half], [-1, 1, -half], [half, -half, 1]]
    assert_cosines(cosine_matrix(rows), want)


def test_rows_of_zeros_have_cosines_of_zero():
    rows = randn(0, 3, 5)
    rows[1] = 0
    cosine = cosine_matrix(rows)
    assert not cosine[1].any() and not cosine[:, 1].any() and cosine[0, 0] == 1
    assert not cosine_matrix(torch.zeros(2, 0)).any()


@given(seeds, exponents)
def test_cosines_are_seen_from_an_origin(seed, exponent):
    rows = randn(seed, 4, 30)
    rows[1] *= 10.0**exponent
    origin = randn(seed + 1, 30)
    want = inner_products(rows, rows, origin.numpy())
    assert_cosines(cosine_matrix(rows, origin=origin), want)


@given(seeds, exponents)
def test_ratios_are_those_of_lengths(seed, exponent):
    rows = randn(seed, 4, 30)
    want = rows[2].norm() / rows.norm(dim=1)
    rows[1] *= 10.0**exponent
    want[1] /= 10.0**exponent
    torch.testing.assert_close(length_ratios(rows, 2), want)


def test_ratios_of_lengths_that_overflow():
    rows = torch.full((2, 100), 1.7e308, dtype=torch.float64)
    rows[1] = 1e300
    ratios = length_ratios(rows, 0)
    torch.testing.assert_close(ratios, torch.tensor([1.0, 1.7e8]).double())
