"""APFL: golden values, and what its options promise. Its limits alpha = 0 and 1 are law 9 of
test_waffle_laws.py."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from methods import APFL
from small import images, joined, make_setting, play, quadratics, tiny_model

from pflcore import Clients, Net, Training, evaluate, step
from pflcore.simulation.round import Setup

F64 = torch.float64


def golden_steps(**options):
    """w, v, alpha after one and after two rounds of one step each, from the worked example's
    start."""
    net, data = quadratics(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]]), start=[1.0, 0.0])
    s = make_setting(net, data, Training(lr=0.1, batch_size=1), 2)
    alg = APFL(alpha=0.25, **options)
    state = joined(alg, s)
    state.clients["v"][0] = torch.tensor([0.0, 2.0])
    found = []
    for _ in range(2):
        state, _ = step(Setup(alg, s), state, torch.arange(1))
        found.append(
            (
                state.server["x"].clone(),
                state.clients["v"][0].clone(),
                float(state.clients["alpha"]),
            )
        )
    return found


# the same for a model that is linear in its parameters
@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_golden_steps(mix):
    (w1, v1, a1), (w2, v2, a2) = golden_steps(mix=mix)
    assert [*w1.tolist(), *v1.tolist(), a1] == pytest.approx(
        [1.1, 0.2, 0.03125, 2.025, 0.325], abs=1e-12
    )
    golden = [1.19, 0.36, 0.0717886719, 2.0384468750, 0.2671995117]
    assert [*w2.tolist(), *v2.tolist(), a2] == pytest.approx(golden, abs=1e-9)


def test_golden_options():
    assert golden_steps(alpha_decay=0.02)[0][2] == pytest.approx(0.3245, abs=1e-12)
    assert golden_steps(alpha_lr=0.01)[0][2] == pytest.approx(0.2575, abs=1e-12)
    assert golden_steps(alpha_lr=10.0)[0][2] == 1.0  # clipped
    assert golden_steps(adaptive=False)[1][2] == 0.25


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_round_step_by_step(engine, momentum):
    """Against the definition, gradient by gradient: alpha moves at the first step only, all from
    the old values."""
    net, data = Net(lambda: tiny_model()().double()), images()
    data = type(data)(data.x.double(), data.y, data.index, data.classes)
    t = Training(lr=0.1, batch_size=8, epochs=2, momentum=momentum, weight_decay=0.01)
    s = make_setting(net, data, t, 1, engine)
    alg = APFL(alpha=0.3, alpha_lr=5.0)
    gen = torch.Generator().manual_seed(0)
    v0 = net.w0 + 0.3 * torch.randn(3, net.size, generator=gen, dtype=F64)
    own, up = alg.train(
        {"x": net.w0.expand(3, -1)},
        {"v": v0, "alpha": torch.full((3, 1), 0.3, dtype=F64)},
        fresh(s),
    )[:2]

    def update(rows, grad, k):
        w, v, a = rows["w"], rows["v"], rows["a"]
        gw, gm = grad(w), grad(a * v + (1 - a) * w)
        mw = momentum * rows["mw"] + gw + 0.01 * w
        mv = momentum * rows["mv"] + a * gm + 0.01 * v
        slope = ((v - w) * gm).sum(1, keepdim=True)
        return {
            "w": w - 0.1 * mw,
            "v": v - 0.1 * mv,
            "a": (a - 5.0 * slope).clamp(0, 1) if k == 0 else a,
            "mw": mw,
            "mv": mv,
        }

    zero = torch.zeros_like(v0)
    rows = {
        "w": net.w0.repeat(3, 1),
        "v": v0,
        "a": torch.full((3, 1), 0.3, dtype=F64),
        "mw": zero,
        "mv": zero,
    }
    end = fresh(s).each_batch(rows, update)
    torch.testing.assert_close(up["delta"], end.rows["w"] - net.w0, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own["v"], end.rows["v"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own["alpha"], end.rows["a"], rtol=1e-9, atol=1e-12)
    assert (own["alpha"] != 0.3).all() and own["alpha"].unique().numel() > 1


def fresh(s):
    return Clients(s, torch.arange(3), 1, s.net.b0.repeat(3, 1))


def test_alpha_stays_while_the_models_are_one():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=100), 2)
    (one, _), (two, _) = play(APFL(alpha_lr=1.0), s)
    assert (one.clients["alpha"] == 0.5).all() and (two.clients["alpha"] != 0.5).any()


@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_what_is_evaluated(mix):
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), 3)
    alg = APFL(mix=mix, alpha_lr=1.0)
    state = play(alg, s)[-1][0]
    losses = evaluate(Setup(alg, s), state)["loss"]
    for i in range(3):
        x, y = data.client(i, "test")
        w, v, a = state.server["x"], state.clients["v"][i], state.clients["alpha"][i]
        scores = (
            net(a * v + (1 - a) * w, x) if mix == "weights" else a * net(v, x) + (1 - a) * net(w, x)
        )
        assert float(losses[i]) == pytest.approx(float(F.cross_entropy(scores, y)), rel=1e-5)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_statistics_of_batch_norm_are_the_mixtures(engine):
    net = Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)))
    data = images((8, 8, 8))
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), 1, engine)
    local = fresh(s)
    v = net.w0 + torch.randn(3, net.size, generator=torch.Generator().manual_seed(1))
    fit = APFL(alpha=0.5).train(
        {"x": net.w0.expand(3, -1)}, {"v": v, "alpha": torch.full((3, 1), 0.5)}, local
    )[2]
    for i in range(3):
        module = net.load(net.build(), (v[i] + net.w0) / 2, net.b0).train()
        module(data.client(i, "train")[0])
        torch.testing.assert_close(
            fit.buffers[i], torch.cat([module[1].running_mean, module[1].running_var])
        )
