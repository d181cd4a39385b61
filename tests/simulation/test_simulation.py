"""The loop: records, warm starts, divergence."""

import pytest
import torch
from methods import Waffle
from small import grouped
from torch import nn

import pflcore
from pflcore import Evaluation, Federation, Simulation, Training
from pflcore.data import federation_of


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
        Federation.from_arrays(parts, test=parts),
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
        Federation.from_arrays(parts, test=parts),
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
