"""waffle_weights and feddwa_weights: golden values, the printed formulas, laws and edge cases."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from places import golden
from tolerance import F64, FLOATS, assert_close
from ugly import LAYOUTS, lay, matrices, randn, refuses, same_for_any_threads

from pflcore.ops import feddwa_weights, waffle_weights

GOLDEN = golden("feddwa_family")
ONE = torch.ones((), dtype=F64)


def f64(values):
    return torch.tensor(values, dtype=F64)


def near(got, want, digits=1.1e-10):
    """Golden values have ten digits."""
    torch.testing.assert_close(got, f64(want), rtol=0, atol=digits)


# --- WAFFLE -----------------------------------------------------------------

omegas = st.floats(0.01, 1.0)
distances = st.one_of(  # spread over magnitudes, or close together
    st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=12),
    st.lists(st.floats(1.0, 1.05), min_size=3, max_size=12),
)


def sigmoid(r, rounds, steep=3.2):
    """The paper's Omega and Psi."""
    return 1 / (1 + math.exp(steep * (r / (rounds / 2) - 1)))


def printed(d, target, omega, psi, line6=True):
    """Algorithm 1 as printed (line 6), or the paper's equation (3), which differs above omega =
    1."""
    others = torch.cat([d[:target], d[target + 1 :]])
    high, low = others.max(), others.min()
    star = low * (1 - (high - low) / high * (1 - omega))
    d = d.clone()
    d[target] = star
    raw = (psi - (d - star) / (high - (d.min() if line6 else star))).clamp(min=0)
    return raw / raw.sum()


@pytest.mark.parametrize(
    ("d", "omega", "psi", "want"),
    [
        ([0, 1, 2, 4], 1.0, None, [0.375, 0.375, 0.25, 0]),
        ([0, 1, 2, 4], 0.75, None, [0.4123989218, 0.3800539084, 0.2075471698, 0]),
        ([0, 1, 2, 4], 0.5, None, [0.5094339623, 0.3962264151, 0.0943396226, 0]),
        ([0, 1, 2, 4], 0.25, None, [0.7307692308, 0.2692307692, 0, 0]),
        ([0, 1, 2, 4], 0.0, None, [1, 0, 0, 0]),
        ([0, 1, 2, 4], 0.8, 0.3, [0.5431034483, 0.4568965517, 0, 0]),
        ([0, 1, 2, 4], 1.0, 3.0, [0.28125, 0.28125, 0.25, 0.1875]),
        ([0, 1, 2, 4], 1.5, None, [0.2975206612, 0.3223140496, 0.2561983471, 0.1239669421]),
        ([0, 0, 2, 4], 0.5, None, [0.5, 0.5, 0, 0]),
        ([0, 0, 0], 0.5, None, [1 / 3, 1 / 3, 1 / 3]),
        ([0, 5], 0.9, None, [0.5265957447, 0.4734042553]),
        ([0, 5], 0.5, None, [0.75, 0.25]),
        ([0, 5], 0.2, None, [1, 0]),
        ([0, 1, 2, 4], sigmoid(1, 20), None, [0.3809709123, 0.3756945950, 0.2433344927, 0]),
        ([0, 1, 2, 4], sigmoid(2, 20), None, [0.3832510461, 0.3759747969, 0.2407741570, 0]),
        ([0, 1, 2, 4], sigmoid(3, 20), None, [0.3864189652, 0.3763761379, 0.2372048969, 0]),
        ([0, 1, 2, 4], sigmoid(10, 20), None, [0.5094339623, 0.3962264151, 0.0943396226, 0]),
        ([0, 1, 2, 4], sigmoid(14, 20), None, [0.8013139365, 0.1986860635, 0, 0]),
        ([0, 1, 2, 4], sigmoid(15, 20), None, [1, 0, 0, 0]),
        ([0, 1, 2, 4], sigmoid(18, 20, 0.5), None, [0.5968019529, 0.4031980471, 0, 0]),
    ],
)
def test_waffle_golden(d, omega, psi, want):
    near(waffle_weights(f64(d), 0, omega, psi), want)


