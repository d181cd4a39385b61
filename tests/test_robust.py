"""Robust means of rows, as functions, and as defences of a server.

Symbols: S clients, f of them bad, P numbers of an update.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from pflcore import robust
from pflcore.algorithms import Cohort, FedAdam, FedAvg, Scaffold

ROWS = torch.tensor(
    [
        [0.07, 0.05, 1.84, 1.37],
        [1.12, 1.86, 0.6, 0.74],
        [-16.14, -15.97, 15.36, 10.35],
        [1.96, 0.45, 0.58, -1.05],
        [0.13, -0.29, 0.46, 1.69],
        [1.46, 1.93, -1.44, 0.73],
        [14.9, 12.57, 14.85, 12.31],
        [0.18, 0.53, -0.71, 0.83],
        [1.23, 0.98, 0.13, -0.08],
        [0.69, -0.33, -1.67, -0.44],
        [-0.37, -1.54, -0.16, -0.97],
    ],
    dtype=torch.float64,
)
# What byzfl 0.x's aggregators, which compute in float32, give for ROWS with f = 2. Its
# Krum looks at S - f - 1 neighbours, the paper's at S - f - 2: here both choose alike.
BYZFL = {
    "median": [0.69, 0.45, 0.46, 0.74],
    "trimmed_mean": [0.6971429, 0.4642857, 0.39142857, 0.6914286],
    "geometric_median": [0.749000549, 0.534192443, 0.185400665, 0.532683373],
    "mean_around_median": [0.71888894, 0.40444443, -0.04111111, 0.31333336],
    "centered_clipping": [0.664331794, 0.391461194, 0.210655749, 0.529009461],
    "krum": [1.23, 0.98, 0.13, -0.08],
    "multi_krum": [0.718889, 0.40444449, -0.0411111, 0.31333333],
}
# Every function with what it is told; its value is told the same but for the center.
FUNCTIONS = {
    "median": (),
    "trimmed_mean": (2,),
    "mean_around_median": (2,),
    "krum": (2,),
    "multi_krum": (2,),
    "bulyan": (2,),
    "geometric_median": (),
    "centered_clipping": (1.5, None, 3),
    "clip_to_median": (),
    "fltrust": (0,),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def call(name, rows):
    return getattr(robust, name)(rows, *FUNCTIONS[name])


def server(name, kind=FedAvg):
    options = [option for option in FUNCTIONS[name] if option is not None]
    return kind(weighting="uniform", mean=robust.MEANS[name](*options))


def cohort(rows):
    ids = torch.arange(len(rows))
    return Cohort(ids, torch.ones_like(ids), len(rows))


@pytest.mark.parametrize("name", BYZFL)
def test_numbers_of_another_library(name):
    want = torch.tensor(BYZFL[name], dtype=torch.float64)
    torch.testing.assert_close(call(name, ROWS), want, rtol=2e-6, atol=1e-6)


def test_neighbours_as_in_another_library():
    mixed = robust.nearest_neighbor_mixing(ROWS, 2)
    own = [0.71888894, 0.40444443, -0.04111111, 0.31333336]
    far = [-1.23666656, -1.58444440, 1.82555532, 1.38222218]
    want = torch.tensor([own, far], dtype=torch.float64)
    torch.testing.assert_close(mixed[[0, 2]], want, rtol=2e-6, atol=1e-6)


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_server_and_a_function_give_the_same_bits(name, dtype):
    rows = ROWS.to(dtype)
    want = call(name, rows)
    zeros = torch.zeros(4, dtype=dtype)
    alg = server(name)

    state = alg.init(zeros, len(rows))
    changes, _ = alg.update(state, {"delta": rows}, cohort(rows))
    assert torch.equal(changes["x"], want) and want.dtype == dtype


@every_function
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(name, dtype):
    """The result is that of the same numbers in float64, in the rows' dtype."""
    gen = torch.Generator().manual_seed(1)
    rows = torch.randn(11, 4000, generator=gen).to(dtype)
    got = call(name, rows)
    assert got.dtype == dtype
    want = call(name, rows.double())
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def near_median(column, count):
    median = np.median(column)
    order = sorted(column, key=lambda v: (abs(v - median), v))
    return np.mean(order[:count])


