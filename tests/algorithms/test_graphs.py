"""pFedGraph and FedCAC: the parts of their rules, and their limits.

The golden rounds are in tests/golden/rounds.json.
"""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import after, at_work, double, near, some, tiny
from ugly import randn

from pflcore.algorithms import ALGORITHMS, FedCAC, PFedGraph, project_to_simplex


@given(st.integers(1, 9), st.integers(0, 2**32), st.floats(-3, 3))
def test_projected_rows_are_the_nearest_points_of_the_simplex(count, seed, log_scale):
    """A nearest point p of a convex set has (row - p) . (q - p) <= 0 for all its q.

    For the simplex it is enough to try its corners.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, count, generator=generator, dtype=torch.float64)
    rows *= 10**log_scale

    points = project_to_simplex(rows)

    near(points.sum(1), torch.ones(4), 0, 1e-12)
    assert (points >= 0).all()
    corners = torch.eye(count, dtype=torch.float64)
    ahead = corners - points[:, None]  # [4, count, count]
    products = (ahead * (rows - points)[:, None]).sum(2)
    assert (products <= 1e-12 * (1 + rows.abs().max())).all()
    # Points of the simplex stay; a number added to a row changes nothing.
    near(project_to_simplex(points), points, 0, 1e-12)
    near(project_to_simplex(rows + 3), points, 0, 1e-11 * 10 ** max(log_scale, 0))


def solve_by_positive_sets(d, share, alpha):
    """The p [S] of the simplex that minimises `d . p + alpha |p - share|^2`.

    It solves the equations of each set of positive numbers, and takes the best p.
    """
    size = len(d)
    candidates = []
    for count in range(1, size + 1):
        for places in map(list, combinations(range(size), count)):
            matrix = np.ones((count + 1, count + 1))
            matrix[:count, :count] = 2 * alpha * np.eye(count)
            matrix[count, count] = 0
            right = np.append(2 * alpha * share[places] - d[places], 1)
            p = np.zeros(size)
            p[places] = np.linalg.solve(matrix, right)[:count]
            if (p >= 0).all():
                candidates.append(p)
    values = [d @ p + alpha * ((p - share) ** 2).sum() for p in candidates]
    return candidates[int(np.argmin(values))]


@pytest.mark.deep("it takes a second")
def test_weights_solve_the_quadratic_program():
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(200):
        size = int(rng.integers(1, 6))
        updates = rng.normal(size=(size, 3))
        share = rng.dirichlet(np.ones(size))
        alpha = 10 ** rng.uniform(-2, 1)
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)

        got = PFedGraph(alpha=alpha).mixing_matrix(
            torch.from_numpy(updates), torch.from_numpy(share)
        )

        want = [solve_by_positive_sets(d, share, alpha) for d in -unit @ unit.T]
        worst = max(worst, np.abs(got.numpy() - np.array(want)).max())
    assert worst < 1e-8


def test_weights_are_shares_of_samples_where_alpha_is_large():
    s = double(tiny(epochs=2))
    state, done = after(PFedGraph(alpha=1e12, lam=0), s, 2)
    fedavg, _ = after(ALGORITHMS["fedavg"](), s, 2)
    want = done.cohort.mean_weights("samples").weight[0]
    near(done.mix.weight, want.expand_as(done.mix.weight), 0, 1e-10)
    near(state.server["x"], fedavg.server["x"].expand_as(state.server["x"]), 1e-9)


@pytest.mark.parametrize("length", [1e-200, 1e-30, 1e15, 1e17, 1e30, 1e200])
def test_weights_know_no_lengths_of_updates(length):
    gen = torch.Generator().manual_seed(5)
    updates = torch.randn(6, 30, generator=gen, dtype=torch.float64)
    share = torch.full((6,), 1 / 6, dtype=torch.float64)
    alg = PFedGraph(alpha=1.5)
    want = alg.mixing_matrix(updates, share)
    updates[2] *= length
    torch.testing.assert_close(alg.mixing_matrix(updates, share), want)


def test_weights_know_no_order_of_clients():
    updates = randn(0, 6, 9)
    share = torch.tensor([1.0, 4, 2, 2, 5, 3]).double() / 17
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    weight = PFedGraph(alpha=0.4).mixing_matrix(updates, share)
    moved = PFedGraph(alpha=0.4).mixing_matrix(updates[order], share[order])
    near(moved, weight[order][:, order], 0, 1e-14)


def test_clients_are_pulled_towards_their_collaborators():
    """Of two clients apart, the cosine of models grows with `lam`, not falls."""
    cosines = []
    for lam in (0.0, 0.1, 0.3):
        s = double(tiny(epochs=1, batch_size=100))
        alg = PFedGraph(alpha=100.0, lam=lam)  # equal mixes, so all is the pull's
        state, _ = after(alg, s, 1)
        down = alg.send(state.server, some(len(state.server["x"]), 2))
        _, up, _ = alg.train(down, {}, at_work(s, round=2))
        direction = state.server["r"]
        cosines.append(torch.cosine_similarity(up["w"], direction).mean())
    assert cosines[0] < cosines[1] < cosines[2]


def test_models_without_a_direction_pull_nobody():
    """Models of zeros have no direction; neither they nor their pull become NaN."""
    alg = PFedGraph(lam=0.1)
    state = alg.init(torch.zeros(3).double(), 2)
    up = {"w": torch.tensor([[0.0, 0, 0], [1, 0, 0]]).double()}
    changes, mix = alg.update(state, up, some(2))
    assert changes["r"].rows.isfinite().all()
    near(changes["r"].rows[:, 0], mix.weight[:, 1])


def test_the_largest_of_each_tensor_are_critical_and_zeros_never():
    net = tiny().net
    start = torch.zeros(2, net.size)
    trained = randn(0, 2, net.size).float()
    trained[1, net.slices["0.weight"]] = 0
    mask = FedCAC(tau=0.3).critical_parameters(net, start, trained)
    for name, columns in net.slices.items():
        part, chosen = trained[0, columns].square(), mask[0, columns]
        assert chosen.sum() == int(0.3 * len(part))
        if 0 < chosen.sum() < len(part):
            assert part[chosen].min() > part[~chosen].max()
        assert mask[1, columns].any() == (name != "0.weight" and len(part) >= 4)
    # Equal ones are critical together: here all of every tensor that has some.
    equal = FedCAC(tau=0.3).critical_parameters(net, start, start + 1)
    for columns in net.slices.values():
        assert equal[:, columns].all() == (columns.stop - columns.start >= 4)


def test_collaborators_become_fewer():
    mask = torch.tensor(
        [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    ).bool()
    # Overlaps are 1/2 of neighbours and 0 of others: their mean is 1/4.
    alg = FedCAC(beta=10.0)
    neighbours = (torch.arange(4)[:, None] - torch.arange(4)).abs() <= 1
    for number in (1, 5, 10):
        assert torch.equal(alg.collaborators(mask, number), neighbours)
    assert torch.equal(alg.collaborators(mask, 11), torch.eye(4).bool())
    # Where all overlaps are equal, all collaborate, whatever their mean rounds to.
    for count in range(1, 8):
        equal = torch.eye(count, 9).bool() | (torch.arange(9) > 6)
        assert alg.collaborators(equal, 3).all()


def test_an_overlap_is_a_share_of_ones_own_parameters():
    """A client of few critical parameters asks more of the others."""
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, :8] = True
    mask[1, :4] = True
    mask[2, 2:6] = True
    # |M_i - M_j|_1 is 4, 4 and 4: overlaps are 3/4 in row 0, and 1/2 in the others.
    got = FedCAC(beta=1.0).collaborators(mask, 1)
    assert got.tolist() == [[True] * 3, [False, True, False], [False, False, True]]


def test_a_share_below_one_parameter_makes_none_critical():
    alg = FedCAC(tau=0.1)
    net = tiny().net  # its tensors have 30, 5, 20 and 4 numbers
    start = net.w0[None]
    mask = alg.critical_parameters(net, start, start + torch.arange(59.0))
    assert [int(part.sum()) for part in mask[0].split(net.sizes)] == [3, 0, 2, 0]


def test_critical_parameters_come_from_collaborators_and_others_from_all():
    s = double(tiny(sizes=(7, 20, 31, 12), epochs=2))
    alg = FedCAC(tau=0.5, beta=1e-3)  # nobody collaborates
    state, _ = after(alg, s, 1)
    fedavg, _ = after(ALGORITHMS["fedavg"](), s, 1)
    local, _ = after(ALGORITHMS["local"](), s, 1)
    got = alg.send(state.server, some(4, 2))["x"]
    mask = state.server["mask"]
    near(got, torch.where(mask, local.clients["w"], fedavg.server["x"]))
    assert 0.2 < mask.double().mean() < 0.6
    # With all critical and alike, each has the plain mean of all.
    every = FedCAC(tau=1.0, beta=1e9)
    state, _ = after(every, s, 1)
    near(state.server["mask"], torch.ones(4, s.net.size))
    uniform, _ = after(ALGORITHMS["fedavg"](weighting="uniform"), s, 1)
    near(state.server["custom"], uniform.server["x"].expand(4, -1))


def test_an_absent_client_keeps_its_critical_parameters():
    s = double(tiny(sizes=(7, 20, 31, 12)))
    alg = FedCAC()
    state, _ = after(alg, s, [[0, 1, 2]])
    custom = state.server["custom"][2].clone()
    mask = state.server["mask"][2].clone()
    state, _ = after(alg, s, [[0, 1, 3]], state)
    got = alg.send(state.server, some(4, 3))["x"][2]
    assert torch.equal(got, torch.where(mask, custom, state.server["x"]))