def test_waffle_golden_other_target_and_ten_clients():
    want = [0.0965035928, 0.2348252394, 0.3416314973, 0.3270396705, 0]
    near(waffle_weights(f64([3, 1.5, 0, 0.5, 6]), 2, sigmoid(40, 100)), want)
    d = f64([0, 1, 1.6, 2.1, 2.4, 2.5, 2.4, 2.1, 1.6, 1])
    first = [
        0.2164063573,
        0.2127063091,
        0.1238620997,
        0.0498252586,
        0.0054031539,
        0,
        0.0054031539,
        0.0498252586,
        0.1238620997,
        0.2127063091,
    ]
    near(waffle_weights(d, 0, sigmoid(1, 100)), first)
    near(
        waffle_weights(d, 0, sigmoid(50, 100)), [0.4285714286, 0.2857142857, *[0] * 7, 0.2857142857]
    )
    near(
        waffle_weights(d, 0, sigmoid(60, 100)), [0.5562665044, 0.2218667478, *[0] * 7, 0.2218667478]
    )
    near(waffle_weights(d, 0, sigmoid(75, 100)), [1, *[0] * 9])


@given(distances, omegas, st.one_of(st.none(), st.floats(0.01, 3.0)), st.data())
def test_waffle_is_the_printed_formula(d, omega, psi, data):
    d = f64(d)
    target = data.draw(st.integers(0, len(d) - 1))
    d[target] = 0
    others = d[torch.arange(len(d)) != target]
    assume((others.max() - others.min()) / others.max() >= 1e-3)
    got = waffle_weights(d, target, omega, psi)
    for line6 in (True, False):  # the same for omega <= 1
        torch.testing.assert_close(
            got, printed(d, target, omega, omega if psi is None else psi, line6), rtol=0, atol=1e-11
        )


@given(distances, st.floats(1.0, 4.0))
def test_waffle_above_one_is_line_6(d, omega):
    d = f64([0, *d])
    assume((d[1:].max() - d[1:].min()) / d[1:].max() >= 1e-3)
    torch.testing.assert_close(
        waffle_weights(d, 0, omega), printed(d, 0, omega, omega), rtol=0, atol=1e-11
    )


@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=12),
    st.floats(0, 1),
    st.integers(-90, 90),
    st.data(),
)
def test_waffle_laws(d, omega, power, data):
    d, n = f64(d), len(d)
    target = data.draw(st.integers(0, n - 1))
    a = waffle_weights(d, target, omega)
    assert a.dtype == F64 and bool((a >= 0).all()) and bool((a <= a[target]).all())
    assert_close(a.sum(), ONE, "weights")
    # scale changes nothing
    assert torch.equal(waffle_weights(d.ldexp(torch.tensor(power)), target, omega), a) or bool(
        (d < 1e-200).any()
    )
    perm = torch.tensor(data.draw(st.permutations(range(n))))
    moved = waffle_weights(d[perm], int((perm == target).nonzero()), omega)
    assert_close(moved, a[perm], "weights", size=ONE)
    # its own distance is not looked at
    d[target] = data.draw(st.sampled_from([7.0, 1e300, torch.nan, torch.inf, -1.0]))
    assert torch.equal(waffle_weights(d, target, omega), a)


@given(distances, omegas)
def test_waffle_farthest_is_left_out_and_nearer_is_more(d, omega):
    d = f64([0, *d])
    a = waffle_weights(d, 0, omega)
    far = d[1:].max()
    assume((far - d[1:].min()) / far > 1e-9)
    assert bool((a[1:][d[1:] == far] == 0).all())
    order = d[1:].argsort()
    assert bool((a[1:][order].diff() <= 0).all())


