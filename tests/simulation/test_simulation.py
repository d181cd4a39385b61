"""The loop: records, warm starts, what is said at the end, cohorts."""

import warnings

import pytest
import torch
from doors import held_out, sentence, views
from methods import MRMTL, Ditto, Mocha, PFedMe, QFedAvg, Scaffold, Waffle
from parts.user import simulation as run
from small import grouped, images, lines, make_setting, near, play, tiny, tiny_model, with_test
from torch import nn

from pflcore import Adversary, Federation, Net, Simulation, Training, step
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.simulation.round import Setup, begin


def test_a_record_counts_what_travels():
    history = run(every=2).run()
    size = 59 * 4
    assert [(r["bytes_down"], r["bytes_up"]) for r in history.rounds] == [(3 * size, 3 * size)] * 3
    assert [r["round"] for r in history.rounds if r["eval"]] == [2, 3]  # every second, and the last
    rounds, accuracy = history.series()
    assert rounds == [2, 3] and accuracy.shape == (2, 3)


SPLITTING = {"first": 0, "eps1": 10.0, "eps2": 0.0}


@pytest.mark.parametrize(
    "algorithm", ["waffle", "l2c", ALGORITHMS["clustered_fl"](**SPLITTING)], ids=str
)
def test_a_run_goes_on_from_a_state_as_if_it_had_not_stopped(algorithm):
    """Also from the state of a server that has grown."""
    data = held_out(images())
    whole, half = (run(algorithm, data, rounds=6) for _ in range(2))
    want, rounds = whole.run(), half.iterate()
    for _ in range(3):
        next(rounds)
    rest = run(algorithm, data, rounds=6, warm_start=half.state).run()
    assert [r["round"] for r in rest.rounds] == [4, 5, 6]
    assert all(torch.equal(v, want.state.server[k]) for k, v in rest.state.server.items())


def test_a_run_of_many_rounds_ends_with_the_last():
    many = run("local", rounds=260, every=0)
    assert len(many.run().rounds) == many.state.round == 260


# what is said at the end ----------------------------------------------------
def said(scale=1.0, labels=1.0, **options):
    """The warnings of a run whose last client has features, and test targets, times so much."""
    train = [(torch.randn(12, 4) * s, torch.randn(12)) for s in (1.0, 1.0, 1.0, scale)]
    x, y = train[-1]
    data = Federation.from_clients(with_test(train, [*train[:3], (x, y * labels)]))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model, training = nn.Linear(4, 1), Training(lr=0.01)
        Simulation("fedavg", model, data, training, rounds=3, **grouped(options)).run()
    return [str(w.message) for w in found if w.category is RuntimeWarning]


def test_a_runaway_update_is_named_once_with_clip():
    """As are those who were dropped, and losses of infinity; a quiet run says nothing."""
    assert said() == said(adversary=Adversary("scale", [1], 1e3)) == []
    (far,) = said(adversary=Adversary("scale", [1], 1e8))
    assert "client 1's update was" in far and "clip" in far
    dropped, *_ = said(1e25)
    assert "client(s) [3] were dropped in most of their rounds" in dropped and "lower lr" in dropped
    (loss,) = said(labels=1e30)
    assert "the last loss of client(s) [3] is inf" in loss


# cohorts --------------------------------------------------------------------
@pytest.mark.parametrize(
    "alg", [Ditto(lam=0.5), MRMTL(lam=0.5), PFedMe(personal_lr=0.1), Mocha(lam=1e-3)]
)
def test_who_never_joined_is_served_what_the_server_has_and_starts_there(alg):
    s = lines()
    ids = [0, 1, 2, 3]
    state = play(alg, s, 12, lambda r: ids)[-1][0]
    shared = state.server["x"] if "x" in state.server else state.server["w"][ids].mean(0)
    assert shared.abs().min() > 0.5
    near(views(alg, state, s, torch.arange(6))[0]["w"][4:], shared.expand(2, -1))
    after = step(Setup(alg, s), state, torch.tensor([4]))[0]
    key = next(k for k in ("v", "theta", "w") if k in after.clients)
    assert 0 < (after.clients[key][4] - shared).abs() < (after.clients[key][4] - s.net.w0).abs()


@pytest.mark.parametrize("name", ["fedfomo", "l2c", "feddwa", "scaffold", "hypcluster"])
def test_the_order_of_a_cohorts_ids_changes_nothing(name):
    data = held_out(images((20, 25, 30, 35, 22)))
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=8), rounds=9)
    alg = ALGORITHMS[name](**({"m": 2} if name == "fedfomo" else {}))
    found = []
    for orders in ([range(5), [0, 2, 4], [1, 2, 3]], [[3, 1, 0, 4, 2], [4, 0, 2], [2, 3, 1]]):
        state = begin(alg, s.net, 5)
        for ids in orders:
            state, done = step(Setup(alg, s), state, torch.tensor(ids))
            assert done.ids == sorted(ids)
        found.append(state.server | state.clients)
    assert all(torch.equal(v, found[1][k]) for k, v in found[0].items())
    with sentence("ids: expected each client once"):
        step(Setup(alg, s), begin(alg, s.net, 5), torch.tensor([1, 1]))


@pytest.mark.parametrize("name", ["fedfomo", "l2c"])
def test_a_client_of_one_sample_does_not_end_the_run(name):
    alone = run(name, images((1, 20, 25)))
    sizes = [alone.data.size(split).tolist() for split in ("train", "val")]
    assert sizes == [[1, 16, 20], [0, 4, 5]]
    assert "clients without val samples: 1" in alone.data.summary()
    assert len(alone.run().rounds) == 3
    with sentence(".*a client with enough samples"):
        run(name, images((1, 1)))


@pytest.mark.parametrize("alg", [Scaffold(option="II"), QFedAvg(q=1.0)])
def test_a_step_size_of_zero_drops_nobody(alg):
    net, data = Net(tiny_model()), images()
    still = Training(lr=0.1, batch_size=8, schedule=lambda r, rounds: float(r != 2))
    for state, done in play(alg, make_setting(net, data, still, rounds=3)):
        assert not done.dropped and not done.void and state.round
    if isinstance(alg, Scaffold):
        s = make_setting(net, data, Training(lr=0.0, batch_size=8))
        two, one = (play(a, s, 1)[0][0].clients["c"] for a in (alg, Scaffold()))
        assert torch.equal(two, one) and one.any()


def test_void_rounds_are_counted_in_a_row():
    """A round that was played ends the count."""

    class Breaks(FedAvg):
        def train(self, down, own, clients):
            own, up, fit = super().train(down, own, clients)
            bad = clients.round in (1, 2, 4)
            return own, {k: v * torch.nan if bad else v for k, v in up.items()}, fit

    assert [state.void for state, _ in play(Breaks(), tiny(batch_size=4), 4)] == [1, 2, 0, 1]


def test_a_void_round_reports_nothing():
    data, training = images(), Training(lr=0.1, batch_size=8)
    data.x[data.index["train"][0]] = 3e38  # its scores overflow
    void = Simulation(Waffle(target=0), nn.Linear(6, 4), data, training, rounds=3)
    with pytest.warns(RuntimeWarning, match="diverged"):
        found = [(r["void"], list(r["report"])) for r in void.run().rounds]
    assert found == [(False, ["weights"]), (True, []), (True, [])]
