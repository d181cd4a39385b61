"""FactorizedWaffle's round against its objective, written out, with the numbers that the client drew."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from algorithms_help import strengths
from methods import FactorizedWaffle
from small import Setting, images, make_setting, play
from torch import Tensor

from pflcore import Federation, Net, Training
from pflcore.algorithms import ibp
from pflcore.local.random import client_seeds, uniforms
from pflcore.nn import factorize

D = torch.float64


def by_hand(alg: FactorizedWaffle, s: Setting, client: int) -> tuple[Tensor, Tensor]:
    """One client's first round, whole batches, written with autograd on the objective: its row and beliefs afterwards."""
    at, sizes = strengths(s.net), [4, 3]
    q = alg.init(s.net, 1)[1]["q"].clone()
    w, (x, y) = s.net.w0.clone(), s.data.client(client)
    m, v = torch.zeros_like(q), torch.zeros_like(q)
    steps = s.training.epochs
    u = ((uniforms(client_seeds([client], s.seed, 1, "beliefs"), steps * 14) * (1 - 2e-4)) + 1e-4).double().view(steps, 2, 7)
    alpha = torch.tensor([4.0] * 4 + [3.0] * 3, dtype=D)
    for k in range(steps):
        w, q = w.detach().requires_grad_(), q.detach().requires_grad_()
        logit, c, d = q[:7], q[7:14].exp(), q[14:].exp()
        b = torch.sigmoid((logit + torch.log(u[k, 0] / (1 - u[k, 0]))) / alg.tau)
        v_sample = (1 - (1 - u[k, 1]) ** (1 / d)) ** (1 / c)
        p = torch.cat([part.cumprod(0) for part in v_sample.split(sizes)])
        pi = logit.sigmoid()
        kl_b = pi * (pi / p).log() + (1 - pi) * ((1 - pi) / (1 - p)).log()
        kl_v = -(1 - alpha / c) * (torch.digamma(d + 1) + ibp.EULER) + (c * d / alpha).log() - (d - 1) / d
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


@pytest.mark.parametrize("engine", ["vmap", "threads"])
@pytest.mark.parametrize("preset", ["recommended", "paper_literal"])
def test_a_round_is_what_the_paper_says(engine: str, preset: str) -> None:
    data = images((9, 20, 31), classes=3)
    data = Federation(data.x.double(), data.y, data.index, 3, data.relabel)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    s = make_setting(Net(factorize(model, (4, 3)), seed=1), data, Training(lr=0.1, batch_size=100, epochs=3), 1, engine)
    alg = FactorizedWaffle(preset=preset, lr_var=0.5 if preset == "recommended" else None)
    for client in range(3):
        want_w, want_q = by_hand(alg, s, client)
        state = play(alg, s, 1, lambda _, client=client: [client])[0][0]  # type: ignore[misc]
        torch.testing.assert_close(state.g["x"], want_w, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state.own["q"][client], want_q, rtol=1e-9, atol=1e-11)
