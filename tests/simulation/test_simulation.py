"""The loop: records, warm starts, divergence."""

import warnings
from dataclasses import replace

import pytest
import torch
from doors import held_out, views
from methods import (
    MRMTL,
    Ditto,
    Mocha,
    PFedMe,
    QFedAvg,
    Scaffold,
    Waffle,
)
from parts.fine_points import three
from small import grouped, images, lines, make_setting, near, play, tiny_model, with_test
from torch import nn

import pflcore
from pflcore import Adversary, Evaluation, Federation, Net, Simulation, Training, step
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.data import federation_of
from pflcore.simulation.round import Setup, begin


@pytest.fixture(scope="module")
def data():
    return federation_of("digits", "A*", 4, seed=0)


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_record_counts_what_travels(data):
    history = Simulation(
        "fedavg", model, data, Training(lr=0.1), rounds=3, evaluation=Evaluation(every=2)
    ).run()
    size = 650 * 4
    assert (
        [r["bytes_down"] for r in history.rounds]
        == [4 * size] * 3
        == [r["bytes_up"] for r in history.rounds]
    )
    assert [r["round"] for r in history.rounds if r["eval"]] == [2, 3]  # every second, and the last
    rounds, accuracy = history.series()
    assert rounds == [2, 3] and accuracy.shape == (2, 4)


def test_a_run_goes_on_from_a_state_as_if_it_had_not_stopped(data):
    whole = Simulation("waffle", model, data, Training(lr=0.1), rounds=6).run()
    half = Simulation("waffle", model, data, Training(lr=0.1), rounds=6)
    rounds = half.iterate()
    for _ in range(3):
        next(rounds)
    rest = Simulation(
        "waffle", model, data, Training(lr=0.1), rounds=6, warm_start=half.state
    ).run()
    assert [r["round"] for r in rest.rounds] == [4, 5, 6]
    assert torch.equal(rest.state.server["x"], whole.state.server["x"])


@pytest.mark.parametrize("name", ["l2c", "clustered_fl"])
def test_a_server_whose_state_has_grown_is_a_warm_start(data, name):
    algorithm = pflcore.ALGORITHMS[name](
        **({"first": 0, "eps1": 10.0, "eps2": 0.0} if name == "clustered_fl" else {})
    )
    state = (
        Simulation(
            algorithm, model, data, Training(lr=0.1), rounds=1, evaluation=Evaluation(every=0)
        )
        .run()
        .state
    )
    assert (
        len(
            Simulation(
                algorithm,
                model,
                data,
                Training(lr=0.1),
                rounds=2,
                warm_start=state,
                evaluation=Evaluation(every=0),
            )
            .run()
            .rounds
        )
        == 1
    )


def test_divergence_ends_a_run_with_a_sentence_and_the_record_intact(data):
    history = Simulation("fedavg", model, data, Training(lr=1e38), rounds=50).run()
    assert history.stopped and "diverged" in history.stopped and "learning rate" in history.stopped
    assert (
        len(history.rounds) < 50
        and all(r["void"] for r in history.rounds[-3:])
        and history.rounds[-1]["dropped"] == [0, 1, 2, 3]
    )
    assert all(bool(v.isfinite().all()) for v in history.state.server.values())


def test_bad_arguments_are_one_sentence(data):
    for given, word in [
        ({"rounds": 0}, "rounds"),
        ({"participation": 0.0}, "participation"),
        ({"batch_norm": "mean"}, "batch_norm"),
        ({"engine": "gpu"}, "engine"),
        ({"split": "val"}, "split"),
    ]:
        with pytest.raises(ValueError, match=word) as e:
            Simulation("fedavg", model, data, **grouped(given))
        assert str(e.value).count(". ") == 0
    with pytest.raises(ValueError, match="algorithm"):
        Simulation("fedavgg", model, data)
    with pytest.raises(ValueError, match="target"):
        Simulation(Waffle(target=4), model, data)


def test_a_run_of_many_rounds_ends_with_the_last():
    parts = [
        (torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1]))
    ] * 2
    run = Simulation(
        "local",
        nn.Linear(2, 2),
        Federation.from_clients(with_test(parts, parts)),
        rounds=260,
        evaluation=Evaluation(every=0),
    )
    assert len(run.run().rounds) == run.state.round == 260


def test_a_state_that_is_put_back_is_not_changed():
    parts = [
        (torch.randn(6, 2, generator=torch.Generator().manual_seed(i)), torch.tensor([0, 1] * 3))
        for i in range(3)
    ]
    run = Simulation(
        "ditto",
        nn.Linear(2, 2),
        Federation.from_clients(with_test(parts, parts)),
        Training(lr=0.5),
        rounds=3,
    )
    next(rounds := run.iterate())
    first = run.state
    kept = {k: v.clone() for k, v in first.clients.items()}
    next(rounds)
    run.state = first
    next(run.iterate())
    assert all(torch.equal(first.clients[k], v) for k, v in kept.items())


GEN = torch.Generator().manual_seed(0)


PARTS = [(torch.randn(12, 4, generator=GEN), torch.randn(12, generator=GEN)) for _ in range(4)]