@given(st.integers(0, 2), st.integers(0, 4), st.integers(0, 10**6))
def test_bulyan_is_its_definition(f, more, seed):
    s = 4 * f + 3 + more
    rows = np.random.default_rng(seed).normal(size=(s, 5))
    left = list(range(s))
    selected = []
    for _ in range(s - 2 * f):
        near = max(1, len(left) - f - 2)
        scores = [
            sum(sorted(((rows[i] - rows[j]) ** 2).sum() for j in left if j != i)[:near])
            for i in left
        ]
        selected.append(left.pop(int(np.argmin(scores))))
    want = [near_median(column, s - 4 * f) for column in rows[selected].T]
    got = robust.bulyan(torch.from_numpy(rows), f)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@given(st.integers(2, 12), st.integers(0, 10**6))
def test_no_row_has_a_smaller_sum_of_distances_than_the_geometric_median(s, seed):
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(s, 6, generator=gen, dtype=torch.float64)
    median = robust.geometric_median(rows)

    def total(z):
        return float(torch.linalg.vector_norm(rows - z, dim=1).sum())

    others = median + 0.01 * torch.randn(20, 6, generator=gen, dtype=torch.float64)
    assert all(total(median) <= total(z) * (1 + 1e-7) for z in [*rows, *others])


def rows_around(kind, seed):
    """Sets of rows that make the search for a geometric median hard."""
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, 2, generator=gen, dtype=torch.float64)
    if kind == "three":
        return rows[:3]
    if kind == "coincident":
        rows[3:] = rows[3] + (rows[3:] - rows[3]).round()
    if kind == "some equal":
        rows[1] = rows[2] = rows[0]
    if kind == "collinear":
        rows = rows[:, :1] * rows[0]
    if kind == "clusters":
        rows[:3] = rows[0] + 1e-4 * rows[:3]
        rows[3:] = rows[3] + 1e-4 * rows[3:]
    if kind == "far":
        rows[4:6] *= 1e6
    if kind == "one coordinate":
        rows = rows[:, :1]
    return rows


def least_sum_of_distances(rows):
    """The least sum of distances at the rows and after 3,000 of Weiszfeld's steps."""
    rows = rows.numpy()

    def total(z):
        return np.linalg.norm(rows - z, axis=1).sum()

    z = rows.mean(0)
    for _ in range(3000):
        weight = 1 / np.linalg.norm(rows - z, axis=1).clip(1e-300)
        before, z = z, weight @ rows / weight.sum()
        if np.abs(z - before).max() <= 1e-15 * np.abs(z).max():
            break
    return min(map(total, [*rows, z]))


KINDS = "three, coincident, some equal, collinear, clusters, far, one coordinate"


@pytest.mark.parametrize("kind", KINDS.split(", "))
@given(st.integers(0, 10**6))
def test_a_geometric_median_has_the_least_sum(kind, seed):
    rows = rows_around(kind, seed)
    got = torch.linalg.vector_norm(rows - robust.geometric_median(rows), dim=1).sum()
    assert float(got) <= least_sum_of_distances(rows) * (1 + 1e-8)


def test_a_geometric_median_beside_a_row_is_found():
    """Weiszfeld's steps alone need a thousand from the median of each coordinate."""
    rows = torch.tensor([[1.4, 0.5], [-0.4, -0.2], [-0.5, -2.9]], dtype=torch.float64)
    want = torch.tensor([-0.2767, -0.2860], dtype=torch.float64)
    got = robust.geometric_median(rows)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_geometric_median_is_the_row_that_most_share(copies):
    others = torch.eye(4)[: copies + 1].repeat(1, 3)
    rows = torch.cat([torch.full((copies + 2, 12), 5.0), others])
    assert torch.equal(robust.geometric_median(rows), rows[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.integers(0, 10**6))
def test_the_length_of_far_rows_moves_no_geometric_median(dtype, seed):
    """Only the directions of the far rows act."""
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 20, generator=gen).to(dtype)

    def median(length):
        return robust.geometric_median(torch.cat([rows[:6], rows[6:] * length]))

    want = median(1e9)
    longest = 1e37 if dtype == torch.float32 else 1e300
    for length in (1e12, 1e17, 1e30, longest):
        torch.testing.assert_close(median(length), want, rtol=1e-4, atol=1e-5)


