"""Second minibatches, epochs, passes and rounds, and the bounds of rules.

Some formulas differ at the second one. The bounds are those of rules that say "at
least" or "only".
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from parts.edges import normal
from parts.rivals import QUERY, Z
from small import ENGINES, F64, after, at_work, near, some, t, tiny, validated

from pflcore import FedAvg, Net, step
from pflcore.algorithms import (
    APFL,
    L2C,
    Ditto,
    FedAdagrad,
    FedALA,
    FedDWA,
    FineTune,
    KnnPer,
    MixingWeights,
    SharedRows,
    Waffle,
    WeightErosion,
)
from pflcore.robust import Krum
from pflcore.simulation.round import RunConfig


def away(s, by=0.1):
    """Personal models that differ a little from the initial one."""
    gen = torch.Generator().manual_seed(5)
    w0 = s.net.w0.expand(s.data.n, -1)
    return w0 + by * torch.randn(w0.shape, generator=gen)


# steps ------------------------------------------------------------------------


@pytest.mark.deep("together they take seconds", quick=4)
@ENGINES
@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_apfl_learns_alpha_at_a_rounds_first_step(mix, engine):
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
    """Without a pull they differ only where there are several minibatches."""
    s = tiny((8, 8, 8), batch_size=8 // epochs)
    x = s.net.w0.expand(3, -1)

    own, up, _ = Ditto(lam=0.0).train({"x": x}, {"v": x}, at_work(s))

    assert torch.equal(own["v"], at_work(s).fit(x).w)
    assert torch.allclose(up["delta"] + x, own["v"], rtol=0, atol=1e-6) is same


def test_adagrad_needs_no_correction_of_its_sum():
    """With bias_correction="keras" only its momentum is corrected."""
    alg = FedAdagrad(
        server_lr=0.1, beta1=0.9, tau=1e-3, v0=0.0, bias_correction="keras"
    )
    deltas = t([[1.0, -2], [3.0, 4], [-5.0, 0.5]])
    state = alg.init(t([0.0, 0]), 1)
    x = t([0.0, 0])
    m = 0
    v = 0
    for round, d in enumerate(deltas, 1):
        m = 0.9 * m + 0.1 * d
        v = v + d**2
        x = x + 0.1 * m / (1 - 0.9**round) / (v.sqrt() + 1e-3)

        state = state | alg.update(state, {"delta": d[None]}, some(1, round))[0]

        near(state["x"], x)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_full_gradients_ahead_keep_their_momentum(ahead):
    s = tiny(momentum=0.5, weight_decay=0.1)
    clients = at_work(s)
    w = away(s)
    want = w
    move = torch.zeros_like(w)
    for _ in range(ahead):
        move = 0.5 * move + clients.grad(want) + 0.1 * want
        want = want - 0.1 * move

    got = FedDWA(guidance="full_grad", lookahead=ahead).look_ahead(w, clients)

    torch.testing.assert_close(got, want)


def test_l2cs_logits_take_steps_of_adam():
    """Three rounds of three clients, with known gradients, give Adam's logits."""
    alg = L2C(alpha_lr=0.1, alpha_decay=0.01)
    everybody = torch.arange(3)[None]
    zero = torch.zeros(1, 3, dtype=F64)
    delta = t([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.0]])
    down = {"delta": SharedRows(delta, everybody), "who": everybody}
    local = SimpleNamespace(
        grad=lambda w, split: w - 1, fit=lambda w: SimpleNamespace(w=w.clone())
    )
    own = {
        "w": t([[0.0, 0]]),
        "a": t([[0.1, 0, -0.2]]),
        "m": zero,
        "v": zero,
        "t": zero[:, :1],
    }
    a = own["a"]
    m = 0
    v = 0
    for round in (1, 2, 3):
        share = a.softmax(1)
        slope = (own["w"] + share @ delta - 1) @ delta.T
        d = share * (slope - (share * slope).sum()) + 0.01 * a
        m = 0.9 * m + 0.1 * d
        v = 0.999 * v + 0.001 * d**2
        a = a - 0.1 * m / (1 - 0.9**round) / ((v / (1 - 0.999**round)).sqrt() + 1e-8)

        own = alg.train(down, own, local)[0]

        near(own["a"], a)


def test_fedala_learns_one_epoch_after_the_first_time():
    """Losses that settle at once end the first time after `window` + 1 epochs."""
    epochs = []

    class Counted(FedALA):
        def loss(self, *args):
            epochs[-1] += 1
            return super().loss(*args)

    s = tiny((8, 8, 8))  # a batch each
    state = None
    alg = Counted(threshold=1e9, window=4, sample=1.0)
    for _ in range(4):
        epochs.append(0)
        state, _ = after(alg, s, 1, state)

    assert [count / 3 for count in epochs] == [0, 5, 1, 1]


@pytest.mark.parametrize(
    "unit, passes",
    [("samples", [3, 1, 0]), ("batches", [24, 8, 6]), ("epochs", [6, 6, 6])],
)
def test_passes_count_the_rounds_before(unit, passes):
    """Three rounds of batches of 8 are counted, for 7, 20 and 31 samples."""
    s = tiny(epochs=2)
    alg = WeightErosion(size_unit=unit)

    up = alg.train({"x": s.net.w0.expand(3, -1)}, {}, at_work(s, round=4))[1]

    assert up["passes"].tolist() == passes


