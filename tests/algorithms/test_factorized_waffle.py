"""FactorizedWaffle: the beliefs that stay with clients, both engines, evaluation."""

import pytest
import torch
import torch.nn as nn
from entry_points import strengths
from parts.factorized_waffle import federation, model, setting
from small import after, near

from pflcore import Evaluation, Hardware, Net, Simulation, Training, evaluate
from pflcore.algorithms import ALGORITHMS, FactorizedWaffle
from pflcore.nn import factorize
from pflcore.simulation.round import RunConfig, initial_state


@pytest.mark.parametrize("preset", ["recommended", "paper_literal"])
def test_beliefs_never_leave_the_client(preset):
    """Only the dictionary travels; the server's is the uniform mean of the factors."""
    seen = {}

    class Spy(FactorizedWaffle):
        def train(self, down, client_state, clients):
            new, up, fit = super().train(down, client_state, clients)
            seen.update(down=down, up=up, new=new, own=client_state)
            return new, up, fit

    s = setting()
    alg = Spy(preset=preset, lr_var=0.5)
    state, done = after(alg, s)
    assert set(seen["up"]) == {"delta"} and set(seen["down"]) == set(state.server) == {
        "x"
    }
    assert not alg.report(state.server, done.mix, done.cohort)
    near(state.server["x"], (seen["down"]["x"] + seen["up"]["delta"]).mean(0))
    # With a step size of almost 0 the dictionary stands still, and the beliefs move: so
    # nothing of their movement travels.
    after(alg, setting(lr=1e-300, epochs=4))
    assert (seen["new"]["q"] - seen["own"]["q"]).abs().max() > 0.1
    assert seen["up"]["delta"].abs().max() < 1e-290


def test_a_cached_dictionary_is_the_clients_last_download():
    """A client is evaluated as if the server had not changed since (section 2.3)."""
    s = setting()
    alg = FactorizedWaffle(dictionary="cached")
    state = initial_state(alg, s.net, 3)
    sent = []
    for ids in ([0, 1], [1], [1]):
        sent.append(state.server["x"].clone())
        state, _ = after(alg, s, [ids], state)
    found = evaluate(RunConfig.of(alg, s), state)["loss"]
    now = state.server["x"]
    # Client 0 took part in round 1, client 1 in all three rounds, client 2 in none.
    for i, x in enumerate((sent[0], sent[2], now)):
        state.server["x"] = x
        assert (
            found[i] == evaluate(RunConfig.of(FactorizedWaffle(), s), state)["loss"][i]
        )
    assert len({v.sum().item() for v in (*sent[1:], now)}) == 3


def run_of(alg, rounds, **training):
    training = Training(**training)
    hardware = Hardware(workers=1)
    return Simulation(
        alg, model, federation(), training, rounds=rounds, hardware=hardware
    )


def test_a_server_with_more_factors_serves_what_it_served_and_goes_on():
    """New factors add nothing at first, even where they are on; later they learn."""
    few = run_of(FactorizedWaffle(ranks=(4, 3)), 2, lr=0.1, epochs=2)
    many = run_of(FactorizedWaffle(ranks=(7, 3)), 4, lr=0.1, epochs=2)
    few.run()
    before = few.evaluate("test")["loss"]
    was = few.state.server["x"].clone()
    many.state = many.algorithm.widen_state(few.state, few.config.net, many.config.net)
    near(many.evaluate("test")["loss"], before, 1e-12, 1e-14)
    history = many.run()
    assert len(history.rounds) == 2 and torch.equal(few.state.server["x"], was)
    assert history.state.clients["t"].max() == 2 * few.state.clients["t"].max()


def test_a_simulation_factorizes_the_model():
    run = run_of("factorized_waffle", 2, lr=0.1, batch_size=8)
    names = run.config.net.names
    assert [*names[:3], *names[-2:]] == [
        "0.w_a",
        "0.strength",
        "0.w_b",
        "4.weight",
        "4.bias",
    ]
    history = run.run()
    assert history.rounds[-1]["bytes_up"] == 3 * 8 * run.config.net.size
    own = Net(factorize(model(), 6))
    kept = FactorizedWaffle(ranks=(2, 3)).prepare(own)
    assert strengths(kept).numel() == 12  # a model that has factors keeps them
    with pytest.raises(
        ValueError, match=r"^model: expected one with factorized layers"
    ):
        initial_state(FactorizedWaffle(), Net(model()), 2)


@pytest.mark.deep("it takes a second")
def test_it_learns_what_one_model_cannot():
    """Private factors fit clients with permuted labels, which one model cannot fit."""
    data = federation((60,) * 6)
    training = Training(lr=0.1, batch_size=10, epochs=5)

    def wide():
        return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()

    def accuracy(name, **options):
        alg = ALGORITHMS[name](**options)
        end = Evaluation(every=15)
        run = Simulation(alg, wide, data, training, rounds=15, evaluation=end)
        return float(torch.tensor(run.run().rounds[-1]["eval"]["accuracy"]).mean())

    recommended = accuracy("factorized_waffle")
    assert recommended > accuracy("fedavg") + 0.15
    assert recommended > accuracy("factorized_waffle", preset="paper_literal") + 0.1


@pytest.mark.parametrize(
    ("loss", "width"),
    [("squared", 2), ("binary_cross_entropy", 2), ("cross_entropy", 3)],
)
def test_sampled_models_are_averaged_as_their_loss_has_it(loss, width):
    alg = FactorizedWaffle(eval_mode="mc", ranks=(4,))
    made = lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, width))  # noqa: E731
    net = alg.prepare(Net(made, loss))
    b = torch.rand(3, 4)
    x = torch.randn(7, 5)
    at = strengths(net)
    each = torch.stack(
        [net(net.w0.index_copy(0, at, net.w0[at] * row), x) for row in b]
    )
    want = {
        "squared": each.mean(0),
        "binary_cross_entropy": each.sigmoid().mean(0).logit(),
        "cross_entropy": each.softmax(2).mean(0).log(),
    }[loss]
    got = alg.predict({"w": net.w0, "b": b}, net, x)
    if loss == "cross_entropy":
        got = got.log_softmax(1)
    torch.testing.assert_close(got, want)
