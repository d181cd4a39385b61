"""Tests of FactorizedWaffle against golden numbers and a round by hand.

The golden numbers are those of the Indian buffet process, in float64 with ten digits.
Other tests cover the bounds of the beliefs, the ways to evaluate and clients that never
trained.

Symbols: s clients, F factors; u [s, F] uniform draws from (0, 1). The beliefs q [s, 3,
F] hold the logit of pi and the logarithms of c and d.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from entry_points import strengths, views
from parts.factorized_waffle import setting
from places import golden
from small import after, copied
from small import near as close

from pflcore import evaluate
from pflcore.algorithms import FactorizedWaffle
from pflcore.algorithms import _factorized_waffle as ibp
from pflcore.simulation.round import RunConfig
from pflcore.train._random import client_seeds, client_uniforms

D = torch.float64


def t(*values):
    return torch.tensor(values, dtype=D)


def near(got, want, atol=5e-10):
    close(got, want, 1e-7, atol)


def log_v(u, c, d):
    """The logarithm of a Kumaraswamy(c, d) sample v, made from u.

    v = (1 - (1 - u)^(1/d))^(1/c), where u is uniform on (0, 1).
    """
    return ibp.log1mexp(torch.log1p(-u) / d) / c


def kl_v(c, d, alpha):
    """KL(Kumaraswamy(c, d) || Beta(alpha, 1)), by Nalisnick and Smyth 2017."""
    return (
        -(1 - alpha / c) * (torch.digamma(d + 1) + ibp.EULER_GAMMA)
        + torch.log(c * d / alpha)
        - (d - 1) / d
    )


def kl_b(logit, log_p):
    """KL(Bernoulli(sigmoid(logit)) || Bernoulli(exp(log_p))), log_p < 0."""
    pi = logit.sigmoid()
    log_p = log_p.clamp(max=ibp.MAX_LOG_PRODUCT)
    rest = F.logsigmoid(-logit) - ibp.log1mexp(log_p)
    return pi * (F.logsigmoid(logit) - log_p) + (1 - pi) * rest


def divergence(q, u, sizes, alpha):
    """The sum of both divergences for each client and factor, [s, F].

    `sizes` are the numbers of factors of the layers.
    """
    c = q[:, 1].exp()
    d = q[:, 2].exp()
    return kl_b(q[:, 0], ibp.cumsum_by_layer(log_v(u, c, d), sizes)) + kl_v(c, d, alpha)


GOLDEN = golden("indian_buffet")


def test_three_factors():
    """The factors are those of the paper's appendices A-4 and A-10."""
    pi, c, d, u = t(*GOLDEN["factors"])
    q = pi.logit()
    logs = log_v(u, c, d)
    alpha = torch.full((1, 3), 5.0, dtype=D)
    near(logs.exp(), GOLDEN["log_v"])
    near(kl_b(q, logs.cumsum(0)), GOLDEN["kl_b"])
    near(kl_v(c, d, 5.0), GOLDEN["kl_v"])
    beliefs = torch.stack([q, c.log(), d.log()])
    near(divergence(beliefs[None], u[None], [3], alpha).sum(), GOLDEN["kl"])


def test_the_gradient_written_out_is_autograds():
    gen = torch.Generator().manual_seed(0)
    scale = t(3, 1, 1.5)[:, None]
    shift = t(0, 2, 0)[:, None]
    beliefs = torch.randn(5, 3, 40, generator=gen, dtype=D) * scale + shift
    draws = torch.rand(5, 40, generator=gen, dtype=D) * (1 - 2e-4) + 1e-4
    at_bound = t([0.0, 0.0, 0.5], [7.0, 7.0, 1.0], [-1.0, -1.0, 0.3])[None]
    for q, u, sizes in (
        (beliefs, draws, [25, 15]),
        (at_bound, t([0.99, 0.99, 0.4]), [3]),
    ):
        leaf = q.clone().requires_grad_()
        alpha = torch.full(q.shape[2:], 7.0, dtype=D)
        (want,) = torch.autograd.grad(divergence(leaf, u, sizes, alpha).sum(), leaf)
        for dtype, tolerance in ((D, 1e-9), (torch.float32, 2e-4)):
            inputs = [x.to(dtype) for x in (*q.unbind(1), torch.log1p(-u), alpha)]
            got = ibp.kl_slope(*inputs, sizes).view_as(q)
            close(got, want, tolerance, tolerance)


def test_the_priors_means():
    near(ibp.prior_mean(5, 4), GOLDEN["prior"])
    for f, total in GOLDEN["prior_sums"]:
        near(ibp.prior_mean(f, f).sum(), total)


# one round by hand ----------------------------------------------------------


