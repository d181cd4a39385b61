"""What Motley's methods are made of: task relations, neighbours, centres; worked examples first,
then laws."""

import torch
from parts.rivals import QUERY, Z
from places import golden
from small import F64, near

from pflcore.algorithms.adaptation import neighbours
from pflcore.algorithms.relations import relation

KERNELS = ("exp", "inverse", "gauss_dim")


def close(a, b, atol=5e-10, rtol=1e-7):
    near(a, b, rtol, atol)


# MOCHA ----------------------------------------------------------------------


def test_task_relations_by_hand():
    for case in golden("mocha"):
        w, delta = torch.tensor(case["w"], dtype=F64), case["delta"]
        close(relation(w, delta, "sigma"), case["sigma"])
        close(relation(w, delta), case["omega"], rtol=case["rtol"])


# kNN-Per --------------------------------------------------------------------
def test_far_points_few_points_and_equal_points():
    far = torch.tensor([[800.0], [801.0], [803.0]], dtype=F64)
    weight, _ = neighbours(torch.zeros(1, 1, dtype=F64), far, 3, 3)
    close(weight, [[0.7053845127, 0.2594964603, 0.0351190270]])
    for kernel in KERNELS:
        for scale in (1e-20, 1.0, 1e12):
            query, store = QUERY.float() * scale, Z.float() * scale
            weight, near = neighbours(query, store, torch.tensor(2), 10, kernel)
            assert weight.isfinite().all() and weight[near >= 2].abs().sum() == 0
            close(weight.sum(1), [1.0])
    weight, near = neighbours(Z[:1], Z[[0, 1, 0]], 3, 3, "inverse")
    assert weight[near != 1].tolist() == [0.5, 0.5]
