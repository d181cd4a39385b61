"""What is called after every round: it may stop a run, and costs nothing where it fails."""

import pytest
from doors import sentence
from parts.user import simulation
from small import images, tiny_model

from pflcore import EarlyStopping, Simulation, Stop, Training


def test_a_callback_that_raises_loses_nothing():
    whole = simulation(rounds=5).run()
    run, seen = simulation(rounds=5), []

    def callback(round, record):
        seen.append(round)
        if round == 3:
            raise KeyError("my own mistake")

    with pytest.raises(KeyError) as e:
        run.run([callback, lambda r, record: None])
    kept = e.value.history
    assert (
        kept is run.history
        and [r["round"] for r in kept.rounds] == [1, 2, 3]
        and "KeyError in round 3" in kept.stopped
    )
    assert kept.model(0) is not None
    rest = run.run()
    assert [r["round"] for r in rest.rounds] == [4, 5] and [
        r["eval"] for r in kept.rounds + rest.rounds
    ] == [r["eval"] for r in whole.rounds]
    with sentence("on_round: expected a function", TypeError):
        run.run(3)


def test_stop_ends_a_run_with_its_sentence():
    def callback(round, record):
        if round == 2:
            raise Stop("That will do.")

    history = simulation(rounds=5).run(callback)
    assert history.stopped == "That will do." and len(history.rounds) == 2


def test_early_stopping():
    stop = EarlyStopping(patience=2, key="accuracy", min_delta=0.1)
    values = iter([0.2, 0.5, 0.55, float("nan")])

    def record(value):
        return {"eval": {"accuracy": [value, None, value], "size": [1, 0, 1]}}

    for round in (1, 2, 4):
        stop(round, record(next(values)))
    stop(5, {"eval": None})
    with pytest.raises(
        Stop, match=r"Stopped early after round 6: accuracy 0\.5 of round 2 stood for 2 evaluations"
    ):
        stop(6, record(next(values)))
    stop(1, record(0.1))  # the next run
    assert stop.best == 0.1 and stop.round == 1
    with sentence("key: expected one of accuracy, got 'auc'"):
        EarlyStopping(key="auc")(1, record(0.3))
    frozen = Simulation("fedavg", tiny_model(), images(), Training(lr=0.0), rounds=20).run(
        EarlyStopping(patience=3)
    )
    assert len(frozen.rounds) == 4 and frozen.stopped is not None
