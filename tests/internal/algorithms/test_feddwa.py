"""FedDWA: golden values, what its weights must obey, and the rounds around them."""

import pytest
import torch
from parts.feddwa import GOLDEN, dense
from small import near as close
from small import t

from pflcore import ops
from pflcore.algorithms.feddwa import inner_products, simplex_qp, strided

# the exact problem ----------------------------------------------------------


def w_matrix(g, models):
    return inner_products(ops.pairwise_sqdist(g[None], models)[0], ops.pairwise_sqdist(models))


@pytest.mark.parametrize(
    "name", ["B1_qp_interior", "B2_qp_singular_but_unique", "B3_qp_eq13_negative"]
)
@pytest.mark.parametrize("ridge", [0.0, 1e-10])
def test_golden_qp(name, ridge):
    b = GOLDEN[name]
    w = w_matrix(t(b["guidance"]), t(b["models"]))
    close(w, b["Wmat"])
    p = simplex_qp(w, ridge)
    close(p, b["p_simplex_QP"], 1e-8)
    torch.testing.assert_close(p @ w @ p, t(b["obj_QP"]), rtol=1e-9, atol=1e-12)
    if b["p_eq13"] is not None:
        affine = torch.linalg.solve(w, torch.ones(3, dtype=torch.float64))
        close(affine / affine.sum(), b["p_eq13"])  # no solution of Eq. 12 where it is negative


def kkt(w, p):
    """By how much p misses the conditions of optimality, relative to W."""
    slope = w @ p / w.diagonal().max()
    mu = p @ slope
    worst = (mu - slope).clamp(min=0).max()
    return max(
        float(worst),
        float(((slope - mu).abs() * (p > 1e-9)).max()),
        float((-p).clamp(min=0).max()),
        abs(float(p.sum()) - 1),
    )


@pytest.mark.parametrize("seed", range(25))
def test_qp_satisfies_kkt_and_beats_eq15(seed):
    gen = torch.Generator().manual_seed(seed)
    m, dim = (
        int(torch.randint(1, 45, (), generator=gen)),
        int(torch.randint(1, 60, (), generator=gen)),
    )
    scale = 10.0 ** float(torch.randint(-6, 4, (), generator=gen))
    models = 1 + scale * torch.randn(m, dim, generator=gen, dtype=torch.float64)
    g = 1 + scale * torch.randn(dim, generator=gen, dtype=torch.float64) * (0.1 if seed % 2 else 2)
    if seed % 5 == 0 and m > 3:
        models[1], models[2] = models[0], (models[0] + models[3]) / 2  # affinely dependent
    if seed % 7 == 0:
        g = models[-1].clone()
    w = w_matrix(g, models)
    p = simplex_qp(w)
    assert kkt(w, p) < 1e-8
    p15 = dense(ops.feddwa_weights(w.diagonal()[None], m), m)[0]
    residual, residual15 = (((q @ models - g) ** 2).sum() for q in (p, p15))
    assert residual <= residual15 + 1e-9 * w.diagonal().max()


def test_qp_picks_the_shortest_of_several_optima():
    torch.testing.assert_close(
        simplex_qp(torch.diag(t([0, 0, 1]))), t([0.5, 0.5, 0.0]), rtol=0, atol=1e-5
    )
    close(simplex_qp(torch.zeros(3, 3)), [1 / 3] * 3)
    # dependent models, rank 1, and yet one optimum
    one = simplex_qp(w_matrix(t([-5.0]), t([[1.0], [2.0], [3.0]])))
    close(one, [1.0, 0.0, 0.0])


def test_qp_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"^w: expected a square matrix"):
        simplex_qp(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"^w: expected finite entries"):
        simplex_qp(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match=r"^ridge:"):
        simplex_qp(torch.eye(2), -1.0)


# beside the paper -----------------------------------------------------------


def test_a_strided_guidance_is_as_far_as_the_nearest_other():
    w, guide = (
        torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]),
        torch.tensor([[0.01, 0.0], [3.0, 9.0], [3.0, 5.0]]),
    )
    # who does not move has no direction
    close(strided(guide, w, 0.5), [[2.5, 0.0], [3.0, 4.5], [3.0, 5.0]])
    # and alone there is no other
    close(strided(guide[:1], w[:1], 0.5), guide[:1].tolist(), rtol=1e-6)