def test_a_geometric_median_that_is_not_reached_warns(monkeypatch):
    monkeypatch.setattr("pflcore._geometric_median.MAX_STEPS", 1)
    with pytest.warns(RuntimeWarning, match="1 steps did not reach .* at most"):
        robust.geometric_median(ROWS)


@given(st.integers(1, 9), st.floats(0.1, 10), st.integers(1, 5), st.integers(0, 10**6))
def test_centered_clipping_is_its_formula(s, tau, steps, seed):
    gen = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(s, 7, generator=gen, dtype=torch.float64)
    center = torch.randn(7, generator=gen, dtype=torch.float64)
    v = center
    for _ in range(steps):
        way = rows - v
        length = way.norm(dim=1, keepdim=True)
        v = v + (way * (tau / length.clamp(min=tau))).mean(0)
    got = robust.centered_clipping(rows, tau, center, steps)
    torch.testing.assert_close(got, v, rtol=1e-9, atol=1e-9)


@every_function
@given(st.integers(0, 10**6))
def test_a_mean_moves_with_its_rows_and_knows_no_order(name, seed):
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(11, 6, generator=gen, dtype=torch.float64)
    found = call(name, rows)
    later = 1 + torch.randperm(10, generator=gen)
    order = torch.cat([torch.tensor([0]), later])  # row 0 is trusted
    # Bulyan's last choices are among mutually nearest rows, whose scores are equal.
    if name != "bulyan":
        torch.testing.assert_close(call(name, rows[order]), found, rtol=1e-7, atol=1e-7)
    if name not in ("centered_clipping", "clip_to_median", "fltrust"):  # know a zero
        moved = call(name, rows + 3)
        torch.testing.assert_close(moved, found + 3, rtol=1e-6, atol=1e-6)


@every_function
@given(st.integers(0, 10**6), st.sampled_from([1e30, -1e30, 1e3]))
def test_two_bad_rows_of_eleven_move_it_little(name, seed, value):
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(11, 6, generator=gen, dtype=torch.float64)
    longest = float(rows.norm(dim=1).max())
    rows[[4, 9]] = value
    assert float(call(name, rows).norm()) <= 1.5 * longest
    if name in ("krum", "median"):
        mixed = call(name, robust.nearest_neighbor_mixing(rows, 2))
        assert float(mixed.norm()) <= 1.5 * longest


lengths = st.sampled_from([1e-11, 1e-3, 1e8, 1e15, 1e16, 1e17, 1e18, 1e30])


def fltrust_by_formula(rows, trusted):
    """FLTrust's equations 2 to 4, in numpy's longest floats."""
    rows = rows.double().numpy().astype(np.longdouble)
    unit = rows / np.sqrt((rows * rows).sum(1, keepdims=True))
    trust = np.maximum(unit @ unit[trusted], 0)
    length = np.sqrt((rows[trusted] ** 2).sum())
    return torch.from_numpy((trust @ unit / trust.sum() * length).astype(np.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.integers(0, 10**6), lengths, st.booleans())
def test_fltrust_is_its_formula_at_any_length(dtype, seed, length, is_opposite):
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, 100, generator=gen) + torch.randn(7, 100, generator=gen)
    sign = -1 if is_opposite else 1
    rows[3:] = sign * length * (rows[0] + torch.randn(4, 100, generator=gen))
    rows = rows.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    got = robust.fltrust(rows, 0).double()
    want = fltrust_by_formula(rows, 0)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@given(st.integers(0, 10**6), st.floats(1e14, 1e19))
