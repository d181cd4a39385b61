"""FactorizedWaffle: what stays with the client, one step by hand, both engines, presets,
evaluation, newcomers."""

import pytest
import torch
import torch.nn as nn
from doors import strengths
from methods import FactorizedWaffle
from parts.factorized_waffle import D, federation, model, play, setting
from torch import Tensor

from pflcore import Clients, Evaluation, Hardware, Net, Simulation, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS
from pflcore.nn import factorize
from pflcore.simulation.round import Setup, begin

# -- privacy -----------------------------------------------------------------


@pytest.mark.parametrize("preset", ["recommended", "paper_literal"])
def test_beliefs_never_leave_the_client(preset):
    seen: dict[str, dict[str, Tensor]] = {}

    class Spy(FactorizedWaffle):
        def train(self, down, own, clients):
            new, up, fit = super().train(down, own, clients)
            seen.update(down=down, up=up, new=new)
            return new, up, fit

    s = setting(lr=1e-300)  # the dictionary stands still, the beliefs do not
    play(Spy(preset=preset, lr_var=0.5), s, 1)
    assert set(seen["up"]) == {"delta"} and set(seen["down"]) == {"x"}
    assert seen["up"]["delta"].shape == seen["down"]["x"].shape == (3, s.net.size)
    fresh = Spy().newcomer({}, s.net, 3)["q"][0]
    assert s.net.size == sum(
        p.numel() for p in factorize(model(), (4, 3)).parameters()
    ) and fresh.shape == (3 * 7,)
    assert (seen["new"]["q"] - fresh).abs().max() > 0.1
    # nothing of the beliefs' way is in what travels
    assert seen["up"]["delta"].abs().max() < 1e-290
    assert all(k not in state for state in (seen["up"], seen["down"]) for k in ("q", "m", "v", "t"))


def test_the_server_keeps_nothing_but_the_dictionary():
    alg, s = FactorizedWaffle(), setting()
    state, done = step(Setup(alg, s), begin(alg, s.net, 3), torch.arange(3))
    assert set(state.server) == {"x"} and set(state.clients) == {"q", "m", "v", "t"}
    assert not alg.report(state.server, done.mix, done.cohort)


def test_a_cached_dictionary_is_the_clients_last_download():
    """Section 2.3, without a connection: evaluated as if the server had stood still since."""
    s, alg = setting(), FactorizedWaffle(dictionary="cached")
    setup, sent = Setup(alg, s), []
    state = begin(alg, s.net, 3)
    for ids in ([0, 1], [1], [1]):
        sent.append(state.server["x"].clone())
        state, _ = step(setup, state, torch.tensor(ids))
    found = evaluate(setup, state)["loss"]
    now = state.server["x"]
    # client 0 was there in round 1, client 1 in all three, client 2 never
    for i, x in enumerate((sent[0], sent[2], now)):
        state.server["x"] = x
        assert found[i] == evaluate(Setup(FactorizedWaffle(), s), state)["loss"][i]
    assert len({v.sum().item() for v in (*sent[1:], now)}) == 3


def test_a_server_with_more_factors_serves_what_it_served_and_goes_on():
    """New factors add nothing at first, even where they are on; then they learn."""
    few, many = (
        Simulation(
            FactorizedWaffle(ranks=ranks),
            model,
            federation(),
            Training(lr=0.1, epochs=2),
            rounds=rounds,
        )
        for ranks, rounds in (((4, 3), 2), ((7, 3), 4))
    )
    few.run()
    before, was = few.evaluate("test")["loss"], few.state.server["x"].clone()
    many.state = many.algorithm.widened(few.state, few.setting.net, many.setting.net)
    torch.testing.assert_close(many.evaluate("test")["loss"], before, rtol=1e-12, atol=1e-14)
    history = many.run()
    assert len(history.rounds) == 2 and torch.equal(few.state.server["x"], was)
    assert history.state.clients["t"].max() == 2 * few.state.clients["t"].max()
    with pytest.raises(ValueError, match=r"^new: expected the same layers with at least \[7, 3\]"):
        few.algorithm.widened(history.state, many.setting.net, few.setting.net)


def test_averaging_is_of_factors_and_uniform():
    s = setting()
    ups: list[Tensor] = []

    class Spy(FactorizedWaffle):
        def train(self, down, own, clients):
            new, up, fit = super().train(down, own, clients)
            ups.append(down["x"] + up["delta"])
            return new, up, fit

    state = play(Spy(), s, 1)
    torch.testing.assert_close(state.server["x"], ups[0].mean(0), rtol=1e-12, atol=1e-14)
    layers = [
        s.net.load(factorize(model(), (4, 3)), row)[0].weight
        for row in [*ups[0], state.server["x"]]
    ]
    # not the average of their products
    assert (torch.stack(layers[:3]).mean(0) - layers[3]).abs().max() > 1e-3


