"""What Motley's methods are made of: task relations, neighbours, centres; worked examples first,
then laws."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from methods import Ensemble, HypCluster, Mocha
from parts.fine_points import three
from parts.motley_algorithms import D64, QUERY, Line, Z, close
from small import F64, images, tiny_model

from pflcore import Net, Simulation
from pflcore.algorithms import Cohort, Stop
from pflcore.algorithms.adaptation import neighbours
from pflcore.algorithms.clusters import centres
from pflcore.algorithms.relations import relation

KERNELS = ("exp", "inverse", "gauss_dim")


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x + self.b


class Zero(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight), nn.init.zeros_(self.bias)


def test_centres_never_start_equal_and_seeds_follow_the_run():
    drawn = Net(lambda: nn.Linear(4, 3))
    for net in (Net(lambda: Line((0.0,) * 28)), Net(lambda: Zero(5, 3), seed=4), drawn):
        for k in (2, 5):
            rows = centres(net, k, 1)
            assert len(rows.unique(dim=0)) == k and rows.any(1).all()
    assert not torch.equal(centres(drawn, 2, 0), centres(drawn, 2, 1))
    with pytest.raises(ValueError, match=r"^k: .* equal .*\.$"):
        centres(Net(Constant), 2)
    a, b, c = (
        Simulation(HypCluster(k=2, seed=own), tiny_model(), images(), seed=seed).state.server["x"]
        for own, seed in ((None, 0), (None, 1), (0, 1))
    )
    assert torch.equal(a, c) and not torch.equal(a, b)


def test_models_of_an_ensemble_shuffle_apart():
    """Two that start equal go different ways."""
    s, clients = three()
    alg, cohort = Ensemble(k=2), Cohort(clients.ids, clients.size, s.data.n)
    down = alg.send(alg.init(s.net.w0.expand(2, -1), s.data.n, s.net.b0.expand(2, -1)), cohort)
    delta = alg.train(down, {}, clients)[1]["delta"]
    assert not any(torch.equal(a, b) for a, b in delta)


# MOCHA ----------------------------------------------------------------------
W3 = torch.tensor([[1, 0], [1, 1], [-0.5, 2]], dtype=D64)
SIGMA = [
    [0.1784508154, 0.1784240501, -0.0892120250],
    [0.1784240501, 0.2981439337, 0.1501742115],
    [-0.0892120250, 0.1501742115, 0.5234052509],
]
OMEGA = [
    [1544.0086691733, -1233.2139741312, 616.6069870656],
    [-1233.2139741312, 988.8984616546, -493.6134279718],
    [616.6069870656, -493.6134279718, 248.4783196970],
]


def test_task_relations_by_hand():
    sigma, omega = relation(W3, 1e-3, "sigma"), relation(W3, 1e-3)
    close(sigma, SIGMA)
    close(0.5 * 0.01 * torch.trace(W3.T @ sigma @ W3), 0.0194789688)
    close(0.01 * (sigma @ W3)[0], [4.0148087801e-3, 0])
    close(omega, OMEGA, rtol=1e-5)
    close(0.5 * 0.01 * torch.trace(W3.T @ omega @ W3), 0.0698161598, rtol=1e-5)
    close(0.01 * (omega @ W3)[0], [2.4912015093e-2, 0], rtol=1e-5, atol=1e-9)
    close(torch.linalg.eigvalsh(omega)[-1], 2777.2226433, rtol=1e-5)
    w = torch.tensor([[1, 0.2], [0.3, 1]], dtype=D64)
    sigma, omega = relation(w, 0.0, "sigma"), relation(w, 0.0)
    close(sigma, [[0.4937655860, 0.1246882793], [0.1246882793, 0.5062344140]])
    close(omega, [[2.1595744681, -0.5319148936], [-0.5319148936, 2.1063829787]])
    close(torch.trace(w.T @ omega @ w), 4.01)


def test_the_stability_criterion_is_the_spectral_radius():
    """W -> (I - diag(e) Omega) W is what an exchange does to the regulariser; criterion below 2 iff
    its radius is below 1."""
    gen = torch.Generator().manual_seed(0)
    seen = set()
    for lr in (0.001, 0.01, 0.1, 0.3):
        omega = relation(torch.randn(6, 3, generator=gen), 0.05)
        o = omega.diagonal()
        e = (1 - (1 - lr * 0.1 * o) ** 4) / o
        radius = torch.linalg.eigvals(torch.eye(6) - e[:, None] * omega).abs().max()
        stable = bool(radius < 1) and bool((lr * 0.1 * o).max() < 2)
        rates = torch.full((6,), lr, dtype=D64)
        try:
            Mocha(lam=0.1).check(omega, rates, 4 * rates, 1)
            assert stable, lr
        except Stop:
            assert not stable, lr
        seen.add(stable)
    assert seen == {True, False}


# kNN-Per --------------------------------------------------------------------
VOTES = {
    "exp": [0.4379496425, 0.5620503575, 0],
    "inverse": [0.4334356493, 0.5665643507, 0],
    "gauss_dim": [0.4498162177, 0.5501837823, 0],
}


def test_the_vote_of_three_neighbours():
    for kernel, expected in VOTES.items():
        weight, near = neighbours(QUERY, Z, 5, 3, kernel)
        assert set(near[0].tolist()) == {0, 1, 2}
        labels = torch.tensor([0, 1, 1, 2, 0])[near[0]]
        close(torch.zeros(3, dtype=D64).index_add(0, labels, weight[0]), expected)


def test_far_points_few_points_and_equal_points():
    far = torch.tensor([[800.0], [801.0], [803.0]], dtype=D64)
    weight, _ = neighbours(torch.zeros(1, 1, dtype=D64), far, 3, 3)
    close(weight, [[0.7053845127, 0.2594964603, 0.0351190270]])
    for kernel in KERNELS:
        for scale in (1e-20, 1.0, 1e12):
            query, store = QUERY.float() * scale, Z.float() * scale
            weight, near = neighbours(query, store, torch.tensor(2), 10, kernel)
            assert weight.isfinite().all() and weight[near >= 2].abs().sum() == 0
            close(weight.sum(1), [1.0])
    weight, near = neighbours(Z[:1], Z[[0, 1, 0]], 3, 3, "inverse")
    assert weight[near != 1].tolist() == [0.5, 0.5]


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 3))
def test_weights_of_neighbours_sum_to_one_and_fall_with_distance(n, k, seed):
    gen = torch.Generator().manual_seed(seed)
    store, query = torch.randn(12, 3, generator=gen), torch.randn(4, 3, generator=gen)
    for kernel in KERNELS:
        weight, near = neighbours(query, store, n, k, kernel)
        close(weight.sum(1), torch.ones(4), atol=1e-9)
        assert (near[weight > 0] < n).all()
        d = torch.cdist(query.double(), store.double()).gather(1, near)
        assert (weight.diff(dim=1)[d.diff(dim=1) > 0] <= 1e-12).all()


@pytest.mark.parametrize("k", [1, 5])
def test_ties_among_neighbours_do_not_depend_on_the_padding(k):
    gen = torch.Generator().manual_seed(3)
    store = torch.randint(0, 2, (40, 3), generator=gen).double()
    queries = torch.randint(0, 2, (6, 3), generator=gen).double()
    weight, near = neighbours(queries, store, 40, k)
    d = ((queries[:, None] - store) ** 2).sum(2)
    assert near.tolist() == d.sort(dim=1, stable=True).indices[:, :k].tolist()
    for padded in (64, 999):
        wide = torch.cat([store, torch.zeros(padded - 40, 3, dtype=F64)])
        again = neighbours(queries, wide, 40, k)
        assert torch.equal(again[1], near) and torch.equal(again[0], weight)