@pytest.mark.parametrize(
    "round, alone", [(56, (0, 0)), (57, (1, 0)), (58, (1, 0)), (59, (1, 1))]
)
def test_waffles_target_is_alone_at_the_end(round, alone):
    """From round 57 of 60 (.95 R) on, the target has all the weight.

    Two rounds later, it has all the weight in the means as well.
    """
    alg = Waffle(target=1, do=0.0)
    delta = t([[1.0, 0], [1.0, 1], [0.5, 1]])
    cohort = some(3, round, rounds=60)

    smooth, history = alg.smoothed_weights(
        torch.full((3, 2), 1 / 3, dtype=F64), delta, cohort
    )

    assert (history[:, 0] == t([0, 1, 0])).all() == alone[0]
    assert (smooth == t([0, 1, 0])).all() == alone[1]


def test_waffle_averages_the_last_two_rounds():
    alg = Waffle(target=1, do=0.5)
    delta = t([[1.0, 0], [1.0, 1], [0.5, 1]])
    before = t([[0.1, 0.7], [0.6, 0.2], [0.3, 0.1]])

    smooth, history = alg.smoothed_weights(before, delta, some(3, 4, rounds=100))

    assert torch.equal(history[:, 1], before[:, 0])
    near(smooth, (history[:, 0] + before.sum(1)) / 3)


def test_fine_tuning_goes_on_epoch_by_epoch():
    """Every epoch has its own shuffle and goes on from the last one's statistics."""
    s = normal()
    clients = now = at_work(s)
    x = rows = s.net.w0.expand(4, -1)
    for epoch in (1, 2, 3):
        fit = now.fit(rows, epochs=1, stream=f"finetune {epoch}")
        now = clients.after(fit)
        rows = fit.w

    view = FineTune(finetune_epochs=3).model({"x": x}, {}, clients)

    assert torch.equal(view["w"], rows)
    assert torch.equal(view["batch_norm"], now.buffers)


# batch norm -------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
def test_statistics_stay_frozen_with_their_layers(frozen):
    s = normal()
    clients = at_work(s)
    layers = "last" if frozen else "all"
    alg = FineTune(layers=layers, finetune_epochs=2)

    view = alg.model({"x": s.net.w0.expand(4, -1)}, {}, clients)

    assert torch.equal(view["batch_norm"], clients.buffers) is frozen
    assert (view["w"] != s.net.w0).any(1).all()


def test_an_unmixed_client_keeps_its_statistics():
    class Nobody(FedAvg):
        """Mixes the others' models for client 0, and no model for client 1."""

        def update(self, state, up, cohort):
            weight = torch.tensor([[0.0, 0, 0.5, 0.5], [0.0, 0, 0, 0]], dtype=F64)
            return {"x": state["x"]}, MixingWeights(
                weight, receivers=torch.tensor([0, 1])
            )

    s = normal()
    state, _ = after(FedAvg(), s)
    before = state.buffers.clone()
    x = state.server["x"].expand(4, -1)
    trained = replace(at_work(s, round=2), buffers=before).fit(x).buffers

    state, _ = step(RunConfig.of(Nobody(), s), state, torch.arange(4))

    near(state.buffers[0], trained[2:].mean(0))
    assert torch.equal(state.buffers[1:], before[1:])


# bounds -----------------------------------------------------------------------


@pytest.mark.parametrize("hostile, chosen", [(1, 3), (2, 2)])
def test_krum_looks_at_so_many_of_the_nearest(hostile, chosen):
    """With more or fewer than S - f - 2 of seven, another update would win."""
    rows = t([[0.0], [1], [2], [4], [9], [10], [12]])

    _, mix, _ = Krum(hostile)(rows, some(7))

    assert mix.weight.argmax() == chosen
    assert mix.weight.sum() == mix.weight.max() == 1


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


@pytest.mark.parametrize("k", [2, 5, 6, 10])
def test_padding_has_no_vote(k):
    """A client of five samples votes the same when it is padded to eight."""
    net = Net(torch.nn.Linear(2, 3, dtype=F64))
    w = net.w0
    y = torch.tensor([0, 1, 0, 1, 0])
    alone = {"w": w, "z": Z, "y": y, "n": torch.tensor(5)}
    beside = {
        "w": w,
        "z": torch.cat([Z, QUERY.expand(3, -1)]),
        "y": torch.cat([y, torch.tensor([2, 2, 2])]),
        "n": torch.tensor(5),
    }

    votes = [KnnPer(k=k, lam=1.0).predict(view, net, QUERY) for view in (alone, beside)]

    assert torch.equal(*votes)
    assert votes[0][0, 2] == 0


@pytest.mark.parametrize("margin, takes", [(0.0, False), (-1e-9, True)])
def test_an_equal_value_beats_no_margin(margin, takes):
    s = validated(3)
    x = after(FedAvg(), s)[0].server["x"].expand(3, -1)

    w = FineTune(finetune_lr=1e-6, margin=margin).model({"x": x}, {}, at_work(s))["w"]

    assert (w != x).any(1).tolist() == [takes] * 3
