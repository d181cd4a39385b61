"""Tests of `waffle_weights` and `feddwa_weights`.

They cover golden values, the printed formulas, properties and edge cases.
"""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from laws import integers
from places import golden
from tolerance import F64, assert_close
from ugly import randn

from pflcore.ops import feddwa_weights, waffle_weights

GOLDEN = golden("feddwa_family")
ONE = torch.ones((), dtype=F64)


def f64(values):
    return torch.tensor(values, dtype=F64)


def near(got, want, digits=1.1e-10):
    """Asserts equality up to the ten digits of golden values."""
    torch.testing.assert_close(got, f64(want), rtol=0, atol=digits)


# --- WAFFLE -----------------------------------------------------------------

omegas = st.floats(0.01, 1.0)
distances = st.one_of(  # spread over magnitudes, or close together
    st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=12),
    st.lists(st.floats(1.0, 1.05), min_size=3, max_size=12),
)


def printed(d, target, omega, psi, line6=True):
    """The weights of Algorithm 1 as printed, or of equation (3).

    `line6` selects the algorithm's line 6. The equation differs from it above omega =
    1.
    """
    others = torch.cat([d[:target], d[target + 1 :]])
    high = others.max()
    low = others.min()
    star = low * (1 - (high - low) / high * (1 - omega))
    d = d.clone()
    d[target] = star
    raw = (psi - (d - star) / (high - (d.min() if line6 else star))).clamp(min=0)
    return raw / raw.sum()


@pytest.mark.parametrize(
    "d, target, omega, psi, want", golden("waffle_family")["weights"]
)
def test_waffle_golden(d, target, omega, psi, want):
    near(waffle_weights(f64(d), target, omega, psi), want)


@given(
    distances,
    st.floats(0.01, 4.0),
    st.one_of(st.none(), st.floats(0.01, 3.0)),
    st.data(),
)
def test_waffle_is_the_printed_formula(d, omega, psi, data):
    d = f64(d)
    target = data.draw(st.integers(0, len(d) - 1))
    d[target] = 0
    others = d[torch.arange(len(d)) != target]
    assume((others.max() - others.min()) / others.max() >= 1e-3)
    psi = omega if omega > 1 or psi is None else psi
    got = waffle_weights(d, target, omega, psi)
    for line6 in (True, False)[: 2 if omega <= 1 else 1]:  # both agree for omega <= 1
        want = printed(d, target, omega, psi, line6)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@given(
    st.lists(
        st.one_of(
            st.floats(0, 1e3), st.sampled_from([torch.nan, torch.inf, -torch.inf])
        ),
        min_size=1,
        max_size=12,
    ),
    st.floats(0, 1),
    st.integers(-90, 90),
    st.data(),
)
def test_waffle_laws(d, omega, power, data):
    """WAFFLe's weights have the properties of the method.

    Absent clients get no weight and change none. Scale, order and the target's own
    distance change no weight.
    """
    n = len(d)
    d = f64(d)
    target = data.draw(st.integers(0, n - 1))
    a = waffle_weights(d, target, omega)
    assert bool((a >= 0).all()) and bool((a <= a[target]).all())
    assert_close(a.sum(), ONE, "weights")
    is_target = torch.arange(n) == target
    here = d.isfinite() | is_target
    assert not a[~here].any()
    goal = int(here[:target].sum())
    assert_close(a[here], waffle_weights(d[here], goal, omega), "weights", size=ONE)
    scaled = waffle_weights(d.ldexp(torch.tensor(power)), target, omega)
    assert torch.equal(scaled, a) or bool((d[here] < 1e-200).any())
    perm = torch.tensor(data.draw(st.permutations(range(n))))
    moved = waffle_weights(d[perm], int((perm == target).nonzero()), omega)
    assert_close(moved, a[perm], "weights", size=ONE)
    d[target] = data.draw(st.sampled_from([7.0, 1e300, torch.nan, torch.inf, -1.0]))
    assert torch.equal(waffle_weights(d, target, omega), a)


@pytest.mark.parametrize("omega", [0.9, 0.5, 0.2, 1.0, 1.5])
def test_waffle_ties(omega):
    """Distances that differ by rounding noise count as equal."""
    d = torch.full((7,), 3.0, dtype=F64)
    even = torch.full((7,), 1 / 7, dtype=F64)
    almost = d * (1 + 1e-13 * torch.arange(7))
    assert_close(waffle_weights(d, 0, omega, tie="uniform"), even, "weights")
    near(waffle_weights(almost, 0, omega), waffle_weights(d, 0, omega).tolist(), 1e-9)