def test_no_length_turns_fltrust(seed, length):
    """Nine clients send the opposite of the trusted update, at lengths of their choice.

    The result points where it pointed without them.
    """
    gen = torch.Generator().manual_seed(seed)
    trusted = torch.randn(1, 1000, generator=gen)
    honest = trusted + 0.3 * torch.randn(3, 1000, generator=gen)
    against = -length * trusted * torch.linspace(1, 1.1, 9)[:, None]
    alone = robust.fltrust(torch.cat([trusted, honest]), 0)
    got = robust.fltrust(torch.cat([trusted, honest, against]), 0)
    torch.testing.assert_close(got, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", ["largest", "least", "zeros"])
def test_fltrust_is_finite_beside_extreme_rows(dtype, row):
    info = torch.finfo(dtype)
    values = {"largest": info.max, "least": info.tiny * info.eps, "zeros": 0.0}
    rows = torch.ones(3, 8, dtype=dtype)
    rows[1] = values[row]
    got = robust.fltrust(rows, 0)
    assert got.isfinite().all()
    torch.testing.assert_close(got, torch.ones(8, dtype=dtype))


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_mixed_neighbours_are_their_definition(s, seed):
    f = (s - 1) // 2
    rows = torch.randn(s, 3, generator=torch.Generator().manual_seed(seed)).double()
    want = [
        rows[(rows - row).norm(dim=1).argsort(stable=True)[: s - f]].mean(0)
        for row in rows
    ]
    torch.testing.assert_close(
        robust.nearest_neighbor_mixing(rows, f), torch.stack(want)
    )


@pytest.mark.parametrize("kind", [FedAvg, FedAdam])
def test_a_server_starts_from_its_last_aggregate(kind):
    """The center of a round is the aggregate of the round before."""
    alg = server("centered_clipping", kind)
    state = alg.init(torch.zeros(4, dtype=torch.float64), len(ROWS))
    up = {"delta": ROWS}
    center = None
    for _ in range(2):
        center = robust.centered_clipping(ROWS, 1.5, center, 3)
        state = {**state, **alg.update(state, up, cohort(ROWS))[0]}
        assert torch.equal(state["center"], center)


def test_neighbours_are_mixed_before_a_defence():
    alg = FedAvg(mean=robust.NearestNeighborMixing(2, robust.Median()))
    zeros = torch.zeros(4, dtype=torch.float64)
    changes, _ = alg.update({"x": zeros}, {"delta": ROWS}, cohort(ROWS))
    want = robust.median(robust.nearest_neighbor_mixing(ROWS, 2))
    assert torch.equal(changes["x"], want)


def test_updates_are_shortened():
    short = robust.clip(ROWS, 2.0)
    torch.testing.assert_close(short.norm(dim=1), ROWS.norm(dim=1).clamp(max=2.0))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: robust.krum(ROWS[:6], 2), "updates: expected at least 7 rows"),
        (lambda: robust.bulyan(ROWS[:10], 2), "at least 11 rows"),
        (lambda: robust.median(ROWS[0]), "rows .S, P."),
        (lambda: robust.median(ROWS.to_sparse_csr()), "got a sparse_csr tensor"),
        (lambda: robust.median(torch.nested.nested_tensor([*ROWS])), "got a nested"),
        (lambda: robust.fltrust(ROWS, 11), "a row of the 11 updates"),
        (lambda: robust.centered_clipping(ROWS, 1.0, ROWS[0, :3]), "center"),
        (lambda: robust.clip_to_median(ROWS, ROWS[:, 0]), "shares"),
        (lambda: server("centered_clipping", Scaffold), "mean: expected one without a"),
        (lambda: FedAvg(mean="krum:f=2"), "mean: expected options of krum"),
        (lambda: FedAvg(mean="private:1"), "mean: expected private with noise_multip"),
        (lambda: FedAvg(mean=2), "mean: expected a Mean, got 2"),
        (lambda: FedAvg(mean="krum:2/median"), "mean: expected a mean that goes befo"),
        (
            lambda: robust.NearestNeighborMixing(2, robust.Private(1, 1)),
            "then: expecte",
        ),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.parametrize("name", robust.MEANS)
def test_a_mean_is_its_text(name):
    words = {"fltrust": ":H11", "centered_clipping": ":0.5", "private": ":0.5:1.1"}
    mean = robust.mean_of(name + words.get(name, ""))
    assert type(mean) is robust.MEANS[name] and robust.mean_of(str(mean)) == mean


@pytest.mark.parametrize("client", [3, "3", "H11", "None"])
def test_a_clients_name_is_no_number(client):
    mean = robust.FLTrust(client)
    assert robust.mean_of(str(mean)) == mean