def test_engines_agree_and_neighbours_play_no_part():
    """Clients of different sizes step together in one engine and alone in the other; a client's way
    is its own."""
    alg = FactorizedWaffle()
    a, b = (
        play(alg, setting(engine=e, momentum=0.5, weight_decay=1e-3), 2) for e in ("vmap", "loop")
    )
    for k in a.clients:
        torch.testing.assert_close(a.clients[k], b.clients[k], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(a.server["x"], b.server["x"], rtol=1e-8, atol=1e-10)
    alone = play(alg, setting(momentum=0.5, weight_decay=1e-3), 1, [1])
    together = play(alg, setting(momentum=0.5, weight_decay=1e-3), 1)
    torch.testing.assert_close(
        alone.clients["q"][1], together.clients["q"][1], rtol=1e-9, atol=1e-11
    )


# -- as users meet it --------------------------------------------------------


def test_a_simulation_factorizes_the_model():
    run = Simulation(
        "factorized_waffle",
        model,
        federation(),
        Training(lr=0.1, batch_size=8),
        rounds=2,
        hardware=Hardware(workers=1),
    )
    assert run.setting.net.names[:3] == ["0.w_a", "0.strength", "0.w_b"] and run.setting.net.names[
        -2:
    ] == ["4.weight", "4.bias"]
    history = run.run()
    assert (
        history.stopped is None and history.rounds[-1]["bytes_up"] == 3 * 8 * run.setting.net.size
    )
    own = Simulation(
        FactorizedWaffle(ranks=(2, 3)),
        factorize(model(), 6),
        federation(),
        rounds=1,
        hardware=Hardware(workers=1),
    )
    assert strengths(own.setting.net).numel() == 12  # a model that has factors keeps them
    with pytest.raises(ValueError, match=r"^model: expected one with factorized layers"):
        begin(FactorizedWaffle(), Net(model()), 2)


def test_it_learns_what_one_model_cannot():
    """Half the clients with their labels turned: one model for all cannot be right, private factors
    can."""
    data = federation((60,) * 6)
    t = Training(lr=0.1, batch_size=10, epochs=5)

    def wide():
        return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()

    def accuracy(alg, **options):
        history = Simulation(
            ALGORITHMS[alg](**options),
            wide,
            data,
            t,
            rounds=15,
            evaluation=Evaluation(every=15),
            hardware=Hardware(workers=1),
        ).run()
        return float(torch.tensor(history.rounds[-1]["eval"]["accuracy"]).mean())

    plain, literal = accuracy("fedavg"), accuracy("factorized_waffle", preset="paper_literal")
    recommended = accuracy("factorized_waffle")
    assert recommended > plain + 0.15 and recommended > literal + 0.1


def test_clients_step_together_or_by_size():
    s = setting()
    local = Clients(s, torch.arange(3), 1, torch.zeros(3, 0, dtype=D))
    for more in ({}, {"steps": 3}, {"batches": 2}):
        step = lambda rows, grad, k: {"x": rows["x"] - 0.1 * grad(rows["x"])}  # noqa: E731
        ways = [
            local.each_batch({"x": s.net.w0.expand(3, -1)}, step, together=t, **more).rows["x"]
            for t in (True, False)
        ]
        torch.testing.assert_close(*ways, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("loss", "width"), [("squared", 2), ("binary_cross_entropy", 2), ("cross_entropy", 3)]
)
def test_sampled_models_are_averaged_as_their_loss_has_it(loss, width):
    alg = FactorizedWaffle(eval_mode="mc", ranks=(4,))
    net = alg.prepare(
        Net(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, width)), loss)
    )
    b, x = torch.rand(3, 4), torch.randn(7, 5)
    at = strengths(net)
    each = torch.stack([net(net.w0.index_copy(0, at, net.w0[at] * row), x) for row in b])
    want = {
        "squared": each.mean(0),
        "binary_cross_entropy": each.sigmoid().mean(0).logit(),
        "cross_entropy": each.softmax(2).mean(0).log(),
    }[loss]
    got = alg.predict({"w": net.w0, "b": b}, net, x)
    torch.testing.assert_close(got.log_softmax(1) if loss == "cross_entropy" else got, want)