@pytest.mark.parametrize("gap", [1e-9, 1e-10, 1e-11])
@pytest.mark.parametrize("tie", ["closed", "uniform"])
def test_what_differs_beyond_rounding_is_no_tie(gap, tie):
    """Distances that differ by more than rounding are no tie.

    The nearest client has the target's weight, and the farthest has none (Algorithm 1
    at Omega = Psi = 1).
    """
    d = 3 * (1 + gap * f64([0, 0, 1, 2]))
    torch.testing.assert_close(
        waffle_weights(d, 0, 1.0, tie=tie), f64([1, 1, 0.5, 0]) / 2.5, rtol=0, atol=1e-4
    )


def test_waffle_alone_and_psi_zero():
    for n, target in ((1, 0), (4, 2)):
        want = torch.eye(n, dtype=F64)[target]
        assert torch.equal(
            waffle_weights(torch.arange(n) + 0.5, target, 0.5, 0.0), want
        )
        # All others are absent.
        assert torch.equal(
            waffle_weights(torch.full((n,), torch.nan), target, 0.5), want
        )
    assert torch.equal(waffle_weights(f64([0.0, 0.0]), 1, 0.0), f64([0.0, 1.0]))
    # The largest psi that is accepted.
    assert waffle_weights(torch.arange(5.0), 0, 0.5, 1e100).sum() == 1


@pytest.mark.parametrize("shape", [(2, 3, 7), (0, 4), (101, 3), (17, 1)])
def test_waffle_rows_at_once(shape):
    """Rows with any leading axes are computed together.

    There is a target for each row, or one for all.
    """
    d = randn(1, *shape).abs()
    target = integers(2, 0, shape[-1], *shape[:-1])
    got = waffle_weights(d, target, 0.6, 0.7)
    assert got.shape == shape
    for at, goal in np.ndenumerate(target.numpy()):
        assert torch.equal(got[at], waffle_weights(d[at].contiguous(), goal, 0.6, 0.7))
    for one in (
        torch.zeros_like(target),
        torch.zeros((), dtype=torch.int64),
        np.int64(0),
    ):
        assert torch.equal(waffle_weights(d, one, 0.6), waffle_weights(d, 0, 0.6))


# --- FedDWA -----------------------------------------------------------------


def dense(top, n):
    return torch.zeros(len(top.weight), n, dtype=F64).scatter_(1, top.index, top.weight)


def naive(row, k):
    """Indices and weights of the k nearest, by a sort.

    The order is that of (distance, index). Weights are inverse distances.
    """
    clean = [math.inf if math.isnan(d) else max(d, 0.0) for d in row]
    nearest = sorted(range(len(row)), key=lambda j: (clean[j], j))[:k]
    low = clean[nearest[0]]
    raw = [
        float(clean[j] == low) if low in (0.0, math.inf) else low / clean[j]
        for j in nearest
    ]
    return nearest, [r / sum(raw) for r in raw]


@pytest.mark.parametrize("sqdist, k, want", GOLDEN["feddwa_weights"])
def test_feddwa_golden(sqdist, k, want):
    top = feddwa_weights(f64(sqdist), np.int64(k))
    near(dense(top, len(sqdist[0])), want, 1e-9)
    assert top.weight.dtype == F64 and top.index.dtype == torch.int64


def test_feddwa_is_the_optimum_of_equation_14():
    """The weights minimize the sum of p^2 D over the simplex.

    The minimum is 1 / sum(1 / D).
    """
    d = f64(GOLDEN["A1_feddwa_basic"]["D2"])
    best = dense(feddwa_weights(d, 3), 3)
    value = (best.square() * d).sum(1)
    near(value, GOLDEN["A6_eq14_optimum"]["opt_value"], 1e-9)
    other = randn(1, 200, 3, 3).exp()
    other /= other.sum(-1, keepdim=True)
    assert bool(((other.square() * d).sum(-1) >= value).all())


cell = st.one_of(
    st.sampled_from(
        [0.0, 1.0, 1.0, 2.0, 4.0, torch.inf, torch.nan, -1.0, 1e-300, 1e300, 5e-324]
    ),
    st.floats(0, 1e6, allow_subnormal=False),
)


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.lists(
            st.lists(cell, min_size=n, max_size=n), min_size=1, max_size=4
        )
    ),
    st.integers(1, 45),
)
@example([[torch.nan, 2.0, torch.inf]], 3)
def test_feddwa_is_what_a_sort_gives(rows, k):
    """Weights and indices are those of a sort, nearest first."""
    top = feddwa_weights(f64(rows), k)
    index, weight = zip(*[naive(row, k) for row in rows], strict=True)
    assert top.index.tolist() == list(index) and bool((top.weight >= 0).all())
    assert_close(top.weight, f64(weight), "weights", size=ONE)


@pytest.mark.parametrize("k", [1, 2, 40])
def test_models_that_are_all_infinitely_far_weigh_alike(k):
    weight, index = feddwa_weights(torch.full((2, 50), torch.inf), k)

    assert torch.equal(weight, torch.full((2, k), 1 / k, dtype=torch.float64))
    assert torch.equal(index, torch.arange(k).expand(2, k))
