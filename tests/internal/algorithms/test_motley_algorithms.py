"""Tests of the parts of Motley's methods.

The parts are task relations, nearest neighbours and cluster centres. Worked examples
come first, then properties.
"""

from contextlib import nullcontext

import pytest
import torch
from parts.rivals import QUERY, Z
from places import golden
from small import F64, near, some

from pflcore.algorithms import Mocha, Stop
from pflcore.algorithms._adaptation import nearest_neighbours
from pflcore.algorithms._mocha import task_relation

KERNELS = ("exp", "inverse", "gauss_dim")


def close(a, b, atol=5e-10, rtol=1e-7):
    near(a, b, rtol, atol)


# MOCHA ----------------------------------------------------------------------


def test_task_relations_by_hand():
    for case in golden("mocha"):
        w = torch.tensor(case["w"], dtype=F64)
        delta = case["delta"]
        close(task_relation(w, delta, "sigma"), case["sigma"])
        close(task_relation(w, delta), case["omega"], rtol=case["rtol"])


# kNN-Per --------------------------------------------------------------------
def test_far_points_few_points_and_equal_points():
    far = torch.tensor([[800.0], [801.0], [803.0]], dtype=F64)
    weight, _ = nearest_neighbours(torch.zeros(1, 1, dtype=F64), far, 3, 3)
    close(weight, [[0.7053845127, 0.2594964603, 0.0351190270]])
    for kernel in KERNELS:
        for scale in (1e-20, 1.0, 1e12):
            query = QUERY.float() * scale
            store = Z.float() * scale
            weight, near = nearest_neighbours(query, store, torch.tensor(2), 10, kernel)
            assert weight.isfinite().all() and weight[near >= 2].abs().sum() == 0
            close(weight.sum(1), [1.0])
    weight, near = nearest_neighbours(Z[:1], Z[[0, 1, 0]], 3, 3, "inverse")
    assert weight[near != 1].tolist() == [0.5, 0.5]


def test_the_stability_criterion_is_the_spectral_radius():
    """The run stops exactly where the regulariser would grow.

    An exchange maps W to (I - diag(e) Omega) W in the regulariser. The criterion is
    below 2 if and only if the spectral radius of this map is below 1.
    """
    gen = torch.Generator().manual_seed(0)
    seen = set()
    for lr in (0.001, 0.01, 0.1, 0.3):
        omega = task_relation(torch.randn(6, 3, generator=gen), 0.05)
        o = omega.diagonal()
        e = (1 - (1 - lr * 0.1 * o) ** 4) / o
        radius = torch.linalg.eigvals(torch.eye(6) - e[:, None] * omega).abs().max()
        stable = bool(radius < 1) and bool((lr * 0.1 * o).max() < 2)
        rates = torch.full((6,), lr, dtype=F64)
        steps = torch.full_like(rates, 4)
        with nullcontext() if stable else pytest.raises(Stop):
            Mocha(lam=0.1).check_stability(omega, rates, steps, some(6, 1))
        seen.add(stable)
    assert seen == {True, False}
