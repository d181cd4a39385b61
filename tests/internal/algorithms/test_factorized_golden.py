"""The Indian buffet process and the factorized layers against golden numbers (float64, printed to
ten digits) and quadrature."""

import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parts.factorized_golden import D, linear, near, t
from scipy import integrate, stats

from pflcore.algorithms import factorized_waffle as ibp


def log_v(u, c, d):
    """log v of a Kumaraswamy(c, d) sample v = (1 - (1 - u)^(1/d))^(1/c), u uniform on (0, 1)."""
    return ibp.log1mexp(torch.log1p(-u) / d) / c


def kl_v(c, d, alpha):
    """KL(Kumaraswamy(c, d) || Beta(alpha, 1)) (Nalisnick and Smyth 2017)."""
    return -(1 - alpha / c) * ibp.harmonic(d) + torch.log(c * d / alpha) - (d - 1) / d


def kl_b(logit, log_p):
    """KL(Bernoulli(sigmoid(logit)) || Bernoulli(exp(log_p))), log_p < 0."""
    pi, log_p = logit.sigmoid(), log_p.clamp(max=ibp.NEAR_ONE)
    return pi * (F.logsigmoid(logit) - log_p) + (1 - pi) * (
        F.logsigmoid(-logit) - ibp.log1mexp(log_p)
    )


def slopes(value, *leaves):
    return torch.autograd.grad(value.sum(), leaves)


U = {"b": t(0.8, 0.35, 0.55), "v": t(0.3, 0.6, 0.2)}
# the three factors of
PI, C, DD, ALPHA = t(0.9, 0.6, 0.3), t(5, 4, 6), t(1, 1.5, 0.8), 5.0


def beliefs():
    return tuple(x.clone().requires_grad_() for x in (PI.logit(), C.log(), DD.log()))


def divergence(logit, log_c, log_d):
    c, d = log_c.exp(), log_d.exp()
    return kl_b(logit, log_v(U["v"], c, d).cumsum(0)) + kl_v(c, d, ALPHA)


# Kumaraswamy and the divergences


def test_kumaraswamy_samples_and_moments():
    u, c, d = t(0.3, 0.3, 0.9, 0.05), t(2, 5, 0.5, 120), t(3, 1, 2, 1)
    near(log_v(u, c, d).exp(), [0.3348074047, 0.7860030856, 0.4675444680, 0.9753445989])
    near(-ibp.harmonic(t(3, 1)) / t(2, 5), [-0.9166666667, -0.2])
    moments = torch.exp(
        math.log(3)
        + torch.lgamma(1 + t(1, 2) / 2)
        + torch.lgamma(t(3))
        - torch.lgamma(1 + t(1, 2) / 2 + 3)
    )
    near(moments, [0.4571428571, 0.25])
    many = log_v((torch.arange(200_000, dtype=D) + 0.5) / 200_000, t(2), t(3)).exp()
    near(torch.stack([many.mean(), (many**2).mean()]), [0.4571428571, 0.25], atol=1e-5)


@pytest.mark.parametrize("d", [0.05, 1.0, 200.0, 1000.0, 8000.0])
def test_samples_hold_in_float32(d):
    u = torch.linspace(1e-4, 1 - 1e-4, 999, dtype=D)
    wide = log_v(u, t(3.0), t(d))
    narrow = u.float().requires_grad_()
    got = log_v(narrow, torch.tensor(3.0), torch.tensor(d))
    torch.testing.assert_close(
        got.double(), log_v(narrow.detach().double(), t(3.0), t(d)), rtol=1e-5, atol=1e-30
    )
    assert torch.autograd.grad(got.sum(), narrow)[0].isfinite().all() and wide.isfinite().all()


def test_kl_v_and_its_gradient():
    c, d, a = t(2, 5, 4, 5, 100, 0.5), t(3, 1, 1, 2, 1.5, 0.3), t(5, 5, 5, 5, 120, 5)
    near(kl_v(c, d, a), [2.2656548901, 0, 0.0268564487, 0.1931471806, 0.1458846791, 2.4989984203])
    c, d = t(2).requires_grad_(), t(3).requires_grad_()
    by_c, by_d = slopes(kl_v(c, d, 5.0), c, d)
    near(torch.cat([by_c, by_d]), [-1.7916666667, 0.6479566558], atol=1e-9)


@pytest.mark.parametrize("c, d, alpha", [(2, 3, 5), (0.5, 0.3, 5), (100, 1.5, 120), (1.3, 0.7, 3)])
def test_kl_v_against_quadrature(c, d, alpha):
    def integrand(z):  # v by the logit of its quantile, so that both ends are seen
        u = 1 / (1 + math.exp(-z))
        logs = log_v(t(u), t(c), t(d)).item()
        q = math.log(c * d) + (c - 1) * logs + (d - 1) * math.log1p(-u) / d
        p = (alpha - 1) * logs + math.log(alpha)
        return (q - p) * u * (1 - u)

    want, _ = integrate.quad(integrand, -33, 33, limit=400)
    near(kl_v(t(c), t(d), alpha), [want], atol=2e-8)


