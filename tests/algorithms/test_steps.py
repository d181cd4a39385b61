"""What happens at a second minibatch, epoch, pass or round, where a formula says so; and at the
very bound where a rule says "at least" or "only"."""

from dataclasses import replace

import pytest
import torch
from methods import APFL, Ditto, FedAdagrad, FineTune, KnnPer
from parts.edges import normal
from small import ENGINES, F64, after, at_work, near, some, t, tiny, validated

from pflcore import FedAvg, step
from pflcore.algorithms import Mix
from pflcore.simulation.round import Setup


def away(s, by=0.1):
    """Personal models beside the initial one."""
    gen = torch.Generator().manual_seed(5)
    w0 = s.net.w0.expand(s.data.n, -1)
    return w0 + by * torch.randn(w0.shape, generator=gen)


# steps ---------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_apfl_learns_alpha_at_the_first_step_of_a_round_only(mix, engine):
    def alpha(epochs):
        s = tiny(engine=engine, batch_size=100, epochs=epochs)
        own = {"v": away(s), "alpha": torch.full((3, 1), 0.5)}
        x = s.net.w0.expand(3, -1)
        return APFL(mix=mix, alpha_lr=1.0).train({"x": x}, own, at_work(s))[0]["alpha"]

    first = alpha(1)

    assert (first != 0.5).all()
    assert all(torch.equal(alpha(epochs), first) for epochs in (2, 3, 4, 5))


@pytest.mark.parametrize("epochs, same", [(1, True), (2, False)])
def test_dittos_two_passes_shuffle_separately(epochs, same):
    """From one start with no pull they part where minibatches matter, and only there."""
    s = tiny((8, 8, 8), batch_size=8 // epochs)
    x = s.net.w0.expand(3, -1)

    own, up, _ = Ditto(lam=0.0).train({"x": x}, {"v": x}, at_work(s))

    assert torch.equal(own["v"], at_work(s).fit(x).w)
    assert torch.allclose(up["delta"] + x, own["v"], rtol=0, atol=1e-6) is same


def test_adagrad_needs_no_correction_of_its_sum():
    """With bias_correction="keras" its momentum alone is corrected."""
    alg = FedAdagrad(server_lr=0.1, beta1=0.9, tau=1e-3, v0=0.0, bias_correction="keras")
    deltas, state = t([[1.0, -2], [3.0, 4], [-5.0, 0.5]]), alg.init(t([0.0, 0]), 1)
    x, m, v = t([0.0, 0]), 0, 0
    for round, d in enumerate(deltas, 1):
        m = 0.9 * m + 0.1 * d
        v = v + d**2
        x = x + 0.1 * m / (1 - 0.9**round) / (v.sqrt() + 1e-3)

        state = state | alg.update(state, {"delta": d[None]}, some(1, round))[0]

        near(state["x"], x)


# batch norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
def test_statistics_stay_frozen_with_their_layers_in_fine_tuning(frozen):
    s = normal()
    clients = at_work(s)
    alg = FineTune(layers="last" if frozen else "all", finetune_epochs=2)

    view = alg.model({"x": s.net.w0.expand(4, -1)}, {}, clients)

    assert torch.equal(view["batch_norm"], clients.buffers) is frozen
    assert (view["w"] != s.net.w0).any(1).all()


def test_who_is_mixed_of_nobody_keeps_its_statistics():
    class Nobody(FedAvg):
        """Mixes the others' models for client 0, and nobody's for client 1."""

        def update(self, state, up, cohort):
            weight = torch.tensor([[0.0, 0, 0.5, 0.5], [0.0, 0, 0, 0]], dtype=F64)
            return {"x": state["x"]}, Mix(weight, rows=torch.tensor([0, 1]))

    s = normal()
    state, _ = after(FedAvg(), s)
    before, x = state.batch_norm.clone(), state.server["x"].expand(4, -1)
    trained = replace(at_work(s, round=2), buffers=before).fit(x).buffers

    state, _ = step(Setup(Nobody(), s), state, torch.arange(4))

    near(state.batch_norm[0], trained[2:].mean(0))
    assert torch.equal(state.batch_norm[1:], before[1:])


# bounds --------------------------------------------------------------------------------------


def test_fine_tuning_takes_clients_of_exactly_min_size():
    s = tiny((19, 20, 21))
    x = s.net.w0.expand(3, -1)

    w = FineTune(min_size=20).model({"x": x}, {}, at_work(s))["w"]

    assert (w != x).any(1).tolist() == [False, True, True]


def test_knnper_takes_clients_of_exactly_min_size():
    s = tiny((19, 20, 21))
    x = s.net.w0.expand(3, -1)

    lam = KnnPer(min_size=20, lam=0.25).model({"x": x}, {}, at_work(s))["lam"]

    assert lam.tolist() == [0, 0.25, 0.25]


@pytest.mark.parametrize("margin, takes", [(0.0, False), (-1e-9, True)])
def test_a_margin_is_not_beaten_by_a_model_as_good(margin, takes):
    s = validated(3)
    x = after(FedAvg(), s)[0].server["x"].expand(3, -1)

    w = FineTune(finetune_lr=1e-6, margin=margin).model({"x": x}, {}, at_work(s))["w"]

    assert (w != x).any(1).tolist() == [takes] * 3