def played(scale=1.0, **options):
    parts = [(x * scale if i == 3 else x, y) for i, (x, y) in enumerate(PARTS)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Simulation(
            "fedavg",
            nn.Linear(4, 1),
            Federation.from_clients(with_test(parts, parts)),
            Training(lr=0.01),
            rounds=3,
            **grouped(options),
        ).run()
    return [str(w.message) for w in said if w.category is RuntimeWarning]


def test_a_quiet_run_says_nothing():
    assert played() == []


def test_a_client_that_is_dropped_in_every_round_is_named_once():
    said, *_ = played(1e25)
    assert "client(s) [3] were dropped in most of their rounds" in said and "lower lr" in said


def test_a_loss_of_infinity_is_named():
    parts = [(x, y * (1e30 if i == 2 else 1)) for i, (x, y) in enumerate(PARTS)]
    data = Federation.from_clients(with_test(PARTS, parts))
    with pytest.warns(RuntimeWarning, match=r"the last loss of client\(s\) \[2\] is inf"):
        Simulation("fedavg", nn.Linear(4, 1), data, Training(lr=0.01), rounds=2).run()


def test_a_runaway_update_is_named_once_with_clip():
    (said,) = played(adversary=Adversary("scale", [1], 1e8))
    assert "client 1's update was" in said and "clip" in said
    assert played(adversary=Adversary("scale", [1], 1e3)) == []


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


def test_a_method_with_client_state_warns_where_the_evaluated_never_train():
    some = {"clients": torch.tensor([0, 1]), "evaluation": Evaluation(clients=torch.tensor([1, 2]))}
    with pytest.warns(
        UserWarning, match=r"^ditto keeps a state for each client, and 1 of those who are evaluated"
    ):
        Simulation("ditto", tiny_model(), images(), **some)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Simulation("fedavg", tiny_model(), images(), **some)
        Simulation("ditto", tiny_model(), images())


@pytest.mark.parametrize("name", ["fedfomo", "l2c", "feddwa", "scaffold", "hypcluster"])
def test_the_order_of_a_cohorts_ids_changes_nothing(name):
    data = held_out(images((20, 25, 30, 35, 22)))
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=8), rounds=9)
    alg = ALGORITHMS[name](**({"m": 2} if name == "fedfomo" else {}))
    found = []
    for orders in (
        [[0, 1, 2, 3, 4], [0, 2, 4], [1, 2, 3]],
        [[3, 1, 0, 4, 2], [4, 0, 2], [2, 3, 1]],
    ):
        state = begin(alg, s.net, 5)
        for ids in orders:
            state, done = step(Setup(alg, s), state, torch.tensor(ids))
            assert done.ids == sorted(ids)
        found.append(state.server | state.clients)
    for k in found[0]:
        assert torch.equal(found[0][k], found[1][k]), k
    with pytest.raises(ValueError, match=r"^ids: expected each client once"):
        step(Setup(alg, s), begin(alg, s.net, 5), torch.tensor([1, 1]))


@pytest.mark.parametrize("name", ["fedfomo", "l2c"])
def test_a_client_of_one_sample_does_not_end_the_run(name):
    run = Simulation(
        name, tiny_model(), images((1, 20, 25)), Training(lr=0.1, batch_size=8), rounds=3
    )
    assert run.data.size("train").tolist() == [1, 16, 20] and run.data.size("val").tolist() == [
        0,
        4,
        5,
    ]
    assert "clients without val samples: 1" in run.data.summary()
    assert len(run.run().rounds) == 3


@pytest.mark.parametrize("alg", [Scaffold(option="II"), QFedAvg(q=1.0)])
def test_a_step_size_of_zero_drops_nobody(alg):
    s = make_setting(
        Net(tiny_model()),
        images(),
        Training(lr=0.1, batch_size=8, schedule=lambda r, rounds: float(r != 2)),
        rounds=3,
    )
    state = begin(alg, s.net, 3)
    for _ in range(3):
        state, done = step(Setup(alg, s), state, torch.arange(3))
        assert not done.dropped and not done.void
    if isinstance(alg, Scaffold):
        still = make_setting(s.net, s.data, Training(lr=0.0, batch_size=8))
        two, one = (
            step(Setup(a, still), begin(a, s.net, 3), torch.arange(3))[0].clients["c"]
            for a in (alg, Scaffold())
        )
        assert torch.equal(two, one) and one.any()


def test_void_rounds_are_counted_in_a_row():
    """A round that was played ends the count."""

    class Breaks(FedAvg):
        def train(self, down, own, clients):
            own, up, fit = super().train(down, own, clients)
            return (
                own,
                {k: v * torch.nan if clients.round in (1, 2, 4) else v for k, v in up.items()},
                fit,
            )

    s, _ = three()
    assert [state.void for state, _ in play(Breaks(), s, 4)] == [1, 2, 0, 1]


def test_a_void_round_reports_nothing():
    data = images()
    x = data.x.clone()
    x[data.index["train"][0]] = 3e38  # its scores overflow
    run = Simulation(
        Waffle(target=0),
        lambda: nn.Linear(6, 4),
        replace(data, x=x),
        Training(lr=0.1, batch_size=8),
        rounds=3,
    )
    with pytest.warns(RuntimeWarning, match="diverged"):
        assert [(r["void"], list(r["report"])) for r in run.run().rounds] == [
            (False, ["weights"]),
            (True, []),
            (True, []),
        ]
