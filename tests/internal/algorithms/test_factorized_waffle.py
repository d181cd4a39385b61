"""FactorizedWaffle: what stays with the client, one step by hand, both engines, presets,
evaluation, newcomers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from doors import strengths, views
from methods import FactorizedWaffle
from parts.factorized_waffle import D, play, setting
from small import copied

from pflcore import Clients, evaluate
from pflcore.algorithms import factorized_waffle as ibp
from pflcore.algorithms.factorized_waffle import BOUNDS
from pflcore.simulation.round import Setup
from pflcore.train.random import client_seeds, uniforms

# -- one round by hand -------------------------------------------------------


def by_hand(alg, s, client):
    """One client's first round, whole batches, written with autograd on the objective: its row and
    beliefs afterwards."""
    at, sizes = strengths(s.net), [4, 3]
    q = alg.newcomer({}, s.net, 1)["q"][0].clone()
    w, (x, y) = s.net.w0.clone(), s.data.client(client)
    m, v = torch.zeros_like(q), torch.zeros_like(q)
    steps = s.training.epochs
    u = (
        ((uniforms(client_seeds([client], s.seed, 1, "beliefs"), steps * 14) * (1 - 2e-4)) + 1e-4)
        .double()
        .view(steps, 2, 7)
    )
    alpha = torch.tensor([4.0] * 4 + [3.0] * 3, dtype=D)
    for k in range(steps):
        w, q = w.detach().requires_grad_(), q.detach().requires_grad_()
        logit, c, d = q[:7], q[7:14].exp(), q[14:].exp()
        b = torch.sigmoid((logit + torch.log(u[k, 0] / (1 - u[k, 0]))) / alg.tau)
        v_sample = (1 - (1 - u[k, 1]) ** (1 / d)) ** (1 / c)
        p = torch.cat([part.cumprod(0) for part in v_sample.split(sizes)])
        pi = logit.sigmoid()
        kl_b = pi * (pi / p).log() + (1 - pi) * ((1 - pi) / (1 - p)).log()
        kl_v = (
            -(1 - alpha / c) * (torch.digamma(d + 1) + ibp.EULER)
            + (c * d / alpha).log()
            - (d - 1) / d
        )
        row = w.index_copy(0, at, w[at] * b)
        weight = 0.01 if alg.preset == "recommended" else 1.0
        objective = F.cross_entropy(s.net(row, x), y) + weight * (kl_b + kl_v).sum() / len(y)
        by_w, by_q = torch.autograd.grad(objective, [w, q])
        w = w - s.training.lr * by_w
        if alg.preset == "recommended":
            m, v = 0.9 * m + 0.1 * by_q, 0.999 * v + 0.001 * by_q**2
            by_q = 0.5 * (m / (1 - 0.9 ** (k + 1))) / ((v / (1 - 0.999 ** (k + 1))).sqrt() + 1e-8)
            q = q - by_q
        else:
            q = q - s.training.lr * by_q
    return w.detach(), q.detach()


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("preset", ["recommended", "paper_literal"])
def test_a_round_is_what_the_paper_says(engine, preset):
    s = setting(engine=engine, batch_size=100, epochs=3)
    alg = FactorizedWaffle(preset=preset, lr_var=0.5 if preset == "recommended" else None)
    for client in range(3):
        want_w, want_q = by_hand(alg, s, client)
        state = play(alg, s, 1, [client])
        torch.testing.assert_close(state.server["x"], want_w, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state.clients["q"][client], want_q, rtol=1e-9, atol=1e-11)


def test_beliefs_stay_within_bounds_and_weak_kl_moves_them_more():
    s = setting()
    far = play(FactorizedWaffle(lr_var=50.0), s, 3).clients["q"].chunk(3, 1)
    for part, bound in zip(far, BOUNDS, strict=True):
        assert part.abs().max() == bound
    fresh = FactorizedWaffle().newcomer({}, s.net, 1)["q"]

    def moved(alg):
        return float((play(alg, s, 3).clients["q"] - fresh)[:, :7].abs().mean())

    assert moved(FactorizedWaffle(preset="paper_literal")) < 0.05 < 0.2 < moved(FactorizedWaffle())


# -- evaluation --------------------------------------------------------------


def test_evaluation_modes():
    s = setting()
    alg = FactorizedWaffle()
    state = play(alg, s, 3)
    at, pi = strengths(s.net), state.clients["q"][:, :7].sigmoid()
    ways = {"mean": pi, "thr_soft": pi * (pi >= 0.5), "hard": (pi >= 0.5).double()}
    local = Clients(s, torch.arange(3), 3, state.batch_norm)
    for mode, b in ways.items():
        other = replace(alg, eval_mode=mode)
        view = other.model({"x": state.server["x"].expand(3, -1)}, state.clients, local)
        torch.testing.assert_close(view["b"][:, 0], b)
        x, y = s.data.client(1, "test")
        scores = other.predict({k: v[1] for k, v in view.items()}, s.net, x)
        row = state.server["x"].index_copy(0, at, state.server["x"][at] * b[1])
        torch.testing.assert_close(scores, s.net(row, x))
        want = (s.net(row, x).argmax(1) == y).double().mean()
        torch.testing.assert_close(evaluate(Setup(other, s), state)["accuracy"][1], want)
    u = (torch.arange(100_000, dtype=D) + 0.5) / 100_000
    want = torch.sigmoid((state.clients["q"][0, 0] + u.logit()) * 1.5).mean()
    view = replace(alg, eval_mode="relaxed_mean").model(
        {"x": state.server["x"].expand(3, -1)}, state.clients, local
    )
    torch.testing.assert_close(view["b"][0, 0, 0], want, rtol=1e-4, atol=0)
    few, many = (
        evaluate(Setup(replace(alg, eval_mode="mc", samples=n), s), state)["loss"] for n in (1, 400)
    )
    assert few.shape == many.shape == (3,) and not torch.equal(few, many)
    x, _ = s.data.client(0, "test")
    view = replace(alg, eval_mode="mc", samples=5).model(
        {"x": state.server["x"].expand(3, -1)}, state.clients, local
    )
    mean = torch.stack(
        [
            s.net(state.server["x"].index_copy(0, at, state.server["x"][at] * b), x).softmax(1)
            for b in view["b"][0]
        ]
    ).mean(0)
    torch.testing.assert_close(
        alg.predict({k: v[0] for k, v in view.items()}, s.net, x).softmax(1), mean
    )


def test_clients_that_never_trained():
    s = setting()
    alg = FactorizedWaffle()
    state = play(alg, s, 3, [0, 1])
    before = copied(state)

    def b(never, **more):
        return views(replace(alg, never=never, **more), state, s, torch.arange(3))[0]["b"][:, 0]

    prior = torch.cat([ibp.prior_mean(4, 4), ibp.prior_mean(3, 3)])
    assert bool((b("all")[2] == 1).all())
    torch.testing.assert_close(b("prior", eval_mode="mean")[2], prior)
    adapted = b("adapt", eval_mode="mean", adapt_epochs=20)
    assert (adapted[2] - prior).abs().max() > 0.1
    for ways in (b("prior"), b("adapt")):
        assert torch.equal(ways[:2], b("all")[:2])  # those who trained keep their beliefs
    for name in ("all", "adapt"):
        evaluate(Setup(replace(alg, never=name), s), state)
    assert all(torch.equal(v, before.clients[k]) for k, v in state.clients.items()) and torch.equal(
        state.server["x"], before.server["x"]
    )
    found = {
        n: evaluate(Setup(replace(alg, never=n, adapt_epochs=30), s), state, "train")["loss"][2]
        for n in ("prior", "adapt")
    }
    assert found["adapt"] < found["prior"]  # the dictionary frozen, the beliefs fitted