@given(
    st.lists(
        st.one_of(st.floats(0, 100), st.sampled_from([torch.nan, torch.inf, -torch.inf])),
        min_size=2,
        max_size=9,
    ),
    omegas,
)
def test_waffle_absent_clients_have_no_weight(d, omega):
    d = f64([0, *d])
    here = d.isfinite()
    a = waffle_weights(d, 0, omega)
    assert bool((a[~here] == 0).all())
    assert_close(a[here], waffle_weights(d[here], 0, omega), "weights", size=ONE)


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("omega", [0.9, 0.5, 0.2, 1.0, 1.5])
def test_waffle_ties(n, omega):
    d = torch.full((n,), 3.0, dtype=F64)
    other = 1 - (1 - omega) / (2 - omega) / omega if omega <= 1 else (omega - (1 - omega)) / omega
    raw = f64([1.0, *[max(other, 0.0)] * (n - 1)])
    assert_close(waffle_weights(d, 0, omega), raw / raw.sum(), "weights", size=ONE)
    assert_close(
        waffle_weights(d, 0, omega, tie="uniform"), torch.full((n,), 1 / n, dtype=F64), "weights"
    )
    almost = d * (1 + 1e-13 * torch.arange(n))  # rounding noise is a tie, too
    torch.testing.assert_close(waffle_weights(almost, 0, omega), raw / raw.sum(), rtol=0, atol=1e-9)


def test_what_differs_beyond_rounding_is_no_tie():
    """Apart by parts in 1e11: the nearest has the target's weight, the farthest none (Algorithm 1
    at Omega = Psi = 1)."""
    d = 3 * (1 + 1e-11 * f64([0, 0, 1, 2]))
    torch.testing.assert_close(
        waffle_weights(d, 0, 1.0), f64([1, 1, 0.5, 0]) / 2.5, rtol=0, atol=1e-4
    )


def test_waffle_alone_and_psi_zero():
    for n, target in ((1, 0), (4, 2)):
        want = torch.eye(n, dtype=F64)[target]
        assert torch.equal(
            waffle_weights(
                torch.rand(n, generator=torch.Generator().manual_seed(0)), target, 0.5, 0.0
            ),
            want,
        )
        # all others absent
        assert torch.equal(waffle_weights(torch.full((n,), torch.nan), target, 0.5), want)
    # a distance below 0 by rounding counts as 0
    near(waffle_weights(f64([0, -1e-9, 2, 4]), 0, 0.5), [0.5, 0.5, 0, 0])
    assert torch.equal(waffle_weights(f64([0.0, 0.0]), 1, 0.0), f64([0.0, 1.0]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7), (0, 4), (101, 3), (17, 1)])
@pytest.mark.parametrize("layout", ["contiguous", "last axis first"])
def test_waffle_rows_at_once(dtype, shape, layout):
    d = randn(1, *shape).abs().to(dtype)
    if layout != "contiguous":
        d = d.movedim(-1, 0).contiguous().movedim(0, -1)
    n = shape[-1]
    target = torch.randint(0, n, shape[:-1], generator=torch.Generator().manual_seed(2))
    got = waffle_weights(d, target, 0.6, 0.7)
    assert got.shape == d.shape and got.dtype == F64
    flat, goal = d.reshape(-1, n), target.reshape(-1)
    for row, t, a in zip(flat, goal.tolist(), got.reshape(-1, n), strict=True):
        assert torch.equal(a, waffle_weights(row.contiguous(), t, 0.6, 0.7))
    assert torch.equal(waffle_weights(d, 0, 0.6), waffle_weights(d, torch.zeros_like(target), 0.6))
    assert torch.equal(
        waffle_weights(d, torch.zeros((), dtype=torch.int64), 0.6), waffle_weights(d, 0, 0.6)
    )


def test_threads_change_no_bit():
    d = randn(1, 997, 61).abs()
    target = torch.arange(997) % 61
    same_for_any_threads(lambda: waffle_weights(d, target, 0.6))
    same_for_any_threads(lambda: feddwa_weights(d, 5).weight)
    same_for_any_threads(lambda: feddwa_weights(d, 50).index)


