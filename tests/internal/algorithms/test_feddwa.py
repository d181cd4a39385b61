"""FedDWA's quadratic programme: golden values, optimality, and the guidance beside the paper."""

import pytest
import torch
from parts.rivals import GOLDEN
from small import near as close
from small import t

from pflcore import ops
from pflcore.algorithms.relations import inner_products, simplex_qp, strided


def w_matrix(g, models):
    return inner_products(ops.pairwise_sqdist(g[None], models)[0], ops.pairwise_sqdist(models))


@pytest.mark.parametrize(
    "name", ["B1_qp_interior", "B2_qp_singular_but_unique", "B3_qp_eq13_negative"]
)
def test_golden_qp(name):
    b = GOLDEN[name]
    w = w_matrix(t(b["guidance"]), t(b["models"]))
    close(w, b["Wmat"])
    for ridge in (0.0, 1e-10):
        p = simplex_qp(w, ridge)
        close(p, b["p_simplex_QP"], 1e-8)
        close(p @ w @ p, b["obj_QP"])


@pytest.mark.parametrize("seed", range(15))
def test_qp_satisfies_kkt(seed):
    gen = torch.Generator().manual_seed(seed)
    m, dim = (int(torch.randint(1, n, (), generator=gen)) for n in (45, 60))
    scale = 10.0 ** float(torch.randint(-6, 4, (), generator=gen))
    models = 1 + scale * torch.randn(m, dim, generator=gen, dtype=torch.float64)
    g = 1 + scale * torch.randn(dim, generator=gen, dtype=torch.float64) * (0.1 if seed % 2 else 2)
    if seed % 5 == 0 and m > 3:
        models[1], models[2] = models[0], (models[0] + models[3]) / 2  # affinely dependent
    if seed % 7 == 0:
        g = models[-1].clone()
    w = w_matrix(g, models)
    p = simplex_qp(w)
    slope = w @ p / w.diagonal().max()
    mu = p @ slope
    assert (slope > mu - 1e-8).all() and ((slope - mu).abs() * (p > 1e-9)).max() < 1e-8
    assert (p > -1e-8).all() and abs(float(p.sum()) - 1) < 1e-8


def test_qp_picks_the_shortest_of_several_optima():
    several = simplex_qp(torch.diag(t([0, 0, 1])))
    close(several, [0.5, 0.5, 0.0], 0, 1e-5)
    close(simplex_qp(torch.zeros(3, 3)), [1 / 3] * 3)
    # dependent models, rank 1, and yet one optimum
    close(simplex_qp(w_matrix(t([-5.0]), t([[1.0], [2.0], [3.0]]))), [1.0, 0.0, 0.0])


def test_a_strided_guidance_is_as_far_as_the_nearest_other():
    w = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])
    guide = torch.tensor([[0.01, 0.0], [3.0, 9.0], [3.0, 5.0]])
    # a client that does not move has no direction
    close(strided(guide, w, 0.5), [[2.5, 0.0], [3.0, 4.5], [3.0, 5.0]])
    # and alone there is no other
    close(strided(guide[:1], w[:1], 0.5), guide[:1].tolist(), rtol=1e-6)