def by_hand(alg, s, client):
    """The client's row and beliefs after its first round, by autograd.

    The objective is written out, and each step takes all samples of the client.
    """
    at = strengths(s.net)
    x, y = s.data.client(client)
    w = s.net.w0.clone().requires_grad_()
    q = alg.init_client({}, s.net, 1)["q"][0].clone().requires_grad_()
    lr = s.training.lr
    weight = 1.0
    optimizers = [torch.optim.SGD([w, q], lr)]
    if alg.preset == "recommended":
        optimizers = [torch.optim.SGD([w], lr), torch.optim.Adam([q], 0.5)]
        weight = 0.01
    seeds = client_seeds([client], s.seed, 1, "beliefs")
    steps = s.training.epochs
    u = client_uniforms(seeds, steps * 14) * (1 - 2e-4) + 1e-4
    for one, other in u.double().view(steps, 2, 1, 7):
        b = torch.sigmoid((q[:7] + one[0].logit()) / alg.tau)
        kl = divergence(q.view(1, 3, 7), other, [4, 3], t(4, 4, 4, 4, 3, 3, 3)).sum()
        nll = F.cross_entropy(s.net(w.index_copy(0, at, w[at] * b), x), y)
        for each in optimizers:
            each.zero_grad()
        (nll + weight * kl / len(y)).backward()
        for each in optimizers:
            each.step()
    return w.detach(), q.detach()


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("preset", ["recommended", "paper_literal"])
def test_a_round_is_what_the_paper_says(engine, preset):
    s = setting(engine=engine, batch_size=100, epochs=3)
    lr_var = 0.5 if preset == "recommended" else None
    alg = FactorizedWaffle(preset=preset, lr_var=lr_var)
    for client in range(3):
        want_w, want_q = by_hand(alg, s, client)
        state = after(alg, s, [[client]])[0]
        close(state.server["x"], want_w, 1e-9, 1e-11)
        close(state.clients["q"][client], want_q, 1e-9, 1e-11)


@pytest.mark.deep("it takes a second")
def test_beliefs_stay_within_bounds_and_weak_kl_moves_them_more():
    s = setting()
    far = after(FactorizedWaffle(lr_var=50.0), s, 3)[0].clients["q"].chunk(3, 1)
    assert [part.abs().max() for part in far] == list(ibp.BELIEF_BOUNDS)
    fresh = FactorizedWaffle().init_client({}, s.net, 1)["q"]

    def mean_change(alg):
        q = after(alg, s, 3)[0].clients["q"]
        return float((q - fresh)[:, :7].abs().mean())

    assert mean_change(FactorizedWaffle(preset="paper_literal")) < 0.05
    assert mean_change(FactorizedWaffle()) > 0.2


# evaluation -----------------------------------------------------------------


def test_evaluation_modes():
    s = setting()
    alg = FactorizedWaffle()
    state, _ = after(alg, s, 3)
    at = strengths(s.net)
    pi = state.clients["q"][:, :7].sigmoid()
    x, y = s.data.client(1, "test")

    def view(**options):
        return views(replace(alg, **options), state, s)[0]

    def scores(b):
        return s.net(state.server["x"].index_copy(0, at, state.server["x"][at] * b), x)

    above = (pi >= 0.5).double()
    for mode, b in {"mean": pi, "thr_soft": pi * above, "hard": above}.items():
        got = view(eval_mode=mode)
        close(got["b"][:, 0], b)
        found = evaluate(RunConfig.of(replace(alg, eval_mode=mode), s), state)
        close(found["loss"][1], F.cross_entropy(scores(b[1]), y))
        close(found["accuracy"][1], (scores(b[1]).argmax(1) == y).double().mean())
    u = (torch.arange(100_000, dtype=D) + 0.5) / 100_000
    want = torch.sigmoid((state.clients["q"][0, 0] + u.logit()) * 1.5).mean()
    got = view(eval_mode="relaxed_mean")["b"][0, 0, 0]
    close(got, want, 1e-4, 0)
    got = view(eval_mode="mc", samples=5)["b"]
    assert got.shape == (3, 5, 7) and len(got[1].unique(dim=0)) == 5


def test_clients_that_never_trained():
    s = setting()
    alg = FactorizedWaffle()
    state, _ = after(alg, s, [[0, 1]] * 3)
    before = copied(state)

    def b(never, **more):
        view, *_ = views(replace(alg, untrained_factors=never, **more), state, s)
        return view["b"][:, 0]

    prior = torch.cat([ibp.prior_mean(4, 4), ibp.prior_mean(3, 3)])
    assert bool((b("all")[2] == 1).all())
    close(b("prior", eval_mode="mean")[2], prior)
    # The clients that trained keep their beliefs.
    assert torch.equal(b("prior")[:2], b("all")[:2])
    assert all(torch.equal(v, before.clients[k]) for k, v in state.clients.items())
    assert torch.equal(state.server["x"], before.server["x"])