@pytest.mark.parametrize(
    ("arguments", "name", "kind"),
    [
        (dict(dist=[1.0, 2.0]), "dist", TypeError),
        (dict(dist=torch.zeros(3, dtype=torch.int64)), "dist", TypeError),
        (dict(dist=torch.zeros(2, 0)), "dist", ValueError),
        (dict(dist=torch.zeros(())), "dist", ValueError),
        (dict(target=3), "target", ValueError),
        (dict(target=-1), "target", ValueError),
        (dict(target=1.0), "target", TypeError),
        (dict(target=True), "target", TypeError),
        (dict(target=torch.tensor([0])), "target", ValueError),
        (dict(target=torch.tensor(0, dtype=torch.int32)), "target", TypeError),
        (dict(dist=torch.zeros(2, 3), target=torch.tensor([0, 3])), "target", ValueError),
        (dict(omega=-0.1), "omega", ValueError),
        (dict(omega=math.nan), "omega", ValueError),
        (dict(omega="1"), "omega", TypeError),
        (dict(psi=math.inf), "psi", ValueError),
        (dict(psi=-1), "psi", ValueError),
        (dict(tie="even"), "tie", ValueError),
    ],
)
def test_waffle_bad_input(arguments, name, kind):
    with refuses("waffle_weights", name, kind):
        waffle_weights(**{"dist": torch.zeros(3), "target": 0, "omega": 0.5, **arguments})


# --- FedDWA -----------------------------------------------------------------


def dense(top, n):
    return torch.zeros(len(top.weight), n, dtype=F64).scatter_(1, top.index, top.weight)


def naive(row, k):
    """Sorted by (distance, index), weighted by the inverse distance."""
    clean = [math.inf if math.isnan(d) else max(d, 0.0) for d in row]
    kept = sorted(range(len(row)), key=lambda j: (clean[j], j))[:k]
    low = clean[kept[0]]
    raw = [float(clean[j] == low) if low in (0.0, math.inf) else low / clean[j] for j in kept]
    return [(j, r / sum(raw)) for j, r in zip(kept, raw, strict=True)]


@pytest.mark.parametrize(
    ("case", "key", "k"),
    [
        ("A1_feddwa_basic", "P_full", 3),
        ("A1_feddwa_basic", "P_top2", 2),
        ("A1_feddwa_basic", "P_top1", 1),
        ("A2_feddwa_zero_ties", "P_full", 4),
        ("A2_feddwa_zero_ties", "P_top1", 1),
        ("A2_feddwa_zero_ties", "P_top2", 2),
        ("A2_feddwa_zero_ties", "P_top3", 3),
        ("A2_feddwa_zero_ties", "P_topK9", 9),
    ],
)
def test_feddwa_golden(case, key, k):
    golden = GOLDEN[case]
    top = feddwa_weights(f64(golden["D2"]), k)
    near(dense(top, len(golden["D2"][0])), golden[key], 1e-9)
    assert top.weight.dtype == F64 and top.index.dtype == torch.int64


def test_feddwa_golden_rounds_and_two_clients():
    for turn in GOLDEN["A4_feddwa_scalar_rounds"]["rounds"]:
        near(dense(feddwa_weights(f64(turn["D2"]), 2), 4), turn["P_top2"], 1e-9)
    golden = GOLDEN["A3_two_clients"]
    near(feddwa_weights(f64([golden["D2"]]), 2).weight[0], golden["p"], 1e-9)


def test_feddwa_is_the_optimum_of_equation_14():
    """sum of p^2 D over the simplex is least, 1 / sum(1 / D), at the weights."""
    d = f64(GOLDEN["A1_feddwa_basic"]["D2"])
    best = dense(feddwa_weights(d, 3), 3)
    value = (best.square() * d).sum(1)
    near(value, GOLDEN["A6_eq14_optimum"]["opt_value"], 1e-9)
    other = randn(1, 200, 3, 3).exp()
    other /= other.sum(-1, keepdim=True)
    assert bool(((other.square() * d).sum(-1) >= value).all())