def test_kl_b_and_its_gradient():
    log = t(0.4).log()
    logit = t(0.7).logit().requires_grad_()
    near(kl_b(logit, log), [0.1837868974])
    near(kl_b(t(0.4).logit(), t(0.7).log()), [0.1920419932])
    (by_logit,) = slopes(kl_b(logit, log), logit)
    near(by_logit, [0.2630802234], atol=1e-9)
    near(by_logit / (0.7 * 0.3), [1.2527629685], atol=1e-9)
    for p, q in product((0.01, 0.4, 0.97), (0.02, 0.5, 0.99)):
        near(kl_b(t(p).logit(), t(q).log()), [stats.entropy([p, 1 - p], [q, 1 - q])], atol=1e-12)


def test_three_factors():
    q = beliefs()
    logs = log_v(U["v"], C, DD)
    near(logs.exp(), [0.7860030856, 0.8222553708, 0.7901728290])
    near(logs.cumsum(0).exp(), [0.7860030856, 0.6462952586, 0.5106849529])
    near(kl_b(q[0], logs.cumsum(0)), [0.0458114997, 0.0046047379, 0.0910605310])
    near(kl_v(C, DD, ALPHA), [0, 0.1690812998, 0.0654768224])
    total = divergence(*q)
    near(total.sum(), 0.3760348908)
    want = [
        [0.0806602910, -0.0473589232, -0.1869092777],
        [0.0069238943, -0.4905856768, 0.3828951399],
        [-0.0047861151, 0.4153867213, -0.4104814959],
    ]
    near(torch.stack(slopes(total, *q)), want, atol=1e-9)
    written_out = ibp.kl_slope(
        *(x.detach()[None] for x in q),
        torch.log1p(-U["v"])[None],
        torch.full((1, 3), ALPHA, dtype=D),
        [3],
    )
    near(written_out.view(3, 3), want, atol=1e-9)


def test_the_gradient_written_out_is_autograds():
    gen = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((D, 1e-9), (torch.float32, 2e-4)):
        q = (
            torch.randn(5, 3, 40, generator=gen, dtype=dtype)
            * torch.tensor([3, 1, 1.5], dtype=dtype)[:, None]
        )
        q[:, 1] += 2
        u = torch.rand(5, 40, generator=gen, dtype=dtype) * (1 - 2e-4) + 1e-4
        alpha = torch.full((40,), 7.0, dtype=dtype)
        leaf = q.double().requires_grad_()
        c, d = leaf[:, 1].exp(), leaf[:, 2].exp()
        value = kl_b(leaf[:, 0], ibp.along(log_v(u.double(), c, d), [25, 15])) + kl_v(
            c, d, alpha.double()
        )
        (want,) = slopes(value, leaf)
        got = ibp.kl_slope(*q.unbind(1), torch.log1p(-u), alpha, [25, 15]).view(5, 3, 40)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_the_gradient_written_out_where_leading_factors_are_at_their_bound():
    q = torch.tensor([[0.0, 0.0, 0.5], [7.0, 7.0, 1.0], [-1.0, -1.0, 0.3]], dtype=D)[None]
    u = torch.tensor([[0.99, 0.99, 0.4]], dtype=D)
    leaf = q.clone().requires_grad_()
    c, d = leaf[:, 1].exp(), leaf[:, 2].exp()
    value = kl_b(leaf[:, 0], ibp.along(log_v(u, c, d), [3])) + kl_v(
        c, d, torch.full((3,), 7.0, dtype=D)
    )
    got = ibp.kl_slope(*q.unbind(1), torch.log1p(-u), torch.full((3,), 7.0, dtype=D), [3]).view(
        1, 3, 3
    )
    near(got, slopes(value, leaf)[0].tolist(), atol=1e-9)


def test_concrete():
    pi, u, tau = t(0.7, 0.7, 0.2), t(0.3, 0.5, 0.9), 2 / 3
    logit = pi.logit().requires_grad_()
    b = ibp.concrete(logit, u.logit(), tau)
    near((logit + u.logit()) / tau, [0, 1.2709467906, 1.2163953243], atol=1e-9)
    near(b, [0.5, 0.7809047798, 0.7714285714])
    near(slopes(b, logit)[0], [0.375, 0.2566387571, 0.2644897959], atol=1e-9)


def test_the_priors_means():
    pi = ibp.prior_mean(5, 4)
    near(pi, [0.8333333333, 0.6944444444, 0.5787037037, 0.4822530864])
    near(pi.logit(), [1.6094379124, 0.8209805521, 0.3174542308, -0.0710174872])
    near(pi.sum(), 2.5887345679)
    many = ibp.prior_mean(120, 120)
    near(many[[0, -1]], [0.9917355372, 0.3694069719])
    near(many[0].logit(), 4.7874917428)
    sums = {
        120: 75.6711633697,
        60: 37.7445606223,
        40: 25.1027750521,
        25: 15.6220799437,
        10: 6.1445671057,
    }
    near([ibp.prior_mean(f, f).sum().item() for f in sums], list(sums.values()))