cell = st.one_of(
    st.sampled_from([0.0, 1.0, 1.0, 2.0, 4.0, torch.inf, torch.nan, -1.0, 1e-300, 1e300, 5e-324]),
    st.floats(0, 1e6, allow_subnormal=False),
)


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.lists(st.lists(cell, min_size=n, max_size=n), min_size=0, max_size=4)
    ),
    st.integers(1, 45),
)
def test_feddwa_is_what_a_sort_gives(rows, k):
    n = len(rows[0]) if rows else 3
    d = f64(rows).view(-1, n)
    top = feddwa_weights(d, k)
    assert top.weight.shape == top.index.shape == (len(rows), min(k, n))
    for row, weight, index in zip(rows, top.weight, top.index.tolist(), strict=True):
        want = naive(row, k)
        assert index == [j for j, _ in want]  # nearest first, ties to the lower index
        assert_close(weight, f64([w for _, w in want]), "weights", size=ONE)
        assert_close(weight.sum(), ONE, "weights")
        assert bool((weight >= 0).all())


@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_feddwa_any_dtype_and_layout(dtype, data):
    d = data.draw(matrices(st.integers(0, 5), st.sampled_from([1, 2, 7, 31, 67]), dtype))
    d = lay(d.abs(), data.draw(st.sampled_from(LAYOUTS)))
    k = data.draw(st.sampled_from([1, 2, 5, 32, 33, 70]))
    got, want = feddwa_weights(d, k), feddwa_weights(d.double().contiguous(), k)
    assert torch.equal(got.index, want.index) and torch.equal(got.weight, want.weight)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 400])
def test_feddwa_many_columns_and_many_ties(k):
    d = torch.randint(0, 50, (7, 1009), generator=torch.Generator().manual_seed(k)).double()[:, ::3]
    top = feddwa_weights(d, k)
    for row, weight, index in zip(d.tolist(), top.weight, top.index.tolist(), strict=True):
        want = naive(row, k)
        assert index == [j for j, _ in want]
        assert_close(weight, f64([w for _, w in want]), "weights", size=ONE)


@given(st.integers(2, 40), st.integers(1, 41), st.integers(0, 99), st.integers(-60, 60), st.data())
def test_feddwa_scale_and_order(n, k, seed, power, data):
    d = randn(seed, 3, n).abs()  # all different
    top = feddwa_weights(d, k)
    assert torch.equal(feddwa_weights(d.ldexp(torch.tensor(power)), k).weight, top.weight)
    perm = torch.tensor(data.draw(st.permutations(range(n))))
    moved = feddwa_weights(d[:, perm], k)
    assert torch.equal(perm[moved.index], top.index) and torch.equal(moved.weight, top.weight)


def test_feddwa_edges():
    assert torch.equal(feddwa_weights(f64([[3.0]]), 5).weight, f64([[1.0]]))
    assert torch.equal(feddwa_weights(f64([[torch.inf] * 4]), 2).weight, f64([[0.5, 0.5]]))
    top = feddwa_weights(f64([[torch.nan, 2.0, torch.inf]]), 3)
    assert top.index.tolist() == [[1, 0, 2]] and top.weight.tolist() == [[1.0, 0.0, 0.0]]
    top = feddwa_weights(torch.full((1, 40), 1.0), 40)
    assert top.index.tolist() == [list(range(40))]
    assert feddwa_weights(torch.zeros(0, 3), 2).weight.shape == (0, 2)


@pytest.mark.parametrize(
    ("sqdist", "k", "name", "kind"),
    [
        (torch.zeros(2, 3), 0, "k", ValueError),
        (torch.zeros(2, 3), -1, "k", ValueError),
        (torch.zeros(2, 3), 1.0, "k", ValueError),
        (torch.zeros(2, 3), True, "k", ValueError),
        (torch.zeros(3), 1, "sqdist", ValueError),
        (torch.zeros(3, 0), 1, "sqdist", ValueError),
        (torch.zeros(2, 3, dtype=torch.int32), 1, "sqdist", TypeError),
        ([[1.0]], 1, "sqdist", TypeError),
    ],
)
def test_feddwa_bad_input(sqdist, k, name, kind):
    with refuses("feddwa_weights", name, kind):
        feddwa_weights(sqdist, k)