def test_linear_layer():
    first, second, r = (
        [[0.5, -0.2], [0.1, 0.3], [-0.4, 0.25]],
        [[0.2, -0.1], [0.7, 0.6]],
        t(1.5, -0.8),
    )
    b = t(0.9, 0.4)
    # the example is written x W_in W_out
    layer = linear(np.transpose(second).tolist(), (r * b).tolist(), np.transpose(first).tolist())
    near(layer.weight.T, [[0.1798, -0.0291], [-0.0402, -0.0711], [-0.164, 0.006]])
    x, target = (
        torch.tensor([[1, 2, -1], [0.5, -1, 3]], dtype=D),
        torch.tensor([[0.2, 0], [-0.3, 0.1]], dtype=D),
    )
    y = layer(x)
    near(y, [[0.2634, -0.1773], [-0.3619, 0.07455]])
    loss = 0.5 * ((y - target) ** 2).sum(1).mean()
    near(loss, 0.0099835406)
    g_out, g_lam, g_in = slopes(loss, layer.w_a, layer.strength, layer.w_b)
    near(
        g_in.T,
        [[0.0172074375, 0.0146080000], [0.0476921250, 0.0104640000], [-0.0404426250, 0.0182080000]],
        atol=1e-9,
    )
    near(g_out.T, [[0.0909461250, -0.1136075625], [0.0019448000, 0.0056804000]], atol=1e-9)
    near(g_lam, [0.0218888750, -0.0149050000], atol=1e-9)
    near(g_lam * b, [0.0196999875, -0.0059620000], atol=1e-9)  # what the strengths get
    near(g_lam * r, [0.0328333125, 0.0119240000], atol=1e-9)  # and the client's choice
    logit = t(0.7, 0.2).logit().requires_grad_()
    b = ibp.concrete(logit, t(0.8, 0.35).logit(), 2 / 3)
    near(b, [0.9661175500, 0.0470657497])
    y = ((x @ layer.w_b.T) * (r * b)) @ layer.w_a.T
    near(y, [[0.3148652685, -0.1627981297], [-0.3135519152, 0.1442564682]])
    near(
        slopes(0.5 * ((y - target) ** 2).sum(1).mean(), logit)[0],
        [1.8660215040e-3, -9.1028543656e-5],
        atol=1e-12,
    )


def test_a_whole_step():
    first, second = [[0.5, -0.2, 0.1], [0.1, 0.3, -0.3]], [[0.2, -0.1], [0.7, 0.6], [-0.3, 0.4]]
    layer = linear(np.transpose(second).tolist(), [1, -0.5, 0.8], np.transpose(first).tolist())
    x, y = torch.tensor([[1, 2], [0.5, -1], [-0.3, 0.8]], dtype=D), torch.tensor([0, 1, 1])
    logit, log_c, log_d = beliefs()
    b = ibp.concrete(logit, U["b"].logit(), 2 / 3)
    near(b, [0.9953917051, 0.4205877352, 0.2748923127])
    scores = ((x @ layer.w_b.T) * (layer.strength * b)) @ layer.w_a.T
    near(
        scores,
        [
            [0.1134596333, -0.1641307176],
            [0.0656530798, 0.0663275917],
            [-0.0402841742, -0.0546358501],
        ],
    )
    nll = F.cross_entropy(scores, y)
    near(nll, 0.6523706780)
    objective = nll + divergence(logit, log_c, log_d).sum() / 50
    near(objective, 0.6598913758)
    g_l, g_r, g_a, g_b = slopes(objective, logit, layer.strength, layer.w_a, layer.w_b)
    near(g_l, [0.0014329292, 0.0004008987, -0.0179418911], atol=1e-9)
    near(g_r, [-0.0260800277, -0.0031021717, -0.0163236739], atol=1e-9)
    near(
        g_b.T,
        [[-0.0330674404, 0.0023286912, 0.0170465277], [-0.0954630764, 0.0067227469, 0.0492119729]],
        atol=1e-9,
    )
    near(
        g_a.T,
        [
            [-0.0869334261, 0.0869334261],
            [0.0155108583, -0.0155108583],
            [0.0186556273, -0.0186556273],
        ],
        atol=1e-9,
    )
    pi, x0, r = PI, x[:1], layer.strength.detach()
    ways = {
        "mean": pi,
        "thr_soft": pi * (pi >= 0.5),
        "hard": (pi >= 0.5).to(D),
        "all": torch.ones(3, dtype=D),
    }
    found = torch.cat([((x0 @ layer.w_b.T) * (r * way)) @ layer.w_a.T for way in ways.values()])
    near(found, [[0.078, -0.183], [0.042, -0.135], [0, -0.19], [0.12, -0.35]])
